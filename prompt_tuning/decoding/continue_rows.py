"""Continue rows of token ids with one model, in slots or in batches."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.status_line import status
from prompt_tuning.data.batching.plan_batches import LengthGroup, group_by_length
from prompt_tuning.decoding import row_checks
from prompt_tuning.decoding.batch_decoding import (
    continue_batch,
    continue_batch_streamed,
)
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Request, content_number, repetitions
from prompt_tuning.decoding.request_checks import slots_for
from prompt_tuning.decoding.row_checks import positions_taken
from prompt_tuning.decoding.row_encoding import LENGTH_MULTIPLE, pad_rows, strip_end
from prompt_tuning.decoding.row_progress import first_choices, sampling_needs
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.pretrained.prompted_model import PromptedModel

CHUNK, TOGETHER = 32, 8
"""Number of tokens per row, and of rows, that are read together."""
LARGEST_PAGE, PAGE_MULTIPLE = 128, 16
"""Page sizes: a prompt that is not longer than the largest takes one page."""


def runs_in_slots(model: PromptedModel) -> bool:
    """Whether an engine supports the model: one device must hold all weights."""
    return model.layout is None and not model.weight_storage.by_layer


def continue_rows(
    model: PromptedModel,
    parameters: Parameters,
    rows: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    batch_size: int = 64,
    prompt_ids: Sequence[int] | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> list[list[int]]:
    """Continues every row; the result does not depend on how rows are batched.

    Without a prompt, each row needs at least one token. Each row samples as it would
    alone; equal rows sample differently. `on_batch` is called with a number of rows
    when these have ended.

    Returns:
      The new tokens of each row, without the one that ended it.

    Raises:
      InputError: if the batch size is not positive; if the settings need more than a
        temperature on a mesh or with streamed weights; and as in `check_generates`,
        `check_rows` and `check_prompt_ids`.
    """
    row_checks.check_generates(model)
    if batch_size < 1:
        raise InputError(f"batch_size is {batch_size}, expected at least 1")
    if not runs_in_slots(model):
        _check_options(sampling)
    if sampling.n > 1:
        raise InputError(f"n is {sampling.n}, expected 1 continuation of each row")
    row_checks.check_rows(model, rows, sampling.new_tokens)
    row_checks.check_prompt_ids(model, prompt_ids, len(rows))
    batches = _batches(model, rows, batch_size)
    numbered = zip(rows, prompt_ids or [0] * len(rows), strict=True)
    hashes = [hash((*row, prompt)) for row, prompt in numbered]
    samples = repetitions(hashes).tolist()
    given = _GivenRows(model, parameters, rows, sampling, samples, prompt_ids)
    continuations: dict[int, list[int]] = {}
    if runs_in_slots(model):
        numbers: dict[int, list[int]] = {}
        for group in batches:
            numbers.setdefault(group.length, []).extend(group.real)
        for length, chosen in numbers.items():
            continuations |= given.in_slots(chosen, length, batch_size, on_batch)
    else:
        for group in batches:
            continuations |= given.in_batch(group)
            if on_batch is not None:
                on_batch(len(group.real))
    return [continuations[index] for index in range(len(rows))]


def _check_options(sampling: Sampling) -> None:
    """Checks that the settings need none of the engine's per-row options."""
    needs = sampling_needs(sampling)
    unused = (needs.penalized, needs.constrained, needs.logprobs, needs.masked)
    if any(unused) or sampling.stop or sampling.n > 1:
        raise InputError(
            "on a mesh and with streamed weights, a row has one continuation, drawn "
            "with temperature, top_k, top_p and min_p alone: leave out the other "
            "settings, or set Run.mesh = None and Pretrained.weights = 'device'"
        )


@dataclasses.dataclass(frozen=True)
class _GivenRows:
    """Rows to continue, by index; see `continue_rows`.

    `samples` are the numbers of their samples, which differ for equal rows.
    """

    model: PromptedModel
    parameters: Parameters
    rows: Sequence[Sequence[int]]
    sampling: Sampling
    samples: Sequence[int]
    prompt_ids: Sequence[int] | None

    def in_batch(self, group: LengthGroup) -> dict[int, list[int]]:
        """Continues a batch on a mesh, or layer by layer if weights are streamed."""
        model, sampling, filled = self.model, self.sampling, group.repeated
        chosen, pad_id = [self.rows[index] for index in filled], model.config.pad_id
        tokens, lengths = pad_rows(chosen, pad_id, group.length)
        ends = (*model.stop_ids, *sampling.ends)
        prompts = None
        if self.prompt_ids is not None:
            prompts = jnp.array([self.prompt_ids[index] for index in filled])
        numbers = [self.samples[index] for index in filled]
        contents = list(map(content_number, chosen))
        choices = first_choices(sampling, ends, numbers, contents)
        inputs = (tokens, lengths, choices, prompts)
        settings: dict[str, Any] = {
            "graph": model.graph,
            "new_tokens": sampling.new_tokens,
            "needs": sampling_needs(sampling),
            "pad_id": pad_id,
        }
        if model.weight_storage.by_layer:
            everything = model.by_layer(self.parameters)
            with status("generating; each token reads all streamed weights"):
                generated = continue_batch_streamed(everything, *inputs, **settings)
        else:
            settings["layout"] = model.layout
            # Show only shapes that are compiled.
            with status():
                generated = continue_batch(self.parameters, *inputs, **settings)
                generated = np.asarray(generated)
        return {
            index: strip_end(row, ends)
            for index, row in zip(group.real, generated.tolist(), strict=False)
        }

    def in_slots(
        self,
        numbers: Sequence[int],
        length: int,
        slots: int,
        on_ended: Callable[[int], None] | None,
    ) -> Iterator[tuple[int, list[int]]]:
        """Continues some rows, and yields the index and new tokens of each.

        A row joins when another one ends. The rows have at most `length` tokens.
        `on_ended` is called with a number of rows when these have ended.
        """
        order, prompts = list(numbers), self.prompt_ids
        if prompts is not None:
            # Rows that run together attend to few prompts.
            order.sort(key=prompts.__getitem__)
        engine = self._open_engine(len(order), length, slots)
        handles = [
            engine.submit(
                Request(
                    ids=self.rows[number],
                    prompt_id=None if prompts is None else prompts[number],
                    sampling=self.sampling,
                    first_sample=self.samples[number],
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

    def _open_engine(self, count: int, length: int, slots: int) -> DecodingEngine:
        """Opens an engine whose programs calls with similar rows share.

        It has `slots` slots, or the next power of two if there are fewer rows.
        """
        model, sampling, used = self.model, self.sampling, slots_for(count, slots)
        # Tokens are decoded only for settings that concern their text.
        if not (sampling.stop or sampling_needs(sampling).masked):
            model = dataclasses.replace(model, tokenizer=None)
        page = -(-model.prompt_length // PAGE_MULTIPLE) * PAGE_MULTIPLE
        return DecodingEngine(
            model,
            self.parameters,
            slots=used,
            length=positions_taken(model, length, sampling.new_tokens),
            chunk=CHUNK,
            page=min(max(page, PAGE_MULTIPLE), LARGEST_PAGE),
            together=min(TOGETHER, used),
            adapted=True,
        )


def _batches(
    model: PromptedModel, rows: Sequence[Sequence[int]], batch_size: int
) -> list[LengthGroup]:
    """Groups rows into batches of few lengths, if possible multiples of 16.

    Lengths are coarser than in training, so that separate calls share compiled
    programs.
    """
    room = model.maximum_length
    lengths = -(-np.array([len(row) for row in rows]) // LENGTH_MULTIPLE)
    lengths = LENGTH_MULTIPLE * np.maximum(lengths, 1)
    return group_by_length(
        lengths if room is None else np.minimum(lengths, room),
        batch_size=batch_size,
        maximum_length=room,
        row_parts=model.interface.rows.parts,
    )
