"""JSON files with a checksum."""

import hashlib
import json
from pathlib import Path
from typing import Any

from prompt_tuning.core.atomic_files import sync_file
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import read_object


def sealed(content: dict[str, Any]) -> str:
    """Returns JSON text that includes a checksum of its content.

    Raises:
      InputError: if the content is not JSON.
    """
    try:
        # Normalize as reading does: string keys, and lists instead of tuples.
        content = json.loads(json.dumps(content, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InputError(
            f"the state of a run must be finite JSON, but: {error}"
        ) from error
    return json.dumps(content | {"checksum": _checksum(content)}, indent=1) + "\n"


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """Writes JSON with a checksum, and syncs the file."""
    with path.open("w") as file:
        file.write(sealed(content))
        sync_file(file)


def read_sealed(path: Path) -> dict[str, Any]:
    """Reads JSON with a checksum, and verifies it.

    Raises:
      InputError: if it is missing or damaged.
    """
    if not path.is_file():
        raise InputError(f"{path} is missing: the checkpoint is incomplete")
    try:
        state = dict(read_object(path).values)
    except InputError as error:
        raise InputError(f"the checkpoint is damaged: {error}") from error
    if "checksum" not in state:
        raise InputError(f"{path} is not the state of a checkpoint: it has no checksum")
    expected = state.pop("checksum")
    try:
        actual = _checksum(state)
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from error
    if actual != expected:
        raise InputError(
            f"{path} is damaged: its content has SHA-256 {actual}, expected "
            f"{shown(expected)}"
        )
    return state


def _checksum(state: dict[str, Any]) -> str:
    """Returns the SHA-256 of the canonical JSON, independent of white space."""
    canonical = json.dumps(state, sort_keys=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def measured(path: Path) -> dict[str, Any]:
    """Returns size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": path.stat().st_size, "sha256": digest}
