"""Tokenizers of GGUF files give the ids of those that they were made from.

llama.cpp's own conversion wrote the files, and transformers the ids before
(`scripts/make_gguf_fixtures.py`).
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.preparation_settings import TokenizerChoice
from prompt_tuning.data.preparation.tokenizer_files import save_tokenizer
from prompt_tuning.data.text.chat_templates import chat_template_of, has_chat_template
from prompt_tuning.data.text.gguf_splits import SPLITS
from prompt_tuning.data.text.sentencepiece_files import read_sentencepiece
from prompt_tuning.data.text.template_renderer import ChatRecord
from prompt_tuning.data.text.tokenizers import has_tokenizer, load_tokenizer
from tests.support.gguf_files import write_gguf

FOLDER = Path(__file__).parents[2] / "fixtures/gguf"
VALUES = json.loads((FOLDER / "tokenizers.json").read_text())
CHAT: Any = ({"role": "user", "content": "Once upon a time"},)
FIELDS = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<end>", "[PAD4]"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 5],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 3,
}
PIECES = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.merges": None,
    "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -3.0, -4.0],
}


def check(tokenizer, values):
    for text, ids in values["texts"].items():
        assert tokenizer.encode(text) == ids, text
    assert list(tokenizer.begin_ids) == values["begin"]
    assert tokenizer.eos_id == values["eos"]
    template = chat_template_of(tokenizer)
    assert template.prompt(ChatRecord(CHAT, (False,)), "here") == values["chat"]
    assert tokenizer.encode(values["chat"]) == values["chat_ids"]


@pytest.mark.parametrize("name", VALUES)
def test_ids_and_chats_are_those_of_transformers(name):
    file = FOLDER / f"{name}.gguf"
    assert has_tokenizer(file)
    check(load_tokenizer(file), VALUES[name])


@pytest.mark.parametrize("name", VALUES)
def test_prepared_data_has_the_same_tokenizer_as_a_folder(tmp_path, name):
    save_tokenizer(TokenizerChoice(str(FOLDER / f"{name}.gguf")), tmp_path / "saved")
    check(load_tokenizer(tmp_path / "saved"), VALUES[name])


def test_gemma_reads_pieces_as_its_class_does(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gemma2"}')
    shutil.copy(FOLDER.parent / "tokenizers/bpe/tokenizer.model", tmp_path)
    expected = load_tokenizer(tmp_path)
    pieces = read_sentencepiece(tmp_path / "tokenizer.model").proto.pieces
    fields = {
        "general.architecture": "gemma2",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in pieces],
        "tokenizer.ggml.scores": [float(piece.score) for piece in pieces],
        "tokenizer.ggml.token_type": [int(piece.type) for piece in pieces],
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.bos_token_id": 1,
    }
    tokenizer = load_tokenizer(write_gguf(tmp_path / "x.gguf", fields, {}))
    for text in VALUES["pieces"]["texts"]:
        assert tokenizer.encode(text) == expected.encode(text), text
    assert tokenizer.begin_ids == (1,)


@pytest.mark.parametrize("split", SPLITS)
def test_every_way_of_dividing_texts_keeps_them_whole(tmp_path, split):
    fields = FIELDS | {"tokenizer.ggml.pre": split}
    tokenizer = load_tokenizer(write_gguf(tmp_path / "x.gguf", fields, {}))
    assert tokenizer.encode("abb<end>") == [2, 1, 3]
    assert (tokenizer.vocabulary_size, tokenizer.eos_id) == (4, 3)
    assert not has_chat_template(tokenizer)
    with pytest.raises(InputError, match=r"x.gguf has no tokenizer.chat_template"):
        chat_template_of(tokenizer)


WRONG = {
    "another model": ({"tokenizer.ggml.model": "bert"}, "'bert', expected gpt2 or"),
    "an unknown way": (
        {"tokenizer.ggml.pre": "kimi-k2"},
        "in the way 'kimi-k2' .* put the model's tokenizer.json",
    ),
    "no way": ({"tokenizer.ggml.pre": None}, "in the way 'default'"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "has no 'tokenizer.ggml.tokens'"),
    "numbers as tokens": ({"tokenizer.ggml.tokens": [1, 2]}, "a list of texts"),
    "few types": ({"tokenizer.ggml.token_type": [1]}, "a list of 5 numbers, one for"),
    "merges of one text": ({"tokenizer.ggml.merges": ["ab"]}, "the merge 'ab'"),
    "merges of other tokens": ({"tokenizer.ggml.merges": ["a x"]}, "no usable token"),
    "an end beyond the vocabulary": (
        {"tokenizer.ggml.eos_token_id": 5},
        "eos_token_id = 5, expected a whole number from 0 to 4",
    ),
    "no scores": (PIECES | {"tokenizer.ggml.scores": None}, "has no .*scores"),
    "few scores": (PIECES | {"tokenizer.ggml.scores": [0.0]}, "a list of 5 numbers"),
    "texts as scores": (PIECES | {"tokenizer.ggml.scores": ["a"]}, "list of numbers"),
    "long tokens": (
        PIECES | {"tokenizer.ggml.tokens": ["a", "b", "x" * 2**15, "c", "d"]},
        "too long to be a vocabulary",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_unusable_tokenizer_is_refused(tmp_path, case):
    changed, message = WRONG[case]
    fields = {k: v for k, v in (FIELDS | changed).items() if v is not None}
    file = write_gguf(tmp_path / "x.gguf", fields, {})
    with pytest.raises(InputError, match=message) as caught:
        load_tokenizer(file)
    assert str(file) in str(caught.value)
