"""Names of the choices in `ModelConfig`."""

from typing import Any, Literal, get_args

from prompt_tuning.core.errors import InputError, shown

Architecture = Literal["decoder_only", "encoder_decoder"]
Norm = Literal["rms", "rms_plus_one", "layer", "layer_scale"]
NormPlacement = Literal["before", "after", "around"]
QueryKeyNorm = Literal["none", "head", "each_head", "width"]
Positions = Literal["rotary", "learned", "relative"]
Activation = Literal["silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2"]
Biases = Literal["none", "qkv", "attention", "mlp", "out_mlp", "all"]
AttentionMethod = Literal["auto", "reference", "flash"]

CHOICES: dict[str, Any] = {
    "architecture": Architecture,
    "norm": Norm,
    "norm_placement": NormPlacement,
    "query_key_norm": QueryKeyNorm,
    "positions": Positions,
    "activation": Activation,
    "biases": Biases,
    "attention": AttentionMethod,
}
"""Fields that have one of a few names."""


def check_choices(config: object) -> None:
    """Checks the fields of a `ModelConfig` that have one of a few names.

    Raises:
      InputError: for another name, with those that are possible.
    """
    for name, accepted in CHOICES.items():
        value = getattr(config, name)
        if value not in get_args(accepted):
            raise InputError(
                f"ModelConfig.{name} is {shown(value)}, expected "
                f"{' or '.join(map(repr, get_args(accepted)))}"
            )
