"""Parameters: declared once in a module, handled everywhere as a flat dict.

A model is a tree of NNX modules; everything outside the models sees
`{"decoder/layers/mlp/up/kernel": array}`. Regular expressions, restoring, optimisers
and files all speak of these paths.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key

from prompt_tuning.core.quantization import (
    QUANTIZED,
    UNQUANTIZED,
    channel_scale,
    quantize,
)

Parameters = dict[str, Array]
Initializer = Callable[..., Array]
Build = Callable[[Key[Array, ""]], tuple[nnx.GraphDef, Parameters]]


def named_key(key: Key[Array, ""], name: str) -> Key[Array, ""]:
    """The key of one named part, whatever other parts there are."""
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def optional_key(key: Key[Array, ""] | None, name: str) -> Key[Array, ""] | None:
    """`named_key`, or None (no dropout) for None."""
    return None if key is None else named_key(key, name)


def fan_in(size_in: int) -> Initializer:
    """Normal numbers of standard deviation `size_in ** -0.5`."""
    return jax.nn.initializers.normal(size_in**-0.5)


def declare(
    key: Key[Array, ""],
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    initializer: Initializer,
    dtype: str,
) -> nnx.Param:
    """One parameter: shape, logical axes, initialiser and dtype in one place.

    In a model of dtype "int8" it is one of those that stay in bfloat16.

    Raises:
      ValueError: if there is not one axis name for each dimension.
    """
    _check_axes(shape, axes)
    kept = jnp.dtype(UNQUANTIZED if dtype == QUANTIZED else dtype)
    return nnx.Param(initializer(key, shape, kept), axes=axes)


def declare_quantized(
    key: Key[Array, ""],
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    initializer: Initializer,
) -> tuple[nnx.Param, nnx.Param]:
    """A kernel `[L, in, out]` in int8, and its scales `[L, out]` in float32.

    Raises:
      ValueError: if there is not one axis name for each dimension.
    """
    _check_axes(shape, axes)
    weights = initializer(key, shape, jnp.float32)
    scale = channel_scale(weights)
    kernel = nnx.Param(quantize(weights, scale), axes=axes)
    return kernel, nnx.Param(scale, axes=(*axes[:-2], axes[-1]))


def _check_axes(shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and logical axes {axes} differ in length")


def split(model: nnx.Module) -> tuple[nnx.GraphDef, Parameters]:
    """Takes a model apart into its structure and its parameters by path."""
    graph, state = nnx.split(model)
    return graph, {
        "/".join(map(str, path)): leaf.get_value()
        for path, leaf in nnx.to_flat_state(state)
    }


def describe(
    build: Build, key: Key[Array, ""]
) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
    """The structure that `build` gives, and its parameters' shapes and types.

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
    """Puts a model together again; the inverse of `split`.

    Args:
      graph: the model's structure.
      parameters: its arrays by path, or their shapes.
    """
    state = nnx.from_flat_state(
        {tuple(path.split("/")): array for path, array in parameters.items()}
    )
    return nnx.merge(graph, state)


class ParameterAxes(NamedTuple):
    """What is known of a parameter's dimensions.

    Attributes:
      names: the logical axis of each.
      partial_over: where it is whole, but each device uses it for its own part of a
        dimension, that dimension's name; else None. See `parallel`.
    """

    names: tuple[str, ...]
    partial_over: str | None = None


def logical_axes(model: nnx.Module) -> dict[str, ParameterAxes]:
    """What is known of the dimensions of each parameter, by path."""
    found = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model)):
        metadata = leaf.get_metadata()
        axes = ParameterAxes(metadata["axes"], metadata.get("partial_over"))
        found["/".join(map(str, path))] = axes
    return found
