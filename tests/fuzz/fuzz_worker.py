"""Runs the cases of a fuzz test in a process that is watched while it does.

An audit hook records every attempt to start a program, to connect to a network, or to
change a file outside the folder of the case.
"""

import importlib
import os
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import InputError, StorageError
from tests.fuzz.fuzz_kind import Kind, Outcome

MEGABYTE = 2**20
MAXIMUM_MEGABYTES = 1024
"""Memory that reading a damaged input may take, above that before."""
ADDRESS_SPACE = 8 * 2**30
"""Address space that a case may add before the system refuses it memory."""
MAXIMUM_MESSAGE = 4_000

STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "pty.spawn")
CONNECTS = ("socket.connect", "socket.bind", "urllib.Request")
CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link")
CHANGES += ("os.truncate", "os.chmod", "shutil.rmtree")


class Watch:
    """Records events of this process that no input may cause."""

    def __init__(self, folder: Path):
        self._folder = str(folder)
        self._active = False
        self.events: list[str] = []
        sys.addaudithook(self._audit)

    def start(self) -> None:
        """Forgets earlier events and records new ones."""
        self.events, self._active = [], True

    def stop(self) -> None:
        """Stops recording."""
        self._active = False

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active:
            return
        # The package starts itself, to bound the time of foreign templates.
        started = event in STARTS and arguments[0] != sys.executable
        if started or event in CONNECTS:
            self.events.append(f"{event} {arguments!r:.300}")
        elif event in CHANGES or (event == "open" and _writes(arguments)):
            for path in arguments[: 2 if event == "os.rename" else 1]:
                self._check(event, path)

    def _check(self, event: str, path: Any) -> None:
        if isinstance(path, bytes):
            path = path.decode(errors="replace")
        if not isinstance(path, str | os.PathLike):
            return
        if str(path).startswith(("/dev/", "/proc/")):
            return
        # Not resolved: a link in the folder may be replaced.
        if not os.path.abspath(path).startswith(self._folder):  # noqa: PTH100
            self.events.append(f"{event} {str(path)!r:.300}")


def _writes(arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = arguments
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def run_cases(
    connection: Connection,
    kinds: Sequence[Kind],
    templates: Path,
    seed: int,
    cases: Sequence[tuple[int, int]],
) -> None:
    """Runs cases and sends, for each, its description and then its `Outcome`.

    Args:
      connection: receives the case that begins, `(index of the kind, case)`, and the
        outcome of it.
      kinds: all kinds.
      templates: folder with a valid input of each kind, in a folder of its name.
      seed: seed of the damage.
      cases: index of the kind, and number of each case.
    """
    # Importing a module writes its bytecode outside a case's folder.
    sys.dont_write_bytecode = True
    warnings.simplefilter("ignore")
    # Drawing starts a program that lists the fonts, once on a machine.
    importlib.import_module("matplotlib.font_manager")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        tempfile.tempdir = str(folder)
        os.environ |= {"TMPDIR": str(folder), "HOME": str(folder)}
        os.environ["XDG_CACHE_HOME"] = str(folder)
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.chdir(folder)
        watch = Watch(folder)
        for index in sorted({index for index, _ in cases}):
            kind = kinds[index]
            if kind.prepare is not None:
                kind.prepare(templates / kind.name)
        for index, case in cases:
            connection.send((index, case))
            outcome = run_case(kinds[index], templates, seed, case, folder, watch)
            connection.send(outcome)
    connection.send(None)


def run_case(
    kind: Kind, templates: Path, seed: int, case: int, scratch: Path, watch: Watch
) -> Outcome:
    """Damages a copy of a valid input and reads it; see `run_cases`."""
    folder = scratch / "case"
    shutil.copytree(templates / kind.name, folder, symlinks=True)
    names = kind.names(folder)
    damage = kind.damage(seed, case, folder)
    names = {*names, *kind.names(folder)}
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = _reset_peak()
    resource.setrlimit(
        resource.RLIMIT_AS, (_status("VmSize") + ADDRESS_SPACE, limits[1])
    )
    watch.start()
    start = time.monotonic()
    try:
        kind.read(folder)
        result, details = "accepted", ""
    except (InputError, StorageError) as problem:
        details = str(problem)
        result = "valid input refused" if case == 0 else _check_message(details, names)
    except BaseException as problem:
        # PanicException of Rust libraries is not an Exception.
        result = f"{type(problem).__module__}.{type(problem).__name__}"
        details = "".join(traceback.format_exception(problem))[-6_000:]
    seconds = time.monotonic() - start
    watch.stop()
    resource.setrlimit(resource.RLIMIT_AS, limits)
    megabytes = (_status("VmHWM") - before) / MEGABYTE
    if watch.events:
        result, details = "forbidden event", "\n".join(watch.events[:5])
    elif megabytes > MAXIMUM_MEGABYTES:
        result, details = "memory", f"{megabytes:,.0f} MiB\n{details}"
    shutil.rmtree(folder)
    return Outcome(
        kind.name, case, result, f"{damage}\n{details}", seconds, max(0.0, megabytes)
    )


def _check_message(message: str, names: Collection[str]) -> str:
    """Returns "refused", or the reason for which a message is not as it should be."""
    if "Traceback" in message:
        return "traceback"
    if len(message) > MAXIMUM_MESSAGE:
        return f"message of {len(message):,} characters"
    if not message.strip():
        return "empty message"
    if names and not any(name in message for name in names):
        return "message without the name of a file or option"
    return "refused"


def _reset_peak() -> int:
    """Resets the peak of this process's memory; returns what is in use, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)
