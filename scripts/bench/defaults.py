"""Chooses defaults: method by start, rate, schedule and length, on five tasks.

    python -m scripts.bench.defaults --data ../shared/data --results defaults.jsonl

Trains every candidate with three seeds. All candidates of a method on a task run one
compiled program, whose learning rate is an argument. Appends a line for each to the
file of results, and skips what the file has. Then prints the median of the held-out
loss on each task, and the median of its rank over the tasks, for each method.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import json
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

import prompt_tuning as pt
from prompt_tuning.core.learning_rates import warmup_linear_decay
from prompt_tuning.core.parameter_groups import adafactor, adamw
from prompt_tuning.models.scoring import loss_sums
from scripts import skills
from scripts.bench.markdown import markdown_table
from scripts.bench.trec import read_questions

STEPS, ROWS = 150, 8
TRAINED_ROWS, HELD_OUT = 1200, 160
LONGEST = 60
"""Letters of a question or speech that are kept, so that rows are short."""

CONSTANT, LINEAR = "constant", "linear"
SEEDS = (0, 1, 2)

Pair = tuple[str, str]
Candidate = tuple[str, int, str, float]
"""Start, length (0 without a prompt), schedule and learning rate."""


@dataclasses.dataclass(frozen=True)
class Task:
    """Rows to learn, and how they are measured.

    Attributes:
      model: the frozen model.
      pairs: returns prompts and completions.
      settings: fields of `DataSource`.
    """

    model: str
    pairs: Callable[[], list[Pair]]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Method:
    """Candidates of one method.

    Attributes:
      starts: makes the method, given a length and a text of the task, for each start.
      optimizer: makes its optimizer, given a schedule.
      candidates: what is compared; the first is the default before the study.
    """

    starts: dict[str, Callable[[int, str], Any]]
    optimizer: Callable[[Any], optax.GradientTransformation]
    candidates: tuple[Candidate, ...]


def tasks(data: Path) -> dict[str, Task]:
    """Returns the tasks, given the folder with TREC, GSM8K, plays and stories260k."""
    stories = str(data / "models/stories260k")
    text = data / "text"
    plain = {"add_eos": False}
    return {
        "TREC": Task(
            stories,
            lambda: [
                (row["prompt"][:LONGEST], row["completion"])
                for row in read_questions(text / "trec/train_5500.label")
            ],
            plain,
        ),
        "GSM8K questions": Task(
            stories, lambda: list(_questions(text / "gsm8k/train.jsonl")), plain
        ),
        "conversation": Task(
            stories,
            lambda: list(read_speeches(text / "tinyshakespeare/input.txt")),
            plain,
        ),
        "strings, decoder": Task(
            "bundled:skills-decoder", lambda: _skill("reverse upper")
        ),
        "strings, T5": Task("bundled:skills-t5", lambda: _skill("tail")),
    }


def _questions(path: Path) -> Iterator[Pair]:
    for line in path.read_text().splitlines():
        yield "", json.loads(line)["question"][:LONGEST]


def read_speeches(path: Path) -> Iterator[Pair]:
    """Yields a speech with the next speaker, and what that speaker says."""
    turns = re.findall(r"([^\n]+:)\n(.+?)\n\n", path.read_text(), re.DOTALL)
    for (one, said), (other, answer) in itertools.pairwise(turns):
        yield f"{one}\n{said[:60]}\n\n{other}\n", answer[:LONGEST]


def _skill(skill: str) -> list[Pair]:
    count = TRAINED_ROWS + HELD_OUT
    words = skills.splits(0, train=count, dev=1, test=1).train
    return [(skills.prompt_text(None, w), skills.apply(skill, w)) for w in words]


def _soft(start: Any) -> Callable[[int, str], Any]:
    return lambda length, text: pt.SoftPrompt(length=length, initializer=start(text))


def _prefix(start: Any) -> Callable[[int, str], Any]:
    return lambda length, text: pt.KeyValuePrefix(
        length=length, initializer=start(text)
    )


def _sampled(_: str) -> Any:
    return pt.from_sampled_vocabulary()


METHODS = {
    "soft": Method(
        {
            "vocabulary": _soft(_sampled),
            "uniform": _soft(lambda _: pt.uniform()),
            "rows": _soft(lambda text: pt.from_text(text, _sampled(text))),
        },
        adafactor,
        (
            ("vocabulary", 20, CONSTANT, 0.3),
            ("vocabulary", 20, CONSTANT, 1.0),
            ("vocabulary", 20, LINEAR, 0.3),
            ("vocabulary", 20, LINEAR, 1.0),
            ("uniform", 20, LINEAR, 0.3),
            ("rows", 20, LINEAR, 0.3),
            ("vocabulary", 8, LINEAR, 0.3),
        ),
    ),
    "prefix": Method(
        {"normal": _prefix(lambda _: pt.normal(0.5)), "rows": _prefix(pt.from_text)},
        adamw,
        (
            ("normal", 20, CONSTANT, 0.02),
            ("normal", 20, CONSTANT, 0.05),
            ("normal", 20, LINEAR, 0.02),
            ("normal", 20, LINEAR, 0.05),
            ("rows", 20, LINEAR, 0.02),
            ("normal", 8, LINEAR, 0.02),
        ),
    ),
    "lora": Method(
        {"kaiming": lambda *_: pt.LoRA()},
        adamw,
        (
            ("kaiming", 0, CONSTANT, 0.001),
            ("kaiming", 0, CONSTANT, 0.003),
            ("kaiming", 0, CONSTANT, 0.01),
            ("kaiming", 0, LINEAR, 0.003),
        ),
    ),
    "ia3": Method(
        {"ones": lambda *_: pt.IA3()},
        adamw,
        (
            ("ones", 0, CONSTANT, 0.03),
            ("ones", 0, CONSTANT, 0.01),
            ("ones", 0, LINEAR, 0.03),
        ),
    ),
}
KEYS = ("task", "method", "start", "length", "schedule", "rate", "seed")


def main() -> None:
    """Trains what is missing, and prints the tables."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the tasks")
    parser.add_argument("--results", type=Path, required=True, help="JSONL of results")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[0, 8, 20])
    parser.add_argument("--schedules", nargs="+", default=[CONSTANT, LINEAR])
    parser.add_argument("--table", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    console = Console()
    trained = {} if arguments.table else tasks(arguments.data)
    for name, task in trained.items():
        for method in arguments.methods:
            points = [
                (*candidate, seed)
                for candidate in METHODS[method].candidates
                for seed in arguments.seeds
                if candidate[1] in arguments.lengths
                and candidate[2] in arguments.schedules
            ]
            started = time.monotonic()
            train_missing(arguments.results, name, task, method, points)
            seconds = time.monotonic() - started
            console.print(f"{method}, {name}: {seconds:.0f} s")
    results = read(arguments.results)
    for method in arguments.methods:
        text = f"\n### {method}\n\n{method_table(results, method)}"
        console.print(text, markup=False, soft_wrap=True)


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of the results."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def train_missing(
    path: Path,
    name: str,
    task: Task,
    method: str,
    points: Sequence[tuple[str, int, str, float, int]],
) -> None:
    """Trains candidates, each with its seed, that the results lack; appends them."""
    known = {tuple(line[key] for key in KEYS) for line in read(path)}
    chosen = METHODS[method]
    missing = [point for point in points if (name, method, *point) not in known]
    if not missing:
        return
    pairs = task.pairs()
    random.Random(0).shuffle(pairs)
    held_out, pairs = pairs[:HELD_OUT], pairs[HELD_OUT : HELD_OUT + TRAINED_ROWS]
    model = pt.load(task.model)
    settings = {"buckets": 1, "batch_size": ROWS, **task.settings}
    batches = _stacked(model.batches(pairs, steps=STEPS, **settings))
    evaluated = _stacked(model.batches(held_out, **settings))
    for start, length, schedule, rate, seed in missing:
        attached = model.attach(
            chosen.starts[start](length, _text(pairs, seed)), seed=seed
        )
        trained, frozen = attached.partition()
        loss, accuracy = _program(attached.graph, chosen.optimizer)(
            trained, schedule == LINEAR, rate, frozen, batches, evaluated
        )
        point = (name, method, start, length, schedule, rate, seed)
        line = dict(zip(KEYS, point, strict=True))
        line |= {"loss": round(float(loss), 4), "accuracy": round(float(accuracy), 4)}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def _text(pairs: Sequence[Pair], seed: int) -> str:
    """Returns some rows of the data, as a text to start from."""
    rows = random.Random(seed).sample(list(pairs), 8)
    return "\n".join(prompt + completion for prompt, completion in rows)


def _stacked(batches: Iterator[Any]) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)


@functools.cache
def _program(graph: Any, make_optimizer: Callable[[Any], Any]) -> Callable[..., Any]:
    """Returns a jitted function that trains and measures a candidate."""

    def run(trained, linear, rate, frozen, batches, evaluated):
        falling = warmup_linear_decay(1.0, STEPS)

        def schedule(step):
            return rate * jnp.where(linear, falling(step), 1.0)

        optimizer = make_optimizer(schedule)
        state = pt.TrainState.create(trained, optimizer, jax.random.key(0))

        def step(state, batch):
            state, _ = pt.train_step(
                state, frozen, batch, graph=graph, optimizer=optimizer, dropout=False
            )
            return state, None

        state, _ = jax.lax.scan(step, state, batches)
        sums = jax.lax.map(
            lambda batch: loss_sums(graph, {**state.trained, **frozen}, batch),
            evaluated,
        )
        weight = sums.weight.sum()
        return sums.loss.sum() / weight, sums.correct.sum() / weight

    return jax.jit(run)


def method_table(results: Sequence[dict[str, Any]], method: str) -> str:
    """Returns the candidates of a method by their median rank, as Markdown.

    The rank is that on the tasks for which there are results of all candidates.
    """
    losses = collections.defaultdict(lambda: collections.defaultdict(list))
    for line in results:
        if line["method"] == method:
            losses[tuple(line[k] for k in KEYS[2:6])][line["task"]].append(line["loss"])
    names = list(dict.fromkeys(name for row in losses.values() for name in row))
    medians = {
        key: {name: statistics.median(values) for name, values in row.items()}
        for key, row in losses.items()
    }
    complete = [n for n in names if all(n in row for row in medians.values())]
    ranks = {
        key: [
            1 + sum(other[name] < row[name] for other in medians.values())
            for name in complete
        ]
        or [0]
        for key, row in medians.items()
    }
    order = sorted(
        medians, key=lambda k: (statistics.median(ranks[k]), statistics.mean(ranks[k]))
    )
    rows = []
    for key in order:
        start, *others = map(str, key)
        before = "*" * (key == METHODS[method].candidates[0])
        known = medians[key]
        shown = [f"{known[name]:.3f}" if name in known else "-" for name in names]
        rank = f"{statistics.median(ranks[key]):g}" if complete else "-"
        rows.append([start + before, *others, *shown, rank])
    heads = ["start", "length", "schedule", "rate", *names, "median rank"]
    return "\n".join(markdown_table(heads, rows))


if __name__ == "__main__":
    main()
