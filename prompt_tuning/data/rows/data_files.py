"""The files of a data set: names, globs, folders, and folders that `prepare` wrote."""

import glob
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.rows.compressed_files import (
    COMPRESSIONS,
    compression_of,
    content_suffix,
)

HDF5_SUFFIXES = (".hdf5", ".h5")
LINE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")
"""Suffixes of files of text, to which that of a compression may be added."""

TEXT_SUFFIXES = (*LINE_SUFFIXES, ".parquet")
EXPECTED = (
    f"{', '.join(TEXT_SUFFIXES)} ({' or '.join(COMPRESSIONS)} may follow all but the "
    "last)"
)
"""The suffixes of files of text, for messages."""

SPLITS = ("train", "dev", "test")
PREPARED_FILE = "metadata.yaml"
"""File of a folder that `prepare` wrote."""
_SHARD = re.compile(r"(train|dev|test)_([0-9]{1,9})_of_([0-9]{1,9})\.hdf5")
SPLIT_NAMES = {
    **{name: "train" for name in ("train", "training")},
    **{name: "dev" for name in ("dev", "valid", "validation", "val", "eval")},
    "test": "test",
}

Files = str | Path | Sequence[str | Path]


def list_files(files: Files, split: str | None = "train") -> list[Path]:
    """Returns the files that names, globs and folders stand for, in order.

    A folder that `prepare` wrote stands for the files of one split, or of all if
    `split` is None, in the order of their numbers; another folder for all its data
    files, which must be of one kind; a glob for the files that match it. The files of
    the last two are sorted by name. There must be a file, and a glob or folder adds
    none twice.
    """
    several = [files] if isinstance(files, str | Path) else list(files)
    if not several:
        raise InputError("data files: the list is empty, expected at least one file")
    paths: list[Path] = []
    matched: set[Path] = set()
    for name in several:
        expanded = _expand(Path(name), split)
        # A list may name a file twice, but no glob or folder adds one to it unseen.
        if expanded != [Path(name)]:
            matched.update(expanded)
        repeated = matched.intersection(expanded, paths)
        if repeated:
            raise InputError(
                f"data files {shown(str(name))}: {min(repeated)} is named before, so "
                "its rows would be read twice"
            )
        paths += expanded
    return paths


def contains_text(files: Files) -> bool:
    """Tests whether data files contain text, or else HDF5 rows of token ids.

    They must all be of one kind.
    """
    paths = list_files(files, None)
    kinds = {_kind(path) for path in paths}
    if len(kinds) != 1 or None in kinds:
        raise InputError(
            f"data files {shown([str(path) for path in paths])}: expected all of one "
            f"kind: {EXPECTED}, {', '.join(HDF5_SUFFIXES)}; "
            "`prompt-tuning prepare` converts other text"
        )
    return kinds != {"hdf5"}


def _kind(path: Path) -> str | None:
    if path.suffix.lower() in HDF5_SUFFIXES:
        return "hdf5"
    # A file and its compressed copy are of two kinds, so that neither is read twice.
    suffix = text_suffix(path)
    return None if suffix is None else f"{suffix}{compression_of(path) or ''}"


def text_suffix(path: Path) -> str | None:
    """Returns the suffix of a text file's content; None for another file."""
    suffix = content_suffix(path)
    known = TEXT_SUFFIXES if compression_of(path) is None else LINE_SUFFIXES
    return suffix if suffix in known else None


def _expand(path: Path, split: str | None) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        if not (path / PREPARED_FILE).is_file():
            return _folder_files(path)
        if split is None:
            splits = sorted({match[1] for match in _shards(path).values()})
            return [file for name in splits for file in _prepared_files(path, name)]
        return _prepared_files(path, split)
    pattern = str(path)
    if not glob.has_magic(pattern):
        raise InputError(f"data file {path} not found")
    # `Path.glob` accepts no absolute patterns.
    matches = map(Path, sorted(glob.glob(pattern, recursive=True)))  # noqa: PTH207
    files = [match for match in matches if match.is_file()]
    if not files:
        raise InputError(f"data files {shown(pattern)}: no file matches this pattern")
    return files


def _folder_files(folder: Path) -> list[Path]:
    by_kind: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(folder.iterdir()):
        kind = _kind(path)
        if kind is not None and path.is_file() and not path.name.startswith("."):
            by_kind[kind].append(path)
    if len(by_kind) != 1:
        state = "files of several kinds" if by_kind else "no data file"
        raise InputError(
            f"data folder {folder} contains {state} ({', '.join(by_kind) or 'none'}), "
            f"expected files of one kind: {EXPECTED} or .hdf5; name the files, for "
            f"example '{folder}/*.jsonl'"
        )
    (files,) = by_kind.values()
    splits = {_split_of(path) for path in files}
    if len(splits) > 1:
        raise InputError(
            f"data folder {folder} contains files of several splits "
            f"({shown([path.name for path in files])}): name the files of one of them"
        )
    return files


def _split_of(path: Path) -> str | None:
    """Returns the split that a file's name begins with, if it does."""
    first = re.split(r"[^a-z]", path.stem.lower(), maxsplit=1)[0]
    return SPLIT_NAMES.get(first)


def _shards(folder: Path) -> dict[Path, re.Match[str]]:
    matches = {path: _SHARD.fullmatch(path.name) for path in folder.iterdir()}
    return {path: match for path, match in matches.items() if match is not None}


def _prepared_files(folder: Path, split: str) -> list[Path]:
    """Returns the files of one split of a folder that `prepare` wrote."""
    matches = _shards(folder)
    present = {match[1] for match in matches.values()}
    of_split = {path: match for path, match in matches.items() if match[1] == split}
    shards = {int(match[2]): path for path, match in of_split.items()}
    counts = {int(match[3]) for match in of_split.values()}
    if not shards:
        names = ", ".join(name for name in SPLITS if name in present) or "none"
        raise InputError(
            f"data folder {folder} has no {split}_*.hdf5, expected the {split} split "
            f"of a folder that prompt-tuning prepare wrote; it has {names}. Prepare "
            f"it with --{split} SHARE, name the files, or choose another split, for "
            f"example by {how_to_set('evaluation/DataSource.split', 'test')}"
        )
    count = max(counts)
    if len(counts) > 1 or sorted(shards) != list(range(1, count + 1)):
        raise InputError(
            f"data folder {folder} has {len(shards)} of the {count} files "
            f"{split}_*_of_{count}.hdf5, expected all of them: prepare it again"
        )
    return [shards[number] for number in sorted(shards)]
