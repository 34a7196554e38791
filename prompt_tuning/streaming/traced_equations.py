"""Equations of a traced program: selecting them and running them again.

A *step* is an equation, or an object made from one that has its `invars` (what it
reads) and `outvars` (what it computes) and runs itself: `run(*values of invars)`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.extend.core.primitives import scan_p

CALLS = frozenset({"jit", "pjit", "closed_call", "core_call"})
DERIVATIVE_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
CHECKPOINTS = frozenset({"checkpoint", "remat", "remat2"})


def operands(scan: JaxprEqn) -> tuple[list, list, list]:
    """Returns what a loop reads whole, what it carries, and what it slices."""
    if "num_consts" in scan.params:
        consts, carried = scan.params["num_consts"], scan.params["num_carry"]
    else:
        # Since JAX 0.12, a tree of three parts.
        consts, carried, _ = map(len, scan.params["ft_in"].unpack())
    slices = consts + carried
    return scan.invars[:consts], scan.invars[consts:slices], scan.invars[slices:]


def value_of(atom: Any, values: Mapping[Any, Any]) -> Any:
    """Returns the value of a variable or a literal."""
    return atom.val if isinstance(atom, Literal) else values[atom]


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Returns the variables among atoms."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


def is_floating(var: Var) -> bool:
    """Tests whether a variable can have a gradient."""
    kind: Any = var.aval
    return jnp.issubdtype(kind.dtype, jnp.inexact)


def live_steps(steps: Sequence[Any], outputs: Iterable[Any]) -> tuple[list, dict]:
    """Drops the steps that nothing needs.

    `outputs` are the wanted variables. Also returns all variables that the remaining
    steps or `outputs` read, in a fixed order (another order would compile again).
    """
    needed, live = dict.fromkeys(outputs), []
    for step in reversed(steps):
        if needed.keys().isdisjoint(step.outvars):
            continue
        live.append(step)
        needed |= dict.fromkeys(variables(step.invars))
    return live[::-1], needed


def subprogram(
    program: Jaxpr, inputs: Sequence[Var], outputs: Sequence[Any], equations: Sequence
) -> Any:
    """Returns equations of a program as a function of values of `inputs`."""
    part = program.replace(
        constvars=[], invars=list(inputs), outvars=list(outputs), eqns=list(equations)
    )
    return jaxpr_as_fun(ClosedJaxpr(part, ()))


def evaluate(
    program: Jaxpr, steps: Sequence[Any], outputs: Sequence[Any], values: Mapping
) -> list[Any]:
    """Runs steps and returns the values of `outputs`.

    Args:
      program: the program that contains the equations among the steps.
      steps: equations, and steps that run themselves.
      outputs: variables and literals.
      values: values of everything that the steps read.
    """
    live, needed = live_steps(steps, variables(outputs))
    known = dict(values)
    for group in _groups(live):
        if isinstance(group, list):
            computed = [var for equation in group for var in equation.outvars]
            writes = [var for var in computed if var in needed]
            _, inputs = live_steps(group, writes)
            reads = [var for var in inputs if var not in set(computed)]
            run = subprogram(program, reads, writes, group)
        else:
            reads, writes, run = group.invars, group.outvars, group.run
        results = run(*[value_of(atom, known) for atom in reads])
        known |= zip(writes, results, strict=True)
    return [value_of(atom, known) for atom in outputs]


def _groups(steps: Sequence[Any]) -> Iterator[Any]:
    """Yields lists of consecutive equations, and other steps one by one."""
    group: list[JaxprEqn] = []
    for step in steps:
        if isinstance(step, JaxprEqn):
            group.append(step)
            continue
        if group:
            yield group
            group = []
        yield step
    if group:
        yield group


def run_scan(
    equation: JaxprEqn,
    body: Any,
    carried: Sequence[Any],
    sliced: Sequence[Any],
    length: int | None = None,
) -> list[Any]:
    """Runs another body instead of a loop's own.

    Args:
      equation: the loop.
      body: `f(carried, slices) -> (carried, outputs)`, with lists of arrays.
      carried: values before the first iteration.
      sliced: arrays with one slice per iteration.
      length: number of iterations; the loop's by default.
    """
    last, outputs = jax.lax.scan(
        body,
        list(carried),
        list(sliced),
        length=equation.params["length"] if length is None else length,
        reverse=equation.params["reverse"],
        unroll=equation.params.get("unroll", 1),
    )
    return [*last, *outputs]


def inlined(closed: ClosedJaxpr, names: frozenset[str]) -> ClosedJaxpr:
    """Retraces a program with some primitives inlined, also inside its loops."""

    def run(*arguments: Any) -> list[Any]:
        return _run_inlined(closed, arguments, names)

    return jax.make_jaxpr(run)(*closed.in_avals)


def _run_inlined(
    closed: ClosedJaxpr, arguments: Sequence[Any], names: frozenset[str]
) -> list[Any]:
    program = closed.jaxpr
    values = dict(zip(program.constvars, closed.consts, strict=True))
    values |= zip(program.invars, arguments, strict=True)
    steps = [_inlined_step(equation, names) for equation in program.eqns]
    return evaluate(program, steps, program.outvars, values)


def _inlined_step(equation: JaxprEqn, names: frozenset[str]) -> Any:
    if equation.primitive is scan_p:
        return _InlinedLoop(equation, names)
    return (
        _InlinedCall(equation, names) if equation.primitive.name in names else equation
    )


class _InlinedStep:
    """A step that runs the program in an equation's parameters."""

    def __init__(self, equation: JaxprEqn, names: frozenset[str]):
        self.equation, self.names = equation, names
        self.invars, self.outvars = equation.invars, equation.outvars


class _InlinedCall(_InlinedStep):
    """A call, reduced to the called program."""

    def run(self, *values: Any) -> list[Any]:
        """Runs the called program."""
        keys = ("jaxpr", "call_jaxpr", "fun_jaxpr")
        parameters = self.equation.params
        called = next(parameters[key] for key in keys if key in parameters)
        if isinstance(called, Jaxpr):
            called = ClosedJaxpr(called, ())
        return _run_inlined(called, values, self.names)


class _InlinedLoop(_InlinedStep):
    """A loop without calls in its body."""

    def run(self, *values: Any) -> list[Any]:
        """Runs the loop with the other body."""
        consts, start, _ = map(len, operands(self.equation))
        whole, carried = values[:consts], values[consts : consts + start]

        def body(carried: list, slices: list) -> tuple[list, list]:
            arguments = [*whole, *carried, *slices]
            outputs = _run_inlined(self.equation.params["jaxpr"], arguments, self.names)
            return outputs[:start], outputs[start:]

        return run_scan(self.equation, body, carried, values[consts + start :])
