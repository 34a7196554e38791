"""Runs a function and its backward pass with weights that are not in memory."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from prompt_tuning.streaming.layered_weights import LayeredWeight, LayerReader
from prompt_tuning.streaming.traced_program import Leaves, TracedProgram


class StreamedFunction:
    """A function of a model's parameters that brings in layers one by one.

    It is traced and compiled once for each shape of its arguments.

    Attributes:
      reader: brings the layers to the device.
      checkpoint_activation: whether the backward pass recomputes each layer from its
        inputs, which wait in host memory; otherwise all activations stay on the device.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        reader: LayerReader | None = None,
        *,
        checkpoint_activation: bool = True,
    ):
        """Wraps a function.

        Args:
          function: function of trained parameters, frozen parameters and any trees of
            arrays, which returns a tree of arrays. It must read streamed parameters in
            loops over their layers.
          reader: brings the layers to the device; a new `LayerReader` by default.
          checkpoint_activation: see the attribute.
        """
        self.checkpoint_activation = checkpoint_activation
        self._function, self.reader = function, reader or LayerReader()
        self._programs: dict[Any, TracedProgram] = {}

    def forward(self, trained: Leaves, frozen: Leaves, *arguments: Any) -> Any:
        """Returns the function's result."""
        program = self._program(trained, frozen, arguments)
        values = program.input_values(trained, frozen, arguments)
        program.forward([values], self.reader)
        return program.result(values)

    def value_and_gradient(
        self,
        trained: Leaves,
        frozen: Leaves,
        micro_batches: Sequence[tuple[Any, ...]],
        output_gradients: Sequence[Any],
    ) -> tuple[dict[str, Any], list[Any]]:
        """Runs micro-batches forward and backpropagates the gradients of their results.

        All micro-batches run through a layer while it is on the device.

        Args:
          trained: parameters to differentiate.
          frozen: all other parameters.
          micro_batches: the other arguments of each micro-batch, all with the same
            shape.
          output_gradients: gradient of each micro-batch's result, a tree like the
            result.

        Returns:
          the gradient of the trained parameters, summed over micro-batches, and each
          micro-batch's result.
        """
        program = self._program(trained, frozen, micro_batches[0])
        # Of each micro-batch, the values of the program's variables.
        values = [
            program.input_values(trained, frozen, arguments)
            for arguments in micro_batches
        ]
        saved = not self.checkpoint_activation
        with jax.profiler.TraceAnnotation("forward"):
            kept = "activations" if saved else "inputs"
            by_loop = program.forward(values, self.reader, kept)
        started = [
            program.start_backward(own_values, seeds)
            for own_values, seeds in zip(values, output_gradients, strict=True)
        ]
        results = [result for result, _ in started]
        cotangents = [own_cotangents for _, own_cotangents in started]
        with jax.profiler.TraceAnnotation("backward"):
            program.backward(values, cotangents, by_loop, self.reader, saved=saved)
        return program.gradient(trained, cotangents), results

    def _program(
        self, trained: Leaves, frozen: Leaves, arguments: tuple[Any, ...]
    ) -> TracedProgram:
        leaves, structure = jax.tree.flatten((trained, frozen, arguments))
        shapes = (structure, *((np.shape(leaf), _dtype(leaf)) for leaf in leaves))
        # Where the parameters are decides how the program is divided.
        shapes += tuple(map(_location, jax.tree.leaves((trained, frozen))))
        if shapes not in self._programs:
            program = TracedProgram(self._function, trained, frozen, arguments)
            self._programs[shapes] = program
        return self._programs[shapes]


def _location(leaf: Any) -> Any:
    return leaf.sharding if isinstance(leaf, LayeredWeight) else type(leaf)


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)


@functools.lru_cache(maxsize=4)
def stream_over_batches(
    graph: nnx.GraphDef,
    function: Callable[[nnx.GraphDef, Any, Any], Any],
    slices: int | None = None,
) -> StreamedFunction:
    """Wraps a function of a model's structure, all of its parameters and a batch.

    The result is cached with its compiled programs, so an evaluation reuses those of
    the previous one.
    """

    def run(trained: Leaves, frozen: Leaves, batch: Any) -> Any:
        return function(graph, trained | frozen, batch)

    return StreamedFunction(run, LayerReader(slices=slices))
