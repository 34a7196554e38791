"""Retrieval of parts of a text."""

from prompt_tuning.texts.text_study import TextRetriever
from tests.support.dummies import LetterTokenizer

LINES = ["ab=cd\n", "ef=gh\n", "ij=kl\n", "mn=op\n"]


def test_the_lines_that_share_tokens_with_a_question_are_retrieved_in_order():
    letters = LetterTokenizer()
    retrieve = TextRetriever("".join(LINES), letters, 12)
    asked = letters.encode("mn ef")
    assert retrieve(asked) == letters.encode(LINES[1] + LINES[3])


def test_what_is_retrieved_is_never_longer_than_asked_for():
    letters = LetterTokenizer()
    retrieve = TextRetriever("".join(LINES), letters, 5)
    assert 0 < len(retrieve(letters.encode("ij"))) <= 5
