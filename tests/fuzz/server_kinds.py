"""Kinds of input of the HTTP server: the bodies of its requests."""

import functools
import json
from pathlib import Path

import numpy as np

from prompt_tuning.config.gin_files import read_run
from prompt_tuning.core.errors import InputError
from prompt_tuning.server.application import ServerApplication
from prompt_tuning.server.served_models import ServedModels
from prompt_tuning.server.server_limits import ServerSettings
from prompt_tuning.texts.texts import Texts
from tests.fuzz.fuzz_kind import Kind
from tests.fuzz.mutations import mutate_json
from tests.support.asgi_client import AsgiClient
from tests.support.small_runs import DECODER, add_chat_template, write_model

FIELDS = {"max_tokens": 3, "temperature": 0, "seed": 1, "stop": ["b"], "n": 1}
FIELDS |= {"top_p": 1, "logit_bias": {"5": 1}, "min_tokens": 1, "user": "me"}
CONTENT = [{"type": "text", "text": "ab="}]
BODIES = {
    "/v1/completions": {"model": "soft", "prompt": ["ab=", "b="], **FIELDS},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": CONTENT}],
        "stream": True,
        "stream_options": {"include_usage": True},
        **FIELDS,
    },
    "/v1/load_lora_adapter": {"lora_name": "other", "lora_path": "soft.npy"},
    "/v1/unload_lora_adapter": {"lora_name": "other"},
}
LOAD, UNLOAD = (
    json.dumps(BODIES[f"/v1/{name}_lora_adapter"]).encode()
    for name in ("load", "unload")
)


def write_body(path: str, folder: Path) -> None:
    """Writes a valid body, and the model and adapter that it is sent to."""
    (folder / "body.json").write_text(json.dumps(BODIES[path]))
    add_chat_template(write_model(folder / "model", DECODER))
    vectors = np.random.default_rng(0).normal(size=(3, DECODER.width))
    np.save(folder / "soft.npy", vectors.astype(np.float32))


_clients: list[AsgiClient] = []


def open_client(folder: Path) -> AsgiClient:
    """Returns the client of this process's server, of the model in the first folder."""
    if not _clients:
        run = read_run(
            ["models/checkpoint.gin"], [f"MODEL = {str(folder / 'model')!r}"]
        )
        texts = Texts.of_frozen_model(run)
        engine = texts.open_engine(slots=2, length=32)
        texts.load("soft", folder / "soft.npy")
        models = ServedModels(texts, "base", engine.limit, folder)
        application = ServerApplication(models, engine, ServerSettings())
        _clients.append(AsgiClient(application.app()))
    return _clients[0]


def prepare(path: str, folder: Path) -> None:
    """Sends a valid body, for which programs are compiled."""
    client = open_client(folder)
    client.post(path, (folder / "body.json").read_bytes())
    client.post("/v1/unload_lora_adapter", UNLOAD)


def no_names(_: Path) -> tuple[()]:
    """Returns nothing: a request has no file; its error has a field with a name."""
    return ()


def send_body(path: str, folder: Path) -> None:
    """Sends a body to a path.

    Raises:
      InputError: if it is refused.
    """
    client = open_client(folder)
    if path == "/v1/unload_lora_adapter":
        client.post("/v1/load_lora_adapter", LOAD)
    body = (folder / "body.json").read_bytes()
    status, content = client.post(path, body)
    if path == "/v1/load_lora_adapter" and status == 200:
        name = json.loads(body)["lora_name"]
        client.post("/v1/unload_lora_adapter", json.dumps({"lora_name": name}).encode())
    if status == 200:
        return
    assert 400 <= status < 500, (status, content)
    (error,) = json.loads(content).values()
    assert error.keys() == {"message", "type", "param", "code"}, error
    assert error["code"] == status
    assert "\n" not in error["message"]
    raise InputError(error["message"])


KINDS = [
    Kind(
        f"server{path.replace('/', '-')}",
        functools.partial(write_body, path),
        {"body.json": mutate_json},
        functools.partial(send_body, path),
        replaceable=False,
        names=no_names,
        prepare=functools.partial(prepare, path),
    )
    for path in BODIES
]
