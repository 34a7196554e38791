"""Measures a prompt's gain on real text: a model of children's stories reads GSM8K.

    python -m scripts.bench.gsm8k --model DIR --train train.jsonl --test test.jsonl

Tunes 20 vectors on the training questions with the shipped config `runs/gsm8k_stories`,
then prints nats per token of the first 300 test questions, whole and truncated at 128
tokens, without and with the prompt.
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from prompt_tuning.cli.main import set_up_process
from prompt_tuning.config import gin_files, operative_config
from prompt_tuning.config.run import DataSource, Run
from prompt_tuning.data.batching.batches import build_batch
from prompt_tuning.data.batching.plan_batches import plan_batches
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.models.scoring import token_losses
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.training.loop import train
from prompt_tuning.training.opening import open_run
from prompt_tuning.training.progress import make_reporter
from prompt_tuning.tuned.load_tuned import load_tuned

CUT = 128


def main() -> None:
    """Tunes a prompt, measures it and prints the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", required=True, help="the stories260k folder")
    parser.add_argument("--train", required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--test", required=True, help="GSM8K's test.jsonl")
    parser.add_argument("--run", default="runs/gsm8k_stories", help="run directory")
    arguments = parser.parse_args()
    set_up_process()
    values = {
        "MODEL": arguments.model,
        "TRAIN_FILES": arguments.train,
        "EVALUATION_FILES": arguments.test,
        "RUN_DIRECTORY": arguments.run,
    }
    bindings = [f"{name} = {value!r}" for name, value in values.items()]
    run = gin_files.read_run(["runs/gsm8k_stories.gin"], bindings)
    console = Console()
    train(
        open_run(run),
        config=operative_config.operative_config(),
        make_reporter=lambda done: make_reporter(console, run.steps, done),
    )
    assert run.evaluation is not None
    data = run.evaluation.data
    alone = nats_per_token(dataclasses.replace(run, prompt=None), data)
    tuned = nats_per_token(run, data)
    for part, before, after in zip(
        ("whole", f"first {CUT}"), alone, tuned, strict=True
    ):
        console.print(f"{part:>9}: {before:.3f} without a prompt, {after:.3f} with it")
    size = sum(f.stat().st_size for f in Path(run.directory).rglob("*prompt.npy"))
    console.print(f"size of the prompt files: {size:,} bytes")


def nats_per_token(run: Run, data: DataSource) -> tuple[float, float]:
    """Returns the mean nats over whole questions, and over their first tokens."""
    model, parameters = load_tuned(run)
    examples = load_examples(data, model.interface)
    plan = plan_batches(data, model.interface, examples, shuffle=False)
    sums = np.zeros(4)
    losses = compiled_losses(model)
    for planned in plan.one_pass():
        batch = build_batch(examples, planned, model.config.pad_id)
        nll = np.asarray(losses(parameters, batch).nll)
        weights = batch.loss_weights
        early = weights * (batch.loss_positions <= CUT)
        sums += [(nll * weights).sum(), weights.sum(), (nll * early).sum(), early.sum()]
    return float(sums[0] / sums[1]), float(sums[2] / sums[3])


def compiled_losses(model: PromptedModel):
    """Returns a jitted function that computes the loss at every position."""
    return jax.jit(
        lambda parameters, batch: token_losses(model.graph, parameters, batch)
    )


if __name__ == "__main__":
    main()
