"""Checks and measures training on a GPU, unattended, in at most eight minutes.

    python -m scripts.bench.gpu --out results/gpu
    python -m scripts.bench.gpu --smoke         # tiny shapes, on any machine

It needs JAX with a GPU and this library's packages, but neither Grain nor an
installation of the library: run it in the repository. `--install FOLDER` creates a
virtual environment there and installs what is missing; otherwise nothing is installed.
PEFT is measured too if `--peft_python` has torch, transformers and PEFT.

Each part runs in its own process with its own time limit. Parts that do not fit into
the time or the memory are skipped with the reason. After every part the results so far
are written to OUT.json and OUT.md. Exits with 1 if a check fails.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.bench.gpu_table import markdown

ROOT = Path(__file__).parents[2]
MINUTES = 8.0
LEAST = 15.0
"""Seconds that starting and compiling a part take at least."""
NEEDED = {
    "jax": "jax[cuda12]",
    "flax": "flax",
    "optax": "optax",
    "jaxtyping": "jaxtyping",
    "msgpack": "msgpack",
    "numpy": "numpy",
    "orbax.checkpoint": "orbax-checkpoint",
    "rich": "rich",
    "safetensors": "safetensors",
    "google.protobuf": "protobuf",
    "tensorstore": "tensorstore",
    "tokenizers": "tokenizers",
    "jinja2": "jinja2",
    "gin": "gin-config",
    "re2": "google-re2",
    "h5py": "h5py",
}
"""Packages that the measured modules import, and what installs them."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of the benchmark.

    Attributes:
      name: name for `gpu_parts`, or for `gpu_peft` after "peft:".
      seconds: time limit.
    """

    name: str
    seconds: float


PARTS = (
    Part("rates", 45),
    Part("checks", 120),
    Part("llama_soft:flash", 75),
    Part("peft:llama_soft", 90),
    Part("llama_soft:flash:nf4", 75),
    Part("llama_soft:reference", 60),
    Part("llama_prefix:flash", 60),
    Part("llama_lora:flash", 60),
    Part("gpt2_soft:flash", 40),
    Part("t5_soft:reference", 60),
    Part("decode:bfloat16", 60),
    Part("peft:decode", 60),
    Part("decode:nf4", 60),
    Part("memory", 90),
    Part("pinned", 60),
    Part("streaming", 75),
    Part("peft:llama_lora", 75),
    Part("peft:gpt2_soft", 60),
    Part("peft:t5_soft", 60),
    Part("llama_soft:flash:int8", 75),
    Part("llama_prefix:reference", 60),
    Part("peft:llama_prefix", 60),
    Part("gpt2_soft:reference", 40),
)


def main() -> int:
    """Runs the parts; returns the exit code."""
    options = build_parser().parse_args()
    if options.install is not None:
        return install_and_restart(options.install)
    if missing := missing_packages():
        names = " ".join(missing)
        print(
            f"gpu: this Python lacks {names}; install them, or add --install FOLDER to "
            "install them into a virtual environment there",
            file=sys.stderr,
        )
        return 2
    known = [part.name for part in PARTS]
    if unknown := sorted(set(options.parts) - set(known)):
        print(
            f"gpu: no part {unknown[0]}; there are {', '.join(known)}", file=sys.stderr
        )
        return 2
    results = run(options, [p for p in PARTS if p.name in (options.parts or known)])
    print(markdown(results))
    checks = results["parts"].get("checks", {}).get("checks", [])
    return int(
        any(not check["ok"] for check in checks) or "checks" in results["failed"]
    )


def build_parser() -> argparse.ArgumentParser:
    """Builds the parser, which rejects unknown options."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="some parts (all)")
    parser.add_argument("--out", type=Path, default=Path("gpu"), metavar="OUT")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--peft_python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--install", type=Path, metavar="FOLDER")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes")
    return parser


def missing_packages() -> list[str]:
    """Returns what to install for the packages that this Python lacks."""

    def absent(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is None
        except ModuleNotFoundError:
            return True

    return [package for name, package in NEEDED.items() if absent(name)]


def install_and_restart(folder: Path) -> int:
    """Installs what is missing into a virtual environment, and runs there."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv = ["-m", "venv", "--system-site-packages", str(folder)]
        subprocess.run([sys.executable, *venv], check=True)
    if missing := missing_packages():
        print(f"installing {' '.join(missing)}", flush=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "-q", *missing], check=True
        )
    words = sys.argv[1:]
    place = words.index("--install") if "--install" in words else None
    if place is None:
        words = [word for word in words if not word.startswith("--install=")]
    else:
        del words[place : place + 2]
    command = [str(python), "-m", "scripts.bench.gpu", *words]
    return subprocess.run(command, cwd=ROOT).returncode


def run(options: argparse.Namespace, parts: Sequence[Part]) -> dict[str, Any]:
    """Runs parts until the time is over, and writes the results after each."""
    deadline = time.monotonic() + 60 * options.minutes
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "smoke": options.smoke,
        "parts": {},
        "failed": {},
    }
    for part in parts:
        left = deadline - time.monotonic()
        print(f"{part.name}: {left:.0f} s left", file=sys.stderr, flush=True)
        if left < LEAST:
            results["failed"][part.name] = f"out of time: {max(left, 0):.0f} s left"
        else:
            outcome = run_part(part, min(part.seconds, left), options)
            keep = results["parts"] if isinstance(outcome, dict) else results["failed"]
            keep[part.name] = outcome
            if isinstance(outcome, str):
                print(f"  skipped: {outcome}", file=sys.stderr, flush=True)
        write(options.out, results)
    return results


def write(out: Path, results: Mapping[str, Any]) -> None:
    """Writes OUT.json and OUT.md."""
    out.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{out}.json").write_text(json.dumps(results, indent=1) + "\n")
    Path(f"{out}.md").write_text(markdown(results))


def run_part(
    part: Part, seconds: float, options: argparse.Namespace
) -> dict[str, Any] | str:
    """Runs a part in a process; returns its result, or why there is none."""
    side, _, name = part.name.rpartition("peft:")
    command = [sys.executable, "-m", "scripts.bench.gpu_parts", part.name]
    if side or part.name.startswith("peft:"):
        command = [options.peft_python, "-m", "scripts.bench.gpu_peft", name]
    command += ["--smoke"] * options.smoke
    # A fraction of memory that leaves room for other processes on the device.
    environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    errors: list[str] = []
    thread = threading.Thread(target=forward, args=(process.stderr, errors.append))
    thread.start()
    output, ended = [], True
    reader = threading.Thread(target=forward, args=(process.stdout, output.append))
    reader.start()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        ended = False
        process.kill()
        process.wait()
    thread.join()
    reader.join()
    lines = [line for line in output if line.startswith("{")]
    if lines:
        return json.loads(lines[-1])
    if not ended:
        return f"out of time: not finished after {seconds:.0f} s"
    return reason_of(errors)


def forward(stream: Any, keep: Callable[[str], None]) -> None:
    """Passes progress lines on, and keeps every line."""
    with contextlib.closing(stream):
        for line in stream:
            keep(line)
            if line.startswith("  ") and not line.startswith("   "):
                print(line, end="", file=sys.stderr, flush=True)


def reason_of(errors: Sequence[str]) -> str:
    """Returns why a process failed, from the end of its error output."""
    text = "".join(errors)
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return "out of memory"
    lines = [line.strip() for line in errors if line.strip()]
    return lines[-1][:300] if lines else "it ended without a result"


if __name__ == "__main__":
    sys.exit(main())
