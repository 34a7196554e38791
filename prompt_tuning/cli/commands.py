"""The commands, each from a config to what is printed."""

import argparse
import dataclasses
import functools
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from prompt_tuning.cli.convert import convert
from prompt_tuning.cli.evaluate import evaluate
from prompt_tuning.cli.memory import memory
from prompt_tuning.cli.recycle import recycle
from prompt_tuning.cli.run_options import check_processes, idle_devices, read_run
from prompt_tuning.cli.similar import similar
from prompt_tuning.cli.sweep import sweep
from prompt_tuning.config import gin_files
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.generation.sampling import temperature
from prompt_tuning.generation.text_generation import continue_texts
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.processes.group import is_first, run_on_first
from prompt_tuning.prompts.tools.inspection import nearest_tokens, vectors_of
from prompt_tuning.training.loop import train as run_training
from prompt_tuning.training.progress import make_reporter
from prompt_tuning.training.run_plan import open_run
from prompt_tuning.tuned.load_tuned import load_tuned

__all__ = [
    "convert",
    "evaluate",
    "generate",
    "inspect",
    "memory",
    "recycle",
    "similar",
    "sweep",
    "train",
]


def train(options: argparse.Namespace) -> int:
    """Tunes a prompt, or goes on with a run that was stopped."""
    run = gin_files.read_run(options.gin_file, options.bindings)
    check_processes(options, run)
    console = Console(quiet=not is_first())
    training = open_run(run)
    for text in (training.report(), *idle_devices(run)):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    outcome = run_training(
        training,
        config=gin_files.operative_config(),
        record={"xla_flags": os.environ.get("XLA_FLAGS", "")},
        make_reporter=lambda done: make_reporter(console, run.steps, done),
    )
    if outcome.finished:
        say = functools.partial(console.print, markup=False, soft_wrap=True)
        how = "done" if outcome.reason is None else "stopped early"
        say(f"{how}; the run is in {run.directory}")
        say(f"next: prompt-tuning generate --run {run.directory} TEXT")
    return 0


def generate(options: argparse.Namespace) -> int:
    """Continues texts."""
    texts = run_on_first(lambda: _texts(options))
    run = read_run(options)
    check_processes(options, run)
    model, parameters = _load(run, options)
    task = options.prompt_id
    made = continue_texts(
        model,
        parameters,
        texts,
        new_tokens=options.new_tokens,
        batch_size=options.batch_size,
        sampler=temperature(options.temperature),
        seed=options.seed,
        prompt_ids=None if task is None else [task] * len(texts),
        template=run.source.token_template(model),
    )
    if not is_first():
        return 0
    for text, continuation in zip(texts, made, strict=True):
        separator = " -> " if model.config.architecture == "encoder_decoder" else ""
        print(f"{text}{separator}{continuation}")
    return 0


def _texts(options: argparse.Namespace) -> list[str]:
    """The texts to continue.

    Raises:
      InputError: if there is none.
    """
    texts = options.texts or [line.rstrip("\n") for line in sys.stdin]
    if not texts:
        raise InputError("no text was given, as an argument or on standard input")
    return texts


def inspect(options: argparse.Namespace) -> int:
    """Prints what each prompt vector looks like."""
    # What one process looks at needs no mesh, and no devices for one.
    run = dataclasses.replace(read_run(options), mesh=None)
    model, parameters = _load(run, options)
    everything: Any = model.weight_storage.abstract_streamed() | parameters
    tuned = merge(model.graph, everything)
    assert isinstance(tuned, LanguageModel)
    prompts = vectors_of(tuned.prompts())
    if not prompts:
        raise InputError("the run has no prompt vectors to look at")
    embeddings = np.asarray(parameters["token_embedder/embedding"], np.float32)
    for title, prompt in prompts.items():
        table = Table("vector", "norm", "nearest tokens (cosine)", title=title)
        rows = nearest_tokens(prompt, embeddings, options.nearest)
        for index, row in enumerate(rows):
            near = zip(row.tokens, row.similarities, strict=True)
            shown = "  ".join(f"{_token(model, t)} {s:.2f}" for t, s in near)
            table.add_row(str(index), f"{row.norm:.3f}", shown)
        Console().print(table)
    return 0


def _token(model: PromptedModel, token: int) -> str:
    if model.tokenizer is None or token >= model.tokenizer.vocabulary_size:
        return f"#{token}"
    return repr(model.tokenizer.token(token))


def _load(run: Run, options: argparse.Namespace) -> tuple[PromptedModel, Parameters]:
    """The run's model with its best trained parameters, or with another prompt."""
    return load_tuned(run, None if options.prompt is None else Path(options.prompt))
