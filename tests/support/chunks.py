"""Makes cross-entropy use small chunks, so that small arrays are chunked too."""

import pytest

from prompt_tuning.losses import cross_entropy


def chunked(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Sets the number of rows of a chunk, regardless of the vocabulary's size."""
    monkeypatch.setattr(cross_entropy, "LARGEST_CHUNK", 1)
    monkeypatch.setattr(cross_entropy, "FEWEST_ROWS", rows)
