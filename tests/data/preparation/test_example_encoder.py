"""Articles with tokenizers that begin a text with BOS or a space of their own."""

import pytest

from prompt_tuning.data.preparation.example_encoder import ArticleMaker
from prompt_tuning.data.preparation.preparation_settings import TextFormat
from prompt_tuning.data.preparation.records import Record, Turn
from prompt_tuning.data.text.tokenizers import continued_pair, load_tokenizer
from tests.support.shared_data import SHARED, needs_shared

STORIES = SHARED / "data/models/stories260k"
T5 = SHARED / "data/tokenizers/t5"
TALK = Record((Turn("The cat", "sat."), Turn("The dog", "ran.")))


def articles(tokenizer, record, **text):
    maker = ArticleMaker(TextFormat(**text), tokenizer, None)
    return maker.articles([maker.passages(record, "")])[0]


@needs_shared
@pytest.mark.parametrize("folder", [STORIES, T5])
def test_a_pair_has_the_ids_that_the_models_are_given(folder):
    tokenizer = load_tokenizer(folder)
    (article,) = articles(tokenizer, Record((Turn("The cat", "sat."),)))
    prompt, completion = continued_pair(tokenizer, "The cat", " sat.")
    begin = [tokenizer.bos_id] if tokenizer.add_bos else []
    assert article.input_ids == [*begin, *prompt, *completion, tokenizer.eos_id]
    given = len(begin) + len(prompt)
    assert article.token_types == [0] * given + [1] * len(completion) + [3]
    assert tokenizer.decode(article.input_ids) == "The cat sat."


@needs_shared
def test_bos_begins_what_attends_together():
    tokenizer = load_tokenizer(STORIES)
    assert tokenizer.bos_id is not None
    (line,) = articles(tokenizer, TALK)
    assert line.input_ids.count(tokenizer.bos_id) == 1
    apart = articles(
        tokenizer, TALK, attention_boundary="pair", packing_boundary="pair"
    )
    assert [article.input_ids.count(tokenizer.bos_id) for article in apart] == [1, 1]
    assert [article.token_types[0] for article in apart] == [0, 0]
