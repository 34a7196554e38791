"""The decoding engine: rows join and leave the slots of one compiled step.

A row's tokens depend on its own text, adapter, seed and settings only. Each step reads
one token in every slot, whatever the slots hold, so that all sums of a row run over
arrays of the same shapes; see `slots` and `docs/decoding.md`.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.decoding import token_choice
from prompt_tuning.decoding.adapter_table import (
    PromptPages,
    ResidentAdapter,
    frozen_parameters,
    make_resident,
    stack_adapters,
)
from prompt_tuning.decoding.engine_metrics import EngineMetrics, MetricCounters
from prompt_tuning.decoding.request import Piece, Request, RequestHandle
from prompt_tuning.decoding.row_progress import RowProgress, row_choices
from prompt_tuning.decoding.shared_texts import SharedTexts
from prompt_tuning.decoding.slots import (
    Page,
    RowStates,
    Slots,
    copy_slot,
    read_chunk,
    read_row,
    read_tokens,
)
from prompt_tuning.generation.text_generation import GENERATES, encode_given
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.tuning import PromptPair
from prompt_tuning.prompts.prompt_settings import Prompting

AdapterReader = Callable[[Path], tuple[PromptedModel, Parameters]]
"""Reads an adapter: `path -> (the model with it, all its parameters)`."""

CHUNKS_PER_STEP = 4
"""Maximum number of chunks that are read between two steps of rows that generate."""


class DecodingEngine:
    """Generates for many requests at once; used from one thread.

    Args:
      model: the frozen model, or one with prompts and adapters, which are left out.
      parameters: all its parameters by path.
      slots: number of rows that are continued together.
      length: maximum number of tokens of a row, given and new; prompt vectors among
        them count.
      chunk: number of tokens of a row that are read at once.
      page: number of keys of a page of a prompt or a shared text.
      read_adapter: reads the files of `load_adapter`.

    Raises:
      InputError: if the model is on a mesh or its weights are streamed.
    """

    def __init__(
        self,
        model: PromptedModel,
        parameters: Parameters,
        *,
        slots: int = 32,
        length: int = 512,
        chunk: int = 64,
        page: int = 128,
        read_adapter: AdapterReader | None = None,
    ):
        _check_engine(model, slots, length, chunk, page)
        self.model, self.count, self.chunk, self.page = model, slots, chunk, page
        self.length = -(-length // chunk) * chunk
        self.limit = length
        self._frozen = frozen_parameters(parameters)
        self._read_adapter = read_adapter
        self._adapters: dict[str, ResidentAdapter] = {}
        self._slots = Slots.create(model.config, slots, self.length)
        self._vocabulary: token_choice.Vocabulary | None = None
        self._rows: list[RowProgress | None] = [None] * slots
        self._queue: deque[RowProgress] = deque()
        self._number = 0
        self._metrics = MetricCounters()
        self._stack()
        self._shared = SharedTexts(page)
        self._no_page = self._empty_page()
        self._bare = make_resident(
            "", _without_adapters(model, self._table.graph), self._frozen, page
        )

    # Adapters

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return tuple(self._adapters)

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Reads an adapter, which requests then choose by name.

        Args:
          name: name of the adapter; one that is loaded is replaced.
          path: run directory, checkpoint, PEFT folder, or prompt file.

        Raises:
          InputError: if it cannot be read, or belongs to another model.
        """
        if self._read_adapter is None:
            raise InputError("this engine was opened without a way to read adapters")
        try:
            model, parameters = self._read_adapter(Path(path))
        except InputError as problem:
            raise InputError(f"adapter {name}: {problem}") from problem
        self.add_adapter(name, model, parameters)

    def add_adapter(
        self, name: str, model: PromptedModel, parameters: Parameters
    ) -> None:
        """Adds an adapter that was read before.

        Args:
          name: name of the adapter; one that is loaded is replaced.
          model: the model with the adapter.
          parameters: all its parameters by path.

        Raises:
          InputError: if it belongs to another model, or a row still uses the adapter
            that it replaces.
        """
        if not name:
            raise InputError("an adapter's name is empty")
        if name in self._adapters:
            self._check_unused(name)
        if model.config != self.model.config:
            raise InputError(
                f"adapter {name} belongs to another model: its config differs in "
                f"{_differences(model.config, self.model.config)}"
            )
        shared = {p: self._frozen.get(p, leaf) for p, leaf in parameters.items()}
        adapter = make_resident(name, model, shared, self.page)
        self._adapters[name] = adapter
        self._shared.forget(name)
        self._stack()

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter.

        Raises:
          InputError: if no adapter has the name, or a row still uses it.
        """
        self._find(name)
        self._check_unused(name)
        del self._adapters[name]
        self._shared.forget(name)
        self._stack()

    def _check_unused(self, name: str) -> None:
        rows = [*self._queue, *(row for row in self._rows if row is not None)]
        users = sum(row.handle.request.adapter == name for row in rows)
        if users:
            raise InputError(
                f"adapter {name} is in use by {users} rows; wait until they have "
                "ended, or cancel them"
            )

    def _find(self, name: str | None) -> ResidentAdapter:
        if name is None:
            return self._bare
        if name not in self._adapters:
            names = ", ".join(self._adapters) or "none"
            raise InputError(f"no adapter is named {shown(name)}; loaded are: {names}")
        return self._adapters[name]

    def _stack(self) -> None:
        """Rebuilds the tables of adapters of projections."""
        self._table = stack_adapters(self.model.config, list(self._adapters.values()))
        self._parameters = self._frozen | self._table.tables

    # Requests

    def submit(self, request: Request) -> RequestHandle:
        """Queues a request.

        Raises:
          InputError: if its adapter is unknown or it does not fit into a slot.
        """
        adapter = self._find(request.adapter)
        prompt = self._prompt(adapter, request)
        sampling = request.sampling
        sampling.check_vocabulary(self.model.config.vocabulary_size)
        ids = list(request.ids) if request.ids is not None else None
        if ids is None:
            assert request.text is not None  # checked by `Request`
            ids = encode_given(adapter.model, request.text)
        self._check_row(ids, adapter, prompt, request)
        handle = RequestHandle(self._number, request)
        self._number += 1
        for sample in range(sampling.n):
            row = RowProgress(
                handle, sample, ids, adapter, prompt, self.model, self._metrics.now()
            )
            self._queue.append(row)
        self._metrics.submitted(len(ids))
        return handle

    def _prompt(self, adapter: ResidentAdapter, request: Request) -> PromptPages:
        """Returns what precedes a request's row: a prompt and a shared text."""
        count, number = len(adapter.prompts), request.prompt_id
        if count > 1 and number is None:
            raise InputError(
                f"adapter {adapter.name} has {count} prompts, and the request names "
                f"none: set prompt_id, 0 to {count - 1}"
            )
        if number is not None and not (count > 1 and 0 <= number < count):
            raise InputError(
                f"prompt_id is {number}, and adapter {adapter.name} has {count} "
                "prompts, from 0"
            )
        prompt = adapter.prompts[number or 0]
        if request.shared_text is None:
            return prompt
        if adapter.whole:
            raise InputError(
                "shared_text needs a causal model and a prompt that comes first: put "
                "it into the text"
            )
        ids = encode_given(adapter.model, request.shared_text)
        return self._shared.pages(
            (request.adapter, request.prompt_id, tuple(ids)),
            prompt,
            self._parameters,
            self._table.graph,
            self._table.entries.get(adapter.name, 0),
            self.model.config.pad_id,
        )

    def _check_row(
        self,
        ids: Sequence[int],
        adapter: ResidentAdapter,
        prompt: PromptPages,
        request: Request,
    ) -> None:
        """Checks that a row and its new tokens fit into a slot and the model."""
        new, given = request.sampling.new_tokens, len(ids)
        separate = self.model.config.architecture == "encoder_decoder"
        size = self.model.config.vocabulary_size + adapter.model.prompt_length
        if not all(0 <= token < size for token in ids):
            raise InputError(f"the request has ids outside the {size} of the model")
        taken = max(given, new) if separate else given + new
        if taken + adapter.joined > self.limit:
            raise InputError(
                f"a row of {given} tokens and {new} new ones does not fit: a slot has "
                f"{self.limit} positions"
                + (f" and the prompt takes {adapter.joined}" * bool(adapter.joined))
            )
        room = self.model.config.maximum_positions
        taken += prompt.length + adapter.joined
        if room is not None and taken > room:
            raise InputError(
                f"a row of {given} tokens and {new} new ones does not fit: the model "
                f"has {room} positions, of which the prompt takes "
                f"{prompt.length + adapter.joined}"
            )
        if not given and not adapter.model.predicts_without_text:
            raise InputError(
                "the text has no token, and without prompt vectors or a "
                "beginning-of-sequence token there is nothing to continue"
            )

    def cancel(self, handle: RequestHandle) -> None:
        """Ends the rows of a request; their slots are free at once."""
        for row in [row for row in self._queue if row.handle == handle]:
            self._queue.remove(row)
            row.finish("cancelled")
            self._metrics.ended(cancelled=True)
        for slot, row in enumerate(self._rows):
            if row is not None and row.handle == handle:
                self._rows[slot] = None
                row.finish("cancelled")
                self._metrics.ended(cancelled=True)

    @property
    def idle(self) -> bool:
        """Whether no request is queued or running."""
        return not self._queue and not any(row is not None for row in self._rows)

    def metrics(self) -> EngineMetrics:
        """Returns counts since the engine was opened, and what it does now."""
        active = sum(row is not None for row in self._rows)
        return self._metrics.snapshot(self.count, active, len(self._queue))

    def run(self, requests: Sequence[Request]) -> list[RequestHandle]:
        """Submits requests and steps until all have ended."""
        handles = [self.submit(request) for request in requests]
        while not all(handle.finished for handle in handles):
            self.step()
        return handles

    # Steps

    def step(self) -> list[Piece]:
        """Lets rows join, reads parts of their texts, and generates one token a row.

        Returns:
          the new tokens of each row.
        """
        self._admit()
        self._read_texts()
        active = [
            (slot, row)
            for slot, row in enumerate(self._rows)
            if row is not None and row.ready
        ]
        if not active:
            return []
        pages, visible = self._active_pages(active)
        chosen = self._choose(active)
        states = self._states(active, visible)
        self._slots = read_tokens(
            self._parameters,
            self._slots,
            chosen.tokens,
            states,
            pages,
            graph=self._table.graph,
        )
        return self._deliver(active, chosen)

    def _admit(self) -> None:
        """Gives free slots to the rows that wait longest."""
        for slot, occupant in enumerate(self._rows):
            if occupant is None and self._queue:
                row = self._queue.popleft()
                self._rows[slot] = row
                row.leader = self._leader(row)
                self._start_choices(slot, row)

    def _leader(self, row: RowProgress) -> int | None:
        """Returns the slot of another sample of a row, whose text is not read yet."""
        for slot, other in enumerate(self._rows):
            if (
                other is not None
                and other is not row
                and other.handle == row.handle
                and other.leader is None
                and not other.ready
            ):
                return slot
        return None

    def _read_texts(self) -> None:
        """Reads chunks of texts, only a few while other rows wait for their step."""
        budget = CHUNKS_PER_STEP
        if not any(row is not None and row.ready for row in self._rows):
            budget = self.count
        for slot, row in enumerate(self._rows):
            if row is None or row.ready or row.leader is not None:
                continue
            while budget > 0 and not row.ready:
                self._read_part(slot, row)
                budget -= 1
            if row.ready:
                self._start_followers(slot)

    def _read_part(self, slot: int, row: RowProgress) -> None:
        """Reads the next chunk of a row, or the row whole where it must be."""
        pad = self.model.config.pad_id
        if row.reads_whole:
            size = self.chunk
            while size < len(row.given):
                size *= 2
            tokens = np.full((1, size), pad, np.int32)
            tokens[0, : len(row.given)] = row.given
            number = row.handle.request.prompt_id
            self._slots, written, first = read_row(
                row.adapter.parameters,
                self._slots,
                np.int32(slot),
                tokens,
                np.array([len(row.given)], np.int32),
                None if number is None else np.array([number], np.int32),
                graph=row.adapter.model.graph,
            )
            row.written, row.first, row.ready = int(written), int(first), True
            return
        part = row.given[row.written : row.written + self.chunk]
        tokens = np.full((1, self.chunk), pad, np.int32)
        tokens[0, : len(part)] = part
        pages = _padded(row.prompt.pages, self._no_page)
        visible = np.zeros((1, len(pages)), np.int32)
        visible[0, : len(row.prompt.visible)] = row.prompt.visible
        self._slots = read_chunk(
            self._parameters,
            self._slots,
            np.int32(slot),
            tokens,
            np.int32(len(part)),
            self._row_state(row, visible),
            pages,
            graph=self._table.graph,
        )
        row.written += len(part)
        row.ready = row.written == len(row.given)

    def _row_state(self, row: RowProgress, visible: np.ndarray) -> RowStates:
        return RowStates(
            np.array([row.written], np.int32),
            np.array([row.first], np.int32),
            np.array([True]),
            np.array([self._entry(row)], np.int32),
            visible,
        )

    def _entry(self, row: RowProgress) -> int:
        return self._table.entries.get(row.adapter.name, 0)

    def _start_followers(self, slot: int) -> None:
        """Copies a row that was read to the slots of its other samples."""
        source = self._rows[slot]
        assert source is not None
        for other, row in enumerate(self._rows):
            if row is not None and row.leader == slot and row.handle == source.handle:
                self._slots = copy_slot(self._slots, np.int32(slot), np.int32(other))
                row.written, row.first = source.written, source.first
                row.ready, row.leader = True, None

    def _active_pages(
        self, active: Sequence[tuple[int, RowProgress]]
    ) -> tuple[tuple[Page, ...], np.ndarray]:
        """Returns the pages that active rows see, and how much each row sees of each.

        Pages of one row stay in their order.
        """
        columns: dict[int, int] = {}
        pages: list[Page] = []
        for _, row in active:
            for page in row.prompt.pages:
                if id(page.key_values) not in columns:
                    columns[id(page.key_values)] = len(pages)
                    pages.append(page)
        padded = _padded(pages, self._no_page)
        visible = np.zeros((self.count, len(padded)), np.int32)
        for slot, row in active:
            for page, count in zip(row.prompt.pages, row.prompt.visible, strict=True):
                visible[slot, columns[id(page.key_values)]] = count
        return padded, visible

    def _states(
        self, active: Sequence[tuple[int, RowProgress]], visible: np.ndarray
    ) -> RowStates:
        numbers = np.zeros((3, self.count), np.int32)
        marks = np.zeros(self.count, bool)
        for slot, row in active:
            numbers[:, slot] = row.written, row.first, self._entry(row)
            marks[slot] = True
        return RowStates(numbers[0], numbers[1], marks, numbers[2], visible)

    def _empty_page(self) -> Page:
        config = self.model.config
        shape = (config.layers, config.key_value_heads, 1, self.page, config.head_width)
        zeros = jnp.zeros(shape, config.dtype)
        return Page(KeyValues(zeros, zeros), jnp.array(0))

    # Tokens

    def _start_choices(self, slot: int, row: RowProgress) -> None:
        """Sets the numbers of the vocabulary for a row that needs them."""
        if not (row.needs.penalized or row.needs.constrained):
            return
        size = self.model.config.vocabulary_size
        if self._vocabulary is None:
            shape = (self.count, size)
            self._vocabulary = token_choice.Vocabulary(
                jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32), jnp.zeros(shape)
            )
        self._vocabulary = token_choice.start_row(
            self._vocabulary, np.int32(slot), row.given_marks(size), row.biases(size)
        )

    def _choose(self, active: Sequence[tuple[int, RowProgress]]) -> token_choice.Chosen:
        """Chooses the next token of each row."""
        needs = token_choice.Needs()
        for _, row in active:
            needs = needs.union(row.needs)
        choices = row_choices(self.count, active)
        counted = needs.penalized or needs.constrained
        chosen, vocabulary = token_choice.choose(
            self._parameters,
            self._slots.hidden,
            choices,
            self._vocabulary if counted else None,
            graph=self._table.graph,
            needs=needs,
        )
        if counted:
            self._vocabulary = vocabulary
        return chosen

    def _deliver(
        self,
        active: Sequence[tuple[int, RowProgress]],
        chosen: token_choice.Chosen,
    ) -> list[Piece]:
        """Adds the chosen tokens to their rows and frees the slots of ended ones."""
        on_host = token_choice.Chosen(
            *(None if x is None else np.asarray(x) for x in chosen)
        )
        pieces = []
        for slot, row in active:
            if not row.tokens:
                self._metrics.first_token(row.submitted)
            row.written += 1
            piece = row.add(int(on_host.tokens[slot]), on_host, slot)
            pieces.append(piece)
            if piece.completion is not None:
                self._rows[slot] = None
                self._metrics.ended()
        self._metrics.generated(len(active))
        return pieces


def _padded(pages: Sequence[Page], empty: Page) -> tuple[Page, ...]:
    """Pads pages to a power of two, so that few numbers of pages are compiled."""
    count = 1 if pages else 0
    while count < len(pages):
        count *= 2
    return (*pages, *[empty] * (count - len(pages)))


def _check_engine(
    model: PromptedModel, slots: int, length: int, chunk: int, page: int
) -> None:
    """Checks the sizes of an engine and that its model can be served.

    Raises:
      InputError: with the first problem.
    """
    sizes = {"slots": slots, "length": length, "chunk": chunk, "page": page}
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{name} is {size}, expected at least 1")
    if model.layout is not None:
        raise InputError("the decoding engine runs on one device: leave out the mesh")
    model.weight_storage.reject_streamed(GENERATES)


def _without_adapters(model: PromptedModel, graph: nnx.GraphDef) -> PromptedModel:
    """Returns the frozen model alone."""
    return dataclasses.replace(
        model, graph=graph, prompts=PromptPair(), prompting=Prompting()
    )


def _differences(first: ModelConfig, second: ModelConfig) -> str:
    """Lists the fields in which two configs differ."""
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    return ", ".join(
        f"{name} ({shown(getattr(first, name))} and {shown(getattr(second, name))})"
        for name in names
        if getattr(first, name) != getattr(second, name)
    )
