"""Renders records as typed texts and encodes them as examples.

A rendered text is encoded as one continuous text and closed with EOS. It is one turn,
or a whole conversation if a chat template renders it. An example has one rendered text,
or all rendered texts of its record.
"""

import itertools
from collections.abc import Iterator, Sequence

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.token_weights import COMPLETION, PROMPT, SEPARATOR
from prompt_tuning.data.preparation.preparation_settings import TextFormat
from prompt_tuning.data.preparation.records import Record, Turn
from prompt_tuning.data.text.chat_templates import ChatTemplate
from prompt_tuning.data.text.conversations import answers_of, pair_messages
from prompt_tuning.data.text.template_renderer import ChatRecord, TypedText
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.data.text.typed_texts import (
    RenderedText,
    TypedTextEncoder,
    TypedTokens,
    conversation_text,
    until_last_answer,
)


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
        self._encode_texts = TypedTextEncoder(tokenizer)
        self._chat = chat
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
            if record.chat is not None and self._chat is None:
                yield InputError(
                    f"{location}: found chat messages, or keys that a chat template "
                    "reads (system, history, tools, chat_template_kwargs), which need "
                    "--chat to be rendered"
                )
            elif self._chat is None or record.plain:
                yield self._render_turns(record)
            else:
                texts = list(itertools.islice(rendered, len(each)))
                problems = [problem for problem in texts if isinstance(problem, str)]
                if problems:
                    yield InputError(f"{location}: {problems[0]}")
                else:
                    yield [
                        conversation_text(parts, self._eos_text)
                        for parts in texts
                        if not isinstance(parts, str)
                    ]

    def _turns(self, record: Record) -> list[Turn]:
        keep = self._text.keep_prompt_only
        return [turn for turn in record.turns if turn.completion or keep]

    @property
    def _separates_turns(self) -> bool:
        text = self._text
        return "pair" in (text.attention_boundary, text.packing_boundary)

    def _conversations(self, record: Record) -> list[ChatRecord]:
        """Returns the conversations of a record, which the chat template renders."""
        if self._chat is None or record.plain:
            return []
        if record.chat is not None:
            conversations = [record.chat]
        else:
            turns = self._turns(record)
            groups = [[turn] for turn in turns] if self._separates_turns else [turns]
            conversations = [_messages(group) for group in groups]
        if not self._text.keep_prompt_only:
            conversations = [until_last_answer(each) for each in conversations]
        return [each for each in conversations if each.messages]

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
        encoded = iter(self._encode_texts(flat))
        return [self._join(list(itertools.islice(encoded, len(t)))) for t in records]

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


def _messages(turns: Sequence[Turn]) -> ChatRecord:
    return answers_of(
        [m for turn in turns for m in pair_messages(turn.prompt, turn.completion)]
    )
