"""A model with the settings of generation."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.own_adapter import add_own_adapter, own_adapter
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.request_checks import slot_length
from prompt_tuning.decoding.request_stream import stream_request
from prompt_tuning.decoding.row_checks import (
    GENERATES,
    check_prompt_ids,
    check_rows,
    row_room,
)
from prompt_tuning.decoding.row_encoding import decode_continuations
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.generation.text_generation import continue_all
from prompt_tuning.pretrained.prompted_model import PromptedModel


class Continuation(NamedTuple):
    """The text generated for one input, and its sizes.

    Attributes:
      text: generated text.
      finish_reason: "stop" if the model ended it, "length" if it was cut off.
      input_tokens: number of tokens of the input.
      output_tokens: number of generated tokens, without the one that ended them.
    """

    text: str
    finish_reason: Literal["stop", "length"]
    input_tokens: int
    output_tokens: int


@dataclasses.dataclass
class Generator:
    """Continues rows of token ids.

    Attributes:
      model: model that generates.
      parameters: all parameters by path.
      sampling: how new tokens are chosen, and when a row ends.
      batch_size: rows continued at once.
    """

    model: PromptedModel
    parameters: Parameters
    sampling: Sampling
    batch_size: int = 32
    _engine: DecodingEngine | None = None

    def continue_rows(
        self,
        rows: Sequence[Sequence[int]],
        prompt_ids: Sequence[int] | None = None,
    ) -> list[Continuation]:
        """Continues all rows; see `continue_all`."""
        generated = continue_all(
            self.model,
            self.parameters,
            rows,
            self.sampling,
            batch_size=self.batch_size,
            prompt_ids=prompt_ids,
        )
        texts = decode_continuations(self.model, rows, generated)
        return [
            Continuation(
                text,
                "stop" if len(new) < self.sampling.new_tokens else "length",
                len(row),
                len(new),
            )
            for text, row, new in zip(texts, rows, generated, strict=True)
        ]

    def stream(self, row: Sequence[int], prompt_id: int | None = None) -> Iterator[str]:
        """Yields the text that continues a row, piece by piece; on a mesh, at once.

        Raises:
          InputError: as `continue_all`, and if the weights are streamed.
        """
        prompt_ids = None if prompt_id is None else [prompt_id]
        if self.model.layout is not None:
            yield self.continue_rows([row], prompt_ids)[0].text
            return
        self.model.weight_storage.reject_streamed(GENERATES)
        check_rows(self.model, [row], self.sampling.new_tokens)
        check_prompt_ids(self.model, prompt_ids, 1)
        engine = self._engine_for(len(row))
        request = Request(
            ids=row,
            adapter=own_adapter(engine),
            prompt_id=prompt_id,
            sampling=self.sampling,
        )
        for piece in stream_request(engine, request):
            yield piece.text

    def _engine_for(self, given: int) -> DecodingEngine:
        """Returns an engine for a row, a larger one where a conversation grew."""
        needed = row_room(self.model, given, self.sampling.new_tokens)
        if self._engine is None or self._engine.limit < needed:
            self._engine = DecodingEngine(
                self.model, self.parameters, slots=1, length=slot_length(needed)
            )
            add_own_adapter(self._engine, self.parameters)
        return self._engine

    def stream_to(
        self,
        show: Callable[[str], Any],
        rows: Sequence[Sequence[int]],
        prompt_ids: Sequence[int] | None = None,
    ) -> str:
        """Calls a function with each piece of the text that continues the only row.

        Returns:
          the whole text.

        Raises:
          InputError: if there are several rows.
        """
        if len(rows) != 1:
            raise InputError(
                f"stream shows the continuation of one text, and {len(rows)} were given"
            )
        pieces = []
        for piece in self.stream(rows[0], prompt_ids[0] if prompt_ids else None):
            pieces.append(piece)
            show(piece)
        return "".join(pieces)
