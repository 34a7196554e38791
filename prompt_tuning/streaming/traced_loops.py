"""A traced program, cut at its loops over layers.

`jax.lax.scan` over stacked weights is one equation of the trace, and says of itself all
that is needed to run it layer by layer: what each layer reads, what goes from one to
the next, and the layer's own program. Loops that walk over the layers alike run in lock
step: a T5's cross-attention keys and values of layer `i` are made where the decoder's
block `i` reads them, and a prompt that runs ahead of the text is one block ahead of it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.extend.core.primitives import scan_p

from prompt_tuning.core.errors import InputError

Values = list[Any]


@dataclasses.dataclass(frozen=True)
class Segment:
    """What lies between two loops over layers.

    Attributes:
      inputs: what it reads.
      outputs: what is read of it later.
      run: of the inputs' values, the outputs'.
    """

    inputs: tuple[Var, ...]
    outputs: tuple[Var, ...]
    run: Callable[..., Values]


@dataclasses.dataclass(frozen=True)
class LayerLoop:
    """Loops over layers that run in lock step.

    Attributes:
      length: layers, `L`.
      scans: the loops.
      weights: the streamed inputs of the program that a layer reads.
      shared: what all layers read alike.
      stacked: what else is stacked on `L`: of each layer its slice.
      start: what goes into the first layer, of all loops.
      end: what comes out of the last one.
    """

    length: int
    scans: tuple[JaxprEqn, ...]
    weights: tuple[Var, ...]
    shared: tuple[Var, ...]
    stacked: tuple[Var, ...]
    start: tuple[Var | Literal, ...]
    end: tuple[Var, ...]

    def layer(
        self, weights: Values, shared: Values, slices: Values, carried: Values
    ) -> Values:
        """One layer of all loops.

        Args:
          weights: the layer's own.
          shared: values of `shared`.
          slices: the layer's own of `stacked`.
          carried: what goes into it.

        Returns:
          what comes out of it.
        """
        own = dict(zip(self.weights, weights, strict=True))
        own |= zip(self.stacked, slices, strict=True)
        known = dict(zip(self.shared, shared, strict=True))
        following, at = [], 0
        for scan in self.scans:
            consts, start, read = operands(scan)
            arguments = [value_of(const, known) for const in consts]
            arguments += carried[at : at + len(start)]
            arguments += [value_of(atom, own) for atom in read]
            made = jaxpr_as_fun(scan.params["jaxpr"])(*arguments)
            following += made[: len(start)]
            own |= zip(scan.outvars[len(start) :], made[len(start) :], strict=True)
            at += len(start)
        return following


def operands(scan: JaxprEqn) -> tuple[list, list, list]:
    """What a loop reads in every turn, in its first one, and a slice of in each."""
    if "num_consts" in scan.params:
        consts, carried = scan.params["num_consts"], scan.params["num_carry"]
    else:
        # From JAX 0.12 on: a tree of three parts.
        consts, carried, _ = map(len, scan.params["ft_in"].unpack())
    slices = consts + carried
    return scan.invars[:consts], scan.invars[consts:slices], scan.invars[slices:]


def value_of(atom: Var | Literal, values: Mapping[Var, Any]) -> Any:
    """What a variable or a literal stands for."""
    return atom.val if isinstance(atom, Literal) else values[atom]


@dataclasses.dataclass(frozen=True)
class SplitProgram:
    """A program in pieces: a segment, a loop, a segment, ..., and a last segment.

    Attributes:
      segments: one more than there are loops.
      loops: between them.
    """

    segments: tuple[Segment, ...]
    loops: tuple[LayerLoop, ...]


def split_at_loops(program: Jaxpr, streamed: Mapping[Var, str]) -> SplitProgram:
    """Cuts a program at the loops that read streamed inputs.

    Args:
      program: the trace.
      streamed: the inputs whose layers are brought in one by one, by what they are
        called.

    Raises:
      InputError: if such an input is read in another way than by a loop over it.
    """
    stages = _Stages(program, streamed)
    for equation in program.eqns:
        stages.add(equation)
    stages.check_whole(variables(program.outvars))
    count = max(stages.scans, default=-1) + 1
    loops = [_loop(stages.scans[stage], streamed) for stage in range(count)]
    pieces = [stages.equations.get(stage, []) for stage in range(count + 1)]
    segments = [_segment(program, pieces, loops, stage) for stage in range(count + 1)]
    return SplitProgram(tuple(segments), tuple(loops))


class _Stages:
    """Sorts equations by how many loops over layers come before them.

    Attributes:
      equations: those that are no such loop, by stage; they run before its loops.
      scans: the loops of each stage.
    """

    def __init__(self, program: Jaxpr, streamed: Mapping[Var, str]):
        self.equations: dict[int, list[JaxprEqn]] = {}
        self.scans: dict[int, list[JaxprEqn]] = {}
        self._streamed = streamed
        self._known: dict[Var, int] = {}
        self._sliced: dict[Var, int] = {}

    def add(self, equation: JaxprEqn) -> None:
        """Puts an equation where everything is known that it reads."""
        if any(var in self._streamed for var in variables(equation.invars)):
            self._add_loop(equation)
            return
        stage = self._stage(equation.invars)
        self.equations.setdefault(stage, []).append(equation)
        self._known |= dict.fromkeys(equation.outvars, stage)

    def _add_loop(self, scan: JaxprEqn) -> None:
        _check_loop(scan, self._streamed)
        consts, start, slices = operands(scan)
        # A slice that a loop makes is there for another one in the same turn.
        made = [var for var in variables(slices) if var in self._sliced]
        given = [var for var in variables(slices) if var not in self._sliced]
        first = self._stage([*consts, *start, *given])
        stage = max([first, *(self._sliced[var] for var in made)])
        while self._length(stage) not in (None, scan.params["length"]):
            stage += 1
        if any(self._sliced[var] != stage for var in made):
            raise _stacked_outside_error(made)
        self.scans.setdefault(stage, []).append(scan)
        carried, stacked = scan.outvars[: len(start)], scan.outvars[len(start) :]
        self._known |= dict.fromkeys(carried, stage + 1)
        self._sliced |= dict.fromkeys(stacked, stage)

    def _length(self, stage: int) -> int | None:
        scans = self.scans.get(stage)
        return scans[0].params["length"] if scans else None

    def _stage(self, atoms: Iterable[Var | Literal]) -> int:
        needed = variables(atoms)
        self.check_whole(needed)
        return max((self._known.get(var, 0) for var in needed), default=0)

    def check_whole(self, needed: Iterable[Var]) -> None:
        """Refuses to read what loops make of all layers as one array.

        Raises:
          InputError: with its shape.
        """
        stacked = [var for var in needed if var in self._sliced]
        if stacked:
            raise _stacked_outside_error(stacked)


def _check_loop(equation: JaxprEqn, streamed: Mapping[Var, str]) -> None:
    """Refuses all but a loop from the first layer to the last over streamed inputs."""
    found = f"it is read by {equation.primitive.name!r}"
    read = [var for var in variables(equation.invars) if var in streamed]
    if equation.primitive is scan_p:
        consts, start, _ = operands(equation)
        read = [var for var in variables([*consts, *start]) if var in streamed]
        if not read and not equation.params["reverse"]:
            return
        found = "a loop reads all of it in each turn, or runs backwards"
    name = streamed[read[0]] if read else "a parameter"
    raise InputError(
        f"{name} is streamed, so it can be read by a loop over its layers alone, and "
        f"{found}; set Pretrained.weights = 'device', or leave out what reads it "
        "otherwise (generating reads all layers for each token)"
    )


def _stacked_outside_error(stacked: Sequence[Var]) -> InputError:
    kind: Any = stacked[0].aval
    return InputError(
        f"a loop over layers makes an array of them all, of shape {kind.shape}, that "
        "is read outside of it: with streamed weights one layer is there at a time; "
        "set Pretrained.weights = 'device'"
    )


def _loop(scans: Sequence[JaxprEqn], streamed: Mapping[Var, str]) -> LayerLoop:
    shared, start, slices, end, made = [], [], [], [], set()
    for scan in scans:
        consts, first, stacked = operands(scan)
        shared += variables(consts)
        start += first
        slices += [var for var in variables(stacked) if var not in made]
        end += scan.outvars[: len(first)]
        made |= set(scan.outvars[len(first) :])
    unique = tuple(dict.fromkeys(slices))
    return LayerLoop(
        scans[0].params["length"],
        tuple(scans),
        tuple(var for var in unique if var in streamed),
        tuple(dict.fromkeys(shared)),
        tuple(var for var in unique if var not in streamed),
        tuple(start),
        tuple(end),
    )


def _segment(
    program: Jaxpr,
    pieces: Sequence[Sequence[JaxprEqn]],
    loops: Sequence[LayerLoop],
    stage: int,
) -> Segment:
    """The equations of one stage that something later reads, as a function."""
    later = [equation.invars for piece in pieces[stage + 1 :] for equation in piece]
    later += [(*x.shared, *x.stacked, *x.start) for x in loops[stage:]]
    wanted = {var for atoms in [*later, program.outvars] for var in variables(atoms)}
    made = [var for equation in pieces[stage] for var in equation.outvars]
    outputs = [var for var in made if var in wanted]
    # Dictionaries for sets: a program in another order would be compiled again.
    needed, equations = dict.fromkeys(outputs), []
    for equation in reversed(pieces[stage]):
        if needed.keys().isdisjoint(equation.outvars):
            continue
        equations.append(equation)
        needed |= dict.fromkeys(variables(equation.invars))
    own = set(made)
    inputs = [var for var in needed if var not in own]
    piece = program.replace(
        constvars=[], invars=inputs, outvars=outputs, eqns=equations[::-1]
    )
    run = jaxpr_as_fun(ClosedJaxpr(piece, ()))
    return Segment(tuple(inputs), tuple(outputs), run)


def variables(atoms: Iterable[Var | Literal]) -> list[Var]:
    """Those that are no literals."""
    return [atom for atom in atoms if isinstance(atom, Var)]


def differentiable_variables(program: Jaxpr, start: Iterable[Var]) -> set[Var]:
    """The floating variables that depend on some inputs."""
    found = set(start)
    for equation in program.eqns:
        if not found.isdisjoint(variables(equation.invars)):
            found |= {var for var in equation.outvars if is_floating(var)}
    return found


def is_floating(var: Var) -> bool:
    """Whether a gradient can be taken at it."""
    kind: Any = var.aval
    return jnp.issubdtype(kind.dtype, jnp.inexact)
