"""Commands on a machine without a device, with Ctrl-C, or without write access."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import prompt_tuning
from prompt_tuning.__main__ import OUTPUT_CLOSED
from prompt_tuning.core.interrupts import AGAIN
from tests.support.exhaustive import sample
from tests.support.small_runs import COMPILATION_CACHE

ROOT = str(Path(prompt_tuning.__file__).parents[1])
GENERATE = ["generate", "--gin_file=runs/first_prompt.gin", "text"]
MEMORY = ["memory", "runs/first_prompt.gin"]


def arguments(files, command: str) -> list[str]:
    given = files.arguments("run")[1:]
    if command == "train":
        return ["train", "--gin_file=runs/first_prompt.gin", *given]
    return [*{"generate": GENERATE, "memory": MEMORY}[command], *given]


def start(code: str, *given: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *given],
        env=os.environ | COMPILATION_CACHE | {"PYTHONPATH": ROOT} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


ABSENT = (
    [] if Path("/dev/nvidia0").exists() else [("cuda", "train"), ("gpu", "generate")]
)
RUN = "import sys; from prompt_tuning.__main__ import main; sys.exit(main())"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "command"),
    sample(1, [("nonsense", "memory"), *ABSENT]),
)
def test_an_unavailable_platform(files, platform, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = start(RUN, *arguments(files, command), JAX_PLATFORMS=platform)
    assert done.returncode == 2, done.stderr
    assert f"JAX_PLATFORMS is '{platform}', and there is no such" in done.stderr
    assert "this machine has" in done.stderr and "of cpu" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "words",
    [["configs"], ["configs", "runs/first_prompt"]],
)
def test_output_that_nothing_reads_ends_the_command_quietly(words):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "prompt_tuning", *words],
        env=os.environ | {"PYTHONPATH": ROOT},
        stdout=writer,
        stderr=subprocess.PIPE,
        timeout=120,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (OUTPUT_CLOSED, b"")


INTERRUPT = """
    import os, signal, sys, threading, time

    # A shell starts commands in the background with this signal ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    place, main_thread = sys.argv.pop(1), threading.get_ident()

    def interrupt_there():
        while True:
            frame = sys._current_frames()[main_thread]
            while frame is not None:
                if place in (frame.f_code.co_name, frame.f_globals.get("__name__")):
                    os.kill(os.getpid(), signal.SIGINT)
                    return
                frame = frame.f_back
            time.sleep(0.001)

    threading.Thread(target=interrupt_there, daemon=True).start()
    from prompt_tuning.__main__ import main
    sys.exit(main())
"""


@pytest.mark.parametrize(
    "interrupted",
    sample(
        1,
        [
            # Modules that are being imported.
            "prompt_tuning.cli.main",
            "jax._src.core",
            "prompt_tuning.models.decoder_only",
            # A function that runs while a program is compiled.
            "compile_or_get_cached",
        ],
    ),
)
def test_interrupted(files, interrupted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = start(INTERRUPT, interrupted, *arguments(files, "memory"))
    # Only a command that takes a while to stop says so.
    lines = [x for x in done.stderr.splitlines() if not x.endswith(AGAIN)]
    assert (done.returncode, lines) == (130, ["prompt-tuning: interrupted"])
    assert list(tmp_path.iterdir()) == []
