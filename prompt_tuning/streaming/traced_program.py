"""A traced program and how to run it: segments as a whole, loops layer by layer."""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var
from jaxtyping import Array

from prompt_tuning.streaming.compiled_segments import CompiledLoop, CompiledSegment
from prompt_tuning.streaming.layered_weights import Layer, LayeredWeight, LayerReader
from prompt_tuning.streaming.traced_loops import (
    Values,
    check_collected,
    differentiable_variables,
    split_at_loops,
    value_of,
)

VariableValues = dict[Var, Any]
"""Values (or cotangents) of one micro-batch's variables."""

LayerInputs = list[list[list[Any]]]
"""The inputs of each layer, for each micro-batch, in host memory.

Without `checkpoint_activation`, the activations of each layer, on the device.
"""

Leaves = dict[str, Any]
"""Parameters by path: arrays, and a `LayeredWeight` for each streamed one.

Trained parameters may be streamed from host memory, and be NumPy arrays; the gradients
of both are NumPy arrays.
"""


class TracedProgram:
    """A function of trained and frozen parameters and other arrays, of one shape."""

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

        def recorded(*given: Any) -> Any:
            results = function(*given)
            structures.append(jax.tree.structure(results))
            return results

        closed = jax.make_jaxpr(recorded)(*abstract, *arguments)
        self._program, (self._results,) = closed.jaxpr, structures
        self._constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        leaves = jax.tree.leaves((trained, frozen, arguments))
        streamed = {
            var: leaf.path
            for var, leaf in zip(closed.jaxpr.invars, leaves, strict=True)
            if isinstance(leaf, LayeredWeight)
        }
        parts = split_at_loops(closed.jaxpr, streamed)
        # The trained parameters are the first argument.
        self._trained = closed.jaxpr.invars[: len(jax.tree.leaves(trained))]
        self._active = differentiable_variables(closed.jaxpr, self._trained)
        self._on_host = {
            var
            for var, leaf in zip(self._trained, jax.tree.leaves(trained), strict=True)
            if not isinstance(leaf, jax.Array)
        }
        check_collected(parts.loops, self._active)
        *segments, last = parts.segments
        self._stages = [
            (CompiledSegment(segment, self._active), CompiledLoop(loop, self._active))
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
        *,
        keep: bool = False,
        checkpoint_activation: bool = True,
    ) -> list[LayerInputs]:
        """Runs micro-batches up to the last segment.

        Args:
          micro_batches: values of each micro-batch, to which new values are added.
          reader: brings the layers to the device.
          keep: whether the inputs of the layers are kept for `backward`.
          checkpoint_activation: whether only the inputs are kept, in host memory; if
            not, all activations are, on the device.

        Returns:
          the inputs of the layers of each loop, empty unless kept.
        """
        layer_inputs = []
        for segment, loop in self._stages:
            for values in micro_batches:
                outputs = segment.forward(_select(values, segment.inputs))
                values |= zip(segment.outputs, outputs, strict=True)
            needed = keep and any(loop.differentiated)
            run = _run_loop_forward if checkpoint_activation else _run_loop_saving
            layer_inputs.append(
                (run if needed else _run_loop_forward)(
                    loop, micro_batches, reader, keep=needed
                )
            )
        return layer_inputs

    def result(self, values: VariableValues) -> Any:
        """Returns the result of a micro-batch after `forward`."""
        outputs = self._last.forward(_select(values, self._last.inputs))
        return self._result(values, outputs)

    def start_backward(
        self, values: VariableValues, output_gradients: Any
    ) -> tuple[Any, VariableValues]:
        """Returns a micro-batch's result and the cotangents before the last segment."""
        seeds = jax.tree.leaves(output_gradients)
        cotangents: VariableValues = {}
        for atom, seed in zip(self._program.outvars, seeds, strict=True):
            if isinstance(atom, Var) and atom in self._active:
                _accumulate(cotangents, [atom], [seed])
        segment = self._last
        outputs, gradients = segment.value_and_gradient(
            _select(values, segment.inputs), _pop(cotangents, segment.targets)
        )
        self._accumulate_sources(cotangents, segment, gradients)
        return self._result(values, outputs), cotangents

    def _accumulate_sources(
        self, cotangents: VariableValues, segment: CompiledSegment, gradients: Values
    ) -> None:
        """Adds a segment's gradients, in host memory where the parameter is there."""
        moved = [
            np.array(gradient) if var in self._on_host else gradient
            for var, gradient in zip(segment.sources, gradients, strict=True)
        ]
        _accumulate(cotangents, segment.sources, moved)

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
        layer_inputs: Sequence[LayerInputs],
        reader: LayerReader,
        *,
        checkpoint_activation: bool = True,
    ) -> None:
        """Propagates cotangents back to the inputs; intermediate ones are consumed.

        Args:
          micro_batches: values of each micro-batch, as `forward` left them.
          cotangents: cotangents of each micro-batch, from `start_backward`.
          layer_inputs: result of `forward`, which is consumed.
          reader: brings the layers to the device.
          checkpoint_activation: as in `forward`.
        """
        for (segment, loop), inputs in zip(
            self._stages[::-1], layer_inputs[::-1], strict=True
        ):
            if any(loop.differentiated):
                _run_loop_backward(
                    loop,
                    micro_batches,
                    cotangents,
                    inputs,
                    reader,
                    saved=not checkpoint_activation,
                )
            for values, own_cotangents in zip(micro_batches, cotangents, strict=True):
                seeds = _pop(own_cotangents, segment.targets)
                if all(seed is None for seed in seeds):
                    continue
                gradients = segment.backward(_select(values, segment.inputs), seeds)
                self._accumulate_sources(own_cotangents, segment, gradients)

    def gradient(
        self, trained: Leaves, cotangents: Sequence[VariableValues]
    ) -> dict[str, Any]:
        """Returns the gradient of the trained parameters, summed over micro-batches."""
        leaves, structure = jax.tree.flatten(trained)
        gradients = []
        for var, leaf in zip(self._trained, leaves, strict=True):
            parts = [own[var] for own in cotangents if var in own]
            zeros = np.zeros if var in self._on_host else jnp.zeros
            start = parts[0] if parts else zeros(leaf.shape, leaf.dtype)
            gradients.append(functools.reduce(operator.add, parts[1:], start))
        return jax.tree.unflatten(structure, gradients)


def _abstract(leaf: Any) -> Any:
    return leaf.abstract if isinstance(leaf, LayeredWeight) else leaf


def _select(values: VariableValues, atoms: Iterable[Any]) -> Values:
    return [value_of(atom, values) for atom in atoms]


def _pop(cotangents: VariableValues, variables: Iterable[Var]) -> list[Array | None]:
    return [cotangents.pop(var, None) for var in variables]


def _accumulate(
    cotangents: VariableValues, variables: Iterable[Any], added: Iterable[Any]
) -> None:
    for var, value in zip(variables, added, strict=True):
        total = cotangents.get(var)
        cotangents[var] = value if total is None else total + value


def _run_loop_forward(
    compiled: CompiledLoop,
    micro_batches: Sequence[VariableValues],
    reader: LayerReader,
    *,
    keep: bool,
) -> LayerInputs:
    """Runs all micro-batches through one layer after another."""
    loop = compiled.loop
    constants = [
        (_select(values, loop.shared), _select(values, loop.stacked))
        for values in micro_batches
    ]
    carried = [_select(values, loop.start) for values in micro_batches]
    layer_inputs: LayerInputs = []
    # Of each micro-batch, of each layer, its slices of the collected outputs.
    collected: list[list[Values]] = [[] for _ in micro_batches]

    def compute(index: int, layer: Layer) -> None:
        outputs = [
            compiled.forward(layer, index, *own_constants, entering)
            for own_constants, entering in zip(constants, carried, strict=True)
        ]
        if keep:
            # Copied while the device computes; a view would keep its memory.
            layer_inputs.append([[np.array(x) for x in values] for values in carried])
        carried[:] = [leaving for leaving, _ in jax.block_until_ready(outputs)]
        for own, (_, slices) in zip(collected, outputs, strict=True):
            own.append(slices)

    weights = [micro_batches[0][var] for var in loop.weights]
    layer = [weight.abstract_layer for weight in weights]
    compiled.forward.compile(layer, 0, *constants[0], carried[0])
    reader.visit(weights, range(loop.length), compute)
    _leave_loop(compiled, micro_batches, carried, collected)
    return layer_inputs


def _run_loop_saving(
    compiled: CompiledLoop,
    micro_batches: Sequence[VariableValues],
    reader: LayerReader,
    *,
    keep: bool,
) -> LayerInputs:
    """Runs all micro-batches forward and saves the activations of each layer."""
    assert keep
    loop = compiled.loop
    constants = [
        (_select(values, loop.shared), _select(values, loop.stacked))
        for values in micro_batches
    ]
    carried = [_select(values, loop.start) for values in micro_batches]
    saved: LayerInputs = []
    collected: list[list[Values]] = [[] for _ in micro_batches]

    def compute(index: int, layer: Layer) -> None:
        outputs = [
            compiled.forward_saving(layer, index, *own_constants, entering)
            for own_constants, entering in zip(constants, carried, strict=True)
        ]
        jax.block_until_ready(outputs)
        carried[:] = [leaving for leaving, _, _ in outputs]
        saved.append([activations for _, _, activations in outputs])
        for own, (_, slices, _) in zip(collected, outputs, strict=True):
            own.append(slices)

    weights = [micro_batches[0][var] for var in loop.weights]
    layer = [weight.abstract_layer for weight in weights]
    compiled.forward_saving.compile(layer, 0, *constants[0], carried[0])
    reader.visit(weights, range(loop.length), compute)
    _leave_loop(compiled, micro_batches, carried, collected)
    return saved


def _leave_loop(
    compiled: CompiledLoop,
    micro_batches: Sequence[VariableValues],
    carried: Sequence[Values],
    collected: Sequence[Sequence[Values]],
) -> None:
    """Adds what a loop has computed to the values of each micro-batch."""
    loop = compiled.loop
    for values, leaving, own in zip(micro_batches, carried, collected, strict=True):
        values |= zip(loop.end, leaving, strict=True)
        stacked = [jnp.stack(layers) for layers in zip(*own, strict=True)]
        values |= zip(loop.collected, stacked, strict=True)


def _run_loop_backward(
    compiled: CompiledLoop,
    micro_batches: Sequence[VariableValues],
    cotangents: Sequence[VariableValues],
    layer_inputs: LayerInputs,
    reader: LayerReader,
    *,
    saved: bool,
) -> None:
    """Runs all micro-batches back.

    Each layer is recomputed from its inputs, unless its activations were saved.
    """
    loop = compiled.loop
    constants = [
        (_select(values, loop.shared), _select(values, loop.stacked))
        for values in micro_batches
    ]
    program = compiled.backward_saved if saved else compiled.backward

    def given(layer: Any, index: int, i: int) -> tuple[Any, ...]:
        return (layer,) if saved else (layer, index, *constants[i])

    # Cotangents of each micro-batch: of the carried values; of the shared inputs, as a
    # sum over layers; and of each layer's stacked slices, the last layer first.
    carried = [_pop(own, compiled.differentiable(loop.end)) for own in cotangents]
    totals = [
        [jnp.zeros_like(values[var]) for var in compiled.shared]
        for values in micro_batches
    ]
    slices: list[list[Values]] = [[] for _ in micro_batches]
    # Of each trained weight, [L, ...], summed over micro-batches in host memory.
    weight_gradients = [
        np.zeros(var.aval.shape, var.aval.dtype)  # pyright: ignore
        for var in compiled.trained
    ]

    def compute(index: int, layer: Layer) -> None:
        entering = jax.device_put(layer_inputs.pop())
        for i in range(len(micro_batches)):
            carried[i], totals[i], layer_slices, of_weights = program(
                *given(layer, index, i), entering[i], carried[i], totals[i]
            )
            slices[i].append(layer_slices)
            _move_to_host(weight_gradients, index, of_weights)
        jax.block_until_ready((carried, totals, slices))

    weights = [micro_batches[0][var] for var in loop.weights]
    layer = [weight.abstract_layer for weight in weights]
    first = *given(layer, 0, 0), layer_inputs[-1][0]
    program.compile(*first, carried[0], totals[0])
    reader.visit(weights, reversed(range(loop.length)), compute)
    _accumulate(cotangents[0], compiled.trained, weight_gradients)
    start = compiled.differentiable(loop.start)
    for i, own in enumerate(cotangents):
        _accumulate(own, start, carried[i])
        _accumulate(own, compiled.shared, totals[i])
        # Of each stacked input, [...] of each layer -> [L, ...].
        stacked = [jnp.stack(layers[::-1]) for layers in zip(*slices[i], strict=True)]
        _accumulate(own, compiled.stacked, stacked)


def _move_to_host(totals: Sequence[np.ndarray], index: int, layer: Values) -> None:
    """Adds a layer's gradients to arrays of all layers, and deletes them.

    They leave the device before the next micro-batch computes others.
    """
    for total, gradient in zip(totals, layer, strict=True):
        total[index] += np.asarray(gradient)
        gradient.delete()
