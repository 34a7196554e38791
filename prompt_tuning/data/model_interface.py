"""The properties of a model that determine how it reads data."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from prompt_tuning.core import model_choices
from prompt_tuning.core.batch import ONE_PART, RowDivision
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.text.tokenizers import Tokenizer

OF_CONFIG = (
    *("architecture", "vocabulary_size", "bos_id", "encoder_input", "positions_note"),
    *("labels", "problem", "unscored_end"),
)
"""Fields that have the value of the same field of the model's config."""


def begin_length(
    begin_ids: tuple[int, ...], ids: "Sequence[int] | Int[np.ndarray, 'n']"
) -> int:
    """Returns the length of `begin_ids` if a row starts with them, else 0."""
    count = len(begin_ids)
    return count if tuple(map(int, ids[:count])) == begin_ids else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelInterface:
    """The properties of a prompted model that determine how it reads data.

    Attributes:
      architecture: decides how a row is split into examples.
      vocabulary_size: `V`; every token id is below it.
      tokenizer: encodes text; without one, only HDF5 files can be read.
      origin: name of the checkpoint, for error messages.
      bos_id: id of the beginning-of-sequence token; the tokenizer's by default.
      eos_id: id of the end-of-sequence token; the tokenizer's by default.
      encoder_input: special tokens of an encoder's input; see `ModelConfig`.
      maximum_length: maximum number of inputs, and of targets, of an example: the
        model's positions minus the prompt vectors, unless a template puts these among
        the tokens. None for a model without a limit.
      positions_note: end of messages about the model's positions; see `ModelConfig`.
      predicts_first_token: whether a prompt vector before every row predicts the row's
        first token (decoder-only).
      prompt_length: `P`, number of prompt vectors; 0 without a prompt.
      prompt_count: `N`, number of prompts that an example can select from.
      placement: where the prompt vectors stand; see `Prompting.placement`.
      prefix_attention: whether prompt tokens attend to each other in both directions.
      rows: how the rows of a batch are divided among devices.
      labels: names of the classes that the head scores; empty if it scores tokens.
      problem: what such a head decides; see `ModelConfig.problem`.
      unscored_end: token at the end of a row that such a head skips.
      pooling: state of a row that such a head reads; see `ModelConfig.pooling`.
      encodes: whether the model is an encoder alone, which ends texts with EOS.
    """

    architecture: model_choices.Architecture
    vocabulary_size: int
    tokenizer: Tokenizer | None = None
    origin: str = "the checkpoint"
    bos_id: int | None = None
    eos_id: int | None = None
    encoder_input: model_choices.EncoderInput = "text_eos"
    maximum_length: int | None = None
    positions_note: str = ""
    predicts_first_token: bool = True
    prompt_length: int = 0
    prompt_count: int = 1
    placement: str = "prefix"
    prefix_attention: bool = False
    rows: RowDivision = ONE_PART
    labels: tuple[str, ...] = ()
    problem: model_choices.ClassProblem = "single_label"
    unscored_end: int | None = None
    pooling: model_choices.Pooling = "last"
    encodes: bool = False

    def __post_init__(self):
        for name in ("bos_id", "eos_id"):
            if self.tokenizer is not None and getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.tokenizer, name))

    @property
    def begin_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that begin a row: the tokenizer's, or else BOS."""
        if self.tokenizer is not None and self.tokenizer.begin_ids:
            return self.tokenizer.begin_ids
        return () if self.bos_id is None else (self.bos_id,)

    def begin_length(self, ids: "Sequence[int] | Int[np.ndarray, 'n']") -> int:
        """Returns how many tokens at the start of a row only begin it."""
        return begin_length(self.begin_ids, ids)

    def scored_row(self, ids: "Sequence[int] | Int[np.ndarray, 'n']") -> list[int]:
        """Returns the tokens up to the last one that a head of classes scores.

        This is the end of the text; in an encoder EOS follows it.
        """
        length = len(ids)
        while length > 1 and ids[length - 1] == self.unscored_end:
            length -= 1
        row = [int(token) for token in ids[:length]]
        if self.encodes and self.eos_id is not None and row[-1:] != [self.eos_id]:
            row.append(self.eos_id)
        return row

    def check_single_begin(self, inserted: str) -> None:
        """Refuses a tokenizer that begins each row with more than one token.

        `inserted` is put after the first token of a row; the message names it.
        """
        if len(self.begin_ids) > 1:
            raise InputError(
                f"{inserted} is put after the first token of a row, but the tokenizer "
                f"of {self.origin} begins each row with {len(self.begin_ids)} tokens "
                f"({', '.join(map(str, self.begin_ids))}), which belong together: use "
                "another placement, such as Prompting.placement = 'prefix'"
            )

    def require_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer, or tells how to name one."""
        if self.tokenizer is None:
            raise InputError(
                f"{self.origin} has no tokenizer next to it; name a tokenizer.json, a "
                ".model file or a folder by "
                f"{how_to_set('Pretrained.tokenizer', 'PATH')}"
            )
        return self.tokenizer
