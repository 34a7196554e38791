"""How a quantized kernel is stored: names of the stores, and the arrays of each.

A kernel `[in, out]` is stored as one to three arrays next to each other; the dtype of
the first tells which. Kernels of experts are `[E, in, out]`, and all their arrays have
this leading axis:

| store | `kernel` | `kernel_scale` | third array |
|---|---|---|---|
| int8, float8 | `[in, out]` | float32 `[out]` | |
| the same in groups | `[in, out]` | float32 `[in / group, out]` | `kernel_zero` |
| int4 | uint8 `[in / 2, out]` | float32 `[in / group, out]` | `kernel_zero` |
| nf4, fp4 | uint8 `[in / 2, out]` | float32 `[in / group, out]` | `kernel_codebook` |
| nf4, fp4, nested | the same | uint8 `[in / group, out]` | the same, and two more |
| mxfp4 | uint8 `[in / 2, out]` | float8_e8m0fnu `[in / 32, out]` | `kernel_codebook` |

`kernel_order`, int32 `[in]`, means that the inputs are stored in another order, so that
a group's inputs are consecutive: row `i` is for input `order[i]`.

Nested scales have `kernel_nested`, float32 `[in / group / n, out]`, and
`kernel_nested_codebook`, float32 `[257]`: see `ScalesInCodes`.

`kernel_zero`, int16 `[in / group, out]`, has the code of 0 in each group; some
published weights have one. `kernel_codebook`, float32 `[16]`, has the values of the
codes. Float8, fp4 and mxfp4 are only for weights published in these formats.

Embedding tables and heads `[V, D]` (`TABLES`) are stored as the transpose of a kernel
`[D, V]`: in int4, uint8 `[V, D / 2]` with float32 scales `[V, D / group]`.
"""

import dataclasses
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

if TYPE_CHECKING:  # the help of the command reads the names
    import numpy as np

INT8, INT4, NF4 = "int8", "int4", "nf4"
SMALLEST_GROUP = 4
"""Number of weights below which they and their scale take more than bfloat16."""
FLOAT8, FP4, MXFP4 = "float8_e4m3fn", "fp4", "mxfp4"
EXPERT_KERNELS = ("expert_gate", "expert_up", "expert_down")
"""Names of the kernels of all experts of a layer."""
TABLES = ("token_embedder/embedding", "decoder_embedder/embedding", "head/kernel")
"""Paths of embedding tables and of the head, which only `QuantizedTable` widens."""
STORES = (INT8, INT4, NF4)
"""Values of `ModelConfig.parameter_dtype` that quantize the projections."""
UNQUANTIZED = "bfloat16"
"""Dtype of all other parameters of such a model."""
DTYPES = ("float32", "bfloat16")
"""Types in which weights are stored as they are, and activations are computed."""
PARAMETER_DTYPES = (*DTYPES, *STORES)
"""Types of frozen weights, the widest first."""


@dataclasses.dataclass(frozen=True)
class Store:
    """How one parameter is stored.

    Attributes:
      name: dtype of its numbers; "int4", "nf4", "fp4" and "mxfp4" pack two per byte.
      group: number of inputs that share a scale; None for one scale per column, or
        none.
      zeros: whether each group has a code that stands for 0.
      ordered: whether the inputs of a group are not consecutive.
      nested: number of scales that share a second-level scale; None if all scales are
        in float32.
    """

    name: str
    group: int | None = None
    zeros: bool = False
    ordered: bool = False
    nested: int | None = None

    @property
    def packed(self) -> bool:
        """Whether two numbers share a byte."""
        return self.name in (INT4, NF4, FP4, MXFP4)

    @property
    def scale_dtype(self) -> str:
        """Dtype of the scales; MXFP4's holds powers of two."""
        if self.nested is not None:
            return "uint8"
        return "float8_e8m0fnu" if self.name == MXFP4 else "float32"

    @property
    def quantized(self) -> bool:
        """Whether the numbers need scales."""
        return self.packed or self.name in (INT8, FLOAT8)

    def __str__(self) -> str:
        """Describes the store, e.g. as "int4 in groups of 128 with zero points"."""
        groups = f" in groups of {self.group}" if self.group else ""
        zeros = " with zero points" if self.zeros else ""
        nested = " with nested scales" if self.nested else ""
        end = ", reordered" if self.ordered else ""
        return f"{self.name}{groups}{zeros}{nested}{end}"


@runtime_checkable
class Leaf(Protocol):
    """An array, or only its shape and dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        ...

    @property
    def dtype(self) -> "np.dtype":
        """Type of the elements."""
        ...


def is_kernel(path: str) -> bool:
    """Tests whether a parameter is a kernel, which may be quantized."""
    return path.rpartition("/")[2] in ("kernel", *EXPERT_KERNELS)


Part = Literal["scale", "codebook", "zero", "order", "nested", "nested_codebook"]
PARTS: tuple[Part, ...] = get_args(Part)
"""What may be next to a kernel, in the order of `KernelParameters`."""


def part_path(path: str, part: Part) -> str:
    """Returns the path of an array next to a kernel, e.g. `kernel_scale`."""
    return f"{path}_{part}"


def describes_kernel(path: str) -> bool:
    """Tests whether an array is one of a quantized kernel's, other than its codes."""
    return path.endswith(("_scale", "_zero", "_order", "_codebook", "_nested"))


def is_packed(leaf: Leaf) -> bool:
    """Tests whether an array holds two weights per byte."""
    return leaf.dtype == "uint8"


def is_quantized(leaf: Leaf) -> bool:
    """Tests whether an array holds quantized weights."""
    return leaf.dtype in (INT8, FLOAT8) or is_packed(leaf)


def weight_shape(path: str, leaf: Leaf) -> tuple[int, ...]:
    """Returns the shape of the weights in an array: `[V, D]` or `[..., in, out]`."""
    if not is_packed(leaf):
        return tuple(leaf.shape)
    *lead, half, last = leaf.shape
    return (*lead, half, 2 * last) if path in TABLES else (*lead, 2 * half, last)
