"""Splits a traced program at its loops over layers.

`jax.lax.scan` over stacked weights is one equation of the trace and contains all that
is needed to run it layer by layer: what each layer reads, what is carried to the next
one, and the layer's program. Loops over the same number of layers run in lockstep if
they depend on each other layer by layer: e.g. a T5's cross-attention keys and values of
layer `i` are computed where the decoder's block `i` reads them, and a prompt that runs
ahead of the text is one block ahead of it.
"""

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.extend.core.primitives import scan_p

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.streaming.traced_equations import (
    is_floating,
    live_steps,
    operands,
    subprogram,
    value_of,
    variables,
)

Values = list[Any]


@dataclasses.dataclass(frozen=True)
class Segment:
    """The equations between two loops over layers.

    Attributes:
      inputs: variables that they read.
      outputs: variables that are read later.
      run: `f(*values of inputs) -> values of outputs`.
    """

    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    run: Callable[..., Values]


@dataclasses.dataclass(frozen=True)
class LayerLoop:
    """Loops over layers that run in lockstep.

    Attributes:
      length: number of layers, `L`.
      scans: the loops.
      weights: streamed inputs of the program; each layer reads its slice.
      shared: variables that every layer reads whole.
      stacked: other variables stacked on `L`; each layer reads its slice.
      start: values carried into the first layer, of all loops.
      end: values carried out of the last layer.
      collected: outputs stacked over layers that are read after the loops.
    """

    length: int
    scans: tuple[JaxprEqn, ...]
    weights: tuple[Var, ...]
    shared: tuple[Var, ...]
    stacked: tuple[Var, ...]
    start: tuple[Var | Literal, ...]
    end: tuple[Var, ...]
    collected: tuple[Var, ...] = ()

    def layer(
        self, weights: Values, shared: Values, slices: Values, carried: Values
    ) -> tuple[Values, Values]:
        """Runs one layer of all loops.

        Returns:
          the values carried out of the layer, and its slices of `collected`.
        """
        slice_values = dict(zip(self.weights, weights, strict=True))
        slice_values |= zip(self.stacked, slices, strict=True)
        shared_values = dict(zip(self.shared, shared, strict=True))
        carried_out, first = [], 0
        for scan in self.scans:
            consts, start, sliced = operands(scan)
            count = len(start)
            # A scan's body takes constants, carried values and slices, in this order.
            arguments = [value_of(const, shared_values) for const in consts]
            arguments += carried[first : first + count]
            arguments += [value_of(atom, slice_values) for atom in sliced]
            outputs = jaxpr_as_fun(scan.params["jaxpr"])(*arguments)
            carried_out += outputs[:count]
            # Slices that this loop computes may be read by a later one of the stage.
            slice_values |= zip(scan.outvars[count:], outputs[count:], strict=True)
            first += count
        return carried_out, [slice_values[var] for var in self.collected]


@dataclasses.dataclass(frozen=True)
class SplitProgram:
    """A program as a segment, a loop, a segment, ..., and a last segment.

    Attributes:
      segments: the segments, one more than loops.
      loops: the loops between them.
    """

    segments: tuple[Segment, ...]
    loops: tuple[LayerLoop, ...]


def split_at_loops(program: Jaxpr, streamed: Mapping[Var, str]) -> SplitProgram:
    """Splits a program at the loops that read streamed inputs.

    `streamed` has the names of the inputs to bring in layer by layer.

    Raises:
      InputError: if such an input is read other than by a loop over its layers.
    """
    stages = _Stages(program, streamed)
    for equation in program.eqns:
        stages.add(equation)
    stages.collect(variables(program.outvars))
    count = max(stages.scans, default=-1) + 1
    loops = [
        _loop(stages.scans[stage], streamed, stages.collected) for stage in range(count)
    ]
    equations = [stages.equations.get(stage, []) for stage in range(count + 1)]
    segments = [
        _segment(program, equations, loops, stage) for stage in range(count + 1)
    ]
    return SplitProgram(tuple(segments), tuple(loops))


class _Stages:
    """Sorts equations by the number of loops over layers that precede them.

    Attributes:
      equations: other equations of each stage; they run before its loops.
      scans: the loops of each stage.
      collected: outputs stacked over layers that are read after their stage.
    """

    def __init__(self, program: Jaxpr, streamed: Mapping[Var, str]):
        self.equations: dict[int, list[JaxprEqn]] = {}
        self.scans: dict[int, list[JaxprEqn]] = {}
        self.collected: set[Var] = set()
        self._streamed = streamed
        # First stage whose equations can read a variable.
        self._available: dict[Var, int] = {}
        # Stage of the loops that compute a variable slice by slice.
        self._sliced: dict[Var, int] = {}

    def add(self, equation: JaxprEqn) -> None:
        """Adds an equation to the first stage that has its inputs."""
        if any(var in self._streamed for var in variables(equation.invars)):
            self._add_loop(equation)
            return
        stage = self._stage(equation.invars)
        self.equations.setdefault(stage, []).append(equation)
        self._available |= dict.fromkeys(equation.outvars, stage)

    def _add_loop(self, scan: JaxprEqn) -> None:
        _check_loop(scan, self._streamed)
        consts, start, slices = operands(scan)
        # A slice that one loop computes can be read by another in the same iteration.
        computed = [var for var in variables(slices) if var in self._sliced]
        unsliced = [var for var in variables(slices) if var not in self._sliced]
        first = self._stage([*consts, *start, *unsliced])
        stage = max([first, *(self._sliced[var] for var in computed)])
        while self._length(stage) not in (None, scan.params["length"]):
            stage += 1
        self.collect(var for var in computed if self._sliced[var] != stage)
        self.scans.setdefault(stage, []).append(scan)
        carried, stacked = scan.outvars[: len(start)], scan.outvars[len(start) :]
        self._available |= dict.fromkeys(carried, stage + 1)
        self._sliced |= dict.fromkeys(stacked, stage)

    def _length(self, stage: int) -> int | None:
        scans = self.scans.get(stage)
        return scans[0].params["length"] if scans else None

    def _stage(self, atoms: Iterable[Var | Literal]) -> int:
        needed = variables(atoms)
        self.collect(needed)
        return max((self._available.get(var, 0) for var in needed), default=0)

    def collect(self, needed: Iterable[Var]) -> None:
        """Stacks those of the needed variables that loops compute, for later stages."""
        stacked = [var for var in needed if var in self._sliced]
        self.collected.update(stacked)
        self._available |= {var: self._sliced[var] + 1 for var in stacked}


def _check_loop(equation: JaxprEqn, streamed: Mapping[Var, str]) -> None:
    """Checks that an equation is a forward loop over the layers of streamed inputs."""
    problem = f"it is read by {equation.primitive.name!r}"
    inputs = [var for var in variables(equation.invars) if var in streamed]
    if equation.primitive is scan_p:
        consts, start, _ = operands(equation)
        inputs = [var for var in variables([*consts, *start]) if var in streamed]
        if not inputs and not equation.params["reverse"]:
            return
        problem = "a loop reads all of it in each iteration, or runs backward"
    name = streamed[inputs[0]] if inputs else "a parameter"
    raise InputError(
        f"{name} is streamed, so only a loop over its layers can read it, but "
        f"{problem}; give {how_to_set('Pretrained.weights', 'device')}, or leave out "
        "what reads it in another way (generating reads all layers for each token)"
    )


def check_collected(loops: Iterable[LayerLoop], differentiated: Container[Var]) -> None:
    """Checks that no gradient flows through outputs that loops stack over layers.

    Raises:
      InputError: gives the shape of such an output.
    """
    for var in (var for loop in loops for var in loop.collected):
        if var in differentiated:
            kind: Any = var.aval
            raise InputError(
                f"a loop over layers stacks an output of all layers, of shape "
                f"{kind.shape}, that is trained and read outside the loop: with "
                "streamed weights only one layer is available at a time in the "
                f"backward pass; give {how_to_set('Pretrained.weights', 'device')}"
            )


def _loop(
    scans: Sequence[JaxprEqn], streamed: Mapping[Var, str], collected: Container[Var]
) -> LayerLoop:
    shared, start, slices, end, computed = [], [], [], [], set()
    for scan in scans:
        consts, first, stacked = operands(scan)
        shared += variables(consts)
        start += first
        slices += [var for var in variables(stacked) if var not in computed]
        end += scan.outvars[: len(first)]
        computed |= set(scan.outvars[len(first) :])
    unique = tuple(dict.fromkeys(slices))
    outputs = [var for scan in scans for var in scan.outvars if var in computed]
    return LayerLoop(
        scans[0].params["length"],
        tuple(scans),
        tuple(var for var in unique if var in streamed),
        tuple(dict.fromkeys(shared)),
        tuple(var for var in unique if var not in streamed),
        tuple(start),
        tuple(end),
        tuple(var for var in outputs if var in collected),
    )


def _segment(
    program: Jaxpr,
    stages: Sequence[Sequence[JaxprEqn]],
    loops: Sequence[LayerLoop],
    stage: int,
) -> Segment:
    """Returns the equations of one stage with later readers, as a function."""
    later = [
        equation.invars
        for later_stage in stages[stage + 1 :]
        for equation in later_stage
    ]
    later += [(*x.shared, *x.stacked, *x.start) for x in loops[stage:]]
    wanted = {var for atoms in [*later, program.outvars] for var in variables(atoms)}
    computed = [var for equation in stages[stage] for var in equation.outvars]
    outputs = [var for var in computed if var in wanted]
    equations, needed = live_steps(stages[stage], outputs)
    internal = set(computed)
    inputs = [var for var in needed if var not in internal]
    run = subprogram(program, inputs, outputs, equations)
    return Segment(tuple(inputs), tuple(outputs), run)


def differentiable_variables(program: Jaxpr, start: Iterable[Var]) -> set[Var]:
    """Returns the floating-point variables that depend on some inputs."""
    differentiable = set(start)
    for equation in program.eqns:
        if not differentiable.isdisjoint(variables(equation.invars)):
            differentiable |= {var for var in equation.outvars if is_floating(var)}
    return differentiable
