"""Products of adapters that are added to those of experts' kernels."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int


class ExpertFactors(NamedTuple):
    """Low-rank factors of one projection of the experts of one block.

    Attributes:
      a: `[E, in, r]`, or `[E, N, in, r]` if rows choose one of `N` entries.
      b: `[E, r, out]` or `[E, N, r, out]`, scaled.
    """

    a: Float[Array, "*E in r"]
    b: Float[Array, "*E r out"]

    def product(
        self, x: Float[Array, "n in"], entries: Int[Array, "n"] | None
    ) -> Float[Array, "n out"]:
        """Returns the product of one expert's factors, by the entry of each position.

        The factors of all entries are multiplied, and others than a position's own by
        zero: there are few entries, and ranks are small.
        """
        if entries is None:
            return (x @ self.a) @ self.b
        own = jax.nn.one_hot(entries, len(self.a), dtype=x.dtype)  # [n, N]
        low = jnp.einsum("ni,eir->ner", x, self.a) * own[..., None]
        return jnp.einsum("ner,ero->no", low, self.b)


class ExpertChanges(NamedTuple):
    """What adapters add to the kernels of experts; None where they add nothing."""

    gate: ExpertFactors | None = None
    up: ExpertFactors | None = None
    down: ExpertFactors | None = None


UNCHANGED = ExpertChanges()


class ExpertProjection(nnx.Module):
    """One projection of all experts, as adapters see it.

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
        """Returns which factors each position has; None if all have the same."""
        for adapter in self.adapters.values():
            return adapter.entries_of_positions(count)
        return None
