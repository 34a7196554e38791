"""Compares distillation on the student's own texts with that on the teacher's.

    python -m scripts.bench.on_policy --model STORIES260K [--seeds 0 1 2]

The teacher is the frozen model behind a text of 300 tokens, which it wrote itself. A
prompt of 16 vectors is to replace the text. It learns from as many tokens in each row
of the table: from texts of the teacher, from its own, or from both, first the
teacher's. No text of the teacher comes twice. Printed is the mean divergence
`KL(teacher || student)` on continuations of held-out beginnings, by the teacher and by
the student.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import prompt_tuning as pt
from prompt_tuning.training.rollouts.rollout_log import ROLLOUTS_FILE

CONTEXT, VECTORS = 300, 16
GIVEN, NEW = 6, 32
ROWS, HELD_OUT = 16, 128

Texts = list[dict[str, str]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains each way with each seed, and prints the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", required=True, help="the stories260k folder")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--learning_rate", type=float, default=0.02)
    options = parser.parse_args(arguments)
    model, console = pt.load(options.model), Console()
    columns = ("trained on", "seed", "tokens", "teacher's texts", "own texts")
    table = Table(*columns, title=f"KL after {options.steps} steps of {ROWS} rows")
    context = write_story(model)
    for seed in options.seeds:
        texts = continue_text(model, context, options.steps * ROWS + HELD_OUT, seed)
        for way, share in (("the teacher's", 0), ("both", 0.5), ("its own", 1)):
            with tempfile.TemporaryDirectory() as folder:
                tuned, tokens = distil(
                    model, context, texts, options, seed, share, Path(folder)
                )
                measured = measure(tuned, texts[:HELD_OUT], seed)
            shown = [f"{divergence:.4f}" for divergence in measured]
            table.add_row(way, str(seed), f"{tokens:,}", *shown)
            console.print(way, seed, tokens, *shown)
    console.print(table)


def write_story(model: pt.Model) -> str:
    """Returns a text of the model of at least `CONTEXT` tokens, cut to them."""
    tokenizer = model.tokenizer
    drawn = model.generate([""] * 32, new_tokens=CONTEXT + 20, temperature=1.0, seed=1)
    ids = max((tokenizer.encode(str(text)) for text in drawn), key=len)
    assert len(ids) >= CONTEXT
    return tokenizer.decode(ids[:CONTEXT])


def continue_text(model: pt.Model, context: str, count: int, seed: int) -> Texts:
    """Returns the model's continuations of a text, as beginnings and what follows."""
    tokenizer = model.tokenizer
    drawn = model.generate(
        [context] * count, new_tokens=GIVEN + NEW, temperature=1.0, seed=seed + 100
    )
    rows = []
    for text in map(str, drawn):
        given = tokenizer.decode(tokenizer.encode(text)[:GIVEN])
        if given and len(text) > len(given):
            rows.append({"prompt": given, "completion": text[len(given) :]})
    return rows


def distil(
    model: pt.Model,
    context: str,
    texts: Texts,
    options: argparse.Namespace,
    seed: int,
    share: float,
    folder: Path,
) -> tuple[pt.TunedModel, int]:
    """Trains the prompt, the last `share` of the steps on its own texts.

    Returns:
      the model with the prompt, and the number of tokens that it learned from.
    """
    tokenizer = model.tokenizer
    own = int(options.steps * share)
    common: dict[str, Any] = {"learning_rate": options.learning_rate, "seed": seed}
    common |= {"batch_size": ROWS, "progress": False}
    tuned, tokens, rows = None, 0, texts[HELD_OUT:]
    if own < options.steps:
        given = rows[: (options.steps - own) * ROWS]
        rows = rows[len(given) :]
        tuned = pt.tune(
            model,
            pt.SoftPrompt(length=VECTORS),
            given,
            objective=pt.ContextDistillation(context=context),
            steps=options.steps - own,
            directory=folder / "teacher",
            **common,
        )
        tokens += sum(len(tokenizer.encode(row["completion"])) for row in given)
    if own:
        tuned = pt.tune(
            model,
            pt.SoftPrompt(length=VECTORS),
            [{"prompt": row["prompt"]} for row in rows[: own * ROWS]],
            objective=pt.OnPolicyDistillation(context=context, divergence="forward"),
            rollouts=pt.Rollouts(group=1, new_tokens=NEW),
            steps=own,
            start_from=None if tuned is None else str(folder / "teacher"),
            directory=folder / "own",
            **common,
        )
        lines = (folder / "own" / ROLLOUTS_FILE).read_text().splitlines()
        tokens += sum(json.loads(line)["tokens"] for line in lines)
    assert tuned is not None
    return tuned, tokens


def measure(tuned: pt.TunedModel, held_out: Texts, seed: int) -> tuple[float, float]:
    """Returns the divergence on the teacher's continuations and on the student's."""
    prompts = [row["prompt"] for row in held_out]
    drawn = tuned.generate(prompts, new_tokens=NEW, temperature=1.0, seed=seed + 200)
    own = [
        {"prompt": prompt, "completion": str(text)}
        for prompt, text in zip(prompts, drawn, strict=True)
        if str(text)
    ]
    return tuned.evaluate(held_out)["loss"], tuned.evaluate(own)["loss"]


if __name__ == "__main__":
    main()
