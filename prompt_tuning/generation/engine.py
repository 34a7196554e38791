"""Generation with a key/value cache, for rows of different lengths in one batch.

A row's continuation does not depend on the other rows: positions count only the row's
tokens, padding is masked, and each row has its own random key.
"""

import functools
import itertools
from collections.abc import Collection, Sequence
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int, Key

from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.generation.sampling import Sampler, greedy
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
    model = cast(LanguageModel, merge(graph, parameters))
    rows = tokens.shape[0]

    def choose(hidden, step, ended):  # hidden: [B, D], ended: [B]
        step_keys = jax.vmap(lambda key: jax.random.fold_in(key, step))(keys)
        chosen = sampler(model.logits(hidden), step_keys)  # [B, V] -> [B]
        chosen = jnp.where(ended, pad_id, chosen)
        for stop_id in stop_ids:
            ended |= chosen == stop_id
        return chosen, ended

    def unfinished(carry):
        step, _, ended, _, _ = carry
        return (step < new_tokens) & ~collectives.true_everywhere(jnp.all(ended))

    def generate_token(carry):
        step, written, ended, last, cache = carry
        hidden, cache = model.decode(last, cache)
        chosen, ended = choose(hidden, step, ended)
        return step + 1, written.at[:, step].set(chosen), ended, chosen, cache

    hidden, cache = model.prefill(tokens, lengths, new_tokens, prompt_ids)
    first, ended = choose(hidden, 0, jnp.zeros(rows, bool))
    written = jnp.full((rows, new_tokens), pad_id, jnp.int32).at[:, 0].set(first)
    # step, tokens [B, new], ended [B], last token [B], key/value cache
    carry = (jnp.array(1), written, ended, first, cache)
    return jax.lax.while_loop(unfinished, generate_token, carry)[1]


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
