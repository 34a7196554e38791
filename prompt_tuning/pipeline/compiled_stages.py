"""The stages of a model, compiled for one shape of micro-batch."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from prompt_tuning.core.parameters import Parameters, logical_axes, merge
from prompt_tuning.losses.objective import LossSums, Objective
from prompt_tuning.pipeline.stage_devices import PER_DEVICE, WHOLE, StageDevices
from prompt_tuning.pipeline.stage_programs import Program, StagePrograms, zeros_for_sum
from prompt_tuning.pipeline.stage_worker import StageWork, StageWorker
from prompt_tuning.pipeline.staged_model import StagedModel
from prompt_tuning.pipeline.transport import Mailbox


class CompiledStages:
    """The stages of a model for one shape of micro-batch.

    Attributes:
      model: what each stage computes.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        objective: Objective,
        stages: Sequence[StageDevices],
        layers: Sequence[int],
        parameters: tuple[Mapping[str, Any], Mapping[str, jax.ShapeDtypeStruct]],
        others: tuple[Any, Any, Any],
    ):
        """Traces the stages.

        Args:
          graph: the model's structure.
          objective: the training objective.
          stages: the devices of each stage.
          layers: number of blocks of each stage.
          parameters: the trained parameters, or their shapes, and the shapes of all
            parameters without padding.
          others: a micro-batch, the dropout key and the micro-batch's number.
        """
        trained, self._shapes = parameters
        self._trained = {path: leaf.shape for path, leaf in trained.items()}
        self._axes = logical_axes(merge(graph, self._shapes))
        self._stages, first = stages, stages[0]
        self._leaf_specs = _leaf_specs(first, others)
        specs = first.specs(list(self._shapes), self._axes)

        def divide() -> StagedModel:
            local = first.local(self._padded(self._shapes), specs)
            gathered = jax.eval_shape(lambda p: first.gather(p, self._axes), local)
            leaves, structure = jax.tree.flatten(others)
            own = [
                first.local(x, spec)
                for x, spec in zip(leaves, self._leaf_specs, strict=True)
            ]
            own_others = jax.tree.unflatten(structure, own)
            return StagedModel(graph, objective, gathered, own_others, layers)

        self.model = first.trace(divide)
        self._leaves = jax.tree.leaves(others)
        self._key_leaves = jax.tree.leaves(others[1])
        self._take: dict[tuple[int, bool], Any] = {}
        self._join = jax.jit(self._joined)
        self._build()

    def _padded(self, shapes: Mapping[str, Any]) -> dict[str, Any]:
        """Returns shapes with the vocabulary padded as a mesh needs it."""
        layout = self._stages[0].layout
        if layout is None:
            return dict(shapes)
        return {
            path: jax.ShapeDtypeStruct(
                layout.padded_shape(self._axes[path].names, x.shape), x.dtype
            )
            for path, x in shapes.items()
        }

    def _build(self) -> None:
        """Traces and cuts the stages in order; each states what it sends on."""
        model, programs, prefix_programs = self.model, [], []
        carried: list[Any] = []
        prefix_carried: list[Any] = []
        self._own_frozen: list[dict[str, Any]] = [{} for _ in self._stages]
        for stage in range(len(self._stages)):
            part, prefix = model.micro_batch[stage], {}
            if model.prefix is not None:
                others = self._key_leaves, [WHOLE] * len(self._key_leaves)
                inputs = {"carried": prefix_carried, "prefix": {}}
                own = self._programs(stage, model.prefix[stage], inputs, others)
                prefix_programs.append(own)
                prefix_carried = own.outputs["carried"]
                prefix = {
                    i: own.outputs["outputs"][i] for i in sorted(part.prefix.values())
                }
            inputs = {"carried": carried, "prefix": prefix}
            others = self._leaves, self._leaf_specs
            programs.append(self._programs(stage, part, inputs, others))
            carried = programs[-1].outputs["carried"]
        self.programs, self.prefix_programs = programs, prefix_programs
        self._zeros = [self._zero_program(stage) for stage in range(len(programs))]
        self._finish = [self._finish_program(stage) for stage in range(len(programs))]

    def _programs(self, stage: int, part: Any, inputs: Any, others: Any) -> Any:
        leaves, specs = others
        read = sorted(part.others.values())
        own = self._stage_shapes(stage)
        return StagePrograms(
            self._stages[stage],
            part,
            self._axes,
            (self._select(own, True), self._select(own, False)),
            inputs,
            ({i: leaves[i] for i in read}, {i: specs[i] for i in read}),
        )

    def _select(self, parameters: Mapping[str, Any], trained: bool) -> dict[str, Any]:
        return {p: x for p, x in parameters.items() if (p in self._trained) == trained}

    def _stage_shapes(self, stage: int) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = {}
        for path in self.model.paths(stage):
            whole, rows = self._shapes[path], self.model.rows_of(stage, path)
            first = range(*rows.indices(whole.shape[0])) if whole.shape else ()
            shape = (len(first), *whole.shape[1:]) if whole.shape else ()
            shapes[path] = jax.ShapeDtypeStruct(shape, whole.dtype)
        return self._padded(shapes)

    def _zero_program(self, stage: int) -> Program:
        """Returns the program of the sums before the first micro-batch."""
        devices, programs = self._stages[stage], self.programs[stage]
        read = sorted(self.model.micro_batch[stage].prefix.values())
        kinds = {}
        if self.prefix_programs:
            outputs = self.prefix_programs[stage].outputs["outputs"]
            kinds = {i: outputs[i] for i in read}

        def zeros() -> tuple[Any, Any]:
            return zeros_for_sum(programs.weights), zeros_for_sum(kinds)

        return Program(
            devices.map(zeros, (), PER_DEVICE), sharding=devices.sharding(PER_DEVICE)
        )

    def _finish_program(self, stage: int) -> Program:
        """Returns the program that sums what the devices of a stage computed."""
        devices, axes = self._stages[stage], self._axes
        paths = list(self._select(self._stage_shapes(stage), True))
        specs = devices.specs(paths, axes)

        def finish(weights: Any, total: Any, sums: Any) -> tuple[Any, Any]:
            _, pull_back = jax.vjp(lambda x: devices.gather(x, axes), weights)
            (gradient,) = pull_back(total)
            return devices.reduce(gradient, axes, sums)

        mapped = devices.map(finish, (specs, PER_DEVICE, PER_DEVICE), (specs, WHOLE))

        def padded(weights: Any, total: Any, sums: Any) -> tuple[Any, Any]:
            gradient, sums = mapped(weights, total, sums)
            return {p: self._pad_home(p, x) for p, x in gradient.items()}, sums

        return Program(padded)

    def _pad_home(self, path: str, gradient: Any) -> Any:
        """Pads a gradient like the whole parameter instead of like the stage's."""
        if not gradient.ndim:
            return gradient
        sizes, home = self._shapes[path].shape, self._trained[path]
        if path in self.model.sliced:
            rows = gradient.shape[0]
            sizes, home = (rows, *sizes[1:]), (rows, *home[1:])
        return _pad(gradient[tuple(map(slice, sizes))], home)

    def place_frozen(self, frozen: Parameters) -> None:
        """Puts each stage's frozen parameters on its devices."""
        self._own_frozen = [
            self._place(stage, frozen, False) for stage in range(len(self._stages))
        ]

    def _place(
        self, stage: int, parameters: Parameters, trained: bool
    ) -> dict[str, Any]:
        devices = self._stages[stage]
        shapes = self._select(self._stage_shapes(stage), trained)
        key = (stage, trained)
        if key not in self._take:
            rows = {path: self.model.rows_of(stage, path) for path in shapes}
            whole = {path: self._shapes[path] for path in shapes}
            take = functools.partial(_take_rows, rows, whole, shapes)
            self._take[key] = jax.jit(take)
        own = self._take[key]({path: parameters[path] for path in shapes})
        return devices.put(own, devices.specs(list(own), self._axes))

    def workers(
        self,
        trained: Parameters,
        others: Sequence[Sequence[Any]],
        key_leaves: Sequence[Any],
        share: jax.Array,
    ) -> list[StageWorker]:
        """Places a step's arrays and returns the workers of the stages."""
        mailboxes = [Mailbox(devices) for devices in self._stages]
        boxes = [None, *mailboxes, None]
        return [
            StageWorker(
                self.programs[stage],
                self.prefix_programs[stage] if self.prefix_programs else None,
                self._work(stage, trained, others, key_leaves, share),
                (boxes[stage], mailboxes[stage], boxes[stage + 2]),
            )
            for stage in range(len(self._stages))
        ]

    def _work(
        self,
        stage: int,
        trained: Parameters,
        others: Sequence[Sequence[Any]],
        key_leaves: Sequence[Any],
        share: jax.Array,
    ) -> StageWork:
        devices = self._stages[stage]
        read = sorted(self.model.micro_batch[stage].others.values())
        total, prefix_total = self._zeros[stage]()
        prefix_others = {}
        if self.model.prefix is not None:
            used = sorted(self.model.prefix[stage].others.values())
            prefix_others = {i: devices.put(key_leaves[i], WHOLE) for i in used}
        return StageWork(
            self._place(stage, trained, True),
            self._own_frozen[stage],
            [
                {i: devices.put(leaves[i], self._leaf_specs[i]) for i in read}
                for leaves in others
            ],
            prefix_others,
            self._loss_gradients(stage, share),
            total,
            prefix_total,
        )

    def _loss_gradients(self, stage: int, share: jax.Array) -> dict[int, Any]:
        """Returns the gradient at each of the loss's sums, on every device."""
        devices, outputs = self._stages[stage], self.programs[stage].outputs["outputs"]
        if not outputs:
            return {}
        value = np.asarray(share)
        gradients = {}
        for i, shape in devices.shapes(outputs).items():
            # The first of the sums is the loss; nothing is propagated from the others.
            number = value if i == 0 else 0
            whole = np.full(shape.shape, number, shape.dtype)
            gradients[i] = devices.put(whole, PER_DEVICE)
        return gradients

    def collect(
        self, trained: Parameters, workers: Sequence[StageWorker]
    ) -> tuple[Parameters, LossSums]:
        """Joins the stages' gradients to whole arrays, placed as the parameters."""
        parts: list[dict[str, Any]] = []
        sums: Any = {}
        for stage, worker in enumerate(workers):
            # Of each sum, one number per micro-batch.
            outputs = {
                i: [worker.outputs[j][i] for j in sorted(worker.outputs)]
                for i in self.programs[stage].outputs["outputs"]
            }
            gradient, sums = self._finish[stage](worker.weights, worker.total, outputs)
            homes = {path: trained[path].sharding for path in gradient}
            parts.append(jax.device_put(gradient, homes))
        home = next(iter(trained.values())).sharding
        sums = jax.device_put(sums, _replicated(home))
        gradient, totals = self._join(trained, parts, sums)
        return gradient, LossSums(*totals)

    def _joined(self, trained: Parameters, parts: Any, sums: Any) -> Any:
        """Joins the stages' gradients, and adds parts of the same rows."""
        gradient = {}
        for path, like in trained.items():
            own = [part[path] for part in parts if path in part]
            if path in self.model.sliced:
                whole = jnp.concatenate(own)
            else:
                whole = functools.reduce(jnp.add, own, jnp.zeros(like.shape))
            gradient[path] = whole.astype(like.dtype)
        return gradient, [jnp.sum(jnp.stack(sums[i])) for i in sorted(sums)]


def _leaf_specs(devices: StageDevices, others: tuple) -> list[PartitionSpec]:
    """Returns the PartitionSpec of each array of a micro-batch, a key and an index."""
    batch, key, index = (len(jax.tree.leaves(part)) for part in others)
    return [devices.rows] * batch + [WHOLE] * (key + index)


def _take_rows(
    rows: Mapping[str, slice],
    whole: Mapping[str, jax.ShapeDtypeStruct],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    parameters: Parameters,
) -> Parameters:
    """Returns some rows of parameters, padded as a stage needs them.

    Args:
      rows: the rows.
      whole: shapes of the parameters without padding.
      shapes: shapes of the results.
      parameters: the parameters, maybe padded for another mesh.
    """
    taken = {}
    for path, array in parameters.items():
        part = array[tuple(map(slice, whole[path].shape))]
        part = part[rows[path]] if array.ndim else part
        taken[path] = _pad(part, shapes[path].shape)
    return taken


def _pad(array: Any, shape: Sequence[int]) -> Any:
    """Pads an array with zeros to a shape."""
    sizes = zip(shape, array.shape, strict=True)
    return jnp.pad(array, [(0, padded - size) for padded, size in sizes])


def _replicated(sharding: Any) -> Any:
    mesh = getattr(sharding, "mesh", None)
    return sharding if mesh is None else NamedSharding(mesh, WHOLE)
