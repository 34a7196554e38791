"""Parameters: declared in modules, handled everywhere else as a flat dict by path.

A model is a tree of NNX modules; outside `models` it is a structure and a dict such as
`{"decoder/layers/mlp/up/kernel": array}`. Regular expressions, restoring, optimizers
and files all use these paths.
"""

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.block_arrays import BlockArrays
from prompt_tuning.core.quantization import nibbles, stores
from prompt_tuning.core.quantization.channels import channel_scale, quantize
from prompt_tuning.core.quantization.product import StoredKernel
from prompt_tuning.core.quantization.scales_in_codes import (
    ScalesInCodes,
    quantized_scales,
)
from prompt_tuning.core.quantization.stores import Store
from prompt_tuning.core.quantization.tables import QuantizedTable, Table

if TYPE_CHECKING:
    Parameters = dict[str, Array]
else:
    # Trained weights in host memory are NumPy arrays, and the decoding engine reads
    # kernels as `BlockArrays`.
    Parameters = dict[str, Array | np.ndarray | BlockArrays]
CONTEXT = "context/"
"""Start of the paths of arrays that an objective computes once a run, and no module
has."""
Initializer = Callable[..., Array]
Build = Callable[[Key[Array, ""]], tuple[nnx.GraphDef, Parameters]]


def named_key(key: Key[Array, ""], name: str) -> Key[Array, ""]:
    """Derives the random key of a named part, independently of other parts."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def optional_key(key: Key[Array, ""] | None, name: str) -> Key[Array, ""] | None:
    """Returns `named_key`, or None (no dropout) for None."""
    return None if key is None else named_key(key, name)


def fan_in(size_in: int) -> Initializer:
    """Returns a normal initializer with standard deviation `size_in ** -0.5`."""
    return jax.nn.initializers.normal(size_in**-0.5)


def declare(
    key: Key[Array, ""],
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    initializer: Initializer,
    dtype: str,
    *,
    partial_over: str | None = None,
) -> nnx.Param:
    """Declares one parameter with its shape, logical axes, initializer and dtype.

    If `dtype` names a store of quantized kernels, the parameter stays in bfloat16. For
    `partial_over` see `ParameterAxes`.

    Raises:
      ValueError: if there is not one axis name per dimension.
    """
    _check_axes(shape, axes)
    stored = jnp.dtype(stores.UNQUANTIZED if dtype in stores.STORES else dtype)
    value = initializer(key, shape, stored)
    return nnx.Param(value, axes=axes, partial_over=partial_over)


class KernelParameters(NamedTuple):
    """The arrays that store a kernel; see `quantization.stores`."""

    kernel: nnx.Param
    scale: nnx.Param | None = None
    codebook: nnx.Param | None = None
    zero: nnx.Param | None = None
    order: nnx.Param | None = None
    nested: nnx.Param | None = None
    nested_codebook: nnx.Param | None = None

    def set_in(self, module: nnx.Module, name: str) -> None:
        """Makes them attributes of a module: `name`, `name_scale` and so on."""
        for part, array in self._asdict().items():
            attribute = name if part == "kernel" else f"{name}_{part}"
            # An attribute that was None before is not expected to hold an array.
            setattr(module, attribute, None if array is None else nnx.data(array))

    def transposed(self) -> "KernelParameters":
        """Returns the arrays of a table, the transpose of a kernel."""
        rest = (None if x is None else _transposed(x) for x in self[1:])
        return KernelParameters(_transposed(self.kernel), *rest)

    @classmethod
    def table_in(cls, module: nnx.Module, name: str) -> Table:
        """Returns the table that `set_in` stored in a module."""
        table = cls.arrays_in(module, name)
        if table.scale is None:
            return table.kernel
        return QuantizedTable(*table[:-1])

    @classmethod
    def arrays_in(cls, module: nnx.Module, name: str) -> StoredKernel:
        """Returns the arrays that `set_in` stored in a module."""
        parts = [getattr(module, f"{name}_{part}") for part in cls._fields[1:]]
        return cls(getattr(module, name), *parts).stored

    @property
    def stored(self) -> StoredKernel:
        """The arrays, as products take them."""
        kernel, scale, *rest = (None if x is None else x[...] for x in self)
        return stored_kernel(kernel, scale, *rest)


def stored_kernel(
    kernel: Any,
    scale: Any = None,
    codebook: Any = None,
    zero: Any = None,
    order: Any = None,
    nested: Any = None,
    nested_codebook: Any = None,
) -> StoredKernel:
    """Returns the arrays of a kernel, as products take them."""
    if nested is not None:
        scale = ScalesInCodes(scale, nested, nested_codebook)
    return StoredKernel(kernel, scale, codebook, zero, order)


def _transposed(parameter: nnx.Param) -> nnx.Param:
    axes = parameter.get_metadata("axes")
    return nnx.Param(parameter[...].T, axes=axes[::-1])


def declare_kernel(
    key: Key[Array, ""],
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    initializer: Initializer,
    dtype: str,
) -> KernelParameters:
    """Declares kernels `[L, ..., in, out]` that may be quantized.

    `shape`, `axes` and `initializer` describe the weights; `dtype` may name a store.

    Raises:
      ValueError: if there is not one axis name per dimension.
    """
    if dtype not in stores.STORES:
        return KernelParameters(declare(key, shape, axes, initializer, dtype))
    _check_axes(shape, axes)
    weights = initializer(key, shape, jnp.float32)  # [L, ..., in, out]
    group = None if dtype == stores.INT8 else nibbles.group_size(shape[-2])
    return store_kernel(weights, axes, Store(dtype, group))


def store_kernel(
    weights: Float[Array, "*lead in out"], axes: tuple[str, ...], store: Store
) -> KernelParameters:
    """Declares the arrays that store the weights of kernels.

    Raises:
      InputError: if the inputs cannot be packed.
    """
    if not store.quantized:
        return KernelParameters(nnx.Param(weights.astype(store.name), axes=axes))
    *lead, size_in, size_out = weights.shape
    if store.packed:
        codebook = None if store.name == stores.INT4 else nibbles.NORMAL_FLOAT
        kernel, scale = nibbles.pack(weights, codebook, store.group)
        nested = None
        if store.nested is not None:
            nested = quantized_scales(jnp.asarray(scale), store.nested)
        scale = scale.astype(store.scale_dtype) if nested is None else nested.codes
        tables = None if codebook is None else jnp.tile(codebook, (*lead, 1))
    else:
        groups = 1 if store.group is None else size_in // store.group
        grouped = weights.reshape(*lead, groups, -1, size_out)
        scale = channel_scale(grouped)  # [L, ..., groups, out]
        kernel = quantize(grouped, scale).reshape(weights.shape).astype(store.name)
        scale, tables = scale[..., 0, :] if store.group is None else scale, None
        nested = None
    middle = nibbles.MIDDLE if store.packed else 0
    zero = jnp.full(scale.shape, middle, jnp.int16) if store.zeros else None
    order = None
    if store.ordered:
        order = jnp.tile(jnp.arange(size_in), (*lead, 1))
        order = nnx.Param(order.astype(jnp.int32), axes=axes[:-1])
    scale_axes = axes if scale.ndim == len(axes) else (*axes[:-2], axes[-1])
    table_axes = (*axes[:-2], "codes")
    return KernelParameters(
        nnx.Param(kernel, axes=axes),
        nnx.Param(scale, axes=scale_axes),
        None if tables is None else nnx.Param(tables, axes=table_axes),
        None if zero is None else nnx.Param(zero, axes=scale_axes),
        order,
        None if nested is None else nnx.Param(nested.largest, axes=scale_axes),
        None if nested is None else nnx.Param(nested.table, axes=table_axes),
    )


def _check_axes(shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and logical axes {axes} differ in length")


# Some annotations of the base class cannot be checked at run time.
@no_type_check
class Structure(nnx.GraphDef):
    """Structure of a model that computes its hash once.

    At each call, `jax.jit` asks for the hash of a static argument and compares the
    argument with the compiled program's. For a whole model each takes about a
    millisecond, as long as a step of a small one.
    """

    @functools.cached_property
    def _hash(self) -> int:
        return super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Structure) or self._hash != other._hash:
            return False
        return (self.nodes, self.attributes) == (other.nodes, other.attributes)


@functools.lru_cache(maxsize=256)
def _first_of_equals(structure: Structure) -> Structure:
    """Returns the first of equal structures, to be compared by identity."""
    return structure


def split(model: nnx.Module) -> tuple[nnx.GraphDef, Parameters]:
    """Splits a model into its structure and its parameters by path."""
    graph, state = nnx.split(model)
    structure = Structure(graph.nodes, graph.attributes, graph.num_leaves)
    return _first_of_equals(structure), {
        "/".join(map(str, path)): leaf.get_value()
        for path, leaf in nnx.to_flat_state(state)
    }


def describe(
    build: Build, key: Key[Array, ""]
) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
    """Returns the structure that `build` makes, and the parameters' shapes and dtypes.

    Nothing is computed.
    """
    graphs: list[nnx.GraphDef] = []

    def parameters_alone(key: Key[Array, ""]) -> Parameters:
        graph, parameters = build(key)
        graphs.append(graph)
        return parameters

    abstract = jax.eval_shape(parameters_alone, key)
    return graphs[0], abstract


def merge(graph: nnx.GraphDef, parameters: Mapping[str, Any]) -> nnx.Module:
    """Reassembles a model; the inverse of `split`.

    `parameters` are arrays by path, or their shapes; those below `CONTEXT` are dropped.
    """
    state = nnx.from_flat_state(
        {
            tuple(path.split("/")): array
            for path, array in parameters.items()
            if not path.startswith(CONTEXT)
        }
    )
    return nnx.merge(graph, state)


class ParameterAxes(NamedTuple):
    """Logical axes of a parameter's dimensions.

    Attributes:
      names: logical axis of each dimension.
      partial_over: logical axis of which each device uses only its shard, although the
        parameter is replicated; None for other parameters. See `sharding`.
    """

    names: tuple[str, ...]
    partial_over: str | None = None


def logical_axes(model: nnx.Module) -> dict[str, ParameterAxes]:
    """Returns the logical axes of each parameter, by path."""
    axes = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        metadata = leaf.get_metadata()
        axes["/".join(map(str, path))] = ParameterAxes(
            metadata["axes"], metadata.get("partial_over")
        )
    return axes
