"""Mixture of experts: feed-forward layers in which a few experts process each token.

A router scores all experts for a token (Shazeer et al. 2017). The token's output is the
sum of the outputs of the `k` best, weighted by the softmax of their scores (Jiang et
al. 2024, "Mixtral of Experts", section 2.1). There are no losses to balance the load of
experts: the router is frozen.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import (
    KernelParameters,
    declare,
    declare_kernel,
    fan_in,
    named_key,
    store_kernel,
)
from prompt_tuning.core.quantization.product import StoredKernel, as_float32
from prompt_tuning.core.quantization.stores import STORES, UNQUANTIZED, Store
from prompt_tuning.models.expert_adapters import (
    UNCHANGED,
    ExpertChanges,
    ExpertProjection,
)
from prompt_tuning.models.expert_routing import ROUTES, route_by_sigmoid
from prompt_tuning.models.layers import ACTIVATIONS, Dense, FeedForward
from prompt_tuning.models.norms import Norm
from prompt_tuning.sharding import collectives

STACKED = ("layers", "experts")
"""Logical axes before a kernel's own."""
NORMS = ("router", "experts", "experts_out", "shared", "shared_out")
"""Norms of a layer whose parts have separate ones."""


class ExpertKernels(NamedTuple):
    """Kernels of one block's experts, or this device's shard of `F`.

    Attributes:
      gate: `[E, D, F]`, in any store; None without gates.
      up: `[E, D, F]`.
      down: `[E, F, D]`.
    """

    gate: StoredKernel | None
    up: StoredKernel
    down: StoredKernel


class ExpertBiases(NamedTuple):
    """Biases of the experts' inward projections in one block."""

    gate: Float[Array, "*E F"]
    up: Float[Array, "*E F"]


class MixtureOfExperts(nnx.Module):
    """Router and experts.

    The experts' kernels may be quantized, e.g. with the scales `expert_gate_scale`. The
    router may not: it decides which experts run.

    Attributes:
      router: `[L, D, E]`.
      router_correction: correction of scores, float32 `[L, E]`, or None (see
        `expert_routing`).
      expert_gate: `[L, E, D, F]`, or `[L, E, D / 2, F]` packed in four bits; absent if
        experts have no gates (Nemotron-H).
      expert_up: same shape as `expert_gate`.
      expert_down: `[L, E, F, D]`, or `[L, E, F / 2, D]`.
      expert_gate_bias: `[L, E, F]`, or None.
      expert_up_bias: `[L, E, F]`, or None.
      expert_down_bias: `[L, E, D]`, or None.
      experts: the experts' projections by name, where they have adapters.
      norms: with `routing` "separate_norms" (Gemma 4), the norms of what enters and
        leaves the shared expert and the experts, and of what enters the router; the
        block then has no norm before this layer. Empty otherwise.
      expert_factors: factor of each expert's weight after routing, `[L, E]`; None
        unless the norms are separate.
      shared: expert that processes every token, or None.
      shared_gate: its weight is the sigmoid of this score, `[L, D, 1]`; None for weight
        1.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig, *, layers: int):
        self.config = config
        width, inner, count = config.width, config.feed_forward_width, config.experts

        biased = "gate" in config.biased_projections
        dtype = config.parameter_dtype

        def kernels(name, sizes, axes):
            part_key = named_key(key, f"expert_{name}")
            shape, names = (layers, count, *sizes), (*STACKED, *axes)
            stored = declare_kernel(part_key, shape, names, fan_in(sizes[0]), dtype)
            stored.set_in(self, f"expert_{name}")
            self.experts[name] = ExpertProjection(sizes, axes, layers, count)

        def biases(name, size, axis):
            if not biased:
                return None
            shape, axes = (layers, count, size), (*STACKED, axis)
            zeros = jax.nn.initializers.zeros
            return declare(named_key(key, name), shape, axes, zeros, dtype)

        self._declare_routing(key, config, layers, biased)
        self.experts = nnx.Dict()
        for name in ("gate", "up") if config.gated else ("up",):
            kernels(name, (width, inner), ("embed", "mlp"))
        kernels("down", (inner, width), ("mlp", "embed"))
        self.expert_gate_bias = biases("expert_gate_bias", inner, "mlp")
        self.expert_up_bias = biases("expert_up_bias", inner, "mlp")
        self.expert_down_bias = biases("expert_down_bias", width, "embed")
        shared = config.shared_expert_width
        self.shared = (
            FeedForward(named_key(key, "shared"), config, layers=layers, width=shared)
            if shared
            else None
        )
        gated = shared and config.shared_expert_gated
        self.shared_gate = _score(key, config, layers, "shared_gate") if gated else None

    def _declare_routing(self, key, config, layers, biased):
        """Declares what chooses and weighs experts, and the norms of the parts."""

        def per_expert(name, initializer, dtype, present):
            if not present:
                return None
            shape = (layers, config.experts)
            return declare(named_key(key, name), shape, STACKED, initializer, dtype)

        self.router = _score(
            key, config, layers, "router", config.experts, "experts", biased
        )
        start, separate = jax.nn.initializers, config.separate_norms
        # In float32, since small differences choose, as in transformers.
        self.router_correction = per_expert(
            "router_correction", start.zeros, "float32", config.routing == "sigmoid"
        )
        self.expert_factors = per_expert(
            "expert_factors", start.ones, config.parameter_dtype, separate
        )
        names = NORMS if separate else ()
        self.norms = nnx.Dict(
            {x: Norm(named_key(key, x), config, stacked=layers) for x in names}
        )

    def __call__(
        self,
        x: Float[Array, "n D"],
        key: Key[Array, ""] | None,
        numbers: Int[Array, "n"],
    ) -> Float[Array, "n D"]:
        """Applies the experts of one block; takes the same arguments as `FeedForward`.

        Dropout applies to the shared expert's activations only, since the experts
        chosen for a token vary.
        """
        chosen, weights = self._route(self._normalized("router", x))
        if self.expert_factors is not None:
            weights = weights * self.expert_factors[...][chosen]  # [n, k]
        stored = {
            name: KernelParameters.arrays_in(self, f"expert_{name}")
            for name in self.experts
        }
        kernels = ExpertKernels(stored.get("gate"), stored["up"], stored["down"])
        biases = None
        if self.expert_gate_bias is not None and self.expert_up_bias is not None:
            both = self.expert_gate_bias, self.expert_up_bias
            biases = ExpertBiases(*(bias[...].astype(x.dtype) for bias in both))
        changes = ExpertChanges(
            **{name: part.factors(x.dtype) for name, part in self.experts.items()}
        )
        entries = [part.entries(len(x)) for part in self.experts.values()]
        weights = weights.astype(x.dtype)
        run = run_grouped if jax.default_backend() in GROUPED else run_all
        output = run(
            collectives.copy_to_shards(self._normalized("experts", x), "mlp"),
            chosen,
            collectives.copy_to_shards(weights, "mlp"),
            kernels,
            self.config.activation,
            biases,
            self.config.expert_limit,
            changes,
            self.config.routing == "sigmoid_inputs",
            next((rows for rows in entries if rows is not None), None),
        )
        output = collectives.reduce_from_shards(output, "mlp")
        if self.expert_down_bias is not None:
            bias = self.expert_down_bias[...].astype(x.dtype)
            output = output + weights_of_all(chosen, weights, len(bias)) @ bias
        output = self._normalized("experts_out", output)
        if self.shared is None:
            return output
        shared = self.shared(self._normalized("shared", x), key, numbers)
        shared = self._normalized("shared_out", shared)
        if self.shared_gate is None:
            return output + shared
        return output + jax.nn.sigmoid(self.shared_gate(x)) * shared

    def _normalized(self, name, x):
        return self.norms[name](x) if name in self.norms else x

    def _route(self, x):
        """Chooses each token's experts and their weights."""
        if self.router_correction is None:
            choose = ROUTES[self.config.routing]
            return choose(self.router(x), self.config)
        # Close scores of many experts need float32, whatever the layers compute in.
        scores = self.router(x.astype(jnp.float32))
        return route_by_sigmoid(scores, self.router_correction[...], self.config)

    def store_as(self, name: str, store: Store) -> None:
        """Changes how one of the experts' kernels is stored.

        Raises:
          InputError: if the inputs cannot be packed.
        """
        held = KernelParameters.arrays_in(self, name)
        weights = jax.vmap(jax.vmap(as_float32))(*held)
        inward = ("mlp", "embed") if name == "expert_down" else ("embed", "mlp")
        store_kernel(weights, (*STACKED, *inward), store).set_in(self, name)


def _score(
    key: Key[Array, ""],
    config: ModelConfig,
    layers: int,
    name: str,
    size: int = 1,
    axis: str = "shared_gate",
    bias: bool = False,
) -> Dense:
    """Returns a projection to scores, which is never quantized."""
    dtype = config.parameter_dtype
    return Dense(
        named_key(key, name),
        (config.width, size),
        ("embed", axis),
        layers=layers,
        bias=bias,
        dtype=UNQUANTIZED if dtype in STORES else dtype,
    )


GROUPED = ("gpu", "tpu")
"""Platforms with kernels that multiply groups of rows with a matrix each."""


def weights_of_all(
    chosen: Int[Array, "n k"], weights: Float[Array, "n k"], count: int
) -> Float[Array, "n E"]:
    """Spreads the chosen experts' weights over all experts; the rest get zero."""
    hot = jax.nn.one_hot(chosen, count, dtype=weights.dtype)  # [n, k, E]
    return jnp.einsum("nke,nk->ne", hot, weights)


def activate(
    gate: Float[Array, "*lead F"] | None,
    up: Float[Array, "*lead F"],
    activation: str,
    limit: float | None,
) -> Float[Array, "*lead F"]:
    """Computes `activation(gate) * up`, or `activation(up)` without a gate.

    With a limit `c` it is `activation(min(gate, c)) * (clip(up, -c, c) + 1)` (gpt-oss:
    OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.1).
    """
    if gate is None:
        return ACTIVATIONS[activation](up)
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
    changes: ExpertChanges = UNCHANGED,
    weighs_inputs: bool = False,
    entries: Int[Array, "n"] | None = None,
) -> Float[Array, "n D"]:
    """Runs each token through its experts, after sorting the tokens by expert.

    Tokens of one expert are sorted by their adapter, so each adapter also gets a
    contiguous group.
    """
    count, length = chosen.shape[1], len(kernels.up.kernel)
    groups, parts = chosen.reshape(-1), 1
    if entries is not None:
        parts = next(len(x.a[0]) for x in changes if x is not None)
        groups = groups * parts + jnp.repeat(entries, count)
    order = jnp.argsort(groups)  # [n * k], by expert
    own_sizes = jnp.bincount(groups, length=length * parts).astype(jnp.int32)
    sizes = own_sizes.reshape(length, parts).sum(1)
    tokens, weight = x[order // count], weights.reshape(-1)[order, None]
    if weighs_inputs:
        tokens = tokens * weight

    def multiply(x, kernel, change):
        y = multiply_groups(x, kernel, sizes)
        if change is None:
            return y
        a, b = (part.reshape(-1, *part.shape[-2:]) for part in change)
        low = jax.lax.ragged_dot(x, a, own_sizes)  # [m, r]
        return y + jax.lax.ragged_dot(low, b, own_sizes)

    up, gate = multiply(tokens, kernels.up, changes.up), None
    if kernels.gate is not None:
        gate = multiply(tokens, kernels.gate, changes.gate)
    if biases is not None and gate is not None:
        expert = chosen.reshape(-1)[order]
        gate, up = gate + biases.gate[expert], up + biases.up[expert]
    inner = activate(gate, up, activation, limit)
    weighted = inner if weighs_inputs else inner * weight
    outputs = multiply(weighted, kernels.down, changes.down)
    return outputs[jnp.argsort(order)].reshape(*chosen.shape, -1).sum(1)


@functools.partial(jax.checkpoint, prevent_cse=False)
def multiply_groups(
    x: Float[Array, "m in"], kernels: StoredKernel, sizes: Int[Array, "E"]
) -> Float[Array, "m out"]:
    """Multiplies groups of rows, each with its own kernel.

    Quantized kernels are widened for the product, and again in the backward pass, as in
    `quantization.product.multiply`.
    """
    if kernels.scale is None:
        wide = kernels.kernel.astype(x.dtype)
    else:
        wide = jax.vmap(as_float32)(*kernels).astype(x.dtype)  # [E, in, out]
    return jax.lax.ragged_dot(x, wide, sizes)


def run_all(
    x: Float[Array, "n D"],
    chosen: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    kernels: ExpertKernels,
    activation: str,
    biases: ExpertBiases | None = None,
    limit: float | None = None,
    changes: ExpertChanges = UNCHANGED,
    weighs_inputs: bool = False,
    entries: Int[Array, "n"] | None = None,
) -> Float[Array, "n D"]:
    """Runs every token through all experts, one expert at a time.

    Faster on CPUs, which compute `jax.lax.ragged_dot` as if every group had all rows.
    One expert's kernels are widened at a time, and again in the backward pass.
    """

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def add_expert(total, expert):
        number, stored, bias, change = expert
        weight = jnp.where(chosen == number, weights, 0).sum(1)[:, None]  # [n, 1]
        tokens = x * weight if weighs_inputs else x

        def multiply(x, kernel, change):
            y = x @ kernel.widened_to(x.dtype)
            return y if change is None else y + change.product(x, entries)

        up, gate = multiply(tokens, stored.up, change.up), None
        if stored.gate is not None:
            gate = multiply(tokens, stored.gate, change.gate)
        if bias is not None and gate is not None:
            gate, up = gate + bias.gate, up + bias.up
        inner = activate(gate, up, activation, limit)
        # The gradient of a factor of the output would need the output again.
        weighted = inner if weighs_inputs else inner * weight
        return total + multiply(weighted, stored.down, change.down), None

    experts = (jnp.arange(len(kernels.up.kernel)), kernels, biases, changes)
    return jax.lax.scan(add_expert, jnp.zeros_like(x), experts)[0]
