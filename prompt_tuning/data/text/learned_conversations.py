"""Encodes conversations as examples to learn, with the ids that a server reads.

The ids before a learned answer are the ids of the whole text up to it, encoded in one
go. All answers of a conversation are in one example if they then have these ids before
them; otherwise each answer has an example.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.core.token_weights import COMPLETION
from prompt_tuning.data.text.chat_templates import ChatTemplate, turn_ends
from prompt_tuning.data.text.learned_answers import TypedText
from prompt_tuning.data.text.template_renderer import ChatRecord, LearnedTexts
from prompt_tuning.data.text.text_encoder import TextEncoder, TypedTokens
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.settings.data_source import Turns

Encoded = tuple[list[int], list[int] | None]
"""The ids of an example, and their number for each text; None if texts share one."""
_MERGED = "the tokenizer joins the end of a text with the beginning of an answer"


class LearnedConversations:
    """Encodes conversations as examples.

    Args:
      tokenizer: tokenizer with an EOS.
      template: template that renders the messages.
      turns: "together" for one example of all answers, "apart" for one of every answer,
        or "auto" for together where the contexts stay the same.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, turns: Turns):
        assert tokenizer.eos_id is not None
        self._tokenizer, self._template = tokenizer, template
        self._encode, self._turns = TextEncoder(tokenizer), turns
        self._eos = tokenizer.eos_id
        self._end_ids: dict[int, str] | None = None

    @property
    def _ends(self) -> dict[int, str]:
        if self._end_ids is None:
            ids = [self._eos, *turn_ends(self._template, self._tokenizer)]
            self._end_ids = {id: self._tokenizer.token(id) for id in ids}
        return self._end_ids

    def __call__(self, records: Sequence[ChatRecord]) -> list[list[TypedTokens] | str]:
        """Returns the examples by conversation, or what is wrong with it."""
        results = self._examples(records, self._turns == "apart")
        merged = [i for i, each in enumerate(results) if each is None]
        if merged:
            again = self._examples([records[i] for i in merged], True)
            for i, each in zip(merged, again, strict=True):
                results[i] = each
        return [x if isinstance(x, str) else _count_repeated(x or []) for x in results]

    def _examples(
        self, records: Sequence[ChatRecord], apart: bool
    ) -> list[list[TypedTokens] | str | None]:
        """Returns the result of `__call__`; None where answers cannot be together."""
        ends = [self._template.eos_token or "", *self._ends.values()]
        rendered = list(self._template.learned_many(records, ends, apart=apart))
        texts = [
            [text for text, _ in parts]
            for each in rendered
            if not isinstance(each, str)
            for parts in each.examples
        ]
        try:
            encoded = iter(self._encode.joined(texts))
            return [
                each if isinstance(each, str) else self._typed(each, encoded, apart)
                for each in rendered
            ]
        except InputError as problem:
            if len(records) == 1:
                return [str(problem)]
            return [self._examples([record], apart)[0] for record in records]

    def _typed(
        self, rendered: LearnedTexts, encoded: Iterator[Encoded], apart: bool
    ) -> list[TypedTokens] | str | None:
        """Returns the examples of a conversation from the next ids of `encoded`."""
        found = [
            self._typed_tokens(texts, *next(encoded)) for texts in rendered.examples
        ]
        examples = [each for each in found if each is not None]
        is_merged = len(examples) < len(found)
        change = _MERGED if is_merged else rendered.change
        if change is not None and not apart and self._turns == "together":
            return (
                f"{change}; a model that learned the answers together would not read "
                "the same before each as when it answers: give "
                f"{how_to_set('DataSource.turns', 'apart')}, which makes an example of "
                "each answer, or another chat_template, which only appends to what it "
                "wrote"
            )
        return None if is_merged else examples

    def _typed_tokens(
        self, texts: Sequence[TypedText], ids: list[int], lengths: list[int] | None
    ) -> TypedTokens | None:
        """Returns the tokens of an example; None if ids before an answer differ."""
        if lengths is None:
            if len(texts) > 2:
                return None
            ((before, answer),) = self._encode([[text for text, _ in texts]])
            ids, lengths = [*before, *answer], [len(before), len(answer)]
        kinds = (
            [kind] * length for (_, kind), length in zip(texts, lengths, strict=True)
        )
        tokens = TypedTokens(ids, list(itertools.chain(*kinds)))
        if not tokens.input_ids or tokens.input_ids[-1] not in self._ends:
            tokens.input_ids.append(self._eos)
            tokens.token_types.append(COMPLETION)
        return tokens


def _count_repeated(examples: list[TypedTokens]) -> list[TypedTokens]:
    """Counts the tokens of all examples of a conversation but the longest."""
    longest = max(examples, key=lambda each: len(each.input_ids), default=None)
    return [
        each
        if each is longest
        else dataclasses.replace(each, repeated=len(each.input_ids))
        for each in examples
    ]
