"""LoRA's low-rank product next to a projection, and its initial values."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Key

from prompt_tuning.adapters.adapter import LORA
from prompt_tuning.core.adapted_rows import branch_dropout, where_active
from prompt_tuning.prompts.dora import magnitude_factors, output_norms
from prompt_tuning.prompts.projection_adapters import (
    ExportedAdapter,
    FrozenProjection,
    ProjectionAdapter,
    adapter_axes,
)
from prompt_tuning.prompts.trained_bias import started_like
from prompt_tuning.prompts.weight_starts import FROM_WEIGHTS
from prompt_tuning.settings.lora_settings import Initial, TrainedBiases
from prompt_tuning.sharding import collectives

EVA = "eva"
"""The value of `LoRA.initial` that starts from activations of training data."""


class LowRank(ProjectionAdapter):
    """`y + scaling * dropout(x) @ a @ b` (Hu et al. 2022, equation 3).

    Layers of lower rank have zeros in the last columns of `a` and rows of `b`; layers
    without the adapter have only zeros. Both factors have zero gradients there.

    Attributes:
      a: `[L, in, r]`.
      b: `[L, r, out]`.
      magnitude: DoRA's magnitudes, `[L, out]`, 0 in layers without it; None for LoRA.
      scaling: factor of the product.
      dropout: share of the input's elements that training zeroes.
      rank_stabilized: whether the scaling was divided by the root of the rank.
      initial: how the factors were initialized.
      start_a: `a` at the start of the run; its product with `start_b` is subtracted.
        None unless LoRA starts from the weights.
      start_b: `b` at the start of the run, or None.
      ranks: rank in each layer, 0 in layers without the adapter.
      most_ranks: the highest rank that each layer may get from the data.
      invocation: tokens from whose last occurrence on it acts; empty if it always does.
      bias: trained bias, `[L, out]`, or None; see `train_bias`.
      biases: which biases the run trains, PEFT's `bias`.
    """

    kind = LORA
    scaling: float

    def __init__(
        self,
        factors: tuple[Float[Array, "*L in r"], Float[Array, "*L r out"]],
        scaling: float,
        axes: tuple[str, str],
        *,
        magnitude: Float[Array, "L out"] | None = None,
        path: str = "",
        dropout: float = 0.0,
        rank_stabilized: bool = False,
        initial: Initial = "kaiming",
        ranks: Sequence[int] = (),
        most_ranks: Sequence[int] = (),
        invocation: Sequence[int] = (),
        stack: tuple[str, ...] = ("layers",),
    ):
        self.axes = axes
        axis_in, axis_out = adapter_axes(axes)
        a, b = factors
        self.a = nnx.Param(a, axes=(*stack, axis_in, "rank"), partial_over=axes[1])
        self.b = nnx.Param(b, axes=(*stack, "rank", axis_out))
        self.alone = magnitude is not None
        self.magnitude = (
            None
            if magnitude is None
            else nnx.Param(magnitude, axes=("layers", axis_out))
        )
        self.scaling = scaling
        self.path, self.dropout, self.drops = path, dropout, dropout > 0
        self.rank_stabilized, self.initial = rank_stabilized, initial
        self.bias, self.biases = None, "none"
        self.ranks, self.invocation = tuple(ranks), tuple(invocation)
        self.most_ranks = tuple(most_ranks)
        # `initial_starts` replaces them when the frozen weights are there.
        starts = initial in FROM_WEIGHTS
        self.start_a = nnx.Param(a, axes=self.a.axes) if starts else None
        self.start_b = nnx.Param(b, axes=self.b.axes) if starts else None

    def train_bias(self, frozen: nnx.Param, biases: TrainedBiases) -> None:
        """Trains the projection's bias, in all layers if all biases are trained."""
        # An attribute that was None before is not expected to hold an array.
        self.bias, self.biases = nnx.data(started_like(frozen)), biases

    def bias_instead_of(self, frozen: Float[Array, "out"]) -> Float[Array, "out"]:
        """Returns one block's bias: the trained one in blocks with LoRA."""
        if self.bias is None:
            return frozen
        if self.biases == "all":
            return self.bias[...]
        adapted = jnp.any(self.a[...] != 0).astype(jnp.float32)
        adapted = collectives.reduce_from_shards(adapted, self.axes[0])
        return jnp.where(adapted > 0, self.bias[...], frozen.astype(self.bias.dtype))

    @property
    def rank(self) -> int:
        """The highest rank of any layer."""
        return self.a.shape[-1]

    @property
    def alpha(self) -> float:
        """The scale of a product of the highest rank."""
        root = math.sqrt(self.rank) if self.rank_stabilized else self.rank
        return self.scaling * root

    @property
    def settings(self) -> dict[str, Any]:
        """PEFT settings that the factors do not reveal, if not the defaults."""
        # What starts from weights or data is exported as a plain LoRA.
        plain = self.initial in ("kaiming", EVA, *FROM_WEIGHTS)
        choices = {
            "lora_dropout": self.dropout,
            "use_rslora": self.rank_stabilized,
            "init_lora_weights": True if plain else self.initial,
            "bias": self.biases,
            "alora_invocation_tokens": list(self.invocation) or None,
        }
        defaults = {"lora_dropout": 0.0, "use_rslora": False, "init_lora_weights": True}
        defaults |= {"bias": "none", "alora_invocation_tokens": None}
        return {name: x for name, x in choices.items() if x != defaults[name]}

    def adapt(
        self,
        x: Float[Array, "*lead in"],
        y: Float[Array, "*lead out"],
        frozen: FrozenProjection,
    ) -> Float[Array, "*lead out"]:
        """Adds the low-rank product; DoRA rescales the sum, except for the bias."""
        first = collectives.first_of_shard(self.axes[0], x.shape[-1])
        dropped = branch_dropout(x, self.dropout, self.path, first)
        if self.invocation:
            return y + where_active(self._change(x, dropped))
        if self.magnitude is None:
            return y + self._change(x, dropped)
        if dropped is not x:
            product = frozen.product(dropped)  # PEFT rescales this part alone
        else:
            bias = frozen.applied_bias()
            product = y if bias is None else y - bias.astype(y.dtype)
        factors = self.factors_of_outputs(frozen.wide_kernel())
        whole, rest = factors.astype(y.dtype), (factors - 1).astype(y.dtype)
        return y + rest * product + whole * self._product(dropped)

    def _change(
        self, x: Float[Array, "*lead in"], dropped: Float[Array, "*lead in"]
    ) -> Float[Array, "*lead out"]:
        """Returns the scaled low-rank product, minus the one at the start if needed."""
        change = self._product(dropped)
        if self.start_a is None or self.start_b is None:
            return change
        start = (self.start_a[...], self.start_b[...])
        return change - self._product(x, jax.lax.stop_gradient(start))

    def whole_factors(
        self,
    ) -> tuple[Float[Array, "*L in R"], Float[Array, "*L R out"]]:
        """Returns the factors of a plain LoRA that computes the same."""
        a, b = self.a[...], self.b[...]
        if self.start_a is None or self.start_b is None:
            return a, b
        first, second = self.start_a[...], self.start_b[...]
        return jnp.concatenate([a, first], 2), jnp.concatenate([b, -second], 1)

    def export(self, path: str) -> ExportedAdapter:
        """Returns the arrays of a plain LoRA; see `whole_factors`."""
        exported = super().export(path)
        arrays = {k: x for k, x in exported.arrays.items() if not k.startswith("start")}
        arrays |= {
            leaf: np.asarray(x)
            for leaf, x in zip(("a", "b"), self.whole_factors(), strict=True)
        }
        return exported._replace(arrays=arrays)

    def _product(
        self,
        x: Float[Array, "*lead in"],
        factors: tuple[Float[Array, "in r"], Float[Array, "r out"]] | None = None,
    ) -> Float[Array, "*lead out"]:
        """Returns the scaled low-rank product of `factors`, by default `a` and `b`."""
        factors = factors or (self.a[...], self.b[...])
        a, b = (factor.astype(x.dtype) for factor in factors)
        low = collectives.reduce_from_shards(x @ a, self.axes[0])  # [*lead, r]
        return (low @ b) * jnp.asarray(self.scaling, x.dtype)

    def factors_of_outputs(
        self, kernel: Float32[Array, "in out"]
    ) -> Float32[Array, "out"]:
        """Returns DoRA's factor for each output of one block, given its weights."""
        assert self.magnitude is not None
        norms = output_norms(
            kernel, self.a[...], self.b[...], self.scaling, self.axes[0]
        )
        return magnitude_factors(self.magnitude[...].astype(jnp.float32), norms)


class ExpertLowRank(LowRank):
    """LoRA for one projection of all experts: `y + scaling * x @ a[e] @ b[e]`.

    The layer of experts adds these products to its kernels' products.

    Attributes:
      a: `[L, E, in, r]`.
      b: `[L, E, r, out]`.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        shape: tuple[int, int, int],
        ranks: Sequence[int],
        scaling: float,
        axes: tuple[str, str],
    ):
        """Initializes `a` uniformly within `1 / sqrt(in)`, and `b` to 0.

        `shape` is `(E, in, out)`, `ranks` the rank in each layer (0 without the
        adapter), and `axes` the logical axes of the input and the output.
        """
        experts, *sizes = shape
        kaiming = functools.partial(
            initial_factors,
            sizes=(sizes[0], sizes[1]),
            ranks=ranks,
            initial="kaiming",
        )
        a, b = jax.vmap(kaiming, out_axes=1)(jax.random.split(key, experts))
        super().__init__(
            (a, b), scaling, axes, ranks=ranks, stack=("layers", "experts")
        )
        # The sum over the inputs' shards follows after the experts.
        b_axes = self.b.axes
        self.b = nnx.Param(b, axes=b_axes, partial_over=axes[0])

    def factors_of_experts(
        self,
    ) -> tuple[Float[Array, "E in r"], Float[Array, "E r out"]]:
        """Returns the factors of one block, the second one scaled."""
        return self.a[...], self.b[...] * self.scaling

    def entries_of_positions(self, count: int) -> None:
        """Returns None: all positions have the same factors."""
        del count


def initial_factors(
    key: Key[Array, ""], sizes: tuple[int, int], ranks: Sequence[int], initial: Initial
) -> tuple[Float[Array, "L in r"], Float[Array, "L r out"]]:
    """Initializes the factors like PEFT; their product is 0.

    Factors that start from the weights are zeros here; see `initial_starts`. Factors
    that start from data are "kaiming" until the data are read; see `activation_probes`.

    - "kaiming": `a` uniform within `1 / sqrt(in)`, `b` 0.
    - "gaussian": `a` normal with standard deviation `1 / r`, `b` 0.
    - "orthogonal": the rows of an orthogonal matrix `[r, r]` are divided between `a`
      and `b`, each multiplied by normal numbers with standard deviation 0.1.

    Args:
      key: random key.
      sizes: numbers of inputs and outputs.
      ranks: rank in each layer; 0 in layers without the adapter.
      initial: one of the names above.
    """
    size_in, size_out = sizes
    count, rank = len(ranks), max(ranks)
    used = np.arange(rank) < np.array(ranks)[:, None]  # [L, r]
    if initial == "orthogonal":
        factors = [
            _orthogonal_factors(layer_key, sizes, layer_rank, rank)
            for layer_key, layer_rank in zip(
                jax.random.split(key, count), ranks, strict=True
            )
        ]
        a, b = map(jnp.stack, zip(*factors, strict=True))
        return a, b
    shape = (count, size_in, rank)
    if initial in FROM_WEIGHTS:
        return jnp.zeros(shape), jnp.zeros((count, rank, size_out))
    if initial == "gaussian":
        a = jax.random.normal(key, shape) / np.maximum(ranks, 1)[:, None, None]
    else:
        bound = size_in**-0.5
        a = jax.random.uniform(key, shape, minval=-bound, maxval=bound)
    if not used.all():
        a = jnp.where(used[:, None], a, 0)
    return a, jnp.zeros((count, rank, size_out))


def _orthogonal_factors(
    key: Key[Array, ""], sizes: tuple[int, int], layer_rank: int, rank: int
) -> tuple[Float[Array, "in r"], Float[Array, "r out"]]:
    """Returns one layer's factors of rank `layer_rank`, padded with zeros."""
    draw = functools.partial(jax.random.normal, dtype=jnp.float32)
    square, first, second = jax.random.split(key, 3)
    rows = jnp.linalg.qr(draw(square, (layer_rank, layer_rank)))[
        0
    ]  # orthogonal to each other
    a = draw(first, (sizes[0], layer_rank // 2)) @ rows[0::2] / 10
    b = (draw(second, (layer_rank // 2, sizes[1])).T @ rows[1::2] / 10).T
    return jnp.pad(a, ((0, 0), (0, rank - layer_rank))), jnp.pad(
        b, ((0, rank - layer_rank), (0, 0))
    )
