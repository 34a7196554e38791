"""Cross-entropy of few positions at a time, so that small arrays are cut up too."""

import pytest

from prompt_tuning.losses import cross_entropy


def chunked(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Lets a chunk have so many rows, however small the vocabulary."""
    monkeypatch.setattr(cross_entropy, "LARGEST_CHUNK", 1)
    monkeypatch.setattr(cross_entropy, "FEWEST_ROWS", rows)
