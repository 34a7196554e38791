"""The text of generated tokens, piece by piece, and where a stop text ends it."""

from collections.abc import Sequence
from typing import NamedTuple

from prompt_tuning.data.text.token_bytes import INCOMPLETE
from prompt_tuning.data.text.tokenizers import Tokenizer

CONTEXT_TOKENS = 6
"""Number of tokens before new ones that are decoded with them.

Sentencepiece drops the space before the first token of a text, and bytes of a character
may be several tokens.
"""


class NewText(NamedTuple):
    """Text that became certain.

    Attributes:
      text: the text.
      stopped: whether a stop text ends the row.
    """

    text: str
    stopped: bool


class TextPieces:
    """Decodes the tokens of a row one after the other.

    Args:
      tokenizer: tokenizer of the model.
      given: tokens before the first new one, empty for an encoder-decoder.
      stop: texts of which each ends the row, and is not part of its text.
    """

    def __init__(
        self, tokenizer: Tokenizer, given: Sequence[int], stop: Sequence[str] = ()
    ):
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._ids = list(given[-CONTEXT_TOKENS:])
        self._start = 0  # of the decoded window
        self._decoded = len(self._ids)  # tokens whose text is known
        self._text = ""
        self._shown = 0
        self._stopped = False

    @property
    def text(self) -> str:
        """The text so far, without a stop text."""
        return self._text

    def add(self, token: int) -> NewText:
        """Adds a token and returns the text that is certain since."""
        self._ids.append(token)
        before = self._tokenizer.decode(self._ids[self._start : self._decoded])
        whole = self._tokenizer.decode(self._ids[self._start :])
        if whole.endswith(INCOMPLETE) or not whole.startswith(before):
            return NewText("", False)
        return self._extend(whole[len(before) :])

    def finish(self) -> str:
        """Returns the rest of the text, once the row has ended."""
        if not self._stopped:
            before = self._tokenizer.decode(self._ids[self._start : self._decoded])
            whole = self._tokenizer.decode(self._ids[self._start :])
            self._text += whole.removeprefix(before) if before else whole
        rest, self._shown = self._text[self._shown :], len(self._text)
        return rest

    def _extend(self, text: str) -> NewText:
        """Adds decoded text, up to the first stop text in it."""
        self._start = max(self._decoded - CONTEXT_TOKENS, 0)
        self._decoded = len(self._ids)
        longest = max(map(len, self._stop), default=0)
        searched = max(len(self._text) - longest + 1, 0)
        self._text += text
        places = [self._text.find(stop, searched) for stop in self._stop]
        first = min((place for place in places if place >= 0), default=None)
        if first is not None:
            self._text, self._stopped = self._text[:first], True
        certain = len(self._text)
        if not self._stopped:
            certain -= self._possible_stop()
        piece = self._text[self._shown : certain]
        self._shown = max(self._shown, certain)
        return NewText(piece, self._stopped)

    def _possible_stop(self) -> int:
        """Returns the length of the longest end that may begin a stop text."""
        return max(
            (
                size
                for stop in self._stop
                for size in range(1, len(stop))
                if self._text.endswith(stop[:size])
            ),
            default=0,
        )


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Returns the text of a token, with a space before it if it has one."""
    piece = tokenizer.token(token)
    alone = tokenizer.decode([token])
    spaced = piece.startswith(("▁", "Ġ")) and not alone.startswith(" ")
    return f" {alone}" if spaced else alone or piece
