"""Renders records as typed texts and encodes them as examples.

A rendered text is encoded as one continuous text and closed with EOS. It is one turn,
or a whole conversation if a chat template renders it. An example has one rendered text,
or all rendered texts of its record.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import COMPLETION, PROMPT, SEPARATOR
from prompt_tuning.data.preparation.chat_templates import ChatTemplate
from prompt_tuning.data.preparation.preparation_settings import TextFormat
from prompt_tuning.data.preparation.records import Record, Turn
from prompt_tuning.data.preparation.template_renderer import Message, TypedText
from prompt_tuning.data.preparation.text_encoder import TextEncoder
from prompt_tuning.data.text.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class RenderedText:
    """Consecutive typed texts that are encoded as one continuous text.

    Attributes:
      parts: the texts with their types.
      adds_bos: whether BOS is prepended if the model expects it.
    """

    parts: tuple[TypedText, ...]
    adds_bos: bool = True


@dataclasses.dataclass(frozen=True)
class TypedTokens:
    """Token ids with the type of each, 0 to 3."""

    input_ids: list[int]
    token_types: list[int]


class ExampleEncoder:
    """Turns records into examples.

    Args:
      text: how turns become texts.
      tokenizer: tokenizer with an EOS.
      chat: template that renders the turns; None for no template.
    """

    def __init__(
        self, text: TextFormat, tokenizer: Tokenizer, chat: ChatTemplate | None
    ):
        assert tokenizer.eos_id is not None
        self._text = text
        self._encode_texts = TextEncoder(tokenizer)
        self._chat = chat
        self._eos = tokenizer.eos_id
        self._bos = tokenizer.bos_id if tokenizer.add_bos else None
        eos_text = tokenizer.token(tokenizer.eos_id)
        self._eos_text = eos_text if chat is None else chat.eos_token or eos_text

    def render(self, record: Record, location: str) -> list[RenderedText]:
        """Renders a record; returns an empty list if it has no completion.

        Raises:
          InputError: if the record holds messages but no chat template is used, or the
            template rejects it.
        """
        (texts,) = self.render_many([(record, location)])
        if isinstance(texts, InputError):
            raise texts
        return texts

    def render_many(
        self, records: Sequence[tuple[Record, str]]
    ) -> Iterator[list[RenderedText] | InputError]:
        """Yields what `render` returns for each record and its location, or raises."""
        conversations = [self._conversations(record) for record, _ in records]
        rendered: Iterator[list[TypedText] | str] = iter(())
        if self._chat is not None:
            rendered = self._chat.render_many(
                [m for each in conversations for m in each]
            )
        for (record, location), each in zip(records, conversations, strict=True):
            if record.messages is not None and self._chat is None:
                yield InputError(
                    f"{location}: found chat messages, which need --chat to be rendered"
                )
            elif self._chat is None or record.plain:
                yield self._render_turns(record)
            else:
                texts = list(itertools.islice(rendered, len(each)))
                problems = [problem for problem in texts if isinstance(problem, str)]
                if problems:
                    yield InputError(f"{location}: {problems[0]}")
                else:
                    yield [self._chat_text(t) for t in texts if not isinstance(t, str)]

    def _turns(self, record: Record) -> list[Turn]:
        keep = self._text.keep_prompt_only
        return [turn for turn in record.turns if turn.completion or keep]

    @property
    def _separates_turns(self) -> bool:
        text = self._text
        return "pair" in (text.attention_boundary, text.packing_boundary)

    def _conversations(self, record: Record) -> list[Sequence[Message]]:
        """Returns the conversations of a record, which the chat template renders."""
        if self._chat is None or record.plain:
            return []
        if record.messages is not None:
            conversations: list[Sequence[Message]] = [record.messages]
        else:
            turns = self._turns(record)
            groups = [[turn] for turn in turns] if self._separates_turns else [turns]
            conversations = [_messages(group) for group in groups]
        if not self._text.keep_prompt_only:
            conversations = [_until_last_answer(each) for each in conversations]
        return [messages for messages in conversations if messages]

    def _render_turns(self, record: Record) -> list[RenderedText]:
        """Renders a record without a chat template."""
        turns = self._turns(record)
        if record.plain:
            return [RenderedText(((turn.completion, COMPLETION),)) for turn in turns]
        return [
            self._render_turn(turn, adds_bos=self._separates_turns or index == 0)
            for index, turn in enumerate(turns)
        ]

    def encode(
        self, records: Sequence[Sequence[RenderedText]]
    ) -> list[list[TypedTokens]]:
        """Encodes rendered records; returns the examples of each record.

        Raises:
          InputError: if a text cannot be encoded.
        """
        flat = [rendered for texts in records for rendered in texts]
        ids = iter(
            self._encode_texts(
                [[text for text, _ in rendered.parts] for rendered in flat]
            )
        )
        return [
            self._join([self._add_types(rendered, next(ids)) for rendered in texts])
            for texts in records
        ]

    def _join(self, texts: list[TypedTokens]) -> list[TypedTokens]:
        """Sets the separators of a record's encoded texts; returns its examples."""
        for number, text in enumerate(texts, start=1):
            if number == len(texts) or self._text.attention_boundary == "pair":
                text.token_types[-1] = SEPARATOR
        if self._text.packing_boundary == "pair" or len(texts) < 2:
            return texts
        example = TypedTokens([], [])
        for text in texts:
            example.input_ids.extend(text.input_ids)
            example.token_types.extend(text.token_types)
        return [example]

    def _add_types(
        self, rendered: RenderedText, part_ids: Sequence[list[int]]
    ) -> TypedTokens:
        """Adds BOS, EOS and the token types to the ids of each part."""
        ids: list[int] = []
        types: list[int] = []
        if self._bos is not None and rendered.adds_bos:
            ids.append(self._bos)
            types.append(PROMPT)
        for (_, kind), tokens in zip(rendered.parts, part_ids, strict=True):
            ids += tokens
            types += [kind] * len(tokens)
        if not part_ids[-1] or ids[-1] != self._eos:
            ids.append(self._eos)
            types.append(COMPLETION)
        return TypedTokens(ids, types)

    def _render_turn(self, turn: Turn, adds_bos: bool) -> RenderedText:
        text = self._text
        prompt, completion = turn.prompt, turn.completion
        if prompt:
            prompt = text.prompt_prefix + prompt + text.prompt_postfix
        if text.space_separator and completion:
            prompt, completion = prompt.rstrip(" "), " " + completion.lstrip(" ")
        if not prompt:
            return RenderedText(((completion, COMPLETION),), adds_bos)
        return RenderedText(((prompt, PROMPT), (completion, COMPLETION)), adds_bos)

    def _chat_text(self, parts: list[TypedText]) -> RenderedText:
        """Returns a rendered conversation as one text."""
        # Text that a template writes after the last EOS, usually a line feed, belongs
        # to a next turn, and there is none.
        last, kind = parts[-1]
        if last.rstrip().endswith(self._eos_text):
            parts[-1] = last.rstrip(), kind
        return RenderedText(tuple(parts), adds_bos=False)


def _messages(turns: Sequence[Turn]) -> list[Message]:
    messages: list[Message] = []
    for turn in turns:
        if turn.prompt:
            messages.append({"role": "user", "content": turn.prompt})
        if turn.completion:
            messages.append({"role": "assistant", "content": turn.completion})
    return messages


def _until_last_answer(messages: Sequence[Message]) -> Sequence[Message]:
    """Cuts a conversation after its last answer, as turns without a completion are.

    The messages after it would end with a learned separator although nothing answers
    them.
    """
    answers = [i for i, m in enumerate(messages, start=1) if m["role"] == "assistant"]
    return messages[: answers[-1]] if answers else ()
