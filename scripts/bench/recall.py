"""Measures how many facts a memory answers, by its size, its start and its questions.

    python -m scripts.bench.recall [--seeds 0 1 2] [--json results.json]

Tables of 48 facts, which `bundled:recall` never saw, become key/value prefixes of an
eighth and of a 24th of their tokens, by context distillation of one question for each
line. The numbers are exact answers to all 48 questions, as shares of those behind the
whole table. Further rows have questions that the model asked itself, and two memories,
composed, each on its own questions: trained apart, and then together, and one of these
alone.
"""

import argparse
import hashlib
import itertools
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import prompt_tuning as pt
from prompt_tuning.api.memories import RATE, STARTS
from prompt_tuning.api.memory_update import STUDY
from prompt_tuning.config.deferred_factories import Configurable
from prompt_tuning.texts.study_files import join_study, write_study
from prompt_tuning.texts.text_study import CONTINUATION, LINE, TextStudy, read_texts
from prompt_tuning.training.metrics_log import EVALUATION, METRICS_FILE
from scripts import recall
from scripts.bench.markdown import markdown_table

MODEL, FACTS, EVERY = "bundled:recall", 48, 50
STEPS = {36: 300, 12: 500}
"""Number of steps by the number of slots."""
STARTED = ("first", "matching")
EIGHTH = (36, "matching")
LINES, OWN = "of lines", "of the model"
SHOWN = (0, 50, 100, 200, 300, 500)
ASKED = 1024
"""Number of questions that the model asks itself."""
APART, TOGETHER, ALONE = "trained apart", "then together", "one of these alone"
JOINT_STEPS = 100

EXACT = f"{EVALUATION}exact_match"

Rows = list[tuple[str, str]]


def learn(
    model: pt.Model,
    text: str,
    rows: Any,
    asked: Rows,
    slots: int,
    start: str,
    folder: Path,
    seed: int,
) -> tuple[pt.TunedModel, dict[int, float]]:
    """Trains a memory on rows; returns it, and the exact match by the step."""
    initializer = Configurable(STARTS[start])(text=text)
    prefix = pt.KeyValuePrefix(length=slots, initializer=initializer, frozen_slots=1)
    untrained = exact_match(model.attach(prefix), asked)
    memory = pt.tune(
        model,
        prefix,
        rows,
        steps=STEPS[slots],
        learning_rate=RATE,
        batch_size=FACTS,
        objective=pt.ContextDistillation(context=text),
        evaluation=pt.Evaluation(data=asked, exact_match=True),
        evaluate_every=EVERY,
        directory=folder,
        seed=seed,
        progress=False,
    )
    log = (folder / METRICS_FILE).read_text().splitlines()
    entries = [json.loads(line) for line in log]
    measured = {x["step"]: x[EXACT] for x in entries if EXACT in x}
    return memory, {0: untrained} | measured


def own_questions(model: pt.Model, text: str, folder: Path, seed: int) -> str:
    """Lets the model write behind a table what it likes; returns the file."""
    kinds, length = (CONTINUATION,), recall.FACT
    study = TextStudy(rows=ASKED, held_out=0, passage=length, kinds=kinds, seed=seed)
    read = read_texts({"the table": text}, model.prompted, study)
    files = write_study(folder, read, study, model.prompted, model.parameters)
    return str(files.train)


def given_questions(model: pt.Model, text: str, asked: Rows, folder: Path) -> None:
    """Writes the questions of a table as the rows that its memory was made with."""
    encode = model.tokenizer.encode
    line = {"document": "the table", "text": text, "ids": encode(text)}
    rows = [
        {
            "chunk": 0,
            "kind": LINE,
            "given_ids": encode(question),
            "learned_ids": [*encode(answer), recall.EOS_ID],
        }
        for question, answer in asked
    ]
    made_from = {"text": hashlib.sha256(text.encode()).hexdigest(), "kinds": [LINE]}
    join_study(folder, rows, [], [line], made_from)


def composed(
    memories: Mapping[int, tuple[pt.TunedModel, Rows, float]],
    pair: tuple[int, int],
    folder: Path,
) -> Iterator[dict[str, Any]]:
    """Measures two memories behind each other, and one alone after that."""
    parts = [memories[seed][0] for seed in pair]
    together = pt.compose(
        parts,
        steps=JOINT_STEPS,
        batch_size=2 * FACTS,
        directory=folder,
        progress=False,
    )
    both = {APART: pt.compose(parts), TOGETHER: together}
    for place, seed in enumerate(pair):
        _, asked, whole = memories[seed]
        rows = [{"prompt": q, "completion": a, "chunk": place} for q, a in asked]
        part = pt.load_tuned(folder / "parts" / str(place), base=MODEL)
        for kind, model in {**both, ALONE: part}.items():
            share = exact_match(model, rows) / whole
            yield {"composed": pair, "kind": kind, "seed": seed, "share": share}


def measure(seeds: Sequence[int], console: Console) -> list[dict[str, Any]]:
    """Trains and measures all memories.

    Returns:
      a row for each, with the exact match by the step as a share of that behind the
      whole table; and one for each two of them, composed.
    """
    model, results = pt.load(MODEL), []
    memories: dict[int, tuple[pt.TunedModel, Rows, float]] = {}
    with tempfile.TemporaryDirectory(prefix="prompt-tuning-") as folder:
        for seed in seeds:
            text, asked = recall.document(seed, FACTS)
            whole = exact_match(model, [(text + q, a) for q, a in asked])
            given = own_questions(model, text, Path(folder) / f"study_{seed}", seed)
            cases = [*itertools.product(STEPS, STARTED, (LINES,))]
            for slots, start, kind in [*cases, (*EIGHTH, OWN)]:
                memory, curve = learn(
                    model,
                    text,
                    asked if kind == LINES else [given],
                    asked,
                    slots,
                    start,
                    Path(folder) / f"run_{len(results)}",
                    seed,
                )
                shares = {step: exact / whole for step, exact in curve.items()}
                row = {"slots": slots, "start": start, "questions": kind, "seed": seed}
                results.append(row | {"whole": whole, "shares": shares})
                console.print(results[-1])
                if (slots, start) == EIGHTH and kind == LINES:
                    assert memory.directory is not None
                    given_questions(model, text, asked, memory.directory / STUDY)
                    memories[seed] = memory, asked, whole
        for one, other in itertools.pairwise([*memories, *list(memories)[:1]]):
            target = Path(folder) / f"both_{one}_{other}"
            for row in composed(memories, (one, other), target):
                results.append(row)
                console.print(row)
    return results


def exact_match(model: pt.Model, rows: Any) -> float:
    """Returns the share of questions that a model answers exactly."""
    return model.evaluate(rows, exact_match=True)["exact_match"]


def tabulate(results: Sequence[dict[str, Any]]) -> str:
    """Returns a table of mean shares over the tables of facts, and the least."""
    cases: dict[tuple[int, str, str], list[dict[int, float]]] = {}
    composed: dict[str, list[float]] = {}
    for row in results:
        if "composed" in row:
            composed.setdefault(row["kind"], []).append(row["share"])
        else:
            case = row["slots"], row["start"], row["questions"]
            cases.setdefault(case, []).append(row["shares"])
    lines = []
    for (slots, start, kind), curves in cases.items():
        cells = [_cell([x[step] for x in curves if step in x]) for step in SHOWN]
        lines.append([str(slots), start, kind, *cells])
    for kind, shares in composed.items():
        cells = [""] * (len(SHOWN) - 1)
        two = f"two of {EIGHTH[0]}, {kind}"
        lines.append([two, EIGHTH[1], LINES, *cells, _cell(shares)])
    headings = ["slots", "start", "questions", *map(str, SHOWN)]
    return "\n".join(markdown_table(headings, lines))


def _cell(shares: Sequence[float]) -> str:
    if not shares:
        return ""
    return f"{statistics.mean(shares):.1%} ({min(shares):.1%})"


def main() -> None:
    """Measures, and prints and writes the results."""
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    results = measure(options.seeds, Console())
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(tabulate(results))


if __name__ == "__main__":
    main()
