"""Limits of the sizes of a model, and of their products."""

from typing import Any

from prompt_tuning.core.errors import InputError

MAXIMUM_SIZE = 2**24
"""Maximum size of an axis of a parameter, such as the vocabulary."""
MAXIMUM_LAYERS = 10_000
MAXIMUM_EXPERTS = 10_000
MAXIMUM_PARAMETERS = 2**44
"""Maximum number of parameters of a model; each size may be allowed, and all together
describe arrays that nobody has."""


def check_products(config: Any) -> None:
    """Checks the sizes of a `ModelConfig` that are products of others.

    Raises:
      InputError: for the first that is too large.
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
