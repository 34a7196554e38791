"""Vectors of texts over HTTP, against what the model predicts from them."""

import base64

import numpy as np
import pytest

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from prompt_tuning.server.server_limits import ServerSettings
from tests.support.running_server import RunningServer, open_chat_model
from tests.support.small_runs import DECODER

TEXT = "a text of several tokens"
PATH = "/v1/embeddings"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("embeddings") / "model"


@pytest.fixture(scope="module")
def server(folder):
    texts = open_chat_model(folder)
    texts.open_engine(slots=2, length=64)
    vectors = np.random.default_rng(0).normal(size=(3, DECODER.width))
    np.save(folder / "soft.npy", vectors.astype(np.float32))
    texts.load("soft", folder / "soft.npy")
    running = RunningServer(texts, ServerSettings())
    yield running
    running.stop()


def embed(server, given, **fields):
    status, answer = server.ask({"input": given, **fields}, PATH)
    assert status == 200, answer
    return np.array([each["embedding"] for each in answer["data"]], np.float32)


@pytest.mark.parametrize("name", ["base", "soft"])
def test_the_last_state_predicts_the_next_token(name, server):
    fields = {"model": name, "pooling": "last", "normalize": False}
    (state,) = embed(server, TEXT, **fields)
    table = np.asarray(server.texts.parameters["token_embedder/embedding"], np.float32)
    scores = table @ state
    expected = np.sort(scores - np.log(np.exp(scores).sum()))[::-1][:5]
    body = {"prompt": TEXT, "model": name, "max_tokens": 1, "logprobs": 5}
    _, answer = server.ask({**body, "ignore_eos": True})
    (top,) = answer["choices"][0]["logprobs"]["top_logprobs"]
    np.testing.assert_allclose(sorted(top.values())[::-1], expected, atol=1e-4)


def test_a_vector_depends_on_its_own_text_only(server):
    texts = [TEXT, "b", TEXT * 2]
    together = embed(server, texts)
    alone = np.concatenate([embed(server, text) for text in texts])
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, rtol=1e-5)
    assert np.abs(embed(server, texts, model="soft") - together).max() > 0.01


def test_forms_of_inputs_and_vectors_agree(server):
    ids = server.texts.tokenizer.encode(TEXT)
    expected = embed(server, TEXT)
    np.testing.assert_array_equal(embed(server, ids), expected)
    np.testing.assert_array_equal(embed(server, [ids, ids])[1:], expected)
    body = {"input": TEXT, "encoding_format": "base64"}
    _, answer = server.ask(body, PATH)
    packed = base64.b64decode(answer["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(packed, "<f4"), expected[0])
    assert answer["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}


@pytest.mark.torch
def test_the_mean_is_that_of_transformers(server, folder):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    ids = server.texts.tokenizer.encode(TEXT)
    with torch.no_grad():
        states = model(torch.tensor([ids])).last_hidden_state[0]
    (vector,) = embed(server, TEXT, normalize=False)
    np.testing.assert_allclose(vector, states.mean(0).numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has no 'input'"),
        ({"input": [""]}, "a text without a token"),
        ({"input": [[999]]}, "input has id 999, expected 0 to 261"),
        ({"input": [1] * 65}, "65 tokens is too long, expected at most 64"),
        ({"input": ["a"] * 2049}, "2,049 texts, expected at most 2,048"),
        ({"input": "a", "dimensions": 8}, "dimensions is 8, expected 16"),
        ({"input": "a", "pooling": "cls"}, "expected mean or last"),
        ({"input": "a", "encoding_format": "hex"}, "expected float or base64"),
    ],
)
def test_inputs_that_have_no_vector_are_refused(fields, message, server):
    status, answer = server.ask(fields, PATH)
    assert status == 400 and message in answer["error"]["message"]
