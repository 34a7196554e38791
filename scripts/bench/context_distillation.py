"""A prompt of 8 vectors in place of a text: how much of what the text says it keeps.

    python -m scripts.bench.context_distillation --model DIR [--gin.STEPS=600 ...]

Samples texts from the frozen model behind a context of about 32 tokens, tunes a prompt
by the shipped config `runs/context_distillation` on some of them, and measures the
others: nats a token behind BOS alone, behind the context, and behind the prompt. The
share of the way from the first to the second is what the prompt has closed.
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
from prompt_tuning.config import gin_files
from prompt_tuning.config.run import Run
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.token_weights import COMPLETION, PADDING, SEPARATOR
from prompt_tuning.data.batching.batches import stream_batches
from prompt_tuning.data.batching.plan_batches import plan_batches
from prompt_tuning.data.data_source import DataSource
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.text.tokenizers import encode_prompt
from prompt_tuning.generation.sampling import temperature_sampler
from prompt_tuning.generation.text_generation import continue_all
from prompt_tuning.models.scoring import loss_sums
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.pretrained.source import Pretrained
from prompt_tuning.training.distillation import make_teacher
from prompt_tuning.training.loop import train
from prompt_tuning.training.progress import make_reporter
from prompt_tuning.training.run_plan import open_run
from prompt_tuning.tuned.load_tuned import load_tuned
from scripts.quickstart import new_directory

CONTEXT = "Tim had a green frog. The frog could talk and sing. They lived on a boat"
HELD_OUT = 256
NEW_TOKENS = 32
SPLITS = ("train", "held_out")


def main(arguments: Sequence[str] | None = None) -> None:
    """Samples, tunes, measures, prints."""
    parser = argparse.ArgumentParser(
        description=str(__doc__).partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="the stories260k folder")
    parser.add_argument("--context", default=CONTEXT)
    parser.add_argument("--texts", type=int, default=2048, help="to train on")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    plain, bindings = split_bindings(sys.argv[1:] if arguments is None else arguments)
    distil(parser.parse_args(plain), bindings)


def distil(arguments: argparse.Namespace, bindings: Sequence[str]) -> None:
    """The work of the command.

    Args:
      arguments: of the command.
      bindings: of gin, over those of the shipped config.
    """
    set_up_process()
    started = time.monotonic()
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
    found = measure(run, model, frozen, arguments.context)
    found |= {"sampling": sampled, "seconds": time.monotonic() - started}
    show(Console(), found)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


def context_ids(model: PromptedModel, context: str) -> list[int]:
    """BOS and the tokens of a context."""
    tokenizer = model.needed_tokenizer()
    return [*encode_prompt(tokenizer, ""), *tokenizer.encode(context)]


def sample(
    model: PromptedModel, frozen: Parameters, arguments: argparse.Namespace
) -> list[list[int]]:
    """Continuations of the context, drawn from the model; those not empty."""
    given = context_ids(model, arguments.context)
    made = continue_all(
        model,
        frozen,
        [given] * (arguments.texts + HELD_OUT),
        new_tokens=NEW_TOKENS,
        batch_size=256,
        sampler=temperature_sampler(1.0),
        seed=arguments.seed,
    )
    return [row for row in made if row]


def write_rows(path: Path, rows: Sequence[list[int]], model: PromptedModel) -> str:
    """An HDF5 file of rows without BOS, all of whose tokens are learned."""
    ids = np.zeros((len(rows), NEW_TOKENS), np.int32)
    types = np.full_like(ids, PADDING)
    for place, row in enumerate(rows):
        closed = row
        if len(row) < NEW_TOKENS and model.config.eos_id is not None:
            closed = [*row, model.config.eos_id]
        ids[place, : len(closed)] = closed
        types[place, : len(row)] = COMPLETION
        types[place, len(row) : len(closed)] = SEPARATOR
    with h5py.File(path, "w") as file:
        file["input_ids"], file["token_type_ids"] = ids, types
    return str(path)


def tune(
    arguments: argparse.Namespace,
    files: dict[str, str],
    directory: Path,
    overrides: Sequence[str],
) -> Run:
    """Tunes the prompt by the shipped config."""
    values = {
        "MODEL": arguments.model,
        "CONTEXT": arguments.context,
        "TRAIN_FILES": files["train"],
        "EVALUATION_FILES": files["held_out"],
        "RUN_DIRECTORY": str(directory),
        "Run.seed": arguments.seed,
    }
    bindings = [f"{name} = {value!r}" for name, value in values.items()]
    run = gin_files.read_run(["runs/context_distillation.gin"], [*bindings, *overrides])
    train(
        open_run(run),
        config=gin_files.operative_config(),
        make_reporter=lambda done: make_reporter(Console(), run.steps, done),
    )
    return run


def measure(
    run: Run, model: PromptedModel, frozen: Parameters, context: str
) -> dict[str, float]:
    """Nats a token of the held-out texts behind BOS, the context and the prompt."""
    assert run.evaluation is not None
    data = run.evaluation.data
    tuned, parameters = load_tuned(run)
    ids = context_ids(model, context)
    found = {"context tokens": float(len(ids) - 1)}
    for name, tokens in (("nothing", ids[:1]), ("context", ids)):
        teacher = make_teacher(model.config, tokens)
        found[name] = nats(data, tuned, teacher.graph, teacher.parameters(frozen))
    found["prompt"] = nats(data, tuned, tuned.graph, parameters)
    missing = found["nothing"] - found["context"]
    return found | {"closed": (found["nothing"] - found["prompt"]) / missing}


def nats(
    data: DataSource, model: PromptedModel, graph: nnx.GraphDef, parameters: Parameters
) -> float:
    """The mean over all learned tokens of what each costs."""
    examples = load_examples(data, model.interface)
    plan = plan_batches(data, model.interface, examples, shuffle=False)
    pad_id = model.config.pad_id
    total = np.zeros(3)
    for batch in stream_batches(
        examples, plan, 0, plan.batches_per_epoch, pad_id=pad_id
    ):
        total += np.array(batch_sums(graph, parameters, batch))
    return float(total[0] / total[1])


def show(console: Console, found: Mapping[str, float]) -> None:
    """One table."""
    table = Table(title=f"nats a token of {HELD_OUT} texts drawn behind the context")
    for heading in ("behind", "nats a token"):
        table.add_column(heading)
    names = {
        "nothing": "BOS alone",
        "context": f"the context, {found['context tokens']:.0f} tokens",
        "prompt": "the prompt",
    }
    for name, shown in names.items():
        table.add_row(shown, f"{found[name]:.4f}")
    console.print(table)
    console.print(
        f"{found['closed']:.1%} of the gap is closed; {found['seconds']:.0f} seconds, "
        f"{found['sampling']:.0f} of them for sampling"
    )


batch_sums = jax.jit(loss_sums, static_argnums=0)


if __name__ == "__main__":
    main()
