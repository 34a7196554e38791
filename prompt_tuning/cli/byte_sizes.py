"""Numbers of bytes with units."""

import re

from prompt_tuning.core.errors import InputError, shown

UNITS = {"": 1, "B": 1} | {
    f"{prefix}{binary}B": (1024 if binary else 1000) ** power
    for power, prefix in enumerate("KMGT", 1)
    for binary in ("", "i")
}


def format_size(count: int) -> str:
    """Formats a number of bytes in the largest unit that it reaches."""
    for unit, power in (("TB", 4), ("GB", 3), ("MB", 2), ("KB", 1)):
        if count >= 1000**power:
            return f"{count / 1000**power:,.2f} {unit}"
    return f"{count} B"


def parse_size(text: str) -> int:
    """Parses a size such as 80GB (powers of 1000) or 16GiB (powers of 1024).

    Raises:
      InputError: with the units.
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([A-Za-z]*)", text.strip())
    units = {name.lower(): factor for name, factor in UNITS.items()}
    unit = match and units.get(match[2].lower())
    if not match or not unit or not float(match[1]):
        raise InputError(
            f"--limit is {shown(text)}, expected a number above 0 with one of the "
            f"units {', '.join(filter(None, UNITS))}, such as 80GB; at most 15 digits"
        )
    return int(float(match[1]) * unit)
