"""Keys and values of a text, from which a key/value prefix starts.

Eyuboglu et al. (2025, "Cartridges") train such prefixes to stand for documents, and
find that this start leads to far better answers than noise does.
"""

from typing import cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from prompt_tuning.adapters.adapter import PREFIX_PATH
from prompt_tuning.core.compilation import WeightedJit
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters, describe, merge, split
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.build import build_model
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained.weight_storage import DEVICE
from prompt_tuning.prompts.initializers import TextTokens
from prompt_tuning.sharding.array_placement import Placement


def check_text(config: ModelConfig, weights: str) -> None:
    """Checks that the frozen model can compute the start of a prefix.

    Args:
      config: config of the frozen model.
      weights: `Pretrained.weights`.

    Raises:
      InputError: if it is an encoder-decoder, or its weights are not on the device.
    """
    if config.architecture != "decoder_only":
        raise InputError(
            "a key/value prefix starts from a text in decoder-only models, and this "
            "is an encoder-decoder: use another initializer, such as normal()"
        )
    if weights != DEVICE:
        raise InputError(
            f"Pretrained.weights is {shown(weights)}, but a prefix that starts from a "
            "text needs all weights at once: give "
            f"{how_to_set('Pretrained.weights', DEVICE)}, or use another initializer"
        )


def start_from_text(
    parameters: Parameters,
    tokens: TextTokens,
    config: ModelConfig,
    placement: Placement | None,
) -> Parameters:
    """Replaces the prefix by the keys and values of the tokens.

    Args:
      parameters: all parameters by path.
      tokens: as many tokens as the prefix has slots.
      config: config of the frozen model.
      placement: placement of the parameters on a mesh; None on one device.
    """
    graph, abstract = describe(
        lambda key: split(build_model(key, config)), jax.random.key(0)
    )

    def compute(frozen: Parameters, ids: Int[Array, "P"]) -> Float[Array, "L 2 P G K"]:
        if placement is not None:
            frozen = placement.unpad(frozen)
        model = cast(LanguageModel, merge(graph, frozen))
        _, cache = model.prefill(ids[None], jnp.array([len(ids)]), 1)
        text = cache.past[-1].key_values
        assert isinstance(text, KeyValues)
        both = jnp.stack([x[:, :, 0] for x in text], axis=1)  # [L, 2, G, P, K]
        return both.swapaxes(2, 3).astype(jnp.float32)

    sharding = None if placement is None else placement.shardings[PREFIX_PATH]
    run = WeightedJit(compute, out_shardings=sharding)
    frozen = {path: parameters[path] for path in abstract}
    return parameters | {PREFIX_PATH: run(frozen, jnp.array(tokens))}
