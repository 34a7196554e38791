"""Checkpoints, and how they come to their names.

Names in `numpy_checkpoints/`:

    checkpoint_{step}           complete
    checkpoint_{step}.tmp-…     being written, or being deleted
    checkpoint_{step}.old       complete; put aside while its successor takes its name

A kill at any moment leaves the last complete one by a name that says so.
"""

import re
import shutil
from pathlib import Path

from prompt_tuning.core.fsync import sync_path


def put_in_place(temporary: Path, final: Path) -> None:
    """Renames a complete directory to its final name, over an older one if there is.

    A directory cannot be renamed over another, so the older one steps aside first;
    `mend` puts it back if the process dies before the second rename.
    """
    aside = final.with_name(f"{final.name}.old")
    if final.exists():
        final.rename(aside)
    temporary.rename(final)
    sync_path(final.parent)
    if aside.exists():
        shutil.rmtree(aside)


def mend(folder: Path) -> None:
    """Undoes what a killed save or deletion left."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if re.fullmatch(r"checkpoint_\d+\.old", path.name):
            final = path.with_suffix("")
            if final.exists():
                shutil.rmtree(path)
            else:
                path.rename(final)
                sync_path(folder)
        elif re.fullmatch(r"checkpoint_\d+\.tmp-.*", path.name):
            shutil.rmtree(path)


def delete(directory: Path) -> None:
    """Deletes a checkpoint; a kill in the middle leaves no half of one."""
    doomed = directory.with_name(f"{directory.name}.tmp-deleted")
    directory.rename(doomed)
    shutil.rmtree(doomed)
