"""Runs a loop over layers: all micro-batches pass a layer before the next one."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var
from jaxtyping import Array

from prompt_tuning.streaming.compiled_segments import CompiledLoop, mesh_sharding
from prompt_tuning.streaming.layered_weights import Layer, LayerReader
from prompt_tuning.streaming.traced_loops import Values, value_of

VariableValues = dict[Var, Any]
"""Values (or cotangents) of one micro-batch's variables."""

KeptByLayer = list[list[list[Any]]]
"""Values of each layer that a backward pass needs, for each micro-batch.

The inputs of the layer, in host memory, or its activations, on the device.
"""

Kept = Literal["nothing", "inputs", "activations"]
"""Values of each layer that a forward pass keeps."""


def select(values: VariableValues, atoms: Iterable[Any]) -> Values:
    """Returns the values of variables and literals."""
    return [value_of(atom, values) for atom in atoms]


def pop(cotangents: VariableValues, variables: Iterable[Var]) -> list[Array | None]:
    """Removes and returns the cotangents of variables; None where there is none."""
    return [cotangents.pop(var, None) for var in variables]


def accumulate(
    cotangents: VariableValues, variables: Iterable[Any], added: Iterable[Any]
) -> None:
    """Adds to the cotangents of variables."""
    for var, value in zip(variables, added, strict=True):
        total = cotangents.get(var)
        cotangents[var] = value if total is None else total + value


def run_loop_forward(
    compiled: CompiledLoop,
    micro_batches: Sequence[VariableValues],
    reader: LayerReader,
    kept: Kept,
) -> KeptByLayer:
    """Runs all micro-batches forward; returns what is kept for each layer."""
    loop = compiled.loop
    saves = kept == "activations"
    program = compiled.forward_saving if saves else compiled.forward
    constants = _constants(compiled, micro_batches)
    carried = [select(values, loop.start) for values in micro_batches]
    by_layer: KeptByLayer = []
    # Of each micro-batch, of each layer, its slices of the collected outputs.
    collected: list[list[Values]] = [[] for _ in micro_batches]

    def compute(index: int, layer: Layer) -> None:
        outputs = [
            program(layer, index, *own_constants, entering)
            for own_constants, entering in zip(constants, carried, strict=True)
        ]
        if kept == "inputs":
            # Copied while the device computes; a view would keep its memory.
            by_layer.append([[np.array(x) for x in values] for values in carried])
        jax.block_until_ready(outputs)
        if saves:
            by_layer.append([output[2] for output in outputs])
        carried[:] = [output[0] for output in outputs]
        for of_batch, output in zip(collected, outputs, strict=True):
            of_batch.append(output[1])

    weights = [micro_batches[0][var] for var in loop.weights]
    layer = [weight.abstract_layer for weight in weights]
    program.compile(layer, 0, *constants[0], carried[0])
    reader.visit(weights, range(loop.length), compute)
    _leave_loop(compiled, micro_batches, carried, collected)
    return by_layer


def _constants(
    compiled: CompiledLoop, micro_batches: Sequence[VariableValues]
) -> list[tuple[Values, Values]]:
    loop = compiled.loop
    return [
        (select(values, loop.shared), select(values, loop.stacked))
        for values in micro_batches
    ]


def _leave_loop(
    compiled: CompiledLoop,
    micro_batches: Sequence[VariableValues],
    carried: Sequence[Values],
    collected: Sequence[Sequence[Values]],
) -> None:
    """Adds a loop's results to the values of each micro-batch."""
    loop = compiled.loop
    for values, leaving, of_batch in zip(
        micro_batches, carried, collected, strict=True
    ):
        values |= zip(loop.end, leaving, strict=True)
        stacked = [jnp.stack(layers) for layers in zip(*of_batch, strict=True)]
        values |= zip(loop.collected, stacked, strict=True)


def run_loop_backward(
    compiled: CompiledLoop,
    micro_batches: Sequence[VariableValues],
    cotangents: Sequence[VariableValues],
    kept: KeptByLayer,
    reader: LayerReader,
    *,
    saved: bool,
) -> None:
    """Runs all micro-batches backward.

    Each layer is recomputed from its inputs, unless its activations were saved.
    """
    loop = compiled.loop
    constants = _constants(compiled, micro_batches)
    program = compiled.backward_saved if saved else compiled.backward

    first = select(micro_batches[0], loop.start)

    def given(layer: Any, index: int, i: int, own: Values) -> tuple[Any, ...]:
        if saved:
            return layer, own
        return layer, index, *constants[i], _put_like(first, own)

    # Cotangents of each micro-batch: of the carried values; of the shared inputs, as a
    # sum over layers; and of each layer's stacked slices, the last layer first.
    carried = [pop(own, compiled.differentiable(loop.end)) for own in cotangents]
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
        of_layer = kept.pop()
        for i in range(len(micro_batches)):
            carried[i], totals[i], layer_slices, of_weights = program(
                *given(layer, index, i, of_layer[i]), carried[i], totals[i]
            )
            slices[i].append(layer_slices)
            _move_to_host(weight_gradients, index, of_weights)
        jax.block_until_ready((carried, totals, slices))

    weights = [micro_batches[0][var] for var in loop.weights]
    layer = [weight.abstract_layer for weight in weights]
    program.compile(*given(layer, 0, 0, kept[-1][0]), carried[0], totals[0])
    reader.visit(weights, reversed(range(loop.length)), compute)
    accumulate(cotangents[0], compiled.trained, weight_gradients)
    start = compiled.differentiable(loop.start)
    for i, own in enumerate(cotangents):
        accumulate(own, start, carried[i])
        accumulate(own, compiled.shared, totals[i])
        # Of each stacked input, [...] of each layer -> [L, ...].
        stacked = [jnp.stack(layers[::-1]) for layers in zip(*slices[i], strict=True)]
        accumulate(own, compiled.stacked, stacked)


def _put_like(first: Values, values: Values) -> Values:
    """Puts a layer's inputs on the device, or on the mesh like the first layer's."""
    return [
        jax.device_put(value, mesh_sharding(like))
        for value, like in zip(values, first, strict=True)
    ]


def _move_to_host(totals: Sequence[np.ndarray], index: int, layer: Values) -> None:
    """Adds a layer's gradients to arrays for all layers, and deletes them.

    They leave the device before the next micro-batch computes more.
    """
    for total, gradient in zip(totals, layer, strict=True):
        total[index] += np.asarray(gradient)
        gradient.delete()
