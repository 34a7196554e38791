"""Generate with streamed weights: one pass over the layers per token.

Each pass serves all rows of a batch, so large batches share the reading time.
"""

import functools
from typing import Any, cast

import jax
import numpy as np
from flax import nnx

from prompt_tuning.core.parameters import merge
from prompt_tuning.decoding.batch_decoding import GREEDY, Decoding, TokenDecoder
from prompt_tuning.decoding.token_choice import Needs, RowChoices
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.streaming.streamed_function import StreamedFunction
from prompt_tuning.streaming.traced_program import Leaves


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
    """Does the same as `continue_batch`, layer by layer.

    Takes the same arguments as `continue_batch`; some parameters are a `LayeredWeight`.
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
