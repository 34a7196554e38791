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
