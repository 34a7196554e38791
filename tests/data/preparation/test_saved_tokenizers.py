"""The tokenizer saved with an output equals the one that encoded it."""

import json
import shutil

import pytest
import tokenizers

from prompt_tuning.core.errors import InputError
from prompt_tuning.data.preparation.preparation_settings import TokenizerChoice
from prompt_tuning.data.preparation.tokenizer_files import (
    open_tokenizer,
    save_tokenizer,
    tokenizer_files,
)
from prompt_tuning.data.text.tokenizers import load_tokenizer
from tests.support.exhaustive import sample
from tests.support.shared_data import FIXTURES
from tests.support.small_tokenizer import CHAT, EOS, PAD, write_tokenizer

TOKENIZERS = FIXTURES / "tokenizers"
TEXT = "the end, and a 3rd\n café"


def described(tokenizer):
    roles = tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.begin_ids
    ids = range(tokenizer.vocabulary_size)
    return roles, tokenizer.encode(TEXT), [tokenizer.token(id) for id in ids]


def saved(folder, path, *special_tokens):
    """Describes the opened tokenizer, and the one loaded from the saved folder."""
    choice = TokenizerChoice(str(path), special_tokens)
    save_tokenizer(choice, folder)
    return described(open_tokenizer(choice)), described(load_tokenizer(folder))


ASKED = [
    (),
    (("eos_token", "<|done|>"),),
    (("pad_token", EOS), ("bos_token", "<|begin|>")),
    (("additional_special_tokens", "<|x|>"), ("additional_special_tokens", "<|y|>")),
    (("eos_token", PAD), ("additional_special_tokens", "<|late|>")),
]


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_the_requested_roles_are_saved(tmp_path, asked, name):
    folder = write_tokenizer(tmp_path / "tokenizer", chat_template=CHAT)
    used, again = saved(tmp_path / "saved", folder / name, *asked)
    assert used == again
    config = json.loads((tmp_path / "saved/tokenizer_config.json").read_text())
    assert config["chat_template"] == CHAT
    for role, token in asked:
        assert token in config[role]


def test_a_new_eos_pads_rows_if_there_is_no_padding_token(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", pad_token=None)
    used, again = saved(tmp_path / "saved", folder, ("eos_token", "<|done|>"))
    assert used == again
    assert used[0] == (None, 262, 262, ())


def test_a_new_bos_begins_texts_as_the_earlier_one_did(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer", bos_token=EOS)
    file = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{EOS} $A", special_tokens=[(EOS, 260)]
    )
    tokenizer.save(str(file))
    used, again = saved(tmp_path / "saved", folder, ("bos_token", PAD))
    assert used == again
    assert used[0] == (261, 260, 261, (261,))


def test_the_older_map_of_special_tokens_is_saved_too(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer")
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": PAD}))
    used, again = saved(tmp_path / "first", folder)
    assert used == again and used[0][1] == 261
    used, again = saved(tmp_path / "second", folder, ("eos_token", "<|done|>"))
    assert used == again and used[0][1] == 262


@pytest.mark.parametrize(
    "path",
    sample(
        2,
        [
            TOKENIZERS / "byte_level/vocab.json",
            TOKENIZERS / "unigram/spiece.model",
            TOKENIZERS / "bpe/tokenizer.model",
            TOKENIZERS / "byte_level",
            FIXTURES / "peft/llama_tied/base",
        ],
    ),
)
def test_files_next_to_a_tokenizer_file_are_saved(tmp_path, path):
    used, again = saved(tmp_path / "saved", path)
    assert used == again
    files = {file.name for file in (tmp_path / "saved").iterdir()}
    read = {file.name for file in tokenizer_files(TokenizerChoice(str(path)))}
    assert files == read


def test_special_tokens_of_a_vocabulary_without_a_config_are_saved(tmp_path):
    role = ("pad_token", "<|pad|>")
    used, again = saved(tmp_path / "saved", TOKENIZERS / "byte_level/vocab.json", role)
    assert used == again
    assert used[0] == (511, 511, 512, ())


def test_the_tokenizer_file_that_was_read_is_saved(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer")
    shutil.copy(TOKENIZERS / "unigram/spiece.model", folder / "own.model")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(TOKENIZERS / "byte_level" / name, folder)
    shutil.copy(folder / "tokenizer.json", folder / "byte_level.json")
    for name in ("own.model", "vocab.json", "byte_level.json"):
        used, again = saved(tmp_path / f"saved {name}", folder / name)
        assert used == again


def test_a_role_has_one_token(tmp_path):
    folder = write_tokenizer(tmp_path / "tokenizer")
    twice = (("eos_token", EOS), ("eos_token", PAD))
    with pytest.raises(InputError, match=r"gives 'eos_token' to '<\|pad\|>' and to an"):
        open_tokenizer(TokenizerChoice(str(folder), twice))
