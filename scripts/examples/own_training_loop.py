"""Trains a prompt in a custom loop with the library's pure functions.

Parameters are a flat dict of arrays by path. The step takes the frozen parameters as an
argument and differentiates only the trained ones.

    python -m scripts.examples.own_training_loop
"""

import functools

import jax
import optax

import prompt_tuning as pt
from scripts.examples.first_prompt import WORDS


def main() -> None:
    """Trains for 60 steps, then continues a text."""
    pairs = [(f"{word}=", word[1:]) for word in WORDS]
    model = pt.load("bundled:skills-decoder").attach(pt.SoftPrompt(length=5))
    trained, frozen = model.partition()
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1))
    state = pt.TrainState.create(trained, optimizer, jax.random.key(0))
    step = jax.jit(
        functools.partial(
            pt.train_step, graph=model.graph, optimizer=optimizer, dropout=False
        )
    )
    for batch in model.batches(pairs, batch_size=16, steps=60):
        state, metrics = step(state, frozen, batch)
        if int(state.step) % 20 == 0:
            print(int(state.step), {k: round(float(x), 4) for k, x in metrics.items()})

    print(model.with_parameters(state.trained).generate("garden=", new_tokens=8))


if __name__ == "__main__":
    main()
