"""Folders of test files, and the mark that skips tests without released files.

Everything in `FIXTURES` was made by scripts of this repository: `make_fixtures`,
`make_peft_fixtures`, `make_t5x_fixtures` and `make_text_fixtures`. `SHARED` contains
files that others have published.
"""

from pathlib import Path

import pytest

FIXTURES = Path(__file__).parents[1] / "fixtures"
SHARED = Path(__file__).parents[2].parent / "shared"
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"{SHARED}, the folder of real test files, is not here"
)


def released(*values, id: str | None = None):
    """Returns parameters of a test that are skipped without released files."""
    return pytest.param(*values, marks=needs_shared, id=id)
