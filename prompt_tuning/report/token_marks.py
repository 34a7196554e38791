"""The tokens of samples with their types, loss weights and losses."""

import dataclasses
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.data.tools.row_display import token_texts
from prompt_tuning.evaluation.token_outcomes import TokenOutcomes
from prompt_tuning.report.visible_text import visible

GIVEN, LEARNED, SPECIAL = range(3)
"""Types of tokens: given text, learned text, or without a text."""
LARGEST_PART = 100
"""Maximum number of tokens shown of an input, and of a completion."""


class MarkedToken(NamedTuple):
    """One token of a sample.

    `text` has hidden characters as numbers. `nats` is None if it is not learned, or its
    loss is not finite; `bare` is its loss without a prompt.
    """

    text: str
    kind: int
    weight: float
    nats: float | None
    bare: float | None


class MarkedTokens(NamedTuple):
    """The tokens of a sample: the end of a long input, and the start of the answer."""

    given: list[MarkedToken]
    wanted: list[MarkedToken]

    def __len__(self) -> int:
        return len(self.given) + len(self.wanted)


@dataclasses.dataclass(frozen=True)
class TokenMarks:
    """Reads the tokens of any measured example."""

    examples: Examples
    tokenizer: Tokenizer
    tuned: TokenOutcomes
    bare: TokenOutcomes | None

    def __getitem__(self, number: int) -> MarkedTokens:
        """Returns the tokens of an example by its number."""
        example = self.examples[number]
        weights = np.asarray(example.weights, float)
        learned = np.flatnonzero(weights)
        nats = self._losses(self.tuned, number, learned, len(weights))
        bare = self._losses(self.bare, number, learned, len(weights))
        prefix = example.prefix_length
        # The targets of a class head are not tokens.
        ids = example.inputs if prefix else example.targets
        targets = self._mark(ids, weights, nats, bare)
        given, wanted = targets[:prefix], targets[prefix:]
        if example.inputs is not example.targets and not prefix:
            zeros, unknown = np.zeros(len(example.inputs)), [None] * len(example.inputs)
            given = self._mark(example.inputs, zeros, unknown, unknown)
        return MarkedTokens(given[-LARGEST_PART:], wanted[:LARGEST_PART])

    def _losses(
        self,
        outcomes: TokenOutcomes | None,
        number: int,
        learned: Int[np.ndarray, "k"],
        count: int,
    ) -> list[float | None]:
        """Returns the loss of each target; None if it is missing or not finite."""
        losses: list[float | None] = [None] * count
        if outcomes is None:
            return losses
        start, stop = np.searchsorted(outcomes.example, (number, number + 1))
        if stop - start == len(learned):
            for place, nats in zip(learned, outcomes.losses[start:stop], strict=True):
                # JSON has no other numbers, and a browser could not read the page's.
                losses[place] = round(float(nats), 4) if math.isfinite(nats) else None
        return losses

    def _mark(self, ids, weights, nats, bare) -> list[MarkedToken]:
        special = (self.tokenizer.bos_id, self.tokenizer.eos_id, self.tokenizer.pad_id)
        texts = token_texts(list(map(int, ids)), self.tokenizer)
        return [
            MarkedToken(
                visible(text),
                SPECIAL if id in special else LEARNED if weight else GIVEN,
                round(float(weight), 4),
                loss,
                other,
            )
            for id, text, weight, loss, other in zip(
                ids.tolist(), texts, weights, nats, bare, strict=True
            )
        ]
