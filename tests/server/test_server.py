"""The server over HTTP, on the bundled model, against the model without it."""

import argparse
import asyncio
import base64
import contextlib
import itertools
import json
import re
import shutil
import signal
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from prompt_tuning.cli import serve
from prompt_tuning.config.gin_files import read_run
from prompt_tuning.core import interrupts
from prompt_tuning.decoding.beam_search import BeamSearch, search_beams
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.pretrained.text_encoding import encode_given
from prompt_tuning.tuned.load_tuned import load_tuned

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.version import __version__
from prompt_tuning.server import http_server, openai_requests
from prompt_tuning.server.http_server import HttpServer
from prompt_tuning.server.running_requests import RunningRequests
from prompt_tuning.server.server_limits import (
    CONSTRAINT_WORKERS,
    WAITING_CONSTRAINTS,
    ServerSettings,
)
from prompt_tuning.texts.text_model import TextModel
from prompt_tuning.texts.texts import Texts
from tests.support.running_server import KEY, RunningServer

TEXT = "reverse: abc ="
WIDTH = 128
BEAMS = {"use_beam_search": True, "n": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    run = read_run(["models/bundled_decoder.gin"], [])
    texts = Texts.of_frozen_model(run)
    vectors = np.random.default_rng(1).normal(size=(4, WIDTH)).astype("f4")
    np.save(folder / "soft.npy", vectors)
    texts.open_engine(slots=4, length=128)
    texts.load("soft", folder / "soft.npy")
    running = RunningServer(texts, ServerSettings(queue_length=4, samples=8), folder)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def model(server):
    """The same model with an engine of its own."""
    return TextModel(server.texts.run, server.texts.model, server.texts.parameters)


def test_a_second_signal_ends_at_once_but_not_a_repeated_one(monkeypatch):

    async def answer(scope, receive, send):
        pass

    left = []
    server = HttpServer(answer, lambda: None, leave=left.append)
    for _ in range(2):
        server.handle_exit(signal.SIGTERM, None)
    assert (server.should_exit, server.force_exit, left) == (True, False, [])
    monkeypatch.setattr(interrupts, "SAME", 0)
    server.handle_exit(signal.SIGTERM, None)
    assert (server.force_exit, left) == (True, [143])


def test_requests_that_are_left_at_the_end_are_answered_with_503():
    answers = []

    async def send(message):
        answers.append(message)

    async def never():
        return await asyncio.get_running_loop().create_future()

    async def run():
        reached = asyncio.Event()

        async def answer(scope, receive, send):
            reached.set()
            async with asyncio.timeout(60):
                await receive()

        requests = RunningRequests(answer)
        call = {"type": "http"}, never, send
        waiting = asyncio.ensure_future(requests(*call))
        await reached.wait()
        requests.refuse()
        await requests(*call)
        assert not waiting.done()
        requests.end()
        await waiting
        return requests.statuses

    assert asyncio.run(run()) == {503: 2}
    starts = [x["status"] for x in answers if x["type"] == "http.response.start"]
    assert starts == [503, 503]
    assert b"the server is stopping" in answers[-1]["body"]


@pytest.mark.slow
def test_answers_are_those_of_generate(server, model):
    body = {"prompt": [TEXT, "rot1: abc ="], "max_tokens": 9, "temperature": 0}
    status, answer = server.ask(body)
    expected = model.generate([TEXT, "rot1: abc ="], new_tokens=9)
    assert status == 200
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [each.text for each in expected]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    # Samples may all end in one step.
    body = {"prompt": TEXT, "max_tokens": 5, "n": 3, "seed": 5, "temperature": 2}
    status, answer = server.ask({**body, "model": "soft"})
    assert len({choice["text"] for choice in answer["choices"]}) > 1
    # A stream has the same text in pieces.
    status, content = server.ask({**body, "stream": True, "n": 1})
    events = [line[6:] for line in content.decode().split("\n\n") if line]
    assert events[-1] == "[DONE]"
    pieces = [json.loads(event)["choices"][0] for event in events[:-1]]
    whole = server.ask({**body, "n": 1})[1]["choices"][0]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    assert pieces[-1]["finish_reason"] == whole["finish_reason"]


@pytest.mark.exhaustive
def test_samples_are_those_of_an_engine_in_this_process(server, model):
    body = {"prompt": TEXT, "max_tokens": 5, "n": 3, "seed": 5, "temperature": 2}
    _, answer = server.ask({**body, "model": "soft"})
    model.load_adapter("soft", server.texts.find("soft").path)
    sampling = Sampling(new_tokens=5, n=3, seed=5, temperature=2)
    completions = model.generate([TEXT], adapters=["soft"], sampling=sampling)
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [completion.text for completion in completions]


def encoded(vectors) -> str:
    """Returns the base64 of a safetensors file with one tensor."""
    return base64.b64encode(save({"prompt_embeds": np.asarray(vectors)})).decode()


def test_vectors_are_continued_as_their_tokens_are(server, model):
    ids = encode_given(model.prompted, TEXT)
    vectors = model.parameters["token_embedder/embedding"][np.array(ids)]
    body = {"max_tokens": 5, "temperature": 0, "model": "soft"}
    expected = server.ask({**body, "prompt": TEXT})[1]
    both = {**body, "prompt_embeds": [encoded(vectors)], "prompt": "swap: ab="}
    status, answer = server.ask(both)
    assert status == 200
    first, second = (choice["text"] for choice in answer["choices"])
    assert first == expected["choices"][0]["text"] != second
    assert answer["usage"]["prompt_tokens"] > expected["usage"]["prompt_tokens"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["base", "soft"])
def test_beams_are_those_of_a_search_in_this_process(name, server, model):
    adapter = server.application.models.entries().get(name)
    file = Path(adapter.path) if adapter and adapter.path else None
    prompted, parameters = load_tuned(model.run, file)
    settings = BeamSearch(beams=4, returned=2, length_penalty=0.6, new_tokens=6)
    rows = [encode_given(prompted, TEXT)]
    (expected,) = search_beams(prompted, parameters, rows, settings)
    body = {"use_beam_search": True, "best_of": 4, "n": 2, "length_penalty": 0.6}
    body |= {"prompt": TEXT, "max_tokens": 6, "model": name, "temperature": 0}
    status, answer = server.ask(body)
    assert status == 200, answer
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [completion.text for completion in expected]
    assert len(set(texts)) == 2


def test_fields_that_change_nothing_are_accepted(server):
    body = {"prompt": TEXT, "max_tokens": 3, "temperature": 0}
    expected = server.ask(body)[1]["choices"]
    fields = {"skip_special_tokens": True, "spaces_between_special_tokens": True}
    fields |= {"include_stop_str_in_output": False, "detokenize": True, "stop": ""}
    fields |= {"logprobs": False, "stop_token_ids": [], "logit_bias": {}, "echo": False}
    fields |= {"add_special_tokens": True, "stream_options": {"include_usage": True}}
    fields |= {"user": "me", "metadata": {"a": 1}, "guided_json": None, "tools": []}
    fields |= {"structured_outputs": None, "functions": [], "modalities": ["text"]}
    fields |= {"best_of": 1, "n": 1, "seed": -(2**63), "top_p": 0.9, "top_k": 5}
    # The smallest share of the probability is the likeliest token, too.
    assert server.ask({**body, "temperature": 1, "top_p": 0})[1]["choices"] == expected
    status, answer = server.ask({**body, **fields, "chat_template_kwargs": {}})
    assert (status, answer.get("choices")) == (200, expected)


def test_a_text_may_begin_without_special_tokens(server):
    """Clients send this beside texts that a chat template wrote with BOS."""
    body = {"max_tokens": 3, "temperature": 0, "add_special_tokens": False}
    text = server.ask({**body, "prompt": TEXT})[1]
    ids = server.ask({**body, "prompt": server.texts.tokenizer.encode(TEXT)})[1]
    assert text["choices"] == ids["choices"]
    assert text["usage"] == ids["usage"]


def constrained(**fields):
    return {"prompt": TEXT, "structured_outputs": fields}


@pytest.mark.parametrize(
    ("fields", "expression"),
    [
        ({"structured_outputs": {"regex": "[xyz]{2,4}=1"}}, "[xyz]{2,4}=1"),
        ({"structured_outputs": {"choice": ["a b", "c"]}}, "a b|c"),
        ({"structured_outputs": {"json": {"enum": [12, True]}}}, "12|true"),
        ({"structured_outputs": {"json": '{"const": null}'}}, "null"),
        ({"structured_outputs": {"grammar": 'start: "a" start "b" | "c"'}}, "a*cb*"),
        ({"guided_grammar": 'start: "x" | "yz"'}, "x|yz"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "a",
                        "strict": True,
                        "schema": {"enum": [1, 2]},
                    },
                }
            },
            "1|2",
        ),
    ],
)
def test_answers_match_their_constraint(fields, expression, server):
    body = {"prompt": TEXT, "n": 8, "max_tokens": 12, "seed": 1, **fields}
    status, answer = server.ask(body)
    assert status == 200, answer
    for choice in answer["choices"]:
        assert re.fullmatch(expression, choice["text"]), choice
        assert choice["finish_reason"] == "stop"


def test_logprobs_have_as_many_entries_as_requested(server):
    body = {"prompt": TEXT, "max_tokens": 6, "logprobs": 5, "ignore_eos": True}
    _, answer = server.ask(body)
    (choice,) = answer["choices"]
    logprobs = choice["logprobs"]
    assert [len(top) for top in logprobs["top_logprobs"]] == [5] * 6
    texts = [
        choice["text"][i:j] for i, j in itertools.pairwise(logprobs["text_offset"])
    ]
    # Special tokens have no text.
    assert texts == [name.replace("<eos>", "") for name in logprobs["tokens"][:-1]]


def test_echoed_tokens_have_log_probabilities(server, model):
    ids = [encode_given(model.prompted, text) for text in (TEXT, "rot1: ab=")]
    common = {"echo": True, "logprobs": 1, "temperature": 0, "seed": 1234}
    # The request of lm-evaluation-harness.
    status, answer = server.ask({**common, "prompt": ids, "max_tokens": 1})
    assert status == 200, answer
    for row, choice in zip(ids, answer["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert {len(each) for each in logprobs.values()} == {len(row) + 1}
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        scored = zip(
            *(logprobs[name][1:] for name in ("tokens", "token_logprobs")),
            logprobs["top_logprobs"][1:],
            strict=True,
        )
        for name, value, top in scored:
            assert value == top.get(name, value) <= max(top.values()) <= 0
        bounds = itertools.pairwise([*logprobs["text_offset"], None])
        texts = [choice["text"][i:j] for i, j in bounds]
        plain = [re.sub("<[be]os>", "", name) for name in logprobs["tokens"]]
        assert texts == plain
    # Texts are scored as their ids, and alone as beside others.
    form = {**common, "max_tokens": 0}
    (whole,) = server.ask({**form, "prompt": ids[0]})[1]["choices"]
    (text,) = server.ask({**form, "prompt": TEXT})[1]["choices"]
    assert whole == text and text["text"] == TEXT and text["finish_reason"] == "length"
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    both = answer["choices"][0]["logprobs"]
    assert {x: both[x][:-1] for x in names} == whole["logprobs"]
    adapted = server.ask({**form, "prompt": TEXT, "model": "soft"})[1]["choices"][0]
    values = adapted["logprobs"]["token_logprobs"]
    assert values[1:] != whole["logprobs"]["token_logprobs"][1:]


def test_echo_alone_repeats_the_text(server):
    body = {"prompt": [TEXT], "max_tokens": 4, "temperature": 0}
    (plain,) = server.ask(body)[1]["choices"]
    (choice,) = server.ask({**body, "echo": True})[1]["choices"]
    assert choice == {**plain, "text": TEXT + plain["text"]}
    body = {"prompt": TEXT, "echo": True, "max_tokens": 0}
    assert server.ask(body)[1]["choices"][0]["text"] == TEXT


def test_echo_is_streamed_before_each_answer(server):
    body = {"prompt": [TEXT, "b"], "n": 2, "max_tokens": 4, "seed": 1, "echo": True}
    expected = [each["text"] for each in server.ask(body)[1]["choices"]]
    status, content = server.ask({**body, "stream": True})
    assert status == 200
    texts = [""] * 4
    for line in content.decode().split("\n\n")[:-2]:
        (choice,) = json.loads(line[6:])["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == expected
    status, answer = server.ask({**body, "stream": True, "logprobs": 1})
    assert status == 400 and "are not streamed" in answer["error"]["message"]


def test_prompt_logprobs_have_the_form_of_vllm(server, model):
    ids = encode_given(model.prompted, TEXT)
    body = {"prompt": TEXT, "prompt_logprobs": 2, "max_tokens": 0}
    (choice,) = server.ask(body)[1]["choices"]
    first, *others = choice["prompt_logprobs"]
    assert (first, len(others), choice["text"]) == (None, len(ids) - 1, "")
    for token, entry in zip(ids[1:], others, strict=True):
        assert len(entry) in (2, 3) and next(iter(entry)) == str(token)
        assert {each["rank"] for each in entry.values()} >= {1, 2}
        assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"}
    echo = {**body, "echo": True, "logprobs": 0}
    logprobs = server.ask(echo)[1]["choices"][0]["logprobs"]["token_logprobs"]
    values = [each[str(i)]["logprob"] for i, each in zip(ids[1:], others, strict=True)]
    assert logprobs[1:] == values


def test_tokens_are_those_of_the_tokenizer(server):
    tokenizer = server.texts.tokenizer
    ids = tokenizer.encode(TEXT)
    body = {"prompt": TEXT, "add_special_tokens": False, "return_token_strs": True}
    status, answer = server.ask(body, "/tokenize")
    assert (status, answer["tokens"], answer["count"]) == (200, ids, len(ids))
    assert (answer["max_model_len"], "".join(answer["token_strs"])) == (128, TEXT)
    begun = server.ask({"prompt": TEXT}, "/tokenize")[1]["tokens"]
    assert begun == [*tokenizer.begin_ids, *ids]
    assert server.ask({"tokens": ids}, "/detokenize") == (200, {"prompt": TEXT})
    status, answer = server.ask({"tokens": [999]}, "/detokenize")
    assert status == 400 and "has id 999" in answer["error"]["message"]
    _, info = server.ask(path="/tokenizer_info", method="GET")
    assert info["eos_token"] == tokenizer.token(tokenizer.eos_id)
    assert server.ask(path="/ping", method="GET") == (200, b"")
    assert server.ask(path="/version", method="GET")[1] == {"version": __version__}
    _, models = server.ask(path="/v1/models", method="GET")
    assert {each["max_model_len"] for each in models["data"]} == {128}


def test_an_answer_that_cannot_match_is_an_error(server):
    # No token of the vocabulary has "#".
    body, message = constrained(regex="ab#"), "no token continues a text"
    status, answer = server.ask(body)
    assert status == 400 and message in answer["error"]["message"]
    status, content = server.ask({**body, "stream": True})
    *_, error, end = [line[6:] for line in content.decode().split("\n\n") if line]
    assert end == "[DONE]" and message in json.loads(error)["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[]", 400, "contains a list"),
        (b"[" * 200_000, 400, "levels deep"),
        (b'{"prompt": "\xff"}', 400, "not UTF-8"),
        (b'{"prompt": "\\ud800"}', 400, "cannot be encoded"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "finite number"),
        (b" " * (2**22 + 1), 413, "longer than"),
        ({}, 400, "has no 'prompt'"),
        ({"prompt": 5}, 400, "expected a text, a list"),
        ({"prompt": ["a", 5]}, 400, "expected a text, a list"),
        ({"prompt": [10**20]}, 400, "expected 0 to"),
        ({"prompt": "a", "model": "b"}, 404, "there are: base, soft"),
        ({"prompt": "a", "chat_template": "b"}, 400, "'b' is not supported"),
        ({"prompt": "a", **BEAMS, "skip_special_tokens": False}, 400, "leave it out"),
        ({"prompt": "a", "return_token_ids": 0}, 400, "is not supported"),
        ({"prompt": "a", **BEAMS, "echo": True}, 400, "echo has no effect"),
        ({"prompt": "a", "echo": 1}, 400, "expected true or false"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens is 0"),
        ({"prompt": "a", "echo": True, "max_tokens": 0, "n": 2}, 400, "or n = 1"),
        ({"prompt": "a", "prompt_logprobs": 21}, 400, "from 0 to 20"),
        ({"prompt_embeds": encoded([[1.0] * WIDTH]), "echo": True}, 400, "to echo"),
        ({"prompt": "a", "n": 10**9}, 400, "n = 1000000000"),
        ({"prompt": "a", "n": 9}, 400, "n is 9, expected 1 to 8"),
        ({"prompt": "a", "n": 2, "temperature": 0}, 400, "the same"),
        ({"prompt": "a" * 200}, 400, "a slot has 128 positions"),
        ({"prompt": "a" * 10**6}, 400, "1,000,000 characters, expected at most 4,096"),
        ({"prompt": [1] * 129}, 400, "129 tokens is too long"),
        ({"prompt": "a", "stop": [""]}, 400, "not empty"),
        ({"prompt": "a", "stop": "b" * 1001}, 400, "at most 1,000 characters"),
        ({"prompt": "a", "stop_token_ids": [1] * 65}, 400, "expected at most 64"),
        (constrained(regex="a" * 2**19), 400, "at most 524,288"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, 400, "expected a token id"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, 400, "names token 999"),
        ({"prompt": "a", "stream": "yes"}, 400, "expected true or false"),
        ({"prompt": "a", "seed": 2**63}, 400, "number from -9,223"),
        ({"prompt_embeds": "gAJ9cQAu"}, 400, "not torch.save"),
        ({"prompt_embeds": encoded([[1.0] * 3])}, 400, "expected [T, 128]"),
        ({"prompt_embeds": encoded([[np.nan] * WIDTH])}, 400, "not finite"),
        ({"prompt_embeds": encoded([[1] * WIDTH])}, 400, "floating"),
        ({"prompt": "a", "best_of": 2}, 400, "needs use_beam_search"),
        ({"prompt": "a", **BEAMS, "stream": True}, 400, "leave out stream"),
        ({"prompt": "a", **BEAMS, "top_p": 0.5}, 400, "top_p has no effect"),
        ({"prompt": "a", **BEAMS, "n": 1}, 400, "at least 2 beams"),
        ({"prompt": "a", **BEAMS, "best_of": 9}, 400, "expected 2 to 8 beams"),
        (constrained(regex="(a"), 400, "unclosed group"),
        (constrained(regex="#"), 400, "at its beginning"),
        (constrained(regex="a", choice=["a"]), 400, "has 2 constraints"),
        (constrained(grammar="a"), 400, "grammar cannot be used"),
        (constrained(structural_tag="a"), 400, "unknown field 'structural_tag'"),
        (constrained(regex="a", whitespace_pattern=""), 400, "is for json"),
        ({**constrained(regex="a"), "guided_regex": "b"}, 400, "give one of"),
        (constrained(choice=[]), 400, "texts that are not empty"),
        (constrained(json={"type": "nope"}), 400, "Invalid type: nope"),
        (constrained(json={"multipleOf": 999_983}), 400, "too complex"),
        ({"prompt": "a", **BEAMS, "response_format": {"type": "json_object"}}, 400, ""),
        ({"prompt": "a", "response_format": {"type": "xml"}}, 400, "one of text, json"),
        ({"prompt": "a", "response_format": {"type": "json_schema"}}, 400, "json_sche"),
        ({"prompt": "a", "ebnf": "a"}, 400, "send structured_outputs: {grammar"),
    ],
    ids=lambda value: None if isinstance(value, dict | bytes) else str(value)[:12],
)
def test_bad_bodies_get_one_message(body, status, message, server):
    answered, content = server.ask(body)
    assert (answered, list(content)) == (status, ["error"])
    assert message in content["error"]["message"]
    assert "\n" not in content["error"]["message"]


def test_other_paths_keys_and_hosts_are_refused(server):
    assert server.ask(path="/nope", method="GET")[0] == 404
    assert server.ask(path="/v1/completions", method="GET")[0] == 405
    assert "chat_template" in str(
        server.ask(
            {"messages": [{"role": "user", "content": "a"}]}, "/v1/chat/completions"
        )
    )
    for key in ("", "Bearer a ke", "Bearer a key2", "Basic a key"):
        assert server.ask(path="/v1/models", method="GET", Authorization=key)[0] == 401
    assert server.ask(path="/health", method="GET", Authorization="")[0] == 200
    assert server.ask(path="/health", method="GET", Host="example.com")[0] == 403
    status, _ = server.ask(b"{}", **{"Content-Type": "text/plain"})
    assert status == 415


def test_an_open_address_without_a_key_warns(monkeypatch):
    monkeypatch.delenv(serve.KEY_VARIABLE, raising=False)
    keys: dict[str, str | None] = {"api_key": None, "api_key_file": None}
    options = argparse.Namespace(host="0.0.0.0", allow_loading=None, **keys)
    with pytest.warns(UserWarning, match="everybody who reaches this machine"):
        serve._check_host(options)
    # Other warnings are errors.
    serve._check_host(argparse.Namespace(host="127.0.0.1", **keys))
    keys["api_key"] = KEY
    serve._check_host(argparse.Namespace(host="0.0.0.0", **keys))


def test_adapters_are_loaded_from_below_the_directory_only(server, tmp_path):
    load, unload = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    shutil.copy(server.application.models.entries()["soft"].path, tmp_path / "a.npy")
    for path in (str(tmp_path / "a.npy"), "../a.npy", "/etc/passwd"):
        assert server.ask({"lora_name": "a", "lora_path": path}, load)[0] == 403
    (server.application.models.loading / "loop").symlink_to("loop")
    for path in ("none.npy", "a" * 5000, "a" * 300, "b/" * 3000, "\ud800", "loop"):
        status, answer = server.ask({"lora_name": "a", "lora_path": path}, load)
        assert status == 400 and len(answer["error"]["message"]) < 900
    assert server.ask({"lora_name": "base", "lora_path": "soft.npy"}, load)[0] == 400
    assert server.ask({"lora_name": "b", "lora_path": "soft.npy"}, load)[0] == 200
    listed = server.ask(path="/v1/models", method="GET")[1]["data"]
    assert [model["id"] for model in listed] == ["base", "soft", "b"]
    body = {"prompt": TEXT, "max_tokens": 3, "temperature": 0}
    texts = [
        server.ask({**body, "model": name})[1]["choices"][0]["text"]
        for name in ("soft", "b")
    ]
    assert texts[0] == texts[1]
    assert server.ask({"lora_name": "b"}, unload)[0] == 200
    assert server.ask({"lora_name": "b"}, unload)[0] == 404
    assert server.ask({"lora_name": "base"}, unload)[0] == 400


def metrics(server) -> dict[str, float]:
    _, text = server.ask(path="/metrics", method="GET")
    lines = [line for line in text.decode().splitlines() if line[0] != "#"]
    return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines)}


def test_a_full_queue_is_refused_and_a_client_that_leaves_frees_its_slots(server):
    body = {"prompt": TEXT, "max_tokens": 100, "ignore_eos": True, "n": 4}
    streaming = server.connect({**body, "stream": True})
    stream = streaming.getresponse()
    stream.read(10)
    waiting = server.connect(body)
    deadline = time.monotonic() + 20
    while metrics(server)["prompt_tuning_queued"] < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    status, content = server.ask(body)
    assert status == 429 and "try again later" in content["error"]["message"]
    stream.close()
    streaming.close()
    waiting.close()
    while time.monotonic() < deadline:
        now = metrics(server)
        if now["prompt_tuning_active"] == now["prompt_tuning_queued"] == 0:
            break
        time.sleep(0.05)
    assert now["prompt_tuning_active"] == now["prompt_tuning_queued"] == 0
    assert server.ask({"prompt": TEXT})[0] == 200


def test_requests_that_never_end_exclude_no_others(server, monkeypatch):
    half = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n"
    kind = b"Content-Type: application/json\r\nAuthorization: Bearer %s\r\n\r\n{"
    config, limit = server.server.config, http_server.SPARE_CONNECTIONS + 8
    monkeypatch.setattr(config, "limit_concurrency", limit)
    address = ("127.0.0.1", server.port)
    with contextlib.ExitStack() as stack:
        opened = []
        for number in range(2 * limit):
            client = stack.enter_context(socket.create_connection(address, timeout=30))
            # Without the end of its headers, or of its body.
            client.sendall(half + (kind % KEY.encode() if number % 2 else b""))
            opened.append(client)
        assert server.ask({"prompt": TEXT, "max_tokens": 1})[0] == 200
        # The oldest ones were closed.
        with contextlib.suppress(ConnectionResetError):
            assert opened[0].recv(1) == b""
        monkeypatch.setattr(http_server, "HEADER_SECONDS", 0)
        with contextlib.suppress(ConnectionResetError):
            assert opened[-2].recv(1) == b""


def test_a_waiting_constraint_of_a_client_that_left_is_not_compiled(
    server, monkeypatch
):
    begun, go = [], threading.Event()

    def read(body, room):
        begun.append(body)
        assert go.wait(30)
        raise InputError("as expected")

    monkeypatch.setattr(openai_requests, "read_completion", read)
    body = constrained(regex="a")
    running = [server.connect(body) for _ in range(CONSTRAINT_WORKERS)]
    while len(begun) < CONSTRAINT_WORKERS:
        time.sleep(0.01)
    left = [server.connect(body) for _ in range(WAITING_CONSTRAINTS)]
    waiting = server.application.generation.constraints._turns
    while len(waiting) < WAITING_CONSTRAINTS:
        time.sleep(0.01)
    for connection in left:
        connection.close()
    while waiting:
        time.sleep(0.01)
    go.set()
    for connection in running:
        with contextlib.closing(connection):
            assert connection.getresponse().status == 400
    assert len(begun) == CONSTRAINT_WORKERS


def test_the_openai_client_is_understood(server, model):
    openai = pytest.importorskip("openai", reason="openai's client is not installed")
    address = f"http://127.0.0.1:{server.port}/v1"
    client = openai.OpenAI(base_url=address, api_key=KEY, max_retries=0)
    assert [model.id for model in client.models.list()] == ["base", "soft"]
    settings = {"prompt": TEXT, "max_tokens": 9, "temperature": 0}
    answer = client.completions.create(model="base", logprobs=2, **settings)
    expected = model.generate(TEXT, new_tokens=9)[0].text
    (choice,) = answer.choices
    assert choice.text == expected and choice.finish_reason == "stop"
    assert "".join(choice.logprobs.tokens) == expected
    assert answer.usage.completion_tokens == len(choice.logprobs.token_logprobs)
    stopped = client.completions.create(model="base", stop="b", **settings)
    assert stopped.choices[0].text == expected.partition("b")[0]
    stream = client.completions.create(
        model="base", stream=True, stream_options={"include_usage": True}, **settings
    )
    events = list(stream)
    texts = [event.choices[0].text for event in events if event.choices]
    assert "".join(texts) == expected and events[-1].usage == answer.usage
    vectors = client.embeddings.create(model="soft", input=[TEXT, "rot1: abc ="])
    assert [len(each.embedding) for each in vectors.data] == [WIDTH, WIDTH]
    with pytest.raises(openai.NotFoundError, match="there are: base, soft"):
        client.completions.create(model="other", prompt="a")
    client.close()
