"""Who may use the server: keys, web pages of other origins, and TLS."""

import argparse
import http.client
import shutil
import ssl
import subprocess

import pytest

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("uvicorn", reason="needs the extra serve")

from prompt_tuning.cli import serve
from prompt_tuning.core.errors import InputError
from prompt_tuning.server.server_limits import ServerSettings
from tests.support.running_server import KEY, RunningServer, open_chat_model

ORIGIN = "https://chat.example.com"


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    texts = open_chat_model(tmp_path_factory.mktemp("access") / "model")
    texts.open_engine(slots=2, length=64)
    return texts


def test_each_key_is_right(texts):
    with RunningServer(texts, ServerSettings()) as server:
        for key, status in ((KEY, 200), ("another", 200), ("other", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {key}"}
            assert server.ask(path="/v1/models", method="GET", **headers)[0] == status


def test_pages_of_allowed_origins_may_read_answers(texts):
    body = {"prompt": "a", "max_tokens": 99}
    # A browser asks without the key before it sends a request.
    wanted = {"Access-Control-Request-Method": "POST", "Authorization": ""}
    wanted["Access-Control-Request-Headers"] = "authorization, content-type"
    with RunningServer(texts, ServerSettings(), origins=[ORIGIN]) as server:
        for origin, allowed in ((ORIGIN, ORIGIN), ("https://example.org", None)):
            _, headers, _ = server.send(method="OPTIONS", Origin=origin, **wanted)
            assert headers["Access-Control-Allow-Origin"] == allowed
            _, headers, _ = server.send(body, Origin=origin)
            assert headers["Access-Control-Allow-Origin"] == allowed
        assert headers["Access-Control-Expose-Headers"] == "x-max-tokens-clamped"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The file of a certificate of 127.0.0.1 and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not installed")
    folder = tmp_path_factory.mktemp("certificate")
    key, file = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-nodes", "-newkey", "rsa:2048", "-days", "9"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-keyout", str(key), "-out", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_text(key.read_text() + file.read_text())
    return both


def test_a_certificate_encrypts(texts, certificate):
    context = ssl.create_default_context(cafile=certificate)
    with RunningServer(texts, ServerSettings(), certificate=certificate) as server:
        client = http.client.HTTPSConnection("127.0.0.1", server.port, context=context)
        client.request("GET", "/health")
        assert client.getresponse().status == 200
        client.close()


def options(**given):
    names = ("ssl_certfile", "ssl_keyfile", "api_key", "api_key_file")
    return argparse.Namespace(**{name: given.get(name) for name in names})


def test_keys_are_read_from_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv(serve.KEY_VARIABLE, "c")
    file = tmp_path / "keys"
    file.write_text("a\n\n b \n")
    assert serve._keys(options(api_key_file=file)) == ["c", "a", "b"]
    file.write_text("\n")
    with pytest.raises(InputError, match="has no key, expected one a line"):
        serve._keys(options(api_key_file=file))


def test_certificates_and_origins_are_checked(tmp_path, certificate):
    serve._check_certificate(options(ssl_certfile=certificate))
    with pytest.raises(InputError, match="add --ssl_certfile"):
        serve._check_certificate(options(ssl_keyfile=certificate))
    with pytest.raises(InputError, match="is missing"):
        serve._check_certificate(options(ssl_certfile=tmp_path / "none"))
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("a")
    with pytest.raises(InputError, match="cannot be used"):
        serve._check_certificate(options(ssl_certfile=wrong))
    serve._check_origins(["*", ORIGIN, "http://localhost:3000"])
    for origin in ("chat.example.com", f"{ORIGIN}/", "https://*.example.com"):
        with pytest.raises(InputError, match="without a path"):
            serve._check_origins([origin])
