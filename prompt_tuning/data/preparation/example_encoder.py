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
from prompt_tuning.data.text.learned_conversations import LearnedConversations
from prompt_tuning.data.text.template_renderer import ChatRecord
from prompt_tuning.data.text.text_encoder import (
    RenderedText,
    TypedTextEncoder,
    TypedTokens,
    until_last_answer,
)
from prompt_tuning.data.text.tokenizers import Tokenizer

_NEEDS_CHAT = (
    "found chat messages, or keys that a chat template reads (system, history, tools, "
    "chat_template_kwargs), which need --chat to be rendered"
)


class ExampleEncoder:
    """Turns records into examples; `chat` is the template that renders the turns."""

    def __init__(
        self, text: TextFormat, tokenizer: Tokenizer, chat: ChatTemplate | None
    ):
        assert tokenizer.eos_id is not None
        self._text = text
        self._encode_texts = TypedTextEncoder(tokenizer)
        self._chat = None
        if chat is not None:
            self._chat = LearnedConversations(tokenizer, chat, text.turns)

    def __call__(
        self, records: Sequence[tuple[Record, str]]
    ) -> list[list[TypedTokens] | InputError]:
        """Returns the examples by record, or what is wrong with it at its location.

        A record without a completion has no examples.
        """
        conversations = [self._conversations(record) for record, _ in records]
        flat = [each for several in conversations for each in several]
        encoded = iter(() if self._chat is None else self._chat(flat))
        turns = self._encode_turns([record for record, _ in records])
        results = []
        for (record, location), several in zip(records, conversations, strict=True):
            examples = list(itertools.islice(encoded, len(several)))
            problems = [each for each in examples if isinstance(each, str)]
            found = [x for each in examples if not isinstance(each, str) for x in each]
            if not self._is_rendered(record):
                result = next(turns)
                problems = [result] if isinstance(result, str) else []
                found = [] if isinstance(result, str) else result
            if problems:
                results.append(InputError(f"{location}: {problems[0]}"))
            else:
                # The answers of one conversation may need examples of their own.
                joins = len(several) != 1
                results.append(self._join(found, joins=joins))
        return results

    def _is_rendered(self, record: Record) -> bool:
        return self._chat is not None and not record.plain

    def _encode_turns(
        self, records: Sequence[Record]
    ) -> Iterator[list[TypedTokens] | str]:
        """Yields the texts of the records that no chat template renders."""
        rendered = [
            _NEEDS_CHAT if record.chat is not None else self._render_turns(record)
            for record in records
            if not self._is_rendered(record)
        ]
        texts = [each for each in rendered if not isinstance(each, str)]
        try:
            encoded = iter(self._encode_texts([x for each in texts for x in each]))
        except InputError as problem:
            if len(rendered) == 1:
                yield str(problem)
                return
            # One of the texts cannot be encoded: find it by encoding them one by one.
            for record in records:
                yield from self._encode_turns([record])
            return
        for each in rendered:
            if isinstance(each, str):
                yield each
            else:
                yield list(itertools.islice(encoded, len(each)))

    def _turns(self, record: Record) -> list[Turn]:
        keep = self._text.keep_prompt_only
        return [turn for turn in record.turns if turn.completion or keep]

    @property
    def _separates_turns(self) -> bool:
        text = self._text
        return "pair" in (text.attention_boundary, text.packing_boundary)

    def _conversations(self, record: Record) -> list[ChatRecord]:
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
        turns = self._turns(record)
        if record.plain:
            return [RenderedText(((turn.completion, COMPLETION),)) for turn in turns]
        return [
            self._render_turn(turn, adds_bos=self._separates_turns or index == 0)
            for index, turn in enumerate(turns)
        ]

    def _join(self, texts: list[TypedTokens], *, joins: bool) -> list[TypedTokens]:
        """Sets the separators of a record's encoded texts; returns its examples."""
        separate = not joins or self._text.packing_boundary == "pair"
        for number, text in enumerate(texts, start=1):
            is_last = separate or number == len(texts)
            if is_last or self._text.attention_boundary == "pair":
                text.token_types[-1] = SEPARATOR
        if separate or len(texts) < 2:
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
