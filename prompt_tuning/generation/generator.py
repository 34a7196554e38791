"""A model with the settings of generation."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.generation.sampling import Sampler, greedy
from prompt_tuning.generation.text_generation import continue_all, decode_continuations
from prompt_tuning.generation.token_stream import stream_text, stream_tokens
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


@dataclasses.dataclass(frozen=True)
class Generator:
    """Continues rows of token ids.

    Attributes:
      model: model that generates.
      parameters: all parameters by path.
      new_tokens: maximum number of new tokens of each row.
      sampler: chooses the next token.
      seed: seed of sampling.
      batch_size: rows continued at once.
      stop_ids: tokens of which each ends a row, next to the model's own.
    """

    model: PromptedModel
    parameters: Parameters
    new_tokens: int
    sampler: Sampler = greedy
    seed: int = 0
    batch_size: int = 32
    stop_ids: tuple[int, ...] = ()

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
            new_tokens=self.new_tokens,
            batch_size=self.batch_size,
            sampler=self.sampler,
            seed=self.seed,
            prompt_ids=prompt_ids,
            stop_ids=self.stop_ids,
        )
        texts = decode_continuations(self.model, rows, generated)
        return [
            Continuation(
                text,
                "stop" if len(new) < self.new_tokens else "length",
                len(row),
                len(new),
            )
            for text, row, new in zip(texts, rows, generated, strict=True)
        ]

    def stream(self, row: Sequence[int], prompt_id: int | None = None) -> Iterator[str]:
        """Yields the text that continues a row, piece by piece."""
        chunks = stream_tokens(
            self.model,
            self.parameters,
            row,
            new_tokens=self.new_tokens,
            sampler=self.sampler,
            seed=self.seed,
            prompt_id=prompt_id,
            stop_ids=self.stop_ids,
        )
        return stream_text(self.model, row, chunks)

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
