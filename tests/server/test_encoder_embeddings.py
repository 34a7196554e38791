"""Encoders are served for their vectors of texts, which are those of transformers."""

# transformers and torch are only in the `bench` extra.
# pyright: reportMissingImports=false

from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

import prompt_tuning as pt
from prompt_tuning.config.gin_files import read_run
from prompt_tuning.core.errors import InputError
from prompt_tuning.decoding.request import Request
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.source import Pretrained
from prompt_tuning.server.server_limits import ServerSettings
from prompt_tuning.texts.text_embeddings import embed_ids
from prompt_tuning.texts.texts import Texts
from tests.support.encoder_folders import write_bert
from tests.support.running_server import RunningServer

FIXTURES = Path(__file__).parents[1] / "fixtures/families"
TEXTS = ["abc", "fghi=k"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("encoder") / "bert")


@pytest.fixture(scope="module")
def server(folder):
    run = read_run(["models/checkpoint.gin"], [f"MODEL = {str(folder)!r}"])
    texts = Texts.of_frozen_model(run, embeds=True)
    texts.open_engine(slots=2, length=48)
    vectors = np.random.default_rng(0).normal(size=(3, 16))
    np.save(folder.parent / "soft.npy", vectors.astype(np.float32))
    texts.load("soft", folder.parent / "soft.npy")
    running = RunningServer(texts, ServerSettings())
    yield running
    running.stop()


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_a_server_answers_with_the_vectors_of_the_model(pooling, server, folder):
    body = {"input": TEXTS, "pooling": pooling}
    status, answer = server.ask(body, "/v1/embeddings")
    assert status == 200, answer
    vectors = np.array([each["embedding"] for each in answer["data"]], np.float32)
    expected = pt.load(str(folder)).embed(TEXTS, pooling=pooling)
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    _, answer = server.ask(body | {"model": "soft"}, "/v1/embeddings")
    theirs = np.array([each["embedding"] for each in answer["data"]], np.float32)
    assert np.abs(theirs - vectors).max() > 0.01


@pytest.mark.parametrize("more", [{}, {"use_beam_search": True, "best_of": 2}])
def test_an_encoder_that_is_served_generates_no_text(more, server):
    status, answer = server.ask({"prompt": "abc", "max_tokens": 1, **more})
    assert status == 400
    assert "bert is an encoder" in answer["error"]["message"]
    with pytest.raises(InputError, match="bert is an encoder"):
        server.texts.engine(2).submit(Request(ids=[5]))


@pytest.mark.torch
@pytest.mark.parametrize("pooling", ["mean", "first"])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_vectors_are_pooled_states_of_transformers(family, pooling):
    import torch
    from transformers import AutoModel

    base = FIXTURES / family / "base"
    opened = open_pretrained(Pretrained(checkpoint=str(base)), key=jax.random.key(0))
    ids = [3, 7, 5, 9, 11, 4, 8, 20, 6, 13, 10, 3, 3]  # longer than the windows
    ours = embed_ids(opened, opened.read_parameters(), ids, pooling)
    row = torch.tensor([opened.interface.scored_row(ids)])
    model = AutoModel.from_pretrained(base, attn_implementation="eager").eval()
    with torch.no_grad():
        states = model(row).last_hidden_state[0].numpy()
    expected = states.mean(0) if pooling == "mean" else states[0]
    np.testing.assert_allclose(ours, expected, atol=1e-4)
