"""Loss weights of tokens, from their token types."""

import math

import numpy as np
from jaxtyping import Float32, Integer

from prompt_tuning.core.errors import InputError

PROMPT = 0
COMPLETION = 1
PADDING = 2
SEPARATOR = 3


def token_weights(
    token_types: Integer[np.ndarray, "..."] | None,
    shape: tuple[int, ...],
    *,
    use_token_type_ids: bool = False,
    prompt_loss_weight: float | int = 0.0,
) -> Float32[np.ndarray, "..."]:
    """Returns the loss weight of each token as a target.

    The four cases and the meaning of the types follow SambaFlow's training
    ("Backpropagation best practices"). Without `use_token_type_ids` every token has
    weight 1, with or without types. With it, a prompt token (0) has
    `prompt_loss_weight`, a completion token (1) and a separator (3) have 1, and padding
    (2) has 0.

    Args:
      token_types: type of each token, 0 to 3, of shape `shape`; None if the data has
        none.
      shape: shape of the weights.
      use_token_type_ids: whether the types decide.
      prompt_loss_weight: weight of a prompt token, 0 or more.

    Raises:
      InputError: if the types are required and missing, have another shape or are
        outside 0 to 3, or if `prompt_loss_weight` is negative or not finite.
    """
    if not math.isfinite(prompt_loss_weight) or prompt_loss_weight < 0:
        raise InputError(
            f"prompt_loss_weight is {prompt_loss_weight}, expected a finite number of "
            "0 or more"
        )
    if not use_token_type_ids:
        return np.ones(shape, np.float32)
    if token_types is None:
        raise InputError(
            "use_token_type_ids is set, but the data has no token_type_ids: add them "
            "to the data, or unset use_token_type_ids to train on every token"
        )
    if token_types.shape != shape:
        raise InputError(
            f"token_type_ids have shape {token_types.shape}, expected {shape}, the "
            "shape of input_ids"
        )
    if token_types.size and not 0 <= token_types.min() <= token_types.max() <= 3:
        raise InputError(
            f"token_type_ids range from {token_types.min()} to {token_types.max()}, "
            "expected 0 (prompt), 1 (completion), 2 (padding) or 3 (separator)"
        )
    weight_of_type = np.zeros(4, np.float32)
    weight_of_type[[COMPLETION, SEPARATOR]] = 1.0
    weight_of_type[PROMPT] = prompt_loss_weight
    return weight_of_type[token_types]
