"""Generation with a key/value cache, for rows of different lengths in one batch.

A row's continuation does not depend on the other rows: positions count only the row's
tokens, padding is masked, and each row has its own random key.
"""

import functools
import itertools
from collections.abc import Collection, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Int, Key

from prompt_tuning.core.activity import rename
from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.generation.sampling import Sampler, greedy
from prompt_tuning.models.cache import Cache
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.sharding import collectives
from prompt_tuning.sharding.mesh_layout import MeshLayout
from prompt_tuning.sharding.shard_map import map_rows


@functools.partial(
    jax.jit,
    static_argnames=("graph", "new_tokens", "sampler", "stop_ids", "pad_id", "layout"),
)
def continue_rows(
    parameters: Parameters,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    keys: Key[Array, "B"],
    prompt_ids: Int[Array, "B"] | None = None,
    *,
    graph: nnx.GraphDef,
    new_tokens: int,
    sampler: Sampler = greedy,
    stop_ids: tuple[int, ...],
    pad_id: int,
    layout: MeshLayout | None = None,
) -> Int[Array, "B new"]:
    """Generates up to `new_tokens` tokens for each row.

    The prompt and the rows are processed once (prefill); each step then generates one
    token a row, until every row has ended.

    Args:
      parameters: all parameters of the model by path.
      tokens: rows, padded on the right; for an encoder-decoder the encoder's input.
      lengths: number of real tokens of each row.
      keys: one random key for each row, used by sampling.
      prompt_ids: prompt of each row; see `Batch`.
      graph: structure of the model.
      new_tokens: maximum number of new tokens.
      sampler: chooses the next token.
      stop_ids: tokens of which each ends a row.
      pad_id: token after the end of a row.
      layout: layout of the parameters on a mesh; None for one device.

    Returns:
      The new tokens, including the one that ends the row.
    """
    run = functools.partial(
        _continue_local_rows,
        graph=graph,
        new_tokens=new_tokens,
        sampler=sampler,
        stop_ids=stop_ids,
        pad_id=pad_id,
    )
    rows = (tokens, lengths, keys, prompt_ids)
    return map_rows(layout, graph, run)(parameters, rows)


def _continue_local_rows(
    parameters: Parameters,
    inputs: tuple,
    *,
    graph: nnx.GraphDef,
    new_tokens: int,
    sampler: Sampler,
    stop_ids: tuple[int, ...],
    pad_id: int,
) -> Int[Array, "B new"]:
    """Generates the tokens of one device's rows; arguments as in `continue_rows`."""
    tokens, lengths, keys, prompt_ids = inputs
    decoder = TokenDecoder(
        cast(LanguageModel, merge(graph, parameters)), keys, sampler, stop_ids, pad_id
    )
    state = decoder.start(tokens, lengths, new_tokens, prompt_ids)
    return decoder.advance(state, new_tokens).written


class Decoding(NamedTuple):
    """Rows of which some tokens are generated.

    Attributes:
      step: number of generated tokens of each row.
      written: generated tokens, `[B, new]`.
      ended: whether each row has ended.
      last: token that was generated last, of each row.
      cache: keys and values of everything before the last token.
    """

    step: Int[Array, ""]
    written: Int[Array, "B new"]
    ended: Bool[Array, "B"]
    last: Int[Array, "B"]
    cache: Cache


class TokenDecoder(NamedTuple):
    """Generates token after token; attributes as in `continue_rows`."""

    model: LanguageModel
    keys: Key[Array, "B"]
    sampler: Sampler
    stop_ids: tuple[int, ...]
    pad_id: int

    def start(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, "B"],
        new_tokens: int,
        prompt_ids: Int[Array, "B"] | None,
    ) -> Decoding:
        """Processes the prompt and the rows, and generates the first token."""
        sizes = " x ".join(map(str, tokens.shape))
        rename(f"compiling the generation ({sizes} + {new_tokens})")
        rows = tokens.shape[0]
        hidden, cache = self.model.prefill(tokens, lengths, new_tokens, prompt_ids)
        first, ended = self._choose(hidden, jnp.array(0), jnp.zeros(rows, bool))
        written = jnp.full((rows, new_tokens), self.pad_id, jnp.int32)
        written = written.at[:, 0].set(first)
        return Decoding(jnp.array(1), written, ended, first, cache)

    def advance(self, state: Decoding, limit: int | Int[Array, ""]) -> Decoding:
        """Generates tokens until every row has ended or has `limit` tokens."""

        def unfinished(state):
            every = collectives.true_everywhere(jnp.all(state.ended))
            return (state.step < limit) & ~every

        return jax.lax.while_loop(unfinished, self.generate_token, state)

    def generate_token(self, state: Decoding) -> Decoding:
        """Generates one token of each row."""
        hidden, cache = self.model.decode(state.last, state.cache)
        chosen, ended = self._choose(hidden, state.step, state.ended)
        written = state.written.at[:, state.step].set(chosen)
        return Decoding(state.step + 1, written, ended, chosen, cache)

    def _choose(self, hidden, step, ended):  # hidden: [B, D], ended: [B]
        step_keys = jax.vmap(lambda key: jax.random.fold_in(key, step))(self.keys)
        chosen = self.sampler(self.model.logits(hidden), step_keys)  # [B, V] -> [B]
        chosen = jnp.where(ended, self.pad_id, chosen)
        for stop_id in self.stop_ids:
            ended |= chosen == stop_id
        return chosen, ended


_STATIC = ("graph", "sampler", "stop_ids", "pad_id")


@functools.partial(jax.jit, static_argnames=(*_STATIC, "new_tokens"))
def start_rows(
    parameters: Parameters,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    keys: Key[Array, "B"],
    prompt_ids: Int[Array, "B"] | None = None,
    *,
    graph: nnx.GraphDef,
    new_tokens: int,
    sampler: Sampler,
    stop_ids: tuple[int, ...],
    pad_id: int,
) -> Decoding:
    """Generates the first token of each row; arguments as in `continue_rows`."""
    model = cast(LanguageModel, merge(graph, parameters))
    decoder = TokenDecoder(model, keys, sampler, stop_ids, pad_id)
    return decoder.start(tokens, lengths, new_tokens, prompt_ids)


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="state")
def advance_rows(
    parameters: Parameters,
    state: Decoding,
    keys: Key[Array, "B"],
    limit: int | Int[Array, ""],
    *,
    graph: nnx.GraphDef,
    sampler: Sampler,
    stop_ids: tuple[int, ...],
    pad_id: int,
) -> Decoding:
    """Generates further tokens, until every row has `limit` of them or has ended.

    Together with `start_rows` it computes what `continue_rows` does, in parts whose
    tokens can be shown. Other arguments as in `continue_rows`.
    """
    model = cast(LanguageModel, merge(graph, parameters))
    return TokenDecoder(model, keys, sampler, stop_ids, pad_id).advance(state, limit)


def pad_rows(
    rows: Sequence[Sequence[int]], pad_id: int, length: int
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    """Pads rows on the right to one length.

    Returns:
      Tokens `[B, T]` and the number of real tokens of each row `[B]`.
    """
    tokens = np.full((len(rows), length), pad_id, np.int32)
    for padded, row in zip(tokens, rows, strict=True):
        padded[: len(row)] = row
    return tokens, np.array([len(row) for row in rows], np.int32)


def strip_end(row: Sequence[int], stop_ids: Collection[int]) -> list[int]:
    """Returns a generated row up to the token that ends it, exclusive."""
    return list(itertools.takewhile(lambda token: token not in stop_ids, map(int, row)))
