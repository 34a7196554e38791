"""Makes the pictures of the documents, each from a result of this library.

    .venv/bin/python -m scripts.make_pictures      # all; some minutes on two cores
    .venv/bin/python -m scripts.make_pictures sweep serve

Needs the extras `plots` and `serve`, and Chromium for the page of the server.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib.pyplot as plt

import prompt_tuning as pt
from prompt_tuning.config.deferred_factories import Configured
from prompt_tuning.core.picture_files import write_picture
from scripts import skills
from tests.support.headless_browser import HeadlessBrowser, find_browser

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "scripts" / "site" / "pictures"
MODEL = "bundled:skills-decoder"
WORDS = skills.splits(0, train=2000, dev=50, test=0)


def write_rows(folder: Path, skill: str) -> list[str]:
    """Writes the words and what a skill makes of them; returns options of commands."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in (("train", WORDS.train), ("dev", WORDS.dev)):
        rows = [
            {"prompt": f"{word}=", "completion": skills.apply(skill, word)}
            for word in words
        ]
        text = "\n".join(json.dumps(row) for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return [f"--train={folder}/train.jsonl", f"--eval={folder}/dev.jsonl"]


def run(*arguments: str) -> None:
    """Runs a command of the library."""
    command = [sys.executable, "-m", "prompt_tuning", *arguments]
    subprocess.run(command, check=True, cwd=ROOT)


def tune(
    folder: Path,
    skill: str,
    method: Configured,
    *,
    steps: int = 100,
    every: int = 0,
    learning_rate: float | None = None,
) -> None:
    """Tunes a method for a skill, in a run directory; evaluates every so many steps."""
    write_rows(folder, skill)
    pt.tune(
        MODEL,
        method,
        folder / "train.jsonl",
        evaluation=folder / "dev.jsonl",
        directory=folder / "run",
        steps=steps,
        batch_size=16,
        buckets=1,
        evaluate_every=every,
        learning_rate=learning_rate,
    )


def curve(directory: Path, metric: str) -> tuple[list[int], list[float]]:
    """Returns the steps and values of a metric in a run's log."""
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    points = [(row["step"], row[metric]) for row in rows if metric in row]
    return [step for step, _ in points], [value for _, value in points]


def loss(folder: Path, file: Path) -> None:
    """Draws the held-out loss of two methods on a known and on a new function."""
    figure, panels = plt.subplots(
        1, 2, figsize=(8, 3), sharey=True, layout="constrained"
    )
    lora = pt.LoRA(rank=8, regexes=[".*/self_attention/.*", ".*/mlp/.*"])
    methods = {
        "soft prompt (8 vectors)": (pt.SoftPrompt(length=8), 0.3),
        "LoRA (rank 8)": (lora, 0.005),
    }
    titles = {"tail": "drop the first letter", "rot2": "move each letter by two"}
    for ax, (skill, title) in zip(panels, titles.items(), strict=True):
        for number, (name, (method, rate)) in enumerate(methods.items()):
            directory = folder / f"{skill}_{number}"
            tune(directory, skill, method, steps=200, every=10, learning_rate=rate)
            ax.plot(*curve(directory / "run", "evaluation/loss"), label=name)
        ax.set(title=title, xlabel="step", yscale="log")
        ax.grid(alpha=0.3)
    panels[0].set_ylabel("held-out loss (nats per token)")
    panels[0].legend()
    write_picture(figure, file)


def sweep(folder: Path, file: Path) -> None:
    """Draws the curves of a sweep, as the command does."""
    rows = write_rows(folder, "tail")
    out = folder / "sweep"
    run(
        *("sweep", f"--model={MODEL}", *rows, f"--out={out}", "--steps=150"),
        *("--batch_size=16", "--eval_every=20", "--gin.Run.data_seed=0"),
        *("--vary", "prompt_length=2,8", "--vary", "learning_rate=0.1,0.3"),
    )
    file.write_bytes((out / "curves.png").read_bytes())


def similar(folder: Path, file: Path) -> None:
    """Draws the similarities of prompts for six functions, as the command does."""
    names = ("upper", "title", "tail", "init", "reverse", "swap")
    for name in names:
        tune(folder / name, name, pt.SoftPrompt(length=8))
    directories = [folder / name / "run" for name in names]
    for directory, name in zip(directories, names, strict=True):
        directory.rename(folder / f"{name}_prompt")
    prompts = [str(folder / f"{name}_prompt") for name in names]
    run("similar", *prompts, f"--picture={file}")


def serve(folder: Path, file: Path) -> None:
    """Shows the server's page after a question to a tuned prompt."""
    tune(folder, "tail", pt.SoftPrompt(length=8))
    program = find_browser()
    if program is None:
        sys.exit("Chromium is not installed, which shows the page of the server")
    with serving(f"tail={folder / 'run'}") as address:
        browser = HeadlessBrowser(program, folder / "profile")
        try:
            size = {"width": 1100, "height": 450, "deviceScaleFactor": 1.5}
            browser.send("Emulation.setDeviceMetricsOverride", mobile=False, **size)
            browser.send("Page.navigate", url=address)
            browser.wait("document.querySelectorAll('#adapter option').length === 1")
            browser.evaluate(
                "document.getElementById('text').value = 'garden=';"
                "document.getElementById('tokens').value = 8;"
                "document.getElementById('go').click()"
            )
            for column in (0, 1):
                note = f"document.getElementById('note{column}').textContent"
                browser.wait(f"{note}.includes('ended by')")
            browser.screenshot(file)
        finally:
            browser.close()


@contextmanager
def serving(adapter: str) -> Iterator[str]:
    """Serves the model with an adapter; yields the address."""
    command = [sys.executable, "-m", "prompt_tuning", "serve", "--port=0"]
    command += [f"--model={MODEL}", f"--adapter={adapter}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "http://" in line)
        yield line[line.index("http://") :].split()[0]
        process.terminate()


def speed(folder: Path, file: Path) -> None:
    """Draws the step times of scripts/bench/results, ours and PEFT's."""
    del folder
    results = json.loads((ROOT / "scripts/bench/results/cpu.json").read_text())
    cases = [case for case in results["steps"] if case["case"] in CASES]
    figure, ax = plt.subplots(figsize=(8, 2.8), layout="constrained")
    for offset, side, name in ((0.2, "peft", "PEFT"), (-0.2, "ours", "this library")):
        seconds = [case["medians"][side] for case in cases]
        places = [number + offset for number in range(len(cases))]
        bars = ax.barh(places, seconds, height=0.36, label=name)
        ax.bar_label(bars, fmt="%.2f s", padding=3)
    ax.set_yticks(range(len(cases)), [CASES[case["case"]] for case in cases])
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.set(xlabel=f"seconds per training step, {results['machine']['processor']}, CPU")
    ax.legend()
    write_picture(figure, file)


CASES = {
    "llama": "Llama, 100 vectors",
    "llama_200": "Llama, 200 vectors",
    "gpt2": "GPT-2 small",
    "t5": "T5 1.1 small",
}

DRAWN: dict[str, Callable[[Path, Path], None]] = {
    "loss": loss,
    "sweep": sweep,
    "similar": similar,
    "serve": serve,
    "speed": speed,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(DRAWN))
    names = parser.parse_args(arguments).names or list(DRAWN)
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            DRAWN[name](Path(folder), PICTURES / f"{name}.png")


if __name__ == "__main__":
    main()
