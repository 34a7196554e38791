"""Counts of a preparation, in memory that does not grow with the data."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int32, Int64, Integer

from prompt_tuning.core.token_weights import COMPLETION, PADDING, PROMPT, SEPARATOR

TYPES = 4
BINS_PER_OCTAVE = 4
BINS = 32 * BINS_PER_OCTAVE

# Keys of metrics.json, where an example is called an article.
_COUNTS = (
    "records",
    "malformed",
    "without_completion",
    "articles",
    "tokens_in",
    "repeated_tokens",
    "dropped_articles",
    "dropped_tokens",
    "truncated_articles",
    "truncated_tokens",
    "sequences_without_completion",
    "tokens_without_completion",
    "sequences",
)


@dataclasses.dataclass
class SplitMetrics:
    """Counts of one split.

    Attributes:
      counts: counts by name, see `summary`.
      length_histogram: number of examples by length; bin `b` starts at `2^(b /
        BINS_PER_OCTAVE)` tokens.
      type_histogram: number of tokens by type and position, `[4, L]`.
    """

    counts: dict[str, int]
    length_histogram: Int64[np.ndarray, "b"]
    type_histogram: Int64[np.ndarray, "4 L"]

    def add_examples(self, lengths: Integer[np.ndarray, "a"]) -> None:
        """Counts examples before they are packed."""
        self.counts["articles"] += len(lengths)
        self.counts["tokens_in"] += int(lengths.sum())
        octaves = np.log2(np.maximum(lengths, 1))
        bins = np.floor(octaves * BINS_PER_OCTAVE).astype(np.int64)
        self.length_histogram += np.bincount(bins, minlength=BINS)

    def add_sequences(self, token_types: Int32[np.ndarray, "m L"]) -> None:
        """Counts sequences as they are written."""
        self.counts["sequences"] += len(token_types)
        for kind in range(TYPES):
            self.type_histogram[kind] += np.count_nonzero(token_types == kind, axis=0)

    def summary(self) -> dict[str, Any]:
        """Returns the counts and shares of a split; a share of nothing is None.

        `tokens_in` is the sum of `prompt_tokens`, `completion_tokens`,
        `separator_tokens`, `dropped_tokens`, `truncated_tokens` and
        `tokens_without_completion`.
        """
        prompt, completion, padding, separator = (
            int(self.type_histogram[kind].sum())
            for kind in (PROMPT, COMPLETION, PADDING, SEPARATOR)
        )
        positions = prompt + completion + padding + separator
        used = positions - padding
        return self.counts | {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "separator_tokens": separator,
            "padding_tokens": padding,
            "share_of_positions_used": _share(used, positions),
            "share_of_positions_learned": _share(completion + separator, positions),
            "share_of_tokens_kept": _share(used, self.counts["tokens_in"]),
        }


def empty_metrics(length: int) -> SplitMetrics:
    """Returns the metrics of a split before anything is counted."""
    return SplitMetrics(
        dict.fromkeys(_COUNTS, 0),
        np.zeros(BINS, np.int64),
        np.zeros((TYPES, length), np.int64),
    )


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None
