"""Our side of the benchmark: a process that runs one training step per request.

    python -m scripts.bench.ours FOLDER DEVICES   # answers `workers` questions

The step and the model are the library's; nothing is tuned to the case. Programs are
compiled without a cache, so that the peak memory includes compilation. Several devices
of the CPU split the rows of the batch.
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

import prompt_tuning as pt
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.parameters import Parameters, merge, split
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.initializers import from_file
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import CompiledStep, compile_step
from scripts.bench.cases import IGNORED, Case, Rows
from scripts.bench.hlo import products
from scripts.bench.ideal import time_products
from scripts.bench.traffic import traffic
from scripts.bench.workers import Answer, peak_memory, serve, versions

LEARNING_RATE = 1e-2
TRAINED = (r".*/prompt/prompt|token_embedder/given|.*/adapters/.*",)


def main() -> None:
    """Answers questions until standard input ends."""
    devices = int(sys.argv[2])
    if devices > 1:
        jax.config.update("jax_num_cpu_devices", devices)
    step = OurStep(Path(sys.argv[1]), MeshShape() if devices > 1 else None)
    serve(
        {
            "start": functools.partial(versions, jax, flax),
            "step": step,
            "memory": peak_memory,
            "ideal": step.ideal,
        }
    )


class GivenEmbeddings(nnx.Module):
    """Replaces the token embedding, so that the embedded text can be differentiated.

    Attributes:
      embedding: the table, which can also be the head.
      given: embedded text of every batch, `[B, T, D]`.
      adapters: none; no rows of tokens are trained.
    """

    def __init__(self, table: Float[Array, "V D"], tokens: Int[np.ndarray, "B T"]):
        self.embedding = nnx.Param(table, axes=("vocab", "embed"))
        self.given = nnx.Param(table[tokens], axes=("batch", "length", "embed"))
        self.adapters = nnx.Dict()

    @property
    def table(self) -> Float[Array, "V D"]:
        """The table, which a tied head reads."""
        return self.embedding[...]

    def __call__(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the same vectors for all tokens."""
        del tokens
        return self.given[...].astype(dtype)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A model and its optimizer, ready to train a prompt.

    Attributes:
      graph: the model's structure.
      trained: parameters of the prompt.
      frozen: frozen parameters.
      optimizer: AdamW for the trained parameters.
      placement: placement of the parameters on a mesh; None on one device.
    """

    graph: nnx.GraphDef
    trained: Parameters
    frozen: Parameters
    optimizer: optax.GradientTransformation
    placement: Placement | None = None

    def compile_step(self) -> CompiledStep:
        """Returns the library's step."""
        return compile_step(
            self.graph, self.optimizer, dropout=False, placement=self.placement
        )

    def start(self) -> TrainState:
        """Returns an initial state; a copy, because the step donates its state."""
        trained = jax.tree.map(jnp.copy, self.trained)
        state = TrainState.create(trained, self.optimizer, jax.random.key(0))
        return state if self.placement is None else self.placement.put_tree(state)

    def put(self, batch: Batch) -> Batch:
        """Divides a batch among the devices of the mesh, if there is one."""
        return batch if self.placement is None else self.placement.put_batch(batch)


def prepare(
    graph: nnx.GraphDef, parameters: Parameters, placement: Placement | None = None
) -> Prepared:
    """Splits a model's parameters and creates the optimizer."""
    group = parameter_groups.ParameterGroup(
        TRAINED, parameter_groups.adamw(learning_rate=LEARNING_RATE)
    )
    labels = parameter_groups.label(parameters, [group])
    trained, frozen = parameter_groups.partition(parameters, labels)
    optimizer = parameter_groups.group_optimizer([group], labels)
    return Prepared(graph, trained, frozen, optimizer, placement)


class OurStep:
    """The model with a prompt, its state, and the batch."""

    def __init__(self, folder: Path, mesh: MeshShape | None = None):
        case = Case(**json.loads((folder / "case.json").read_text()))
        arrays = np.load(folder / "rows.npz")
        rows = Rows(arrays["tokens"], arrays["labels"])
        self.batch = make_batch(rows)
        self.prepared = prepare(*open_model(folder, case, rows, mesh))
        self.state, self.frozen = self.prepared.start(), self.prepared.frozen
        self.step = self.prepared.compile_step()

    def __call__(self) -> Answer:
        """Runs one step, timed from the batch on the host to the new state."""
        started = time.perf_counter()
        batch = self.prepared.put(self.batch)
        self.state, metrics = self.step(self.state, self.frozen, batch)
        jax.block_until_ready((self.state, metrics))
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "loss": float(metrics["loss"])}

    def ideal(self, rounds: int, torch_python: str) -> Answer:
        """Times the step's matrix products alone and estimates its memory traffic."""
        step = cast(jax.stages.Wrapped, self.step)
        compiled = step.lower(self.state, self.frozen, self.batch).compile()
        timings = time_products(
            products(compiled), lambda: self()["seconds"], rounds, torch_python
        )
        return timings | {"traffic": traffic(compiled.as_text() or "")._asdict()}


def open_model(
    folder: Path, case: Case, rows: Rows, mesh: MeshShape | None = None
) -> tuple[nnx.GraphDef, Parameters, Placement | None]:
    """Opens the model with its prompt or LoRA, or else with given embeddings.

    Only a model with a prompt can be on a mesh.
    """
    source = Pretrained(checkpoint=str(folder / "model"))
    key = jax.random.key(0)
    if case.prompt:
        initializer = from_file(folder / "prompt.npy")
        prompt = functools.partial(
            SoftPrompt, length=case.prompt, initializer=initializer
        )
        model = open_pretrained(source, Tuning(prompt=prompt), key=key, mesh=mesh)
        return model.graph, model.read_parameters(), model.placement
    if case.rank:
        tuned = pt.load_tuned(folder / "lora", folder / "model")
        return tuned.prompted.graph, tuned.parameters, None
    alone = open_pretrained(source, key=key)
    model = cast(LanguageModel, merge(alone.graph, alone.read_parameters()))
    table = model.token_embedder.embedding[...]
    model.token_embedder = cast(Any, GivenEmbeddings(table, rows.tokens))
    return *split(model), None


def make_batch(rows: Rows) -> Batch:
    """Builds a batch in which the labels that are not ignored have weight 1."""
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
