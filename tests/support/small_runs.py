"""A tiny model in a folder, pairs in files, and the command that tunes a prompt.

The tokenizer is the character tokenizer of the bundled models; the weights are random.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np
import pytest

from prompt_tuning.checkpoints.run_store import checkpoint_names
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.cli.main import main
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.t5_config import t5_config
from prompt_tuning.training.metrics_log import METRICS_FILE
from scripts import random_model, skills

DECODER = ModelConfig(
    family="llama",
    architecture="decoder_only",
    vocabulary_size=len(skills.VOCABULARY),
    width=16,
    feed_forward_width=24,
    layers=1,
    heads=2,
    key_value_heads=1,
    head_width=8,
    norm="rms",
    positions="rotary",
    activation="silu",
    gated=True,
    tied_head=True,
    maximum_positions=64,
    pad_id=skills.PAD_ID,
    eos_id=skills.EOS_ID,
    bos_id=skills.BOS_ID,
)
T5 = t5_config(
    vocabulary_size=len(skills.VOCABULARY),
    width=16,
    feed_forward_width=24,
    layers=1,
    heads=2,
    head_width=8,
    pad_id=skills.PAD_ID,
    eos_id=skills.EOS_ID,
    bos_id=skills.BOS_ID,
)
LENGTH = 4
COMPILATION_CACHE = {
    "JAX_COMPILATION_CACHE_DIR": str(Path(__file__).parents[2] / ".jax_cache"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
"""Environment of processes started by tests, which share compiled programs."""


def write_model(folder: Path, config: ModelConfig) -> Path:
    """Writes an ordinary Hugging Face folder of a model with random weights."""
    random_model.write_random_model(folder, config)
    skills.save_tokenizer(folder, add_bos=config.architecture == "decoder_only")
    return folder


JOIN_MESSAGES = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def add_chat_template(folder: Path, template: str = JOIN_MESSAGES) -> Path:
    """Gives the tokenizer in a folder a chat template, by default of all messages."""
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(settings | {"chat_template": template}))
    return folder


def write_pairs(path: Path, pairs: Sequence[tuple[str, str]]) -> Path:
    """Writes a jsonl file of prompts and completions."""
    lines = [json.dumps({"prompt": p, "completion": c}) for p, c in pairs]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def write_rows(path: Path, pairs: Sequence[tuple[str, str]], length: int = 24) -> Path:
    """Writes an HDF5 file of pairs with token types and rows of one length."""
    ids = np.full((len(pairs), length), skills.PAD_ID, np.int32)
    types = np.full((len(pairs), length), 2, np.int32)
    for row, (prompt, completion) in enumerate(pairs):
        given = [skills.BOS_ID, *skills.encode(prompt)]
        completion_ids = skills.encode(completion)
        whole = [*given, *completion_ids, skills.EOS_ID]
        ids[row, : len(whole)] = whole
        types[row, : len(whole)] = [0] * len(given) + [1] * len(completion_ids) + [3]
    with h5py.File(path, "w") as file:
        file["input_ids"], file["token_type_ids"] = ids, types
    return path


@dataclasses.dataclass(frozen=True)
class Files:
    """Input files of a run."""

    decoder: Path
    t5: Path
    train: Path
    held_out: Path
    train_rows: Path
    held_out_rows: Path

    def arguments(self, directory: Path, model: Path | None = None, **macros) -> list:
        """Returns arguments of `prompt-tuning train` for a run of a few seconds."""
        values = {
            "MODEL": str(model or self.decoder),
            "TRAIN_FILES": str(self.train),
            "EVALUATION_FILES": str(self.held_out),
            "RUN_DIRECTORY": str(directory),
            "PROMPT_LENGTH": LENGTH,
            "BATCH_SIZE": 8,
            "Run.steps": 6,
            "Run.evaluate_every": 0,
            "Run.save_every": 3,
            "Run.log_every": 1,
            # Each is a separate program.
            "DataSource.buckets": 1,
        } | {name.replace("__", "."): value for name, value in macros.items()}
        bindings = [f"--gin.{name}={value!r}" for name, value in values.items()]
        return ["--gin_file=runs/first_prompt.gin", *bindings]


UPPER = [
    (f"{word}=", word.upper())
    for word in skills.splits(0, train=40, dev=1, test=1).train
]


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Files:
    """Writes both models, and forty pairs of one skill in both formats."""
    folder = tmp_path_factory.mktemp("files")
    return Files(
        decoder=write_model(folder / "decoder", DECODER),
        t5=write_model(folder / "t5", T5),
        train=write_pairs(folder / "train.jsonl", UPPER[:32]),
        held_out=write_pairs(folder / "held_out.jsonl", UPPER[32:]),
        train_rows=write_rows(folder / "train.hdf5", UPPER[:32]),
        held_out_rows=write_rows(folder / "held_out.hdf5", UPPER[32:]),
    )


def trained_prompt(directory: Path, step: int) -> bytes:
    """Returns the prompt's file after a step."""
    (file,) = (directory / FOLDER / f"checkpoint_{step}").glob("*.npy")
    return file.read_bytes()


def logged(directory: Path) -> list[dict]:
    """Returns the entries of the metrics log."""
    lines = (directory / METRICS_FILE).read_text().splitlines()
    return [json.loads(line) for line in lines]


def tune(files: Files, directory: Path, model: Path | None = None, **macros) -> int:
    """Runs the command without a page at the end; returns its exit code."""
    arguments = files.arguments(directory, model, **macros)
    return main(["train", "--no_report", *arguments])


class Killed(BaseException):
    """Simulates SIGKILL within the process: nothing catches it."""


def kill_at_call(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Raises `Killed` instead of the given disk operation, counted from 1."""
    calls = iter(range(1, 10_000))

    def counted(function):
        def called(*arguments):
            if next(calls) == number:
                raise Killed
            return function(*arguments)

        return called

    monkeypatch.setattr(os, "fsync", counted(os.fsync))
    monkeypatch.setattr(Path, "rename", counted(Path.rename))
    monkeypatch.setattr(
        checkpoint_names.shutil, "rmtree", counted(checkpoint_names.shutil.rmtree)
    )


@pytest.fixture(autouse=True)
def clean_process(monkeypatch, tmp_path_factory) -> None:
    """Lets the command set environment variables, and restores them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))
    # Changes that a command makes to these are undone; it shares compiled programs.
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    for name in COMPILATION_CACHE:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
