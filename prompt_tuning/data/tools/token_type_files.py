"""`token_type_ids` for HDF5 files that have none, or other ones.

A file is replaced only by a copy that was read back and compared: at any moment what
stands under its name is the old file or the new one, whole.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from jaxtyping import Int64, Integer

from prompt_tuning.core.atomic_files import sync_path
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import COMPLETION, SEPARATOR
from prompt_tuning.data.rows.hdf5_table import INPUT_IDS, TOKEN_TYPE_IDS
from prompt_tuning.data.rows.row_sources import ROWS_PER_BLOCK, Files, list_files
from prompt_tuning.data.tools.type_rules import TypeRule

TYPES = 4


class Typed(NamedTuple):
    """What a file came to.

    Attributes:
      path: the file.
      rows: how many it has.
      counts: its tokens of each type, `[4]`.
      unlearned: its rows without a token of type 1 or 3, which cannot be trained on.
    """

    path: Path
    rows: int
    counts: Int64[np.ndarray, "4"]
    unlearned: int


def add_token_types(
    files: Files, rule: TypeRule, *, replace: bool = False
) -> list[Typed]:
    """Adds `token_type_ids` to HDF5 files, in place.

    Every file is checked before the first is touched.

    Args:
      files: one or several; rows are counted through all of them.
      rule: says the types.
      replace: whether types that a file has already are replaced.

    Raises:
      InputError: if a file cannot be used, has types already, or the rule does not
        apply to a row; that file and those after it are as they were.
    """
    paths = [path.resolve() for path in list_files(files)]
    if len(set(paths)) < len(paths):
        raise InputError(f"a file is named twice: {', '.join(map(str, paths))}")
    rows = [_check(path, replace) for path in paths]
    if rule.rows is not None and rule.rows != sum(rows):
        raise InputError(
            f"the rule is for {rule.rows} rows, and {', '.join(map(str, paths))} "
            f"{'has' if len(paths) == 1 else 'have together'} {sum(rows)}: expected "
            "one entry for each row"
        )
    starts = np.cumsum([0, *rows[:-1]]).tolist()
    for path, start in zip(paths, starts, strict=True):
        _survey(path, rule, start)
    return [
        _retype(path, rule, start) for path, start in zip(paths, starts, strict=True)
    ]


def _check(path: Path, replace: bool) -> int:
    """How many rows a file has.

    Raises:
      InputError: if it cannot be given types.
    """
    with _opened(path) as file:
        ids = file.get(INPUT_IDS)
        if not isinstance(ids, h5py.Dataset):
            raise InputError(
                f"{path} has the data sets {sorted(file)}, expected {INPUT_IDS!r}"
            )
        if len(ids.shape or ()) != 2 or 0 in ids.shape or ids.dtype.kind not in "iu":
            raise InputError(
                f"{path}: {INPUT_IDS} has shape {ids.shape} and type {ids.dtype}, "
                "expected integers [rows, length], both at least 1"
            )
        if TOKEN_TYPE_IDS in file and not replace:
            raise InputError(
                f"{path} has {TOKEN_TYPE_IDS} already; --replace puts others in their "
                "place"
            )
        return len(ids)


def _opened(path: Path) -> h5py.File:
    try:
        return h5py.File(path, "r")
    except OSError as error:
        raise InputError(
            f"{path} cannot be opened as HDF5 (is it cut off, or of another kind?): "
            f"{error}"
        ) from error


def _survey(path: Path, rule: TypeRule, start: int) -> None:
    """Applies the rule to every row, and keeps nothing of it.

    Raises:
      InputError: if it does not apply to one.
    """
    with _opened(path) as file:
        for at, ids in _blocks(path, file):
            _types(path, rule, start, at, ids)


def _blocks(
    path: Path, file: h5py.File
) -> Iterator[tuple[int, Integer[np.ndarray, "c n"]]]:
    """The rows of a file, many at a time, and the number of the first."""
    ids = file[INPUT_IDS]
    assert isinstance(ids, h5py.Dataset)
    for at in range(0, len(ids), ROWS_PER_BLOCK):
        try:
            block = ids[at : at + ROWS_PER_BLOCK]
        except OSError as error:
            raise InputError(
                f"{path}, rows from {at}, cannot be read: {error}; the file is "
                "damaged, write it again"
            ) from error
        yield at, block


def _types(
    path: Path, rule: TypeRule, start: int, at: int, ids: np.ndarray
) -> Integer[np.ndarray, "c n"]:
    try:
        return rule(ids, start + at)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _retype(path: Path, rule: TypeRule, start: int) -> Typed:
    """Replaces a file by a copy that has the rule's types."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _opened(path) as old:
            with h5py.File(temporary, "w") as new:
                _copy(path, old, new, rule, start)
            typed = _verify(path, old, temporary, rule, start)
        shutil.copymode(path, temporary)
        sync_path(temporary)
        temporary.replace(path)
        sync_path(path.parent)
    except OSError as error:
        raise InputError(
            f"{path}: the copy with types cannot be written beside it ({error}); the "
            "file is as it was"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return typed


def _copy(
    path: Path, old: h5py.File, new: h5py.File, rule: TypeRule, start: int
) -> None:
    """Copies everything but old types, and writes new ones."""
    for name, value in old.attrs.items():
        new.attrs[name] = value
    for name in old:
        if name != TOKEN_TYPE_IDS:
            old.copy(name, new)
    ids = old[INPUT_IDS]
    assert isinstance(ids, h5py.Dataset)
    target = new.create_dataset(
        TOKEN_TYPE_IDS,
        shape=ids.shape,
        dtype="i4",
        compression="gzip",
        chunks=ids.chunks or True,
        maxshape=(None, ids.shape[1]),
    )
    for at, block in _blocks(path, old):
        target[at : at + len(block)] = _types(path, rule, start, at, block)


def _verify(
    path: Path, old: h5py.File, temporary: Path, rule: TypeRule, start: int
) -> Typed:
    """Reads the copy back and compares it with the file and the rule.

    Raises:
      InputError: if something in it is not as it should be.
    """
    counts, unlearned, rows = np.zeros(TYPES, np.int64), 0, 0
    with _opened(temporary) as new:
        kept = {str(name) for name in old if name != TOKEN_TYPE_IDS}
        if set(new) != {*kept, TOKEN_TYPE_IDS}:
            raise _not_equal(path, f"it has the data sets {sorted(new)}")
        _check_attributes(path, old, new)
        for name in sorted(kept):
            _check_kept(path, old[name], new[name])
        found = new[TOKEN_TYPE_IDS]
        assert isinstance(found, h5py.Dataset)
        for at, ids in _blocks(path, old):
            types = found[at : at + len(ids)]
            if not np.array_equal(types, _types(path, rule, start, at, ids)):
                raise _not_equal(path, f"types of rows from {at} differ")
            counts += np.bincount(types.ravel(), minlength=TYPES)
            learned = np.isin(types, (COMPLETION, SEPARATOR)).any(axis=1)
            unlearned += int(np.count_nonzero(~learned))
            rows += len(ids)
    return Typed(path, rows, counts, unlearned)


def _check_kept(path: Path, old: Any, new: Any) -> None:
    """Compares a data set, or a group and all that is in it, with its copy.

    Raises:
      InputError: if they differ.
    """
    _check_attributes(path, old, new)
    if isinstance(old, h5py.Group):
        names: list[str] = []
        copied: list[str] = []
        old.visit(names.append)
        new.visit(copied.append)
        if names != copied:
            raise _not_equal(path, f"{old.name} holds {copied}, expected {names}")
        for name in names:
            if isinstance(old[name], h5py.Dataset):
                _check_values(path, old[name], new[name])
            _check_attributes(path, old[name], new[name])
    elif isinstance(old, h5py.Dataset):
        _check_values(path, old, new)


def _check_values(path: Path, old: Any, new: Any) -> None:
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        raise _not_equal(path, f"{old.name} has shape {new.shape}, type {new.dtype}")
    whole = not old.shape
    for at in range(0, 1 if whole else len(old), ROWS_PER_BLOCK):
        part = () if whole else slice(at, at + ROWS_PER_BLOCK)
        if not _same(old[part], new[part]):
            raise _not_equal(path, f"{old.name} differs in rows from {at}")


def _check_attributes(path: Path, old: Any, new: Any) -> None:
    if set(old.attrs) != set(new.attrs):
        raise _not_equal(path, f"{old.name} has the attributes {sorted(new.attrs)}")
    for name, value in old.attrs.items():
        if not _same(value, new.attrs[name]):
            raise _not_equal(path, f"the attribute {name} of {old.name} differs")


def _same(old: Any, new: Any) -> bool:
    """Whether two values read from HDF5 are equal bit for bit, so NaN is NaN."""
    if isinstance(old, (h5py.Reference, h5py.RegionReference)):
        return True  # An address within its own file.
    if isinstance(old, h5py.Empty):
        return isinstance(new, h5py.Empty) and old.dtype == new.dtype
    first, second = np.asarray(old), np.asarray(new)
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    if first.dtype.names is not None:
        return all(_same(first[name], second[name]) for name in first.dtype.names)
    if not first.dtype.hasobject:
        return first.tobytes() == second.tobytes()
    if not first.ndim:
        return first.item() == second.item()
    return all(map(_same, first.flat, second.flat))


def _not_equal(path: Path, what: str) -> InputError:
    return InputError(
        f"{path}: the copy that was written beside it is not right ({what}); is the "
        "disk full or failing? The file is as it was"
    )


def read_array(file: str | Path, axes: Sequence[str]) -> Integer[np.ndarray, "..."]:
    """Reads integers from a NumPy file.

    Args:
      file: a `.npy` file.
      axes: what they are called, for messages; as many as the array must have.

    Raises:
      InputError: if it holds something else.
    """
    try:
        found = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{file} cannot be read as a .npy file: {error}") from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu":
        kind = getattr(found, "dtype", type(found).__name__)
        raise InputError(f"{file} holds {kind}, expected an array of integers")
    if found.ndim != len(axes):
        raise InputError(
            f"{file} holds an array of shape {found.shape}, expected "
            f"[{', '.join(axes)}]"
        )
    return found
