"""Generate with a key/value cache, for rows of different lengths in one batch.

A row's continuation does not depend on the other rows: positions count only the row's
own tokens, padding is masked, and each row has its own random key.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.core.status_line import update_status
from prompt_tuning.decoding.token_choice import Needs, RowChoices, choose_tokens
from prompt_tuning.models.cache import Cache
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.sharding import collectives
from prompt_tuning.sharding.mesh_layout import MeshLayout
from prompt_tuning.sharding.shard_map import map_rows
from prompt_tuning.streaming.streamed_function import StreamedFunction
from prompt_tuning.streaming.traced_program import Leaves

GREEDY = Needs()
"""Needs of rows decoded greedily."""
DRAWN = Needs(sampled=True, logprobs=True)
"""Needs of rows that are sampled and return log-probabilities."""


@functools.partial(
    jax.jit, static_argnames=("graph", "new_tokens", "needs", "pad_id", "layout")
)
def continue_batch(
    parameters: Parameters,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    choices: RowChoices,
    prompt_ids: Int[Array, "B"] | None = None,
    *,
    graph: nnx.GraphDef,
    new_tokens: int,
    needs: Needs = GREEDY,
    pad_id: int,
    layout: MeshLayout | None = None,
) -> Int[Array, "B new"]:
    """Generates up to `new_tokens` tokens for each row.

    Reads prompt and rows once (prefill), then generates one token per row and step
    until every row has ended. Rows are padded on the right; for an encoder-decoder they
    are the encoder's input. `needs` has no option that counts tokens. The new tokens
    include the one that ends the row.
    """
    run = _continuing(layout, graph, new_tokens, needs, pad_id)
    return run(parameters, (tokens, lengths, choices, prompt_ids))[0]


@functools.partial(jax.jit, static_argnames=("graph", "new_tokens", "pad_id", "layout"))
def draw_batch(
    parameters: Parameters,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    choices: RowChoices,
    *,
    graph: nnx.GraphDef,
    new_tokens: int,
    pad_id: int,
    layout: MeshLayout | None = None,
) -> tuple[Int[Array, "B new"], Float[Array, "B new"]]:
    """Samples up to `new_tokens` tokens for each row; see `continue_batch`.

    Returns:
      The new tokens, including the one that ends the row, and the log-probability of
      each, in nats.
    """
    run = _continuing(layout, graph, new_tokens, DRAWN, pad_id)
    written, logprobs = run(parameters, (tokens, lengths, choices, None))
    assert logprobs is not None  # since `DRAWN` needs them
    return written, logprobs


def _continuing(
    layout: MeshLayout | None,
    graph: nnx.GraphDef,
    new_tokens: int,
    needs: Needs,
    pad_id: int,
) -> Callable[..., tuple[Int[Array, "B new"], Float[Array, "B new"] | None]]:
    """Returns a function that generates the tokens of rows; see `continue_batch`.

    It also returns their log-probabilities if `needs` includes them.
    """

    def run(parameters: Parameters, rows: tuple):  # of one device
        tokens, lengths, choices, prompt_ids = rows
        model = cast(LanguageModel, merge(graph, parameters))
        decoder = TokenDecoder(model, choices, needs, pad_id)
        state = decoder.start(tokens, lengths, new_tokens, prompt_ids)

        def unfinished(state: Decoding) -> Bool[Array, ""]:
            every = collectives.true_everywhere(jnp.all(state.ended))
            return (state.step < new_tokens) & ~every

        state = jax.lax.while_loop(unfinished, decoder.generate_token, state)
        return state.written, state.logprobs

    return map_rows(layout, graph, run)


class Decoding(NamedTuple):
    """State of rows during generation.

    `step` tokens are generated per row. `cache` has the keys and values of everything
    before the `last` token.
    """

    step: Int[Array, ""]
    written: Int[Array, "B new"]
    logprobs: Float[Array, "B new"] | None
    ended: Bool[Array, "B"]
    last: Int[Array, "B"]
    cache: Cache


class TokenDecoder(NamedTuple):
    """Generates token by token; attributes as in `continue_batch`."""

    model: LanguageModel
    choices: RowChoices
    needs: Needs
    pad_id: int

    def start(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, "B"],
        new_tokens: int,
        prompt_ids: Int[Array, "B"] | None,
    ) -> Decoding:
        """Reads the prompt and the rows, and generates the first token."""
        sizes = " x ".join(map(str, tokens.shape))
        update_status(f"compiling the generation ({sizes} + {new_tokens})")
        rows = tokens.shape[0]
        hidden, cache = self.model.prefill(tokens, lengths, new_tokens, prompt_ids)
        chosen, ended = self._choose(hidden, jnp.array(0), jnp.zeros(rows, bool))
        first = jnp.asarray(chosen.tokens)
        written = jnp.full((rows, new_tokens), self.pad_id, jnp.int32)
        written = written.at[:, 0].set(first)
        logprobs = None
        if chosen.logprobs is not None:
            zeros = jnp.zeros((rows, new_tokens))
            logprobs = zeros.at[:, 0].set(chosen.logprobs)
        return Decoding(jnp.array(1), written, logprobs, ended, first, cache)

    def generate_token(self, state: Decoding) -> Decoding:
        """Generates the next token of each row."""
        hidden, cache = self.model.decode(state.last, state.cache)
        chosen, ended = self._choose(hidden, state.step, state.ended)
        tokens = jnp.asarray(chosen.tokens)
        written = state.written.at[:, state.step].set(tokens)
        logprobs = state.logprobs
        if logprobs is not None:
            logprobs = logprobs.at[:, state.step].set(jnp.asarray(chosen.logprobs))
        return Decoding(state.step + 1, written, logprobs, ended, tokens, cache)

    def _choose(self, hidden, step, ended):  # hidden: [B, D], ended: [B]
        logits = self.model.token_logits(hidden)
        choices = self.choices._replace(step=self.choices.step + step)
        chosen = choose_tokens(logits, choices, None, self.needs, tempered=True)
        tokens = jnp.where(ended, self.pad_id, jnp.asarray(chosen.tokens))
        ended |= (tokens[:, None] == choices.ends).any(axis=1)
        return chosen._replace(tokens=tokens), ended


def continue_batch_streamed(
    everything: Leaves,
    tokens: Any,
    lengths: Any,
    choices: RowChoices,
    prompt_ids: Any = None,
    *,
    graph: nnx.GraphDef,
    new_tokens: int,
    needs: Needs = GREEDY,
    pad_id: int,
) -> np.ndarray:
    """Does the same as `continue_batch` with one pass over the layers per token.

    Each pass serves all rows, so large batches share the time of reading. Arguments are
    the same; some parameters are a `LayeredWeight`.
    """
    start, step = _functions(graph, new_tokens, needs, pad_id)
    rows = (tokens, lengths, choices, prompt_ids)
    state: Decoding = start.forward({}, everything, *rows)
    while int(state.step) < new_tokens and not np.all(state.ended):
        with jax.profiler.TraceAnnotation("generate token"):
            state = step.forward({}, everything, state, choices)
    return np.asarray(state.written)


@functools.lru_cache(maxsize=4)
def _functions(
    graph: nnx.GraphDef, new_tokens: int, needs: Needs, pad_id: int
) -> tuple[StreamedFunction, StreamedFunction]:
    """Returns the functions of the first token and of later ones."""

    def decoder(parameters: Any, choices: RowChoices) -> TokenDecoder:
        model = cast(LanguageModel, merge(graph, parameters))
        return TokenDecoder(model, choices, needs, pad_id)

    def start(_, frozen, tokens, lengths, choices, prompt_ids):
        first = decoder(frozen, choices)
        return first.start(tokens, lengths, new_tokens, prompt_ids)

    def step(_, frozen, state, choices):
        return decoder(frozen, choices).generate_token(state)

    return StreamedFunction(start), StreamedFunction(step)
