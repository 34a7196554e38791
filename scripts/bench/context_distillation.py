"""Measures how much of a text's effect a prompt of 8 vectors retains.

    python -m scripts.bench.context_distillation --model DIR [--gin.STEPS=600 ...]
    python -m scripts.bench.context_distillation --model DIR --context_file story.txt \
        --slots 32

Samples texts from the frozen model after a context of about 32 tokens, and tunes a
prompt on some of them with the shipped config `runs/context_distillation`. On the other
texts it measures nats per token after BOS alone, after the context, and after the
prompt, and the fraction of the gap between the first two that the prompt closes. With
`--slots` it tunes a key/value prefix that starts from the first tokens of the context.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import h5py
import jax
import numpy as np
from flax import nnx
from rich.console import Console
from rich.table import Table

from prompt_tuning.cli.main import set_up_process, split_bindings
from prompt_tuning.config import gin_files, operative_config
from prompt_tuning.config.run import Run
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.token_weights import COMPLETION, PADDING, SEPARATOR
from prompt_tuning.data.batching.batches import stream_batches
from prompt_tuning.data.batching.plan_batches import plan_batches
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.text.tokenizers import encode_prompt
from prompt_tuning.decoding.continue_rows import continue_rows
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.models.scoring import loss_sums
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.training.distillation import make_teacher
from prompt_tuning.training.loop import train
from prompt_tuning.training.opening import open_run
from prompt_tuning.training.progress import make_reporter
from prompt_tuning.tuned.load_tuned import load_tuned
from scripts.skill_tuning import new_directory

CONTEXT = "Tim had a green frog. The frog could talk and sing. They lived on a boat"
HELD_OUT = 256
NEW_TOKENS = 32
SPLITS = ("train", "held_out")


def main(arguments: Sequence[str] | None = None) -> None:
    """Samples texts, tunes a prompt, measures it and prints the results."""
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="the stories260k folder")
    parser.add_argument("--context", default=CONTEXT)
    parser.add_argument("--context_file", type=Path, help="file of the context")
    parser.add_argument("--slots", type=int, help="length of a key/value prefix")
    parser.add_argument(
        "--texts", type=int, default=2048, help="number of training texts"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    plain, bindings = split_bindings(sys.argv[1:] if arguments is None else arguments)
    distil(parser.parse_args(plain), bindings)


def distil(arguments: argparse.Namespace, bindings: Sequence[str]) -> None:
    """Runs the experiment.

    Args:
      arguments: parsed command line.
      bindings: gin bindings that override the shipped config.
    """
    set_up_process()
    started = time.monotonic()
    if arguments.context_file is not None:
        arguments.context = arguments.context_file.read_text()
    directory = new_directory(arguments.runs, "context-distillation")
    model = open_pretrained(
        Pretrained(checkpoint=arguments.model), key=jax.random.key(0)
    )
    frozen = model.read_parameters()
    texts = sample(model, frozen, arguments)
    files = {
        name: write_rows(directory / f"{name}.hdf5", rows, model)
        for name, rows in zip(
            SPLITS, (texts[:-HELD_OUT], texts[-HELD_OUT:]), strict=True
        )
    }
    sampled = time.monotonic() - started
    run = tune(arguments, files, directory / "run", bindings)
    results = measure(run, model, frozen, arguments.context)
    results |= {"sampling": sampled, "seconds": time.monotonic() - started}
    show(Console(), results)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def context_ids(model: PromptedModel, context: str) -> list[int]:
    """Returns BOS and the tokens of a context."""
    tokenizer = model.needed_tokenizer()
    return [*encode_prompt(tokenizer, ""), *tokenizer.encode(context)]


def sample(
    model: PromptedModel, frozen: Parameters, arguments: argparse.Namespace
) -> list[list[int]]:
    """Samples continuations of the context from the model.

    Empty ones are dropped, and those that begin another text by BOS.
    """
    given = context_ids(model, arguments.context)
    continuations = continue_rows(
        model,
        frozen,
        [given] * (arguments.texts + HELD_OUT),
        Sampling(new_tokens=NEW_TOKENS, temperature=1.0, seed=arguments.seed),
        batch_size=256,
    )
    return [row for row in continuations if row and row[0] != model.config.bos_id]


def write_rows(path: Path, rows: Sequence[list[int]], model: PromptedModel) -> str:
    """Writes an HDF5 file of rows without BOS whose tokens are all learned."""
    ids = np.zeros((len(rows), NEW_TOKENS), np.int32)
    types = np.full_like(ids, PADDING)
    for index, row in enumerate(rows):
        closed = row
        if len(row) < NEW_TOKENS and model.config.eos_id is not None:
            closed = [*row, model.config.eos_id]
        ids[index, : len(closed)] = closed
        types[index, : len(row)] = COMPLETION
        types[index, len(row) : len(closed)] = SEPARATOR
    with h5py.File(path, "w") as file:
        file["input_ids"], file["token_type_ids"] = ids, types
    return str(path)


def tune(
    arguments: argparse.Namespace,
    files: dict[str, str],
    directory: Path,
    overrides: Sequence[str],
) -> Run:
    """Tunes the prompt with the shipped config."""
    values = {
        "MODEL": arguments.model,
        "CONTEXT": arguments.context,
        "TRAIN_FILES": files["train"],
        "EVALUATION_FILES": files["held_out"],
        "RUN_DIRECTORY": str(directory),
        "Run.seed": arguments.seed,
    }
    files_of_run = ["runs/context_distillation.gin"]
    if arguments.slots is not None:
        files_of_run.append("prompts/text_prefix.gin")
        prefix = {"PROMPT_LENGTH": arguments.slots, "PROMPT_TEXT": arguments.context}
        values |= prefix | {"LEARNING_RATE": 0.02}
    bindings = [f"{name} = {value!r}" for name, value in values.items()]
    run = gin_files.read_run(files_of_run, [*bindings, *overrides])
    train(
        open_run(run),
        config=operative_config.operative_config(),
        make_reporter=lambda done: make_reporter(Console(), run.steps, done),
    )
    return run


def measure(
    run: Run, model: PromptedModel, frozen: Parameters, context: str
) -> dict[str, float]:
    """Measures nats per held-out token after BOS, the context and the prompt."""
    assert run.evaluation is not None
    data = run.evaluation.data
    tuned, parameters = load_tuned(run)
    ids = context_ids(model, context)
    results = {"context tokens": float(len(ids) - 1)}
    for name, tokens in (("nothing", ids[:1]), ("context", ids)):
        teacher = make_teacher(model.config, tokens)
        results[name] = nats(data, tuned, teacher.graph, teacher.parameters(frozen))
    results["prompt"] = nats(data, tuned, tuned.graph, parameters)
    missing = results["nothing"] - results["context"]
    return results | {"closed": (results["nothing"] - results["prompt"]) / missing}


def nats(
    data: DataSource, model: PromptedModel, graph: nnx.GraphDef, parameters: Parameters
) -> float:
    """Returns the mean loss over all learned tokens, in nats."""
    examples = load_examples(data, model.interface)
    plan = plan_batches(data, model.interface, examples, shuffle=False)
    pad_id = model.config.pad_id
    total = np.zeros(3)
    for batch in stream_batches(
        examples, plan, 0, plan.batches_per_epoch, pad_id=pad_id
    ):
        total += np.array(batch_sums(graph, parameters, batch))
    return float(total[0] / total[1])


def show(console: Console, results: Mapping[str, float]) -> None:
    """Prints the table."""
    table = Table(title=f"{HELD_OUT} texts sampled after the context")
    for heading in ("after", "nats per token"):
        table.add_column(heading)
    names = {
        "nothing": "BOS alone",
        "context": f"the context, {results['context tokens']:.0f} tokens",
        "prompt": "the prompt",
    }
    for name, shown in names.items():
        table.add_row(shown, f"{results[name]:.4f}")
    console.print(table)
    console.print(
        f"{results['closed']:.1%} of the gap is closed; "
        f"{results['seconds']:.0f} seconds, "
        f"{results['sampling']:.0f} of them for sampling"
    )


batch_sums = jax.jit(loss_sums, static_argnums=0)


if __name__ == "__main__":
    main()
