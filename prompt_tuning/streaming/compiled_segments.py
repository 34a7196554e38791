"""Parts of a split program, compiled for the forward and the backward pass.

`CompiledSegment` holds the equations between two loops over layers; `CompiledLoop`
holds one layer of the loops, compiled once and run for every layer.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import NamedSharding
from jaxtyping import Array, Int

from prompt_tuning.core.compilation import return_freed_memory
from prompt_tuning.core.recomputation import ALL_BUT_WEIGHTS, checkpointed
from prompt_tuning.streaming.traced_loops import LayerLoop, Segment, Values

Cotangents = list[Any]
"""Cotangents of some variables; None where no gradient flows."""


class CompiledSegment:
    """A compiled segment of a split program.

    Attributes:
      inputs: variables that it reads.
      outputs: variables that it computes.
      sources: inputs that get a gradient.
      targets: outputs that have a gradient.
      forward: `f(values of inputs) -> values of outputs`.
      backward: `f(values of inputs, cotangents of targets) -> cotangents of sources`.
      value_and_gradient: `forward` and `backward` in one program.
    """

    def __init__(self, segment: Segment, active: Collection[Var]):
        self.inputs, self.outputs = segment.inputs, segment.outputs
        self.sources = [var for var in segment.inputs if var in active]
        self.targets = [var for var in segment.outputs if var in active]
        self._segment = segment
        self.forward = jax.jit(lambda values: segment.run(*values))
        self.backward = CompiledOnce(
            lambda *arguments: self._value_and_gradient(*arguments)[1],
            lambda values, _: self._source_values(values),
        )
        self.value_and_gradient = CompiledOnce(
            self._value_and_gradient,
            lambda values, _: (None, self._source_values(values)),
        )

    def _source_values(self, values: Values) -> Values:
        inputs = dict(zip(self.inputs, values, strict=True))
        return [inputs[var] for var in self.sources]

    def _value_and_gradient(
        self, values: Values, cotangents: Cotangents
    ) -> tuple[Values, Values]:
        inputs = dict(zip(self.inputs, values, strict=True))

        def run(sources: Values) -> tuple[Values, Values]:
            arguments = inputs | dict(zip(self.sources, sources, strict=True))
            outputs = self._segment.run(*(arguments[var] for var in self.inputs))
            by_variable = dict(zip(self.outputs, outputs, strict=True))
            return [by_variable[var] for var in self.targets], outputs

        # Only the sources are differentiated; all other inputs are constants.
        sources = self._source_values(values)
        targets, pull_back, outputs = jax.vjp(run, sources, has_aux=True)
        (gradient,) = pull_back(fill_with_zeros(cotangents, targets))
        return outputs, gradient


def fill_with_zeros(cotangents: Cotangents, like: Sequence[Any]) -> Values:
    """Replaces missing cotangents by zeros."""
    return [
        jnp.zeros_like(value) if cotangent is None else cotangent
        for cotangent, value in zip(cotangents, like, strict=True)
    ]


class CompiledOnce:
    """A jitted function for a single shape; can be compiled before its first call.

    Compiling takes more memory than a layer, so it is done before layers are read.

    Attributes:
      jitted: the jitted function; None until the first arguments are known.
    """

    def __init__(
        self, function: Callable[..., Any], like: Callable[..., Any] | None = None
    ):
        """Wraps a function of trees of arrays.

        `like` takes the same arguments, and returns for each result (or tree of
        results) an array with the sharding that it should have on a mesh; None lets the
        compiler choose.
        """
        self.jitted: Any = None
        self._function, self._like, self._compiled = function, like, False

    def compile(self, *arguments: Any) -> None:
        """Compiles the function once, for arguments that may be abstract."""
        if not self._compiled:
            self._jit(arguments).lower(*arguments).compile()
            return_freed_memory()
            self._compiled = True

    def __call__(self, *arguments: Any) -> Any:
        """Calls the function."""
        return self._jit(arguments)(*arguments)

    def _jit(self, arguments: Sequence[Any]) -> Any:
        if self.jitted is None:
            like = None if self._like is None else self._like(*arguments)
            shardings = jax.tree.map(mesh_sharding, like)
            self.jitted = jax.jit(self._function, out_shardings=shardings)
        return self.jitted


def mesh_sharding(value: Any) -> NamedSharding | None:
    """Returns the sharding of an array on a mesh; None for other arrays."""
    sharding = getattr(value, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


class CompiledLoop:
    """One layer of a `LayerLoop`: one program per direction, for all layers.

    Attributes:
      loop: the loop.
      differentiated: whether each value carried between layers has a gradient.
      shared: shared inputs that get a gradient.
      stacked: stacked inputs that get a gradient.
      trained: weights that get a gradient.
      forward: `f(weights, index, shared, stacked, carried) -> (carried, collected)`,
        given the weights of layer `index` and the values of all layers' inputs.
      backward: `f(weights, index, shared, stacked, carried, cotangents, totals)`
        returns the cotangents of the layer's carried inputs, the cotangents of `shared`
        summed so far, and the cotangents of its slices of `stacked` and of its
        `trained` weights.
      forward_saving: like `forward`; also returns the activations that `backward_saved`
        needs.
      backward_saved: `f(weights, saved, cotangents, totals)` returns the same as
        `backward`, without running the layer forward again.
    """

    def __init__(
        self,
        loop: LayerLoop,
        active: Collection[Var],
        gathered: Mapping[Var, NamedSharding | None],
    ):
        """Sets up the programs; nothing is compiled yet.

        `active` are the variables with a gradient, and `gathered` has the sharding of
        each weight's layer while it is computed on a mesh.
        """
        self.loop = loop
        self._gathered = [gathered[var] for var in loop.weights]
        self.differentiated = [var in active for var in loop.end]
        self.shared = [var for var in loop.shared if var in active]
        self.stacked = [var for var in loop.stacked if var in active]
        self.trained = [var for var in loop.weights if var in active]
        # On a mesh, values leave each layer as they enter it.
        self.forward = CompiledOnce(
            self._forward, lambda *arguments: (arguments[4], None)
        )
        self.backward = CompiledOnce(
            self._backward, lambda *arguments: (*arguments[5:], None, None)
        )
        self.forward_saving = CompiledOnce(
            self._forward_saving, lambda *arguments: (arguments[4], None, None)
        )
        self.backward_saved = CompiledOnce(
            self._backward_saved, lambda *arguments: (*arguments[2:], None, None)
        )
        # What `forward_saving` saves: the structure of the layer's backward function,
        # and for each of its arrays the weight that it is, or None.
        self._saved_structure: Any = None
        self._saved_weights: list[int | None] = []

    def differentiable(self, carried: Sequence[Any]) -> Values:
        """Selects the carried values that have a gradient."""
        return list(itertools.compress(carried, self.differentiated))

    def _forward(
        self,
        weights: Values,
        index: Int[Array, ""],
        shared: Values,
        stacked: Values,
        carried: Values,
    ) -> tuple[Values, Values]:
        return self._layer(weights, shared, _slices(stacked, index), carried)

    def _layer(
        self, weights: Values, shared: Values, slices: Values, carried: Values
    ) -> tuple[Values, Values]:
        """Runs one layer, after each device has gathered its weights."""
        whole = [
            weight
            if sharding is None
            else jax.lax.with_sharding_constraint(weight, sharding)
            for weight, sharding in zip(weights, self._gathered, strict=True)
        ]
        return self.loop.layer(whole, shared, slices, carried)

    def _backward(
        self,
        weights: Values,
        index: Int[Array, ""],
        shared: Values,
        stacked: Values,
        carried: Values,
        cotangents: Cotangents,
        totals: Values,
    ) -> tuple[Values, Values, Values, Values]:
        run, arguments = self._differentiable(weights, index, shared, stacked, carried)
        leaving, pull_back, _ = jax.vjp(run, *arguments, has_aux=True)
        return self._add_gradients(pull_back, leaving, cotangents, totals)

    def _forward_saving(
        self,
        weights: Values,
        index: Int[Array, ""],
        shared: Values,
        stacked: Values,
        carried: Values,
    ) -> tuple[Values, Values, Values]:
        run, arguments = self._differentiable(weights, index, shared, stacked, carried)
        # What is computed from the weights alone is computed again, not saved.
        run = checkpointed(run, ALL_BUT_WEIGHTS, in_scan=False)
        _, pull_back, (leaving, collected) = jax.vjp(run, *arguments, has_aux=True)
        leaves, self._saved_structure = jax.tree.flatten(pull_back)
        # The weights themselves are given again.
        self._saved_weights = [
            next((i for i, weight in enumerate(weights) if weight is leaf), None)
            for leaf in leaves
        ]
        pairs = zip(leaves, self._saved_weights, strict=True)
        return leaving, collected, [leaf for leaf, place in pairs if place is None]

    def _backward_saved(
        self,
        weights: Values,
        saved: Values,
        cotangents: Cotangents,
        totals: Values,
    ) -> tuple[Values, Values, Values, Values]:
        remaining = iter(saved)
        leaves = [
            next(remaining) if place is None else weights[place]
            for place in self._saved_weights
        ]
        pull_back = jax.tree.unflatten(self._saved_structure, leaves)
        kinds: Any = [var.aval for var in self.differentiable(self.loop.end)]
        leaving = [jnp.zeros(kind.shape, kind.dtype) for kind in kinds]
        return self._add_gradients(pull_back, leaving, cotangents, totals)

    def _add_gradients(
        self,
        pull_back: Callable[..., Any],
        leaving: Values,
        cotangents: Cotangents,
        totals: Values,
    ) -> tuple[Values, Values, Values, Values]:
        d_carried, d_shared, d_slices, d_weights = pull_back(
            fill_with_zeros(cotangents, leaving)
        )
        # All layers read the shared inputs, so their gradients are summed over layers.
        totals = [a + b for a, b in zip(totals, d_shared, strict=True)]
        return d_carried, totals, d_slices, d_weights

    def _differentiable(
        self,
        weights: Values,
        index: Int[Array, ""],
        shared: Values,
        stacked: Values,
        carried: Values,
    ) -> tuple[Callable[..., Any], tuple[Values, Values, Values, Values]]:
        """Returns the layer as a function of its differentiated inputs, and them.

        The function returns the differentiated outputs and all outputs: gradients of
        frozen weights are never computed.
        """
        loop = self.loop
        all_shared = dict(zip(loop.shared, shared, strict=True))
        all_slices = dict(zip(loop.stacked, _slices(stacked, index), strict=True))
        all_weights = dict(zip(loop.weights, weights, strict=True))

        def run(
            changed: Values, own_shared: Values, own_slices: Values, own_weights: Values
        ) -> tuple[Values, tuple[Values, Values]]:
            shared = all_shared | dict(zip(self.shared, own_shared, strict=True))
            slices = all_slices | dict(zip(self.stacked, own_slices, strict=True))
            used = all_weights | dict(zip(self.trained, own_weights, strict=True))
            remaining = iter(changed)
            entering = [
                next(remaining) if differentiated else value
                for value, differentiated in zip(
                    carried, self.differentiated, strict=True
                )
            ]
            outputs = self._layer(
                [used[var] for var in loop.weights],
                [shared[var] for var in loop.shared],
                [slices[var] for var in loop.stacked],
                entering,
            )
            return self.differentiable(outputs[0]), outputs

        arguments = (
            self.differentiable(carried),
            [all_shared[var] for var in self.shared],
            [all_slices[var] for var in self.stacked],
            [all_weights[var] for var in self.trained],
        )
        return run, arguments


def _slices(stacked: Values, index: Int[Array, ""]) -> Values:
    # Of each, [L, ...] -> [...].
    return [jax.lax.dynamic_index_in_dim(x, index, keepdims=False) for x in stacked]
