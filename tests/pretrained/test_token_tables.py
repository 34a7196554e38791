"""Tokens are found or added, and their rows start where the model expects them."""

import dataclasses

import jax
import numpy as np
import pytest

from prompt_tuning.core.errors import InputError
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.settings.pretrained import Pretrained, WeightLocation
from prompt_tuning.settings.trained_tokens import TrainedTokens
from scripts import skills
from tests.support.small_runs import DECODER, T5, write_model

KEY, SIZE = jax.random.key(0), len(skills.VOCABULARY)
ROWS, HEAD = (f"token_embedder/adapters/tokens/{x}" for x in ("rows", "head"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    untied = dataclasses.replace(DECODER, tied_head=False)
    return {
        name: write_model(folder / name, config)
        for name, config in {"tied": DECODER, "untied": untied, "t5": T5}.items()
    }


def opened(folder, *, mesh=None, weights: WeightLocation = "device", **settings):
    source = Pretrained(checkpoint=str(folder), weights=weights)
    tuning = Tuning(adapters=[TrainedTokens(**settings)])
    return open_pretrained(source, tuning, key=KEY, mesh=mesh)


def trained_ids(model):
    tokens = model.prompts.tokens
    assert tokens is not None
    return tokens.ids


def test_new_rows_are_the_mean_and_others_the_tables(folders):
    model = opened(folders["untied"], tokens=["<up>", "b", "<end>"])
    known = model.needed_tokenizer().encode("b")[0]
    assert trained_ids(model) == (SIZE, known, SIZE + 1)
    parameters = model.read_parameters()
    for path, table, ids in (
        (ROWS, "token_embedder/embedding", [None, known, None]),
        (HEAD, "head/kernel", [None, None]),
    ):
        whole = np.asarray(parameters[table])
        assert len(whole) == SIZE
        mean = whole.mean(0)
        rows = [mean if id is None else whole[id] for id in ids]
        np.testing.assert_allclose(parameters[path], rows, atol=1e-6)


def test_a_new_token_is_one_token_and_stays_in_texts(folders):
    model = opened(folders["tied"], tokens=["<up>", "<end>"])
    tokenizer = model.needed_tokenizer()
    ids = tokenizer.encode("<up>ab<end>")
    assert ids == [SIZE, *skills.encode("ab"), SIZE + 1]
    assert tokenizer.decode(ids) == "<up>ab<end>"
    assert model.config.vocabulary_size == SIZE + 2
    assert model.base_tokenizer is not None
    assert model.base_tokenizer.vocabulary_size == SIZE


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("tied", {"tokens": ["b", "b"]}, "names token .* twice"),
        ("tied", {"tokens": [SIZE + 1]}, f"token {SIZE} behind them is not trained"),
        ("tied", {"tokens": ["b"], "head": ["b"]}, "leave it out"),
        ("untied", {"tokens": ["<a>"], "head": ["b"]}, "name it in both"),
        ("untied", {"tokens": ["b"], "head": ["xyz"]}, "of one token, or an id"),
        ("t5", {"tokens": ["b"]}, "encoder-decoder"),
        ("tied", {"tokens": ["b"], "mesh": MeshShape(data=1)}, "on one device"),
        ("tied", {"tokens": ["b"], "weights": "streamed"}, "on one device"),
        ("tied", {"tokens": []}, "expected a list of texts or ids"),
        ("tied", {"tokens": "<a>"}, "expected a list of str or int"),
    ],
)
def test_tokens_that_cannot_be_trained_are_refused(folders, model, settings, message):
    with pytest.raises(InputError, match=message):
        opened(folders[model], **settings)


def test_a_model_without_a_tokenizer_needs_ids(folders, tmp_path):
    folder = write_model(tmp_path / "model", DECODER)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert trained_ids(opened(folder, tokens=[5])) == (5,)
    with pytest.raises(InputError, match="has no tokenizer"):
        opened(folder, tokens=["b"])
