"""What a run's step takes of a device's memory, known before anything is read.

The step is compiled for shapes alone; the compiler says what it needs beside its
arguments. Nothing of the frozen model is read for it but what a prompt starts from.
"""

import dataclasses
import statistics
import time
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from prompt_tuning.config.run import Run
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.compiled_step import CompiledStep
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import describe, split
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.data.batching.batch_plan import BatchPlan, PlannedBatch
from prompt_tuning.data.batching.batches import stream_batches
from prompt_tuning.data.examples.candidates import Candidates
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.pretrained.prompted_model import build_tuned
from prompt_tuning.training.run_plan import RunPlan, plan_run
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import compile_step

UNTIMED_STEPS, TIMED_STEPS = 1, 5


@dataclasses.dataclass(frozen=True)
class ArgumentBytes:
    """Bytes on each device of what a step is given.

    Attributes:
      frozen: parameters.
      trained: parameters.
      optimizer: the optimiser's state.
      batch: the largest batch.
    """

    frozen: int
    trained: int
    optimizer: int
    batch: int


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes that a compiled step needs on each device.

    Attributes:
      activations: beside what it is given and what it gives.
      host: in the host's memory, where something is moved there.
      total: of everything, at most at once.
    """

    activations: int
    host: int
    total: int


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """A run that is described, and the largest of its batches.

    Attributes:
      opened: the run.
      examples: of training.
      batch: its largest.
      shape: rows, inputs and targets of that, for people.
    """

    opened: RunPlan
    examples: Examples | Candidates
    batch: Batch
    shape: str

    @classmethod
    def open(cls, run: Run) -> "MemoryEstimate":
        """Opens a run, and finds its largest batch.

        Raises:
          InputError: if the run cannot be used, or keeps its weights elsewhere than on
            the device.
        """
        if run.model.weights != "device":
            raise InputError(
                f"Pretrained.weights is {run.model.weights!r}: memory is predicted of "
                "runs whose weights are on the device; set it to 'device'"
            )
        opened = plan_run(run)
        examples = opened.examples()
        plan = opened.batch_plan(examples)
        index, planned = largest_batch(plan)
        pad_id = opened.model.config.pad_id
        (batch,) = stream_batches(
            examples, plan, index, index + 1, pad_id=pad_id, prefetch=0
        )
        targets = "" if planned.same_tokens else f" + {planned.target_length} targets"
        shape = f"{len(planned.rows)} rows of {planned.input_length} tokens{targets}"
        return cls(opened, examples, batch, shape)

    @property
    def devices(self) -> int:
        """How many devices the run computes on."""
        layout = self.opened.model.layout
        return 1 if layout is None else layout.mesh.size

    def configured_rematerialization(self) -> Rematerialization:
        """What the run itself rematerialises, in its decoder."""
        return self.opened.model.config.rematerialization

    def step(self, how: Rematerialization | None) -> CompiledStep:
        """The run's step, with a rematerialisation of every stack; None for its own."""
        opened = self.opened if how is None else self._with(how)
        return compile_step(
            opened.model.graph,
            opened.optimizer,
            dropout=opened.model.drops,
            objective=opened.objective(self.examples),
            placement=opened.model.placement,
        )

    def _with(self, how: Rematerialization) -> RunPlan:
        model = self.opened.model
        config = dataclasses.replace(
            model.config, rematerialization=how, encoder_rematerialization=None
        )
        tuning = self.opened.run.tuning
        graph, _ = describe(
            lambda key: split(build_tuned(key, config, model.prompts, tuning)),
            jax.random.key(0),
        )
        changed = dataclasses.replace(model, config=config, graph=graph)
        return dataclasses.replace(self.opened, model=changed)

    def arguments(self) -> tuple[TrainState, dict[str, Any], Batch]:
        """What the step is given, as shapes, types and places on a mesh."""
        opened, placement = self.opened, self.opened.model.placement
        shapes = {
            path: jax.ShapeDtypeStruct(
                leaf.shape if placement is None else placement.padded_shape(path),
                leaf.dtype,
            )
            for path, leaf in opened.model.plan.abstract.items()
        }
        _, frozen = parameter_groups.partition(shapes, opened.labels)
        trained = {
            path: jax.ShapeDtypeStruct(shapes[path].shape, jnp.float32)
            for path in opened.labels
        }
        key = jax.eval_shape(lambda: jax.random.key(0))
        state = jax.eval_shape(
            lambda trained, key: TrainState.create(trained, opened.optimizer, key),
            trained,
            key,
        )
        batch = jax.tree.map(_shape, self.batch)
        if placement is None:
            return state, frozen, batch
        told = jax.jit(placement.constrain).lower(state).compile()
        layout = placement.layout
        rows = NamedSharding(layout.mesh, layout.batch_spec(batch))
        return (
            jax.tree.map(_placed, state, told.output_shardings),
            {path: _placed(x, placement.shardings[path]) for path, x in frozen.items()},
            jax.tree.map(lambda x: _placed(x, rows), batch),
        )

    def argument_bytes(self) -> ArgumentBytes:
        """Bytes on each device of what the step is given."""
        state, frozen, batch = self.arguments()
        trees = (frozen, state.trained, state.optimizer_state, batch)
        return ArgumentBytes(
            *(sum(map(_bytes, jax.tree.leaves(tree))) for tree in trees)
        )

    def step_bytes(self, how: Rematerialization | None) -> StepBytes:
        """Bytes that the step needs, with a rematerialisation of every stack.

        Args:
          how: None for the run's own.
        """
        compiled = self.step(how).lower(*self.arguments()).compile()
        # A list where there are several programs, and None on an unknown device.
        found = cast(Any, compiled.memory_analysis())
        given = found.argument_size_in_bytes + found.generated_code_size_in_bytes
        fresh = found.output_size_in_bytes - found.alias_size_in_bytes
        temporary = found.temp_size_in_bytes
        return StepBytes(
            temporary, found.host_temp_size_in_bytes, given + fresh + temporary
        )


def largest_batch(plan: BatchPlan) -> tuple[int, PlannedBatch]:
    """The batch of an epoch that has most tokens, padding included, and its index."""

    def tokens(planned: PlannedBatch) -> tuple[int, int]:
        length = planned.input_length
        if not planned.same_tokens:
            length += planned.target_length
        rows = len(planned.rows)
        return rows * length, rows * planned.positions

    return max(enumerate(plan.one_pass()), key=lambda found: tokens(found[1]))


class StepTimer:
    """Times steps of a prospect, with the frozen model read once."""

    def __init__(self, prospect: MemoryEstimate):
        """Reads the model.

        Raises:
          InputError: if the checkpoint turns out to be damaged.
        """
        self._prospect = prospect
        self._parameters = prospect.opened.model.read_parameters()
        _, self._frozen = parameter_groups.partition(
            self._parameters, prospect.opened.labels
        )

    def seconds(self, how: Rematerialization | None) -> float:
        """The median time of a step of the largest batch.

        Args:
          how: a rematerialisation of every stack; None for the run's own.
        """
        step = self._prospect.step(how)
        opened, batch = self._prospect.opened, self._prospect.batch
        state = opened.start(self._parameters)
        if opened.model.placement is not None:
            batch = opened.model.placement.put_batch(batch)
        taken = []
        for _ in range(UNTIMED_STEPS + TIMED_STEPS):
            begun = time.perf_counter()
            state, metrics = step(state, self._frozen, batch)
            jax.block_until_ready((state, metrics))
            taken.append(time.perf_counter() - begun)
        return statistics.median(taken[UNTIMED_STEPS:])


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _placed(leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _bytes(leaf: Any) -> int:
    """Of one device's part."""
    shape = leaf.shape
    if leaf.sharding is not None:
        shape = leaf.sharding.shard_shape(shape)
    return int(jnp.dtype(leaf.dtype).itemsize) * int(jnp.prod(jnp.asarray(shape)))
