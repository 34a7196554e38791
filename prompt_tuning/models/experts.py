"""Feed-forward layers with experts; a few process each token (Shazeer et al. 2017).

A router scores all experts for a token. The token's output is the sum of the outputs of
the `k` experts with the highest scores, weighted by the softmax of the scores (Jiang et
al. 2024, "Mixtral of Experts", section 2.1). Losses that balance the load of experts
are not computed: the router is frozen.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import declare, fan_in, named_key
from prompt_tuning.models.layers import ACTIVATIONS, Dense, FeedForward
from prompt_tuning.sharding import collectives


class ExpertKernels(NamedTuple):
    """Kernels of the experts of one block, or this device's shard of `F`."""

    gate: Float[Array, "E D F"]
    up: Float[Array, "E D F"]
    down: Float[Array, "E F D"]


class ExpertBiases(NamedTuple):
    """Biases of the inward projections of the experts of one block."""

    gate: Float[Array, "*E F"]
    up: Float[Array, "*E F"]


class MixtureOfExperts(nnx.Module):
    """Router and experts; in bfloat16 if projections are quantized.

    Attributes:
      router: `[L, D, E]`.
      expert_gate: `[L, E, D, F]`.
      expert_up: `[L, E, D, F]`.
      expert_down: `[L, E, F, D]`.
      expert_gate_bias: `[L, E, F]`, or None.
      expert_up_bias: `[L, E, F]`, or None.
      expert_down_bias: `[L, E, D]`, or None.
      shared: expert that processes every token, or None.
      shared_gate: score of that expert, whose sigmoid is its weight, `[L, D, 1]`.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig, *, layers: int):
        self.config = config
        width, inner, count = config.width, config.feed_forward_width, config.experts

        biased = "gate" in config.biased_projections

        def dense(name, size, axis, bias=False):
            return Dense(
                named_key(key, name),
                (width, size),
                ("embed", axis),
                layers=layers,
                bias=bias,
                dtype=config.parameter_dtype,
            )

        def kernels(name, sizes, axes):
            return declare(
                named_key(key, name),
                (layers, count, *sizes),
                ("layers", "experts", *axes),
                fan_in(sizes[0]),
                config.parameter_dtype,
            )

        def biases(name, size, axis):
            if not biased:
                return None
            shape, axes = (layers, count, size), ("layers", "experts", axis)
            zeros, dtype = jax.nn.initializers.zeros, config.parameter_dtype
            return declare(named_key(key, name), shape, axes, zeros, dtype)

        self.router = dense("router", count, "experts", biased)
        inward = ((width, inner), ("embed", "mlp"))
        self.expert_gate = kernels("expert_gate", *inward)
        self.expert_up = kernels("expert_up", *inward)
        self.expert_down = kernels("expert_down", (inner, width), ("mlp", "embed"))
        self.expert_gate_bias = biases("expert_gate_bias", inner, "mlp")
        self.expert_up_bias = biases("expert_up_bias", inner, "mlp")
        self.expert_down_bias = biases("expert_down_bias", width, "embed")
        shared = config.shared_expert_width
        self.shared = (
            FeedForward(named_key(key, "shared"), config, layers=layers, width=shared)
            if shared
            else None
        )
        self.shared_gate = dense("shared_gate", 1, "shared_gate") if shared else None

    def __call__(
        self,
        x: Float[Array, "n D"],
        key: Key[Array, ""] | None,
        numbers: Int[Array, "n"],
    ) -> Float[Array, "n D"]:
        """Applies the experts of one block; arguments as of `FeedForward`.

        Only activations of the shared expert are dropped: those of the others depend on
        the choice of experts.
        """
        chosen, weights = route(self.router(x), self.config)
        kernels = ExpertKernels(
            *(
                kernel[...].astype(x.dtype)
                for kernel in (self.expert_gate, self.expert_up, self.expert_down)
            )
        )
        biases = None
        if self.expert_gate_bias is not None and self.expert_up_bias is not None:
            both = self.expert_gate_bias, self.expert_up_bias
            biases = ExpertBiases(*(bias[...].astype(x.dtype) for bias in both))
        weights = weights.astype(x.dtype)
        run = run_grouped if jax.default_backend() in GROUPED else run_all
        output = run(
            collectives.copy_to_shards(x, "mlp"),
            chosen,
            collectives.copy_to_shards(weights, "mlp"),
            kernels,
            self.config.activation,
            biases,
            self.config.expert_limit,
        )
        output = collectives.reduce_from_shards(output, "mlp")
        if self.expert_down_bias is not None:
            bias = self.expert_down_bias[...].astype(x.dtype)
            output = output + weights_of_all(chosen, weights, len(bias)) @ bias
        if self.shared is None or self.shared_gate is None:
            return output
        weight = jax.nn.sigmoid(self.shared_gate(x))  # [n, 1]
        return output + weight * self.shared(x, key, numbers)


GROUPED = ("gpu", "tpu")
"""Platforms with kernels that multiply groups of rows with a matrix each."""


def route(
    scores: Float[Array, "n E"], config: ModelConfig
) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
    """Returns the experts of each token and their weights, in float32."""
    shares = jax.nn.softmax(scores.astype(jnp.float32))
    weights, chosen = jax.lax.top_k(shares, config.experts_per_token)
    if config.normalize_experts:
        weights = weights / weights.sum(-1, keepdims=True)
    return chosen, weights


def weights_of_all(
    chosen: Int[Array, "n k"], weights: Float[Array, "n k"], count: int
) -> Float[Array, "n E"]:
    """Returns the weight of every expert, zero for those that were not chosen."""
    hot = jax.nn.one_hot(chosen, count, dtype=weights.dtype)  # [n, k, E]
    return jnp.einsum("nke,nk->ne", hot, weights)


def activate(
    gate: Float[Array, "*lead F"],
    up: Float[Array, "*lead F"],
    activation: str,
    limit: float | None,
) -> Float[Array, "*lead F"]:
    """Computes `activation(gate) * up`, clamped if there is a limit.

    The clamped form is `activation(min(gate, c)) * (clip(up, -c, c) + 1)` (gpt-oss:
    OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.1).
    """
    if limit is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit) + 1
    return ACTIVATIONS[activation](gate) * up


def run_grouped(
    x: Float[Array, "n D"],
    chosen: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    kernels: ExpertKernels,
    activation: str,
    biases: ExpertBiases | None = None,
    limit: float | None = None,
) -> Float[Array, "n D"]:
    """Runs each token through its experts, with the tokens of an expert together."""
    count = chosen.shape[1]
    order = jnp.argsort(chosen.reshape(-1))  # [n * k], by expert
    sizes = jnp.bincount(chosen.reshape(-1), length=len(kernels.gate)).astype(jnp.int32)
    tokens = x[order // count]
    gate = jax.lax.ragged_dot(tokens, kernels.gate, sizes)
    up = jax.lax.ragged_dot(tokens, kernels.up, sizes)
    if biases is not None:
        expert = chosen.reshape(-1)[order]
        gate, up = gate + biases.gate[expert], up + biases.up[expert]
    inner = activate(gate, up, activation, limit)
    weighted = inner * weights.reshape(-1)[order, None]
    outputs = jax.lax.ragged_dot(weighted, kernels.down, sizes)
    return outputs[jnp.argsort(order)].reshape(*chosen.shape, -1).sum(1)


def run_all(
    x: Float[Array, "n D"],
    chosen: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    kernels: ExpertKernels,
    activation: str,
    biases: ExpertBiases | None = None,
    limit: float | None = None,
) -> Float[Array, "n D"]:
    """Runs every token through all experts, one expert at a time.

    CPUs compute `jax.lax.ragged_dot` as if each group had all rows, which is slower.
    """

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def add_expert(total, expert):
        number, kernel, bias = expert
        weight = jnp.where(chosen == number, weights, 0).sum(1)  # [n]
        gate, up = x @ kernel.gate, x @ kernel.up
        if bias is not None:
            gate, up = gate + bias.gate, up + bias.up
        inner = activate(gate, up, activation, limit)
        # The gradient of a factor of the output would need the output again.
        return total + (inner * weight[:, None]) @ kernel.down, None

    experts = (jnp.arange(len(kernels.gate)), kernels, biases)
    return jax.lax.scan(add_expert, jnp.zeros_like(x), experts)[0]
