"""A traced program and how to run it: segments as a whole, loops layer by layer."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from prompt_tuning.streaming import streamed_loops, traced_loops
from prompt_tuning.streaming.compiled_segments import CompiledLoop, CompiledSegment
from prompt_tuning.streaming.layered_weights import LayeredWeight, LayerReader
from prompt_tuning.streaming.streamed_loops import Kept, KeptByLayer, VariableValues
from prompt_tuning.streaming.traced_loops import Values

Leaves = dict[str, Any]
"""Parameters by path: arrays, and a `LayeredWeight` for each streamed one.

Trained parameters may be streamed from host memory, and be NumPy arrays; the gradients
of both are NumPy arrays.
"""


class TracedProgram:
    """A function of trained and frozen parameters and other arrays, for one shape."""

    def __init__(
        self,
        function: Callable[..., Any],
        trained: Leaves,
        frozen: Leaves,
        arguments: Sequence[Any],
    ):
        """Traces the function; see `StreamedFunction`.

        Raises:
          InputError: if it reads a streamed parameter other than layer by layer.
        """
        abstract = jax.tree.map(_abstract, (trained, frozen))
        structures: list[Any] = []

        def recorded(*arguments_given: Any) -> Any:
            results = function(*arguments_given)
            structures.append(jax.tree.structure(results))
            return results

        closed = jax.make_jaxpr(recorded)(*abstract, *arguments)
        self._program, (self._results,) = closed.jaxpr, structures
        self._constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        leaves = jax.tree.leaves((trained, frozen, arguments))
        streamed = {
            var: leaf
            for var, leaf in zip(closed.jaxpr.invars, leaves, strict=True)
            if isinstance(leaf, LayeredWeight)
        }
        paths = {var: leaf.path for var, leaf in streamed.items()}
        parts = traced_loops.split_at_loops(closed.jaxpr, paths)
        # The trained parameters are the first argument.
        self._trained = closed.jaxpr.invars[: len(jax.tree.leaves(trained))]
        self._active = traced_loops.differentiable_variables(
            closed.jaxpr, self._trained
        )
        self._on_host = {
            var
            for var, leaf in zip(self._trained, jax.tree.leaves(trained), strict=True)
            if not isinstance(leaf, jax.Array)
        }
        traced_loops.check_collected(parts.loops, self._active)
        *segments, last = parts.segments
        gathered = {var: leaf.gathered for var, leaf in streamed.items()}
        self._stages = [
            (
                CompiledSegment(segment, self._active),
                CompiledLoop(loop, self._active, gathered),
            )
            for segment, loop in zip(segments, parts.loops, strict=True)
        ]
        self._last = CompiledSegment(last, self._active)

    def input_values(
        self, trained: Leaves, frozen: Leaves, arguments: Sequence[Any]
    ) -> VariableValues:
        """Returns the values of a micro-batch's variables before anything has run."""
        arguments = jax.device_put(arguments)
        leaves = jax.tree.leaves((trained, frozen, arguments))
        return self._constants | dict(zip(self._program.invars, leaves, strict=True))

    def forward(
        self,
        micro_batches: Sequence[VariableValues],
        reader: LayerReader,
        kept: Kept = "nothing",
    ) -> list[KeptByLayer]:
        """Runs micro-batches up to the last segment.

        Args:
          micro_batches: values of each micro-batch; new values are added.
          reader: brings the layers to the device.
          kept: which values of layers that have a gradient are kept for `backward`:
            their inputs, in host memory, or all activations, on the device.

        Returns:
          what is kept for the layers of each loop.
        """
        by_loop = []
        for segment, loop in self._stages:
            for values in micro_batches:
                outputs = segment.forward(streamed_loops.select(values, segment.inputs))
                values |= zip(segment.outputs, outputs, strict=True)
            kept_of_loop = kept if any(loop.differentiated) else "nothing"
            by_loop.append(
                streamed_loops.run_loop_forward(
                    loop, micro_batches, reader, kept_of_loop
                )
            )
        return by_loop

    def result(self, values: VariableValues) -> Any:
        """Returns the result of a micro-batch after `forward`."""
        outputs = self._last.forward(streamed_loops.select(values, self._last.inputs))
        return self._result(values, outputs)

    def start_backward(
        self, values: VariableValues, output_gradients: Any
    ) -> tuple[Any, VariableValues]:
        """Returns a micro-batch's result and the cotangents before the last segment."""
        seeds = jax.tree.leaves(output_gradients)
        cotangents: VariableValues = {}
        for atom, seed in zip(self._program.outvars, seeds, strict=True):
            if isinstance(atom, Var) and atom in self._active:
                streamed_loops.accumulate(cotangents, [atom], [seed])
        segment = self._last
        outputs, gradients = segment.value_and_gradient(
            streamed_loops.select(values, segment.inputs),
            streamed_loops.pop(cotangents, segment.targets),
        )
        self._accumulate_sources(cotangents, segment, gradients)
        return self._result(values, outputs), cotangents

    def _accumulate_sources(
        self, cotangents: VariableValues, segment: CompiledSegment, gradients: Values
    ) -> None:
        """Adds a segment's gradients, in host memory if the parameter is there."""
        moved = [
            np.array(gradient) if var in self._on_host else gradient
            for var, gradient in zip(segment.sources, gradients, strict=True)
        ]
        streamed_loops.accumulate(cotangents, segment.sources, moved)

    def _result(self, values: VariableValues, outputs: Values) -> Any:
        every = values | dict(zip(self._last.outputs, outputs, strict=True))
        leaves = [
            every[atom] if isinstance(atom, Var) else jnp.asarray(atom.val)
            for atom in self._program.outvars
        ]
        return jax.tree.unflatten(self._results, leaves)

    def backward(
        self,
        micro_batches: Sequence[VariableValues],
        cotangents: Sequence[VariableValues],
        by_loop: Sequence[KeptByLayer],
        reader: LayerReader,
        *,
        saved: bool,
    ) -> None:
        """Propagates cotangents back to the inputs; intermediate ones are consumed.

        Args:
          micro_batches: values of each micro-batch, as `forward` left them.
          cotangents: cotangents of each micro-batch, from `start_backward`.
          by_loop: the result of `forward`, which is consumed.
          reader: brings the layers to the device.
          saved: whether `forward` kept activations instead of inputs.
        """
        for (segment, loop), inputs in zip(
            self._stages[::-1], by_loop[::-1], strict=True
        ):
            if any(loop.differentiated):
                streamed_loops.run_loop_backward(
                    loop, micro_batches, cotangents, inputs, reader, saved=saved
                )
            for values, own_cotangents in zip(micro_batches, cotangents, strict=True):
                seeds = streamed_loops.pop(own_cotangents, segment.targets)
                if all(seed is None for seed in seeds):
                    continue
                gradients = segment.backward(
                    streamed_loops.select(values, segment.inputs), seeds
                )
                self._accumulate_sources(own_cotangents, segment, gradients)

    def gradient(
        self, trained: Leaves, cotangents: Sequence[VariableValues]
    ) -> dict[str, Any]:
        """Returns the gradient of the trained parameters, summed over micro-batches."""
        leaves, structure = jax.tree.flatten(trained)
        gradients = []
        for var, leaf in zip(self._trained, leaves, strict=True):
            parts = [of_batch[var] for of_batch in cotangents if var in of_batch]
            zeros = np.zeros if var in self._on_host else jnp.zeros
            start = parts[0] if parts else zeros(leaf.shape, leaf.dtype)
            gradients.append(functools.reduce(operator.add, parts[1:], start))
        return jax.tree.unflatten(structure, gradients)


def _abstract(leaf: Any) -> Any:
    return leaf.abstract if isinstance(leaf, LayeredWeight) else leaf
