"""Linear layers with a kernel that a mesh axis splits by column or by row.

These are Megatron's two projections (Shoeybi et al. 2019, section 3), for any model.
Call them inside `jax.shard_map`:

    up = ColumnParallel(key, (8, 32), gather_output=False)
    down = RowParallel(key, (32, 8), input_is_parallel=True)
    graph, arrays = nnx.split(up)
    specs = up.specs()

The arrays are created whole. To create each shard on its device, with the same values,
pass the shardings of `specs` to `jax.jit` as `out_shardings`.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Key

from prompt_tuning.core.parameters import Initializer, fan_in
from prompt_tuning.settings.axis_rules import TENSOR
from prompt_tuning.sharding import shard_operators


class ColumnParallel(nnx.Module):
    """`x @ kernel + bias`; each device computes its columns.

    Attributes:
      kernel: `[in, out]`, or this device's columns.
      bias: `[out]`, or this device's columns; None without a bias.
      axis: mesh axis that divides the columns; None on a single device.
      gather_output: True to return the whole result on every device, False to return
        the device's columns.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        sizes: tuple[int, int],
        *,
        bias: bool = True,
        axis: str | None = TENSOR,
        gather_output: bool = True,
        initializer: Initializer | None = None,
    ):
        self.kernel, self.bias = _declare(key, sizes, bias, initializer)
        self.axis, self.gather_output = axis, gather_output

    def specs(self) -> dict[str, PartitionSpec]:
        """Returns how the mesh divides each array."""
        kernel, bias = PartitionSpec(None, self.axis), PartitionSpec(self.axis)
        return {"kernel": kernel} | ({} if self.bias is None else {"bias": bias})

    def __call__(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead out"]:
        """Multiplies a whole array; returns a whole one or this device's columns."""
        axes = () if self.axis is None else (self.axis,)
        y = shard_operators.copy_to(axes, x) if axes else x
        y = _add(y @ self.kernel[...].astype(x.dtype), self.bias)
        gathers = axes and self.gather_output
        return shard_operators.gather_columns(axes, y) if gathers else y


class RowParallel(nnx.Module):
    """`x @ kernel + bias`, summed over devices that each hold some rows.

    Attributes:
      kernel: `[in, out]`, or this device's rows.
      bias: `[out]`, whole on every device; None without a bias.
      axis: mesh axis that divides the rows; None on a single device.
      input_is_parallel: True if the input is the device's columns, e.g. the output of
        `ColumnParallel` with `gather_output=False`; False if it is whole.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        sizes: tuple[int, int],
        *,
        bias: bool = True,
        axis: str | None = TENSOR,
        input_is_parallel: bool = False,
        initializer: Initializer | None = None,
    ):
        self.kernel, self.bias = _declare(key, sizes, bias, initializer)
        self.axis, self.input_is_parallel = axis, input_is_parallel

    def specs(self) -> dict[str, PartitionSpec]:
        """Returns how the mesh divides each array."""
        kernel = PartitionSpec(self.axis, None)
        return {"kernel": kernel} | (
            {} if self.bias is None else {"bias": PartitionSpec()}
        )

    def __call__(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead out"]:
        """Multiplies a whole array or this device's columns; returns a whole one."""
        axes = () if self.axis is None else (self.axis,)
        scatters = axes and not self.input_is_parallel
        part = shard_operators.scatter_columns(axes, x) if scatters else x
        y = part @ self.kernel[...].astype(x.dtype)
        # The bias is added once, after the sum.
        return _add(shard_operators.reduce_from(axes, y) if axes else y, self.bias)


def _declare(
    key: Key[Array, ""],
    sizes: tuple[int, int],
    bias: bool,
    initializer: Initializer | None,
) -> tuple[nnx.Param, nnx.Param | None]:
    kernel = (initializer or fan_in(sizes[0]))(key, sizes, jnp.float32)
    zeros = jnp.zeros(sizes[1], jnp.float32)
    return nnx.Param(kernel), nnx.Param(zeros) if bias else None


def _add(y: Float[Array, "*lead out"], bias: nnx.Param | None) -> jax.Array:
    return y if bias is None else y + bias[...].astype(y.dtype)
