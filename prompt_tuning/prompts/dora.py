"""DoRA: a trained magnitude per output of a projection with LoRA (Liu et al. 2024).

The adapted kernel is `magnitude * (w + delta) / |w + delta|` for each output, where
`delta` is LoRA's product. The norm is a constant in the backward pass (section 4.3).
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from prompt_tuning.core.parameters import stored_kernel
from prompt_tuning.core.quantization.product import StoredKernel, as_float32
from prompt_tuning.core.quantization.stores import PARTS, part_path
from prompt_tuning.sharding import collectives

LORA_A, LORA_B = "/adapters/lora/a", "/adapters/lora/b"
MAGNITUDE = "/adapters/lora/magnitude"


def output_norms(
    kernel: Float32[Array, "in out"],
    a: Float[Array, "in r"],
    b: Float[Array, "r out"],
    scaling: float | Float[Array, ""],
    axis: str = "",
) -> Float32[Array, "out"]:
    """Computes `|w + scaling * a @ b|` for each output, as a constant.

    The square is expanded, so the sum of the kernels is never stored. `kernel`, `a` and
    `b` may be this device's shards along the logical `axis` of the inputs; the devices
    then sum their parts.
    """
    kernel, a, b = (jax.lax.stop_gradient(x) for x in (kernel, a, b))
    a, b = a.astype(jnp.float32), b.astype(jnp.float32) * scaling
    exact = jax.lax.Precision.HIGHEST
    mixed = jnp.matmul(a.T, kernel, precision=exact)  # [r, out]
    products = jnp.matmul(jnp.matmul(a.T, a, precision=exact), b, precision=exact)
    squares = jnp.sum(kernel * kernel, axis=0) + jnp.sum((2 * mixed + products) * b, 0)
    squares = collectives.reduce_from_shards(squares, axis)
    # Rounding may take the square of a tiny norm below 0.
    return jax.lax.stop_gradient(jnp.sqrt(jnp.maximum(squares, 0)))


def magnitude_factors(
    magnitude: Float32[Array, "out"], norms: Float32[Array, "out"]
) -> Float32[Array, "out"]:
    """Returns the factor of each output; 1 where the magnitude is 0.

    A magnitude of 0 marks a layer without DoRA and has no gradient either.
    """
    present = magnitude != 0
    return jnp.where(present, magnitude / jnp.where(present, norms, 1), 1)


def stacked_kernel(parameters: Mapping[str, Array], path: str) -> StoredKernel:
    """Returns a projection's kernel for all blocks, as `as_float32` takes it."""
    kernel = f"{path}/kernel"
    parts = [parameters.get(part_path(kernel, part)) for part in PARTS]
    return stored_kernel(parameters[kernel], *parts)


def initial_magnitudes(
    parameters: Mapping[str, Array], scalings: Mapping[str, float]
) -> dict[str, Float32[Array, "L out"]]:
    """Computes the first magnitudes, which leave the model unchanged.

    `parameters` are kernels and LoRAs by path, `scalings` the product's factor by the
    path of each projection with DoRA.
    """
    found = {}
    for path, scaling in scalings.items():
        a, b = (parameters[path + x] for x in (LORA_A, LORA_B))

        def norms(layer, scaling=scaling):
            stored, a, b = layer
            magnitudes = output_norms(as_float32(*stored), a, b, scaling)
            return jnp.where(jnp.any(a != 0), magnitudes, 0)

        found[path + MAGNITUDE] = jax.lax.map(
            norms, (stacked_kernel(parameters, path), a, b)
        )
    return found
