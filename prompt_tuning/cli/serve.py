"""`prompt-tuning serve`: serves a model and its adapters with OpenAI's protocol."""

import argparse
import importlib.util
import os
import re
import ssl
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_tuning.cli.adapter_options import add_adapter_option, named_adapters
from prompt_tuning.cli.byte_sizes import format_size
from prompt_tuning.cli.run_options import GENERATES, add_run_options, check_options
from prompt_tuning.cli.shared_options import add_config_option, add_numbers
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.number_ranges import (
    NonnegativeInteger,
    Port,
    PositiveInteger,
    RowCount,
    SampleCount,
)
from prompt_tuning.core.typed_json import read_limited
from prompt_tuning.core.utf8_text import decode_text

if TYPE_CHECKING:
    from prompt_tuning.decoding.decoding_engine import DecodingEngine
    from prompt_tuning.server.served_models import ServedModels

HELP = "serve a model and adapters over HTTP, in OpenAI's protocol"
USES_JAX = True
USAGE = """
  prompt-tuning serve --model PATH [--adapter NAME=PATH ...] [OPTION ...]"""
DESCRIPTION = (
    "Serve a model and adapters over HTTP, in OpenAI's protocol. After SIGTERM or "
    "Ctrl-C, requests that run or wait have 5 s to end; a second signal ends the "
    "server at once."
)
PART_KEPT = 16
"""One slot in this many is reserved for short rows."""
LENGTH = 4096
"""Default maximum number of tokens per row (`--length`)."""
MAXIMUM_KEYS = 2**20
"""Maximum size of the key file in bytes."""
KEY_VARIABLE = "PROMPT_TUNING_API_KEY"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.usage = USAGE
    parser.description = DESCRIPTION
    add_config_option(parser)
    add_adapter_option(parser, "is served as a model of this name")
    parser.add_argument(
        "--name", metavar="NAME", help="model name of the frozen model (its folder's)"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on"
    )
    _add_sizes(parser)
    parser.add_argument(
        "--strict_length",
        action="store_true",
        help="refuse a request whose max_tokens do not fit into --length; otherwise it "
        "gets as many as fit",
    )
    parser.add_argument(
        "--api_key",
        metavar="KEY",
        help="key that clients must send; other users of this machine can read it "
        f"here, but not in the environment variable {KEY_VARIABLE}",
    )
    parser.add_argument(
        "--api_key_file",
        type=Path,
        metavar="FILE",
        help="file with one key per line; clients must send one of them",
    )
    parser.add_argument(
        "--allowed_origins",
        nargs="+",
        default=[],
        metavar="ORIGIN",
        help="origins of web pages that may use the server, such as "
        "https://chat.example.com, or * for all",
    )
    parser.add_argument(
        "--ssl_certfile",
        type=Path,
        metavar="FILE",
        help="certificate, for HTTPS",
    )
    parser.add_argument(
        "--ssl_keyfile",
        type=Path,
        metavar="FILE",
        help="key of the certificate, if it is in another file",
    )
    parser.add_argument(
        "--allow_loading",
        type=Path,
        metavar="DIRECTORY",
        help="let clients load adapters from this directory, and unload adapters",
    )
    add_run_options(parser, GENERATES)


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    numbers = {
        "port": (Port, 8000, "port to listen on; 0 for any that is free"),
        "slots": (
            RowCount,
            16,
            "rows that run together; one slot in 16 is reserved for rows of at most 32 "
            "new tokens",
        ),
        "length": (
            PositiveInteger,
            None,
            "maximum number of tokens of a row, given and new (default: the model's "
            f"positions, at most {LENGTH:,})",
        ),
        "queue": (
            NonnegativeInteger,
            64,
            "rows that may wait for a slot; more are refused (429)",
        ),
        "samples": (SampleCount, 16, "maximum of n, the samples of a request"),
    }
    add_numbers(parser, numbers)


def check(options: argparse.Namespace) -> None:
    """Checks for missing and contradictory options."""
    check_options(options, trains=False)
    missing = [x for x in ("starlette", "uvicorn") if not importlib.util.find_spec(x)]
    if missing:
        raise InputError(
            f"{' and '.join(missing)} cannot be imported, which serve needs: install "
            "prompt-tuning[serve]"
        )
    if options.allow_loading is not None and not options.allow_loading.is_dir():
        raise InputError(f"--allow_loading: {options.allow_loading} is not a directory")
    if options.api_key == "":
        raise InputError("--api_key is empty: give a key, or leave it out")
    named_adapters(options.adapter)
    _check_origins(options.allowed_origins)
    _check_certificate(options)
    _check_host(options)


def _keys(options: argparse.Namespace) -> list[str]:
    """Returns all keys: the option's, else the environment's, plus the file's."""
    one = options.api_key or os.environ.get(KEY_VARIABLE)
    keys = [one] if one else []
    if options.api_key_file is None:
        return keys
    file = options.api_key_file
    text = decode_text(read_limited(file, MAXIMUM_KEYS), str(file))
    listed = [line.strip() for line in text.splitlines() if line.strip()]
    if not listed:
        raise InputError(f"--api_key_file: {file} has no key, expected one a line")
    return [*keys, *listed]


def _check_origins(origins: Sequence[str]) -> None:
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"https?://[^/\s*]+", origin):
            raise InputError(
                f"--allowed_origins has {shown(origin)}, expected * or an origin, such "
                "as https://chat.example.com, without a path"
            )


def _check_certificate(options: argparse.Namespace) -> None:
    certificate, key = options.ssl_certfile, options.ssl_keyfile
    if certificate is None:
        if key is not None:
            raise InputError("--ssl_keyfile needs the certificate: add --ssl_certfile")
        return
    for file in (certificate, key):
        if file is not None and not file.is_file():
            raise InputError(f"{file} is missing, which TLS needs")
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            certificate, key, password=""
        )
    except (ssl.SSLError, OSError) as problem:
        raise InputError(
            f"--ssl_certfile {certificate} cannot be used: {problem}; expected a "
            "certificate and its key, not encrypted, in PEM form"
        ) from problem


def _check_host(options: argparse.Namespace) -> None:
    """Warns if everyone on the network may use the server."""
    from prompt_tuning.server.http_server import is_loopback

    if not is_loopback(options.host) and not _keys(options):
        loads = ", and load and unload adapters" if options.allow_loading else ""
        warnings.warn(
            f"--host {options.host} without a key: everybody who reaches this machine "
            f"may generate{loads}; set {KEY_VARIABLE}",
            stacklevel=2,
        )


def run(options: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C, then gives running requests some seconds."""
    from prompt_tuning.core.status_line import clear_status, status
    from prompt_tuning.server.application import ServerApplication
    from prompt_tuning.server.http_server import (
        LOOPBACK,
        HttpServer,
        address_of,
        ending_by_signals,
        is_loopback,
        open_socket,
    )
    from prompt_tuning.server.server_limits import ServerSettings

    with open_socket(options.host, options.port) as opened:
        models, engine = _open(options)
        with status("compiling"):
            if not engine.model.config.bidirectional:  # else it only embeds texts
                compile_programs(engine, loads=options.allow_loading is not None)
        clear_status()
        address = address_of(opened, encrypted=options.ssl_certfile is not None)

        def announce() -> None:
            print(_size(engine))
            print(f"serving {', '.join(models.names)} at {address}", flush=True)

        def stop() -> None:
            server.should_exit = True

        application = ServerApplication(
            models,
            engine,
            ServerSettings(
                queue_length=options.queue,
                samples=options.samples,
                strict_length=options.strict_length,
            ),
            on_failure=stop,
        )
        hosts = (*LOOPBACK, options.host) if is_loopback(options.host) else ()
        app = application.app(_keys(options), hosts, options.allowed_origins)
        certificate = options.ssl_certfile, options.ssl_keyfile
        server = HttpServer(app, announce, application.stop, os._exit, *certificate)
        with ending_by_signals():
            server.run(sockets=[opened])
    code = 1 if application.thread.failed else 0
    if application.busy:
        # Python would wait for its threads, which may compile for a long time.
        os._exit(code)
    return code


def _size(engine: "DecodingEngine") -> str:
    """Describes the size of an engine's keys and values."""
    size = format_size(engine.metrics().key_value_bytes)
    return (
        f"{engine.count} rows of {engine.limit:,} tokens: {size} of keys and values "
        "(--slots, --length)"
    )


def compile_programs(engine: "DecodingEngine", *, loads: bool = False) -> None:
    """Compiles programs for the usual settings, and one for all others.

    `loads` tells whether adapters may be loaded later, for single rows.
    """
    from prompt_tuning.decoding.sampling_settings import Sampling

    engine.compile(
        [
            Sampling(),
            Sampling(temperature=1.0),
            Sampling(temperature=1.0, top_p=0.9),
            Sampling(logprobs=5),
            Sampling(temperature=1.0, logprobs=5),
            Sampling(
                temperature=1.0,
                top_p=0.9,
                presence_penalty=0.5,
                logit_bias={0: 1.0},
                logprobs=5,
            ),
        ],
        pages=engine.count if loads else 0,
    )


def _open(options: argparse.Namespace) -> "tuple[ServedModels, DecodingEngine]":
    from prompt_tuning.cli.selected_run import read_run
    from prompt_tuning.server.served_models import ServedModels
    from prompt_tuning.texts.texts import Texts

    texts = Texts.of_frozen_model(read_run(options), embeds=True)
    checkpoint = str(texts.run.model.checkpoint)
    name = options.name or Path(checkpoint.rpartition(":")[2]).resolve().name
    room = texts.model.maximum_length
    length = options.length or LENGTH
    length = length if room is None else min(length, room)
    kept = options.slots // PART_KEPT
    engine = texts.open_engine(options.slots, length, kept)
    models = ServedModels(texts, name, engine.limit, options.allow_loading)
    for adapter, path in named_adapters(options.adapter).items():
        models.check_name(adapter)
        texts.load(adapter, path)
    return models, engine
