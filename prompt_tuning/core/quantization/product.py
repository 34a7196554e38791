"""Matrix product with a kernel in any store."""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int16, Int32, Shaped

from prompt_tuning.core.quantization import nibbles
from prompt_tuning.core.quantization.channels import widen
from prompt_tuning.core.quantization.scales_in_codes import ScalesInCodes
from prompt_tuning.core.quantization.stores import is_packed

Scales = Shaped[Array, "..."] | ScalesInCodes
"""Scales of a quantized kernel."""
FEW_ROWS = 64
"""Rows up to which a product on a CPU takes longer than to widen its kernel."""
PART = 2**18
"""Weights that are widened at once for few rows: 1 MiB, which stays in the cache."""


class StoredKernel(NamedTuple):
    """Arrays of a kernel, in the order of the arguments of `multiply`.

    They may be stacked for many kernels, e.g. for all experts, `[E, in, out]`.
    """

    kernel: Array
    scale: Array | ScalesInCodes | None = None
    codebook: Array | None = None
    zero: Array | None = None
    order: Array | None = None

    def widened_to(self, dtype: jnp.dtype) -> Float[Array, "in out"]:
        """Dequantizes one kernel."""
        if self.scale is None:
            return self.kernel.astype(dtype)
        # As in `multiply`, the barrier keeps the widening out of the product.
        return jax.lax.optimization_barrier(as_float32(*self).astype(dtype))


def multiply(
    x: Float[Array, "*lead in"],
    kernel: Array,
    scale: Scales | None = None,
    codebook: Float32[Array, "16"] | None = None,
    zero: Int16[Array, "groups out"] | None = None,
    order: Int32[Array, "in"] | None = None,
) -> Float[Array, "*lead out"]:
    """Computes `x @ kernel`; see `stores` for the arrays of a quantized kernel.

    The kernel is widened to the dtype of `x` where it is used, and again in the
    backward pass; otherwise, a scan over blocks would store a wide copy of the whole
    stack.

    Args:
      x: the input.
      kernel: `[in, out]`, or `[in / 2, out]` if it is packed.
      scale: scales of a quantized kernel, or None.
      codebook: values of a packed kernel's codes, if it has a table.
      zero: zero points of a kernel in groups, if it has any.
      order: input of each row of the kernel; None if they are in order.
    """
    if order is not None:
        x = x[..., order]
    count = _parts(x, kernel, scale)
    if count > 1:
        in_parts = functools.partial(_multiply_in_parts, count=count)
        product = jax.checkpoint(in_parts, prevent_cse=False)
        return product(x, kernel, scale, codebook, zero)
    if kernel.dtype == x.dtype:
        return x @ kernel
    if scale is not None and scale.ndim == 2:
        product = jax.checkpoint(_widen_and_multiply, prevent_cse=False)
        return product(x, kernel, scale, codebook, zero)
    y = jax.checkpoint(_cast_and_multiply, prevent_cse=False)(x, kernel)
    if scale is None:
        return y
    # Scaling the output is cheaper, and exact for scales of whole columns.
    assert not isinstance(scale, ScalesInCodes)  # these are of groups
    return (y.astype(jnp.float32) * scale).astype(y.dtype)


def _parts(x: Array, kernel: Array, scale: Scales | None) -> int:
    """Returns how many parts a narrow kernel is widened in."""
    rows = x.size // x.shape[-1]
    few = rows <= FEW_ROWS and jax.default_backend() == "cpu"
    if not few or kernel.dtype.itemsize > 2:
        return 1
    size_in, size_out = x.shape[-1], kernel.shape[-1]
    group = size_in // len(scale) if scale is not None and scale.ndim == 2 else 1
    # Whole groups of about `PART` weights.
    most = max(PART // (group * size_out), 1)
    groups = size_in // group
    found = next(n for n in range(most, 0, -1) if groups % n == 0)
    # Of a number of inputs with few divisors, parts would be too small to be fast.
    return groups // found if 4 * found >= min(most, groups) else 1


def _multiply_in_parts(
    x: Array,
    kernel: Array,
    scale: Scales | None,
    codebook: Array | None,
    zero: Array | None,
    *,
    count: int,
) -> Array:
    """Computes `x @ kernel` as a sum over parts of the inputs.

    With few rows a CPU takes longer to write a wide kernel to memory than to multiply
    by it, and XLA widens all kernels of a program at the start. In a loop, a part that
    was just widened is still in the cache.
    """
    if isinstance(scale, ScalesInCodes):
        scale = scale.astype(jnp.float32)
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    groups = len(scale) if scale is not None and scale.ndim == 2 else None
    packed = is_packed(kernel)
    if packed and groups is not None:
        # Each byte has a weight of both halves of its group.
        halves = rows.reshape(len(rows), groups, 2, -1)
        inputs = jnp.moveaxis(halves, 2, 0).reshape(2, len(rows), -1)
    else:
        inputs = rows[None]  # [1, n, in]
    grouped = (scale, zero) if groups is not None else (None, None)

    def part(array: Array | None, index: Array, axis: int = 0) -> Array | None:
        if array is None:
            return None
        size = array.shape[axis] // count
        return jax.lax.dynamic_slice_in_dim(array, index * size, size, axis)

    def product(index: Array) -> Array:
        # If the kernel did not depend on the iteration, XLA would move the conversion
        # of all of it out of the loop.
        held, index = jax.lax.optimization_barrier(((kernel, *grouped), index))
        codes, scales, zeros = (part(array, index) for array in held)
        columns = part(inputs, index, axis=2)
        assert codes is not None and columns is not None
        numbers = (codes & nibbles.LARGEST_CODE, codes >> 4) if packed else (codes,)
        terms = [
            some @ _scaled(some_numbers, scales, codebook, zeros, packed=packed)
            for some, some_numbers in zip(columns, numbers, strict=True)
        ]
        return functools.reduce(operator.add, terms)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def add(total: Array, index: Array) -> tuple[Array, None]:
        return total + product(index), None

    # Beginning with a product and not with zeros, the sum varies over a mesh as it.
    first = product(jnp.zeros((), jnp.int32))
    total, _ = jax.lax.scan(add, first, jnp.arange(1, count))
    if scale is not None and groups is None:
        total = total * scale
    return total.reshape(*x.shape[:-1], -1).astype(x.dtype)


def _scaled(
    numbers: Shaped[Array, "part out"],
    scale: Shaped[Array, "groups out"] | None,
    codebook: Float32[Array, "16"] | None,
    zero: Int16[Array, "groups out"] | None,
    *,
    packed: bool,
) -> Float32[Array, "part out"]:
    """Dequantizes numbers, or halves of groups of them."""
    if scale is None:
        return numbers.astype(jnp.float32)
    grouped = numbers.reshape(len(scale), -1, numbers.shape[1])
    zero = None if zero is None else zero[:, None]
    if packed:
        values = nibbles.values_of_codes(grouped, codebook, zero)
    else:
        values = grouped.astype(jnp.float32)
        values = values if zero is None else values - zero.astype(jnp.float32)
    return (values * scale[:, None].astype(jnp.float32)).reshape(numbers.shape)


def _cast_and_multiply(x: Array, kernel: Array) -> Array:
    return x @ kernel.astype(x.dtype)


def _widen_and_multiply(
    x: Array, kernel: Array, scale: Scales, codebook: Array | None, zero: Array | None
) -> Array:
    # The barrier keeps XLA from fusing the widening into the product, in which it
    # would be repeated for each tile. The cast is before it, so that no float32 kernel
    # is written to memory.
    wide = widened(kernel, scale, codebook, zero).astype(x.dtype)
    return x @ jax.lax.optimization_barrier(wide)


def widened(
    kernel: Array,
    scale: Scales,
    codebook: Float32[Array, "16"] | None = None,
    zero: Int16[Array, "groups out"] | None = None,
) -> Float32[Array, "in out"]:
    """Dequantizes a kernel; takes the arguments of `multiply`."""
    scale = scale.astype(jnp.float32)  # powers of two may be stored in a byte each
    if is_packed(kernel):
        return nibbles.unpack(kernel, scale, codebook, zero)
    return widen(kernel, scale if scale.ndim == 2 else scale[None], zero)


def as_float32(
    kernel: Array,
    scale: Scales | None = None,
    codebook: Float32[Array, "16"] | None = None,
    zero: Int16[Array, "groups out"] | None = None,
    order: Int32[Array, "in"] | None = None,
) -> Float32[Array, "in out"]:
    """Returns a kernel's weights from any store; takes the arguments of `multiply`."""
    if scale is None:
        return kernel.astype(jnp.float32)
    wide = widened(kernel, scale, codebook, zero)
    return wide if order is None else wide[jnp.argsort(order)]
