"""Choose the next token of each row from its logits.

Each function changes or marks logits `[B, V]` by one number per row `[B]`. A row with
the neutral number, e.g. a penalty of 1, is unchanged to the last bit, so rows with
different settings share one program.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from prompt_tuning.core.number_ranges import MAXIMUM_LOGPROBS
from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.decoding.row_adapters import row_entries
from prompt_tuning.models.language_model import LanguageModel

PerRow = Array | np.ndarray
NO_TOKEN = -1
"""Padding of lists of token ids."""


def penalize_repetition(
    logits: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: PerRow
) -> Float[Array, "B V"]:
    """Divides positive scores of the row's tokens by a penalty, or multiplies negative.

    Keskar et al. 2019, "CTRL", section 4.1, with the sign rule of transformers'
    `RepetitionPenaltyLogitsProcessor`.
    """
    penalty = jnp.asarray(penalty)[:, None]
    penalized = jnp.where(logits > 0, logits / penalty, logits * penalty)
    return jnp.where(seen, penalized, logits)


def penalize_presence(
    logits: Float[Array, "B V"], counts: Int[Array, "B V"], penalty: PerRow
) -> Float[Array, "B V"]:
    """Subtracts a penalty from tokens generated so far (OpenAI's API reference)."""
    return logits - jnp.asarray(penalty)[:, None] * (counts > 0)


def penalize_frequency(
    logits: Float[Array, "B V"], counts: Int[Array, "B V"], penalty: PerRow
) -> Float[Array, "B V"]:
    """Subtracts a penalty for each time a token was generated (OpenAI's reference)."""
    return logits - jnp.asarray(penalty)[:, None] * counts


def forbid(
    logits: Float[Array, "B V"], tokens: PerRow, applies: PerRow
) -> Float[Array, "B V"]:
    """Sets listed tokens to -inf in marked rows.

    `tokens` are ids `[B, E]`, padded with `NO_TOKEN`; `applies` marks the rows, `[B]`.
    """
    columns = jnp.where(jnp.asarray(tokens) >= 0, tokens, logits.shape[1])
    rows = jnp.arange(len(logits))[:, None]
    marked = jnp.zeros(logits.shape, bool).at[rows, columns].set(True, mode="drop")
    return jnp.where(marked & jnp.asarray(applies)[:, None], -jnp.inf, logits)


def keep_allowed(logits: Float[Array, "B V"], words: PerRow) -> Float[Array, "B V"]:
    """Sets tokens to -inf if their bit in a mask is 0; see `RowChoices.allowed`."""
    words = jnp.asarray(words)
    bits = words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    allowed = bits.reshape(len(words), -1)[:, : logits.shape[1]]
    return jnp.where(allowed > 0, logits, -jnp.inf)


def scale_by_temperature(
    logits: Float[Array, "B V"], temperature: PerRow
) -> Float[Array, "B V"]:
    """Divides by the temperature; 0 leaves the row as it is."""
    divisor = jnp.where(jnp.asarray(temperature) > 0, temperature, 1)
    return logits / divisor[:, None]


def keep_highest(logits: Float[Array, "B V"], count: PerRow) -> Float[Array, "B V"]:
    """Sets all but the `count` highest logits to -inf; ties with the last one remain.

    Fan et al. 2018, "Hierarchical neural story generation", section 5.4. A count of 0
    changes nothing.
    """
    size = logits.shape[-1]
    count = jnp.asarray(count)
    count = jnp.where(count > 0, jnp.minimum(count, size), size)
    ordered = jnp.sort(logits, axis=-1, descending=True)
    lowest = jnp.take_along_axis(ordered, count[:, None] - 1, axis=-1)
    return jnp.where(logits < lowest, -jnp.inf, logits)


def keep_nucleus(logits: Float[Array, "B V"], share: PerRow) -> Float[Array, "B V"]:
    """Sets all but the most probable tokens to -inf (Holtzman et al. 2020, section 3).

    A token remains if the more probable ones add up to less than `share`; the most
    probable one always does. A share of 1 changes nothing.
    """
    share = jnp.asarray(share)[:, None]
    order = jnp.argsort(-logits, axis=-1)
    probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, -1), axis=-1)
    preceding = jnp.cumsum(probabilities, axis=-1) - probabilities
    inside = jnp.take_along_axis(preceding < share, jnp.argsort(order, axis=-1), -1)
    return jnp.where(inside | (share >= 1), logits, -jnp.inf)


def keep_likely(logits: Float[Array, "B V"], share: PerRow) -> Float[Array, "B V"]:
    """Sets tokens less probable than a share of the most probable one to -inf.

    Nguyen et al. 2024, "Min-p sampling", section 3. A share of 0 changes nothing.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    least = jnp.asarray(share)[:, None] * probabilities.max(-1, keepdims=True)
    return jnp.where(probabilities < least, -jnp.inf, logits)


def draw(
    logits: Float[Array, "B V"],
    seeds: PerRow,
    contents: PerRow,
    samples: PerRow,
    steps: PerRow,
) -> Int[Array, "B"]:
    """Samples from the softmax of each row, with a key derived from its numbers.

    The key does not depend on the row's position in the batch.
    """

    def draw_row(row, seed, *numbers):
        key = jax.random.key(seed)
        for number in numbers:
            key = jax.random.fold_in(key, number)
        return jax.random.categorical(key, row)

    arrays = (jnp.asarray(x) for x in (seeds, contents, samples, steps))
    return jax.vmap(draw_row)(logits, *arrays).astype(jnp.int32)


class Needs(NamedTuple):
    """Options that any active row uses; the program omits all others.

    Omitting an option changes no bit of rows that do not use it. `truncated` stands for
    `top_k`, `top_p` or `min_p`, and `constrained` for biases, forced tokens or
    forbidden end tokens.
    """

    sampled: bool = False
    truncated: bool = False
    penalized: bool = False
    constrained: bool = False
    logprobs: bool = False
    masked: bool = False

    def union(self, other: "Needs") -> "Needs":
        """Returns the options that either one has."""
        return Needs(*(a or b for a, b in zip(self, other, strict=True)))


def program_for(needs: Needs, programs: list[Needs]) -> Needs:
    """Returns the options of the smallest program that covers those that rows need.

    If there is none, adds one with all options, so that clients with different settings
    cause at most one compilation.

    Args:
      needs: options that rows use.
      programs: options of the compiled programs; empty if each set of options has its
        own.
    """
    if not programs:
        return needs
    fitting = [each for each in programs if each.union(needs) == each]
    if not fitting:
        fitting = [Needs(*[True] * len(needs))]
        programs += fitting
    return min(fitting, key=sum)


class RowChoices(NamedTuple):
    """Settings of each row as arrays; see `Sampling`.

    Numbers are `[B]`: 0 for no `temperature`, `top_k` or `min_p`, and 1 for no `top_p`
    or `repetition`. `content` is the hash of the row (see `content_number`), `step` the
    number of tokens generated so far, `forced` the id of the only allowed token or
    `NO_TOKEN`. `ends` has the row's end tokens, `[B, E]`, of which none may come if
    `before_end`. `allowed` masks the tokens that may follow, `[B, W]`, one bit per
    token, the first in the lowest bit; None if no row has a constraint.
    """

    temperature: PerRow
    top_k: PerRow
    top_p: PerRow
    min_p: PerRow
    repetition: PerRow
    presence: PerRow
    frequency: PerRow
    seed: PerRow
    content: PerRow
    sample: PerRow
    step: PerRow
    forced: PerRow
    ends: PerRow
    before_end: PerRow
    biased: PerRow
    allowed: PerRow | None = None


LogitsProcessor = Callable[[Float[Array, "B V"], RowChoices], Float[Array, "B V"]]
"""A user's pure function `f(logits [B, V], choices) -> logits [B, V]`.

Each row of the result may depend only on the same row of the arguments.
"""


class TokenNumbers(NamedTuple):
    """Numbers of each row for each token of the vocabulary.

    `given` marks the tokens of the given text, `counts` tells how often each was
    generated, and `bias` is added to the logits; -inf forbids a token.
    """

    given: Bool[Array, "B V"]
    counts: Int[Array, "B V"]
    bias: Float[Array, "B V"]

    @classmethod
    def zeros(cls, rows: int, size: int) -> "TokenNumbers":
        """Returns the numbers of rows without tokens."""
        shape = (rows, size)
        return cls(
            jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)
        )


class Chosen(NamedTuple):
    """Chosen tokens.

    Attributes:
      tokens: token of each row, `[B]`.
      logprobs: its log-probability, `[B]`, or None.
      top_tokens: ids of the most probable tokens, `[B, k]`, or None.
      top_logprobs: their log-probabilities, `[B, k]`, or None.
    """

    tokens: PerRow
    logprobs: PerRow | None = None
    top_tokens: PerRow | None = None
    top_logprobs: PerRow | None = None


def choose_tokens(
    logits: Float[Array, "B V"],
    choices: RowChoices,
    vocabulary: TokenNumbers | None,
    needs: Needs,
    process: LogitsProcessor | None = None,
    *,
    tempered: bool = False,
) -> Chosen:
    """Chooses a token for each row, in the order of transformers' processors.

    `process` is the user's function, applied first. With `tempered`, log-probabilities
    are those of the logits divided by the temperature.
    """
    changed = logits if process is None else process(logits, choices)
    if needs.penalized:
        assert vocabulary is not None
        seen = vocabulary.given | (vocabulary.counts > 0)
        changed = penalize_repetition(changed, seen, choices.repetition)
        changed = penalize_presence(changed, vocabulary.counts, choices.presence)
        changed = penalize_frequency(changed, vocabulary.counts, choices.frequency)
    if needs.constrained:
        assert vocabulary is not None
        biased = jnp.asarray(choices.biased)[:, None]
        changed = jnp.where(biased, changed + vocabulary.bias, changed)
        changed = forbid(changed, choices.ends, choices.before_end)
    if needs.masked:
        assert choices.allowed is not None
        changed = keep_allowed(changed, choices.allowed)
    tokens = jnp.argmax(changed, axis=-1).astype(jnp.int32)
    if needs.sampled:
        scaled = scale_by_temperature(changed, choices.temperature)
        if needs.truncated:
            scaled = keep_highest(scaled, choices.top_k)
            scaled = keep_nucleus(scaled, choices.top_p)
            scaled = keep_likely(scaled, choices.min_p)
        numbers = (choices.content, choices.sample, choices.step)
        drawn = draw(scaled, choices.seed, *numbers)
        tokens = jnp.where(jnp.asarray(choices.temperature) > 0, drawn, tokens)
    if needs.constrained:
        forced = jnp.asarray(choices.forced)
        tokens = jnp.where(forced >= 0, forced, tokens).astype(jnp.int32)
    if not needs.logprobs:
        return Chosen(tokens)
    if tempered:
        logits = scale_by_temperature(logits, choices.temperature)
    logprobs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    top, ids = jax.lax.top_k(logprobs, min(MAXIMUM_LOGPROBS, logprobs.shape[-1]))
    chosen = jnp.take_along_axis(logprobs, tokens[:, None], axis=-1)[:, 0]
    return Chosen(tokens, chosen, ids, top)


@functools.partial(
    jax.jit,
    static_argnames=("graph", "needs", "process", "tempered"),
    donate_argnames="vocabulary",
)
def choose(
    parameters: Parameters,
    hidden: Float[Array, "B D"],
    choices: RowChoices,
    vocabulary: TokenNumbers | None,
    entries: PerRow,
    *,
    graph: nnx.GraphDef,
    needs: Needs,
    process: LogitsProcessor | None = None,
    tempered: bool = False,
) -> tuple[Chosen, TokenNumbers | None]:
    """Chooses tokens from the states `[B, D]` that predict them, and counts them.

    `vocabulary` is donated; `entries` are the rows' entries in the adapter tables. The
    other arguments are those of `choose_tokens`.
    """
    model = cast(LanguageModel, merge(graph, parameters))
    with row_entries(jnp.asarray(entries)):
        logits = model.token_logits(hidden)
    chosen = choose_tokens(
        logits, choices, vocabulary, needs, process, tempered=tempered
    )
    if vocabulary is not None and needs.penalized:
        rows = jnp.arange(len(chosen.tokens))
        counts = vocabulary.counts.at[rows, chosen.tokens].add(1)
        vocabulary = vocabulary._replace(counts=counts)
    return chosen, vocabulary


@functools.partial(jax.jit, donate_argnames="vocabulary")
def start_row(
    vocabulary: TokenNumbers,
    slot: Int[Array, ""] | int,
    given: Bool[Array, "V"] | Bool[np.ndarray, "V"],
    bias: Float[Array, "V"] | Float[np.ndarray, "V"],
) -> TokenNumbers:
    """Sets the numbers of a row that starts in a slot."""
    return TokenNumbers(
        vocabulary.given.at[slot].set(given),
        vocabulary.counts.at[slot].set(0),
        vocabulary.bias.at[slot].set(bias),
    )
