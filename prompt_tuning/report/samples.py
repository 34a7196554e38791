"""The samples of a page: inputs and answers, with and without the prompt."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from prompt_tuning.core.metric_directions import DIRECTIONS
from prompt_tuning.report.measurement import Measurement
from prompt_tuning.report.token_marks import MarkedTokens, TokenMarks
from prompt_tuning.tuned.comparison import NO_PROMPT

LARGEST_TEXT = 400
"""Maximum number of characters shown of a text."""
LARGEST_ALL = 700_000
"""Maximum size in bytes of all samples on a page."""
TOKEN_SIZE = 30
"""Bytes per token of a sample, besides its text."""
MARGIN = 400
"""Bytes of the page per sample, besides its texts."""


class Sample(NamedTuple):
    """One held-out example.

    `made` is the answer of the tuned model, and `made_bare` that without a prompt;
    likewise `loss` and `loss_bare`. `outcome` is "win", "loss" or "tie" against no
    prompt; empty without a comparison.
    """

    number: int
    category: str
    given: str
    wanted: str
    made: str | None
    made_bare: str | None
    loss: float | None
    loss_bare: float | None
    outcome: str
    tokens: MarkedTokens | None = None

    @property
    def gain(self) -> float | None:
        """How much the prompt lowers the loss."""
        if self.loss is None or self.loss_bare is None:
            return None
        return self.loss_bare - self.loss

    @property
    def is_right(self) -> bool:
        """Whether the answer is the completion."""
        return self.made == self.wanted


class Samples(NamedTuple):
    """The samples that a page shows, and the total number."""

    shown: Sequence[Sample]
    total: int


def samples_of(measured: Measurement, metric: str, runs: int = 1) -> Samples:
    """Pairs predictions of the tuned model with those without a prompt.

    If there are too many for a page, evenly spaced ones in the order of their loss are
    shown: the best, the worst, and some in between.
    """
    tuned, bare = next(iter(measured.results)), NO_PROMPT
    by_system: dict[str, dict[int, Any]] = {}
    for line in measured.predictions:
        by_system.setdefault(line["system"], {})[line["example"]] = line
    others = by_system.get(bare, {}) if bare != tuned else {}
    samples = [
        _sample(line, others.get(number), metric, measured.marks)
        for number, line in by_system.get(tuned, {}).items()
    ]
    kept = _fitting(samples, LARGEST_ALL // runs)
    return Samples(kept, len(samples))


def _sample(
    line: dict[str, Any],
    bare: dict[str, Any] | None,
    metric: str,
    marks: TokenMarks | None,
) -> Sample:
    outcome = ""
    if bare is not None:
        one, other = line["scores"].get(metric), bare["scores"].get(metric)
        if one is not None and other is not None:
            sign = -1 if DIRECTIONS.get(metric) == "min" else 1
            gain = sign * (one - other)
            outcome = "win" if gain > 0 else "loss" if gain < 0 else "tie"
    return Sample(
        line["example"],
        line.get("category") or "",
        _cut(line["input"]),
        _cut(line["target"]),
        _cut(line["output"]),
        None if bare is None else _cut(bare["output"]),
        line["scores"].get("loss"),
        None if bare is None else bare["scores"].get("loss"),
        outcome,
        None if marks is None else marks[line["example"]],
    )


def _cut(text: Any) -> Any:
    """Shortens a long text and adds its length; leaves anything else unchanged."""
    if not isinstance(text, str) or len(text) <= LARGEST_TEXT:
        return text
    return f"{text[:LARGEST_TEXT]}... ({len(text):,} characters)"


def _fitting(samples: list[Sample], budget: int) -> list[Sample]:
    """Chooses samples with texts of at most `budget` bytes."""
    sizes = [_size(sample) for sample in samples]
    if sum(sizes) <= budget:
        return samples
    count = max(1, int(len(samples) * budget / sum(sizes)))
    ranked = sorted(samples, key=lambda x: (x.loss is None, x.loss or 0.0))
    last = len(ranked) - 1
    numbers = {round(i * last / max(count - 1, 1)) for i in range(count)}
    return sorted(ranked[i] for i in numbers)


def _size(sample: Sample) -> int:
    """Estimates the bytes that a sample takes on a page."""
    texts = (sample.given, sample.wanted, sample.made or "", sample.made_bare or "")
    # JSON's escapes are about as long as HTML's.
    size = sum(len(json.dumps(text, ensure_ascii=False)) for text in texts) * 2
    if sample.tokens is not None:
        size += 2 * len(sample.given + sample.wanted) + TOKEN_SIZE * len(sample.tokens)
    return MARGIN + size
