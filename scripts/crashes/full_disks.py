"""Runs commands on file systems that are too small for them.

Each is run in a tmpfs of every size, a page more at a time, so that the space ends in
each of its writes. It must then print one message and exit with code 1, and with more
space, the same command must end with the same bits as on an empty disk.
"""

import dataclasses
import random
import shutil
import subprocess
from pathlib import Path

from scripts.crashes.processes import Contents, contents, differences, output
from scripts.crashes.scenarios import Scenario, run_options
from scripts.crashes.undisturbed import finish, padded, run_undisturbed

PAGE = 4096
ENOUGH = "size=64m"


def run_full_disks(
    folder: Path, scenarios: list[Scenario], sizes: int, randomness: random.Random
) -> bool:
    """Runs each command with a number of sizes; returns whether any failed."""
    rows = []
    for scenario in [*scenarios, make_conversion(folder)]:
        expected, _ = run_undisturbed(folder, scenario)
        target = folder / padded(f"disk_{scenario.name.replace(' ', '_')}")
        largest = _pages(expected)
        chosen = range(1, largest + 1)
        if largest > sizes:
            chosen = sorted(randomness.sample(chosen, sizes))
        row = _Row(scenario.name, largest)
        for pages in chosen:
            row.add(pages, _run_full(target, scenario, pages, expected))
        rows.append(row)
    print("\n| command | pages | sizes | full | wrong |\n|---|---|---|---|---|")
    for row in rows:
        print(f"| {row.name} | {row.pages} | {row.sizes} | {row.full} | {row.wrong} |")
    return any(row.wrong for row in rows)


def make_conversion(folder: Path) -> Scenario:
    """Returns a conversion of a run, which is trained here."""
    run = folder / "converted_run"
    training = Scenario("train", lambda _: [["train", *run_options(folder, run, 2)]])
    target = folder / "training"
    target.mkdir()
    if problems := finish(target, training):
        raise RuntimeError(f"training fails: {problems}")
    return Scenario(
        "convert", lambda target: [["convert", str(run), str(target / "out")]]
    )


@dataclasses.dataclass
class _Row:
    """Results of a command."""

    name: str
    pages: int
    sizes: int = 0
    full: int = 0
    wrong: int = 0

    def add(self, pages: int, outcome: tuple[bool, list[str]]) -> None:
        full, problems = outcome
        self.sizes, self.full = self.sizes + 1, self.full + full
        self.wrong += bool(problems)
        if problems:
            print(f"WRONG {self.name}, {pages} pages: {problems}", flush=True)


def _pages(expected: Contents) -> int:
    """Returns the approximate number of pages that a command needs at once."""
    pages = sum(1 + len(content or b"") // PAGE for content in expected.values())
    return 2 * pages


def _run_full(
    target: Path, scenario: Scenario, pages: int, expected: Contents
) -> tuple[bool, list[str]]:
    """Returns whether the disk was full, and what went wrong."""
    with _Disk(target, pages) as disk:
        problems = finish(target, scenario)
        full = bool(problems)
        printed = [
            output(target, number).read_text()
            for number in range(len(scenario.commands(target)))
        ]
        wrong = [] if not full else _wrong_messages(problems, printed)
        disk.enlarge()
        if full:
            wrong += finish(target, scenario)
        wrong += differences(expected, contents(target))
    return full, wrong


def _wrong_messages(problems: list[str], printed: list[str]) -> list[str]:
    wrong = [text for text in problems if not text.startswith("exit code 1:")]
    wrong += [text for text in printed if "Traceback" in text]
    if "No space left on device" not in "".join(printed).replace("\n", " "):
        wrong += printed
    return wrong


class _Disk:
    """A file system of some pages at a folder."""

    def __init__(self, folder: Path, pages: int):
        self.folder, self.pages = folder, pages

    def __enter__(self) -> "_Disk":
        self.folder.mkdir()
        options = f"size={self.pages * PAGE}"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)]
        subprocess.run(command, check=True)
        return self

    def enlarge(self) -> None:
        """Adds space."""
        command = ["mount", "-o", f"remount,{ENOUGH}", str(self.folder)]
        subprocess.run(command, check=True)

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", str(self.folder)], check=True)
        shutil.rmtree(self.folder)
