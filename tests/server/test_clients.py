"""Clients as they are installed, with their own calls and defaults.

They are in an environment of their own (`./scripts/install --clients`), because some
need other versions of packages than the library; each runs in a process there.
"""

import json
import os
import subprocess
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from prompt_tuning.server.server_limits import ServerSettings
from tests.support.running_server import KEY, RunningServer, open_chat_model

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not PYTHON.exists(), reason="run ./scripts/install --clients"),
]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{# <tool_call> #}"
)
OF_SCHEMA = """
from pydantic import BaseModel
class Leaf(BaseModel):
    green: bool
class Place(BaseModel):
    north: bool
    leaf: Leaf
"""
CLIENTS = {
    "langchain": """
        from langchain_openai import ChatOpenAI
        model = ChatOpenAI(base_url=base, api_key=key, model="base")
        answer = model.invoke("hi").content
        """,
    "litellm": """
        import litellm
        given = [{"role": "user", "content": "hi"}]
        chosen = {"model": "openai/base", "api_base": base, "api_key": key}
        answer = litellm.completion(messages=given, **chosen).choices[0].message.content
        """,
    "llm": """
        import os, pathlib
        folder = pathlib.Path(os.environ["LLM_USER_PATH"])
        entry = "- {model_id: ours, model_name: base, api_key_name: ours, api_base: %s}"
        (folder / "extra-openai-models.yaml").write_text(entry % base)
        (folder / "keys.json").write_text(json.dumps({"ours": key}))
        import llm
        answer = llm.get_model("ours").prompt("hi").text()
        """,
    "dspy": """
        import dspy
        answer = str(dspy.LM("openai/base", api_base=base, api_key=key)("hi")[0])
        """,
    "inspect": """
        import asyncio
        from inspect_ai.model import get_model
        model = get_model("openai-api/ours/base", base_url=base, api_key=key)
        answer = asyncio.run(model.generate("hi")).completion
        """,
}
"""Calls whose answer is any text."""
STRUCTURED = {
    "langchain": """
        from langchain_openai import ChatOpenAI
        model = ChatOpenAI(base_url=base, api_key=key, model="base")
        answer = model.with_structured_output(Place).invoke("hi").model_dump()
        """,
    "instructor": """
        import instructor, openai
        client = openai.OpenAI(base_url=base, api_key=key)
        answer = instructor.from_openai(client).chat.completions.create(
            model="base",
            response_model=Place,
            messages=[{"role": "user", "content": "hi"}],
        ).model_dump()
        """,
    "inspect": """
        import asyncio
        from inspect_ai.model import get_model
        from inspect_ai.tool import ToolInfo, ToolParams
        from inspect_ai.util import json_schema
        fields = json_schema(Place).model_dump(include={"properties", "required"})
        place = ToolInfo(
            name="place", description="A place.", parameters=ToolParams(**fields)
        )
        model = get_model("openai-api/ours/base", base_url=base, api_key=key)
        called = model.generate("hi", tools=[place], tool_choice="any")
        answer = asyncio.run(called).message.tool_calls[0].arguments
        """,
}
"""Calls whose answer is a `Place`."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    texts = open_chat_model(tmp_path_factory.mktemp("clients") / "model", TEMPLATE)
    texts.open_engine(slots=4, length=4096)
    with RunningServer(texts, ServerSettings()) as running:
        yield running


def answer(server, code, folder):
    """Returns the answer that a client prints."""
    lines = "import json, sys\nbase, key = sys.argv[1:]\n" + textwrap.dedent(code)
    command = [str(PYTHON), "-c", lines + "\nprint(json.dumps(answer))"]
    variables = {"LLM_USER_PATH": str(folder), "HOME": str(folder)}
    result = subprocess.run(
        [*command, server.address, KEY],
        env={**os.environ, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_reads_an_answer(name, server, tmp_path):
    assert isinstance(answer(server, CLIENTS[name], tmp_path), str)


@pytest.mark.parametrize("name", STRUCTURED)
def test_a_client_reads_an_object_of_its_schema(name, server, tmp_path):
    place = answer(server, OF_SCHEMA + textwrap.dedent(STRUCTURED[name]), tmp_path)
    assert set(place) == {"north", "leaf"}
    assert isinstance(place["leaf"]["green"], bool)


def test_outlines_reads_choices_and_grammars(server, tmp_path):
    code = """
        import openai, outlines
        from typing import Literal
        from outlines.types import CFG
        client = openai.OpenAI(base_url=base, api_key=key)
        model = outlines.from_vllm(client, "base")
        answer = [model("hi", Literal["a", "bc"]), model("hi", CFG('start: "x" | "y"'))]
        """
    choice, text = answer(server, code, tmp_path)
    assert choice in ("a", "bc") and text in ("x", "y")


def test_guidance_reads_a_text_that_matches(server, tmp_path):
    code = """
        import guidance
        from guidance.models.experimental import VLLMModel
        model = VLLMModel("base", base_url=base, api_key=key)
        with guidance.user():
            model += "hi"
        with guidance.assistant():
            model += guidance.gen("text", regex="[ab]{2}")
        answer = model["text"]
        """
    assert answer(server, code, tmp_path) in ("aa", "ab", "ba", "bb")
