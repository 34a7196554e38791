"""Splits a traced program: what some outputs need first, then the rest.

The first half computes some outputs, the second half all others. If both need a value,
the first half computes it and hands it over, unless it is cheap to recompute from the
program's inputs, e.g. a mask, a cast or a broadcast. If both need parts of a loop, it
becomes two loops: the first stacks what the second reads.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core.primitives import scan_p

from prompt_tuning.streaming.traced_equations import (
    evaluate,
    live_steps,
    operands,
    run_scan,
    variables,
)

CHEAP = frozenset(
    {
        "add",
        "and",
        "axis_index",
        "broadcast_in_dim",
        "clamp",
        "concatenate",
        "convert_element_type",
        "copy",
        "cos",
        "div",
        "dynamic_slice",
        "eq",
        "exp2",
        "expand_dims",
        "floor",
        "gather",
        "ge",
        "gt",
        "integer_pow",
        "iota",
        "le",
        "log",
        "lt",
        "max",
        "min",
        "mul",
        "ne",
        "neg",
        "not",
        "or",
        "pad",
        "pow",
        "rem",
        "reshape",
        "rsqrt",
        "select_n",
        "sign",
        "sin",
        "slice",
        "split",
        "sqrt",
        "square",
        "squeeze",
        "stop_gradient",
        "sub",
        "transpose",
    }
)
"""Primitives without a product, a reduction, a random number or a collective."""


class Handed:
    """A value that the first half stacks in a loop and hands to the second."""


class Half(NamedTuple):
    """Some steps of a program, as a function.

    Attributes:
      program: the program.
      constants: values of its constants.
      steps: its equations, and loops made from some.
      outputs: what the steps compute.
      reads: what they read, except for constants.
    """

    program: Jaxpr
    constants: Mapping[Any, Any]
    steps: Sequence[Any]
    outputs: Sequence[Any]
    reads: tuple[Any, ...]

    @classmethod
    def of(
        cls, closed: ClosedJaxpr, steps: Sequence[Any], outputs: Sequence[Any]
    ) -> "Half":
        """Returns the steps that some outputs need."""
        constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        live, needed = live_steps(steps, variables(outputs))
        computed = {var for step in live for var in step.outvars}
        reads = [var for var in needed if var not in computed and var not in constants]
        return cls(closed.jaxpr, constants, live, list(outputs), tuple(reads))

    def __call__(self, values: Mapping[Any, Any]) -> list[Any]:
        """Returns the values of `outputs`, given values of `reads`."""
        return evaluate(
            self.program, self.steps, self.outputs, {**self.constants, **values}
        )


def divide(
    closed: ClosedJaxpr, first: Sequence[Any], second: Sequence[Any]
) -> tuple[Half, Half, list[Any]]:
    """Divides a program without calls in two.

    Returns:
      the halves, and the values that the first hands to the second, after its outputs.
    """
    program = closed.jaxpr
    parts = _first_parts(program, first)
    ready = {var for part in parts.values() for var in part.outvars}
    search = _SecondHalf(program, parts, ready)
    search.run(second)
    handed = list(search.handed)
    again = [e for e in program.eqns if id(e) in search.repeated.chosen]
    steps = [parts[id(e)] for e in program.eqns if id(e) in parts]
    # Finished only now: a loop has to stack what the second half reads.
    steps = [x.first_loop() if isinstance(x, LoopHalves) else x for x in steps]
    return (
        Half.of(closed, steps, [*first, *handed]),
        Half.of(closed, [*again, *search.steps[::-1]], second),
        handed,
    )


def _first_parts(program: Jaxpr, outputs: Sequence[Any]) -> dict[int, Any]:
    """Returns the part of each equation that some outputs need, by its identity."""
    needed, parts = set(variables(outputs)), {}
    for equation in reversed(program.eqns):
        wanted = [var in needed for var in equation.outvars]
        if not any(wanted):
            continue
        part: Any = equation
        if equation.primitive is scan_p and not all(wanted):
            part = LoopHalves(equation, wanted)
        parts[id(equation)] = part
        needed |= set(variables(part.invars))
    return parts


def _needed(program: Jaxpr, outputs: Sequence[Any]) -> set[Any]:
    """Returns all variables that some outputs need."""
    parts = _first_parts(program, outputs)
    needed = {var for part in parts.values() for var in variables(part.invars)}
    return needed | set(variables(outputs))


class Repeated:
    """Finds values that are cheap to recompute from a program's inputs.

    Attributes:
      chosen: equations to recompute, by their identity.
    """

    def __init__(self, equations: Sequence[JaxprEqn], inputs: Collection[Any]):
        """Sets up the search.

        `equations` may be recomputed, and `inputs` are available at any time.
        """
        self._inputs = inputs
        self._producers = {var: e for e in equations for var in e.outvars}
        self._cheap: dict[Any, bool] = {}
        self.chosen: dict[int, JaxprEqn] = {}

    def computes(self, var: Any) -> bool:
        """Tests whether a value is cheap to recompute."""
        if var in self._inputs:
            return True
        if var not in self._cheap:
            producer = self._producers.get(var)
            self._cheap[var] = (
                producer is not None
                and producer.primitive.name in CHEAP
                and all(map(self.computes, variables(producer.invars)))
            )
        return self._cheap[var]

    def choose(self, var: Any) -> None:
        """Chooses the equations that recompute a value."""
        if var in self._inputs or id(self._producers[var]) in self.chosen:
            return
        producer = self._producers[var]
        self.chosen[id(producer)] = producer
        for operand in variables(producer.invars):
            self.choose(operand)


class _SecondHalf:
    """The steps of the second half, found from last to first.

    Attributes:
      steps: the steps, the last one first.
      handed: values of the first half that they read.
      repeated: equations of the first half to recompute.
    """

    def __init__(self, program: Jaxpr, parts: Mapping[int, Any], ready: set[Any]):
        self._program, self._parts, self._ready = program, parts, ready
        self._given = {*program.invars, *program.constvars}
        self._needed: set[Any] = set()
        self.steps: list[Any] = []
        self.handed: dict[Any, None] = {}
        self.repeated = Repeated(program.eqns, self._given)

    def run(self, outputs: Sequence[Any]) -> None:
        """Finds the steps that some outputs need."""
        self._ask(outputs)
        for equation in reversed(self._program.eqns):
            part = self._parts.get(id(equation))
            wanted = [var in self._needed for var in equation.outvars]
            if part is equation or not any(wanted):
                continue
            step = equation if part is None else part.second_loop(wanted)
            self.steps.append(step)
            self._ask(step.invars)

    def _ask(self, atoms: Sequence[Any]) -> None:
        """Finds where the values that a step reads come from."""
        for var in variables(atoms):
            if var in self._given:
                continue
            if isinstance(var, Handed):
                self.handed[var] = None
            elif var not in self._ready:
                self._needed.add(var)
            elif self.repeated.computes(var):
                self.repeated.choose(var)
            else:
                self.handed[var] = None


@dataclasses.dataclass(frozen=True)
class _PartialLoop:
    """A loop over some of another loop's values.

    Attributes:
      equation: the whole loop.
      body: what an iteration computes.
      inputs: variables of the body that are shared, carried and sliced.
      outputs: number of values carried out of an iteration, the first ones of the body.
      invars: what the loop reads.
      outvars: what it computes.
    """

    equation: JaxprEqn
    body: Half
    inputs: tuple[list[Any], list[Any], list[Any]]
    invars: list[Any]
    outvars: list[Any]

    def run(self, *values: Any) -> list[Any]:
        """Runs the loop."""
        shared, carried, sliced = self.inputs
        whole = dict(zip(shared, values[: len(shared)], strict=True))
        count = len(carried)

        def body(state: list, slices: list) -> tuple[list, list]:
            inputs = zip([*carried, *sliced], [*state, *slices], strict=True)
            outputs = self.body(whole | dict(inputs))
            return outputs[:count], outputs[count:]

        first = len(shared)
        start, stacked = values[first : first + count], values[first + count :]
        return run_scan(self.equation, body, start, stacked)


class LoopHalves:
    """A loop with some outputs that the first half of a program needs.

    Attributes:
      invars: what the first half's loop reads.
      outvars: what it computes, without what it hands over.
    """

    def __init__(self, equation: JaxprEqn, wanted: Sequence[bool]):
        """Finds what the first half computes.

        `wanted` tells which of the loop's outputs the first half needs.
        """
        self._equation, self._closed = equation, equation.params["jaxpr"]
        self._body: Jaxpr = self._closed.jaxpr
        consts, start, _ = operands(equation)
        self._shared = self._body.invars[: len(consts)]
        self._carried = self._body.invars[len(consts) : len(consts) + len(start)]
        self._outer = dict(zip(self._body.invars, equation.invars, strict=True))
        self._early = self._with_carried(wanted, lambda i: True)
        needed = _needed(self._body, self._select(self._body.outvars, self._early))
        carried = self._select(self._carried, self._early)
        self.invars = [
            self._outer[var]
            for var in self._body.invars
            if var in needed or var in carried
        ]
        self.outvars = self._select(equation.outvars, self._early)
        self._first: Half | None = None
        self._stacked: list[Any] = []
        self._handed: list[Handed] = []

    def _select(self, items: Sequence[Any], chosen: Sequence[bool]) -> list[Any]:
        # Carried values are fewer than outputs.
        return [item for item, use in zip(items, chosen, strict=False) if use]

    def _with_carried(
        self, wanted: Sequence[bool], allowed: Callable[[int], bool]
    ) -> list[bool]:
        """Adds the carried values that wanted outputs of any iteration need."""
        while True:
            needed = _needed(self._body, self._select(self._body.outvars, wanted))
            carried = [
                var in needed and allowed(i) for i, var in enumerate(self._carried)
            ]
            carried += [False] * (len(wanted) - len(carried))
            more = [a or b for a, b in zip(wanted, carried, strict=True)]
            if more == list(wanted):
                return more
            wanted = more

    def second_loop(self, wanted: Sequence[bool]) -> _PartialLoop:
        """Returns the loop of what the second half needs and the first does not."""
        late = [w and not e for w, e in zip(wanted, self._early, strict=True)]
        late = self._with_carried(late, lambda i: not self._early[i])
        first, second, handed = divide(
            self._closed,
            self._select(self._body.outvars, self._early),
            self._select(self._body.outvars, late),
        )
        # What the first loop carries, the second reads as it was in each iteration.
        early = set(self._select(self._carried, self._early))
        self._stacked = [*handed, *(var for var in second.reads if var in early)]
        self._handed = [Handed() for _ in self._stacked]
        self._first = first
        return self._loop(second, late, self._stacked)

    def first_loop(self) -> _PartialLoop:
        """Returns the loop of the first half, which stacks what the second reads."""
        outputs = self._select(self._body.outvars, self._early)
        if self._first is None:
            self._first, _, _ = divide(self._closed, outputs, [])
        body = Half.of(self._closed, self._first.steps, [*outputs, *self._stacked])
        loop = self._loop(body, self._early, [])
        return dataclasses.replace(loop, outvars=[*loop.outvars, *self._handed])

    def _loop(
        self, body: Half, outputs: Sequence[bool], extra: Sequence[Any]
    ) -> _PartialLoop:
        """Returns a loop that computes some outputs and reads extra stacked values."""
        shared = [var for var in self._shared if var in body.reads]
        carried = self._select(self._carried, outputs)
        leading = {*self._shared, *self._carried}
        sliced = [
            var
            for var in self._body.invars
            if var not in leading and var in body.reads and var not in extra
        ]
        outer = [self._outer[var] for var in (*shared, *carried, *sliced)]
        handed = self._handed if extra else []
        return _PartialLoop(
            self._equation,
            body,
            (shared, carried, [*sliced, *extra]),
            [*outer, *handed],
            self._select(self._equation.outvars, outputs),
        )
