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
from prompt_tuning.streaming.layered_weights import Layer, LayeredWeight, Reader
from prompt_tuning.streaming.traced_loops import Values, active, cut, value_of

Known = dict[Var, Any]
"""The values of one micro-batch."""

Entered = list[list[list[np.ndarray]]]
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
        pieces = cut(closed.jaxpr, streamed)
        self._trained = closed.jaxpr.invars[: len(jax.tree.leaves(trained))]
        self._active = active(closed.jaxpr, self._trained)
        *segments, last = pieces.segments
        self._stages = [
            (CompiledSegment(segment, self._active), CompiledLoop(loop, self._active))
            for segment, loop in zip(segments, pieces.loops, strict=True)
        ]
        self._last = CompiledSegment(last, self._active)

    def start(
        self, trained: Parameters, frozen: Leaves, arguments: Sequence[Any]
    ) -> Known:
        """The values of a micro-batch before anything has run."""
        arguments = jax.device_put(arguments)
        leaves = jax.tree.leaves((trained, frozen, arguments))
        return self._constants | dict(zip(self._program.invars, leaves, strict=True))

    def forth(
        self, known: Sequence[Known], reader: Reader, *, keep: bool = False
    ) -> list[Entered]:
        """Runs micro-batches up to the last segment, which adds to what is known.

        Returns:
          of each loop what went into its layers, nothing unless kept.
        """
        entered = []
        for segment, loop in self._stages:
            for own in known:
                outputs = segment.forth(_values(own, segment.inputs))
                own |= zip(segment.outputs, outputs, strict=True)
            kept = keep and any(loop.moving)
            entered.append(_loop_forth(loop, known, reader, keep=kept))
        return entered

    def finish(self, known: Known) -> Any:
        """What a micro-batch results in."""
        outputs = self._last.forth(_values(known, self._last.inputs))
        return self._result(known, outputs)

    def turn(self, known: Known, output_gradients: Any) -> tuple[Any, Known]:
        """What a micro-batch results in, and the cotangents before the last segment."""
        seeds = jax.tree.leaves(output_gradients)
        cotangents: Known = {}
        for atom, seed in zip(self._program.outvars, seeds, strict=True):
            if isinstance(atom, Var) and atom in self._active:
                _add(cotangents, [atom], [seed])
        segment = self._last
        outputs, found = segment.value_and_gradient(
            _values(known, segment.inputs), _taken(cotangents, segment.targets)
        )
        _add(cotangents, segment.sources, found)
        return self._result(known, outputs), cotangents

    def _result(self, known: Known, outputs: Values) -> Any:
        every = known | dict(zip(self._last.outputs, outputs, strict=True))
        leaves = [value_of(atom, every) for atom in self._program.outvars]
        return jax.tree.unflatten(self._results, leaves)

    def back(
        self,
        known: Sequence[Known],
        cotangents: Sequence[Known],
        entered: Sequence[Entered],
        reader: Reader,
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
            if any(loop.moving):
                _loop_back(loop, known, cotangents, kept, reader)
            for own, of_own in zip(known, cotangents, strict=True):
                seeds = _taken(of_own, segment.targets)
                if all(seed is None for seed in seeds):
                    continue
                found = segment.back(_values(own, segment.inputs), seeds)
                _add(of_own, segment.sources, found)

    def gradient(self, trained: Parameters, cotangents: Sequence[Known]) -> Parameters:
        """The gradient of the trained parameters, micro-batches added up."""
        leaves, structure = jax.tree.flatten(trained)
        found = []
        for var, leaf in zip(self._trained, leaves, strict=True):
            parts = [own[var] for own in cotangents if var in own]
            found.append(sum(parts, jnp.zeros_like(leaf)))
        return jax.tree.unflatten(structure, found)


def _abstract(leaf: Any) -> Any:
    return leaf.abstract if isinstance(leaf, LayeredWeight) else leaf


def _values(known: Known, variables: Iterable[Any]) -> Values:
    return [value_of(atom, known) for atom in variables]


def _taken(cotangents: Known, variables: Iterable[Var]) -> list[Array | None]:
    return [cotangents.pop(var, None) for var in variables]


def _add(cotangents: Known, variables: Iterable[Any], found: Iterable[Any]) -> None:
    for var, value in zip(variables, found, strict=True):
        known = cotangents.get(var)
        cotangents[var] = value if known is None else known + value


def _loop_forth(
    loop: CompiledLoop, known: Sequence[Known], reader: Reader, *, keep: bool
) -> Entered:
    """Runs all micro-batches through one layer after the other."""
    cut = loop.loop
    given = [(_values(own, cut.shared), _values(own, cut.stacked)) for own in known]
    carried = [_values(own, cut.start) for own in known]
    entered: Entered = []

    def compute(index: int, layer: Layer) -> None:
        following = [
            loop.forth(layer, index, *of_all, values)
            for of_all, values in zip(given, carried, strict=True)
        ]
        if keep:
            # Copied while the device computes; a view would keep its memory.
            entered.append([[np.array(x) for x in values] for values in carried])
        carried[:] = jax.block_until_ready(following)

    weights = [known[0][var] for var in cut.weights]
    layer = [weight.abstract_layer for weight in weights]
    loop.forth.compile(layer, 0, *given[0], carried[0])
    reader.visit(weights, range(cut.length), compute)
    for own, values in zip(known, carried, strict=True):
        own |= zip(cut.end, values, strict=True)
    return entered


def _loop_back(
    loop: CompiledLoop,
    known: Sequence[Known],
    cotangents: Sequence[Known],
    entered: Entered,
    reader: Reader,
) -> None:
    """Runs all micro-batches back, each layer computed again from what entered it."""
    cut = loop.loop
    given = [(_values(own, cut.shared), _values(own, cut.stacked)) for own in known]
    moving = [_taken(own, loop.chosen(cut.end)) for own in cotangents]
    totals = [[jnp.zeros_like(own[var]) for var in loop.shared] for own in known]
    slices: list[list[Values]] = [[] for _ in known]

    def compute(index: int, layer: Layer) -> None:
        values = jax.device_put(entered.pop())
        for i, of_all in enumerate(given):
            moving[i], totals[i], of_layer = loop.back(
                layer, index, *of_all, values[i], moving[i], totals[i]
            )
            slices[i].append(of_layer)
        jax.block_until_ready((moving, totals, slices))

    weights = [known[0][var] for var in cut.weights]
    layer = [weight.abstract_layer for weight in weights]
    loop.back.compile(layer, 0, *given[0], entered[-1][0], moving[0], totals[0])
    reader.visit(weights, reversed(range(cut.length)), compute)
    first = loop.chosen(cut.start)
    for i, own in enumerate(cotangents):
        _add(own, first, moving[i])
        _add(own, loop.shared, totals[i])
        stacked = [jnp.stack(layers[::-1]) for layers in zip(*slices[i], strict=True)]
        _add(own, loop.stacked, stacked)
