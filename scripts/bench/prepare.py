"""Measures the speed and the memory of `prompt-tuning prepare`.

    python -m scripts.bench.prepare --peft_python PYTHON    # one with transformers

The lines of JSON are generated from the texts in ../shared. The baseline encodes the
same lines one by one with `transformers.AutoTokenizer`: half of them before our command
and half after it, so that both see the same load of the machine. Our time is that of
the whole command, including writing and checksums. CPU seconds show how much of a busy
machine each side had. Memory is the proportional set size (PSS) of all processes of the
command.
"""

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.bench.workers import ROOT, Answer, Worker, peak_memory, serve

SHARED = ROOT.parent / "shared"
GPT2 = SHARED / "data/tokenizers/gpt2"
SAMPLE_SECONDS = 0.1
MEGABYTE = 1_000_000


def main() -> None:
    """Measures both, or runs as the process of the baseline."""
    if sys.argv[1:2] == ["serve"]:
        serve({"encode": _encode, "memory": peak_memory})
        return
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=200, help="size of the lines")
    parser.add_argument("--workers", type=int, default=2, help="processes of `prepare`")
    parser.add_argument(
        "--peft_python", default=sys.executable, help="a Python with transformers"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = options.megabytes // 4, options.megabytes
        small, large = (make_lines(folder / f"{size}.jsonl", size) for size in sizes)
        with Worker("baseline", _baseline_command(options.peft_python)) as baseline:
            half = large.stat().st_size // 2
            first = baseline.ask("encode", file=str(large), start=0, stop=half)
            less = prepare(small, options.workers)
            ours = prepare(large, options.workers)
            rest = baseline.ask(
                "encode", file=str(large), start=half, stop=2 * half + 1
            )
    theirs = {name: first[name] + rest[name] for name in first}
    megabytes = theirs["bytes"] / MEGABYTE
    print(f"{megabytes:.0f} MB, {theirs['lines']:,} lines")
    for name, side in (("AutoTokenizer, line by line", theirs), ("prepare", ours)):
        print(
            f"{name}: {side['seconds']:.1f} s, {megabytes / side['seconds']:.2f} MB/s; "
            f"{side['cpu']:.1f} CPU seconds"
        )
    print(f"speedup: {theirs['seconds'] / ours['seconds']:.2f}x")
    print(
        f"peak memory: {less['memory'] / MEGABYTE:.0f} MB for {sizes[0]} MB of lines, "
        f"{ours['memory'] / MEGABYTE:.0f} MB for {sizes[1]} MB"
    )


def make_lines(file: Path, megabytes: int) -> Path:
    """Writes lines with a prompt and a completion; the output is deterministic."""
    draw = random.Random(0)
    sentences = _sentences()
    size = 0
    with file.open("w", encoding="utf-8") as lines:
        while size < megabytes * MEGABYTE:
            prompt = " ".join(draw.choices(sentences, k=draw.randint(2, 8)))
            completion = " ".join(draw.choices(sentences, k=draw.randint(1, 8)))
            line = json.dumps({"prompt": prompt, "completion": completion}) + "\n"
            lines.write(line)
            size += len(line)
    return file


def _sentences() -> list[str]:
    """Reads real text: problems and answers, news, a play."""
    texts = [(SHARED / "data/text/tinyshakespeare/input.txt").read_text("utf-8")]
    for name in ("text/gsm8k/train", *_PREPARED):
        for line in (SHARED / f"data/{name}.jsonl").read_text("utf-8").splitlines():
            texts.extend(map(str, json.loads(line).values()))
    return [piece for text in texts for piece in text.split("\n") if piece.strip()]


_PREPARED = tuple(
    f"data_prep/{name}/example_{name}_data"
    for name in ("generative_tuning", "pretraining")
)


def prepare(lines: Path, workers: int) -> Answer:
    """Runs the command; returns its seconds, CPU seconds and peak bytes."""
    output = lines.with_suffix(".prepared")
    command = [sys.executable, "-m", "prompt_tuning.cli.main", "prepare", str(lines)]
    command += ["--output", str(output), "--tokenizer", str(GPT2)]
    command += ["--packing", "greedy::truncate_right", "--workers", str(workers)]
    before = _cpu_of_children()
    started, peak = time.monotonic(), 0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            peak = max(peak, sum(map(_memory, _family(process.pid))))
            time.sleep(SAMPLE_SECONDS)
    seconds = time.monotonic() - started
    if process.returncode:
        raise SystemExit(f"prepare exited with code {process.returncode}")
    shutil.rmtree(output)
    return {
        "seconds": seconds,
        "cpu": _cpu_of_children() - before,
        "memory": peak,
    }


def _cpu_of_children() -> float:
    """Returns the CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _family(process: int) -> Iterator[int]:
    """Yields a process and all its descendants."""
    yield process
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        children = " ".join((task / "children").read_text() for task in tasks)
    except OSError:
        return
    for child in map(int, children.split()):
        yield from _family(child)


def _memory(process: int) -> int:
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0
    sizes = [line.split()[1] for line in text.splitlines() if line.startswith("Pss:")]
    return 1024 * sum(map(int, sizes))


def _baseline_command(python: str) -> list[str]:
    return [python, "-m", "scripts.bench.prepare", "serve"]


def _encode(file: str, start: int, stop: int) -> Answer:
    """Encodes each line that begins within a range of bytes."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        for name in ("vocab.json", "merges.txt"):
            shutil.copyfile(GPT2 / name, Path(folder) / name)
        config = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 10**9}
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    done = count = 0
    with Path(file).open("rb") as lines:
        if start:
            lines.seek(start - 1)
            lines.readline()
        started, cpu = time.perf_counter(), time.process_time()
        while lines.tell() < stop and (line := lines.readline()):
            content = json.loads(line)
            tokenizer(content["prompt"] + content["completion"])
            done += len(line)
            count += 1
        seconds = time.perf_counter() - started
        cpu = time.process_time() - cpu
    return {"seconds": seconds, "cpu": cpu, "bytes": done, "lines": count}


if __name__ == "__main__":
    main()
