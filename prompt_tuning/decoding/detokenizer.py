"""Decode generated tokens piece by piece, up to a stop text."""

import codecs
import contextlib
import types
from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
from prompt_tuning.data.text.tokenizers import Tokenizer, is_unsettled
from prompt_tuning.decoding.stop_texts import StopSearch


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
