"""Decode generated tokens piece by piece, up to a stop text."""

import codecs
import contextlib
import types
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.utf8_text import common_beginning
from prompt_tuning.data.text.added_text import (
    CHARACTER_BYTES,
    CONTEXT_TOKENS,
    INCOMPLETE,
    added_text,
    complete_text,
    context_start,
    entry_bytes,
)
from prompt_tuning.data.text.tokenizers import Tokenizer, hidden_tokens, is_unsettled


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


class NewText(NamedTuple):
    """Newly decoded text that can no longer change.

    `stopped` tells whether a stop text ends the row; `offset` is the position of the
    token's first character in the row's text.
    """

    text: str
    stopped: bool
    offset: int = 0


class Detokenizer:
    """Decodes the tokens of a row one by one.

    Args:
      tokenizer: tokenizer of the model.
      given: tokens before the first new one, empty for an encoder-decoder. They may end
        inside a character, which then belongs to the new text.
      stop: texts that end the row and are not part of its text.
      minimum: number of new tokens within which no stop text ends the row.
      written: texts of special tokens that appear in the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        given: Sequence[int],
        stop: Sequence[str] = (),
        minimum: int = 0,
        written: Mapping[int, str] = types.MappingProxyType({}),
    ):
        self._tokenizer, self._search = tokenizer, StopSearch(stop)
        self._minimum, self._count, self._written = minimum, 0, written
        # Tokens that are decoded together: some with known text, and new ones.
        self._ids = list(given[-CONTEXT_TOKENS - CHARACTER_BYTES :])
        self._move_window()
        self._complete = complete_text(tokenizer, self._window)
        self._text = ""
        # Bytes of the last character if it is incomplete, and its offset.
        self._part, self._begun = b"", 0
        self._shown = 0
        self._stopped = False

    @property
    def text(self) -> str:
        """The text so far, without the stop text."""
        return self._text

    def add(self, token: int) -> NewText:
        """Adds a token and returns the text that is now final."""
        self._ids.append(token)
        self._count += 1
        earlier, self._whole = self._whole, self._tokenizer.decode(self._window)
        same = common_beginning(earlier, self._whole)
        offset = self._offset(same)
        if token in self._written:
            self._part = b""
            return self._extend(self._added + self._written[token], offset)
        if self._whole.endswith(INCOMPLETE):
            content = token_content(self._tokenizer, token)
            return NewText("", False, self._part_offset(content, offset))
        self._part = b""
        if is_unsettled(self._tokenizer, self._whole):
            return NewText("", False, offset)
        return self._extend(self._added, offset)

    def finish(self) -> str:
        """Returns the rest of the text, once the row has ended."""
        if not self._stopped:
            self._text += self._added
            self._before = self._whole
        rest, self._shown = self._text[self._shown :], len(self._text)
        return rest

    @property
    def _added(self) -> str:
        return added_text(self._before, self._whole, self._complete)

    @property
    def _window(self) -> list[int]:
        return self._ids[self._start :]

    def _move_window(self) -> None:
        """Moves the window's start to a few tokens before the next one."""
        self._start = context_start(self._tokenizer, self._ids)
        del self._ids[: max(self._start - CHARACTER_BYTES, 0)]
        self._start = min(self._start, CHARACTER_BYTES)
        text = self._tokenizer.decode(self._window)
        self._before = self._complete = self._whole = text

    def _offset(self, same: str) -> int:
        """Returns the offset of a token, given the window's text before it."""
        known = len(common_beginning(self._before, same))
        return len(self._text) + len(same) - known

    def _part_offset(self, content: bytes, offset: int) -> int:
        """Returns the offset of a token that ends inside a character.

        All bytes of a character have its offset; other bytes have their own.

        Args:
          content: bytes of the token.
          offset: offset of its first character if it does not continue one.
        """
        if self._part:
            with contextlib.suppress(UnicodeDecodeError):
                joined, begun = self._part + content, self._begun
                text, size = codecs.utf_8_decode(joined)
                self._part, self._begun = joined[size:], begun + len(text)
                return begun
        self._part, self._begun = b"", offset
        with contextlib.suppress(UnicodeDecodeError):
            text, size = codecs.utf_8_decode(content)
            self._part, self._begun = content[size:], offset + len(text)
        return offset

    def _extend(self, text: str, offset: int) -> NewText:
        """Adds decoded text, up to the first stop text."""
        length = len(self._text)
        self._text += text
        found = self._search.find(text, ends=self._count > self._minimum)
        if found is not None:
            end = length + found.end - found.length
            self._text, self._stopped = self._text[:end], True
        else:
            self._move_window()
        certain = len(self._text)
        if not self._stopped:
            certain -= self._search.held
        piece = self._text[self._shown : certain]
        self._shown = max(self._shown, certain)
        return NewText(piece, self._stopped, offset)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Returns the text of a token, including its leading space."""
    piece = tokenizer.token(token)
    alone = tokenizer.decode([token])
    spaced = piece.startswith(("▁", "Ġ")) and not alone.startswith(" ")
    return f" {alone}" if spaced else alone or piece


def token_content(tokenizer: Tokenizer, token: int) -> bytes:
    """Returns the UTF-8 bytes of a token, which may be part of a character."""
    text = token_text(tokenizer, token)
    if INCOMPLETE in text:
        return entry_bytes(tokenizer.token(token)) or text.encode()
    return text.encode(errors="replace")


def token_name(tokenizer: Tokenizer, token: int) -> str:
    r"""Returns the text of a token, or e.g. `bytes:\xca` for part of a character.

    The form for bytes is that of OpenAI's API.
    """
    text = token_text(tokenizer, token)
    if INCOMPLETE not in text:
        return text
    content = token_content(tokenizer, token)
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def distinct_names(tokenizer: Tokenizer, tokens: Sequence[int]) -> dict[int, str]:
    """Returns a unique name for each token.

    The first token with a text is named by it; later tokens with the same text by their
    vocabulary entries or, if those are equal too, by their ids.
    """
    names: dict[int, str] = {}
    for token in tokens:
        entry = tokenizer.token(token)
        choices = (token_name(tokenizer, token), entry, f"token_id:{token}")
        if token not in names:
            used = set(names.values())
            names[token] = next(name for name in choices if name not in used)
    return names
