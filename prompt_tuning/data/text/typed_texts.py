"""Encodes a text with parts of different token types as one continuous text."""

import dataclasses
from collections.abc import Sequence

from prompt_tuning.core.token_weights import COMPLETION, PROMPT
from prompt_tuning.data.text.learned_answers import TypedText
from prompt_tuning.data.text.template_renderer import ChatRecord
from prompt_tuning.data.text.text_encoder import TextEncoder
from prompt_tuning.data.text.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class RenderedText:
    """Consecutive typed texts, encoded as one continuous text.

    With `adds_bos`, the tokens that the model expects before a text are added.
    """

    parts: tuple[TypedText, ...]
    adds_bos: bool = True


@dataclasses.dataclass(frozen=True)
class TypedTokens:
    """Token ids with their types, 0 to 3.

    `repeated` counts tokens that another example of the same conversation has too.
    """

    input_ids: list[int]
    token_types: list[int]
    repeated: int = 0


class TypedTextEncoder:
    """Encodes rendered texts, each closed with EOS, which the tokenizer must have."""

    def __init__(self, tokenizer: Tokenizer):
        assert tokenizer.eos_id is not None
        self._encode_texts = TextEncoder(tokenizer)
        self._eos = tokenizer.eos_id
        self._begin = tokenizer.begin_ids

    def __call__(self, texts: Sequence[RenderedText]) -> list[TypedTokens]:
        """Returns the tokens by text; the EOS that closes a text has type 1."""
        encoded = self._encode_texts(
            [[text for text, _ in rendered.parts] for rendered in texts]
        )
        return [
            self._add_types(rendered, ids)
            for rendered, ids in zip(texts, encoded, strict=True)
        ]

    def _add_types(
        self, rendered: RenderedText, part_ids: Sequence[list[int]]
    ) -> TypedTokens:
        ids: list[int] = []
        types: list[int] = []
        if rendered.adds_bos:
            ids += self._begin
            types += [PROMPT] * len(self._begin)
        for (_, kind), tokens in zip(rendered.parts, part_ids, strict=True):
            ids += tokens
            types += [kind] * len(tokens)
        if not part_ids[-1] or ids[-1] != self._eos:
            ids.append(self._eos)
            types.append(COMPLETION)
        return TypedTokens(ids, types)


def until_last_answer(record: ChatRecord) -> ChatRecord:
    """Cuts a conversation after its last learned answer; it is empty without any.

    The messages after it would end with a learned separator although nothing answers
    them.
    """
    count = max((i for i, x in enumerate(record.learned, start=1) if x), default=0)
    return record._replace(
        messages=record.messages[:count], learned=record.learned[:count]
    )
