"""Record what a run was made from: checksums of its files, versions, and the machine.

This is `provenance.json` in the run directory; `verify` reads it to tell whether the
run can be reproduced. The frozen model's fingerprint is in `run.json`.
"""

import functools
import glob
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from prompt_tuning import processes
from prompt_tuning.config.config_values import (
    CONFIG_FILE,
    config_values,
    literal,
    resolved,
)
from prompt_tuning.config.gin_sources import MAXIMUM_BYTES
from prompt_tuning.config.recorded_paths import DIRECTORY, FILES, RecordedPaths
from prompt_tuning.config.run import Run
from prompt_tuning.core.atomic_files import replace_file
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import JsonObject, read_limited, read_object
from prompt_tuning.core.version import __version__
from prompt_tuning.pretrained.checkpoint_path import find_checkpoint

PROVENANCE_FILE = "provenance.json"
CONFIG, FILES_READ, MEMBERS, PARTS = "config", "files", "members", "parts"
"""Fields of the file; the last one has an entry for each machine and version."""
STEP = "from_step"
PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "tokenizers")
"""Other packages that may change what a run computes."""
LARGEST_HASHED = 2**30
"""Size in bytes of a data file or a model above which no checksum is computed."""
SMALL = 2**24
"""Maximum size in bytes of files that get a checksum even in large models."""
MODEL_SUFFIXES = (".safetensors", ".gguf", ".json", ".jinja", ".model", ".txt")
"""Suffixes of a model's files that are read."""


def record_provenance(run: Run, step: int, members: int) -> None:
    """Records what a run is made from, as it starts or resumes.

    What completed steps were made with is kept, including checksums of files that have
    changed since.
    """
    directory = Path(run.directory)
    file = directory / PROVENANCE_FILE
    parts, checksums = [], _checksums(run)
    if step and file.is_file():
        parts = made_with(directory)
        recorded = read_object(file).nested(FILES_READ).values
        files = checksums[FILES_READ]
        checksums[FILES_READ] = {
            name: recorded.get(name, x) for name, x in files.items()
        }
    machine = this_machine()
    if step < run.steps and (not parts or _without_step(parts[-1]) != machine):
        parts.append({STEP: step, **machine})
    content = {**checksums, MEMBERS: members, PARTS: parts}
    replace_file(file, json.dumps(content, indent=1) + "\n")


def made_with(directory: Path) -> list[dict[str, Any]]:
    """Returns the versions and machines that made a run, in order; empty if unknown."""
    file = directory / PROVENANCE_FILE
    if not file.is_file():
        return []
    parts = read_object(file).sequence(PARTS, [])
    return [x for x in parts if isinstance(x, dict)]


def check_provenance(run: Run) -> list[str]:
    """Checks that a run can be reproduced from the same config and files.

    Returns:
      sentences about versions and machines that differ from the record.

    Raises:
      InputError: with what differs or is missing.
    """
    directory = Path(run.directory)
    file = directory / PROVENANCE_FILE
    if not file.is_file():
        raise InputError(
            f"{directory} has no {PROVENANCE_FILE}, because a version before 0.2.0 "
            "made the run: train it again, and verify the new run"
        )
    recorded = read_object(file)
    members = recorded.integer(MEMBERS)
    if members > 1:
        raise InputError(
            f"{directory} was trained in a sweep of {members} members, whose "
            "arithmetic is joint, so it cannot be made again alone"
        )
    _check_checksums(run, recorded)
    machine, differing = this_machine(), []
    for part in made_with(directory):
        for name in (*machine, *(name for name in part if name not in machine)):
            old, now = part.get(name), machine.get(name)
            if name != STEP and old != now:
                differing.append(f"{name} is {shown(now)} and was {shown(old)}")
    return list(dict.fromkeys(differing))


def _check_checksums(run: Run, recorded: JsonObject) -> None:
    """Checks that the config and files of a run are unchanged."""
    now = _checksums(run)
    if now[CONFIG] != recorded.text(CONFIG):
        raise InputError(
            f"{Path(run.directory) / CONFIG_FILE} has changed since the run: its "
            f"SHA-256 is {now[CONFIG]}, and the run recorded "
            f"{shown(recorded.text(CONFIG))}. Restore it"
        )
    files = recorded.nested(FILES_READ).values
    for name in dict.fromkeys([*files, *now[FILES_READ]]):
        found, expected = now[FILES_READ].get(name), files.get(name)
        if found != expected:
            raise InputError(
                f"the file {shown(name)} has changed since the run: its SHA-256 is "
                f"{shown(found)}, and the run recorded {shown(expected)}. Restore it"
            )


def this_machine() -> dict[str, Any]:
    """Returns the versions and devices that a run's numbers may depend on."""
    device = jax.devices()[0]
    return {
        "prompt_tuning": __version__,
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "device": f"{device.platform} {device.device_kind}".strip(),
        "devices": jax.device_count(),
        "processes": processes.count(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }


def _processor() -> str:
    """Returns the name of the processor, if the system tells it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    names = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _without_step(part: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != STEP}


def _checksums(run: Run) -> dict[str, Any]:
    """Returns the SHA-256 of a run's config and, by path, of the files it reads."""
    directory = Path(run.directory)
    content = read_limited(directory / CONFIG_FILE, MAXIMUM_BYTES)
    scopes = data_checksums(directory, content.decode(errors="replace"))
    files = {
        name: text for by_path in scopes.values() for name, text in by_path.items()
    }
    return {
        CONFIG: hashlib.sha256(content).hexdigest(),
        FILES_READ: files | _model_checksums(run),
    }


def _model_checksums(run: Run) -> dict[str, str]:
    """Returns the SHA-256 of the files of a run's frozen model and its tokenizer."""
    result, paths = {}, {"model": find_checkpoint(run.model.checkpoint)}
    if run.model.tokenizer is not None and Path(run.model.tokenizer).exists():
        paths["tokenizer"] = Path(run.model.tokenizer)
    for part, path in paths.items():
        inside = sorted(path.iterdir()) if path.is_dir() else [path]
        files = [x for x in inside if x.is_file() and x.suffix in MODEL_SUFFIXES]
        total = sum(file.stat().st_size for file in files)
        limit = LARGEST_HASHED if total <= LARGEST_HASHED else SMALL
        result |= {f"{part}: {file.name}": _checksum(file, limit) for file in files}
    return result


def data_checksums(directory: Path, config: str) -> dict[str, dict[str, str]]:
    """Returns the SHA-256 of the data files in a config, by scope and path.

    A scope is e.g. "train". A file without a checksum has the reason instead.
    """
    values = config_values(config)
    recorded = literal(resolved(values, DIRECTORY), "")
    given = {
        name.rpartition("/")[0]: literal(resolved(values, name), [])
        for name in values
        if name.rpartition("/")[2] == FILES
    }
    paths = RecordedPaths.read(directory, config, recorded)
    return {
        scope: dict(_by_path(paths, [names] if isinstance(names, str) else names))
        for scope, names in given.items()
    }


def _by_path(paths: RecordedPaths, names: list[str]) -> Iterator[tuple[str, str]]:
    """Yields each file that the names stand for, with its checksum."""
    for name in names:
        located = paths.locate(name)
        if glob.has_magic(located):
            inside = map(Path, sorted(glob.glob(located)))  # noqa: PTH207
        elif Path(located).is_dir():
            inside = sorted(x for x in Path(located).iterdir() if x.is_file())
        else:
            yield name, _checksum(Path(located))
            continue
        for file in inside:
            yield f"{name}: {file.name}", _checksum(file)


def _checksum(file: Path, limit: int = LARGEST_HASHED) -> str:
    """Returns the SHA-256 of a file, or the reason why there is none."""
    if not file.is_file():
        return "not found"
    state = file.stat()
    if state.st_size > limit:
        return f"too large for a checksum: {state.st_size:,} bytes"
    return _digest(file, state.st_ino, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _digest(file: Path, *state: int) -> str:
    """Returns the SHA-256 of a file, cached for the members of a sweep.

    `state` tells whether the file has changed since.
    """
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
