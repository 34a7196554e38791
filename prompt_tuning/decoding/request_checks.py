"""Checks of an engine, and of requests before they are queued."""

from collections.abc import Sequence

import numpy as np

from prompt_tuning.core.errors import InputError
from prompt_tuning.decoding.adapter_table import PromptPages, ResidentAdapter
from prompt_tuning.decoding.detokenizer import stop_tokens
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.row_checks import GENERATES
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.text_encoding import encode_given
from prompt_tuning.prompts.placement import TEMPLATE

SHORTEST_SLOT = 64
"""Shortest length of slots; longer ones are powers of two times it."""


def check_ids(ids: Sequence[int], adapter: ResidentAdapter) -> None:
    """Checks the ids of a row.

    Raises:
      InputError: if an id is neither a token nor a prompt vector, or the row is empty
        and the model needs a token.
    """
    model = adapter.model
    size = model.config.vocabulary_size
    if model.prompting.placement == TEMPLATE:
        size += model.prompt_length
    outside = [token for token in ids if not 0 <= token < size]
    if outside:
        raise InputError(f"the request has id {outside[0]}, expected 0 to {size - 1}")
    if not ids and not model.predicts_without_text:
        raise InputError(
            "the text has no token, and without prompt vectors or a "
            "beginning-of-sequence token there is nothing to continue"
        )


def fitting_tokens(
    new: int,
    given: int,
    adapter: ResidentAdapter,
    prompt: PromptPages,
    limit: int,
    *,
    fits: bool,
) -> int:
    """Returns the number of new tokens of a row that fits in a slot.

    `fits` allows fewer tokens than the `new` requested ones; `limit` is the number of
    positions in a slot.

    Raises:
      InputError: if the row and its new tokens do not fit in a slot and the model.
    """
    config = adapter.model.config
    joint, room = config.architecture == "encoder_decoder", config.maximum_positions
    if fits:
        free = limit if room is None else min(limit, room - prompt.length)
        free -= adapter.joined + (0 if joint else given)
        new = max(min(new, free), min(new, 1))
    # For each stack: tokens, prompt vectors among them, and positions before both.
    stacks = [(given + new, adapter.joined, prompt.length)]
    if joint:
        decoder = (new, adapter.joined, prompt.length)
        stacks = [(given, adapter.encoded, 0), decoder]
    ones = "one" if new == 1 else "ones"
    message = f"a row of {given} tokens and {new} new {ones} does not fit: "
    for taken, vectors, _ in stacks:
        if taken + vectors > limit:
            also = f", and the prompt takes {vectors}" if vectors else ""
            raise InputError(f"{message}a slot has {limit} positions{also}")
    for taken, vectors, pages in stacks:
        preceding = pages + vectors
        if room is not None and taken + preceding > room:
            also = f", and the prompt takes {preceding}" if preceding else ""
            raise InputError(
                f"{message}the model has {room} positions{also}{config.positions_note}"
            )
    return new


def check_embeddings(embeddings: np.ndarray, adapter: ResidentAdapter) -> None:
    """Checks vectors that replace tokens.

    Raises:
      InputError: if they do not fit the model, or the adapter's rows are read whole.
    """
    width = adapter.model.config.width
    if embeddings.ndim != 2 or embeddings.shape[1] != width or not len(embeddings):
        raise InputError(
            f"the embeddings have shape {embeddings.shape}, expected [T, {width}], a "
            "vector of the model's width for each position"
        )
    if not np.isfinite(embeddings).all():
        raise InputError("the embeddings have numbers that are not finite")
    if adapter.whole:
        raise InputError(
            "embeddings need a causal model and a prompt that comes first: send text"
        )


def read_ids(request: Request, adapter: ResidentAdapter) -> list[int]:
    """Returns the checked ids of a request's own text.

    Raises:
      InputError: if the model or the adapter cannot continue it.
    """
    model = adapter.model
    request.sampling.check_vocabulary(model.config.vocabulary_size)
    row_ends(request.sampling, model)
    if request.embeddings is not None:
        check_embeddings(request.embeddings, adapter)
    ids = encode_request(request, model)
    check_ids(ids, adapter)
    if request.sampling.given_logprobs is not None and (
        adapter.whole or request.embeddings is not None
    ):
        raise InputError(
            "log-probabilities of given tokens need a causal model, a prompt that "
            "comes first, and tokens: leave out given_logprobs (echo, prompt_logprobs)"
        )
    return ids


def encode_request(request: Request, model: PromptedModel) -> list[int]:
    """Returns the ids of a request's own text; without BOS after a shared text.

    Embeddings count as one padding id per position.
    """
    if request.embeddings is not None:
        return [model.config.pad_id] * len(request.embeddings)
    if request.ids is not None:
        return list(request.ids)
    assert request.text is not None  # checked by `Request`
    if request.shares:
        return list(model.needed_tokenizer().encode_continuation(request.text))
    return encode_given(model, request.text)


def text_before(
    request: Request, given: Sequence[int], model: PromptedModel
) -> list[int]:
    """Returns the ids of the text that new tokens continue.

    It is empty for an encoder-decoder, which starts a new text, and has no embeddings
    or prompt vectors.
    """
    if model.config.architecture == "encoder_decoder" or request.embeddings is not None:
        return []
    return [token for token in given if token < model.config.vocabulary_size]


def row_ends(sampling: Sampling, model: PromptedModel) -> tuple[int, ...]:
    """Returns the ids that end a row, including special tokens in `stop`.

    Raises:
      InputError: if a stop text can never appear in a text.
    """
    ends = () if sampling.ignores_end else model.stop_ids
    named = ()
    if model.tokenizer is not None:
        named = stop_tokens(model.tokenizer, sampling.stop)
    return tuple(dict.fromkeys((*ends, *sampling.ends, *named)))


def check_engine(
    model: PromptedModel, slots: int, length: int, chunk: int, page: int, together: int
) -> None:
    """Checks the sizes of an engine and that it supports the model."""
    sizes = {
        "slots": slots,
        "length": length,
        "chunk": chunk,
        "page": page,
        "together": together,
    }
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{name} is {size}, expected at least 1")
    if model.layout is not None:
        raise InputError("the decoding engine runs on one device: leave out the mesh")
    model.weight_storage.reject_streamed(GENERATES)


def slot_length(room: int) -> int:
    """Rounds a length up to one of few, so that few programs are compiled."""
    length = SHORTEST_SLOT
    while length < room:
        length *= 2
    return length


def slots_for(rows: int, maximum: int) -> int:
    """Returns the number of slots for a number of rows: a power of two up to a maximum.

    Calls with similar numbers of rows then share compiled programs.
    """
    return min(maximum, 1 << max(rows - 1, 0).bit_length())
