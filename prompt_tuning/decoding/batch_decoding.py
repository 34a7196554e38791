"""Generation with a key/value cache, for rows of different lengths in one batch.

A row's continuation does not depend on the other rows: positions count only the row's
tokens, padding is masked, and each row has its own random key.
"""

import functools
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int

from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.core.status_line import update_status
from prompt_tuning.decoding.token_choice import Needs, RowChoices, choose_tokens
from prompt_tuning.models.cache import Cache
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.sharding import collectives
from prompt_tuning.sharding.mesh_layout import MeshLayout
from prompt_tuning.sharding.shard_map import map_rows

GREEDY = Needs()
"""Needs of rows that take the most probable token."""


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

    The prompt and the rows are processed once (prefill); each step then generates one
    token a row, until every row has ended.

    Args:
      parameters: all parameters of the model by path.
      tokens: rows, padded on the right; for an encoder-decoder the encoder's input.
      lengths: number of real tokens of each row.
      choices: settings of each row's first token; see `first_choices`.
      prompt_ids: prompt of each row; see `Batch`.
      graph: structure of the model.
      new_tokens: maximum number of new tokens.
      needs: options that the rows use, none that counts tokens.
      pad_id: token after the end of a row.
      layout: layout of the parameters on a mesh; None for one device.

    Returns:
      The new tokens, including the one that ends the row.
    """
    run = functools.partial(
        _continue_local_rows,
        graph=graph,
        new_tokens=new_tokens,
        needs=needs,
        pad_id=pad_id,
    )
    rows = (tokens, lengths, choices, prompt_ids)
    return map_rows(layout, graph, run)(parameters, rows)


def _continue_local_rows(
    parameters: Parameters,
    inputs: tuple,
    *,
    graph: nnx.GraphDef,
    new_tokens: int,
    needs: Needs,
    pad_id: int,
) -> Int[Array, "B new"]:
    """Generates the tokens of one device's rows; arguments as in `continue_batch`."""
    tokens, lengths, choices, prompt_ids = inputs
    model = cast(LanguageModel, merge(graph, parameters))
    decoder = TokenDecoder(model, choices, needs, pad_id)
    state = decoder.start(tokens, lengths, new_tokens, prompt_ids)

    def unfinished(state: Decoding) -> Bool[Array, ""]:
        every = collectives.true_everywhere(jnp.all(state.ended))
        return (state.step < new_tokens) & ~every

    return jax.lax.while_loop(unfinished, decoder.generate_token, state).written


class Decoding(NamedTuple):
    """Rows with some tokens generated.

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
    """Generates token after token; attributes as in `continue_batch`."""

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
        """Processes the prompt and the rows, and generates the first token."""
        sizes = " x ".join(map(str, tokens.shape))
        update_status(f"compiling the generation ({sizes} + {new_tokens})")
        rows = tokens.shape[0]
        hidden, cache = self.model.prefill(tokens, lengths, new_tokens, prompt_ids)
        first, ended = self._choose(hidden, jnp.array(0), jnp.zeros(rows, bool))
        written = jnp.full((rows, new_tokens), self.pad_id, jnp.int32)
        written = written.at[:, 0].set(first)
        return Decoding(jnp.array(1), written, ended, first, cache)

    def generate_token(self, state: Decoding) -> Decoding:
        """Generates one token of each row."""
        hidden, cache = self.model.decode(state.last, state.cache)
        chosen, ended = self._choose(hidden, state.step, state.ended)
        written = state.written.at[:, state.step].set(chosen)
        return Decoding(state.step + 1, written, ended, chosen, cache)

    def _choose(self, hidden, step, ended):  # hidden: [B, D], ended: [B]
        logits = self.model.token_logits(hidden)
        choices = self.choices._replace(step=self.choices.step + step)
        chosen = jnp.asarray(choose_tokens(logits, choices, None, self.needs).tokens)
        chosen = jnp.where(ended, self.pad_id, chosen)
        ended |= (chosen[:, None] == choices.ends).any(axis=1)
        return chosen, ended
