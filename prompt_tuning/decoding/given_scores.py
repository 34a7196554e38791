"""Log-probabilities of given tokens.

Each program scores a block of positions of one row. No array therefore holds logits for
every token of a long text, and a score does not depend on other rows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from prompt_tuning.core.number_ranges import MAXIMUM_LOGPROBS
from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.decoding.request import TokenLogprob
from prompt_tuning.decoding.row_adapters import row_entries
from prompt_tuning.decoding.slot_state import Integers
from prompt_tuning.models.language_model import LanguageModel

BLOCK = 16
"""Number of positions scored per program."""


class BlockScores(NamedTuple):
    """Scores of a block of tokens, each given the ones before it.

    A token's rank is the number of tokens that are at least as probable.
    """

    logprobs: Float[Array, "N"]
    ranks: Int[Array, "N"]
    top_tokens: Int[Array, "N k"]
    top_logprobs: Float[Array, "N k"]


@jax.jit
def gather_states(
    hidden: Float[Array, "*lead D"], numbers: Integers
) -> Float[Array, "N D"]:
    """Returns the states at some positions, counted over all rows."""
    return hidden.reshape(-1, hidden.shape[-1])[jnp.asarray(numbers)]


@functools.partial(jax.jit, static_argnames=("graph", "top"))
def score_states(
    parameters: Parameters,
    states: Float[Array, "N D"],
    tokens: Integers,
    entry: Integers,
    *,
    graph: nnx.GraphDef,
    top: int,
) -> BlockScores:
    """Scores one token per state; `entry` is their row's in the adapter tables."""
    model = cast(LanguageModel, merge(graph, parameters))
    with row_entries(jnp.broadcast_to(jnp.asarray(entry), len(states))):
        logits = model.token_logits(states).astype(jnp.float32)
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, jnp.asarray(tokens)[:, None], axis=-1)
    ranks = jnp.sum(logprobs >= chosen, axis=-1)
    if top == 1:
        # Much faster than a sort.
        ids = jnp.argmax(logprobs, axis=-1)[:, None]
        values = jnp.take_along_axis(logprobs, ids, axis=-1)
    else:
        values, ids = jax.lax.top_k(logprobs, min(top, logprobs.shape[-1]))
    return BlockScores(chosen[:, 0], ranks, ids, values)


Scorer = Callable[[Float[Array, "N D"], Integers, int], BlockScores]
"""Scores tokens given states and a number of most probable tokens."""


def scorer_of(parameters: Parameters, graph: nnx.GraphDef, entry: int) -> Scorer:
    """Returns a scorer for rows with an entry; see `score_states`."""

    def score(states: Float[Array, "N D"], tokens: Integers, top: int) -> BlockScores:
        arguments = (parameters, states, tokens, np.int32(entry))
        return score_states(*arguments, graph=graph, top=top)

    return score


class GivenScores:
    """Scores of a row's given tokens, as far as these have been read.

    Attributes:
      first: index of the first scored token, at least 1.
      top: number of most probable tokens computed for each.
    """

    def __init__(self, given: Sequence[int], first: int, count: int):
        self._given, self.first, self._count = given, first, count
        # Few programs: most clients ask only for the most probable token.
        self.top = 1 if count <= 1 else MAXIMUM_LOGPROBS
        self._blocks: list[tuple[int, int, BlockScores]] = []
        self._ends: dict[int, Float[Array, "1 D"]] = {}

    def covers(self, other: "GivenScores") -> bool:
        """Whether it includes everything that `other` needs for the same tokens."""
        return self.first <= other.first and self.top == other.top

    def read(
        self, start: int, hidden: Float[Array, "R C D"], number: int, scorer: Scorer
    ) -> None:
        """Scores the token after each token of a chunk.

        `hidden` has the states of all chunks read together, and `number` is the row's
        chunk among them.
        """
        size = hidden.shape[1]
        end = min(start + size, len(self._given) - 1) + 1
        for first in range(max(self.first, start + 1), end, BLOCK):
            columns = np.arange(first, min(first + BLOCK, end)) - start - 1
            self._add(first, hidden, number * size + columns, scorer)
        self._ends[start + size] = gather_states(
            hidden, np.array([(number + 1) * size - 1])
        )

    def take_over(self, source: "GivenScores", count: int, scorer: Scorer) -> None:
        """Takes the scores of the tokens that this row shares with another one.

        They share the first `count` tokens, which are whole chunks.
        """
        for first, size, scores in source._blocks:
            if first < count:
                self._blocks.append((first, min(size, count - first), scores))
        self._ends |= {n: state for n, state in source._ends.items() if n <= count}
        if count >= self.first:
            self._add(count, source._ends[count], np.zeros(1, int), scorer)

    def _add(
        self,
        first: int,
        hidden: Float[Array, "*lead D"],
        numbers: Int[np.ndarray, "N"],
        scorer: Scorer,
    ) -> None:
        """Scores tokens by the states at the given positions."""
        size = len(numbers)
        padding = (0, BLOCK - size)
        states = gather_states(hidden, np.pad(numbers, padding))
        tokens = np.array(self._given[first : first + size], np.int32)
        tokens = np.pad(tokens, padding)
        self._blocks.append((first, size, scorer(states, tokens, self.top)))

    def results(self) -> tuple[TokenLogprob, ...]:
        """Returns the scores of all tokens from `first` on."""
        results = []
        for first, size, block in jax.device_get(self._blocks):
            ids = block.top_tokens[:, : self._count].tolist()
            values = block.top_logprobs[:, : self._count].tolist()
            logprobs, ranks = block.logprobs.tolist(), block.ranks.tolist()
            for i in range(max(self.first - first, 0), size):
                top = tuple(zip(ids[i], values[i], strict=True))
                token = self._given[first + i]
                results.append(TokenLogprob(token, logprobs[i], top, rank=ranks[i]))
        return tuple(results)
