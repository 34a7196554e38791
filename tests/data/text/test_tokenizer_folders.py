import json

import pytest

from prompt_tuning.data.text.chat_templates import chat_template_of
from prompt_tuning.data.text.template_renderer import ChatRecord
from prompt_tuning.data.text.tokenizers import load_tokenizer
from tests.support.tokenizer_folders import (
    COMBINATIONS,
    MESSAGES,
    TEXTS,
    VALUES,
    transformers_values,
    write_folder,
)

COMMITTED = json.loads(VALUES.read_text())


def our_values(folder):
    tokenizer = load_tokenizer(folder)
    parts = chat_template_of(tokenizer).render(
        ChatRecord(tuple(MESSAGES), (False,)), ""
    )
    return {
        "texts": [tokenizer.encode(text) for text in TEXTS],
        "eos": tokenizer.eos_id,
        "bos": tokenizer.bos_id,
        "begin": list(tokenizer.begin_ids),
        "template": tokenizer.encode("".join(text for text, _ in parts)),
    }


@pytest.mark.parametrize("combination", COMMITTED)
def test_tokens_of_every_file_have_the_ids_of_transformers(combination, tmp_path):
    folder = write_folder(tmp_path / "tokenizer", combination)
    assert our_values(folder) == COMMITTED[combination]


@pytest.mark.torch
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_all_combinations_equal_transformers(combination, tmp_path):
    folder = write_folder(tmp_path / "tokenizer", combination)
    expected = transformers_values(folder)
    assert COMMITTED.get(combination, expected) == expected
    assert our_values(folder) == expected
