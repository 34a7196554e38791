"""Predict the device memory of a run's step before its weights are read.

The step is compiled for shapes only, and the compiler reports the memory that it needs
in addition to its arguments. The only weights read are those that initialize a prompt.
"""

import collections
import dataclasses
import math
import statistics
import time
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from prompt_tuning.config.run import Run
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import describe, split
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.batching.batches import stream_batches
from prompt_tuning.data.examples.example_groups import ExampleGroups
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.pretrained.prompted_model import build_tuned
from prompt_tuning.training.pipeline_setup import largest_batch
from prompt_tuning.training.run_plan import RunPlan, plan_run, refuse_stages
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import CompiledStep, compile_step

UNTIMED_STEPS, TIMED_STEPS = 1, 5


@dataclasses.dataclass(frozen=True)
class ArgumentBytes:
    """Bytes of a step's arguments per device."""

    frozen: int
    trained: int
    optimizer: int
    batch: int


@dataclasses.dataclass(frozen=True)
class StepBytes:
    """Bytes that a compiled step needs per device.

    Attributes:
      activations: temporary memory, besides arguments and results.
      host: temporary host memory, if arrays are offloaded.
      total: arguments, results and temporary memory.
    """

    activations: int
    host: int
    total: int


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """A run without its weights, and its largest batch."""

    run_plan: RunPlan
    examples: Examples | ExampleGroups
    batch: Batch
    shape: str

    @classmethod
    def open(cls, run: Run) -> "MemoryEstimate":
        """Opens a run and finds its largest batch."""
        if run.model.weights != "device":
            raise InputError(
                f"Pretrained.weights is {shown(run.model.weights)}: memory is "
                "predicted for runs whose weights are on the device; give "
                f"{how_to_set('Pretrained.weights', 'device')}"
            )
        refuse_stages(run, "`prompt-tuning memory` without --pipeline")
        run_plan = plan_run(run)
        examples = run_plan.examples()
        plan = run_plan.batch_plan(examples)
        index, planned = largest_batch(plan)
        pad_id = run_plan.model.config.pad_id
        (batch,) = stream_batches(
            examples, plan, index, index + 1, pad_id=pad_id, prefetch=0
        )
        targets = "" if planned.same_tokens else f" + {planned.target_length} targets"
        shape = f"{len(planned.rows)} rows of {planned.input_length} tokens{targets}"
        return cls(run_plan, examples, batch, shape)

    @property
    def devices(self) -> int:
        """Number of devices that the run uses."""
        layout = self.run_plan.model.layout
        return 1 if layout is None else layout.mesh.size

    @property
    def published(self) -> dict[str, int]:
        """Number of kernels per format that are held as published."""
        plan = self.run_plan.model.plan
        stores = (plan.stores[path] for path in plan.quantized if path in plan.stores)
        return dict(collections.Counter(map(str, stores)))

    def step(self, how: Rematerialization | None) -> CompiledStep:
        """Returns the step with all stacks rematerialized; None keeps the run's way."""
        run_plan = self.run_plan if how is None else self._with(how)
        return compile_step(
            run_plan.model.graph,
            run_plan.optimizer,
            dropout=run_plan.model.drops,
            objective=run_plan.objective(self.examples),
            placement=run_plan.model.placement,
        )

    def _with(self, how: Rematerialization) -> RunPlan:
        model = self.run_plan.model
        config = dataclasses.replace(
            model.config, rematerialization=how, encoder_rematerialization=None
        )
        graph, _ = self._describe(config)
        changed = dataclasses.replace(model, config=config, graph=graph)
        return dataclasses.replace(self.run_plan, model=changed)

    def _describe(
        self, config: ModelConfig
    ) -> tuple[nnx.GraphDef, Mapping[str, jax.ShapeDtypeStruct]]:
        """Returns the structure and parameter shapes of the run's model."""
        prompts, tuning = self.run_plan.model.prompts, self.run_plan.run.tuning
        return describe(
            lambda key: split(build_tuned(key, config, prompts, tuning)),
            jax.random.key(0),
        )

    def frozen_bytes(self, dtype: str) -> int:
        """Returns the bytes of all frozen parameters for a `parameter_dtype`."""
        config = dataclasses.replace(
            self.run_plan.model.config, parameter_dtype=dtype, stores=()
        )
        _, shapes = self._describe(config)
        labels = self.run_plan.labels
        return sum(_bytes(leaf) for path, leaf in shapes.items() if path not in labels)

    def arguments(self) -> tuple[TrainState, dict[str, Any], Batch]:
        """Returns the step's arguments as shapes, dtypes and shardings."""
        run_plan, placement = self.run_plan, self.run_plan.model.placement
        shapes = {
            path: jax.ShapeDtypeStruct(
                leaf.shape if placement is None else placement.padded_shape(path),
                leaf.dtype,
            )
            for path, leaf in run_plan.model.plan.abstract.items()
        }
        _, frozen = parameter_groups.partition(shapes, run_plan.labels)
        trained = {
            path: jax.ShapeDtypeStruct(shapes[path].shape, jnp.float32)
            for path in run_plan.labels
        }
        key = jax.eval_shape(lambda: jax.random.key(0))
        state = jax.eval_shape(
            lambda trained, key: TrainState.create(trained, run_plan.optimizer, key),
            trained,
            key,
        )
        batch = jax.tree.map(_shape, self.batch)
        if placement is None:
            return state, frozen, batch
        # The compiler chooses the shardings of the state, as in a run.
        compiled = jax.jit(placement.constrain).lower(state).compile()
        layout = placement.layout
        rows = NamedSharding(layout.mesh, layout.batch_spec(batch))
        return (
            jax.tree.map(_placed, state, compiled.output_shardings),
            {path: _placed(x, placement.shardings[path]) for path, x in frozen.items()},
            jax.tree.map(lambda x: _placed(x, rows), batch),
        )

    def argument_bytes(self) -> ArgumentBytes:
        """Returns the bytes of the step's arguments per device."""
        state, frozen, batch = self.arguments()
        trees = (frozen, state.trained, state.optimizer_state, batch)
        return ArgumentBytes(
            *(sum(map(_bytes, jax.tree.leaves(tree))) for tree in trees)
        )

    def step_bytes(self, how: Rematerialization | None) -> StepBytes:
        """Returns the bytes that the step needs with a rematerialization of all stacks.

        `how` is None for the run's own rematerialization.
        """
        compiled = self.step(how).lower(*self.arguments()).compile()
        # Typed as a list of programs, or None on an unknown device.
        analysis = cast(Any, compiled.memory_analysis())
        inputs = analysis.argument_size_in_bytes + analysis.generated_code_size_in_bytes
        # Donated arguments are reused for outputs.
        outputs = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
        temporary = analysis.temp_size_in_bytes
        return StepBytes(
            temporary, analysis.host_temp_size_in_bytes, inputs + outputs + temporary
        )


class StepTimer:
    """Times steps of a run; reads the frozen model once."""

    def __init__(self, estimate: MemoryEstimate):
        self._estimate = estimate
        self._parameters = estimate.run_plan.model.read_parameters()
        _, self._frozen = parameter_groups.partition(
            self._parameters, estimate.run_plan.labels
        )

    def seconds(self, how: Rematerialization | None) -> float:
        """Returns the median time of a step of the largest batch.

        `how` rematerializes all stacks; None for the run's own setting.
        """
        step = self._estimate.step(how)
        run_plan, batch = self._estimate.run_plan, self._estimate.batch
        state = run_plan.start(self._parameters)
        if run_plan.model.placement is not None:
            batch = run_plan.model.placement.put_batch(batch)
        durations = []
        for _ in range(UNTIMED_STEPS + TIMED_STEPS):
            start = time.perf_counter()
            state, metrics = step(state, self._frozen, batch)
            jax.block_until_ready((state, metrics))
            durations.append(time.perf_counter() - start)
        return statistics.median(durations[UNTIMED_STEPS:])


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _placed(leaf: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _bytes(leaf: Any) -> int:
    shape = leaf.shape
    if leaf.sharding is not None:
        shape = leaf.sharding.shard_shape(shape)
    return int(jnp.dtype(leaf.dtype).itemsize) * math.prod(shape)
