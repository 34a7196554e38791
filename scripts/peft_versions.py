"""The versions with which what the scripts write and measure was checked.

PEFT 0.21.2's own `generate` continues prompts and prefixes wrongly with transformers
5.24, and rightly with 5.23. Steps without a cache are right with both.
"""

import importlib.metadata
import sys
from collections.abc import Callable

CHECKED = {
    "peft": ("0.21.2",),
    "torch": ("2.13.0",),
    "transformers": ("5.23", "5.24"),
}
"""Versions of each package; of 5.23, all with a third number."""


def unchecked_versions(
    installed: Callable[[str], str] = importlib.metadata.version,
) -> list[str]:
    """Returns a line for each package that is installed in another version.

    Args:
      installed: returns the version of a package.
    """
    lines = []
    for package, checked in CHECKED.items():
        version = installed(package)
        begins = tuple(f"{number}." for number in checked)
        if not f"{version.partition('+')[0]}.".startswith(begins):
            expected = " or ".join(checked)
            lines.append(f"{package} {version} is installed; checked with {expected}")
    return lines


def report_versions() -> None:
    """Says on the standard error if other versions are installed."""
    for line in unchecked_versions():
        print(f"warning: {line}: compare some of the numbers first", file=sys.stderr)
