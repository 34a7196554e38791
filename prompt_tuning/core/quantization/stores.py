"""How a quantized kernel is stored: names of the stores, and the arrays of each.

A kernel `[in, out]` is stored as one to three arrays next to each other, and the dtype
of the first tells which:

| store | `kernel` | `kernel_scale` | `kernel_codebook` |
|---|---|---|---|
| int8 | int8 `[in, out]` | float32 `[out]` | |
| int4 | uint8 `[in / 2, out]` | float32 `[in / group, out]` | |
| nf4 | uint8 `[in / 2, out]` | float32 `[in / group, out]` | float32 `[16]` |
"""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:  # the help of the command reads the names
    import numpy as np

INT8, INT4, NF4 = "int8", "int4", "nf4"
STORES = (INT8, INT4, NF4)
"""Values of `ModelConfig.parameter_dtype` that quantize the projections."""
UNQUANTIZED = "bfloat16"
"""Dtype of all other parameters of such a model."""
DTYPES = ("float32", "bfloat16")
"""Types in which weights are stored as they are, and activations are computed."""
PARAMETER_DTYPES = (*DTYPES, *STORES)
"""Types of frozen weights, the widest first."""


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


def scale_path(path: str) -> str:
    """Returns the path of the scales of a quantized kernel, next to the kernel."""
    return f"{path}_scale"


def codebook_path(path: str) -> str:
    """Returns the path of a kernel's table of values, next to the kernel."""
    return f"{path}_codebook"


def is_packed(leaf: Leaf) -> bool:
    """Returns whether an array holds two weights in each byte."""
    return leaf.dtype == "uint8"


def is_quantized(leaf: Leaf) -> bool:
    """Returns whether an array holds quantized weights."""
    return leaf.dtype == "int8" or is_packed(leaf)


def weight_shape(leaf: Leaf) -> tuple[int, ...]:
    """Returns the shape `[..., in, out]` of the weights that an array holds."""
    if not is_packed(leaf):
        return tuple(leaf.shape)
    *lead, half, size_out = leaf.shape
    return (*lead, 2 * half, size_out)
