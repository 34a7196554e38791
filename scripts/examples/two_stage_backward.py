"""Compares two backward passes of an MLP: of gradients, and of multiplied Jacobians.

Both are split in two: p1 computes the gradient at each layer's output, p2 each weight's
gradient from it, `x^T g`. The p2 of all layers are independent of each other, so a
pipeline may postpone them. The passes differ in p1:

- backpropagation passes a vector per example from layer to layer, `g W^T`;
- the other multiplies the Jacobians of the layers, from the scores down to each layer,
  and applies the products to the gradient of the loss. No layer then waits for the
  gradient of the next one: only the Jacobians have to be there.

This is the first experiment of the code of "2BP: 2-Stage Backpropagation" (Rae, Lee and
Richings 2024, arXiv 2405.18047) with its layers and batch, on random examples. Its
authors advise readers to ignore it. The output shows why:

- the products of Jacobians have a row for each score, so that p1 takes `C` times the
  operations for `C` scores: ten for digits, and 128,256 for the vocabulary of Llama 3;
- one Jacobian for the whole batch is cheaper, but gives another gradient as soon as the
  slope of an activation depends on the example.

    python -m scripts.examples.two_stage_backward
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LAYERS = (784, 64, 32, 32, 10)
BATCH = 256

Weights = Sequence[Float[Array, "in out"]]
Gradients = list[Float[Array, "in out"]]
Tape = tuple[list[Float[Array, "B in"]], list[Float[Array, "B out"]]]
"""The input of each layer, and the slope of the activation after it."""


def forward(weights: Weights, x: Float[Array, "B in"]) -> tuple[Array, Tape]:
    """Returns the scores, and what the backward pass reads."""
    inputs, slopes = [], []
    for number, weight in enumerate(weights):
        inputs.append(x)
        x = x @ weight
        is_hidden = number < len(weights) - 1
        slopes.append(jnp.where(x > 0, 1.0, 0.0) if is_hidden else jnp.ones_like(x))
        x = x * slopes[-1]
    return x, (inputs, slopes)


def loss_gradient(scores: Array, classes: Array) -> Float[Array, "B C"]:
    """Returns the gradient of the mean cross-entropy at the scores."""
    return (jax.nn.softmax(scores) - jax.nn.one_hot(classes, scores.shape[1])) / BATCH


def weight_gradients(tape: Tape, gradients: Sequence[Array]) -> Gradients:
    """Computes p2 of all layers, in any order."""
    return [x.T @ gradient for x, gradient in zip(tape[0], gradients, strict=True)]


def backpropagation(weights: Weights, x: Array, classes: Array) -> Gradients:
    """Passes the gradient down, one layer after another."""
    scores, tape = forward(weights, x)
    gradients = [loss_gradient(scores, classes)]
    for weight, slope in zip(weights[:0:-1], tape[1][-2::-1], strict=True):
        gradients.append((gradients[-1] @ weight.T) * slope)
    return weight_gradients(tape, gradients[::-1])


def multiplied_jacobians(weights: Weights, x: Array, classes: Array) -> Gradients:
    """Multiplies each example's Jacobians of all layers above a layer."""
    scores, tape = forward(weights, x)
    count = scores.shape[1]
    product = jnp.broadcast_to(jnp.eye(count), (len(x), count, count))  # [B, C, C]
    products = [product]
    for weight, slope in zip(weights[:0:-1], tape[1][-2::-1], strict=True):
        # The Jacobian of a layer and the activation before it: its rows are scores.
        product = (product @ weight.T) * slope[:, None, :]
        products.append(product)
    top = loss_gradient(scores, classes)
    gradients = [jnp.einsum("bc,bcd->bd", top, product) for product in products]
    return weight_gradients(tape, gradients[::-1])


def constant_jacobians(weights: Weights, x: Array, classes: Array) -> Gradients:
    """Multiplies Jacobians averaged over the batch, one for all examples."""
    scores, tape = forward(weights, x)
    product = jnp.eye(scores.shape[1])
    products = [product]
    for weight, slope in zip(weights[:0:-1], tape[1][-2::-1], strict=True):
        product = (product @ weight.T) * slope.mean(0)
        products.append(product)
    top = loss_gradient(scores, classes)
    gradients = [top @ product for product in products]
    return weight_gradients(tape, gradients[::-1])


def operations(rows: int, layers: Sequence[int]) -> int:
    """Returns the operations of passing rows through layers, two for each weight."""
    return 2 * rows * sum(a * b for a, b in itertools.pairwise(layers))


def relative_error(gradients: Gradients, exact: Gradients) -> float:
    """Returns the largest error of a layer, relative to the layer's norm."""
    pairs = zip(gradients, exact, strict=True)
    return max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs)


def main() -> None:
    """Prints the operations and the error of each backward pass."""
    keys = iter(jax.random.split(jax.random.key(0), len(LAYERS) + 1))
    weights = [
        jax.random.normal(next(keys), (a, b)) * (2 / a) ** 0.5
        for a, b in itertools.pairwise(LAYERS)
    ]
    x = jax.random.normal(next(keys), (BATCH, LAYERS[0]))
    classes = jax.random.randint(next(keys), (BATCH,), 0, LAYERS[-1])

    def loss(weights: Weights) -> Array:
        scores, _ = forward(weights, x)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(scores), classes[:, None], 1)
        return -chosen.mean()

    exact = jax.grad(loss)(weights)
    # Nothing is passed below the first layer.
    hidden, count = LAYERS[1:], LAYERS[-1]
    applied = 2 * BATCH * count * sum(hidden[:-1])
    print(f"forward: {operations(BATCH, LAYERS) / 1e6:.2f} MFLOP, p2: as many")
    print(f"{'p1':24} {'MFLOP':>6} {'error of the gradient':>22}")
    for name, function, needed in (
        ("backpropagation", backpropagation, operations(BATCH, hidden)),
        (
            "each example's Jacobians",
            multiplied_jacobians,
            operations(BATCH * count, hidden) + applied,
        ),
        (
            "one Jacobian for all",
            constant_jacobians,
            operations(count, hidden) + applied,
        ),
    ):
        error = relative_error(jax.jit(function)(weights, x, classes), exact)
        print(f"{name:24} {needed / 1e6:6.2f} {error:22.0e}")


if __name__ == "__main__":
    main()
