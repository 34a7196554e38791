"""Limits on a model's sizes and numbers, and on products of sizes."""

import math
from typing import Any

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import MAXIMUM_INTEGER

MAXIMUM_SIZE = 2**24
"""Maximum size of an axis of a parameter, such as the vocabulary."""
MAXIMUM_LAYERS = 10_000
MAXIMUM_EXPERTS = 10_000
MINIMUM_BUCKETS = 4
"""Minimum number of buckets of relative positions: two for each sign."""
MAXIMUM_PARAMETERS = 2**44
"""Maximum number of parameters of a model; each size may be allowed, and all together
describe arrays that nobody has."""


def check_sizes(config: Any) -> None:
    """Checks the ranges of sizes, numbers and token ids in a `ModelConfig`.

    Raises:
      InputError: for the first one out of range.
    """
    sizes = {
        "vocabulary_size": (1, MAXIMUM_SIZE),
        "width": (1, MAXIMUM_SIZE),
        "feed_forward_width": (0, MAXIMUM_SIZE),
        "experts": (0, MAXIMUM_EXPERTS),
        "shared_expert_width": (0, MAXIMUM_SIZE),
        "dense_width": (0, MAXIMUM_SIZE),
        "expert_groups": (1, MAXIMUM_EXPERTS),
        "expert_groups_per_token": (1, MAXIMUM_EXPERTS),
        "layers": (1, MAXIMUM_LAYERS),
        "encoder_layers": (0, MAXIMUM_LAYERS),
        "heads": (1, MAXIMUM_SIZE),
        "key_value_heads": (1, MAXIMUM_SIZE),
        "head_width": (1, MAXIMUM_SIZE),
        "windowed_head_width": (0, config.head_width),
        "full_key_value_heads": (0, config.key_value_heads),
        "sharing_layers": (0, config.layers - 1),
        "layer_input_width": (0, MAXIMUM_SIZE),
        "rotary_width": (2, config.head_width),
        "key_value_rank": (0, MAXIMUM_SIZE),
        "query_rank": (0, MAXIMUM_SIZE),
        "value_width": (1, config.head_width),
        "convolution_width": (0, MAXIMUM_SIZE),
        "recurrent_heads": (0, MAXIMUM_SIZE),
        "recurrent_key_heads": (0, MAXIMUM_SIZE),
        "recurrent_width": (0, MAXIMUM_SIZE),
        "recurrent_key_width": (0, MAXIMUM_SIZE),
        "step_rank": (0, MAXIMUM_SIZE),
        "recurrent_norm_epsilon": (0, 1),
        "maximum_strength": (0, 2),
        "minimum_step": (0, 1),
        "expert_margin": (0, math.inf),
        "skip_multiplier": (0, math.inf),
        "window": (1, MAXIMUM_INTEGER),
        "window_rotary_base": (0, math.inf),
        "maximum_positions": (1, MAXIMUM_INTEGER),
        "relative_buckets": (MINIMUM_BUCKETS, MAXIMUM_SIZE),
        "relative_maximum_distance": (config.relative_buckets // 2 + 1, MAXIMUM_SIZE),
        "bos_id": (0, MAXIMUM_INTEGER),
        "eos_id": (0, MAXIMUM_INTEGER),
        "separator_id": (0, MAXIMUM_INTEGER),
        "pad_id": (0, MAXIMUM_INTEGER),
        "decoder_start_id": (0, MAXIMUM_INTEGER),
        "norm_epsilon": (0, 1),
        "rotary_base": (0, math.inf),
        "attention_soft_cap": (0, math.inf),
        "expert_limit": (0, math.inf),
        "logit_soft_cap": (0, math.inf),
    }
    for name, (minimum, maximum) in sizes.items():
        value = getattr(config, name)
        if value is not None and not minimum <= value <= maximum:
            raise InputError(
                f"ModelConfig.{name} is {shown(value)}, expected a number from "
                f"{minimum:,} to {maximum:,}"
            )


def check_products(config: Any) -> None:
    """Checks the sizes in a `ModelConfig` that are products of sizes.

    Raises:
      InputError: for the first one that is too large.
    """
    attention = config.heads * config.head_width
    kernels = 2 * (attention + config.key_value_heads * config.head_width)
    kernels += 2 * config.feed_forward_width * max(config.experts, 1)
    blocks = config.layers + config.encoder_layers
    parameters = config.width * (blocks * kernels + config.vocabulary_size)
    for text, value, maximum in (
        ("heads times head_width", attention, MAXIMUM_SIZE),
        ("the number of parameters", parameters, MAXIMUM_PARAMETERS),
    ):
        if value > maximum:
            raise InputError(
                f"the model's config has sizes of which {text} would be {value:,}, "
                f"expected at most {maximum:,}"
            )
