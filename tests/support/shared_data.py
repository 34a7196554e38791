"""Where the real files are that some tests read, and the mark that skips them."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2].parent / "shared"
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"{SHARED}, the folder of real test files, is not here"
)
