"""A function and its gradients as one trace, cut into forward pass, p1 and p2.

`(weights, inputs, others, g) -> (outputs, input gradients, weight gradients)` is traced
once. The forward pass is what does not depend on `g`. Of the rest, p1 is what the
gradients of the inputs need, and p2 what remains. No part repeats earlier work, so p1
and p2 together are exactly the backward pass of `jax.vjp`, bit by bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from prompt_tuning.pipeline.program_split import Half, Repeated, divide
from prompt_tuning.streaming.traced_equations import (
    CALLS,
    CHECKPOINTS,
    DERIVATIVE_RULES,
    inlined,
    live_steps,
    variables,
)

Arrays = list[Any]


class SplitBackward:
    """The forward pass, p1 and p2 of a function for one set of shapes.

    Attributes:
      outputs: shapes of the outputs.
      lasting: number of leaves of the inputs that need not be kept.
      handed_shapes: shapes of what p1 hands to p2.
    """

    def __init__(
        self,
        function: Callable[[Any, Any, Any], Any],
        weights: Any,
        inputs: Any,
        others: Any,
        lasting: int = 0,
    ):
        """Traces and cuts a function.

        Args:
          function: `f(weights, inputs, others) -> outputs`, trees of arrays; outputs
            are floating-point.
          weights: what p2 differentiates with respect to, or its shapes.
          inputs: what p1 differentiates with respect to, or its shapes.
          others: all undifferentiated arguments, or their shapes.
          lasting: how many of the last leaves of `inputs` are available to the backward
            pass without being kept. There they follow `others`.
        """
        self.lasting = lasting
        outputs = jax.eval_shape(function, weights, inputs, others)
        self.outputs = outputs
        trees = weights, inputs, others, outputs
        self._structures = [jax.tree.structure(tree) for tree in trees]

        def joint(weights: Any, inputs: Any, others: Any, gradients: Any) -> Any:
            values, pull_back = jax.vjp(
                lambda w, x: function(w, x, others), weights, inputs
            )
            weight_gradients, input_gradients = pull_back(gradients)
            return values, input_gradients, weight_gradients

        # Checkpoints stay whole: what one recomputes belongs to the backward pass.
        traced = jax.make_jaxpr(joint)(*trees)
        closed = inlined(traced, CALLS | DERIVATIVE_RULES)
        self._cut_forward(closed)
        self._cut_backward(closed)

    def _split(self, items: Sequence[Any], trees: Sequence[int]) -> list[list[Any]]:
        """Splits leaves of trees, given by their indices."""
        parts, first = [], 0
        for tree in trees:
            count = self._structures[tree].num_leaves
            parts.append(list(items[first : first + count]))
            first += count
        return parts

    def _cut_forward(self, closed: ClosedJaxpr) -> None:
        program = closed.jaxpr
        weights, inputs, others, gradients = self._split(program.invars, (0, 1, 2, 3))
        outputs, input_outputs, weight_outputs = self._split(program.outvars, (3, 1, 0))
        self._gradients = [*input_outputs, *weight_outputs]
        dependent, forward, backward = set(gradients), [], []
        for equation in program.eqns:
            if dependent.isdisjoint(variables(equation.invars)):
                forward.append(equation)
            else:
                backward.append(equation)
                dependent |= set(equation.outvars)
        backward, needed = live_steps(backward, variables(self._gradients))
        # The weights are available again later, and so is all that is cheap to make
        # of them; the stage's input is not, so it is kept.
        last = inputs[len(inputs) - self.lasting :]
        self._known = [*weights, *others, *last]
        again = Repeated(forward, {*self._known, *gradients, *program.constvars})
        computed = {var for equation in forward for var in equation.outvars}
        kept = []
        for var in needed:
            if var in computed and again.computes(var):
                again.choose(var)
            elif var in computed or (var in inputs and var not in last):
                kept.append(var)
        self._kept = kept
        self._arguments = [*weights, *others, *inputs]
        self._forward_steps = forward
        self._outer_gradients = gradients
        self._forward = Half.of(closed, forward, [*outputs, *kept])
        repeated = [e for e in forward if id(e) in again.chosen]
        self._backward = Half.of(closed, [*repeated, *backward], self._gradients)

    def _cut_backward(self, closed: ClosedJaxpr) -> None:
        """Retraces the backward pass with checkpoints opened, and divides it."""
        variables_in = [*self._known, *self._kept, *self._outer_gradients]

        def run(*values: Any) -> list[Any]:
            return self._backward(dict(zip(variables_in, values, strict=True)))

        traced = jax.make_jaxpr(run)(*[var.aval for var in variables_in])
        opened = inlined(traced, CALLS | DERIVATIVE_RULES | CHECKPOINTS)
        program = opened.jaxpr
        first, second = self._split(program.outvars, (1, 0))
        self._p1, self._p2, self._handed = divide(opened, first, second)
        self._whole = Half.of(opened, program.eqns, [*first, *second])
        self._backward_inputs = program.invars
        shapes = jax.eval_shape(
            lambda *values: self._p1(
                dict(zip(self._backward_inputs, values, strict=True))
            ),
            *[jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in program.invars],
        )
        self.handed_shapes = shapes[len(first) :]
        reads = set(self._p2.reads)
        self._held = [v for v in program.invars[len(self._known) :] if v in reads]

    def forward(self, weights: Any, inputs: Any, others: Any) -> tuple[Any, Arrays]:
        """Returns the outputs, and what is kept for the backward pass."""
        leaves = jax.tree.leaves((weights, others, inputs))
        results = self._forward(dict(zip(self._arguments, leaves, strict=True)))
        count = self._structures[3].num_leaves
        return self._structures[3].unflatten(results[:count]), results[count:]

    def kept_bytes(self) -> int:
        """Returns the size of what is kept from the forward to the backward pass."""
        return _bytes([var.aval for var in self._kept])

    def postponed_bytes(self, gradients: bool) -> int:
        """Returns the size of what is held from p1 to p2.

        With `gradients` it includes the outputs' gradients, if p2 reads them.
        """
        outer = set(self._backward_inputs[-self._structures[3].num_leaves :])
        held = [var for var in self._held if gradients or var not in outer]
        return _bytes([*(var.aval for var in held), *self.handed_shapes])

    @property
    def held_shapes(self) -> list[Any]:
        """Shapes of the result of `held`."""
        return [var.aval for var in self._held]

    def held_with(self, varying: Sequence[bool], gradients: bool) -> list[bool]:
        """Tells which results of `held` depend on some of the arguments.

        `varying` tells this of each leaf of the weights, the other arguments and the
        inputs, and `gradients` of the outputs' gradients.
        """
        dependent = {
            var for var, use in zip(self._arguments, varying, strict=True) if use
        }
        for equation in self._forward_steps:
            if not dependent.isdisjoint(variables(equation.invars)):
                dependent |= set(equation.outvars)
        flags = [var in dependent for var in self._kept]
        flags += [gradients] * len(self._outer_gradients)
        names = self._backward_inputs[len(self._known) :]
        depends = dict(zip(names, flags, strict=True))
        return [depends[var] for var in self._held]

    def p2_reads(self) -> list[bool]:
        """Tells which leaves of the weights and other arguments p2 reads."""
        reads = set(self._p2.reads)
        return [var in reads for var in self._backward_inputs[: len(self._known)]]

    def input_gradient(
        self, weights: Any, others: Any, kept: Arrays, gradients: Any
    ) -> tuple[Any, Arrays]:
        """Computes p1: the gradient of the inputs, and what p2 reads of its results."""
        results = self._p1(self._values(weights, others, kept, gradients))
        count = self._structures[1].num_leaves
        return self._structures[1].unflatten(results[:count]), results[count:]

    def held(self, kept: Arrays, gradients: Any) -> Arrays:
        """Selects what must be held for p2 among what p1 read."""
        leaves = [*kept, *jax.tree.leaves(gradients)]
        names = self._backward_inputs[len(self._known) :]
        values = dict(zip(names, leaves, strict=True))
        return [values[var] for var in self._held]

    def weight_gradient(
        self, weights: Any, others: Any, held: Arrays, handed: Arrays
    ) -> Any:
        """Computes p2: the gradient of the weights."""
        known = jax.tree.leaves((weights, others))
        names = self._backward_inputs[: len(known)]
        values = dict(zip(names, known, strict=True))
        values |= zip(self._held, held, strict=True)
        values |= zip(self._handed, handed, strict=True)
        return self._structures[0].unflatten(self._p2(values))

    def backward(
        self, weights: Any, others: Any, kept: Arrays, gradients: Any
    ) -> tuple[Any, Any]:
        """Computes p1 and p2 together: the gradients of the inputs and the weights."""
        results = self._whole(self._values(weights, others, kept, gradients))
        first, second = self._split(results, (1, 0))
        return self._structures[1].unflatten(first), self._structures[0].unflatten(
            second
        )

    def _values(self, weights: Any, others: Any, kept: Arrays, gradients: Any) -> dict:
        known = jax.tree.leaves((weights, others))
        leaves = [*known, *kept, *jax.tree.leaves(gradients)]
        return dict(zip(self._backward_inputs, leaves, strict=True))


def _bytes(shapes: Sequence[Any]) -> int:
    """Returns the size of arrays in a device's memory, without offloaded ones."""
    host = jax.memory.Space.Host
    on_device = [x for x in shapes if getattr(x, "memory_space", None) != host]
    return sum(shape.size * shape.dtype.itemsize for shape in on_device)
