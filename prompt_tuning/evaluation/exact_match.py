"""Exact match of completions, computed without generating them.

Greedy decoding generates a completion if and only if each of its tokens is the most
probable one given those before it, and an end token is the most probable one after
them. The losses of an example already tell this for its learned tokens. If some are not
learned, one more pass over the example tells it, where decoding would take a step per
token.
"""

import dataclasses
import itertools
from collections.abc import Collection, Sequence

import numpy as np
from jaxtyping import Bool, Int

from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.examples.row_readers import Example
from prompt_tuning.evaluation.ranking import score_candidates
from prompt_tuning.evaluation.token_outcomes import TokenOutcomes
from prompt_tuning.models.scoring import greedy_tokens
from prompt_tuning.pretrained.prompted_model import PromptedModel


@dataclasses.dataclass(frozen=True)
class CompletionPlaces:
    """Positions of a completion among the learned tokens of its example.

    Attributes:
      tokens: positions of its learned tokens.
      complete: whether all of its tokens are learned.
      end: position of its end token; None if that is not learned.
      left: number of tokens that could still be generated after it; negative if it is
        too long to be generated.
    """

    tokens: Int[np.ndarray, "k"]
    complete: bool
    end: int | None
    left: int

    @classmethod
    def find(
        cls, example: Example, completion: Sequence[int], new_tokens: int
    ) -> "CompletionPlaces":
        """Locates a completion, which starts after the given tokens."""
        learned = np.flatnonzero(example.weights)
        first, stop = example.prefix_length, example.prefix_length + len(completion)
        tokens = np.flatnonzero((first <= learned) & (learned < stop))
        end = np.flatnonzero(learned == stop)
        return cls(
            tokens,
            len(tokens) == len(completion),
            int(end[0]) if len(end) else None,
            new_tokens - len(completion),
        )

    def decide(
        self, correct: Bool[np.ndarray, "m"], stop_ids: Collection[int]
    ) -> bool | None:
        """Decides whether the completion would be generated; None if unknown.

        Args:
          correct: whether each learned token is the most probable one.
          stop_ids: ids that end a generated text.
        """
        if self.left < 0 or not correct[self.tokens].all():
            return False
        if not self.complete:
            return None
        if self.left == 0:
            return True
        if self.end is None:
            return None
        if correct[self.end]:
            return True
        return False if len(stop_ids) == 1 else None


def decide_by_tokens(
    outcomes: TokenOutcomes,
    places: Sequence[CompletionPlaces | None],
    stop_ids: Collection[int],
) -> list[bool | None]:
    """Decides from learned tokens which completions would be generated.

    Args:
      outcomes: losses of all examples.
      places: positions of each completion; None if it would be generated after another
        input than that of the losses.
      stop_ids: ids that end a generated text.

    Returns a decision per completion; None if unknown.
    """
    starts = np.searchsorted(outcomes.example, np.arange(outcomes.examples + 1))
    return [
        None if place is None else place.decide(outcomes.correct[start:stop], stop_ids)
        for place, (start, stop) in zip(places, itertools.pairwise(starts), strict=True)
    ]


def exact_matches(
    model: PromptedModel,
    parameters: Parameters,
    given: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    batch_size: int = 64,
    prompt_ids: Sequence[int] | None = None,
) -> Bool[np.ndarray, "n"]:
    """Finds the completions that greedy decoding generates token for token.

    Tokens whose scores differ only by rounding may be ordered differently than in
    step-by-step decoding. Completions are without an end token; one that is longer than
    `new_tokens` never matches, and one of this length needs no end.
    """
    matches = np.zeros(len(given), bool)
    short = [i for i, row in enumerate(completions) if len(row) <= new_tokens]
    # The last position of each candidate is the end's; nothing reads its token.
    end = [model.config.pad_id]
    chosen = score_candidates(
        greedy_tokens,
        model,
        parameters,
        [given[i] for i in short],
        [[[*completions[i], *end]] for i in short],
        batch_size=batch_size,
        prompt_ids=None if prompt_ids is None else [prompt_ids[i] for i in short],
    )
    for numbers, tokens in chosen:
        for number, row in zip(numbers, tokens.tolist(), strict=True):
            completion = list(completions[short[number]])
            size = len(completion)
            ends = size == new_tokens or row[size] in model.stop_ids
            matches[short[number]] = ends and row[:size] == completion
    return matches
