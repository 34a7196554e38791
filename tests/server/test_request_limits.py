"""Lengths of answers that requests leave open, and fields that nobody knows."""

import json
import logging
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.server import request_fields
from prompt_tuning.server.openai_requests import read_chat, read_completion
from prompt_tuning.server.request_fields import CHANGING, IGNORED, UnknownFields
from prompt_tuning.server.server_limits import ServerSettings
from tests.support.running_server import RunningServer, open_chat_model

LENGTH = 96
ENDLESS = {"ignore_eos": True, "temperature": 0}
BEAMS = {"use_beam_search": True, "n": 2}
README = Path(request_fields.__file__).with_name("README.md")


def started(folder, **settings):
    texts = open_chat_model(folder)
    texts.open_engine(slots=2, length=LENGTH)
    return RunningServer(texts, ServerSettings(**settings))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = started(tmp_path_factory.mktemp("limits") / "model")
    yield running
    running.stop()


def test_an_answer_may_take_the_room_that_its_conversation_leaves(server):
    status, answer = server.chat(**ENDLESS)
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
    assert answer["usage"]["total_tokens"] == LENGTH
    # OpenAI's default.
    _, answer = server.ask({"prompt": "abc", **ENDLESS})
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("number", [None, -1])
def test_a_limit_of_null_or_minus_one_is_the_room(number, server):
    """The former is that of vLLM, the latter that of llama.cpp."""
    body = {"prompt": "abc", "max_tokens": number, **ENDLESS}
    _, headers, answer = server.send(body)
    assert answer["usage"]["completion_tokens"] == LENGTH - 3
    assert "x-max-tokens-clamped" not in headers
    for name in ("max_tokens", "max_completion_tokens"):
        _, answer = server.chat(**{name: number}, **ENDLESS)
        assert answer["usage"]["total_tokens"] == LENGTH
    _, headers, answer = server.send({"prompt": "abc", "max_tokens": number, **BEAMS})
    assert "x-max-tokens-clamped" not in headers
    with pytest.raises(InputError, match="max_tokens = -2, expected"):
        read_turn(max_tokens=-2)


def test_special_tokens_are_part_of_the_text_if_they_are_not_skipped(server):
    tokenizer = server.texts.tokenizer
    end = {"logit_bias": {str(tokenizer.eos_id): 100}, "temperature": 0}
    text = tokenizer.token(tokenizer.eos_id)
    fields = {**end, "max_tokens": 2, "ignore_eos": True, "skip_special_tokens": False}
    answers = [server.ask({"prompt": "abc", **fields})[1], server.chat(**fields)[1]]
    assert answers[0]["choices"][0]["text"] == text * 2
    assert answers[1]["choices"][0]["message"]["content"] == text * 2
    # As from vLLM, the token that ends a row is not part of it.
    fields["ignore_eos"] = False
    assert server.ask({"prompt": "abc", **fields})[1]["choices"][0]["text"] == ""


@pytest.mark.parametrize("stream", [False, True])
def test_more_tokens_than_there_is_room_for_are_clamped(stream, server):
    body = {"prompt": "abc", "max_tokens": 1000, "stream": stream, **ENDLESS}
    status, headers, answer = server.send(body)
    room = LENGTH - 3
    assert (status, headers["x-max-tokens-clamped"]) == (200, str(room))
    if not stream:
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == room
    _, headers, _ = server.send({**body, "max_tokens": room})
    assert "x-max-tokens-clamped" not in headers


def test_beams_are_clamped_too(server):
    body = {"prompt": "abc", "max_tokens": 1000, **BEAMS}
    _, headers, _ = server.send(body)
    assert headers["x-max-tokens-clamped"] == str(LENGTH - 3)


def test_a_strict_server_refuses_what_does_not_fit(tmp_path):
    server = started(tmp_path / "model", strict_length=True)
    status, answer = server.ask({"prompt": "abc", "max_tokens": 1000})
    assert status == 400 and "slot has 96 positions" in answer["error"]["message"]
    assert server.chat(**ENDLESS)[1]["usage"]["total_tokens"] == LENGTH
    server.stop()


def test_a_text_without_room_for_one_token_is_refused(server):
    status, answer = server.ask({"prompt": [1] * LENGTH})
    assert status == 400
    assert "96 tokens and 1 new one does not fit" in answer["error"]["message"]


def test_json_has_the_space_that_a_request_names(server):
    schema = {"type": "array", "prefixItems": [{"const": 1}], "minItems": 1}
    schema["items"] = False
    for space, kinds in (
        ({"disable_any_whitespace": True}, {""}),
        ({"whitespace_pattern": "~{1,3}"}, {"", "~"}),
    ):
        outputs = {"json": schema, **space}
        body = {"prompt": "a", "structured_outputs": outputs, "seed": 1, "n": 8}
        _, answer = server.ask(body)
        texts = [choice["text"] for choice in answer["choices"]]
        assert {"".join(set(text) - set("[1]")) for text in texts} == kinds


def test_unknown_fields_are_noted_once_for_each_client(caplog):
    body = {"prompt": "a", "max_token": 5, "of_2030": {"a": 1}}
    names = read_completion(JsonObject("the body", body), 8).unknown
    log = UnknownFields()
    with caplog.at_level(logging.WARNING):
        for client in ("10.0.0.1", "127.0.0.1:5", "127.0.0.1:6"):
            log.note(names, client)
    assert [record.getMessage() for record in caplog.records] == [
        f"a request from {host} has an unknown field {field}"
        for host in ("10.0.0.1", "127.0.0.1")
        for field in (
            "'max_token', which is ignored; did you mean max_tokens or min_tokens?",
            "'of_2030', which is ignored",
        )
    ]


def test_a_field_that_would_change_the_answer_is_refused():
    for name in CHANGING:
        body = {"prompt": "a", name: ["another value"]}
        with pytest.raises(InputError, match=name):
            read_completion(JsonObject("the body", body), 8)


def read_turn(**fields):
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    return read_chat(JsonObject("the body", body), 8)


def test_thinking_is_not_ignored():
    for fields in ({"enable_thinking": False}, {"thinking": {"type": "disabled"}}):
        with pytest.raises(InputError, match="send chat_template_kwargs"):
            read_turn(**fields)


def test_both_names_of_the_number_of_tokens_may_be_given_alike():
    assert read_turn(max_tokens=3, max_completion_tokens=3).asked == 3
    with pytest.raises(InputError, match="have unlike values"):
        read_turn(max_tokens=2, max_completion_tokens=3)


def test_fields_that_are_not_read_are_in_the_documents():
    documents = README.read_text()
    assert not [name for name in IGNORED if f"`{name}`" not in documents]
    for name, field in CHANGING.items():
        neutral = ", ".join(f"`{json.dumps(value)}`" for value in field.neutral)
        instead = f"`{field.instead}`" if field.instead else ""
        assert f"| `{name}` | {neutral} | {instead} |" in documents
