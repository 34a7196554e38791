"""Generation for one row whose tokens are shown while they are generated."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from prompt_tuning.core.activity import activity
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.generation.engine import (
    advance_rows,
    pad_rows,
    start_rows,
    strip_end,
)
from prompt_tuning.generation.sampling import Sampler, greedy
from prompt_tuning.generation.text_generation import (
    GENERATES,
    check_prompt_ids,
    check_rows,
    continuation_text,
    continue_all,
)
from prompt_tuning.pretrained.prompted_model import PromptedModel

STREAMED_TOKENS = 4
"""Number of tokens that are generated before the next ones are shown."""

SHORTEST_ROW = 32
"""Smallest length that a row is padded to; the others are its doubles."""

INCOMPLETE = "\ufffd"
"""Text of bytes that are only a part of a character."""


def stream_tokens(
    model: PromptedModel,
    parameters: Parameters,
    row: Sequence[int],
    *,
    new_tokens: int,
    sampler: Sampler = greedy,
    seed: int = 0,
    prompt_id: int | None = None,
    stop_ids: Sequence[int] = (),
) -> Iterator[list[int]]:
    """Yields the tokens that `continue_all` returns for a single row, a few at a time.

    On a mesh all of them come at once. Arguments and errors as in `continue_all`.
    """
    prompt_ids = None if prompt_id is None else [prompt_id]
    if model.layout is not None:
        yield continue_all(
            model,
            parameters,
            [row],
            new_tokens=new_tokens,
            sampler=sampler,
            seed=seed,
            prompt_ids=prompt_ids,
            stop_ids=stop_ids,
        )[0]
        return
    model.weight_storage.reject_streamed(GENERATES)
    check_rows(model, [row], new_tokens)
    check_prompt_ids(model, prompt_ids, 1)
    ends = (*model.stop_ids, *stop_ids)
    settings = {
        "graph": model.graph,
        "sampler": sampler,
        "stop_ids": ends,
        "pad_id": model.config.pad_id,
    }
    tokens, lengths = pad_rows([row], model.config.pad_id, _padded_length(model, row))
    # The key of the first row in `continue_all`.
    keys = jax.random.fold_in(jax.random.key(seed), 0)[None]
    chosen = None if prompt_ids is None else jnp.array(prompt_ids)
    # Only a shape that is compiled is shown.
    with activity():
        state = start_rows(
            parameters, tokens, lengths, keys, chosen, new_tokens=new_tokens, **settings
        )
    shown = 0
    while True:
        step, ended = int(state.step), bool(np.asarray(state.ended).all())
        fresh = np.asarray(state.written)[0, shown:step].tolist()
        yield strip_end(fresh, ends)
        shown = step
        if ended or step >= new_tokens:
            return
        limit = min(step + STREAMED_TOKENS, new_tokens)
        state = advance_rows(parameters, state, keys, jnp.array(limit), **settings)


def _padded_length(model: PromptedModel, row: Sequence[int]) -> int:
    """Returns one of few lengths, so that a growing conversation rarely compiles."""
    length = SHORTEST_ROW
    while length < len(row):
        length *= 2
    room = model.maximum_length
    return length if room is None else min(length, room)


def stream_text(
    model: PromptedModel, row: Sequence[int], chunks: Iterator[list[int]]
) -> Iterator[str]:
    """Yields the text of generated tokens in pieces that together are all of it.

    Args:
      model: model whose tokenizer decodes them.
      row: token ids that were continued.
      chunks: generated ids; see `stream_tokens`.
    """
    tokenizer = model.needed_tokenizer()
    separate = model.config.architecture == "encoder_decoder"
    given = [] if separate else [i for i in row if i < model.config.vocabulary_size]
    tokens: list[int] = []
    text = shown = ""
    for chunk in chunks:
        tokens += chunk
        text = continuation_text(tokenizer, given, tokens)
        # A character may have tokens that are not generated yet.
        complete = text.rstrip(INCOMPLETE)
        if complete.startswith(shown):
            yield complete[len(shown) :]
            shown = complete
    if text.startswith(shown):
        yield text[len(shown) :]
