"""The layers of a block, each holding the parameters of all blocks stacked on `L`.

Inside the scan over blocks the same classes hold the slice of one block, so their
`__call__` methods are written for a single block.
"""

import functools

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
    fan_in,
    named_key,
    store_kernel,
)
from prompt_tuning.core.quantization.product import StoredKernel, as_float32, multiply
from prompt_tuning.core.quantization.stores import Store
from prompt_tuning.core.save_policies import named
from prompt_tuning.sharding import collectives

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
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
      kernel_scale: scales of a quantized kernel; None for any other.
      kernel_codebook: table of the values of a packed kernel, `[L, 16]`, or None.
      kernel_zero: zero points of a quantized kernel, or None.
      kernel_order: order of the inputs in a quantized kernel, or None.
      sizes: numbers of inputs and outputs.
      bias: `[L, out]`, or None.
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
        self.adapters = nnx.Dict()
        self.axes, self.sizes = axes, sizes

    def store_as(self, store: Store) -> None:
        """Stores the kernel in another way.

        Raises:
          InputError: if the inputs cannot be packed.
        """
        weights = jax.vmap(as_float32)(*self._arrays())
        store_kernel(weights, ("layers", *self.axes), store).set_in(self, "kernel")

    def __call__(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead out"]:
        """Applies the projection of one block and its adapters."""
        adapters = list(self.adapters.values())
        scaled_input = functools.reduce(
            lambda x, adapter: adapter.before(x), adapters, x
        )
        y = self.frozen(scaled_input)
        return functools.reduce(
            lambda y, adapter: adapter.adapt(x, y, self), adapters, y
        )

    def frozen(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead out"]:
        """Applies the projection of one block without adapters."""
        y = self.product(x)
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)

    def product(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead out"]:
        """Multiplies by the kernel of one block, without bias and adapters."""
        y = multiply(x, *self._arrays())
        return collectives.reduce_from_shards(y, self.axes[0])

    def wide_kernel(self) -> Float32[Array, "in out"]:
        """Returns the weights of one block, or this device's shard of them."""
        return as_float32(*self._arrays())

    def _arrays(self) -> StoredKernel:
        return KernelParameters.arrays_in(self, "kernel")


class Norm(nnx.Module):
    """Root-mean-square norm or layer norm, as the config sets, in float32.

    "rms_plus_one" stores the scale minus one, which is 0 at first (Gemma Team 2024,
    "Gemma"; the sum is computed in float32, since bfloat16 would round it).

    Attributes:
      scale: `[L, D]`, or `[D]` for a single norm.
      bias: bias of a layer norm, of the same shape; None for a root-mean-square norm.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        config: ModelConfig,
        *,
        stacked: int | None,
        width: int | None = None,
        axis: str = "embed",
        head_width: int | None = None,
        partial_over: str | None = None,
    ):
        self.epsilon = config.norm_epsilon
        self.plus_one = config.norm == "rms_plus_one"
        self.centered = config.norm in ("layer", "layer_scale")
        self.head_width = head_width
        self.axis, self.width = axis, config.width if width is None else width
        shape = (self.width,) if stacked is None else (stacked, self.width)
        axes = (axis,) if stacked is None else ("layers", axis)
        ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros
        start = zeros if self.plus_one else ones
        array = functools.partial(
            declare,
            key,
            shape,
            axes,
            dtype=config.parameter_dtype,
            partial_over=partial_over,
        )
        self.scale = array(initializer=start)
        self.bias = array(initializer=zeros) if config.norm == "layer" else None

    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        """Normalizes the last axis, `K` wide in a norm of heads."""
        scale = self.scale[...]
        if self.head_width is not None and len(scale) > self.head_width:
            scale = scale.reshape(-1, self.head_width)  # of each head on this device
        if self.plus_one:
            scale = 1 + scale.astype(jnp.float32)
        if self.centered:
            bias = jnp.zeros_like(scale) if self.bias is None else self.bias[...]
            return layer_norm(x, scale, bias, self.epsilon)
        if self.head_width is None and len(scale) < self.width:  # a shard of the heads
            return sharded_mean_square_norm(
                x, scale, self.epsilon, self.axis, self.width
            )
        return root_mean_square_norm(x, scale, self.epsilon)


def normalize(norm: Norm | None, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
    """Applies a norm, if there is one."""
    return x if norm is None else norm(x)


@functools.partial(recompute, static_argnums=2)
def root_mean_square_norm(
    x: Float[Array, "*lead D"], scale: Float[Array, "*heads D"], epsilon: float
) -> Float[Array, "*lead D"]:
    """Computes `x / rms(x) * scale` in float32 (Zhang and Sennrich 2019, eq. 4)."""
    wide = x.astype(jnp.float32)
    square = jnp.mean(wide * wide, -1, keepdims=True)  # [*lead, 1]
    normed = wide * jax.lax.rsqrt(square + epsilon)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def sharded_mean_square_norm(
    x: Float[Array, "*lead d"],
    scale: Float[Array, "d"],
    epsilon: float,
    axis: str,
    width: int,
) -> Float[Array, "*lead d"]:
    """Computes the root-mean-square norm of an axis that a mesh shards.

    Args:
      x: this device's shard of the `width` elements.
      scale: this device's shard of the scale.
      epsilon: added to the mean square.
      axis: logical name of the axis.
      width: number of elements on all devices.
    """
    wide = x.astype(jnp.float32)
    total = collectives.reduce_from_shards(
        jnp.sum(wide * wide, -1, keepdims=True), axis
    )
    # Every device uses the sum for its own shard.
    square = collectives.copy_to_shards(total, axis) / width
    normed = wide * jax.lax.rsqrt(square + epsilon)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


@functools.partial(recompute, static_argnums=3)
def layer_norm(
    x: Float[Array, "*lead D"],
    scale: Float[Array, "*heads D"],
    bias: Float[Array, "*heads D"],
    epsilon: float,
) -> Float[Array, "*lead D"]:
    """Computes `(x - mean(x)) / std(x) * scale + bias` in float32 (Ba et al. 2016)."""
    wide = x.astype(jnp.float32)
    centered = wide - wide.mean(-1, keepdims=True)
    square = jnp.mean(centered * centered, -1, keepdims=True)  # [*lead, 1]
    normed = centered * jax.lax.rsqrt(square + epsilon) * scale.astype(jnp.float32)
    return (normed + bias.astype(jnp.float32)).astype(x.dtype)


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

        def dense(name, sizes, axes):
            return Dense(
                named_key(key, name),
                sizes,
                axes,
                layers=layers,
                bias=name in config.biased_projections,
                dtype=config.parameter_dtype,
            )

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
        """Applies the feed-forward layer of one block.

        Args:
          x: normalized hidden states.
          key: random key for dropout; None disables dropout.
          numbers: number of each position in the whole batch.
        """
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


class Embedding(nnx.Module):
    """Table of vectors `[rows, D]`, for tokens or for learned positions.

    Attributes:
      embedding: the table.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig, rows: int, axis: str):
        # T5 uses its table unscaled and initializes it at 1; other models start small.
        deviation = 1.0 if config.positions == "relative" else 0.02
        self.embedding = declare(
            key,
            (rows, config.width),
            (axis, "embed"),
            jax.nn.initializers.normal(deviation),
            config.parameter_dtype,
        )

    def __call__(self, ids: Array, dtype: jnp.dtype) -> Float[Array, "*lead D"]:
        """Looks up the vectors of `ids`."""
        # The data checks ids; the default mode would check all of them again.
        rows = jnp.take(self.embedding[...], ids, axis=0, mode="clip")
        return rows.astype(dtype)


class TokenEmbedding(Embedding):
    """Embedding table of the vocabulary, whose rows a mesh may shard.

    Attributes:
      adapters: trained rows of some tokens, if there are any; see `TokenRows`.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig, rows: int, axis: str):
        super().__init__(key, config, rows, axis)
        self.multiplier = config.embedding_multiplier
        self.adapters = nnx.Dict()

    def __call__(self, ids: Array, dtype: jnp.dtype) -> Float[Array, "*lead D"]:
        """Looks up the vectors of `ids`, multiplied as the config sets."""
        vectors = self._look_up(ids, dtype)
        for rows in self.adapters.values():
            vectors = rows(ids, vectors)
        if self.multiplier == 1:
            return vectors
        # Like transformers, the multiplier is rounded before the product.
        return vectors * jnp.asarray(self.multiplier, dtype)

    def _look_up(self, ids: Array, dtype: jnp.dtype) -> Float[Array, "*lead D"]:
        """Looks up the vectors of `ids`; each device finds those in its shard."""
        columns = collectives.vocabulary_shard(len(self.embedding))
        if columns.whole:
            return super().__call__(ids, dtype)
        # An id past the end marks a prompt vector that a template inserts.
        ids = (
            collectives.gather_rows(jnp.minimum(ids, columns.total - 1)) - columns.first
        )
        vectors = super().__call__(ids, dtype)
        # Each id is in one shard; the other devices contribute zeros to the sum.
        in_shard = (ids >= 0) & (ids < columns.count)
        return collectives.reduce_scatter_rows(
            jnp.where(in_shard[..., None], vectors, 0)
        )


class Head(nnx.Module):
    """Parts of the output head besides the embedding table.

    Attributes:
      kernel: `[V, D]`, laid out like an embedding table; None if it is that table.
      bias: bias of each logit, `[V]`, or None.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig):
        self.kernel = (
            None
            if config.tied_head
            else declare(
                key,
                (config.table_rows, config.width),
                ("vocab", "embed"),
                fan_in(config.width),
                config.parameter_dtype,
            )
        )
        zeros = jax.nn.initializers.zeros
        shape, dtype = (config.vocabulary_size,), config.parameter_dtype
        self.bias = (
            declare(key, shape, ("vocab",), zeros, dtype) if config.head_bias else None
        )
