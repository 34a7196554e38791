"""Generation with a key/value cache, rows of different lengths side by side.

A row's continuation does not depend on its neighbours: positions count the row's own
tokens, padding is masked, and random draws use a key of the row's own.
"""

import functools
from collections.abc import Sequence
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
    static_argnames=("graph", "new_tokens", "sampler", "eos_id", "pad_id", "layout"),
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
    eos_id: int | None,
    pad_id: int,
    layout: MeshLayout | None = None,
) -> Int[Array, "B new"]:
    """Generates up to `new_tokens` tokens for each row.

    The prompt and the rows are read once; then one token a step, until every row has
    ended.

    Args:
      parameters: all parameters of the model by path.
      tokens: rows, padded on the right; for an encoder-decoder the encoder's input.
      lengths: real tokens of each row.
      keys: one random key a row, used by sampling alone.
      prompt_ids: which prompt each row has; see `Batch`.
      graph: the model's structure.
      new_tokens: how many tokens at most.
      sampler: chooses the next token.
      eos_id: the token that ends a row, or None.
      pad_id: stands after a row's end.
      layout: how the parameters lie on a mesh; None on one device.

    Returns:
      the new tokens, the one that ends a row included.
    """
    run = functools.partial(
        _continued,
        graph=graph,
        new_tokens=new_tokens,
        sampler=sampler,
        eos_id=eos_id,
        pad_id=pad_id,
    )
    rows = (tokens, lengths, keys, prompt_ids)
    return map_rows(layout, graph, run)(parameters, rows)


def _continued(
    parameters: Parameters,
    given: tuple,
    *,
    graph: nnx.GraphDef,
    new_tokens: int,
    sampler: Sampler,
    eos_id: int | None,
    pad_id: int,
) -> Int[Array, "B new"]:
    """What `continue_rows` gives, of a device's rows; arguments as there."""
    tokens, lengths, keys, prompt_ids = given
    model = cast(LanguageModel, merge(graph, parameters))
    rows = tokens.shape[0]

    def choose(hidden, step, ended):
        step_keys = jax.vmap(lambda key: jax.random.fold_in(key, step))(keys)
        chosen = sampler(model.logits(hidden), step_keys)
        chosen = jnp.where(ended, pad_id, chosen)
        return chosen, ended if eos_id is None else ended | (chosen == eos_id)

    def going_on(carry):
        step, _, ended, _, _ = carry
        return (step < new_tokens) & ~collectives.true_everywhere(jnp.all(ended))

    def body(carry):
        step, written, ended, last, cache = carry
        hidden, cache = model.decode(last, cache)
        chosen, ended = choose(hidden, step, ended)
        return step + 1, written.at[:, step].set(chosen), ended, chosen, cache

    hidden, cache = model.prefill(tokens, lengths, new_tokens, prompt_ids)
    first, ended = choose(hidden, 0, jnp.zeros(rows, bool))
    written = jnp.full((rows, new_tokens), pad_id, jnp.int32).at[:, 0].set(first)
    carry = (jnp.array(1), written, ended, first, cache)
    return jax.lax.while_loop(going_on, body, carry)[1]


def pad_rows(
    rows: Sequence[Sequence[int]], pad_id: int, length: int
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    """Pads rows on the right to one length.

    Returns:
      tokens `[B, T]` and the rows' own lengths `[B]`.
    """
    tokens = np.full((len(rows), length), pad_id, np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = row
    return tokens, np.array([len(row) for row in rows], np.int32)


def strip_end(row: Sequence[int], eos_id: int | None) -> list[int]:
    """A generated row up to the token that ends it."""
    ids = [int(token) for token in row]
    return ids[: ids.index(eos_id)] if eos_id in ids else ids
