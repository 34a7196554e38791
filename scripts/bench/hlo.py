"""Reads the matrix products and the collectives of a compiled program.

`compiled.cost_analysis()` counts a loop's body once; this module counts it once per
iteration.
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
_ARRAYS = re.compile(r"\b([a-z]+\d+|pred)\[([\d,]*)\]")
_OPERATION = re.compile(r"(?:^|[\s)}\]])([a-z][\w-]*)\(([^()]*)\)")
_CALLED = re.compile(r"(?:calls|to_apply|body|branch_computations)=\{?([^,}\s]+)")
_DIMENSIONS = re.compile(r"\b([lr]hs_(?:contracting|batch))_dims=\{([\d,]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Operand(NamedTuple):
    """An array of a program.

    Attributes:
      dtype: HLO's name of the type, such as "f32".
      shape: sizes of the dimensions.
      order: dimensions from the longest stride to the shortest.
    """

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]


class Dimensions(NamedTuple):
    """Contracting and batch dimensions of a product.

    Attributes:
      contracting: contracting dimensions of the left and of the right operand.
      batch: batch dimensions of the left and of the right operand.
    """

    contracting: tuple[tuple[int, ...], tuple[int, ...]]
    batch: tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Product:
    """One matrix product of a program.

    Attributes:
      flops: FLOPs of one run, two for each multiplication.
      runs: number of runs in one execution of the program.
      operands: the left operand, the right operand and the result.
      dimensions: dimension numbers of `jax.lax.dot_general`.
      scope: JAX's name of the operation.
    """

    flops: int
    runs: int
    operands: tuple[Operand, Operand, Operand]
    dimensions: Dimensions
    scope: str

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the left operand, the right operand and the result."""
        return tuple(operand.shape for operand in self.operands)

    @property
    def batched(self) -> bool:
        """Whether it has batch dimensions, as the products of attention do."""
        return bool(self.dimensions.batch[0])


class Collective(NamedTuple):
    """One collective operation of a program.

    Attributes:
      kind: name of the operation, such as "all-reduce".
      size: number of elements of its result.
      runs: number of runs in one execution of the program.
      scope: JAX's name of the operation.
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
    """Returns all collectives of a compiled program.

    Raises:
      ValueError: if the trip count of a loop is unknown.
    """
    computations = parse(compiled.as_text() or "")
    return [
        Collective(
            kind, _size(instruction.body), instruction.runs, _scope(instruction.body)
        )
        for instruction in walk(computations, computations["ENTRY"], 1)
        if (kind := instruction.kind.removesuffix("-start")) in COLLECTIVES
    ]


def _size(body: str) -> int:
    """Returns the number of elements of an instruction's result."""
    return sum(math.prod(shape) for _, shape in result_arrays(body))


def matmul_flops(compiled: jax.stages.Compiled) -> int:
    """Returns the FLOPs of all matrix products; a loop's body counts per iteration."""
    return sum(product.flops * product.runs for product in products(compiled))


def products(compiled: jax.stages.Compiled) -> list[Product]:
    """Returns all matrix products of a compiled program.

    Raises:
      ValueError: if the trip count of a loop is unknown, or if the compiler replaced a
        product by a call of a library.
    """
    return products_of(compiled.as_text() or "")


def products_of(text: str) -> list[Product]:
    """Returns all matrix products of a program's HLO text; see `products`."""
    computations = parse(text)
    products_ = []
    for entry in walk(computations, computations["ENTRY"], 1):
        if entry.kind == "dot":
            products_.append(_product(entry))
        elif entry.kind == "convolution" or (
            entry.kind == "custom-call" and "matmul" in entry.body
        ):
            raise ValueError(f"a product is not counted: {entry.body}")
    return products_


def array_shapes(compiled: jax.stages.Compiled) -> set[tuple[int, ...]]:
    """Returns the shapes of all arrays of numbers, including those in fusions."""
    arrays = _ARRAYS.findall(compiled.as_text() or "")
    return {_numbers(shape) for dtype, shape in arrays if shape and dtype != "pred"}


def largest_array(compiled: jax.stages.Compiled) -> int:
    """Returns the number of elements of the largest array."""
    return max(map(math.prod, array_shapes(compiled)))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def parse(text: str) -> dict[str, dict[str, str]]:
    """Returns the instructions of each computation as a dict from name to body."""
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


class Instruction(NamedTuple):
    """An instruction of a program and its number of runs.

    Attributes:
      computation: bodies of the instructions of its computation, by name.
      body: text after the instruction's name.
      kind: HLO's name of the operation.
      operands: text between the brackets of the operation.
      runs: number of runs in one execution of the program.
    """

    computation: dict[str, str]
    body: str
    kind: str
    operands: str
    runs: int


def walk(
    computations: dict[str, dict[str, str]],
    computation: dict[str, str],
    runs: int,
    *,
    inside_fusions: bool = True,
) -> Iterator[Instruction]:
    """Yields the instructions of a computation and of those that it calls.

    Raises:
      ValueError: if the trip count of a loop is unknown.
    """
    for name, body in computation.items():
        kind, operands = operation(body)
        if not kind:
            continue
        yield Instruction(computation, body, kind, operands, runs)
        times = runs
        if kind == "while":
            trips = _TRIPS.search(body)
            if trips is None:
                raise ValueError(f"the trip count of {name} is unknown: {body}")
            times = runs * int(trips[1])
        if kind == "fusion" and not inside_fusions:
            continue
        for called in _CALLED.findall(body):
            yield from walk(
                computations,
                computations[called.lstrip("%")],
                times,
                inside_fusions=inside_fusions,
            )


def _product(instruction: Instruction) -> Product:
    computation, body, _, operands, runs = instruction
    result = array_of(body)
    left, right = (
        _operand(computation, operand.strip()) for operand in split_operands(operands)
    )
    dimensions = {name: _numbers(dims) for name, dims in _DIMENSIONS.findall(body)}
    contracting, batch = (
        (dimensions.get(f"lhs_{kind}", ()), dimensions.get(f"rhs_{kind}", ()))
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


def operation(body: str) -> tuple[str, str]:
    """Returns the kind of an instruction and the text of its operands."""
    match = _OPERATION.search(body)
    return ("", "") if match is None else (match[1], match[2])


def _scope(body: str) -> str:
    match = re.search(r'op_name="([^"]*)"', body)
    return match[1] if match else ""


def split_operands(operands: str) -> list[str]:
    """Splits the text of operands at commas outside brackets."""
    return re.split(r",\s*(?![^\[{]*[\]}])", operands)


def array_of(text: str) -> Operand:
    """Returns the array that a body or an operand begins with."""
    match = _ARRAY.match(text)
    assert match is not None, text
    shape = _numbers(match[2])
    # Layouts list the dimension with the shortest stride first.
    order = _numbers(match[3] or "")[::-1] or tuple(range(len(shape)))
    return Operand(match[1], shape, order)


def result_arrays(body: str) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the type and the shape of each array of an instruction's result."""
    end = body.index(") " if body.startswith("(") else " ")
    return [(dtype, _numbers(shape)) for dtype, shape in _ARRAYS.findall(body[:end])]


def _operand(computation, operand: str) -> Operand:
    if _ARRAY.match(operand):
        return array_of(operand)
    return array_of(computation[operand.lstrip("%")])
