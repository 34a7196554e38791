"""Adapters of experts: low-rank products added to the products of their kernels."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int


class ExpertFactors(NamedTuple):
    """Low-rank factors of one projection, for all experts of a block.

    Attributes:
      a: `[E, in, r]`, or `[E, N, in, r]` if each row chooses one of `N` adapters.
      b: `[E, r, out]` or `[E, N, r, out]`, scaled.
    """

    a: Float[Array, "*E in r"]
    b: Float[Array, "*E r out"]

    def product(
        self, x: Float[Array, "n in"], entries: Int[Array, "n"] | None
    ) -> Float[Array, "n out"]:
        """Computes one expert's low-rank product, with the adapter of each position.

        It multiplies the factors of all adapters and zeroes all but the position's own.
        That is cheap: there are few adapters, and their ranks are small.
        """
        if entries is None:
            return (x @ self.a) @ self.b
        chosen = jax.nn.one_hot(entries, len(self.a), dtype=x.dtype)  # [n, N]
        low = jnp.einsum("ni,eir->ner", x, self.a) * chosen[..., None]
        return jnp.einsum("ner,ero->no", low, self.b)


class ExpertChanges(NamedTuple):
    """Factors added to the experts' kernels; None for kernels without an adapter."""

    gate: ExpertFactors | None = None
    up: ExpertFactors | None = None
    down: ExpertFactors | None = None


UNCHANGED = ExpertChanges()


class ExpertProjection(nnx.Module):
    """One projection of all experts, for adapters to attach to.

    Attributes:
      sizes: numbers of inputs and outputs.
      axes: logical axes of the input and the output.
      layers: number of layers with experts.
      experts: number of experts.
      adapters: the adapter, a LoRA, by its name; empty without one.
    """

    def __init__(
        self, sizes: tuple[int, int], axes: tuple[str, str], layers: int, experts: int
    ):
        self.sizes, self.axes = sizes, axes
        self.layers, self.experts = layers, experts
        self.adapters = nnx.Dict()

    def factors(self, dtype: jnp.dtype) -> ExpertFactors | None:
        """Returns the factors of one block."""
        for adapter in self.adapters.values():
            a, b = adapter.factors_of_experts()
            return ExpertFactors(a.astype(dtype), b.astype(dtype))
        return None

    def entries(self, count: int) -> Int[Array, "n"] | None:
        """Returns the adapter that each position uses; None if there is only one."""
        for adapter in self.adapters.values():
            return adapter.entries_of_positions(count)
        return None
