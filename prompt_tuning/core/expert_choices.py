"""Checks of the choices for layers with experts, and for models without."""

from typing import Any

from prompt_tuning.core.errors import InputError, shown

GROUP_SCORES = 2
"""Number of experts whose scores are the score of a group of experts."""


def check_experts(config: Any) -> None:
    """Checks the choices of a `ModelConfig` that concern experts.

    Raises:
      InputError: names the choices that exclude each other.
    """
    if config.experts and not 1 <= config.experts_per_token <= config.experts:
        raise InputError(
            f"experts_per_token is {config.experts_per_token}, expected a number "
            f"from 1 to {config.experts}"
        )
    if config.experts:
        _check_groups(config)
    if config.experts and not config.gated and config.biased_projections:
        raise InputError("experts without gates have no biases")
    biased = "gate" in config.biased_projections
    if config.routing == "sigmoid_inputs" and biased:
        raise InputError("experts whose inputs are weighed have no biases")
    some = bool(config.dense_layers)
    every = len(set(config.feed_forward_layers)) or config.layers
    if some != (config.dense_width > 0) or (
        some
        and (
            not (config.experts or config.sharing_layers)
            or len(set(config.dense_layers)) >= every
        )
    ):
        raise InputError(
            "dense_layers are some of the layers of a model with experts, and have a "
            f"dense_width; found dense_layers={shown(config.dense_layers)} of "
            f"{config.layers} layers, dense_width={config.dense_width} and "
            f"experts={config.experts}"
        )


def _check_groups(config: Any) -> None:
    """Checks that the experts of a token fit into its groups of experts."""
    size, rest = divmod(config.experts, config.expert_groups)
    used = config.expert_groups_per_token
    if rest or not 1 <= used <= config.expert_groups:
        raise InputError(
            f"{config.experts} experts in {config.expert_groups} groups, of which a "
            f"token uses {used}: expected equal groups, and some or all of them"
        )
    if config.expert_groups > 1 and (
        size < GROUP_SCORES or size * used < config.experts_per_token
    ):
        raise InputError(
            f"groups of {size} experts, of which a token uses {used} with "
            f"{config.experts_per_token} experts: expected groups of at least "
            f"{GROUP_SCORES} experts, with as many experts as a token uses"
        )
