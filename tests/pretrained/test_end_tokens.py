"""The tokens that end rows of data and generated texts."""

import json

import jax
import pytest

from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.decoding.row_encoding import strip_end
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.settings.pretrained import Pretrained
from scripts import skills
from tests.support.small_runs import DECODER, write_model, write_pairs

A, B = (skills.encode(letter)[0] for letter in "ab")
GPT2_END = "<|endoftext|>"


@pytest.fixture
def folder(tmp_path):
    return write_model(tmp_path / "model", DECODER)


def change(folder, file, **values):
    content = json.loads((folder / file).read_text()) | values
    (folder / file).write_text(json.dumps(content))


def opened(folder, **choices) -> PromptedModel:
    source = Pretrained(checkpoint=str(folder), **choices)
    return open_pretrained(source, key=jax.random.key(0))


def last_target(model: PromptedModel, folder) -> int:
    """Returns the token that ends the only row of a file."""
    rows = write_pairs(folder / "rows.jsonl", [("a=", "B")])
    return int(
        load_examples(DataSource(files=str(rows)), model.interface)[0].targets[-1]
    )


def test_rows_end_with_the_tokenizers_end_token_and_texts_at_any_of_them(folder):
    change(folder, "config.json", eos_token_id=[A, B])
    model = opened(folder)
    assert last_target(model, folder) == skills.EOS_ID
    assert model.stop_ids == (skills.EOS_ID, A, B)
    assert strip_end([7, 8, B, 9], model.stop_ids) == [7, 8]
    assert model.ends is not None
    assert f"rows end with token {skills.EOS_ID}" in model.ends
    assert f"stops at {A} and {B}" in model.ends


def test_agreement_is_not_reported(folder):
    model = opened(folder)
    assert (model.stop_ids, model.ends) == ((skills.EOS_ID,), None)


def test_a_tokenizer_without_an_end_token_uses_the_models(folder):
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink(missing_ok=True)
    change(folder, "config.json", eos_token_id=A)
    model = opened(folder)
    assert last_target(model, folder) == A
    assert model.stop_ids[0] == A


def test_a_configured_token_ends_rows_and_texts(folder):
    model = opened(folder, eos_id=B)
    assert last_target(model, folder) == B
    assert model.stop_ids[0] == B


def test_a_vocabulary_with_merges_is_found_next_to_the_model(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()
    vocabulary = {"a": 0, "b": 1, "ab": 2, GPT2_END: 3}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    model = opened(folder)
    assert model.needed_tokenizer().encode("ab") == [2]
    assert model.eos_id == 3
