"""The syntax of an answer, from the chat template and the end of its conversation."""

import pytest

from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.server.chat_syntax import find_syntax
from tests.support.small_tokenizer import write_tokenizer

TAGS = "<think>", "</think>"


@pytest.mark.parametrize("special", [(), TAGS], ids=["plain", "special"])
@pytest.mark.parametrize(
    "end, opened",
    [("<think>\n", True), ("<think>\n\n</think>\n\n", False)],
    ids=["opened", "closed"],
)
def test_a_thought_that_is_closed_already_is_not_opened(tmp_path, special, end, opened):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path / "tokenizer", special))
    ids = tokenizer.encode(f"a question\n{end}")
    assert find_syntax("".join(TAGS), tokenizer, ids, None).opened is opened
