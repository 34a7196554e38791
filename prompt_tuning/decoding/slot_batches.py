"""Continue many rows in the slots of an engine: a row joins when another one ends."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.status_line import status
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.request_checks import slots_for
from prompt_tuning.decoding.row_checks import positions_taken
from prompt_tuning.decoding.row_progress import sampling_needs
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.pretrained.prompted_model import PromptedModel

CHUNK, TOGETHER = 32, 8
"""Number of tokens per row, and of rows, that are read together."""

LARGEST_PAGE, PAGE_MULTIPLE = 128, 16
"""Page sizes: a prompt that is not longer than the largest takes one page."""


def continue_in_slots(
    model: PromptedModel,
    parameters: Parameters,
    rows: Sequence[Sequence[int]],
    numbers: Sequence[int],
    length: int,
    sampling: Sampling,
    *,
    samples: Sequence[int],
    slots: int,
    prompt_ids: Sequence[int] | None = None,
    on_ended: Callable[[int], None] | None = None,
) -> Iterator[tuple[int, list[int]]]:
    """Continues rows, and yields the number and new tokens of each as it ends.

    `numbers` are the indices of the rows to continue, which have at most `length`
    tokens. `on_ended` is called with a number of rows when these have ended.
    """
    order = list(numbers)
    if prompt_ids is not None:
        # Rows that run together attend to few prompts.
        order.sort(key=lambda number: prompt_ids[number])
    engine = _open_engine(model, parameters, len(order), length, sampling, slots)
    handles = [
        engine.submit(
            Request(
                ids=rows[number],
                prompt_id=None if prompt_ids is None else prompt_ids[number],
                sampling=sampling,
                first_sample=samples[number],
            )
        )
        for number in order
    ]
    while not engine.idle:
        # Show only programs that are compiled.
        with status():
            pieces = engine.step()
        ended = sum(piece.completion is not None for piece in pieces)
        if ended and on_ended is not None:
            on_ended(ended)
    for number, handle in zip(order, handles, strict=True):
        yield number, list(handle.completions[0].ids)


def _open_engine(
    model: PromptedModel,
    parameters: Parameters,
    count: int,
    length: int,
    sampling: Sampling,
    slots: int,
) -> DecodingEngine:
    """Opens an engine whose programs calls with similar rows share.

    It has `slots` slots, or the next power of two if there are fewer rows.
    """
    used = slots_for(count, slots)
    positions = positions_taken(model, length, sampling.new_tokens)
    # Tokens are decoded only for settings that concern their text.
    if not (sampling.stop or sampling_needs(sampling).masked):
        model = dataclasses.replace(model, tokenizer=None)
    page = -(-model.prompt_length // PAGE_MULTIPLE) * PAGE_MULTIPLE
    return DecodingEngine(
        model,
        parameters,
        slots=used,
        length=positions,
        chunk=CHUNK,
        page=min(max(page, PAGE_MULTIPLE), LARGEST_PAGE),
        together=min(TOGETHER, used),
        adapted=True,
    )
