"""Special tokens, which decoded texts leave out."""

import functools
from collections.abc import Mapping

from prompt_tuning.data.text.tokenizers import HuggingFaceTokenizer, Tokenizer


@functools.lru_cache(maxsize=8)
def hidden_tokens(tokenizer: Tokenizer) -> Mapping[str, int]:
    """Returns the ids of the special tokens that `decode` leaves out, by their text."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        added = tokenizer.tokenizer.get_added_tokens_decoder().items()
        return {token.content: id for id, token in added if token.special}
    return {}
