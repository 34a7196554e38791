"""Pieces of a cut program, compiled to run forth, and back where a gradient flows."""

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jaxtyping import Array, Int

from prompt_tuning.core.compiled_step import return_freed_memory
from prompt_tuning.streaming.traced_loops import LayerLoop, Segment, Values

Cotangents = list[Any]
"""Of some variables; None where no gradient comes from anywhere."""


class CompiledSegment:
    """A segment of a cut program.

    Attributes:
      inputs: what it reads.
      outputs: what is read of it.
      sources: those inputs that get a gradient.
      targets: those outputs that have one.
      forth: of the inputs' values, the outputs'.
      back: of the inputs' values and the cotangents of `targets`, those of `sources`.
      value_and_gradient: the outputs, and what `back` gives, in one.
    """

    def __init__(self, segment: Segment, active: Collection[Var]):
        self.inputs, self.outputs = segment.inputs, segment.outputs
        self.sources = [var for var in segment.inputs if var in active]
        self.targets = [var for var in segment.outputs if var in active]
        self._segment = segment
        self.forward = jax.jit(lambda values: segment.run(*values))
        self.backward = jax.jit(
            lambda *arguments: self._value_and_gradient(*arguments)[1]
        )
        self.value_and_gradient = jax.jit(self._value_and_gradient)

    def _value_and_gradient(
        self, values: Values, cotangents: Cotangents
    ) -> tuple[Values, Values]:
        known = dict(zip(self.inputs, values, strict=True))

        def run(sources: Values) -> tuple[Values, Values]:
            own = known | dict(zip(self.sources, sources, strict=True))
            outputs = self._segment.run(*(own[var] for var in self.inputs))
            of = dict(zip(self.outputs, outputs, strict=True))
            return [of[var] for var in self.targets], outputs

        sources = [known[var] for var in self.sources]
        found, pull_back, outputs = jax.vjp(run, sources, has_aux=True)
        (gradient,) = pull_back(fill_with_zeros(cotangents, found))
        return outputs, gradient


def fill_with_zeros(cotangents: Cotangents, like: Sequence[Any]) -> Values:
    """Cotangents, zeros where there are none."""
    return [
        jnp.zeros_like(value) if cotangent is None else cotangent
        for cotangent, value in zip(cotangents, like, strict=True)
    ]


class CompiledOnce:
    """A jitted function of one shape, compiled before it is first called.

    Its compiler takes more memory than a layer: it is done before layers are read.
    """

    def __init__(self, function: Callable[..., Any]):
        """Wraps a function of trees of arrays."""
        self.jitted, self._compiled = jax.jit(function), False

    def compile(self, *arguments: Any) -> None:
        """Compiles, unless that was done, for arguments that may be abstract."""
        if not self._compiled:
            self.jitted.lower(*arguments).compile()
            return_freed_memory()
            self._compiled = True

    def __call__(self, *arguments: Any) -> Any:
        """What the function gives."""
        return self.jitted(*arguments)


class CompiledLoop:
    """One layer of the loops of a stage: one program forth, one back, for all layers.

    Attributes:
      loop: what each layer reads.
      moving: which of what goes from layer to layer gets a gradient.
      shared: of what all layers read alike, that which gets one.
      stacked: of what is stacked, that which gets one.
      forth: of the layer's weights, its number, values of all that is shared and
        stacked, and what goes into the layer: what comes out of it.
      back: of these, of the cotangents of what comes out (where it moves), and of the
        sums so far of those of `shared`: the cotangents of what goes in, the sums, and
        the cotangents of the layer's slices of `stacked`.
    """

    def __init__(self, loop: LayerLoop, active: Collection[Var]):
        self.loop = loop
        self.differentiated = [var in active for var in loop.end]
        self.shared = [var for var in loop.shared if var in active]
        self.stacked = [var for var in loop.stacked if var in active]
        self.forward, self.backward = (
            CompiledOnce(self._forward),
            CompiledOnce(self._backward),
        )

    def differentiable(self, carried: Sequence[Any]) -> Values:
        """Of what goes from layer to layer, that which gets a gradient."""
        return list(itertools.compress(carried, self.differentiated))

    def _forward(
        self,
        weights: Values,
        index: Int[Array, ""],
        shared: Values,
        stacked: Values,
        carried: Values,
    ) -> Values:
        return self.loop.layer(weights, shared, _slices(stacked, index), carried)

    def _backward(
        self,
        weights: Values,
        index: Int[Array, ""],
        shared: Values,
        stacked: Values,
        carried: Values,
        cotangents: Cotangents,
        totals: Values,
    ) -> tuple[Values, Values, Values]:
        loop = self.loop
        known = dict(zip(loop.shared, shared, strict=True))
        own = dict(zip(loop.stacked, _slices(stacked, index), strict=True))

        def run(moving: Values, of_shared: Values, of_stacked: Values) -> Values:
            all_shared = known | dict(zip(self.shared, of_shared, strict=True))
            all_own = own | dict(zip(self.stacked, of_stacked, strict=True))
            changed = iter(moving)
            entering = [
                next(changed) if moves else x
                for x, moves in zip(carried, self.differentiated, strict=True)
            ]
            return self.differentiable(
                loop.layer(
                    weights,
                    [all_shared[var] for var in loop.shared],
                    [all_own[var] for var in loop.stacked],
                    entering,
                )
            )

        arguments = (
            self.differentiable(carried),
            [known[var] for var in self.shared],
            [own[var] for var in self.stacked],
        )
        found, pull_back = jax.vjp(run, *arguments)
        entered, added, sliced = pull_back(fill_with_zeros(cotangents, found))
        totals = [a + b for a, b in zip(totals, added, strict=True)]
        return entered, totals, sliced


def _slices(stacked: Values, index: Int[Array, ""]) -> Values:
    return [jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for x in stacked]
