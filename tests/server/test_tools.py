"""Tools and reasoning over HTTP, for chat templates of several syntaxes."""

import json
import re

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from prompt_tuning.server.server_limits import ServerSettings
from tests.support.running_server import RunningServer, open_chat_model

MESSAGES = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
TOOLS = "{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}"
TEMPLATES = {
    "hermes": TOOLS + MESSAGES + '{# <tool_call>{"name"}</tool_call> <think> #}',
    "opened": "{% for m in messages %}{% if m.role == 'assistant' %}<think>\n"
    "{% endif %}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<think>\n{% endif %}",
    "llama": TOOLS + MESSAGES + '{# ipython "parameters" #}',
    "gemma": TOOLS + MESSAGES + "{# <|tool_call>call: #}",
    "unknown": TOOLS + MESSAGES + "{# <function_call>f #}",
}
LEAF = {"type": "object", "properties": {"leaf": {"enum": ["x", "y"]}}}
LEAF |= {"required": ["leaf"], "additionalProperties": False}
PARAMETERS = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["n"],
    "additionalProperties": False,
}
NESTED = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/Leaf"}},
    "required": ["at"],
    "additionalProperties": False,
    "$defs": {"Leaf": LEAF},
}
TAG = "<|python_tag|>"
GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>')


def function(name, parameters):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


BOTH = [function("count", PARAMETERS), function("place", NESTED)]
NAMED = {"type": "function", "function": {"name": "place"}}
SAMPLED = {"temperature": 1.0, "max_tokens": 300}


@pytest.fixture(scope="module", params=TEMPLATES)
def server(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools") / "model"
    texts = open_chat_model(folder, TEMPLATES[request.param], [TAG, *GEMMA])
    texts.open_engine(slots=4, length=1024)
    running = RunningServer(texts, ServerSettings())
    yield running
    running.stop()


def arguments_fit(call):
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "count":
        return list(arguments) == ["n"] and 0 <= arguments["n"] <= 9
    return arguments in ({"at": {"leaf": "x"}}, {"at": {"leaf": "y"}})


@pytest.mark.slow
def test_a_call_that_is_required_is_made(server):
    fields = {"tools": BOTH, "tool_choice": "required", "parallel_tool_calls": False}
    for seed in range(2):
        choices = {"temperature": 1.0, "max_tokens": 120, "seed": seed}
        status, answer = server.chat(**fields, **choices)
        assert status == 200, answer
        (choice,) = answer["choices"]
        if choice["finish_reason"] == "length":
            continue  # it thought for too long
        (call,) = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        assert call["type"] == "function" and call["id"].startswith("call_")
        assert arguments_fit(call), call


@pytest.mark.parametrize("server", ["gemma"], indirect=True)
def test_a_call_that_is_required_has_the_special_tokens_of_its_syntax(server):
    find = server.texts.tokenizer.tokenizer.token_to_id
    fields = {"tools": BOTH, "tool_choice": NAMED, "logprobs": True}
    biases = {str(find(each)): 100 for each in GEMMA}
    _, answer = server.chat(**fields, **SAMPLED, logit_bias=biases)
    (choice,) = answer["choices"]
    assert arguments_fit(choice["message"]["tool_calls"][0])
    tokens = [each["token"] for each in choice["logprobs"]["content"]]
    assert tokens[0] == GEMMA[0] and tokens[-1] == GEMMA[1], tokens


@pytest.mark.parametrize("server", ["llama"], indirect=True)
def test_a_function_that_is_named_is_called_in_a_stream_too(server):
    fields = {"tools": BOTH, "tool_choice": NAMED, "seed": 1, **SAMPLED}
    _, answer = server.chat(**fields)
    (expected,) = answer["choices"][0]["message"]["tool_calls"]
    assert expected["function"]["name"] == "place" and arguments_fit(expected)
    events = server.events(**fields)
    deltas = [event["choices"][0]["delta"] for event in events]
    (streamed,) = [x for delta in deltas for x in delta.get("tool_calls", ())]
    assert streamed["index"] == 0 and streamed["function"] == expected["function"]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("server", ["hermes", "opened"], indirect=True)
def test_reasoning_is_split_off_in_a_stream_too(request, server):
    opened = request.node.callspec.params["server"] == "opened"
    before = "" if opened else "<think>"
    expression = f"{before}so it is</think>\n\n12\\."
    fields = {"structured_outputs": {"regex": expression}}
    status, answer = server.chat(**fields)
    assert status == 200, answer
    message = answer["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so it is", "12.")
    deltas = [x["choices"][0]["delta"] for x in server.events(**fields)]
    for name in ("reasoning_content", "content"):
        assert "".join(x.get(name, "") for x in deltas) == message[name]


@pytest.mark.parametrize("server", ["llama"], indirect=True)
def test_tools_are_read_by_the_template_and_their_tokens_from_the_answer(server):
    given = server.chat(max_tokens=1)[1]["usage"]["prompt_tokens"]
    tag = server.texts.tokenizer.tokenizer.token_to_id(TAG)
    forced = {"max_tokens": 1, "logit_bias": {str(tag): 100}}
    _, answer = server.chat(tools=BOTH, **forced)
    assert answer["usage"]["prompt_tokens"] > given + len(json.dumps(NESTED)) / 2
    # The tag alone is no call.
    assert answer["choices"][0]["message"]["content"] == TAG
    _, answer = server.chat(tools=BOTH, tool_choice="none", **forced)
    assert answer["usage"]["prompt_tokens"] == given
    assert answer["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize("server", ["unknown"], indirect=True)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": BOTH}, "a known syntax (Hermes, Qwen3-Coder, GLM, Gemma 4, LFM2"),
        ({"tools": [{"type": "web_search"}]}, "type = 'web_search', expected function"),
        ({"tools": [function("a b", {})]}, "expected 1 to 64 letters"),
        ({"tools": BOTH * 65}, "tools has 130 entries"),
        ({"tools": BOTH, "tool_choice": "any"}, "none, auto, required"),
        ({"tool_choice": "required"}, "there are no tools"),
        (
            {"tools": BOTH[:1], "tool_choice": NAMED},
            "'place', expected one of the tools: count",
        ),
        (
            {"tools": BOTH, "response_format": {"type": "json_object"}},
            "leave out one of them",
        ),
        (
            {
                "tools": [function("f", {"type": "nope"})],
                "tool_choice": "required",
            },
            "Invalid type: nope",
        ),
    ],
)
def test_tools_that_cannot_be_called_are_refused(fields, message, server):
    status, answer = server.chat(**fields)
    assert status == 400 and message in answer["error"]["message"]
    assert re.search(r"\n", answer["error"]["message"]) is None
