"""Keys and values of a text, as the start of a key/value prefix.

Eyuboglu et al. (2025, "Cartridges") train such prefixes to replace documents, and find
that this start leads to far better answers than noise.
"""

from typing import cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from prompt_tuning.adapters.adapter import PREFIX_PATH
from prompt_tuning.core.compilation import WeightedJit
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.build import frozen_graph
from prompt_tuning.models.decoder_only import DecoderOnly
from prompt_tuning.pretrained.attention_matching import (
    check_matching,
    match_attention,
    move_prefix,
    text_parts,
)
from prompt_tuning.pretrained.weight_storage import DEVICE
from prompt_tuning.prompts.stack_shape import PrefixStart
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.sharding.array_placement import Placement


def check_start(
    start: PrefixStart, config: ModelConfig, weights: str, mesh: MeshShape | None
) -> None:
    """Checks that the frozen model can compute the start of a prefix.

    Raises:
      InputError: if it has an encoder or is one, its weights are not on the device, or
        the start needs another model.
    """
    if config.architecture != "decoder_only" or config.bidirectional:
        kind = "encoder" if config.bidirectional else "encoder-decoder"
        raise InputError(
            "a key/value prefix starts from a text in decoder-only models, and this "
            f"is an {kind}: use another initializer, such as normal()"
        )
    if weights != DEVICE:
        raise InputError(
            f"Pretrained.weights is {shown(weights)}, but a prefix that starts from a "
            "text needs all weights at once: give "
            f"{how_to_set('Pretrained.weights', DEVICE)}, or use another initializer"
        )
    if start.windows:
        check_matching(start, config, on_mesh=mesh is not None)


def start_prefix(
    parameters: Parameters,
    start: PrefixStart,
    config: ModelConfig,
    placement: Placement | None,
) -> Parameters:
    """Replaces the prefix by its computed start.

    A `placement` of None means one device.
    """
    if not start.windows:
        text = keys_and_values(parameters, start.tokens, config, placement)
        return parameters | {PREFIX_PATH: text}
    parts, slots = text_parts(start, config), parameters[PREFIX_PATH].shape[2]
    parts = parts[:: -(-len(parts) // slots)]
    matched = []
    for part, indices in zip(
        parts, np.array_split(np.arange(slots), len(parts)), strict=True
    ):
        text = keys_and_values(parameters, part.tokens, config, placement)
        prefix = match_attention(parameters, text, part, len(indices), config)
        matched.append(move_prefix(prefix, slots - len(indices), config))
    return parameters | {PREFIX_PATH: jnp.concatenate(matched, axis=2)}


def keys_and_values(
    parameters: Parameters,
    tokens: tuple[int, ...],
    config: ModelConfig,
    placement: Placement | None = None,
) -> Float[Array, "L 2 T G K"]:
    """Computes the keys and values of a text, in the form of a prefix.

    `parameters` are the frozen model's by path, and may include more. A `placement` of
    None means one device.
    """
    graph, paths = frozen_graph(config)

    def compute(frozen: Parameters, ids: Int[Array, "T"]) -> Float[Array, "L 2 T G K"]:
        if placement is not None:
            frozen = placement.unpad(frozen)
        model = cast(DecoderOnly, merge(graph, frozen))
        _, cache = model.prefill(ids[None], jnp.array([len(ids)]), 1)
        text = cache.past[-1].key_values
        assert isinstance(text, KeyValues)
        text = model.decoder.expanded(text)
        both = jnp.stack([x[:, :, 0] for x in text], axis=1)  # [L, 2, G, T, K]
        return both.swapaxes(2, 3).astype(jnp.float32)

    sharding = None if placement is None else placement.shardings[PREFIX_PATH]
    run = WeightedJit(compute, out_shardings=sharding)
    frozen = {path: parameters[path] for path in paths}
    return run(frozen, jnp.array(tokens))
