"""Every state in which a killed process or a power cut can leave a folder.

`recorded` runs a command once and records its calls to the file system in order. The
process can end between any two of them: those are the states of `killed_states`. After
a power cut, what was not synced may be missing (`power_cut_states`):

- data: a file has the content of its last fsync, or is empty if there was none;
- names: any subset of the creations, renames and deletions that no fsync of their
  directory followed may have been lost, whatever their order.

An audit hook records Python's calls. Changes by libraries in other languages between
two calls are detected by comparing the folder, also with a half-written file.
"""

import contextlib
import dataclasses
import itertools
import os
import re
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prompt_tuning.core import atomic_files

Tree = dict[str, bytes | None]
"""Relative paths with the content of files; None for folders."""

ENDED = str(2**22)
"""Number without a process: Linux's largest process number is one less."""

ALL_SUBSETS = 4
"""Number of unsynced names up to which every subset of them is a state."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A change of the folder.

    Attributes:
      kind: "file" or "folder" (creation), "write", "rename", "exchange", "remove", or
        "sync".
      path: relative path; empty for the folder itself.
      target: second path of a rename or exchange; content of a write.
    """

    kind: str
    path: str
    target: Any = None


class _Recorder:
    """Changes of a folder, in order."""

    def __init__(self, root: Path, ignored: tuple[str, ...]):
        self.root, self.ignored = root, ignored
        self.tree = read_tree(root, ignored)
        self.before = dict(self.tree)
        self.changes: list[Change] = []
        self.lock = threading.RLock()
        self._watching = False

    def seen(self, kind: str, *paths: str) -> None:
        """Records a call that is about to be made, after what was changed before."""
        if any(self._relative(path) is None for path in paths):
            return
        with self.lock:
            self._observe()
            if kind != "open":
                self.add(kind, *paths)

    def add(self, kind: str, *paths: str) -> None:
        """Records a call that was just made."""
        names = [name for path in paths if (name := self._relative(path)) is not None]
        if len(names) == len(paths) and self._applies(kind, *names):
            self._add(Change(kind, *names))

    def finish(self) -> None:
        """Records what was changed after the last call."""
        with self.lock:
            self._observe()

    def _observe(self) -> None:
        self._watching = True
        try:
            tree = read_tree(self.root, self.ignored)
        finally:
            self._watching = False
        for path in sorted(self.tree.keys() - tree.keys(), reverse=True):
            self._add(Change("remove", path))
        for path in sorted(tree):
            content = tree[path]
            if path not in self.tree:
                self._add(Change("folder" if content is None else "file", path))
            if content is not None and content != self.tree[path]:
                self._add(Change("write", path, content))

    def _add(self, change: Change) -> None:
        self.changes.append(change)
        apply(self.tree, change)

    def _applies(self, kind: str, path: str, target: str = "") -> bool:
        if not path:
            return kind == "sync"
        if kind == "folder":
            return path not in self.tree
        if path not in self.tree:
            return False
        if kind == "remove":
            return not any(name.startswith(f"{path}/") for name in self.tree)
        return kind != "exchange" or target in self.tree

    def _relative(self, path: str) -> str | None:
        if not Path(path).is_relative_to(self.root):
            return None
        name = Path(path).relative_to(self.root).as_posix()
        ignored = any(part in self.ignored for part in Path(name).parts)
        return None if ignored else "" if name == "." else name

    def audited(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Receives an audit event of Python."""
        if self._watching or event not in _CALLS:
            return
        kind, count = _CALLS[event]
        folders = arguments[-count:] if kind != "open" else (-1,)
        paths = [
            _full_path(path, folder)
            for path, folder in zip(arguments[:count], folders, strict=True)
        ]
        self.seen(kind, *paths)


_CALLS = {
    # Kind of change, and number of paths, after which come as many open folders.
    "open": ("open", 1),
    "os.truncate": ("open", 1),
    "os.mkdir": ("folder", 1),
    "os.rename": ("rename", 2),
    "os.remove": ("remove", 1),
    "os.rmdir": ("remove", 1),
}
_recorder: _Recorder | None = None
_hooked = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _recorder is not None:
        _recorder.audited(event, arguments)


def _full_path(path: Any, folder: int) -> str:
    if not isinstance(path, str | bytes | os.PathLike):  # an open file
        return "/"
    path = os.fsdecode(path)
    if folder != -1:
        path = str(_path_of(folder) / path)
    return os.path.abspath(path)  # noqa: PTH100


def _path_of(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}").readlink()


@contextlib.contextmanager
def recording(root: Path, ignored: tuple[str, ...] = ()) -> Iterator[_Recorder]:
    """Records the changes of a folder."""
    global _recorder, _hooked
    if not _hooked:
        sys.addaudithook(_audit)  # stays until the process ends
        _hooked = True
    recorder = _Recorder(root.resolve(), ignored)
    sync, exchange = os.fsync, atomic_files.exchange

    def synced(descriptor: Any) -> None:
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        sync(descriptor)
        recorder.seen("sync", str(_path_of(number)))

    def exchanged(one: Path, other: Path) -> bool:
        paths = (str(one.absolute()), str(other.absolute()))
        recorder.seen("open", *paths)
        with recorder.lock:
            if exchange(one, other):
                recorder.add("exchange", *paths)
                return True
        return False

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "fsync", synced)
        patched.setattr(atomic_files, "exchange", exchanged)
        _recorder = recorder
        try:
            yield recorder
        finally:
            _recorder = None
    recorder.finish()


@dataclasses.dataclass(frozen=True)
class Recording:
    """Changes of a folder by a command.

    Attributes:
      before: the folder before the command.
      changes: changes in order.
    """

    before: Tree
    changes: tuple[Change, ...]

    def killed_states(self) -> list[Tree]:
        """Returns the folder before and after each change, each state once."""
        tree, states = dict(self.before), [dict(self.before)]
        for change in self.changes:
            if change.kind == "write":
                states.append(tree | {change.path: _half(tree, change)})
            apply(tree, change)
            states.append(dict(tree))
        return _distinct(states)

    def power_cut_states(self) -> list[Tree]:
        """Returns what may be on the disk after a power cut, each state once."""
        states = []
        for end in range(len(self.changes) + 1):
            changes = self.changes[:end]
            on_disk = _synced_names(changes)
            lost = [
                number
                for number, change in enumerate(changes)
                if number not in on_disk and change.kind not in ("write", "sync")
            ]
            for chosen in _subsets(lost):
                for keeps_data in (False, True):
                    names = on_disk | set(chosen)
                    states.append(self._after_cut(changes, names, keeps_data))
        return _distinct(states)

    def _after_cut(
        self, changes: tuple[Change, ...], names: set[int], keeps_data: bool
    ) -> Tree:
        """Returns the folder with some of the names, and with or without lost data."""
        contents = _contents(self.before, changes)
        # Files are followed by the number of their creation.
        files: dict[str, Any] = _numbered(self.before)
        for number, change in enumerate(changes):
            if number in names and change.kind == "file":
                if not _parent(change.path) or _parent(change.path) in files:
                    files[change.path] = number
            elif number in names:
                apply(files, change)
        return {
            path: None if number is None else contents[number][not keeps_data]
            for path, number in files.items()
        }

    def written(
        self, root: Path, *, same_path: bool = False
    ) -> Iterator[tuple[Path, Tree]]:
        """Writes each state to a new folder, which is deleted afterwards.

        The folder is below `root`, or is `root` itself, as some files contain its path.
        Temporary names with the number of this process get that of an ended one.
        """
        states = _distinct([*self.killed_states(), *self.power_cut_states()])
        print(f"{len(states)} states after {len(self.changes)} changes")
        own_number = re.compile(rf"\b{os.getpid()}\b")
        for number, state in enumerate(states):
            others = {own_number.sub(ENDED, path): x for path, x in state.items()}
            folder = write_tree(root if same_path else root / str(number), others)
            yield folder, state
            shutil.rmtree(folder)


def recorded(
    root: Path, command: Callable[[], object], ignored: tuple[str, ...] = ()
) -> Recording:
    """Runs a command and returns what it changed in a folder."""
    with recording(root, ignored) as recorder:
        command()
    return Recording(recorder.before, tuple(recorder.changes))


def apply(tree: dict[str, Any], change: Change) -> None:
    """Applies a change; a change of absent paths does nothing."""
    path, parent = change.path, _parent(change.path)
    if change.kind in ("folder", "file"):
        if path not in tree and (not parent or parent in tree):
            tree[path] = None if change.kind == "folder" else b""
    elif change.kind == "write":
        if path in tree:
            tree[path] = change.target
    elif change.kind == "remove":
        if not any(name.startswith(f"{path}/") for name in tree):
            tree.pop(path, None)
    elif change.kind == "rename" and path in tree:
        if not _parent(change.target) or _parent(change.target) in tree:
            _take(tree, change.target)
            _put(tree, change.target, _take(tree, path))
    elif change.kind == "exchange" and path in tree and change.target in tree:
        one, other = _take(tree, path), _take(tree, change.target)
        _put(tree, path, other)
        _put(tree, change.target, one)


def _take(tree: dict[str, Any], path: str) -> dict[str, Any]:
    """Removes a path with all below it; returns them by the rest of their paths."""
    names = [name for name in tree if name == path or name.startswith(f"{path}/")]
    return {name[len(path) :]: tree.pop(name) for name in names}


def _put(tree: dict[str, Any], path: str, taken: dict[str, Any]) -> None:
    tree.update({path + rest: content for rest, content in taken.items()})


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _numbered(before: Tree) -> dict[str, Any]:
    """Returns a tree whose files are identified by their paths."""
    return {path: None if x is None else path for path, x in before.items()}


def _contents(
    before: Tree, changes: tuple[Change, ...]
) -> dict[Any, tuple[bytes, bytes]]:
    """Returns content and synced content of each file, by the number of its creation.

    Files that were there before are identified by their paths.
    """
    files = _numbered(before)
    contents: dict[Any, tuple[bytes, bytes]] = {
        path: (x, x) for path, x in before.items() if x is not None
    }
    for number, change in enumerate(changes):
        file = files.get(change.path)
        if change.kind == "file":
            files[change.path], contents[number] = number, (b"", b"")
        elif change.kind == "write":
            contents[file] = (change.target, contents[file][1])
        elif change.kind == "sync":
            if file is not None:
                contents[file] = (contents[file][0], contents[file][0])
        else:
            apply(files, change)
    return contents


def _half(tree: Tree, change: Change) -> bytes:
    """Returns a file's content after half of a write."""
    before, after = tree.get(change.path) or b"", change.target
    start = len(before) if after.startswith(before) else 0
    return after[: (start + len(after)) // 2]


def _synced_names(changes: tuple[Change, ...]) -> set[int]:
    """Returns the numbers of the name changes that are on the disk."""
    waiting: dict[int, set[str]] = {}
    for number, change in enumerate(changes):
        path, target = change.path, change.target
        if change.kind == "sync":
            for folders in waiting.values():
                folders.discard(path)
        elif change.kind in ("rename", "exchange"):
            # A folder is synced under its current name.
            moved = {path: target} | (
                {target: path} if change.kind == "exchange" else {}
            )
            for other, folders in waiting.items():
                waiting[other] = {_moved(folder, moved) for folder in folders}
            waiting[number] = {_parent(target)}
            if change.kind == "exchange":
                waiting[number].add(_parent(path))
        elif change.kind != "write":
            waiting[number] = {_parent(path)}
    return {number for number, folders in waiting.items() if not folders}


def _moved(folder: str, moved: dict[str, str]) -> str:
    for path, target in moved.items():
        if folder == path or folder.startswith(f"{path}/"):
            return target + folder[len(path) :]
    return folder


def _subsets(numbers: list[int]) -> Iterator[tuple[int, ...]]:
    """Yields all subsets of a few; of many, the prefixes, singles and complements."""
    if len(numbers) <= ALL_SUBSETS:
        for size in range(len(numbers) + 1):
            yield from itertools.combinations(numbers, size)
        return
    for end in range(len(numbers) + 1):
        yield tuple(numbers[:end])
    for number in numbers:
        yield (number,)
        yield tuple(other for other in numbers if other != number)


def _distinct(states: list[Tree]) -> list[Tree]:
    unique = {tuple(sorted(state.items())): state for state in states}
    return list(unique.values())


def read_tree(root: Path, ignored: tuple[str, ...] = ()) -> Tree:
    """Returns the content of a folder; files that vanish meanwhile are left out."""
    tree: Tree = {}
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in ignored]
        for name in (*folders, *files):
            path = Path(folder, name)
            key = path.relative_to(root).as_posix()
            if name in ignored:
                continue
            with contextlib.suppress(FileNotFoundError):
                tree[key] = None if name in folders else path.read_bytes()
    return tree


def write_tree(root: Path, tree: Tree) -> Path:
    """Creates a folder with a content; returns its path."""
    root.mkdir(parents=True)
    for path, content in sorted(tree.items()):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)
    return root
