"""Find stop texts in a growing text, and recognize those that are special tokens."""

from collections.abc import Sequence
from typing import NamedTuple

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.data.text.tokenizers import Tokenizer, hidden_tokens


class StopFound(NamedTuple):
    """A stop text found in a text. `end` is the number of characters up to its end."""

    end: int
    length: int


class StopSearch:
    """Searches for stop texts in characters that arrive in pieces.

    The time per character does not depend on the lengths of the stop texts.
    """

    def __init__(self, stops: Sequence[str]):
        self._patterns = [_Pattern(stop) for stop in stops]

    @property
    def held(self) -> int:
        """Number of last characters that may start a stop text."""
        return max((each.matched for each in self._patterns), default=0)

    def find(self, piece: str, *, ends: bool = True) -> StopFound | None:
        """Returns the stop text that ends first in a piece; the longest if several do.

        Args:
          piece: the next characters; those after a stop text that is found are not
            read.
          ends: whether a stop text may end in this piece.
        """
        if not self._patterns:
            return None
        for end, character in enumerate(piece, start=1):
            found = [each.length for each in self._patterns if each.add(character)]
            if found and ends:
                return StopFound(end, max(found))
        return None


class _Pattern:
    """One stop text, searched as by Knuth, Morris and Pratt 1977, section 2.

    Attributes:
      length: its number of characters.
      matched: number of its first characters that the text currently ends with.
    """

    def __init__(self, text: str):
        self._text, self.length, self.matched = text, len(text), 0
        # For the first i + 1 characters: length of the longest suffix that is also a
        # prefix.
        self._borders = [0]

    def add(self, character: str) -> bool:
        """Adds a character; returns whether the text now ends with the stop text."""
        text, matched = self._text, self.matched
        while matched and text[matched] != character:
            matched = self._border(matched)
        matched += text[matched] == character
        found = matched == self.length
        self.matched = self._border(matched) if found else matched
        return found

    def _border(self, length: int) -> int:
        text, borders = self._text, self._borders
        while len(borders) < length:
            last = text[len(borders)]
            border = borders[-1]
            while border and text[border] != last:
                border = borders[border - 1]
            borders.append(border + (text[border] == last))
        return borders[length - 1]


def stop_tokens(tokenizer: Tokenizer, stops: Sequence[str]) -> tuple[int, ...]:
    """Returns the stop texts that are special tokens, which are never part of a text.

    Raises:
      InputError: if a stop text mixes a special token with other characters; no text
        contains it.
    """
    hidden = hidden_tokens(tokenizer) if stops else {}
    for stop in stops:
        inside = [entry for entry in hidden if entry in stop and stop not in hidden]
        if inside:
            raise InputError(
                f"the stop text {shown(stop)} has the special token {inside[0]}, which "
                f"is not part of the text that is searched: give id "
                f"{hidden[inside[0]]} as one of stop_token_ids (Python and the command:"
                " ends) instead"
            )
    return tuple(hidden[stop] for stop in stops if stop in hidden)
