"""Writes matplotlib pictures to files in a single step."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_tuning.core.atomic_files import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_picture(figure: "Figure", file: Path, *, dpi: int = 150) -> None:
    """Writes a figure as PNG, replacing an older one; equal figures give equal bytes.

    Raises:
      InputError: if the file cannot be written.
      StorageError: if the disk is full.
    """
    picture = io.BytesIO()
    # The default metadata contains matplotlib's version.
    figure.savefig(picture, format="png", dpi=dpi, metadata={"Software": None})
    write_file(file, picture.getvalue(), force=True)
