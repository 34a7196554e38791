"""A Hugging Face hub on the loopback address that has one model."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT, EARLIER = "1" * 40, "2" * 40
TOKEN = "hf_test"
REVISIONS = {"main": COMMIT, "v1": EARLIER, COMMIT: COMMIT, EARLIER: EARLIER}


class HubServer(ThreadingHTTPServer):
    """Serves a folder as `organization/model`, at any of `REVISIONS`.

    Attributes:
      folder: folder with the files of the model.
      requests: paths that were requested, in order.
      private: whether only requests with `TOKEN` are answered.
    """

    def __init__(self, folder: Path, private: bool):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.private = folder, private
        self.requests: list[str] = []

    @property
    def address(self) -> str:
        """Value of HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def fetched(self) -> list[str]:
        """Names of the files whose content was requested."""
        gets = [path for path in self.requests if path.startswith("GET /organization")]
        return [path.rpartition("/")[2] for path in gets]


@contextlib.contextmanager
def serve(folder: Path, *, private: bool = False) -> Iterator[HubServer]:
    with HubServer(folder, private) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format, *args) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        token = self.headers.get("authorization")
        if self.server.private and token != f"Bearer {TOKEN}":
            return self._send(401, b"", {"X-Error-Code": "RepoNotFound"})
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            name, (_, revision) = parts[2:4], parts[4:] or ("revision", "main")
        else:
            name, revision = parts[:2], "".join(parts[3:4])
        if name != ["organization", "model"]:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        if revision not in REVISIONS:
            return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        commit = REVISIONS[revision]
        if parts[0] == "api":
            names = sorted(file.name for file in self.server.folder.iterdir())
            siblings = [{"rfilename": name} for name in names]
            content = {"id": "/".join(name), "sha": commit, "siblings": siblings}
            return self._send(200, json.dumps(content).encode(), {}, with_body)
        body = (self.server.folder / parts[4]).read_bytes()
        tag = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": commit}
        return self._send(200, body, tag, with_body)

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], with_body: bool = True
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body and self.command == "GET":
            self.wfile.write(body)
