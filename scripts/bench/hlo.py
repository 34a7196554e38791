"""Reads the matrix products and the exchanges of a compiled program.

`compiled.cost_analysis()` counts a loop's body once; here a body counts as often as it
runs.
"""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax

_NAME = r"%?([\w.$-]+)"
_HEADER = re.compile(rf"^(?:ENTRY )?{_NAME} \(.*\) -> .*\{{$")
_INSTRUCTION = re.compile(rf"^\s+(?:ROOT )?{_NAME} = (.*)$")
_ARRAY = re.compile(r"^(\w+)\[([\d,]*)\](?:\{([\d,]*)[^}]*\})?")
_OPERATION = re.compile(r"(?:^|[\s)}\]])([a-z][\w-]*)\(([^()]*)\)")
_CALLED = re.compile(r"(?:calls|to_apply|body|branch_computations)=\{?([^,}\s]+)")
_DIMENSIONS = re.compile(r"\b([lr]hs_(?:contracting|batch))_dims=\{([\d,]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Operand(NamedTuple):
    """An array of a program.

    Attributes:
      dtype: in HLO's names, such as "f32".
      shape: its dimensions.
      order: the dimensions from the one of the longest stride to that of the shortest.
    """

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]


class Dimensions(NamedTuple):
    """Which dimensions of a product's operands are summed over and which are paired.

    Attributes:
      contracting: of the left operand and of the right one.
      batch: of the left operand and of the right one.
    """

    contracting: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix product of a program.

    Attributes:
      flops: two for each multiplication of one run.
      runs: how often the program runs it.
      operands: the left one, the right one and the result.
      dimensions: what it sums over, as `jax.lax.dot_general` takes them.
      scope: the name that JAX gave it.
    """

    flops: int
    runs: int
    operands: tuple[Operand, Operand, Operand]
    dimensions: Dimensions
    scope: str

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the left operand, the right one and the result."""
        return tuple(operand.shape for operand in self.operands)

    @property
    def batched(self) -> bool:
        """Whether it is many products of small matrices, as those of attention are."""
        return bool(self.dimensions.batch[0])


class Collective(NamedTuple):
    """One exchange between devices.

    Attributes:
      kind: its operation, such as "all-reduce".
      size: numbers of its result.
      runs: how often the program runs it.
      scope: the name that JAX gave it.
    """

    kind: str
    size: int
    runs: int
    scope: str


COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


def collectives(compiled: jax.stages.Compiled) -> list[Collective]:
    """All exchanges between the devices of a compiled program.

    Raises:
      ValueError: for a loop whose trip count is not known.
    """
    computations = _computations(compiled.as_text() or "")
    return [
        Collective(kind, _size(found.body), found.runs, _scope(found.body))
        for found in _walk(computations, computations["ENTRY"], 1)
        if (kind := found.kind.removesuffix("-start")) in COLLECTIVES
    ]


def _size(body: str) -> int:
    """Numbers of an instruction's result, of one array or of several."""
    result = body[: body.index(_OPERATION.search(body)[1] + "(")]  # type: ignore
    shapes = re.findall(r"\b[a-z]+\d+\[([\d,]*)\]", result)
    return sum(math.prod(_numbers(shape)) for shape in shapes)


def matmul_flops(compiled: jax.stages.Compiled) -> int:
    """FLOPs of all matrix products, loop bodies times their trip count."""
    return sum(product.flops * product.runs for product in products(compiled))


def products(compiled: jax.stages.Compiled) -> list[Product]:
    """All matrix products of a compiled program.

    Raises:
      ValueError: for a loop whose trip count is not known, or a product that the
        compiler handed to a library under another name.
    """
    return products_of(compiled.as_text() or "")


def products_of(text: str) -> list[Product]:
    """As `products`, of a program that was printed."""
    computations = _computations(text)
    found = []
    for entry in _walk(computations, computations["ENTRY"], 1):
        if entry.kind == "dot":
            found.append(_product(entry))
        elif entry.kind == "convolution" or (
            entry.kind == "custom-call" and "matmul" in entry.body
        ):
            raise ValueError(f"a product is not counted: {entry.body}")
    return found


def array_shapes(compiled: jax.stages.Compiled) -> set[tuple[int, ...]]:
    """Shapes of all arrays of a compiled program, those inside of fusions too."""
    found = re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", compiled.as_text() or "")
    return {_numbers(shape) for shape in found}


def largest_array(compiled: jax.stages.Compiled) -> int:
    """Numbers of the largest array."""
    return max(map(math.prod, array_shapes(compiled)))


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


class _Instruction(NamedTuple):
    """An instruction of a program, and how often it runs."""

    computation: dict[str, str]
    body: str
    kind: str
    operands: str
    runs: int


def _walk(
    computations: dict[str, dict[str, str]], computation: dict[str, str], runs: int
) -> Iterator[_Instruction]:
    for name, body in computation.items():
        operation = _OPERATION.search(body)
        if operation is None:
            continue
        kind = operation[1]
        yield _Instruction(computation, body, kind, operation[2], runs)
        times = runs
        if kind == "while":
            trips = _TRIPS.search(body)
            if trips is None:
                raise ValueError(f"the trip count of {name} is not known: {body}")
            times = runs * int(trips[1])
        for called in _CALLED.findall(body):
            yield from _walk(computations, computations[called.lstrip("%")], times)


def _product(instruction: _Instruction) -> Product:
    computation, body, _, operands, runs = instruction
    result = _array(body)
    left, right = (
        _operand(computation, operand.strip()) for operand in _split(operands)
    )
    found = {name: _numbers(dims) for name, dims in _DIMENSIONS.findall(body)}
    contracting, batch = (
        (found.get(f"lhs_{kind}", ()), found.get(f"rhs_{kind}", ()))
        for kind in ("contracting", "batch")
    )
    depth = math.prod(left.shape[i] for i in contracting[0])
    return Product(
        2 * math.prod(result.shape) * depth,
        runs,
        (left, right, result),
        Dimensions(contracting, batch),
        _scope(body),
    )


def _scope(body: str) -> str:
    found = re.search(r'op_name="([^"]*)"', body)
    return found[1] if found else ""


def _split(operands: str) -> list[str]:
    """Splits at the commas that stand outside of brackets."""
    return re.split(r",\s*(?![^\[{]*[\]}])", operands)


def _array(text: str) -> Operand:
    found = _ARRAY.match(text)
    assert found is not None, text
    shape = _numbers(found[2])
    # Layouts are written from the dimension of the shortest stride.
    order = _numbers(found[3] or "")[::-1] or tuple(range(len(shape)))
    return Operand(found[1], shape, order)


def _operand(computation, operand: str) -> Operand:
    if _ARRAY.match(operand):
        return _array(operand)
    return _array(computation[operand.lstrip("%")])
