"""Counts the work of matrix products in a compiled program.

`compiled.cost_analysis()` counts a loop's body once; here a body counts as often as it
runs.
"""

import dataclasses
import math
import re

import jax

_NAME = r"%?([\w.$-]+)"
_HEADER = re.compile(rf"^(?:ENTRY )?{_NAME} \(.*\) -> .*\{{$")
_INSTRUCTION = re.compile(rf"^\s+(?:ROOT )?{_NAME} = (.*)$")
_SHAPE = re.compile(r"^\w+\[([\d,]*)\]")
_OPERATION = re.compile(r"(?:^|[\s)}\]])([a-z][\w-]*)\(([^()]*)\)")
_CALLED = re.compile(r"(?:calls|to_apply|body|branch_computations)=\{?([^,}\s]+)")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix product of a program.

    Attributes:
      flops: two for each multiplication of one run.
      runs: how often the program runs it.
      shapes: of the left operand, the right one and the result.
      scope: the name that JAX gave it.
    """

    flops: int
    runs: int
    shapes: tuple[tuple[int, ...], ...]
    scope: str


def matmul_flops(compiled: jax.stages.Compiled) -> int:
    """FLOPs of all matrix products, loop bodies times their trip count."""
    return sum(product.flops * product.runs for product in products(compiled))


def products(compiled: jax.stages.Compiled) -> list[Product]:
    """All matrix products of a compiled program.

    Raises:
      ValueError: for a loop whose trip count is not known, or a product that the
        compiler handed to a library under another name.
    """
    computations = _computations(compiled.as_text() or "")
    return list(_walk(computations, computations["ENTRY"], 1))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _computations(text: str) -> dict[str, dict[str, str]]:
    """Of each computation, what stands behind each instruction's name."""
    computations: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations[header[1]] = {}
            if line.startswith("ENTRY"):
                computations["ENTRY"] = current
        elif instruction := _INSTRUCTION.match(line):
            current[instruction[1]] = instruction[2]
    return computations


def _walk(computations, computation, runs):
    for name, body in computation.items():
        operation = _OPERATION.search(body)
        if operation is None:
            continue
        kind = operation[1]
        if kind == "dot":
            yield _product(computation, body, operation[2], runs)
        elif kind == "convolution" or (kind == "custom-call" and "matmul" in body):
            raise ValueError(f"{name} is a product that is not counted: {body}")
        times = runs
        if kind == "while":
            trips = _TRIPS.search(body)
            if trips is None:
                raise ValueError(f"the trip count of {name} is not known: {body}")
            times = runs * int(trips[1])
        for called in _CALLED.findall(body):
            yield from _walk(computations, computations[called.lstrip("%")], times)


def _product(computation, body, operands, runs) -> Product:
    shape = _shape(body)
    left, right = (
        _operand_shape(computation, operand.strip()) for operand in _split(operands)
    )
    contracted = _CONTRACTED.search(body)
    assert contracted is not None
    depth = math.prod(left[i] for i in _numbers(contracted[1]))
    scope = re.search(r'op_name="([^"]*)"', body)
    return Product(
        2 * math.prod(shape) * depth,
        runs,
        (left, right, shape),
        scope[1] if scope else "",
    )


def _split(operands: str) -> list[str]:
    """Splits at the commas that stand outside of brackets."""
    return re.split(r",\s*(?![^\[{]*[\]}])", operands)


def _shape(text: str) -> tuple[int, ...]:
    found = _SHAPE.match(text)
    assert found is not None, text
    return _numbers(found[1])


def _operand_shape(computation, operand: str) -> tuple[int, ...]:
    if _SHAPE.match(operand):
        return _shape(operand)
    return _shape(computation[operand.lstrip("%")])
