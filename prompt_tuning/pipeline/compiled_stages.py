"""The stages of a model, compiled for one shape of micro-batch.

With virtual stages, each chunk of blocks is compiled like a stage. Chunks are in the
order of the model, and a stage's chunks have the same devices.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from prompt_tuning.core.parameters import Parameters, logical_axes, merge
from prompt_tuning.losses.objective import LossSums, Objective
from prompt_tuning.pipeline.stage_devices import PER_DEVICE, WHOLE, StageDevices
from prompt_tuning.pipeline.stage_joins import (
    FrozenParts,
    GradientJoin,
    on_all_processes,
    take_rows,
)
from prompt_tuning.pipeline.stage_programs import Program, StagePrograms, zeros_for_sum
from prompt_tuning.pipeline.stage_worker import HeldMemory, StageWork, StageWorker
from prompt_tuning.pipeline.staged_model import StagedModel
from prompt_tuning.pipeline.transport import StepLinks, mailboxes


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
          stages: the devices of each stage, or of each chunk.
          layers: number of blocks of each.
          parameters: the trained parameters, or their shapes, and the shapes of all
            parameters without padding.
          others: a micro-batch, the dropout key and the micro-batch's index.
        """
        trained, self._shapes = parameters
        self._trained = frozenset(trained)
        self._axes = logical_axes(merge(graph, self._shapes))
        self._stages, first = stages, stages[0]
        self._leaf_specs = _leaf_specs(first, others)
        specs = first.specs(list(self._shapes), self._axes)

        def divide() -> StagedModel:
            local = first.local(self._padded(self._shapes), specs)
            gathered = jax.eval_shape(lambda p: first.gather(p, self._axes), local)
            leaves, structure = jax.tree.flatten(others)
            stage_shapes = [
                first.local(x, spec)
                for x, spec in zip(leaves, self._leaf_specs, strict=True)
            ]
            own_others = jax.tree.unflatten(structure, stage_shapes)
            return StagedModel(graph, objective, gathered, own_others, layers)

        self.model = first.trace(divide)
        self._leaves = jax.tree.leaves(others)
        self._key_leaves = jax.tree.leaves(others[1])
        self._take: dict[tuple[int, tuple[str, ...]], Any] = {}
        self._frozen: Parameters | None = None
        self._joined_gradients: dict[tuple[int, int], Program] = {}
        self._join = GradientJoin(
            stages, self.model, self._axes, self._shapes, self._padded(self._shapes)
        )
        self._build()

    def _padded(self, shapes: Mapping[str, Any]) -> dict[str, Any]:
        """Pads the vocabulary in shapes as a mesh needs it."""
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
        model, programs, prefix_programs = self.model, [], []
        self._own_shapes = [self._stage_shapes(s) for s in range(len(self._stages))]
        carried: list[Any] = []
        prefix_carried: list[Any] = []
        self._own_frozen: list[dict[str, Any]] = [{} for _ in self._stages]
        for stage in range(len(self._stages)):
            part, prefix = model.micro_batch[stage], {}
            if model.prefix is not None:
                others = self._key_leaves, [WHOLE] * len(self._key_leaves)
                inputs = {"carried": prefix_carried, "prefix": {}}
                stage_programs = self._programs(
                    stage, model.prefix[stage], inputs, others
                )
                prefix_programs.append(stage_programs)
                prefix_carried = stage_programs.outputs["carried"]
                prefix = {
                    i: stage_programs.outputs["outputs"][i]
                    for i in sorted(part.prefix.values())
                }
            inputs = {"carried": carried, "prefix": prefix}
            others = self._leaves, self._leaf_specs
            programs.append(self._programs(stage, part, inputs, others))
            carried = programs[-1].outputs["carried"]
        self.programs, self.prefix_programs = programs, prefix_programs
        self._zeros = [self._zero_program(stage) for stage in range(len(programs))]
        self._finish: dict[tuple[int, int], Program] = {}

    def _programs(self, stage: int, part: Any, inputs: Any, others: Any) -> Any:
        leaves, specs = others
        indices = sorted(part.others.values())
        stage_shapes = self._own_shapes[stage]
        return StagePrograms(
            self._stages[stage],
            part,
            self._axes,
            (self._select(stage_shapes, True), self._select(stage_shapes, False)),
            inputs,
            ({i: leaves[i] for i in indices}, {i: specs[i] for i in indices}),
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
        indices = sorted(self.model.micro_batch[stage].prefix.values())
        kinds = {}
        if self.prefix_programs:
            outputs = self.prefix_programs[stage].outputs["outputs"]
            kinds = {i: outputs[i] for i in indices}

        def zeros() -> tuple[Any, Any]:
            return zeros_for_sum(programs.weights), zeros_for_sum(kinds)

        return Program(
            devices.map(zeros, (), PER_DEVICE), sharding=devices.sharding(PER_DEVICE)
        )

    def _finish_program(self, stage: int) -> Program:
        """Returns the program that sums the results of a stage's devices.

        It is compiled for a fixed number of micro-batches. Its results have a first
        dimension for stages, of size 1, and as many rows as the largest stage's.
        """
        devices, axes = self._stages[stage], self._axes
        paths = list(self._select(self._own_shapes[stage], True))
        specs = devices.specs(paths, axes)

        def finish(weights: Any, total: Any, sums: Any) -> tuple[Any, Any]:
            _, pull_back = jax.vjp(lambda x: devices.gather(x, axes), weights)
            (gradient,) = pull_back(total)
            gradient, sums = devices.reduce(gradient, axes, sums)
            parts = {p: self._join.part(p, x) for p, x in gradient.items()}
            return parts, {
                i: jnp.stack(parts_of_sum)[None] for i, parts_of_sum in sums.items()
            }

        results = {path: PartitionSpec(None, *spec) for path, spec in specs.items()}
        arguments = (specs, PER_DEVICE, PER_DEVICE)
        return Program(devices.map(finish, arguments, (results, WHOLE)))

    def place_frozen(self, frozen: Parameters, placed: "FrozenParts") -> None:
        """Puts each stage's frozen parameters on its devices, unless they are there.

        Newly placed parts are added to `placed`.
        """
        if self._frozen is frozen:
            return
        for stage in range(len(self._stages)):
            shapes = self._select(self._own_shapes[stage], False)
            device = self._stages[stage].device
            rows_of = {path: self.model.rows_of(stage, path) for path in shapes}
            key = {p: (device, p, rows.start, rows.stop) for p, rows in rows_of.items()}
            known = placed.of(frozen)
            missing = [path for path in shapes if key[path] not in known]
            rows = self._own_rows(stage, {path: frozen[path] for path in missing})
            new = self._put_own(stage, rows)
            known |= {key[path]: new.get(path) for path in missing}
            self._own_frozen[stage] = {path: known[key[path]] for path in shapes}
        self._frozen = frozen

    def _own_rows(self, stage: int, parameters: Parameters) -> Parameters:
        """Returns a stage's rows of some parameters; all processes take part."""
        shapes = {path: self._own_shapes[stage][path] for path in parameters}
        key = (stage, tuple(parameters))
        if key not in self._take:
            rows = {path: self.model.rows_of(stage, path) for path in shapes}
            whole = {path: self._shapes[path] for path in shapes}
            take = functools.partial(take_rows, rows, whole, shapes)
            self._take[key] = jax.jit(take, out_shardings=on_all_processes(parameters))
        return self._take[key](parameters)

    def _put_own(self, stage: int, rows: Parameters) -> dict[str, Any]:
        """Puts a stage's rows on its devices; nothing if another process has them."""
        devices = self._stages[stage]
        if not devices.is_local:
            return {}
        return devices.put(rows, devices.specs(list(rows), self._axes))

    def workers(
        self,
        trained: Parameters,
        others: Sequence[Sequence[Any]],
        key_leaves: Sequence[Any],
        share: jax.Array,
        links: StepLinks | None = None,
    ) -> list[StageWorker | None]:
        """Returns the workers of the stages, which place a step's arrays.

        Stages of other processes have no worker here.
        """
        messages = [self._messages(stage) for stage in range(len(self._stages))]
        boxes = [None, *mailboxes(self._stages, messages, links), None]
        memory = {devices.device: HeldMemory() for devices in self._stages}
        workers: list[StageWorker | None] = []
        for stage, devices in enumerate(self._stages):
            paths = self._select(self._own_shapes[stage], True)
            rows = self._own_rows(stage, {path: trained[path] for path in paths})
            if not devices.is_local:
                workers.append(None)
                continue
            place = functools.partial(
                self._work, stage, rows, others, key_leaves, share
            )
            prefix = self.prefix_programs[stage] if self.prefix_programs else None
            neighbors = boxes[stage], boxes[stage + 1], boxes[stage + 2]
            programs = self.programs[stage]
            held = memory[devices.device]
            workers.append(StageWorker(stage, programs, prefix, place, neighbors, held))
        return workers

    def _messages(self, stage: int) -> dict[str, tuple[int, Any]]:
        """Returns the sender and the shapes of each kind of message to a stage."""
        kinds: dict[str, tuple[int, Any]] = {}
        groups = {"hidden": self.programs, "prefix": self.prefix_programs}
        backward = {"hidden": "gradient", "prefix": "prefix gradient"}
        for name, programs in groups.items():
            if not programs:
                continue
            if stage > 0:
                kinds[name] = stage - 1, programs[stage - 1].outputs["carried"]
            if stage + 1 < len(self._stages):
                carried = programs[stage].outputs["carried"]
                kinds[backward[name]] = stage + 1, carried
        return kinds

    def _work(
        self,
        stage: int,
        rows: Parameters,
        others: Sequence[Sequence[Any]],
        key_leaves: Sequence[Any],
        share: jax.Array,
    ) -> StageWork:
        """Places everything that a stage reads in a step."""
        devices, model = self._stages[stage], self.model
        indices = sorted(model.micro_batch[stage].others.values())
        prefix = model.prefix[stage].others.values() if model.prefix else ()
        loss_gradients = self._loss_gradients(stage, share)
        placed = devices.put(
            (
                rows,
                [{i: leaves[i] for i in indices} for leaves in others],
                {i: key_leaves[i] for i in sorted(prefix)},
                loss_gradients,
            ),
            (
                devices.specs(list(rows), self._axes),
                [{i: self._leaf_specs[i] for i in indices}] * len(others),
                dict.fromkeys(sorted(prefix), WHOLE),
                dict.fromkeys(loss_gradients, PER_DEVICE),
            ),
        )
        weights, own_others, prefix_others, loss_gradients = placed
        return StageWork(
            weights,
            self._own_frozen[stage],
            own_others,
            prefix_others,
            loss_gradients,
            self._zeros[stage],
        )

    def _loss_gradients(self, stage: int, share: jax.Array) -> dict[int, np.ndarray]:
        """Returns the gradient at each of the loss's sums, for every device."""
        devices, outputs = self._stages[stage], self.programs[stage].outputs["outputs"]
        if not outputs:
            return {}
        # The first of the sums is the loss; nothing is propagated from the others.
        value = np.asarray(share)
        return {
            i: np.full(shape.shape, value if i == 0 else 0, shape.dtype)
            for i, shape in devices.shapes(outputs).items()
        }

    def joined_gradient(
        self, stage: int, larger: "CompiledStages", count: int
    ) -> Program:
        """Returns a stage's p2 for many micro-batches as one product.

        Raises:
          InputError: if part of p2 cannot be joined.
        """
        if (stage, count) not in self._joined_gradients:
            programs = larger.programs[stage]
            self._joined_gradients[stage, count] = self.programs[stage].joined_gradient(
                programs, count
            )
        return self._joined_gradients[stage, count]

    def collect(
        self, trained: Parameters, workers: Sequence[StageWorker | None]
    ) -> tuple[Parameters, LossSums]:
        """Joins the stages' gradients into whole arrays, placed like the parameters."""
        parts, sums = {}, {}
        for stage, worker in enumerate(workers):
            if worker is None:
                continue
            # Of each sum, one number per micro-batch.
            outputs = {
                i: [worker.outputs[j][i] for j in sorted(worker.outputs)]
                for i in self.programs[stage].outputs["outputs"]
            }
            key = stage, len(worker.outputs)
            if key not in self._finish:
                self._finish[key] = self._finish_program(stage)
            parts[stage], sums[stage] = self._finish[key](
                worker.work.weights, worker.total, outputs
            )
        counts = [len(worker.work.others) for worker in workers if worker is not None]
        kinds = self.programs[-1].outputs["outputs"]
        shapes = {
            i: jax.ShapeDtypeStruct((1, counts[0]), kinds[i].dtype)
            for i in sorted(kinds)
        }
        gradient, totals = self._join(trained, parts, shapes, sums)
        return gradient, LossSums(*totals)


def _leaf_specs(devices: StageDevices, others: tuple) -> list[PartitionSpec]:
    """Returns the PartitionSpec of each array of a micro-batch, a key and an index."""
    batch, key, index = (len(jax.tree.leaves(part)) for part in others)
    return [devices.rows] * batch + [WHOLE] * (key + index)
