"""Parts of an answer about the given tokens: `echo` and `prompt_logprobs`."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from prompt_tuning.data.text.added_text import INCOMPLETE
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.decoding.detokenizer import Detokenizer, token_name
from prompt_tuning.decoding.request import Completion, TokenLogprob


class GivenParts(NamedTuple):
    """Selects these parts.

    With `echo`, the answer's text starts with the given one. `logprobs` is the number
    of most probable tokens per echoed token, and `prompt_logprobs` the same for vLLM's
    field of this name.
    """

    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def count(self, new_tokens: int) -> int | None:
        """Returns the number of most probable tokens to compute; None for no scores.

        A row without new tokens is read only for its scores.
        """
        counts = [x for x in (self.logprobs, self.prompt_logprobs) if x is not None]
        return max(counts, default=None if new_tokens else 0)


NOTHING_GIVEN = GivenParts()


class GivenText(NamedTuple):
    """Given tokens as text.

    Attributes:
      ids: the tokens; those that stand for prompt vectors have no text.
      text: the text, without a character that new tokens complete.
      offsets: position of each token's first character.
    """

    ids: Sequence[int]
    text: str
    offsets: Sequence[int]

    @classmethod
    def decode(cls, tokenizer: Tokenizer, ids: Sequence[int]) -> "GivenText":
        """Decodes tokens one after the other."""
        pieces = Detokenizer(tokenizer, ())
        offsets = [pieces.add(token).offset for token in ids]
        pieces.finish()
        return cls(ids, pieces.text.rstrip(INCOMPLETE), offsets)

    def first_entry(self, tokenizer: Tokenizer) -> dict[str, list[Any]]:
        """Returns the entry of the first token, which follows nothing."""
        return {
            "tokens": [token_name(tokenizer, token) for token in self.ids[:1]],
            "token_logprobs": [None] * len(self.ids[:1]),
            "top_logprobs": [None] * len(self.ids[:1]),
            "text_offset": list(self.offsets[:1]),
        }

    def logprobs(self, completion: Completion) -> list[TokenLogprob]:
        """Returns the log-probabilities of later given and of new tokens.

        The token that ended the row is the last one, although no text shows it.
        """
        scores, begin = completion.given_logprobs or (), len(self.text)
        old = zip(scores, self.offsets[1:], strict=True)
        new = [*(completion.logprobs or ()), completion.end_logprob]
        return [
            *(each._replace(offset=offset) for each, offset in old),
            *(each._replace(offset=begin + each.offset) for each in new if each),
        ]


def prompt_logprobs(
    completion: Completion, tokenizer: Tokenizer, count: int
) -> list[dict[str, Any] | None]:
    """Returns log-probabilities of given tokens in vLLM's form, by token id."""
    return [
        None,
        *(
            {
                str(token): {
                    "logprob": value,
                    "rank": rank,
                    "decoded_token": token_name(tokenizer, token),
                }
                for token, value, rank in [
                    (one.token, one.logprob, one.rank),
                    *((*pair, i) for i, pair in enumerate(one.top[:count], 1)),
                ]
            }
            for one in completion.given_logprobs or ()
        ),
    ]
