"""The commands, each from a config to what is printed."""

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prompt_tuning import configuration
from prompt_tuning.cli.convert import convert
from prompt_tuning.cli.recycle import recycle
from prompt_tuning.cli.similar import similar
from prompt_tuning.cli.sweep import sweep
from prompt_tuning.decoding.sampling import temperature
from prompt_tuning.decoding.texts import continue_texts
from prompt_tuning.errors import InputError
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.parameters import Parameters, merge
from prompt_tuning.pretrained import PromptedModel
from prompt_tuning.prompts.inspection import nearest_tokens, vectors_of
from prompt_tuning.prompts.similarity import short_names
from prompt_tuning.run import Evaluation, Run
from prompt_tuning.training.ensembling import ensemble, open_ensemble
from prompt_tuning.training.evaluation import Evaluator
from prompt_tuning.training.loop import prepare
from prompt_tuning.training.loop import train as run_training
from prompt_tuning.training.progress import make_reporter
from prompt_tuning.training.run_directory import CONFIG_FILE
from prompt_tuning.training.sweep_summary import best_member
from prompt_tuning.training.tuned import load_tuned

__all__ = [
    "convert",
    "evaluate",
    "generate",
    "inspect",
    "recycle",
    "similar",
    "sweep",
    "train",
]


def train(options: argparse.Namespace) -> int:
    """Tunes a prompt, or goes on with a run that was stopped."""
    run = configuration.read_run(options.gin_file, options.bindings)
    console = Console()
    training = prepare(run)
    console.print(training.report(), markup=False, highlight=False, soft_wrap=True)
    outcome = run_training(
        training,
        config=configuration.operative_config(),
        record={"xla_flags": os.environ.get("XLA_FLAGS", "")},
        make_reporter=lambda done: make_reporter(console, run.steps, done),
    )
    if outcome.finished:
        say = functools.partial(console.print, markup=False, soft_wrap=True)
        say(f"done; the run is in {run.directory}")
        say(f"next: prompt-tuning generate --run {run.directory} TEXT")
    return 0


def evaluate(options: argparse.Namespace) -> int:
    """Measures a tuned prompt, or the model alone where `Run.prompt = None`."""
    run = _read_run(options)
    if run.evaluation is None:
        raise InputError("Run.evaluation is None: name the held-out data there")
    prompts = [Path(prompt) for prompt in options.prompts]
    if len(prompts) > 1:
        Console().print(_vote(run, run.evaluation, prompts, options.vote or "majority"))
        return 0
    if options.vote is not None:
        raise InputError("--vote is among several prompts: give --prompt several times")
    model, parameters = load_tuned(run, prompts[0] if prompts else None)
    metrics = Evaluator(model, run.evaluation)(parameters)
    table = Table("metric", "value")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4f}")
    Console().print(table)
    return 0


def _vote(
    run: Run, evaluation: Evaluation, prompts: Sequence[Path], vote: str
) -> Table:
    """What prompts are worth together, and each alone."""
    names = short_names(prompts)
    model, parameters = open_ensemble(run, prompts)
    table = Table("metric", f"together ({vote})", *map(escape, names))
    for name, outcome in ensemble(model, parameters, evaluation, vote).items():
        values = (outcome.together, *outcome.alone)
        table.add_row(name, *(f"{value:.4f}" for value in values))
    return table


def generate(options: argparse.Namespace) -> int:
    """Continues texts."""
    texts = options.texts or [line.rstrip("\n") for line in sys.stdin]
    if not texts:
        raise InputError("no text was given, as an argument or on standard input")
    run = _read_run(options)
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
    for text, continuation in zip(texts, made, strict=True):
        separator = " -> " if model.config.architecture == "encoder_decoder" else ""
        print(f"{text}{separator}{continuation}")
    return 0


def inspect(options: argparse.Namespace) -> int:
    """Prints what each prompt vector looks like."""
    model, parameters = _load(_read_run(options), options)
    tuned = merge(model.graph, parameters)
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


def _read_run(options: argparse.Namespace) -> Run:
    files, directory = list(options.gin_file), options.run
    if directory is not None:
        directory = best_member(Path(directory)) or directory
        config = Path(directory) / CONFIG_FILE
        if not config.exists():
            raise InputError(
                f"{directory} holds no {CONFIG_FILE}, so it is no run's directory"
            )
        files.insert(0, str(config))
    run = configuration.read_run(files, options.bindings)
    # The directory may have been moved since the run wrote its config.
    return (
        run if directory is None else dataclasses.replace(run, directory=str(directory))
    )


def _load(run: Run, options: argparse.Namespace) -> tuple[PromptedModel, Parameters]:
    """The run's model with its best trained parameters, or with another prompt."""
    return load_tuned(run, None if options.prompt is None else Path(options.prompt))
