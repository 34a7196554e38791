"""The decoding engine: rows join and leave the slots of one compiled step.

A row's tokens depend only on its own text, adapter, seed and settings. Each step reads
one token in every slot, whatever the slots hold, so all sums of a row run over arrays
of the same shapes; see `slots` and README.md here.
"""

import dataclasses
import functools
from collections.abc import Hashable, Sequence

import jax
import numpy as np
from flax import nnx

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.layer_kinds import check_all_attention
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.decoding import token_choice
from prompt_tuning.decoding.adapter_table import ResidentAdapter
from prompt_tuning.decoding.engine_metrics import EngineMetrics, MetricCounters
from prompt_tuning.decoding.prompt_prefixes import PromptPrefixes
from prompt_tuning.decoding.request import Piece, Request, RequestHandle
from prompt_tuning.decoding.request_checks import check_engine, fitting_tokens, read_ids
from prompt_tuning.decoding.resident_adapters import ResidentAdapters
from prompt_tuning.decoding.row_checks import check_generates
from prompt_tuning.decoding.row_encoding import row_lengths
from prompt_tuning.decoding.row_progress import RowProgress, row_choices, sampling_needs
from prompt_tuning.decoding.row_queue import RowQueue
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.decoding.slot_reader import SlotReader
from prompt_tuning.decoding.token_masks import MaskReader, RowMask
from prompt_tuning.pretrained.prompted_model import PromptedModel


class DecodingEngine:
    """Generates for many requests concurrently; use it from one thread.

    Args:
      model: the model; its own prompts and adapters are left out unless `adapted`.
      parameters: all its parameters by path.
      slots: number of rows that run together.
      length: maximum number of tokens per row, given and new; prompt vectors among them
        count.
      chunk: number of tokens of a row that are read in one go.
      page: number of keys per page of a prompt or a shared text.
      together: number of rows whose texts are read together.
      adapted: whether the model keeps its prompts and adapters. They then apply to all
        rows, and no other adapter can be added.
      guesses: maximum number of tokens that a step guesses for each greedy row from its
        text, which saves steps where a text repeats itself; 0 for none.
      kept: number of slots reserved for short rows; see `RowQueue`.
      process: function that changes the logits of all rows before any other option;
        None for none.
      tempered: whether log-probabilities of new tokens are those of the sampled
        distribution (logits divided by the temperature) instead of the model's own.

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
        together: int = 1,
        adapted: bool = False,
        guesses: int = 0,
        kept: int = 0,
        process: token_choice.LogitsProcessor | None = None,
        tempered: bool = False,
    ):
        check_engine(model, slots, length, chunk, page, together)
        self.model, self.count = model, slots
        if guesses and process is not None:
            raise InputError(
                "guesses are checked without the function that changes logits: leave "
                "out guesses or process"
            )
        if guesses:
            check_all_attention(
                model.config,
                "guesses of tokens are taken back if they are wrong",
                "leave out guesses",
            )
        self.guesses, self._process, self._tempered = guesses, process, tempered
        self._resident = ResidentAdapters(model, parameters, page, adapted=adapted)
        # The model's own prompt vectors are added to the length.
        adapter = self._resident.find(None)
        self.limit = length + max(adapter.joined, adapter.encoded)
        self._reader = SlotReader(self._resident, slots, self.limit, chunk, together)
        self._masks = MaskReader(model)
        self._vocabulary: token_choice.TokenNumbers | None = None
        self._rows: list[RowProgress | None] = [None] * slots
        self._queue = RowQueue(slots, kept)
        self._number = 0
        self._metrics = MetricCounters()
        self._programs: list[token_choice.Needs] = []

    # Adapters

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""
        return self._resident.names

    def add_adapter(
        self,
        name: str,
        model: PromptedModel,
        parameters: Parameters,
        prefixes: Sequence[PromptPrefixes] | None = None,
    ) -> None:
        """Adds an adapter, which requests then choose by name.

        Replaces a loaded adapter of this name; see `ResidentAdapters.add`.

        Raises:
          InputError: if the adapter belongs to another model, or a row still uses the
            one that it replaces.
        """
        self._check_unused(name)
        self._reader.forget()
        self._resident.add(name, model, parameters, prefixes)
        self._reader.fit_to_adapters(runs=any(self._rows))

    def find_adapter(self, name: str | None) -> ResidentAdapter:
        """Returns a loaded adapter; None means the frozen model alone."""
        return self._resident.find(name)

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter.

        Raises:
          InputError: if no adapter has the name, or a row still uses it.
        """
        self._resident.find(name)
        self._check_unused(name)
        self._reader.forget()
        self._resident.remove(name)
        self._reader.fit_to_adapters(runs=any(self._rows))

    def _check_unused(self, name: str) -> None:
        rows = [*self._queue, *(row for row in self._rows if row is not None)]
        users = sum(row.handle.request.adapter == name for row in rows)
        if users:
            raise InputError(
                f"adapter {name} is in use by {users} rows; wait until they have "
                "ended, or cancel them"
            )

    @property
    def graph(self) -> nnx.GraphDef:
        """Structure of the model with the tables of adapters."""
        return self._resident.graph

    # Requests

    def submit(self, request: Request, mask: RowMask | None = None) -> RequestHandle:
        """Queues a request; `mask` is the result of `open_mask`, if known.

        Raises:
          InputError: if the adapter is unknown, the request does not fit in a slot, or
            the model is an encoder.
        """
        check_generates(self.model)
        adapter = self._resident.find(request.adapter)
        sampling = request.sampling
        ids = read_ids(request, adapter)
        prompt = self._resident.prompt(adapter, request.prompt_id)
        if request.shares:
            prompt = self._resident.with_shared(prompt, adapter, request)
        room = (len(ids), adapter, prompt, self.limit)
        new_tokens = fitting_tokens(sampling.new_tokens, *room, fits=request.fits)
        if mask is None and sampling.constraint is not None:
            mask = self._masks.open(request, ids)
        handle = RequestHandle(self._number, request, new_tokens)
        self._number += 1
        for sample in range(sampling.n):
            part = (adapter, prompt, self.model, self._metrics.now(), mask)
            row = RowProgress(handle, sample, ids, *part)
            self._queue.put(request.client, row)
        self._metrics.submitted(len(ids))
        return handle

    def open_mask(self, request: Request) -> RowMask | None:
        """Returns the mask for a request's first token; None without a constraint.

        It may take seconds, and may run in another thread. Errors are as in `submit`.
        """
        if request.sampling.constraint is None:
            return None
        ids = read_ids(request, self._resident.find(request.adapter))
        return self._masks.open(request, ids)

    def has_room(self, client: Hashable, rows: int, limit: int) -> bool:
        """Whether a client may submit more rows; see `FairQueue.has_room`."""
        free = sum(row is None for row in self._rows)
        return self._queue.has_room(client, rows, limit, free)

    def cancel(self, handle: RequestHandle) -> None:
        """Ends the rows of a request; their slots become free immediately."""
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
        """Returns counts since the engine was opened, and its current state."""
        active = sum(row is not None for row in self._rows)
        size = self._reader.slots.key_value_bytes + self._resident.page_bytes
        return self._metrics.snapshot(self.count, active, len(self._queue), size)

    def run(self, requests: Sequence[Request]) -> list[RequestHandle]:
        """Submits requests and steps until all have ended."""
        handles = [self.submit(request) for request in requests]
        while not all(handle.finished for handle in handles):
            self.step()
        return handles

    def compile(
        self, samplings: Sequence[Sampling] = (Sampling(),), pages: int = 0
    ) -> list[str]:
        """Compiles the programs of requests by running examples on an empty queue.

        Args:
          samplings: settings to compile a program for; see `program_for`.
          pages: number of pages of adapters that will be loaded later.

        Returns a description of each program.
        """
        programs = []
        for name in (None, *self.adapters):
            adapter = self._resident.find(name)
            lengths = [1]
            if adapter.whole:
                vectors = max(adapter.joined, adapter.encoded)
                longest = self.limit - vectors - 1
                lengths = row_lengths(self._reader.chunk, longest)
            for length in lengths:
                self._run_example([0] * length, name, Sampling(new_tokens=1))
            programs.append(f"texts of {name or 'the model'}: {shown(lengths)}")
        programs += self._reader.compile(
            max(self._resident.page_count, pages), self.guesses
        )
        self._programs = [sampling_needs(sampling) for sampling in samplings]
        for sampling in samplings:
            short = dataclasses.replace(
                sampling, new_tokens=1, minimum_new_tokens=0, forced=(), n=1
            )
            self._run_example([0], None, short)
            programs.append(f"choice of tokens: {short}")
        self._metrics = MetricCounters()
        return programs

    def _run_example(
        self, ids: list[int], adapter: str | None, sampling: Sampling
    ) -> None:
        """Runs a request and discards its result."""
        several = len(self._resident.find(adapter).prompts) > 1
        number = 0 if several else None
        request = Request(ids=ids, adapter=adapter, prompt_id=number, sampling=sampling)
        self.run([request])

    # Steps

    def step(self) -> list[Piece]:
        """Admits rows, reads parts of texts, and returns one new token per row."""
        self._admit()
        self._reader.read_texts(self._rows, bool(self._queue))
        active = [
            (slot, row)
            for slot, row in enumerate(self._rows)
            if row is not None and row.ready
        ]
        scored_only = [each for each in active if each[1].new_tokens == 0]
        ended = [self._free(slot, row.end_reading()) for slot, row in scored_only]
        active = [each for each in active if each not in scored_only]
        if not active:
            return ended
        chosen = self._choose(active)
        if not self.guesses:
            self._reader.read_tokens(active, chosen.tokens)
            return ended + self._deliver(active, chosen)
        pieces = ended + self._deliver(active, chosen)
        return [*pieces, *self._read_guesses(active)]

    def _read_guesses(self, active: Sequence[tuple[int, RowProgress]]) -> list[Piece]:
        """Reads each row's last token and its guesses, and delivers the right ones."""
        going = [(slot, row) for slot, row in active if self._rows[slot] is row]
        if not going:
            return []
        pieces = []
        right = self._reader.read_guesses(going, self.guesses)
        for slot, row in going:
            for token in right[slot]:
                if self._rows[slot] is row:
                    pieces.append(self._add(slot, row, token))
        self._metrics.generated(len(pieces))
        return pieces

    def _add(
        self,
        slot: int,
        row: RowProgress,
        token: int,
        chosen: token_choice.Chosen | None = None,
    ) -> Piece:
        """Adds a token to a row, and frees the slot if the row ends."""
        return self._free(slot, row.add(token, chosen, slot))

    def _free(self, slot: int, piece: Piece) -> Piece:
        """Frees the slot of a row that ended, and returns its last piece."""
        if piece.completion is not None:
            self._rows[slot] = None
            self._metrics.ended()
        return piece

    def _admit(self) -> None:
        """Gives free slots to waiting rows; clients take turns."""
        for slot in self._reader.oldest_first():
            if self._rows[slot] is None and self._queue:
                if (row := self._queue.pop_for(self._rows)) is None:
                    return
                self._rows[slot] = row
                self._reader.start(slot, row, self._rows)
                self._start_choices(slot, row)

    # Tokens

    def _start_choices(self, slot: int, row: RowProgress) -> None:
        """Sets the per-token numbers of a row that needs them."""
        if not (row.needs.penalized or row.needs.constrained):
            return
        size = self.model.config.vocabulary_size
        self._vocabulary = token_choice.start_row(
            self._numbers(), np.int32(slot), row.given_marks(size), row.biases(size)
        )

    def _numbers(self) -> token_choice.TokenNumbers:
        """Returns the per-token numbers of all slots."""
        if self._vocabulary is None:
            size = self.model.config.vocabulary_size
            self._vocabulary = token_choice.TokenNumbers.zeros(self.count, size)
        return self._vocabulary

    def _choose(self, active: Sequence[tuple[int, RowProgress]]) -> token_choice.Chosen:
        different = {row.needs for _, row in active}
        needs = functools.reduce(token_choice.Needs.union, different)
        needs = token_choice.program_for(needs, self._programs)
        choices = row_choices(self.count, active, needs, wide=bool(self._programs))
        counted = needs.penalized or needs.constrained
        chosen, vocabulary = token_choice.choose(
            self._resident.parameters,
            self._reader.slots.hidden,
            choices,
            self._numbers() if counted else None,
            self._reader.entries(active),
            graph=self._resident.graph,
            needs=needs,
            process=self._process,
            tempered=self._tempered,
        )
        if counted:
            self._vocabulary = vocabulary
        return chosen

    def _deliver(
        self, active: Sequence[tuple[int, RowProgress]], chosen: token_choice.Chosen
    ) -> list[Piece]:
        """Adds chosen tokens to their rows, and frees the slots of ended rows."""
        on_host = jax.device_get(chosen)
        pieces = []
        for slot, row in active:
            if not row.tokens:
                self._metrics.first_token(row.submitted)
            pieces.append(self._add(slot, row, int(on_host.tokens[slot]), on_host))
        self._metrics.generated(len(active))
        return pieces
