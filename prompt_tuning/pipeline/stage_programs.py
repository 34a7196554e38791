"""The compiled programs of one stage: forward pass, p1, p2, and both together."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import ParameterAxes
from prompt_tuning.pipeline.split_backward import SplitBackward
from prompt_tuning.pipeline.stage_devices import PER_DEVICE, StageDevices
from prompt_tuning.pipeline.staged_model import StagePart

Tree = Any
Shapes = Mapping[str, jax.ShapeDtypeStruct]

# JAX's caches and the model's context variables are filled while a program is traced.
_tracing = threading.Lock()


class Program:
    """A function that its first run compiles, while other stages may run."""

    def __init__(
        self,
        function: Callable[..., Tree],
        donated: tuple[int, ...] = (),
        sharding: Any = None,
    ):
        """Jits a function; nothing is traced yet.

        The results take over the memory of the `donated` arguments. `sharding` is that
        of the results; by default they stay on the arguments' devices.
        """
        self._jitted = jax.jit(function, donate_argnums=donated, out_shardings=sharding)
        self._compiled: Any = None

    def __call__(self, *arguments: Tree) -> Tree:
        """Runs the program."""
        if self._compiled is None:
            self._compiled = self.lower(*arguments).compile()
        return self._compiled(*arguments)

    def lower(self, *arguments: Tree) -> jax.stages.Lowered:
        """Returns the lowered program, before it is compiled."""
        with _tracing:
            return self._jitted.lower(*arguments)

    def as_text(self) -> str:
        """Returns the compiled program, after it has run once."""
        return self._compiled.as_text()


class StagePrograms:
    """Programs of one stage, for a micro-batch or for the prefix.

    In their arguments, `weights` and `frozen` are the stage's parameters, `others` the
    other arguments of the model by index. What is carried, kept, held or handed over is
    separate for each device.

    Attributes:
      weights: shapes of the trained parameters on one device, gathered.
      outputs: shapes of the forward pass's results on one device.
      left_bytes: bytes on each device that an operation leaves for later ones, by its
        kind, after it has run once.
      forward: `(weights, frozen, inputs, others) -> (outputs, kept)`.
      input_gradient: p1, `(weights, frozen, others, prefix, kept, gradients, prefix
        sum) -> (carried gradients, prefix sum, handed)`; the sum is donated.
      weight_gradient: p2, `(weights, frozen, others, prefix, held, handed, sum) ->
        sum`; the sum is donated.
      backward: both, `(weights, frozen, others, prefix, kept, gradients, prefix sum,
        sum) -> (carried gradients, prefix sum, sum)`; the sums are donated.
    """

    def __init__(
        self,
        devices: StageDevices,
        part: StagePart,
        axes: Mapping[str, ParameterAxes],
        parameters: tuple[Shapes, Shapes],
        inputs: Tree,
        others: tuple[Mapping[int, Any], Mapping[int, Any]],
    ):
        """Traces and cuts the stage; programs are compiled when they first run.

        Args:
          devices: the stage's devices.
          part: what the stage computes.
          axes: logical axes of each parameter.
          parameters: shapes of the stage's trained and frozen parameters.
          inputs: shapes of `carried` and `prefix` on one device.
          others: other arguments of the model by index, and their PartitionSpecs.
        """
        self._devices, self._axes = devices, axes
        self.left_bytes: dict[str, int] = {}
        specs = [devices.specs(list(group), axes) for group in parameters]
        leaves, leaf_specs = others
        own_leaves = {i: devices.local(x, leaf_specs[i]) for i, x in leaves.items()}

        def cut() -> tuple[Any, SplitBackward]:
            local = [
                jax.eval_shape(self._gather, devices.local(group, group_specs))
                for group, group_specs in zip(parameters, specs, strict=True)
            ]
            known = (local[1], own_leaves)
            # The prefix is there until the end of the step.
            lasting = len(jax.tree.leaves(inputs["prefix"]))
            return local[0], SplitBackward(part, local[0], inputs, known, lasting)

        self.weights, self.cut = devices.trace(cut)
        self.outputs = self.cut.outputs
        known = [*specs, leaf_specs]
        self._known_specs, self._others = known, own_leaves
        # The parameters and the prefix are the same for all micro-batches.
        carried = len(jax.tree.leaves(inputs["carried"]))
        self._varying = [
            *[False] * sum(map(len, parameters)),
            *[True] * (len(leaves) + carried),
            *[False] * self.cut.lasting,
        ]
        arrays = PER_DEVICE
        self.forward = self._program(
            self._forward, [specs[0], specs[1], arrays, leaf_specs]
        )
        self.input_gradient = self._program(self._p1, [*known, *[arrays] * 4], (6,))
        self.weight_gradient = self._program(self._p2, [*known, *[arrays] * 4], (6,))
        self.backward = self._program(self._both, [*known, *[arrays] * 5], (6, 7))

    def joined_gradient(self, larger: "StagePrograms", count: int) -> Program:
        """Returns p2 for many micro-batches, as one product per weight.

        It is `weight_gradient` for lists of `others`, of `held` and of `handed`.

        Raises:
          InputError: if part of p2 cannot be joined.
        """
        part_cut, all_rows = self.cut, larger.cut
        held = MicrobatchConcatenation(
            part_cut.held_shapes, all_rows.held_shapes, self._held_differs()
        )
        handed = MicrobatchConcatenation(
            part_cut.handed_shapes,
            all_rows.handed_shapes,
            [True] * len(part_cut.handed_shapes),
        )
        names = [i for i, reads in self._reads_late(larger).items() if reads]
        others = MicrobatchConcatenation(
            [self._others[i] for i in names],
            [larger._others[i] for i in names],
            [True] * len(names),
        )

        def p2(weights, frozen, leaves, prefix, kept, from_p1, total):
            read = others([[part[i] for i in names] for part in leaves])
            rows = {**leaves[0], **dict(zip(names, read, strict=True))}
            known = (self._gather(frozen), rows, prefix)
            gradient = all_rows.weight_gradient(
                self._gather(weights), known, held(kept), handed(from_p1)
            )
            return _add(total, gradient)

        weights, frozen, leaf_specs = self._known_specs
        arguments = [weights, frozen, [leaf_specs] * count, *[PER_DEVICE] * 4]
        return self._program(p2, arguments, (6,))

    def _reads_late(self, larger: "StagePrograms") -> dict[int, bool]:
        """Tells which of the other arguments p2 reads, by index."""
        reads = larger.cut.p2_reads()
        first = len(reads) - len(self._others) - self.cut.lasting
        of_others = reads[first : first + len(self._others)]
        return dict(zip(sorted(self._others), of_others, strict=True))

    def _held_differs(self) -> list[bool]:
        """Tells which arrays that p2 reads differ among micro-batches."""
        # The gradient of the loss is the same for all.
        return self.cut.held_with(self._varying, gradients=not self.outputs["outputs"])

    @property
    def kept_bytes(self) -> int:
        """Bytes that each device keeps per micro-batch for its backward pass."""
        return self.cut.kept_bytes()

    @property
    def postponed_bytes(self) -> int:
        """Bytes that each device holds per micro-batch from p1 to p2.

        The gradient of the loss is the same for all micro-batches and does not count.
        """
        return self.cut.postponed_bytes(gradients=not self.outputs["outputs"])

    def _program(
        self, function: Callable, specs: Sequence[Any], donated: tuple[int, ...] = ()
    ) -> Program:
        return Program(self._devices.map(function, specs, PER_DEVICE), donated)

    def _gather(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        return self._devices.gather(parameters, self._axes)

    def _forward(self, weights: Tree, frozen: Tree, inputs: Tree, others: Tree) -> Tree:
        known = (self._gather(frozen), others)
        return self.cut.forward(self._gather(weights), inputs, known)

    def _p1(self, weights, frozen, others, prefix, kept, gradients, prefix_sum):
        known = (self._gather(frozen), others, prefix)
        gradient, handed = self.cut.input_gradient(
            self._gather(weights), known, kept, gradients
        )
        return gradient["carried"], _add(prefix_sum, gradient["prefix"]), handed

    def _p2(self, weights, frozen, others, prefix, held, handed, total):
        known = (self._gather(frozen), others, prefix)
        gradient = self.cut.weight_gradient(self._gather(weights), known, held, handed)
        return _add(total, gradient)

    def _both(
        self, weights, frozen, others, prefix, kept, gradients, prefix_sum, total
    ):
        known = (self._gather(frozen), others, prefix)
        gradient, weight_gradient = self.cut.backward(
            self._gather(weights), known, kept, gradients
        )
        prefix_sum = _add(prefix_sum, gradient["prefix"])
        return gradient["carried"], prefix_sum, _add(total, weight_gradient)


def _add(total: Tree, added: Tree) -> Tree:
    return jax.tree.map(jnp.add, total, added)


def zeros_for_sum(shapes: Tree) -> Tree:
    """Returns zeros to add gradients of these shapes to, at least float32."""
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), shapes
    )


class MicrobatchConcatenation:
    """Joins the lists of arrays of micro-batches along their rows.

    An array's rows are the dimension that is larger in a trace of all rows.
    """

    def __init__(
        self, each: Sequence[Any], joined: Sequence[Any], differs: Sequence[bool]
    ):
        """Finds the rows of each array.

        Args:
          each: shapes of a micro-batch's arrays.
          joined: shapes of the same arrays with the rows of all micro-batches.
          differs: whether each array differs among micro-batches, so that it cannot be
            joined without rows.

        Raises:
          InputError: if an array cannot be joined.
        """
        self._axes = [
            _axis(one.shape, other.shape)
            for one, other in zip(each, joined, strict=True)
        ]
        if any(
            axis is None and other
            for axis, other in zip(self._axes, differs, strict=True)
        ):
            raise InputError(
                "Pipeline.joined_p2 is True, but the gradients of weights need sums "
                "or random numbers of each micro-batch (a prompt that all rows share, "
                "dropout), which cannot be joined: set it to False"
            )

    def __call__(self, parts: Sequence[Sequence[Any]]) -> list[Any]:
        """Joins the arrays of each micro-batch."""
        return [
            arrays[0] if axis is None else jnp.concatenate(arrays, axis)
            for axis, arrays in zip(self._axes, zip(*parts, strict=True), strict=True)
        ]


def _axis(part: Sequence[int], joined: Sequence[int]) -> int | None:
    """Returns the dimension in which two shapes differ; None if they are equal."""
    pairs = enumerate(zip(part, joined, strict=True))
    return next((axis for axis, (one, whole) in pairs if one != whole), None)
