"""Folders of test files, and the mark of tests that read released files.

Everything in `FIXTURES` was made by scripts of this repository: `make_fixtures`,
`make_peft_fixtures`, `make_t5x_fixtures` and `make_text_fixtures`. `SHARED` contains
files that others have published; tests that read them are left out without it.
"""

from pathlib import Path

import pytest

FIXTURES = Path(__file__).parents[1] / "fixtures"
SHARED = Path(__file__).parents[2].parent / "shared"


def released(*values, id: str | None = None):
    """Returns parameters of a test for which it reads released files."""
    return pytest.param(*values, marks=pytest.mark.released, id=id)
