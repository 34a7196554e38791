"""A traced program, run: segments whole, loops over layers layer by layer."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var
from jaxtyping import Array

from prompt_tuning.core.parameters import Parameters
from prompt_tuning.streaming.compiled_segments import CompiledLoop, CompiledSegment
from prompt_tuning.streaming.layered_weights import Layer, LayeredWeight, LayerReader
from prompt_tuning.streaming.traced_loops import (
    Values,
    differentiable_variables,
    split_at_loops,
    value_of,
)

VarValues = dict[Var, Any]
"""The values of one micro-batch."""

LayerInputs = list[list[list[np.ndarray]]]
"""What went into each layer, of each micro-batch, in host memory."""

Leaves = dict[str, Any]
"""Parameters by path: arrays, and a `LayeredWeight` for each that is streamed."""


class TracedProgram:
    """A function of trained and frozen parameters and other arrays, of one shape."""

    def __init__(
        self,
        function: Callable[..., Any],
        trained: Parameters,
        frozen: Leaves,
        arguments: Sequence[Any],
    ):
        """Traces the function; see `StreamedFunction`.

        Raises:
          InputError: if it reads a streamed parameter otherwise than layer by layer.
        """
        abstract = jax.tree.map(_abstract, frozen)
        traced = jax.make_jaxpr(function, return_shape=True)
        closed, results = traced(trained, abstract, *arguments)
        self._program, self._results = closed.jaxpr, jax.tree.structure(results)
        self._constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        leaves = jax.tree.leaves((trained, frozen, arguments))
        streamed = {
            var: leaf.path
            for var, leaf in zip(closed.jaxpr.invars, leaves, strict=True)
            if isinstance(leaf, LayeredWeight)
        }
        pieces = split_at_loops(closed.jaxpr, streamed)
        self._trained = closed.jaxpr.invars[: len(jax.tree.leaves(trained))]
        self._active = differentiable_variables(closed.jaxpr, self._trained)
        *segments, last = pieces.segments
        self._stages = [
            (CompiledSegment(segment, self._active), CompiledLoop(loop, self._active))
            for segment, loop in zip(segments, pieces.loops, strict=True)
        ]
        self._last = CompiledSegment(last, self._active)

    def input_values(
        self, trained: Parameters, frozen: Leaves, arguments: Sequence[Any]
    ) -> VarValues:
        """The values of a micro-batch before anything has run."""
        arguments = jax.device_put(arguments)
        leaves = jax.tree.leaves((trained, frozen, arguments))
        return self._constants | dict(zip(self._program.invars, leaves, strict=True))

    def forward(
        self,
        known: Sequence[VarValues],
        reader: LayerReader,
        *,
        keep: bool = False,
    ) -> list[LayerInputs]:
        """Runs micro-batches up to the last segment, which adds to what is known.

        Returns:
          of each loop what went into its layers, nothing unless kept.
        """
        entered = []
        for segment, loop in self._stages:
            for own in known:
                outputs = segment.forward(_values(own, segment.inputs))
                own |= zip(segment.outputs, outputs, strict=True)
            kept = keep and any(loop.differentiated)
            entered.append(_run_loop_forward(loop, known, reader, keep=kept))
        return entered

    def result(self, known: VarValues) -> Any:
        """What a micro-batch results in."""
        outputs = self._last.forward(_values(known, self._last.inputs))
        return self._result(known, outputs)

    def start_backward(
        self, known: VarValues, output_gradients: Any
    ) -> tuple[Any, VarValues]:
        """What a micro-batch results in, and the cotangents before the last segment."""
        seeds = jax.tree.leaves(output_gradients)
        cotangents: VarValues = {}
        for atom, seed in zip(self._program.outvars, seeds, strict=True):
            if isinstance(atom, Var) and atom in self._active:
                _accumulate(cotangents, [atom], [seed])
        segment = self._last
        outputs, found = segment.value_and_gradient(
            _values(known, segment.inputs), _pop(cotangents, segment.targets)
        )
        _accumulate(cotangents, segment.sources, found)
        return self._result(known, outputs), cotangents

    def _result(self, known: VarValues, outputs: Values) -> Any:
        every = known | dict(zip(self._last.outputs, outputs, strict=True))
        leaves = [value_of(atom, every) for atom in self._program.outvars]
        return jax.tree.unflatten(self._results, leaves)

    def backward(
        self,
        known: Sequence[VarValues],
        cotangents: Sequence[VarValues],
        entered: Sequence[LayerInputs],
        reader: LayerReader,
    ) -> None:
        """Brings cotangents back to the inputs; those on the way are used up.

        Args:
          known: of each micro-batch, as `forth` left it.
          cotangents: as `turn` gave them.
          entered: as `forth` gave it; used up.
          reader: brings the layers in.
        """
        for (segment, loop), kept in zip(
            self._stages[::-1], entered[::-1], strict=True
        ):
            if any(loop.differentiated):
                _run_loop_backward(loop, known, cotangents, kept, reader)
            for own, of_own in zip(known, cotangents, strict=True):
                seeds = _pop(of_own, segment.targets)
                if all(seed is None for seed in seeds):
                    continue
                found = segment.backward(_values(own, segment.inputs), seeds)
                _accumulate(of_own, segment.sources, found)

    def gradient(
        self, trained: Parameters, cotangents: Sequence[VarValues]
    ) -> Parameters:
        """The gradient of the trained parameters, micro-batches added up."""
        leaves, structure = jax.tree.flatten(trained)
        found = []
        for var, leaf in zip(self._trained, leaves, strict=True):
            parts = [own[var] for own in cotangents if var in own]
            found.append(sum(parts, jnp.zeros_like(leaf)))
        return jax.tree.unflatten(structure, found)


def _abstract(leaf: Any) -> Any:
    return leaf.abstract if isinstance(leaf, LayeredWeight) else leaf


def _values(known: VarValues, variables: Iterable[Any]) -> Values:
    return [value_of(atom, known) for atom in variables]


def _pop(cotangents: VarValues, variables: Iterable[Var]) -> list[Array | None]:
    return [cotangents.pop(var, None) for var in variables]


def _accumulate(
    cotangents: VarValues, variables: Iterable[Any], found: Iterable[Any]
) -> None:
    for var, value in zip(variables, found, strict=True):
        known = cotangents.get(var)
        cotangents[var] = value if known is None else known + value


def _run_loop_forward(
    loop: CompiledLoop,
    known: Sequence[VarValues],
    reader: LayerReader,
    *,
    keep: bool,
) -> LayerInputs:
    """Runs all micro-batches through one layer after the other."""
    cut = loop.loop
    given = [(_values(own, cut.shared), _values(own, cut.stacked)) for own in known]
    carried = [_values(own, cut.start) for own in known]
    entered: LayerInputs = []

    def compute(index: int, layer: Layer) -> None:
        following = [
            loop.forward(layer, index, *of_all, values)
            for of_all, values in zip(given, carried, strict=True)
        ]
        if keep:
            # Copied while the device computes; a view would keep its memory.
            entered.append([[np.array(x) for x in values] for values in carried])
        carried[:] = jax.block_until_ready(following)

    weights = [known[0][var] for var in cut.weights]
    layer = [weight.abstract_layer for weight in weights]
    loop.forward.compile(layer, 0, *given[0], carried[0])
    reader.visit(weights, range(cut.length), compute)
    for own, values in zip(known, carried, strict=True):
        own |= zip(cut.end, values, strict=True)
    return entered


def _run_loop_backward(
    loop: CompiledLoop,
    known: Sequence[VarValues],
    cotangents: Sequence[VarValues],
    entered: LayerInputs,
    reader: LayerReader,
) -> None:
    """Runs all micro-batches back, each layer computed again from what entered it."""
    cut = loop.loop
    given = [(_values(own, cut.shared), _values(own, cut.stacked)) for own in known]
    moving = [_pop(own, loop.differentiable(cut.end)) for own in cotangents]
    totals = [[jnp.zeros_like(own[var]) for var in loop.shared] for own in known]
    slices: list[list[Values]] = [[] for _ in known]

    def compute(index: int, layer: Layer) -> None:
        values = jax.device_put(entered.pop())
        for i, of_all in enumerate(given):
            moving[i], totals[i], of_layer = loop.backward(
                layer, index, *of_all, values[i], moving[i], totals[i]
            )
            slices[i].append(of_layer)
        jax.block_until_ready((moving, totals, slices))

    weights = [known[0][var] for var in cut.weights]
    layer = [weight.abstract_layer for weight in weights]
    loop.backward.compile(layer, 0, *given[0], entered[-1][0], moving[0], totals[0])
    reader.visit(weights, reversed(range(cut.length)), compute)
    first = loop.differentiable(cut.start)
    for i, own in enumerate(cotangents):
        _accumulate(own, first, moving[i])
        _accumulate(own, loop.shared, totals[i])
        stacked = [jnp.stack(layers[::-1]) for layers in zip(*slices[i], strict=True)]
        _accumulate(own, loop.stacked, stacked)
