"""Tell where a run stored its trained parameters, and how large they are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER, steps_in
from prompt_tuning.checkpoints.run_store.checkpoint_selection import best_step
from prompt_tuning.config.run import Run
from prompt_tuning.decoding.prompt_prefixes import is_added


def where_trained(run: Run, trained: Mapping[str, Any]) -> str:
    """Returns a line with the checkpoint that evaluation and generation use."""
    folder = Path(run.directory) / FOLDER
    # The digests of large files are not compared with the files again.
    step = best_step(folder, run.best_by, lambda _: None, checkpoint_files.read_state)
    step = max(steps_in(folder)) if step is None else step
    count = sum(leaf.size for leaf in trained.values())
    stored = sum(leaf.nbytes for leaf in trained.values())
    what = "adapter" if all(map(is_added, trained)) else "trained parameters"
    return (
        f"{what}: {folder / f'checkpoint_{step}'} ({count:,} parameters, "
        f"{readable_size(stored)})"
    )


def readable_size(size: int) -> str:
    """Returns a number of bytes with its unit."""
    value, units = float(size), ("bytes", "kB", "MB", "GB", "TB")
    for unit in units:
        if value < 1000 or unit == units[-1]:
            break
        value /= 1000
    return f"{value:.3g} {unit}"
