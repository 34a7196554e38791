"""Tunes a prompt for a string skill on a bundled model, and measures what it gains."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from prompt_tuning.config import gin_files, operative_config
from prompt_tuning.config.run import Run
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.decoding.continue_rows import continue_rows
from prompt_tuning.decoding.row_encoding import decode_continuations
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.pretrained.text_encoding import encode_given
from prompt_tuning.training.loop import train
from prompt_tuning.training.opening import open_run
from prompt_tuning.training.progress import CallbackReporter, Reporter, make_reporter
from prompt_tuning.tuned.load_tuned import best_checkpoint, load_tuned
from scripts import skills

TRAIN_WORDS, DEV_WORDS, TEST_WORDS = 4000, 200, 500
EXAMPLES = 4
LONGEST_COMPLETION = 17
FIRST_STEP_DONE = "first step done"


def tune_and_measure(
    console: Console,
    model: str,
    skill: str,
    seed: int,
    runs: Path,
    overrides: Sequence[str] = (),
) -> dict[str, str | float | int]:
    """Tunes one prompt; returns its exact match on test words and its file.

    Args:
      console: console for the progress.
      model: "decoder" or "t5".
      skill: a name in `skills.SKILLS`, or several, applied from left to right.
      seed: seed of the words, the prompt's initial values and the order of rows.
      runs: parent of the new run directory.
      overrides: gin bindings that override the shipped config.
    """
    directory = new_directory(runs, f"{model}-{skill.replace(' ', '-')}")
    split = words(seed)
    files = {
        "TRAIN_FILES": write_pairs(directory / "train.jsonl", skill, split.train),
        "EVALUATION_FILES": write_pairs(directory / "dev.jsonl", skill, split.dev),
        "RUN_DIRECTORY": str(directory / "run"),
    }
    bindings = [f"{name} = {value!r}" for name, value in files.items()]
    run = gin_files.read_run(
        [f"runs/skills_{model}.gin"], [*bindings, f"Run.seed = {seed}", *overrides]
    )
    console.rule(f"{skill}: a prompt on the frozen {model}, seed {seed}")
    started = time.monotonic()
    train(
        open_run(run),
        config=operative_config.operative_config(),
        make_reporter=lambda done: FirstStep(make_reporter(console, run.steps, done)),
    )
    seconds = time.monotonic() - started
    return measure(console, run, skill, split.test) | {
        "skill": skill,
        "seed": seed,
        "seconds": round(seconds, 1),
        "run": run.directory,
    }


class FirstStep(CallbackReporter):
    """A reporter that also prints a line after the first step."""

    def __init__(self, reporter: Reporter):
        super().__init__(reporter)
        self._announced = False

    def advance(self, step: int, metrics: Mapping[str, float] | None) -> None:
        """Forwards the step."""
        if not self._announced:
            self._announced = True
            self.say(FIRST_STEP_DONE)
        super().advance(step, metrics)


def words(seed: int) -> skills.Splits:
    """Draws the words for tuning, for choosing a checkpoint, and for testing."""
    return skills.splits(seed, train=TRAIN_WORDS, dev=DEV_WORDS, test=TEST_WORDS)


def measure(
    console: Console, run: Run, skill: str, words: Sequence[str]
) -> dict[str, str | float | int]:
    """Computes exact match with no prompt, the skill's name, and the tuned prompt."""
    tuned, parameters = load_tuned(run)
    alone = open_pretrained(run.model, key=jax.random.key(0))
    frozen = alone.read_parameters()
    expected = [skills.apply(skill, word) for word in words]
    bare = [skills.prompt_text(None, word) for word in words]
    named = [skills.prompt_text(skill, word) for word in words]
    completions = answers(tuned, parameters, bare)
    for text, answer in list(zip(bare, completions, strict=True))[:EXAMPLES]:
        console.print(f"  {text}{answer}", markup=False, highlight=False)
    return {
        "no_prompt": exact_match(answers(alone, frozen, bare), expected),
        "name_as_text": exact_match(answers(alone, frozen, named), expected),
        "tuned_prompt": exact_match(completions, expected),
        "prompt_bytes": best_prompt_file(run).stat().st_size,
        "prompt_file": str(best_prompt_file(run)),
    }


def answers(
    model: PromptedModel, parameters: Parameters, texts: Sequence[str]
) -> list[str]:
    """Continues each text greedily."""
    rows = [encode_given(model, text) for text in texts]
    sampling = Sampling(new_tokens=LONGEST_COMPLETION)
    new = continue_rows(model, parameters, rows, sampling, batch_size=250)
    return decode_continuations(model, rows, new)


def exact_match(completions: Sequence[str], expected: Sequence[str]) -> float:
    """Returns the fraction of completions that equal the expected text."""
    return float(np.mean([a == b for a, b in zip(completions, expected, strict=True)]))


def best_prompt_file(run: Run) -> Path:
    """Returns the `.npy` file of the run's best checkpoint."""
    (file,) = best_checkpoint(run).glob("*.npy")
    return file


def new_directory(runs: Path, name: str) -> Path:
    """Creates the first of `name-1`, `name-2`, ... that does not exist yet."""
    number = 1
    while (runs / f"{name}-{number}").exists():
        number += 1
    directory = runs / f"{name}-{number}"
    directory.mkdir(parents=True)
    return directory


def write_pairs(file: Path, skill: str, words: Sequence[str]) -> str:
    """Writes inputs without a skill's name, and completions, as JSONL."""
    lines = (
        json.dumps(
            {
                "prompt": skills.prompt_text(None, word),
                "completion": skills.apply(skill, word),
            }
        )
        for word in words
    )
    file.write_text("".join(line + "\n" for line in lines))
    return str(file)


def show(console: Console, rows: Sequence[dict]) -> None:
    """Prints a row for each prompt, and a command to try next."""
    table = Table(title=f"exact match on {TEST_WORDS} words held out of pretraining")
    for heading in (
        "skill",
        "seed",
        "no prompt",
        "name as text",
        "tuned prompt",
        "time",
    ):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            row["skill"],
            str(row["seed"]),
            *(f"{row[k]:.1%}" for k in ("no_prompt", "name_as_text", "tuned_prompt")),
            f"{row['seconds']:.0f} s",
        )
    console.print(table)
    last = rows[-1]
    for row in rows:
        console.print(
            f"{row['skill']}: {row['prompt_file']} ({row['prompt_bytes']:,} bytes)",
            soft_wrap=True,
            highlight=False,
        )
    console.print(
        f"next: .venv/bin/prompt-tuning generate --run {last['run']} hello= world=",
        soft_wrap=True,
        highlight=False,
    )
