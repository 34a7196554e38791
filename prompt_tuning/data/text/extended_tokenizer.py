"""Tokenizers with tokens that a run adds."""

from collections.abc import Sequence

from prompt_tuning.core.errors import InputError, kind_of, shown
from prompt_tuning.data.text.encoding_limits import reporting_errors
from prompt_tuning.data.text.tokenizers import HuggingFaceTokenizer, Tokenizer


def find_token(tokenizer: Tokenizer, text: str) -> int | None:
    """Returns the token that a text is: an entry's name, or its only token, or None."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        id = tokenizer.tokenizer.token_to_id(text)
        if id is not None:
            return id
    try:
        ids = tokenizer.encode_continuation(text)
    except InputError:  # a character that only a new token can have
        return None
    return ids[0] if len(ids) == 1 and tokenizer.decode(ids) == text else None


def with_tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> HuggingFaceTokenizer:
    """Returns a copy of a tokenizer with new tokens, in their order.

    As with `add_tokens` of transformers, they get the next free ids, stay in decoded
    texts, and are found in a text before it is normalized.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        raise InputError(
            f"tokens cannot be added to {kind_of(tokenizer)}, expected a tokenizer of "
            "the library tokenizers"
        )
    # Not at the top: the library takes long to import.
    import tokenizers

    with reporting_errors(lambda: f"{shown(list(texts))} cannot be added as tokens"):
        copy = tokenizers.Tokenizer.from_str(tokenizer.tokenizer.to_str())
        copy.add_tokens([tokenizers.AddedToken(x, normalized=False) for x in texts])
    return HuggingFaceTokenizer(
        copy,
        tokenizer.special,
        tokenizer.folder,
        tokenizer.costs,
        tokenizer.cleans_spaces,
    )
