"""Settings of a preparation, checked before any input is read."""

import dataclasses
import datetime
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from prompt_tuning.core import field_checks, number_ranges
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.settings.data_source import Turns

Boundary = Literal["line", "pair"]
"""The unit of a choice: a record with all its turns (line), or each turn (pair)."""

OVERFLOWS = ("drop", "truncate_left", "truncate_right")
PACKINGS = (
    "full",
    *(f"greedy::{overflow}" for overflow in (*OVERFLOWS, "fill")),
    *(f"single::{overflow}" for overflow in OVERFLOWS),
)

MAXIMUM_WORKERS = 1000
MAXIMUM_LENGTH = 1_000_000
MAXIMUM_FILES = 10_000
"""Maximum number of files of a split."""

WorkerCount = Annotated[int, number_ranges.NumberRange(1, MAXIMUM_WORKERS)]
SequenceLength = Annotated[int, number_ranges.NumberRange(2, MAXIMUM_LENGTH)]
FileCount = Annotated[int, number_ranges.NumberRange(1, MAXIMUM_FILES)]


@dataclasses.dataclass(frozen=True)
class Packing:
    """How examples become sequences of one length.

    Attributes:
      how: `full` splits examples wherever a sequence ends; `greedy` starts a new
        sequence where the next example does not fit; `single` gives each example a
        sequence.
      overflow: what happens to an example longer than a sequence: `drop` leaves it out,
        and under `greedy` ends the sequence before it, as generative_data_prep does;
        `fill` leaves it out, and the sequence continues with the next example;
        `truncate_left` and `truncate_right` cut it. None for `full`.
    """

    how: str
    overflow: str | None


def parse_packing(text: str) -> Packing:
    """Parses one of the choices, such as `greedy::truncate_left`."""
    if text not in PACKINGS:
        raise InputError(
            f"packing is {shown(text)}, expected one of {', '.join(PACKINGS)}"
        )
    how, _, overflow = text.partition("::")
    return Packing(how, overflow or None)


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    """How a line of JSON or a row of a table becomes turns.

    Attributes:
      prompt_key: key or column of the prompt.
      completion_key: key or column of the completion.
      category_key: key of the category's name, read only if there are `categories`.
      weight_key: key of a record's loss weight; None for no weights.
      messages_key: key of chat messages, an alternative to prompts and completions.
      prompt_template: text of the prompt with a `{key}` for each key to fill in, used
        instead of `prompt_key`; None for no template.
      completion_template: the same for the completion.
      quotes: whether `"` quotes a cell of a table or is an ordinary character.
      categories: names of the categories; the index of a name is its id.
    """

    prompt_key: str = "prompt"
    completion_key: str = "completion"
    category_key: str = "category_id"
    weight_key: str | None = None
    messages_key: str = "messages"
    prompt_template: str | None = None
    completion_template: str | None = None
    quotes: bool = True
    categories: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TextFormat:
    """How turns become typed texts.

    Attributes without a description here are as in `FormatChoice`.

    Attributes:
      prompt_prefix: text inserted before a nonempty prompt.
      prompt_postfix: text inserted after a nonempty prompt.
      space_separator: whether exactly one space separates prompt and completion,
        regardless of the spaces in the data.
      keep_prompt_only: whether to keep turns without a completion and sequences without
        learned tokens.
      packing_boundary: what is packed as one example.
      attention_boundary: what ends with a separator token.
      chat: whether a chat template renders the turns.
      chat_date: see `FormatChoice`; None for the day when the preparation starts.
    """

    prompt_prefix: str = ""
    prompt_postfix: str = ""
    space_separator: bool = True
    keep_prompt_only: bool = False
    packing_boundary: Boundary = "line"
    attention_boundary: Boundary = "line"
    chat: bool = False
    chat_template: str | None = None
    chat_date: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    turns: Turns = "auto"

    @property
    def date(self) -> datetime.date | None:
        """`chat_date`, parsed."""
        if self.chat_date is None:
            return None
        return datetime.date.fromisoformat(self.chat_date)


@dataclasses.dataclass(frozen=True)
class TokenizerChoice:
    """A tokenizer and the changes to its special tokens.

    Attributes:
      path: file or folder, see `load_tokenizer`.
      special_tokens: pairs of a role (`bos_token`, `eos_token`, `pad_token`, or
        `additional_special_tokens`) and the token that takes it.
    """

    path: str
    special_tokens: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Share:
    """A share of the records: a ratio or a count; none of them if both are None."""

    ratio: number_ranges.ShareBelowOne | None = None
    count: number_ranges.NonnegativeInteger | None = None

    def __post_init__(self):
        field_checks.check_fields(self, prefix="")

    def resolve(self, records: int) -> int:
        """Returns the number of records that this share of `records` has."""
        if self.ratio is not None:
            return round(self.ratio * records)
        return self.count or 0


def parse_share(text: str, name: str) -> Share:
    """Parses a ratio such as `0.1` or a count such as `100`."""
    try:
        if text.isdigit():
            return Share(count=int(text))
        ratio = float(text)
    except ValueError as error:
        raise InputError(
            f"{name} is {shown(text)}, expected a ratio such as 0.1 or a count such as "
            "100"
        ) from error
    if not math.isfinite(ratio) or not 0 <= ratio < 1:
        raise InputError(
            f"{name} is {text}, expected a ratio from 0 to below 1, or a whole number "
            "of records"
        )
    return Share(ratio=ratio)


@dataclasses.dataclass(frozen=True)
class Splits:
    """Division of the records into training, development and test files.

    Records are shuffled before packing with `shuffle`; `seed` also draws the held-out
    records, `dev` and `test`.
    """

    dev: Share = Share()
    test: Share = Share()
    train_files: FileCount = 1
    dev_files: FileCount = 1
    test_files: FileCount = 1
    shuffle: bool = False
    seed: number_ranges.NonnegativeInteger = 0


@dataclasses.dataclass(frozen=True)
class Preparation:
    """Everything that determines the output's bytes.

    `metadata.yaml` and the scratch directory store these fields under their names.

    Attributes:
      inputs: files, or folders of files.
      output: folder to write.
      tokenizer: tokenizer that encodes the texts.
      length: tokens per sequence.
      packing: one of `PACKINGS`.
      record: how an entry of a file becomes turns.
      text: how turns become texts.
      splits: division into training, development and test files.
      skip_malformed: whether a record that cannot be used is counted and skipped
        instead of raising an error.
    """

    inputs: tuple[str, ...]
    output: str
    tokenizer: TokenizerChoice
    length: SequenceLength = 1024
    packing: str = "full"
    record: RecordFormat = RecordFormat()
    text: TextFormat = TextFormat()
    splits: Splits = Splits()
    skip_malformed: bool = False

    def check(self) -> None:
        """Refuses values out of range and settings that contradict each other."""
        for settings in (self, self.record, self.text, self.splits):
            field_checks.check_fields(settings, prefix="")
        parse_packing(self.packing)
        if not self.inputs:
            raise InputError("no input was given, expected at least one file or folder")
        _check_splits(self.splits)
        _check_chat(self.text)


def _check_splits(splits: Splits) -> None:
    held_out = sum(share.ratio or 0 for share in (splits.dev, splits.test))
    if held_out >= 1:
        raise InputError(
            f"the ratios of dev and test add up to {held_out:g}, expected less than 1, "
            "so that records are left to train on"
        )


def _check_chat(text: TextFormat) -> None:
    if text.chat_template is not None and not Path(text.chat_template).is_file():
        raise InputError(f"chat template {text.chat_template} is not a file")
    _check_date(text)
    if text.chat and (text.prompt_prefix or text.prompt_postfix):
        raise InputError(
            "prompt_prefix and prompt_postfix cannot be combined with a chat template, "
            "which itself adds the text around a prompt: remove one of them"
        )


def _check_date(text: TextFormat) -> None:
    if text.chat_date is None:
        return
    if not text.chat:
        raise InputError(
            f"chat_date is {text.chat_date}, but no chat template is used: add --chat, "
            "or remove --chat_date"
        )
    try:
        datetime.date.fromisoformat(text.chat_date)
    except ValueError as error:
        raise InputError(
            f"chat_date is {shown(text.chat_date)}, expected a date such as 2026-07-26"
        ) from error
