"""Routing: which experts process each token, and with which weights."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from prompt_tuning.core.model_choices import GROUP_SCORES
from prompt_tuning.core.model_config import ModelConfig


def route_by_inputs(
    scores: Float[Array, "n E"], config: ModelConfig
) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
    """Chooses each token's experts and the weights of their inputs (Llama 4)."""
    best, chosen = jax.lax.top_k(scores, config.experts_per_token)
    return chosen, jax.nn.sigmoid(best.astype(jnp.float32))


def route(
    scores: Float[Array, "n E"], config: ModelConfig
) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
    """Chooses each token's experts and their weights, in float32."""
    shares = jax.nn.softmax(scores.astype(jnp.float32))
    weights, chosen = jax.lax.top_k(shares, config.experts_per_token)
    if config.normalize_experts:
        weights = weights / weights.sum(-1, keepdims=True)
    return chosen, weights


def route_by_scaled_scores(
    scores: Float[Array, "n E"], config: ModelConfig
) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
    """Does the same as `route` with scores divided by `sqrt(D)` (Gemma 4)."""
    return route(scores * config.width**-0.5, config)


def route_by_sparse_mixer(
    scores: Float[Array, "n E"], config: ModelConfig
) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
    """Chooses each token's experts and their weights, in float32 (Phi 3.5 MoE).

    First the best expert is chosen, weighted by its share in the softmax over scores
    close to its own; then the same is done among the rest (SparseMixer without noise:
    Liu et al. 2024, "GRIN: GRadient-INformed MoE", section 3).
    """
    scores = scores.astype(jnp.float32)
    left, chosen, weights = scores, [], []
    for _ in range(config.experts_per_token):
        best = left.max(-1, keepdims=True)  # [n, 1]
        ratio = (best - scores) / jnp.maximum(jnp.abs(scores), best)
        shares = jax.nn.softmax(jnp.where(ratio > config.expert_margin, -jnp.inf, left))
        expert = jnp.argmax(left, -1, keepdims=True)
        chosen.append(expert)
        weights.append(jnp.take_along_axis(shares, expert, axis=1))
        left = jnp.where(jnp.arange(scores.shape[1]) == expert, -jnp.inf, left)
    return jnp.concatenate(chosen, 1), jnp.concatenate(weights, 1)


def route_by_sigmoid(
    scores: Float[Array, "n E"], correction: Float[Array, "E"], config: ModelConfig
) -> tuple[Int[Array, "n k"], Float[Array, "n k"]]:
    """Chooses each token's experts and their weights, in float32 (DeepSeek-V3).

    An expert's weight is the sigmoid of its score. Experts are ranked by this weight
    plus a `correction` that balances their load. With groups of experts, only experts
    in a token's best groups are eligible; a group scores the sum of its two best (Liu
    et al. 2024, "DeepSeek-V3 Technical Report", equations 13 to 16).
    """
    shares = jax.nn.sigmoid(scores.astype(jnp.float32))
    ranked = shares + correction.astype(jnp.float32)  # [n, E]
    if config.expert_groups > 1:
        grouped = ranked.reshape(len(ranked), config.expert_groups, -1)
        best = jax.lax.top_k(grouped, GROUP_SCORES)[0].sum(-1)  # [n, groups]
        used = jax.lax.top_k(best, config.expert_groups_per_token)[1]
        allowed = jax.nn.one_hot(used, config.expert_groups).sum(1) > 0
        ranked = jnp.where(allowed[..., None], grouped, -jnp.inf).reshape(ranked.shape)
    chosen = jax.lax.top_k(ranked, config.experts_per_token)[1]
    weights = jnp.take_along_axis(shares, chosen, axis=1)
    if config.normalize_experts:
        total = weights.sum(-1, keepdims=True) + config.expert_sum_epsilon
        weights = weights / total
    return chosen, weights * config.expert_multiplier


ROUTES = {
    "softmax": route,
    "sigmoid_inputs": route_by_inputs,
    "sparse_mixer": route_by_sparse_mixer,
    "separate_norms": route_by_scaled_scores,
}
"""Choices that need no corrections of scores, by `ModelConfig.routing`."""
