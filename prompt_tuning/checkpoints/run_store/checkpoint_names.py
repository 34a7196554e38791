"""Names of the checkpoints in a run directory.

    numpy_checkpoints/
      checkpoint_{step}           complete
      checkpoint_{step}.tmp-...   being written or deleted
      checkpoint_{step}.old       complete; set aside while its replacement is renamed

Whenever the process is killed, the last complete checkpoint is still there, under a
name that identifies it as complete.
"""

import re
import shutil
from pathlib import Path

from prompt_tuning.core.atomic_files import replace_folder, restore_folder
from prompt_tuning.core.file_names import check_links

FOLDER = "numpy_checkpoints"
KEPT = "kept_prompts"


def checkpoint_path(folder: Path, step: int) -> Path:
    """Returns the directory of a step's checkpoint."""
    return folder / f"checkpoint_{step}"


def steps_in(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints in a folder, in ascending order.

    Raises:
      InputError: if a checkpoint is a link out of the folder, or the folder is a link
        out of the run directory.
    """
    if not folder.is_dir():
        return []
    if folder.name in (FOLDER, KEPT):
        check_links(folder.parent, folder.name)
    check_links(folder, "checkpoint_*")
    matches = (
        re.fullmatch(r"checkpoint_(\d+)", path.name) for path in folder.iterdir()
    )
    return sorted(int(match[1]) for match in matches if match)


def holds_checkpoints(run_directory: Path | str) -> bool:
    """Tests whether a run has saved checkpoints before, possibly damaged ones."""
    folder = Path(run_directory) / FOLDER
    return bool(steps_in(folder)) or any(folder.glob("checkpoint_*.old"))


def publish(temporary: Path, final: Path) -> None:
    """Renames a complete checkpoint to its final name and deletes the one it replaces.

    If the process dies in between, `clean_up` restores the old checkpoint.
    """
    aside = final.with_name(f"{final.name}.old")
    replace_folder(temporary, final, aside=aside)
    if aside.exists():
        shutil.rmtree(aside)


def delete(directory: Path) -> None:
    """Deletes a checkpoint so that a kill never leaves half of it under its name."""
    doomed = directory.with_name(f"{directory.name}.tmp-deleted")
    directory.rename(doomed)
    shutil.rmtree(doomed)


def clean_up(folder: Path) -> None:
    """Cleans up after a save or a deletion that was killed."""
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if re.fullmatch(r"checkpoint_\d+\.old", path.name):
            restore_folder(path, path.with_suffix(""))
            if path.exists():
                shutil.rmtree(path)
        elif re.fullmatch(r"checkpoint_\d+\.tmp-.*", path.name):
            shutil.rmtree(path)
