"""Trains with a custom loss; see `first_prompt` for the basics.

It differs from `first_prompt` in `objective`, a function of logits and targets that
returns a loss for each target. Here it is the focal loss (Lin et al. 2017, equation 4),
which gives easy targets less weight.

    python -m scripts.examples.own_loss
"""

import jax
import jax.numpy as jnp

import prompt_tuning as pt
from scripts.examples.first_prompt import WORDS


def focal_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes `-(1 - p)^2 log p` of each target."""
    log_probabilities = jax.nn.log_softmax(logits)  # [B, m, V]
    log_p = jnp.take_along_axis(log_probabilities, targets[..., None], -1)[..., 0]
    return -jnp.square(1 - jnp.exp(log_p)) * log_p  # [B, m]


def main() -> None:
    """Tunes a prompt with the focal loss."""
    pairs = [(f"{word}=", word[1:]) for word in WORDS]
    tuned = pt.tune(
        "bundled:skills-decoder",
        pt.SoftPrompt(length=5),
        data=pairs,
        objective=focal_loss,
        steps=60,
        batch_size=16,
    )
    print(tuned.generate(["garden=", "window="], new_tokens=8))


if __name__ == "__main__":
    main()
