"""A server in a thread of this process, and a small model that it may serve."""

import contextlib
import dataclasses
import http.client
import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.config.gin_files import read_run
from prompt_tuning.server.application import ServerApplication
from prompt_tuning.server.http_server import HttpServer, open_socket
from prompt_tuning.server.served_models import ServedModels
from prompt_tuning.server.server_limits import ServerSettings
from prompt_tuning.texts.texts import Texts
from scripts import random_model
from tests.support.small_runs import DECODER
from tests.support.small_tokenizer import CHAT, write_tokenizer

KEY = "a key"
EOS_ID = 260
"""Id of the small tokenizer's EOS."""


def open_chat_model(
    folder: Path, template: str = CHAT, special: Sequence[str] = ()
) -> Texts:
    """Opens a decoder with random weights, of single bytes, with a chat template."""
    write_tokenizer(folder, special, chat_template=template)
    config = dataclasses.replace(
        DECODER,
        vocabulary_size=262 + len(special),
        maximum_positions=4096,
        eos_id=EOS_ID,
        bos_id=None,
    )
    random_model.write_random_model(folder, config)
    run = read_run(["models/checkpoint.gin"], [f"MODEL = {str(folder)!r}"])
    return Texts.of_frozen_model(run)


class RunningServer:
    """A server with the keys `another` and `KEY`.

    Args:
      texts: the model and its adapters, whose engine is open.
      settings: settings of the server.
      folder: directory that adapters may be loaded from, or None.
      origins: origins of web pages that may use it.
      certificate: file of a certificate and its key, for TLS, or None.
    """

    def __init__(
        self,
        texts: Texts,
        settings: ServerSettings,
        folder: Path | None = None,
        origins: Sequence[str] = (),
        certificate: Path | None = None,
    ):
        self.texts, engine = texts, texts.engine(1)
        models = ServedModels(texts, "base", engine.limit, folder)
        self.application = ServerApplication(models, engine, settings)
        self.socket = open_socket("127.0.0.1", 0)
        self.port = self.socket.getsockname()[1]
        ready = threading.Event()
        self.app = self.application.app(["another", KEY], ["127.0.0.1"], origins)
        self.server = HttpServer(self._answer, ready.set, certificate=certificate)
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],))
        self.thread.start()
        assert ready.wait(30)

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)

    @property
    def address(self) -> str:
        """Address of the API, as clients are given it."""
        return f"http://127.0.0.1:{self.port}/v1"

    def connect(self, body=None, path="/v1/completions", method="POST", **headers):
        """Sends a request, whose answer is not read yet."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        headers = {"Authorization": f"Bearer {KEY}", **headers}
        headers.setdefault("Content-Type", "application/json")
        content = body if isinstance(body, bytes | None) else json.dumps(body)
        connection.request(method, path, content, headers)
        return connection

    def send(
        self, body=None, path="/v1/completions", method="POST", **headers
    ) -> tuple[int, Any, Any]:
        """Returns the status, the headers and the content of an answer."""
        with contextlib.closing(self.connect(body, path, method, **headers)) as opened:
            response = opened.getresponse()
            content = response.read()
        if response.headers["Content-Type"] == "application/json":
            content = json.loads(content)
        return response.status, response.headers, content

    def ask(
        self, body=None, path="/v1/completions", method="POST", **headers
    ) -> tuple[int, Any]:
        """Returns the status and the content of an answer."""
        status, _, content = self.send(body, path, method, **headers)
        return status, content

    def chat(self, content="hi", **fields) -> tuple[int, Any]:
        """Returns the status and the content of the answer to a user's message."""
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.ask(body, "/v1/chat/completions")

    def events(self, content="hi", **fields) -> list[dict[str, Any]]:
        """Returns the events of a streamed answer to a user's message."""
        status, events = self.chat(content, stream=True, **fields)
        assert status == 200, events
        *lines, last = [x[6:] for x in events.decode().split("\n\n") if x]
        assert last == "[DONE]"
        return [json.loads(line) for line in lines]

    def __enter__(self) -> "RunningServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the server."""
        self.server.should_exit = True
        self.thread.join(30)
        self.socket.close()
        assert not self.thread.is_alive()
