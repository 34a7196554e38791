"""Losses of heads whose classes each have a value of their own.

They are those of `AutoModelForSequenceClassification` in transformers for the problem
types `regression` and `multi_label_classification`.
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

    It is the squared error of a regression, and for several labels the cross-entropy
    of each class being true or not, `softplus(x) - x y` of its score `x`. These are
    `correct` if they are right for all classes, and numbers never are.

    Args:
      hidden: normalized hidden states.
      head: the head, which is for one of the two problems.
      values: the numbers, or 1 for the classes that are true and 0 for the others.
    """
    scores = head_logits(hidden, head)
    if head.problem == "regression":
        loss = jnp.square(scores - values).mean(-1)
        return TokenLoss(loss, jnp.zeros(loss.shape, bool))
    loss = (jax.nn.softplus(scores) - scores * values).mean(-1)
    return TokenLoss(loss, ((scores > 0) == (values > 0.5)).all(-1))
