"""Path of the real files that some tests read, and the mark that skips these tests."""

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[2].parent / "shared"
needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason=f"{SHARED}, the folder of real test files, is not here"
)
