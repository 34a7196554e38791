"""From records to typed tokens: passages of text, encoded apart and closed.

A passage is what is read as one continued text: a turn, or a whole conversation that a
chat template wrote. An article, what is packed as one, is one passage or several.
"""

import dataclasses
from collections.abc import Sequence

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import COMPLETION, PROMPT, SEPARATOR
from prompt_tuning.data.preparation.chat_templates import ChatTemplate, Message, Run
from prompt_tuning.data.preparation.preparation_settings import TextFormat
from prompt_tuning.data.preparation.records import Record, Turn
from prompt_tuning.data.preparation.tokenizer_files import TextEncoder
from prompt_tuning.data.text.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class Passage:
    """Texts that continue each other.

    Attributes:
      runs: each text and its type.
      begins: whether BOS is put first, where the model expects one.
    """

    runs: tuple[Run, ...]
    begins: bool = True


@dataclasses.dataclass(frozen=True)
class Article:
    """Ids, and the type of each, 0 to 3."""

    input_ids: list[int]
    token_types: list[int]


class ArticleMaker:
    """Makes articles of records.

    Args:
      text: how turns become texts.
      tokenizer: from text to ids; it has an EOS.
      chat: renders turns; None without.
    """

    def __init__(
        self, text: TextFormat, tokenizer: Tokenizer, chat: ChatTemplate | None
    ):
        assert tokenizer.eos_id is not None
        self._text = text
        self._encode = TextEncoder(tokenizer)
        self._chat = chat
        self._eos = tokenizer.eos_id
        self._bos = tokenizer.bos_id if tokenizer.add_bos else None
        eos_text = tokenizer.token(tokenizer.eos_id)
        self._eos_text = eos_text if chat is None else chat.eos_token or eos_text

    def passages(self, record: Record, place: str) -> list[Passage]:
        """The texts of a record; none if it has no completion.

        Raises:
          InputError: if it holds messages and there is no chat template, or the
            template refuses it.
        """
        if record.messages is not None:
            if self._chat is None:
                raise InputError(
                    f"{place}: found chat messages, which need --chat to be rendered"
                )
            return self._conversation(self._chat, record.messages, place)
        keep = self._text.keep_prompt_only
        turns = [turn for turn in record.turns if turn.completion or keep]
        if record.plain:
            return [Passage(((turn.completion, COMPLETION),)) for turn in turns]
        apart = "pair" in (self._text.attention_boundary, self._text.packing_boundary)
        if self._chat is None:
            return [self._pair(turn, apart or not i) for i, turn in enumerate(turns)]
        talks = [[turn] for turn in turns] if apart else [turns] if turns else []
        return [
            passage
            for talk in talks
            for passage in self._conversation(self._chat, _messages(talk), place)
        ]

    def articles(self, records: Sequence[Sequence[Passage]]) -> list[list[Article]]:
        """The articles of each record.

        Raises:
          InputError: if a text cannot be encoded.
        """
        flat = [passage for passages in records for passage in passages]
        ids = iter(self._encode([[text for text, _ in p.runs] for p in flat]))
        return [
            self._joined([self._typed(passage, next(ids)) for passage in passages])
            for passages in records
        ]

    def _joined(self, passages: list[Article]) -> list[Article]:
        """Passages with their separators, as the articles that are packed."""
        for number, passage in enumerate(passages, start=1):
            if number == len(passages) or self._text.attention_boundary == "pair":
                passage.token_types[-1] = SEPARATOR
        if self._text.packing_boundary == "pair" or len(passages) < 2:
            return passages
        whole = Article([], [])
        for passage in passages:
            whole.input_ids.extend(passage.input_ids)
            whole.token_types.extend(passage.token_types)
        return [whole]

    def _typed(self, passage: Passage, runs: Sequence[list[int]]) -> Article:
        ids: list[int] = []
        types: list[int] = []
        if self._bos is not None and passage.begins:
            ids.append(self._bos)
            types.append(PROMPT)
        for (_, kind), run in zip(passage.runs, runs, strict=True):
            ids += run
            types += [kind] * len(run)
        if not runs[-1] or ids[-1] != self._eos:
            ids.append(self._eos)
            types.append(COMPLETION)
        return Article(ids, types)

    def _pair(self, turn: Turn, begins: bool) -> Passage:
        text = self._text
        prompt, completion = turn.prompt, turn.completion
        if prompt:
            prompt = text.prompt_prefix + prompt + text.prompt_postfix
        if text.space_separator and completion:
            prompt, completion = prompt.rstrip(" "), " " + completion.lstrip(" ")
        if not prompt:
            return Passage(((completion, COMPLETION),), begins)
        return Passage(((prompt, PROMPT), (completion, COMPLETION)), begins)

    def _conversation(
        self, chat: ChatTemplate, messages: Sequence[Message], place: str
    ) -> list[Passage]:
        if not self._text.keep_prompt_only:
            messages = _answered(messages)
        if not messages:
            return []
        runs = chat.runs(messages, place)
        # What a template writes after the last EOS, a line feed mostly, belongs to a
        # turn that does not come.
        last, kind = runs[-1]
        if last.rstrip().endswith(self._eos_text):
            runs[-1] = last.rstrip(), kind
        return [Passage(tuple(runs), begins=False)]


def _messages(turns: Sequence[Turn]) -> list[Message]:
    messages: list[Message] = []
    for turn in turns:
        if turn.prompt:
            messages.append({"role": "user", "content": turn.prompt})
        if turn.completion:
            messages.append({"role": "assistant", "content": turn.completion})
    return messages


def _answered(messages: Sequence[Message]) -> Sequence[Message]:
    """A conversation to its last answer, as pairs without a completion are left out.

    What follows it would end with a separator, which is learned, and answer nothing.
    """
    answers = [i for i, m in enumerate(messages, start=1) if m["role"] == "assistant"]
    return messages[: answers[-1]] if answers else ()
