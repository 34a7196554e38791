"""What a preparation is asked for, checked before anything is read."""

import dataclasses
import datetime
import math
from pathlib import Path
from typing import Literal

from prompt_tuning.core.errors import InputError

Boundary = Literal["line", "pair"]
"""What counts as one article: a line with all its turns, or each pair of it."""

OVERFLOWS = ("drop", "truncate_left", "truncate_right")
PACKINGS = (
    "full",
    *(f"{how}::{overflow}" for how in ("greedy", "single") for overflow in OVERFLOWS),
)


@dataclasses.dataclass(frozen=True)
class Packing:
    """How articles become sequences of one length.

    Attributes:
      how: `full` cuts articles wherever a sequence ends; `greedy` begins a new sequence
        where the next article does not fit; `single` gives each article its own.
      overflow: what becomes of an article longer than a sequence; None for `full`.
    """

    how: str
    overflow: str | None


def parse_packing(text: str) -> Packing:
    """Reads one of the seven choices, such as `greedy::truncate_left`.

    Raises:
      InputError: if it is none of them.
    """
    if text not in PACKINGS:
        raise InputError(f"packing is {text!r}, expected one of {', '.join(PACKINGS)}")
    how, _, overflow = text.partition("::")
    return Packing(how, overflow or None)


@dataclasses.dataclass(frozen=True)
class RecordFormat:
    """How one line, or one row of a table, becomes turns of prompt and completion.

    Attributes:
      prompt_key: key or column of the given text.
      completion_key: key or column of the text to learn.
      category_key: key of the category's name, read if there are `categories`.
      weight_key: key of a line's loss weight; None if there are none.
      messages_key: key of chat messages, an alternative to prompts and completions.
      prompt_template: text with `{key}` in place of `prompt_key`; None without.
      completion_template: the same for the completion.
      quotes: whether `"` quotes a cell of a table; otherwise it is a character.
      categories: the names a category may have; its place here is its id.
    """

    prompt_key: str = "prompt"
    completion_key: str = "completion"
    category_key: str = "category"
    weight_key: str | None = None
    messages_key: str = "messages"
    prompt_template: str | None = None
    completion_template: str | None = None
    quotes: bool = True
    categories: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TextFormat:
    """How turns become the texts of typed tokens.

    Attributes:
      prompt_prefix: put before a prompt that is not empty.
      prompt_postfix: put after it.
      space_separator: whether prompt and completion are parted by exactly one space,
        whatever spaces they had there.
      keep_prompt_only: whether a turn without a completion, and a sequence in which
        nothing is learned, is kept.
      packing_boundary: what is packed as one article.
      attention_boundary: what ends with a separator.
      chat: whether the chat template of the tokenizer renders the turns.
      chat_template: a file with another template.
      chat_date: the day that a template is told which asks for today's, as 2026-07-26;
        None for the day on which the preparation begins.
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

    @property
    def date(self) -> datetime.date | None:
        """The day of `chat_date`."""
        named = self.chat_date
        return None if named is None else datetime.date.fromisoformat(named)


@dataclasses.dataclass(frozen=True)
class TokenizerChoice:
    """Which tokenizer, and what is changed in it.

    Attributes:
      path: a file or folder, see `load_tokenizer`.
      special_tokens: pairs of a role (`bos_token`, `eos_token`, `pad_token`, or
        `additional_special_tokens`) and the token that has it.
    """

    path: str
    special_tokens: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of the records: a ratio of all of them, or a count; None is no part."""

    ratio: float | None = None
    count: int | None = None

    def of(self, records: int) -> int:
        """How many of so many records."""
        if self.ratio is not None:
            return round(self.ratio * records)
        return self.count or 0


def parse_share(text: str, name: str) -> Share:
    """Reads `0.1`, a ratio, or `100`, a count.

    Raises:
      InputError: if it is no number, or a ratio outside 0 to 1.
    """
    try:
        if text.isdigit():
            return Share(count=int(text))
        ratio = float(text)
    except ValueError as error:
        raise InputError(
            f"{name} is {text!r}, expected a ratio such as 0.1 or a count such as 100"
        ) from error
    if not math.isfinite(ratio) or not 0 <= ratio < 1:
        raise InputError(
            f"{name} is {text}, expected a ratio from 0 to below 1, or a whole number "
            "of records"
        )
    return Share(ratio=ratio)


@dataclasses.dataclass(frozen=True)
class Splits:
    """What goes into the training, development and test files.

    Attributes:
      dev: the records held out for development.
      test: those held out for the test.
      train_files: how many files the training sequences are dealt to; so the next two.
      dev_files: files of development sequences.
      test_files: files of test sequences.
      shuffle: whether the records are shuffled before they are packed.
      seed: of the shuffle, and of which records are held out.
    """

    dev: Share = Share()
    test: Share = Share()
    train_files: int = 1
    dev_files: int = 1
    test_files: int = 1
    shuffle: bool = False
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Preparation:
    """Everything the output depends on; `workers` and `force` change no byte of it.

    Attributes:
      inputs: files, or folders of them.
      output: the folder to write.
      tokenizer: from text to ids.
      length: tokens of a sequence.
      packing: one of `PACKINGS`.
      skip_malformed: whether a record that cannot be used is counted and passed over;
        otherwise it is an error.
    """

    inputs: tuple[str, ...]
    output: str
    tokenizer: TokenizerChoice
    length: int = 1024
    packing: str = "full"
    record: RecordFormat = RecordFormat()
    text: TextFormat = TextFormat()
    splits: Splits = Splits()
    skip_malformed: bool = False

    def check(self) -> None:
        """Refuses values that mean nothing, and choices that contradict each other.

        Raises:
          InputError: with the value and what was expected.
        """
        parse_packing(self.packing)
        if not self.inputs:
            raise InputError("no input was named, expected at least a file or folder")
        if self.length < 2:
            raise InputError(f"length is {self.length}, expected at least 2 tokens")
        for name in ("train_files", "dev_files", "test_files"):
            count = getattr(self.splits, name)
            if count < 1:
                raise InputError(f"{name} is {count}, expected at least 1")
        if not 0 <= self.splits.seed < 2**63:
            raise InputError(
                f"seed is {self.splits.seed}, expected a number from 0 to 2^63 - 1"
            )
        held = sum(share.ratio or 0 for share in (self.splits.dev, self.splits.test))
        if held >= 1:
            raise InputError(
                f"the ratios of dev and test add up to {held:g}, expected less than 1, "
                "so that something is left to train on"
            )
        self._check_chat()

    def _check_chat(self) -> None:
        text = self.text
        if text.chat_template is not None and not Path(text.chat_template).is_file():
            raise InputError(f"chat template {text.chat_template} is no file")
        _check_date(text)
        if text.chat and (text.prompt_prefix or text.prompt_postfix):
            raise InputError(
                "prompt_prefix and prompt_postfix were given with a chat template, "
                "which says itself what stands around a prompt: drop one of them"
            )


def _check_date(text: TextFormat) -> None:
    if text.chat_date is None:
        return
    if not text.chat:
        raise InputError(
            f"chat_date is {text.chat_date}, and no chat template is asked for, which "
            "would be told it: say --chat, or leave it out"
        )
    try:
        datetime.date.fromisoformat(text.chat_date)
    except ValueError as error:
        raise InputError(
            f"chat_date is {text.chat_date!r}, expected a day such as 2026-07-26"
        ) from error
