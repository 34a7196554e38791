"""Generation with streamed weights: one pass over the layers for each token.

Each pass serves all rows of a batch, so large batches share the time of reading.
"""

import functools
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from prompt_tuning.core.parameters import merge
from prompt_tuning.generation.engine import Decoding, TokenDecoder
from prompt_tuning.generation.sampling import Sampler
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.streaming.streamed_function import StreamedFunction
from prompt_tuning.streaming.traced_program import Leaves


def continue_rows_streamed(
    everything: Leaves,
    tokens: Any,
    lengths: Any,
    keys: Any,
    prompt_ids: Any = None,
    *,
    graph: nnx.GraphDef,
    new_tokens: int,
    sampler: Sampler,
    stop_ids: tuple[int, ...],
    pad_id: int,
) -> np.ndarray:
    """Generates the tokens of `continue_rows`, layer by layer.

    Args:
      everything: all parameters by path; some are a `LayeredWeight`.
      tokens: rows, padded on the right.
      lengths: number of real tokens of each row.
      keys: one random key for each row.
      prompt_ids: prompt of each row.
      graph: structure of the model.
      new_tokens: maximum number of new tokens.
      sampler: chooses the next token.
      stop_ids: tokens of which each ends a row.
      pad_id: token after the end of a row.

    Returns:
      The new tokens `[B, new]`, including the one that ends the row.
    """
    start, step = _functions(graph, new_tokens, sampler, stop_ids, pad_id)
    rows = (tokens, lengths, keys, prompt_ids)
    state: Decoding = start.forward({}, everything, *rows)
    while int(state.step) < new_tokens and not np.all(state.ended):
        with jax.profiler.TraceAnnotation("generate token"):
            state = step.forward({}, everything, state, keys)
    return np.asarray(state.written)


@functools.lru_cache(maxsize=4)
def _functions(
    graph: nnx.GraphDef,
    new_tokens: int,
    sampler: Sampler,
    stop_ids: tuple[int, ...],
    pad_id: int,
) -> tuple[StreamedFunction, StreamedFunction]:
    """Returns the functions for the first token and for each further one."""

    def decoder(parameters: Any, keys: Any) -> TokenDecoder:
        model = cast(LanguageModel, merge(graph, parameters))
        return TokenDecoder(model, keys, sampler, stop_ids, pad_id)

    def start(_, frozen, tokens, lengths, keys, prompt_ids):
        first = decoder(frozen, keys)
        return first.start(tokens, lengths, new_tokens, prompt_ids)

    def step(_, frozen, state, keys):
        return decoder(frozen, keys).generate_token(state)

    return StreamedFunction(start), StreamedFunction(step)
