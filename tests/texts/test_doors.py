"""The same text and adapter give the same answer at every door."""

import json
import shutil
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.core.errors import InputError
from prompt_tuning.server.application import ServerApplication
from prompt_tuning.server.served_models import ServedModels
from prompt_tuning.server.server_limits import ServerSettings
from prompt_tuning.texts.texts import Texts
from tests.support.asgi_client import AsgiClient
from tests.support.exhaustive import sample
from tests.support.small_runs import (
    LENGTH,
    UPPER,
    Files,
    add_chat_template,
    write_pairs,
)

NEW = 5
TEXT = "hall"
OF_MODEL = "{% for m in messages %}{{ m.content }}={% endfor %}"
OF_RUN = "{% for m in messages %}{{ m.content }}{{ m.content }}=={% endfor %}"
METHODS = {"soft": [f"--prompt_length={LENGTH}"], "lora": ["--method=lora"]}

CASES = [
    ("soft", "template", 1 + LENGTH + 4 + 1),
    ("lora", "chat template", 2 * 4 + 2),
    ("soft", "neither", 1 + 4),
    ("soft", "chat template", 2 * 4 + 2),
    ("lora", "template", 1 + 4 + 1),
    ("lora", "neither", 1 + 4),
]
"""Method, rendering, and number of tokens: BOS, "hall" and what a template adds."""


class Answer(NamedTuple):
    """What every door tells of a completion."""

    text: str
    given: int
    new: int


@pytest.fixture(scope="module")
def model(files: Files, tmp_path_factory):
    """The small decoder, with a chat template that the runs do not use."""
    folder = tmp_path_factory.mktemp("doors") / "model"
    shutil.copytree(files.decoder, folder)
    return add_chat_template(folder, OF_MODEL)


@pytest.fixture(
    scope="module",
    params=sample(3, [pytest.param(x, id=f"{x[0]} {x[1]}") for x in CASES]),
)
def case(request, model, tmp_path_factory):
    """A run's directory, whether its texts are messages, and the tokens of `TEXT`."""
    method, rendering, given = request.param
    folder = tmp_path_factory.mktemp("run")
    pairs = [(prompt.removesuffix("="), answer) for prompt, answer in UPPER]
    options = []
    if rendering == "template":
        vectors = f"{{soft:{LENGTH}}}" if method == "soft" else ""
        options = ["--template", f"{vectors}{{prompt}}="]
    elif rendering == "chat template":
        file = folder / "chat.jinja"
        file.write_text(OF_RUN)
        options = ["--chat", "--chat_template", str(file)]
    data = ["--train", str(write_pairs(folder / "pairs.jsonl", pairs))]
    settings = ["--steps=2", "--learning_rate=1", "--batch_size=32"]
    command = ["train", "--model", str(model), *METHODS[method], *data, *settings]
    assert main([*command, *options, "--out", str(folder / "run")]) == 0
    return folder / "run", rendering == "chat template", given


def by_command(capsys, *options: str) -> Answer:
    assert main(["generate", "--json", f"--new_tokens={NEW}", *options, TEXT]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    return Answer(line["output"], line["input_tokens"], line["output_tokens"])


def by_python(opened: pt.Model, directory, chat: bool) -> Answer:
    opened.load_adapter("a", directory)
    (result,) = opened.generate(TEXT, adapters=["a"], new_tokens=NEW, chat=chat)
    pieces = opened.stream(
        TEXT, adapter="a", chat=chat, sampling=pt.Sampling(new_tokens=NEW)
    )
    assert "".join(pieces) == result.text
    return Answer(result.text, result.given_tokens, len(result.ids))


def by_server(texts: Texts, chat: bool) -> Answer:
    """Returns the answer of a server with the adapter `a`."""
    engine = texts.open_engine(slots=2, length=48)
    models = ServedModels(texts, "frozen", engine.limit)
    application = ServerApplication(models, engine, ServerSettings())
    client = AsgiClient(application.app())
    given = {"prompt": TEXT}
    if chat:
        given = {"messages": [{"role": "user", "content": TEXT}]}
    body = {"model": "a", "max_tokens": NEW, "temperature": 0, **given}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    status, content = client.post(path, json.dumps(body).encode())
    client.close()
    answer = json.loads(content)
    assert status == 200, answer
    (choice,), usage = answer["choices"], answer["usage"]
    text = choice["message"]["content"] if chat else choice["text"]
    new = usage["completion_tokens"]
    return Answer(text, usage["prompt_tokens"], new)


def typed(capsys, monkeypatch, model, directory) -> str:
    """Returns the answer of `chat`, after another one of the model alone."""
    lines: Iterator[str] = iter(["/adapter a", TEXT])

    def read(_: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", read)
    adapter = [f"--model={model}", f"--adapter=a={directory}"]
    assert main(["chat", f"--new_tokens={NEW}", *adapter]) == 0
    return capsys.readouterr().out.splitlines()[-2]


@pytest.mark.slow
def test_an_adapter_answers_the_same_at_every_door(case, model, capsys, monkeypatch):
    directory, chat, given = case
    flags = ["--chat"] if chat else []
    expected = by_command(capsys, f"--run={directory}", *flags)
    assert expected.given == given
    adapter = [f"--model={model}", f"--adapter=a={directory}"]
    assert by_command(capsys, *adapter, *flags) == expected
    mesh = ["--gin.Run.mesh=@MeshShape()", "--gin.MeshShape.data=8"]
    assert by_command(capsys, f"--run={directory}", *mesh, *flags) == expected
    streamed = '--gin.Pretrained.weights="streamed"'
    assert by_command(capsys, f"--run={directory}", streamed, *flags) == expected
    opened = pt.load(model)
    assert by_python(opened, directory, chat) == expected
    assert by_server(opened.texts, chat) == expected
    if chat:
        assert typed(capsys, monkeypatch, model, directory) == expected.text


def test_a_mesh_refuses_an_adapter_next_to_the_model(model, files):
    mesh = pt.load(model, weights="streamed")
    with pytest.raises(InputError, match=r"adapter a cannot be loaded .*load_tuned"):
        mesh.load_adapter("a", files.decoder)
