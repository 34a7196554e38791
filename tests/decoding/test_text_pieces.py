import pytest

from prompt_tuning.decoding.text_pieces import TextPieces
from tests.support.dummies import LetterTokenizer


@pytest.mark.parametrize("stop", [["cd"], ["xyz", "cd"], ["c"]])
def test_a_stop_text_across_tokens_is_never_shown(stop):
    pieces = TextPieces(LetterTokenizer(), [], stop)
    shown = ""
    for token in LetterTokenizer().encode("abcacdef"):
        new = pieces.add(token)
        shown += new.text
        if new.stopped:
            break
    end = "ab" if stop == ["c"] else "abca"
    assert (shown, pieces.text) == (end, end)


def test_a_beginning_of_a_stop_text_is_shown_when_the_row_ends():
    pieces = TextPieces(LetterTokenizer(), [], ["cd"])
    first = [pieces.add(token).text for token in LetterTokenizer().encode("abc")]
    assert (first, pieces.finish()) == (["a", "b", ""], "c")


class Bytes(LetterTokenizer):
    """Each token is a byte of UTF-8."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids) -> str:
        return bytes(ids).decode(errors="replace")


def test_text_is_shown_when_its_characters_are_complete():
    pieces = TextPieces(Bytes(), list(b"a "))
    new = list("né €!".encode())
    shown = [*(pieces.add(token).text for token in new), pieces.finish()]
    assert [text for text in shown if text] == ["n", "é", " ", "€", "!"]
    # The last token of a text that is cut off may be a part of a character.
    cut = TextPieces(Bytes(), [])
    assert [cut.add(token).text for token in new[:2]] == ["n", ""]
    assert (cut.finish(), cut.text) == ("\ufffd", "n\ufffd")
