"""Our side of the benchmark: a process that does its training step when asked.

    python -m scripts.bench.ours FOLDER   # answers `workers` questions

The step is the library's, on a model opened by the library; nothing is tuned to the
case. Programs are compiled without a cache, so that compiling counts in the memory.
"""

import dataclasses
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any, cast

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int

from prompt_tuning.core import parameter_groups
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.compiled_step import CompiledStep
from prompt_tuning.core.parameters import Parameters, merge, split
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.source import Pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.initializers import from_file
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import compile_step
from scripts.bench.cases import IGNORED, Case, Rows
from scripts.bench.hlo import products
from scripts.bench.ideal import time_products
from scripts.bench.workers import Answer, peak_memory, serve

LEARNING_RATE = 1e-2
TRAINED = (r".*/prompt/prompt|token_embedder/given",)


def main() -> None:
    """Serves."""
    step = OurStep(Path(sys.argv[1]))
    serve(
        {
            "start": step.start,
            "step": step,
            "memory": peak_memory,
            "ideal": step.ideal,
        }
    )


class GivenEmbeddings(nnx.Module):
    """Stands for the token embedding where embedded text itself is differentiated.

    Attributes:
      embedding: the table, in case it is the head too.
      given: what every batch is embedded to, `[B, T, D]`.
    """

    def __init__(self, table: Float[Array, "V D"], tokens: Int[np.ndarray, "B T"]):
        self.embedding = nnx.Param(table, axes=("vocab", "embed"))
        self.given = nnx.Param(table[tokens], axes=("batch", "length", "embed"))

    def __call__(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """The vectors given, whatever the tokens."""
        del tokens
        return self.given[...].astype(dtype)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What trains a prompt on a model.

    Attributes:
      graph: the model's structure.
      trained: the prompt.
      frozen: the weights.
      optimizer: AdamW of what is trained.
    """

    graph: nnx.GraphDef
    trained: Parameters
    frozen: Parameters
    optimizer: optax.GradientTransformation

    def compile_step(self) -> CompiledStep:
        """The library's step; each call gives one with programs of its own."""
        return compile_step(self.graph, self.optimizer, dropout=False)

    def start(self) -> TrainState:
        """A state before the first step; a copy, for the step uses up what it gets."""
        trained = jax.tree.map(jnp.copy, self.trained)
        return TrainState.create(trained, self.optimizer, jax.random.key(0))


def prepare(graph: nnx.GraphDef, parameters: Parameters) -> Prepared:
    """Splits a model's parameters and starts the optimiser."""
    group = parameter_groups.ParameterGroup(
        TRAINED, parameter_groups.adamw(learning_rate=LEARNING_RATE)
    )
    labels = parameter_groups.label(parameters, [group])
    trained, frozen = parameter_groups.partition(parameters, labels)
    optimizer = parameter_groups.group_optimizer([group], labels)
    return Prepared(graph, trained, frozen, optimizer)


class OurStep:
    """The model with a prompt, its state, and the batch."""

    def __init__(self, folder: Path):
        case = Case(**json.loads((folder / "case.json").read_text()))
        arrays = np.load(folder / "rows.npz")
        rows = Rows(arrays["tokens"], arrays["labels"])
        self.batch = make_batch(rows)
        prepared = prepare(*open_model(folder, case, rows))
        self.state, self.frozen = prepared.start(), prepared.frozen
        self.step = prepared.compile_step()

    def start(self) -> Answer:
        """What runs."""
        return {"versions": {p.__name__: p.__version__ for p in (jax, flax)}}

    def __call__(self) -> Answer:
        """One step, timed from the batch on the host to the new state."""
        started = time.perf_counter()
        self.state, metrics = self.step(self.state, self.frozen, self.batch)
        jax.block_until_ready((self.state, metrics))
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "loss": float(metrics["loss"])}

    def ideal(self, rounds: int) -> Answer:
        """The time of the step's matrix products alone; see `ideal`."""
        step = cast(jax.stages.Wrapped, self.step)
        compiled = step.lower(self.state, self.frozen, self.batch).compile()
        return time_products(products(compiled), lambda: self()["seconds"], rounds)


def open_model(folder: Path, case: Case, rows: Rows) -> tuple[nnx.GraphDef, Parameters]:
    """The model with its prompt, or, without one, with given embeddings."""
    source = Pretrained(checkpoint=str(folder / "model"))
    key = jax.random.key(0)
    if case.prompt:
        initializer = from_file(folder / "prompt.npy")
        prompt = functools.partial(
            SoftPrompt, length=case.prompt, initializer=initializer
        )
        model = open_pretrained(source, Tuning(prompt=prompt), key=key)
        return model.graph, model.read_parameters()
    alone = open_pretrained(source, key=key)
    model = cast(LanguageModel, merge(alone.graph, alone.read_parameters()))
    table = model.token_embedder.embedding[...]
    model.token_embedder = cast(Any, GivenEmbeddings(table, rows.tokens))
    return split(model)


def make_batch(rows: Rows) -> Batch:
    """The rows as a batch: the labels that are not ignored carry weight 1."""
    count, length = rows.tokens.shape
    learned = rows.labels != IGNORED
    most = int(learned.sum(axis=1).max())
    # A stable sort puts each row's learned positions first, in their order.
    positions = np.argsort(~learned, axis=1, kind="stable")[:, :most]
    decoder_only = rows.labels.shape == rows.tokens.shape and bool(
        (rows.labels == rows.tokens)[learned].all()
    )
    return Batch(
        tokens=rows.tokens.astype(np.int32),
        lengths=np.full(count, length, np.int32),
        targets=(rows.tokens if decoder_only else rows.labels).astype(np.int32),
        loss_positions=positions.astype(np.int32),
        loss_weights=np.take_along_axis(learned, positions, 1).astype(np.float32),
        prefix_lengths=np.zeros(count, np.int32),
    )


if __name__ == "__main__":
    main()
