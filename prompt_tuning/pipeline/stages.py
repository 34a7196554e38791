"""Divides a traced model into stages at its loops over blocks.

The blocks of a stack (an encoder or a decoder) are one `jax.lax.scan`, and all stacks
in order are a chain of blocks. A stage has some consecutive blocks of it: it runs the
loops over its own slices of whatever is stacked. The equations that a stack needs come
before its first block, and the head and the loss after the last block of the last
stack.

Values that depend on no block (masks, positions, dropout keys, a prompt's vectors) are
computed by every stage that reads them. Values that depend on blocks, e.g. an encoder's
output, are computed by one stage and sent on to the stages that read them.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, JaxprEqn, Var
from jax.extend.core.primitives import scan_p

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.streaming.traced_equations import (
    evaluate,
    live_steps,
    operands,
    run_scan,
    variables,
)

StackRanges = Mapping[str, range]
"""The blocks of one stage, by stack."""


def stage_blocks(
    counts: Mapping[str, int], layers: Sequence[int]
) -> tuple[StackRanges, ...]:
    """Returns the blocks of each stage.

    `counts` is the number of blocks of each stack, in the order in which they run, and
    `layers` the number of blocks of each stage.

    Raises:
      InputError: if a stage has no block, or the numbers do not add up.
    """
    total = sum(counts.values())
    if sum(layers) != total or min(layers) < 1:
        stacks = " + ".join(f"{count} ({name})" for name, count in counts.items())
        raise InputError(
            f"Pipeline.layers is {list(layers)}, expected a number of blocks of at "
            f"least 1 for each stage, which together are the model's {stacks}"
        )
    ends = list(itertools.accumulate(layers))
    stages = []
    for first, stop in zip([0, *ends], ends, strict=False):
        offset, blocks = 0, {}
        for name, count in counts.items():
            in_stack = range(max(first - offset, 0), min(stop - offset, count))
            if in_stack:
                blocks[name] = in_stack
            offset += count
        stages.append(blocks)
    return tuple(stages)


class Carried:
    """A value that a loop carries from the last block of a stage to the next stage."""


@dataclasses.dataclass(frozen=True)
class StageFunction:
    """One stage's part of a program.

    Attributes:
      closed: the program.
      steps: the stage's equations and loops.
      inputs: inputs of the program that the stage reads.
      incoming: values from the previous stage.
      outgoing: values for the next stage.
      outputs: outputs of the program that the stage computes, by index; only its own
        slice of outputs stacked on blocks.
    """

    closed: ClosedJaxpr
    steps: Sequence[Any]
    inputs: tuple[Var, ...]
    incoming: tuple[Any, ...]
    outgoing: tuple[Any, ...]
    outputs: Mapping[int, Any]

    def __call__(
        self, inputs: Mapping[Var, Any], incoming: Sequence[Any]
    ) -> tuple[list[Any], dict[int, Any]]:
        """Returns the values of `outgoing` and of `outputs`."""
        program = self.closed.jaxpr
        values = dict(zip(program.constvars, self.closed.consts, strict=True))
        values |= inputs
        values |= zip(self.incoming, incoming, strict=True)
        wanted = [*self.outgoing, *self.outputs.values()]
        results = evaluate(program, self.steps, wanted, values)
        count = len(self.outgoing)
        return results[:count], dict(zip(self.outputs, results[count:], strict=True))


@dataclasses.dataclass(frozen=True)
class _BlockLoop:
    """A loop over the blocks of one stage.

    Attributes:
      equation: the loop over all blocks.
      own: the stage's blocks.
      sliced: inputs and values of which the stage has only its blocks' slices.
      invars: what the loop reads.
      outvars: what it computes.
    """

    equation: JaxprEqn
    own: range
    sliced: frozenset[Any]
    invars: Sequence[Any]
    outvars: Sequence[Any]

    def run(self, *values: Any) -> list[Any]:
        """Runs the blocks of the stage."""
        consts, start, stacked = operands(self.equation)
        first = len(consts)
        whole, carried = values[:first], values[first : first + len(start)]
        slices = [
            value if atom in self.sliced else value[self.own.start : self.own.stop]
            for atom, value in zip(stacked, values[first + len(start) :], strict=True)
        ]
        program = self.equation.params["jaxpr"]

        def body(carried: list, slices: list) -> tuple[list, list]:
            constants = dict(zip(program.jaxpr.constvars, program.consts, strict=True))
            arguments = [*whole, *carried, *slices]
            constants |= zip(program.jaxpr.invars, arguments, strict=True)
            outputs = evaluate(
                program.jaxpr, program.jaxpr.eqns, program.jaxpr.outvars, constants
            )
            return outputs[: len(start)], outputs[len(start) :]

        return run_scan(self.equation, body, carried, slices, len(self.own))


class StagedProgram:
    """A traced program divided into stages.

    Attributes:
      stages: what each stage computes.
      sliced: the stack of each input that only loops over its blocks read: a stage
        needs only its own blocks' slices.
    """

    def __init__(
        self,
        closed: ClosedJaxpr,
        stacks: Mapping[Var, str],
        whole: Iterable[Var],
        blocks: Sequence[StackRanges],
        counts: Mapping[str, int],
    ):
        """Divides a program.

        Args:
          closed: the program.
          stacks: the stack of each input that holds parameters of its blocks.
          whole: inputs not to slice even if only loops read them.
          blocks: the blocks of each stage.
          counts: number of blocks of each stack, in the order in which they run.

        Raises:
          InputError: if anything reads the blocks other than one after another.
        """
        self._closed, self._blocks, self._counts = closed, blocks, counts
        self._names = list(counts)
        self._loops = _stack_loops(closed, stacks, counts)
        self.sliced = self._sliced_inputs(set(whole))
        self._stacked = {
            var: name
            for equation, name in self._loops.values()
            for var in equation.outvars[len(operands(equation)[1]) :]
        }
        self._levels = self._level_of_variables()
        self._carried: dict[tuple[int, int], list[Carried]] = {}
        self.stages = self._divide()

    def _sliced_inputs(self, whole: set[Var]) -> dict[Var, str]:
        """Finds the inputs that are read only in slices, by the loops of one stack."""
        program, readers = self._closed.jaxpr, {}
        for equation in program.eqns:
            _, name = self._loops.get(id(equation), (None, None))
            sliced = [] if name is None else variables(operands(equation)[2])
            for var in variables(equation.invars):
                readers.setdefault(var, set()).add(name if var in sliced else None)
            if name is not None:
                consts, start, _ = operands(equation)
                for var in variables([*consts, *start]):
                    readers[var].add(None)
        for var in variables(program.outvars):
            readers.setdefault(var, set()).add(None)
        return {
            var: next(iter(readers[var]))
            for var in program.invars
            if len(readers.get(var, ())) == 1
            and None not in readers[var]
            and var not in whole
        }

    def _level_of_variables(self) -> dict[Any, int]:
        """Numbers each computed value by the stacks that run before it."""
        levels: dict[Any, int] = {}
        for equation in self._closed.jaxpr.eqns:
            loop = self._loops.get(id(equation))
            inputs = variables(equation.invars)
            level = max((levels.get(var, 0) for var in inputs), default=0)
            if loop is None:
                self._check_whole(inputs)
                levels |= dict.fromkeys(equation.outvars, level)
                continue
            stack = self._names.index(loop[1])
            consts, start, slices = operands(equation)
            self._check_whole(variables([*consts, *start]))
            unsliced = [x for x in variables(slices) if self._stacked.get(x) != loop[1]]
            self._check_whole(unsliced)
            if level > stack:
                raise _order_error(loop[1])
            levels |= dict.fromkeys(equation.outvars[: len(start)], stack + 1)
        return levels

    def _check_whole(self, atoms: Iterable[Any]) -> None:
        stacked = [var for var in atoms if var in self._stacked]
        if stacked:
            raise InputError(
                f"an array of shape {stacked[0].aval.shape}, which the blocks of the "
                f"{self._stacked[stacked[0]]} compute one by one, is read as a whole, "
                "but in a pipeline no stage has all of it; use "
                f"{how_to_set('Run.pipeline', None)}"
            )

    def _home(self, level: int) -> int:
        """Returns the stage of the equations that come before a stack, or after all."""
        if level == len(self._names):
            return len(self._blocks) - 1
        name = self._names[level]
        return next(
            i for i, ranges in enumerate(self._blocks) if 0 in ranges.get(name, ())
        )

    def _divide(self) -> tuple[StageFunction, ...]:
        stages: list[StageFunction] = []
        outgoing: tuple[Any, ...] = ()
        for stage in reversed(range(len(self._blocks))):
            stages.append(self._stage(stage, outgoing))
            outgoing = stages[-1].incoming
        if outgoing:
            raise _order_error(self._names[0])
        return tuple(stages[::-1])

    def _stage(self, stage: int, outgoing: tuple[Any, ...]) -> StageFunction:
        steps = [
            step
            for equation in self._closed.jaxpr.eqns
            if (step := self._step(stage, equation)) is not None
        ]
        outputs = self._outputs(stage)
        steps, needed = live_steps(
            steps, dict.fromkeys(variables([*outgoing, *outputs.values()]))
        )
        computed = {var for step in steps for var in step.outvars}
        computed |= set(self._closed.jaxpr.constvars)
        known = set(self._closed.jaxpr.invars)
        reads = [var for var in needed if var not in computed]
        return StageFunction(
            self._closed,
            steps,
            tuple(var for var in self._closed.jaxpr.invars if var in needed),
            tuple(var for var in reads if var not in known),
            outgoing,
            outputs,
        )

    def _outputs(self, stage: int) -> dict[int, Any]:
        outputs = {}
        for i, var in enumerate(self._closed.jaxpr.outvars):
            computed = variables([var])
            name = self._stacked.get(var) if computed else None
            if name is not None:
                here = name in self._blocks[stage]
            else:
                level = self._levels.get(var, 0) if computed else 0
                here = stage == self._home(level or len(self._names))
            if here:
                outputs[i] = var
        return outputs

    def _step(self, stage: int, equation: JaxprEqn) -> Any:
        """Returns a stage's part of an equation; None if it has none."""
        loop = self._loops.get(id(equation))
        if loop is not None:
            stage_range = self._blocks[stage].get(loop[1])
            return (
                None
                if stage_range is None
                else self._loop(stage, equation, loop[1], stage_range)
            )
        inputs = variables(equation.invars)
        level = max((self._levels.get(var, 0) for var in inputs), default=0)
        return equation if level == 0 or self._home(level) == stage else None

    def _loop(
        self, stage: int, equation: JaxprEqn, name: str, own: range
    ) -> _BlockLoop:
        consts, start, stacked = operands(equation)
        count = len(start)
        entering, leaving = list(start), list(equation.outvars[:count])
        if own.start > 0:
            entering = self._boundary(equation, stage - 1, count)
        if own.stop < self._counts[name]:
            leaving = self._boundary(equation, stage, count)
        sliced = [x for x in variables(stacked) if x in self.sliced]
        sliced += [x for x in variables(stacked) if x in self._stacked]
        return _BlockLoop(
            equation,
            own,
            frozenset(sliced),
            [*consts, *entering, *stacked],
            [*leaving, *equation.outvars[count:]],
        )

    def _boundary(self, equation: JaxprEqn, stage: int, count: int) -> list[Carried]:
        """Returns what a loop carries out of a stage."""
        key = (id(equation), stage)
        if key not in self._carried:
            self._carried[key] = [Carried() for _ in range(count)]
        return self._carried[key]


def _stack_loops(
    closed: ClosedJaxpr, stacks: Mapping[Var, str], counts: Mapping[str, int]
) -> dict[int, tuple[JaxprEqn, str]]:
    """Finds the loops over blocks, by the identity of their equations.

    Raises:
      InputError: if anything else reads the parameters of blocks.
    """
    loops = {}
    for equation in closed.jaxpr.eqns:
        inputs = [var for var in variables(equation.invars) if var in stacks]
        if not inputs:
            continue
        name = stacks[inputs[0]]
        sliced = set(variables(operands(equation)[2])) if _is_loop(equation) else set()
        if not sliced.issuperset(inputs):
            raise InputError(
                f"the blocks of the {name} cannot be divided into stages, because "
                f"{equation.primitive.name!r} reads the parameters of all of them at "
                "once (skipped blocks in Rematerialization do); set skip_first and "
                f"skip_last to 0, or {how_to_set('Run.pipeline', None)}"
            )
        if equation.params["length"] != counts[name]:
            raise _order_error(name)
        loops[id(equation)] = (equation, name)
    if not loops:
        raise _order_error(next(iter(counts)))
    return loops


def _is_loop(equation: JaxprEqn) -> bool:
    return equation.primitive is scan_p and not equation.params["reverse"]


def _order_error(name: str) -> InputError:
    return InputError(
        f"the blocks of the {name} do not run once, one after another, as the stages "
        f"of a pipeline need it; use {how_to_set('Run.pipeline', None)}"
    )
