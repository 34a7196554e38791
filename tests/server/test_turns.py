"""Later turns of a conversation over HTTP, where the template changes earlier ones."""

import jinja2.sandbox
import pytest

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from prompt_tuning.server.server_limits import ServerSettings
from tests.support import small_templates
from tests.support.running_server import RunningServer, open_chat_model

TEMPLATES = {
    "Qwen 3": small_templates.DROPS_THOUGHTS,
    "gpt-oss": small_templates.EXCHANGES_END,
    "Phi-3": small_templates.EOS_LAST,
    "DeepSeek R1": small_templates.OPENS_THOUGHT,
}
ENDS = ["<|end|>", "<|return|>"]


@pytest.fixture(scope="module", params=TEMPLATES)
def opened(request, tmp_path_factory):
    template = TEMPLATES[request.param]
    texts = open_chat_model(tmp_path_factory.mktemp("turns") / "model", template, ENDS)
    texts.open_engine(slots=2, length=512)
    running = RunningServer(texts, ServerSettings())
    yield running, template
    running.stop()


@pytest.mark.slow
def test_each_turn_is_answered_as_in_a_fresh_conversation(opened):
    """The text of the request is the template's, whatever came before."""
    server, template = opened
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True
    )
    render = environment.from_string(template).render
    messages = []
    for turn in range(5):
        messages.append({"role": "user", "content": f"ask {turn}"})
        given = {"temperature": 0, "max_tokens": 8}
        status, answer = server.ask(
            {"messages": messages, **given}, path="/v1/chat/completions"
        )
        assert status == 200, answer
        text = render(messages=messages, add_generation_prompt=True, eos_token="<eos>")
        plain = {"prompt": text, **given}
        status, expected = server.ask(plain)
        assert status == 200, expected
        assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        (message,), (choice,) = answer["choices"], expected["choices"]
        said = message["message"]
        written = (said.get("reasoning_content") or "") + (said["content"] or "")
        assert written.split() == choice["text"].split()
        content = f"<think>\nthought {turn}\n</think>\n\nsaid {turn}"
        messages.append({"role": "assistant", "content": content})
