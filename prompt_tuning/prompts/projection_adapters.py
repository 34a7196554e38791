"""Adapters of projections: what is trained beside a frozen kernel.

An adapter meets a projection twice: before it, at its input, and after it, at its
output. Its parameters are stacked on `L` like the kernel's, at
`.../query/adapters/{name}/...`. Prompts and adapters can be tuned together.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.sharding import collectives
from prompt_tuning.sharding.axis_rules import SPLIT_NAMES


class ProjectionAdapter(nnx.Module):
    """What is trained beside one projection of every block; in itself nothing."""

    def before(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead in"]:
        """What goes into the frozen projection in place of `x`."""
        return x

    def after(
        self, x: Float[Array, "*lead in"], y: Float[Array, "*lead out"]
    ) -> Float[Array, "*lead out"]:
        """What comes out in place of `y`, for the projection's own input `x`."""
        del x
        return y


def _own_axes(axes: tuple[str, str]) -> tuple[str, str]:
    """Logical axes of what is trained beside a kernel with these.

    It is split as the kernel is, but for the model's width, along which it is small.
    """
    one, other = (name if name in SPLIT_NAMES else "adapter" for name in axes)
    return one, other


class LowRank(ProjectionAdapter):
    """`y + scaling * x @ a @ b` (Hu et al. 2022, equation 3).

    Attributes:
      a: `[L, in, r]`.
      b: `[L, r, out]`.
      scaling: what the product is multiplied by.
    """

    def __init__(
        self,
        a: Float[Array, "L in r"],
        b: Float[Array, "L r out"],
        scaling: float,
        axes: tuple[str, str],
    ):
        self.axes = axes
        one, other = _own_axes(axes)
        self.a = nnx.Param(a, axes=("layers", one, "rank"), partial_over=axes[1])
        self.b = nnx.Param(b, axes=("layers", "rank", other))
        self.scaling = scaling

    def after(
        self, x: Float[Array, "*lead in"], y: Float[Array, "*lead out"]
    ) -> Float[Array, "*lead out"]:
        """Adds the low-rank product."""
        a, b = self.a[...].astype(x.dtype), self.b[...].astype(x.dtype)
        low = collectives.reduce_from_shards(x @ a, self.axes[0])
        return y + (low @ b) * jnp.asarray(self.scaling, x.dtype)


class OutputScale(ProjectionAdapter):
    """`y * scale` (Liu et al. 2022, "Few-shot parameter-efficient...", section 3.3).

    Attributes:
      scale: `[L, out]`.
    """

    def __init__(self, scale: Float[Array, "L out"], axes: tuple[str, str]):
        self.scale = nnx.Param(scale, axes=("layers", _own_axes(axes)[1]))

    def after(
        self, x: Float[Array, "*lead in"], y: Float[Array, "*lead out"]
    ) -> Float[Array, "*lead out"]:
        """Scales the output, bias included."""
        del x
        return y * self.scale[...].astype(y.dtype)


class InputScale(ProjectionAdapter):
    """`(x * scale) @ kernel`: IA3's scaling of the feed-forward layer's inner numbers.

    Attributes:
      scale: `[L, in]`.
    """

    def __init__(self, scale: Float[Array, "L in"], axes: tuple[str, str]):
        names = ("layers", _own_axes(axes)[0])
        self.scale = nnx.Param(scale, axes=names, partial_over=axes[1])

    def before(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead in"]:
        """Scales the input."""
        return x * self.scale[...].astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """Which projections are adapted, and how.

    Attributes:
      regexes: each fully matches the paths of some projections, such as
        "decoder/layers/self_attention/query".
      name: of the adapter below `adapters/`.
    """

    regexes: Sequence[str]
    name: ClassVar[str]

    def __post_init__(self):
        check_fields(self)
        if isinstance(self.regexes, str):
            raise InputError(
                f"{type(self).__name__}.regexes is {self.regexes!r}, expected a list "
                "of texts"
            )
        if not self.regexes:
            raise InputError(
                f"{type(self).__name__}.regexes is empty, so nothing would be adapted; "
                "name projections, or leave the adapter out"
            )

    def build(
        self,
        key: Key[Array, ""],
        path: str,
        shape: tuple[int, int, int],
        axes: tuple[str, str],
    ) -> ProjectionAdapter:
        """The adapter of one projection.

        Args:
          key: random key.
          path: of the projection.
          shape: of its kernel, `(L, in, out)`.
          axes: logical axes of its input and output.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA(AdapterSpec):
    """Low-rank adaptation; it starts as no change.

    Attributes:
      rank: `r`.
      alpha: the product is multiplied by `alpha / r`.
      rank_stabilized: by `alpha / sqrt(r)` in its place (Kalajdzievski 2023).
    """

    regexes: Sequence[str] = (r".*/(query|value)",)
    rank: int = 8
    alpha: float = 16.0
    rank_stabilized: bool = False
    name: ClassVar[str] = "lora"

    def __post_init__(self):
        super().__post_init__()
        if self.rank < 1:
            raise InputError(f"LoRA.rank is {self.rank}, expected at least 1")

    @property
    def scaling(self) -> float:
        """What the product is multiplied by."""
        return self.alpha / (
            math.sqrt(self.rank) if self.rank_stabilized else self.rank
        )

    def build(
        self,
        key: Key[Array, ""],
        path: str,
        shape: tuple[int, int, int],
        axes: tuple[str, str],
    ) -> ProjectionAdapter:
        """`a` uniform within `1 / sqrt(in)`, as in PEFT; `b` zero."""
        del path
        layers, size_in, size_out = shape
        bound = size_in**-0.5
        a = jax.random.uniform(
            key, (layers, size_in, self.rank), minval=-bound, maxval=bound
        )
        b = jnp.zeros((layers, self.rank, size_out))
        return LowRank(a, b, self.scaling, axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IA3(AdapterSpec):
    """Scalings that start at 1: of keys, values and the feed-forward's inner numbers.

    Of `mlp/down` the input is scaled, of any other projection the output.
    """

    name: ClassVar[str] = "ia3"
    regexes: Sequence[str] = (r".*/(key|value)", r".*/mlp/down")

    def build(
        self,
        key: Key[Array, ""],
        path: str,
        shape: tuple[int, int, int],
        axes: tuple[str, str],
    ) -> ProjectionAdapter:
        """Ones."""
        del key
        layers, size_in, size_out = shape
        if path.endswith("mlp/down"):
            return InputScale(jnp.ones((layers, size_in)), axes)
        return OutputScale(jnp.ones((layers, size_out)), axes)
