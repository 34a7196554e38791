"""Files brought to the disk, so that they outlast a machine that stops."""

import os
from pathlib import Path
from typing import IO


def sync(file: IO) -> None:
    """Brings an open file's content to the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Brings a closed file's content, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
