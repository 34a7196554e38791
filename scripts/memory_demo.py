"""Turns a table of facts into memories, and asks about it."""

import json
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import prompt_tuning as pt
from prompt_tuning.api.memories import Start
from prompt_tuning.config.run import DataSource
from prompt_tuning.settings.evaluation_settings import Evaluation
from prompt_tuning.texts.memory_comparison import measure_memory
from scripts import recall, skill_tuning

MODEL = "bundled:recall"
FACTS, SLOTS = 48, 36
STEPS: dict[Start, int] = {"first": 300, "matching": 300}
"""Number of steps from each start."""
ROWS, HELD_OUT, BATCH_SIZE, PASSAGE = 1024, 64, 48, 12


def remember_and_ask(console: Console, seed: int, runs: Path) -> list[dict]:
    """Makes a memory of a new table from each start, and asks about each fact.

    Args:
      console: console for the progress.
      seed: seed of the table and of the runs.
      runs: parent of the new run directories.

    Returns:
      a row for each of what the questions follow, with the share of exact answers.
    """
    text, questions = recall.document(seed, FACTS)
    folder = skill_tuning.new_directory(runs, "memory")
    (folder / "facts.txt").write_text(text)
    asked = folder / "questions.jsonl"
    lines = (json.dumps({"prompt": q, "completion": a}) for q, a in questions)
    asked.write_text("".join(line + "\n" for line in lines))
    console.print(f"{FACTS} facts, from {text.split()[0]} to {text.split()[-1]}")
    model, rows = pt.load(MODEL), []
    for start, steps in STEPS.items():
        console.rule(f"{SLOTS} slots for {FACTS} facts, start {start}, seed {seed}")
        started = time.monotonic()
        memory = pt.remember(
            model,
            text,
            slots=SLOTS,
            steps=steps,
            start=start,
            directory=folder / start,
            seed=seed,
            rows=ROWS,
            held_out=HELD_OUT,
            batch_size=BATCH_SIZE,
            passage=PASSAGE,
        )
        seconds = time.monotonic() - started
        if not rows:
            data = DataSource(files=[str(asked)])
            evaluation = Evaluation(data=data, exact_match=True)
            measured = measure_memory(memory.run, evaluation)
            own = measured.pop("memory")
            rows = [{"behind": name, **values} for name, values in measured.items()]
        else:
            answers = memory.evaluate(str(asked), exact_match=True)
            own = own | {"exact_match": answers["exact_match"]}
        name = f"memory, {start}"
        rows.append({"behind": name, **own, "steps": steps, "seconds": seconds})
    shared = {"seed": seed, "run": str(folder / start), "question": questions[0][0]}
    return [row | shared for row in rows]


def show(console: Console, rows: list[dict]) -> None:
    """Prints a row for each of what the questions follow, and a command to try."""
    table = Table(title=f"answers to {FACTS} questions about a table of facts")
    for heading in ("behind", "positions", "ratio", "steps", "exact match", "time"):
        table.add_column(heading, justify="left" if heading == "behind" else "right")
    for row in sorted(rows, key=lambda row: (row["seed"], row["exact_match"])):
        table.add_row(
            row["behind"],
            f"{row['positions']:.0f}",
            f"{row['compression']:.1f}x" if row["compression"] else "-",
            str(row.get("steps", "-")),
            f"{row['exact_match']:.1%}",
            f"{row['seconds']:.0f} s" if "seconds" in row else "-",
        )
    console.print(table)
    run, question = rows[-1]["run"], rows[-1]["question"]
    console.print(
        f"next: .venv/bin/prompt-tuning generate --run {run} '{question}'",
        soft_wrap=True,
        highlight=False,
    )
