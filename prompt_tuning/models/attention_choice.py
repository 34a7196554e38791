"""Choice between a fused attention kernel and the reference, `attention.attend`."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.masks import CausalMask
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.models.fused_kernel import FusedKernel, Obstacle
from prompt_tuning.models.streams import AttentionView


def _cudnn() -> FusedKernel:
    from prompt_tuning.models.cudnn_attention import KERNEL

    return KERNEL


def _splash() -> FusedKernel:
    # Imports Pallas, which takes longer than all other modules of the models.
    from prompt_tuning.models.splash_attention import KERNEL

    return KERNEL


KERNELS: dict[str, Callable[[], FusedKernel]] = {"gpu": _cudnn, "tpu": _splash}
"""Loads the fused kernel of each platform that has one, by JAX's name of it."""


class AttentionChoice(NamedTuple):
    """How attention runs on this machine.

    Attributes:
      kernel: the fused kernel; None for the reference.
      obstacle: why no kernel could be used; None if one is, or if the config chose the
        reference.
    """

    kernel: FusedKernel | None
    obstacle: Obstacle | None = None

    def __str__(self) -> str:
        if self.kernel is not None:
            return f"flash ({self.kernel.name})"
        return "reference" + (f", because {self.obstacle[0]}" if self.obstacle else "")


def choose_attention(config: ModelConfig) -> AttentionChoice:
    """Chooses the fused kernel for a model on this machine, or the reference."""
    if config.attention == "reference":
        return AttentionChoice(None)
    obstacle = _obstacle_of_model(config)
    if obstacle is not None:
        return AttentionChoice(None, obstacle)
    platform = jax.default_backend()
    if platform not in KERNELS:
        reason = f"there is no fused kernel for the platform {platform!r}"
        return AttentionChoice(None, Obstacle(reason, "use a GPU or a TPU"))
    kernel = KERNELS[platform]()
    obstacle = kernel.obstacle(config)
    return AttentionChoice(None if obstacle else kernel, obstacle)


def check_attention(config: ModelConfig) -> None:
    """Checks that a fused kernel is available if the config requires one.

    Raises:
      InputError: if not; tells why and what to change.
    """
    if config.attention != "flash":
        return
    obstacle = choose_attention(config).obstacle
    if obstacle is not None:
        raise InputError(
            f"Pretrained.attention is 'flash', but {obstacle.reason}: "
            f"{obstacle.remedy}, or give {how_to_set('Pretrained.attention', 'auto')}, "
            "which uses a fused kernel where there is one"
        )


def _obstacle_of_model(config: ModelConfig) -> Obstacle | None:
    """Returns what rules out every fused kernel, or None."""
    another, decoder = "use another model", "use a decoder-only model"
    alone = "which the fused kernels do not compute"
    obstacles = (
        (
            config.key_value_rank,
            f"the model has latent attention, whose values are narrower than its keys, "
            f"{alone}",
            another,
        ),
        (
            config.positions == "relative",
            "T5 adds a bias to its scores, which fused kernels do not read",
            decoder,
        ),
        (
            config.architecture == "encoder_decoder",
            "fused kernels are only used in decoder-only models",
            decoder,
        ),
        (
            config.bidirectional,
            f"tokens of an encoder see those after them, {alone}",
            decoder,
        ),
        (
            config.positions == "alibi",
            "the model adds a bias to its scores (ALiBi), which fused kernels do not "
            "read",
            another,
        ),
        (config.windowed_layers, f"the model has windowed_layers, {alone}", another),
        (config.attention_sinks, f"the model has attention_sinks, {alone}", another),
        (
            config.attention_soft_cap is not None,
            f"the model has an attention_soft_cap, {alone}",
            another,
        ),
        (
            config.dropout_rate > 0,
            f"dropout_rate is {config.dropout_rate}, and fused kernels do not drop "
            "attention weights",
            f"give {how_to_set('Pretrained.dropout_rate', 0)}",
        ),
    )
    found = (Obstacle(reason, remedy) for stands, reason, remedy in obstacles if stands)
    return next(found, None)


def is_fusable(views: Sequence[AttentionView], kernel: FusedKernel) -> bool:
    """Tests whether a kernel can compute a stream's attention to its sources."""
    *shared, text = views
    if any(view.distance is not None or view.buckets is not None for view in views):
        return False
    if not isinstance(text.mask, CausalMask) or text.bias is not None:
        return False
    if text.mask.segments is not None and not kernel.packs:
        return False
    return all(
        view.shared and view.mask is None and view.rows is None and view.bias is None
        for view in shared
    )
