"""Losses of class heads in which each class has a separate value.

They match `AutoModelForSequenceClassification` in transformers with the problem types
`regression` and `multi_label_classification`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from prompt_tuning.losses.cross_entropy import TokenLoss
from prompt_tuning.losses.output_head import OutputHead, head_logits


def value_loss(
    hidden: Float[Array, "*lead D"], head: OutputHead, values: Float[Array, "*lead C"]
) -> TokenLoss:
    """Computes the mean loss of the classes' values at each position, in float32.

    For a regression it is the squared error. For multi-label classification it is each
    class's binary cross-entropy, `softplus(x) - x y` for its score `x`. A position is
    `correct` if all classes are right; numbers never are.

    Args:
      hidden: normalized hidden states.
      head: the head, for one of the two problems.
      values: the numbers, or 1 for true classes and 0 for the rest.
    """
    scores = head_logits(hidden, head)
    if head.problem == "regression":
        loss = jnp.square(scores - values).mean(-1)
        return TokenLoss(loss, jnp.zeros(loss.shape, bool))
    loss = (jax.nn.softplus(scores) - scores * values).mean(-1)
    return TokenLoss(loss, ((scores > 0) == (values > 0.5)).all(-1))
