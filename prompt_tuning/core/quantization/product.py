"""The product with a kernel in any store."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int16, Int32, Shaped

from prompt_tuning.core.quantization.channels import widen
from prompt_tuning.core.quantization.nibbles import unpack
from prompt_tuning.core.quantization.stores import is_packed


class StoredKernel(NamedTuple):
    """The arrays of a kernel, in the order of the arguments of `multiply`.

    They may be stacked for several kernels, e.g. those of experts, `[E, in, out]`.
    """

    kernel: Array
    scale: Array | None = None
    codebook: Array | None = None
    zero: Array | None = None
    order: Array | None = None

    def widened_to(self, dtype: jnp.dtype) -> Float[Array, "in out"]:
        """Returns the weights of one kernel."""
        if self.scale is None:
            return self.kernel.astype(dtype)
        # As in `multiply`, the barrier keeps the widening out of the product.
        return jax.lax.optimization_barrier(as_float32(*self).astype(dtype))


def multiply(
    x: Float[Array, "*lead in"],
    kernel: Array,
    scale: Shaped[Array, "..."] | None = None,
    codebook: Float32[Array, "16"] | None = None,
    zero: Int16[Array, "groups out"] | None = None,
    order: Int32[Array, "in"] | None = None,
) -> Float[Array, "*lead out"]:
    """Computes `x @ kernel`; see `stores` for the arrays of a quantized kernel.

    A kernel is widened to the dtype of `x` where it is used, and again in the backward
    pass: if it were stored for it, a scan over blocks would store a wide copy of the
    whole stack.

    Args:
      x: the input.
      kernel: `[in, out]`, or `[in / 2, out]` if it is packed.
      scale: scales of a quantized kernel; None for any other.
      codebook: values of the codes of a packed kernel, if it has a table.
      zero: zero points of a kernel in groups, if it has some.
      order: input of each row of the kernel; None if they are in order.
    """
    if order is not None:
        x = x[..., order]
    if kernel.dtype == x.dtype:
        return x @ kernel
    if scale is not None and scale.ndim == 2:
        product = jax.checkpoint(_widen_and_multiply, prevent_cse=False)
        return product(x, kernel, scale, codebook, zero)
    y = jax.checkpoint(_cast_and_multiply, prevent_cse=False)(x, kernel)
    if scale is None:
        return y
    # Scaling the output is cheaper, and exact for scales of whole columns.
    return (y.astype(jnp.float32) * scale).astype(y.dtype)


def _cast_and_multiply(x: Array, kernel: Array) -> Array:
    return x @ kernel.astype(x.dtype)


def _widen_and_multiply(
    x: Array, kernel: Array, scale: Array, codebook: Array | None, zero: Array | None
) -> Array:
    # The barrier keeps XLA from fusing the widening into the product, in which it
    # would be repeated for each tile.
    wide = jax.lax.optimization_barrier(widened(kernel, scale, codebook, zero))
    return x @ wide.astype(x.dtype)


def widened(
    kernel: Array,
    scale: Shaped[Array, "..."],
    codebook: Float32[Array, "16"] | None = None,
    zero: Int16[Array, "groups out"] | None = None,
) -> Float32[Array, "in out"]:
    """Returns the weights of a quantized kernel; arguments as of `multiply`."""
    scale = scale.astype(jnp.float32)  # powers of two may be stored in a byte each
    if is_packed(kernel):
        return unpack(kernel, scale, codebook, zero)
    return widen(kernel, scale if scale.ndim == 2 else scale[None], zero)


def as_float32(
    kernel: Array,
    scale: Shaped[Array, "..."] | None = None,
    codebook: Float32[Array, "16"] | None = None,
    zero: Int16[Array, "groups out"] | None = None,
    order: Int32[Array, "in"] | None = None,
) -> Float32[Array, "in out"]:
    """Returns the weights of a kernel in any store; arguments as of `multiply`."""
    if scale is None:
        return kernel.astype(jnp.float32)
    wide = widened(kernel, scale, codebook, zero)
    return wide if order is None else wide[jnp.argsort(order)]
