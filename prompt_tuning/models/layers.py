"""Layers of a block; each holds the parameters of all blocks, stacked on `L`.

Inside the scan over blocks the same classes hold one block's slice, so their `__call__`
methods are written for a single block.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int, Key

from prompt_tuning.core.dropout import DropoutIndex, dropout
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import (
    KernelParameters,
    declare,
    declare_kernel,
    named_key,
    store_kernel,
)
from prompt_tuning.core.quantization.product import StoredKernel, as_float32, multiply
from prompt_tuning.core.quantization.stores import Store
from prompt_tuning.core.quantization.tables import QuantizedTable, Table
from prompt_tuning.core.recomputation import named
from prompt_tuning.sharding import collectives

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,  # of the layer before a head
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),  # Hendrycks, Gimpel 2016
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),  # So et al. 2021, "Primer"
}


# Chains of element-wise operations are cheaper to repeat than to store: only the input
# of each is saved for the backward pass. Within a scan the compiler cannot merge the
# two passes, so it need not be prevented from doing so (`prevent_cse`).
recompute = functools.partial(jax.checkpoint, prevent_cse=False)


class Dense(nnx.Module):
    """`x @ kernel (+ bias)`, with the kernel widened to the dtype of `x`.

    Attributes:
      kernel: `[L, in, out]`, or `[in, out]` for one block inside the scan; packed in
        four bits it is `[L, in / 2, out]`.
      kernel_scale: scales of a quantized kernel, or None.
      kernel_codebook: values that a packed kernel's codes stand for, `[L, 16]`, or
        None.
      kernel_zero: zero points of a quantized kernel, or None.
      kernel_order: order of the inputs in a quantized kernel, or None.
      sizes: numbers of inputs and outputs.
      bias: `[L, out]`, or None.
      multiplier: factor of the output, adapters included.
      adapters: trained adapters of the projection, by name; see `ProjectionAdapter`.
      axes: logical axes of the input and the output. If a mesh shards `in`, each device
        multiplies its shard and the products are summed; if it shards `out`, each
        device computes its shard of the output.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        sizes: tuple[int, int],
        axes: tuple[str, str],
        *,
        layers: int,
        bias: bool,
        dtype: str,
        scale: float = 1.0,
    ):
        size_in, size_out = sizes
        initializer = jax.nn.initializers.normal(scale * size_in**-0.5)
        shape, names = (layers, size_in, size_out), ("layers", *axes)
        arrays = declare_kernel(key, shape, names, initializer, dtype)
        self.kernel = arrays.kernel
        arrays.set_in(self, "kernel")
        zeros = jax.nn.initializers.zeros
        shape, names = (layers, size_out), ("layers", axes[1])
        self.bias = declare(key, shape, names, zeros, dtype) if bias else None
        self.multiplier, self.adapters = 1.0, nnx.Dict()
        self.axes, self.sizes = axes, sizes

    def store_as(self, name: str, store: Store) -> None:
        """Changes how the kernel is stored; `name` is "kernel".

        Raises:
          InputError: if the inputs cannot be packed.
        """
        weights = jax.vmap(as_float32)(*self._arrays())
        store_kernel(weights, ("layers", *self.axes), store).set_in(self, name)

    def __call__(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead out"]:
        """Applies one block's projection with its adapters."""
        adapters = list(self.adapters.values())
        scaled_input = functools.reduce(
            lambda x, adapter: adapter.before(x), adapters, x
        )
        y = self.frozen(scaled_input)
        y = functools.reduce(lambda y, adapter: adapter.adapt(x, y, self), adapters, y)
        return y if self.multiplier == 1 else y * self.multiplier

    def frozen(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead out"]:
        """Applies one block's projection without adapters, except a trained bias."""
        y, bias = self.product(x), self.applied_bias()
        return y if bias is None else y + bias.astype(x.dtype)

    def applied_bias(self) -> Float[Array, "out"] | None:
        """Returns one block's bias: the trained one, or else the frozen one."""
        return applied_bias(self.bias, self.adapters)

    def product(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead out"]:
        """Multiplies by one block's kernel, without bias and adapters."""
        y = multiply(x, *self._arrays())
        return collectives.reduce_from_shards(y, self.axes[0])

    def wide_kernel(self) -> Float32[Array, "in out"]:
        """Returns one block's weights, dequantized; on a mesh, this device's shard."""
        return as_float32(*self._arrays())

    def _arrays(self) -> StoredKernel:
        return KernelParameters.arrays_in(self, "kernel")


def dense_layers(
    key: Key[Array, ""], config: ModelConfig, layers: int, *, biased: bool = True
) -> Callable[..., Dense]:
    """Returns a function that declares projections, stacked on `layers`.

    It takes a projection's name, from which its random key follows, its sizes, axes,
    and scale if not 1; see `Dense`. With `biased` it has a bias if the config says so.
    """

    def dense(name: str, sizes: Any, axes: Any, scale: float = 1.0) -> Dense:
        bias = biased and name in config.biased_projections
        options: dict[str, Any] = {"bias": bias, "dtype": config.parameter_dtype}
        part_key = named_key(key, name)
        return Dense(part_key, sizes, axes, layers=layers, scale=scale, **options)

    return dense


def applied_bias(
    bias: nnx.Param | None, adapters: Mapping[str, Any]
) -> Float[Array, "out"] | None:
    """Returns the bias that an adapter trains, or else the frozen one."""
    if bias is None:
        return None
    for adapter in adapters.values():
        if adapter.bias is not None:
            return adapter.bias_instead_of(bias[...])
    return bias[...]


def adapted_output(
    x: Float[Array, "*lead in"],
    y: Float[Array, "*lead out"],
    adapters: Mapping[str, Any],
) -> Float[Array, "*lead out"]:
    """Applies the adapters that act on a layer's output."""
    return functools.reduce(
        lambda y, adapter: adapter.after(x, y), adapters.values(), y
    )


class FeedForward(nnx.Module):
    """`down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))` ungated.

    Attributes:
      gate: `[L, D, F]`, or None in an ungated layer.
      up: `[L, D, F]`.
      down: `[L, F, D]`.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        layers: int,
        width: int | None = None,
    ):
        self.activation = config.activation
        self.dropout_rate = config.dropout_rate
        inner = config.feed_forward_width if width is None else width
        width = config.width
        dense = dense_layers(key, config, layers)
        inward = ((width, inner), ("embed", "mlp"))
        self.gate = dense("gate", *inward) if config.gated else None
        self.up = dense("up", *inward)
        self.down = dense("down", (inner, width), ("mlp", "embed"))

    def __call__(
        self,
        x: Float[Array, "n D"],
        key: Key[Array, ""] | None,
        numbers: Int[Array, "n"],
    ) -> Float[Array, "n D"]:
        """Applies one block's feed-forward layer to normalized hidden states."""
        activation = ACTIVATIONS[self.activation]
        x = collectives.copy_to_shards(x, "mlp")
        # `inner` is [n, F], or this device's shard of F.
        if self.gate is None:
            inner = recompute(activation)(named(self.up(x), "up"))
        else:
            gated = recompute(lambda gate, up: activation(gate) * up)
            inner = gated(named(self.gate(x), "gate"), named(self.up(x), "up"))
        first = collectives.first_column(inner.shape[-1])
        index = DropoutIndex.at_positions(numbers, inner.shape[-1], first)
        return self.down(dropout(inner, self.dropout_rate, key, index))


class TableModule(nnx.Module):
    """A module with a table `[V, D]`, which may be quantized."""

    def store_as(self, name: str, store: Store) -> None:
        """Changes how the table `name` of the module is stored.

        Raises:
          InputError: if the columns cannot be packed.
        """
        parameter = getattr(self, name)
        axes = parameter.get_metadata("axes")[::-1]
        turned = store_kernel(parameter[...].T, axes, store)
        turned.transposed().set_in(self, name)


class Embedding(TableModule):
    """Table of vectors `[rows, D]`, for tokens or learned positions.

    Attributes:
      embedding: the table, `[rows, width]` if the vectors have another width.
        Quantized, its scales are attributes, too.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        rows: int,
        axis: str,
        width: int = 0,
    ):
        # T5 uses its table unscaled and initializes it at 1; other models start small.
        deviation = 1.0 if config.positions == "relative" else 0.02
        embedding = declare(
            key,
            (rows, width or config.width),
            (axis, "layer_inputs" if width else "embed"),
            jax.nn.initializers.normal(deviation),
            config.parameter_dtype,
        )
        self.embedding = embedding
        KernelParameters(embedding).set_in(self, "embedding")

    @property
    def table(self) -> Table:
        """The table in its store."""
        return KernelParameters.table_in(self, "embedding")

    def __call__(self, ids: Array, dtype: jnp.dtype) -> Float[Array, "*lead D"]:
        """Looks up the vectors of `ids`."""
        # The data checks ids; the default mode would check all of them again.
        table = self.table
        if isinstance(table, QuantizedTable):
            return table[ids].astype(dtype)
        return jnp.take(table, ids, axis=0, mode="clip").astype(dtype)


class TokenEmbedding(Embedding):
    """Embedding table of the vocabulary; a mesh may shard its rows.

    Attributes:
      adapters: trained rows of some tokens, or empty; see `TokenRows`.
      layer_inputs: extra inputs of layers, `[V, L d]`, which follow the vectors, or
        None; see `models.layer_inputs`.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig, rows: int, axis: str):
        super().__init__(key, config, rows, axis)
        self.multiplier = config.embedding_multiplier
        self.rows, self.layer_multiplier = rows, config.layer_input_width**0.5
        size = config.layers * config.layer_input_width
        part_key = named_key(key, "layer_inputs")
        self.layer_inputs = (
            Embedding(part_key, config, rows, axis, size) if size else None
        )
        self.adapters = nnx.Dict()

    def __call__(self, ids: Array, dtype: jnp.dtype) -> Float[Array, "*lead D"]:
        """Looks up the vectors of `ids`, scaled if the config asks for it."""
        vectors = self._look_up(super().__call__, ids, dtype)
        for rows in self.adapters.values():
            vectors = rows(ids, vectors)
        if self.multiplier != 1:
            # Like transformers, the multiplier is rounded before the product.
            vectors = vectors * jnp.asarray(self.multiplier, dtype)
        if self.layer_inputs is None:
            return vectors
        # Trained rows and prompts have zeros.
        parts = self._look_up(self.layer_inputs, ids, dtype)
        factor = jnp.where(ids < self.rows, self.layer_multiplier, 0)[..., None]
        parts = parts * factor.astype(dtype)
        return jnp.concatenate([vectors, parts], axis=-1)

    def _look_up(
        self, table: Callable[[Array, jnp.dtype], Array], ids: Array, dtype: jnp.dtype
    ) -> Float[Array, "*lead D"]:
        """Looks up the vectors of `ids`; on a mesh, each device in its own shard."""
        columns = collectives.vocabulary_shard(len(self.embedding))
        if columns.whole:
            return table(ids, dtype)
        # An id past the end marks a prompt vector that a template inserts.
        ids = (
            collectives.gather_rows(jnp.minimum(ids, columns.total - 1)) - columns.first
        )
        vectors = table(ids, dtype)
        # Each id is in one shard; the other devices contribute zeros to the sum.
        in_shard = (ids >= 0) & (ids < columns.count)
        return collectives.reduce_scatter_rows(
            jnp.where(in_shard[..., None], vectors, 0)
        )
