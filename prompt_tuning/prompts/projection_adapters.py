"""Adapters of projections: parameters trained next to a frozen kernel.

An adapter acts on a projection twice: before it, on its input, and after it, on its
output. Its parameters are stacked on `L` like the kernel's, at
`.../query/adapters/{name}/...`. Prompts and adapters can be tuned together.

A new adapter is a module with a `ProjectionAdapter` and an `AdapterSpec`, and a line in
`prompt_tuning.prompts.FACTORIES`. Both state the adapter's kind, how it is exported and
how it is rebuilt.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.adapters.adapter import IA3 as IA3_KIND
from prompt_tuning.adapters.adapter import LORA, Adapter, Arrays
from prompt_tuning.core.errors import InputError, kind_of, shown
from prompt_tuning.core.field_checks import check_fields, check_value
from prompt_tuning.core.number_ranges import AnyNumber, AxisLength, PositiveNumber
from prompt_tuning.core.parameters import split
from prompt_tuning.sharding import collectives
from prompt_tuning.sharding.axis_rules import SPLIT_NAMES

LORA_A = "/adapters/lora/a"
IA3_SCALE = "/adapters/ia3/scale"


class ExportedAdapter(NamedTuple):
    """The adapter of one projection as arrays.

    Attributes:
      kind: the kind of the adapter.
      arrays: float32 arrays by leaf.
      scaling: factor of a low-rank product; None for adapters without one.
    """

    kind: str
    arrays: Arrays
    scaling: float | None = None


class ProjectionAdapter(nnx.Module):
    """The adapter of one projection in all blocks; this base class changes nothing.

    Attributes:
      kind: the kind of the adapter, by PEFT's name; None if it cannot be exported.
      scaling: factor of a low-rank product; None for adapters without one.
    """

    kind: ClassVar[str | None] = None
    scaling: float | None = None

    def before(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead in"]:
        """Returns the input of the frozen projection."""
        return x

    def after(
        self, x: Float[Array, "*lead in"], y: Float[Array, "*lead out"]
    ) -> Float[Array, "*lead out"]:
        """Returns the output of the adapted projection.

        Args:
          x: the adapted projection's input, before `before` changes it.
          y: the frozen projection's output.
        """
        del x
        return y

    def export(self, path: str) -> ExportedAdapter:
        """Returns the adapter's arrays.

        Raises:
          InputError: if the adapter has no kind that other programs know.
        """
        if self.kind is None:
            raise InputError(
                f"{path} is {kind_of(self)}, which cannot be exported from this library"
            )
        leaves = split(self)[1]
        arrays = {leaf: np.asarray(array) for leaf, array in leaves.items()}
        return ExportedAdapter(self.kind, arrays, self.scaling)


def _adapter_axes(axes: tuple[str, str]) -> tuple[str, str]:
    """Returns logical axes of an adapter's parameters, from the kernel's axes.

    They are sharded like the kernel, except along the model's width, where they are
    small.
    """
    axis_in, axis_out = (name if name in SPLIT_NAMES else "adapter" for name in axes)
    return axis_in, axis_out


class LowRank(ProjectionAdapter):
    """`y + scaling * x @ a @ b` (Hu et al. 2022, equation 3).

    Attributes:
      a: `[L, in, r]`.
      b: `[L, r, out]`.
      scaling: factor of the product.
    """

    kind = LORA

    def __init__(
        self,
        a: Float[Array, "L in r"],
        b: Float[Array, "L r out"],
        scaling: float,
        axes: tuple[str, str],
    ):
        self.axes = axes
        axis_in, axis_out = _adapter_axes(axes)
        self.a = nnx.Param(a, axes=("layers", axis_in, "rank"), partial_over=axes[1])
        self.b = nnx.Param(b, axes=("layers", "rank", axis_out))
        self.scaling = scaling

    def after(
        self, x: Float[Array, "*lead in"], y: Float[Array, "*lead out"]
    ) -> Float[Array, "*lead out"]:
        """Adds the low-rank product."""
        a, b = self.a[...].astype(x.dtype), self.b[...].astype(x.dtype)
        low = collectives.reduce_from_shards(x @ a, self.axes[0])  # [*lead, r]
        return y + (low @ b) * jnp.asarray(self.scaling, x.dtype)


class OutputScale(ProjectionAdapter):
    """`y * scale` (Liu et al. 2022, "Few-shot parameter-efficient...", section 3.3).

    Attributes:
      scale: `[L, out]`.
    """

    kind = IA3_KIND

    def __init__(self, scale: Float[Array, "L out"], axes: tuple[str, str]):
        self.scale = nnx.Param(scale, axes=("layers", _adapter_axes(axes)[1]))

    def after(
        self, x: Float[Array, "*lead in"], y: Float[Array, "*lead out"]
    ) -> Float[Array, "*lead out"]:
        """Scales the output, including the bias."""
        del x
        return y * self.scale[...].astype(y.dtype)


class InputScale(ProjectionAdapter):
    """`(x * scale) @ kernel`: IA3's scaling of the feed-forward layer's inner values.

    Attributes:
      scale: `[L, in]`.
    """

    kind = IA3_KIND

    def __init__(self, scale: Float[Array, "L in"], axes: tuple[str, str]):
        names = ("layers", _adapter_axes(axes)[0])
        self.scale = nnx.Param(scale, axes=names, partial_over=axes[1])

    def before(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead in"]:
        """Scales the input."""
        return x * self.scale[...].astype(x.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """An adapter of all projections that match some regular expressions.

    Attributes:
      regexes: expressions, each of which fully matches the path of at least one
        projection, such as "decoder/layers/self_attention/query".
      name: name of the adapter below `adapters/`.
      kind: the kind of the adapter, by PEFT's name.
    """

    regexes: Sequence[str]
    name: ClassVar[str]
    kind: ClassVar[str]

    def __post_init__(self):
        check_fields(self)
        if isinstance(self.regexes, str):
            raise InputError(
                f"{type(self).__name__}.regexes is {shown(self.regexes)}, expected a "
                "list of strings"
            )
        if not self.regexes:
            raise InputError(
                f"{type(self).__name__}.regexes is empty, so nothing would be adapted; "
                "name projections, or remove the adapter"
            )

    def check_trained(self) -> None:
        """Checks that training can change what the adapter does.

        Raises:
          InputError: if a setting prevents it.
        """

    def build(
        self,
        key: Key[Array, ""],
        path: str,
        shape: tuple[int, int, int],
        axes: tuple[str, str],
    ) -> ProjectionAdapter:
        """Builds the adapter of one projection.

        Args:
          key: random key.
          path: path of the projection.
          shape: shape of its kernel, `(L, in, out)`.
          axes: logical axes of its input and output.
        """
        raise NotImplementedError

    @classmethod
    def rebuild(cls, adapter: Adapter) -> tuple["AdapterSpec", ...]:
        """Returns the specs that build exactly the parameters of an adapter.

        Raises:
          InputError: if the adapter lacks something that its parameters do not show.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoRA(AdapterSpec):
    """Low-rank products next to projections: `y + alpha / r * x @ a @ b` (Hu et al.
    2022).

    The usual choice on small models and where a prompt does not reach the loss that you
    need. It can be merged into the weights (`TunedModel.save(..., form="merged")`), so
    that the result costs nothing at inference. It starts as the identity, since `b` is
    0.

    Attributes:
      regexes: expressions that match the whole paths of the projections to adapt, such
        as `.*/(query|key|value|output)` or `.*/mlp/.*`; queries and values by default.
      rank: rank `r` of the product.
      alpha: scale; the product is multiplied by `alpha / r`.
      rank_stabilized: whether it is multiplied by `alpha / sqrt(r)` instead
        (Kalajdzievski 2023), which keeps high ranks trainable.

    Raises:
      InputError: if a number is out of range, or an expression matches no projection.

    Examples:
      >>> trained, _ = model.attach(pt.LoRA(rank=4)).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/layers/self_attention/query/adapters/lora/a (4, 128, 4)
      decoder/layers/self_attention/query/adapters/lora/b (4, 4, 128)
      decoder/layers/self_attention/value/adapters/lora/a (4, 128, 4)
      decoder/layers/self_attention/value/adapters/lora/b (4, 4, 128)
    """

    regexes: Sequence[str] = (r".*/(query|value)",)
    rank: AxisLength = 8
    alpha: AnyNumber = 16.0
    rank_stabilized: bool = False
    name: ClassVar[str] = "lora"
    kind: ClassVar[str] = LORA

    def check_trained(self) -> None:
        """Refuses an `alpha` of 0, which has no gradient, or below, as a file may have.

        Raises:
          InputError: if `alpha` is not above 0.
        """
        check_value("LoRA.alpha", self.alpha, PositiveNumber)

    @property
    def scaling(self) -> float:
        """Factor of the product."""
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
        """Initializes `a` uniformly within `1 / sqrt(in)`, as in PEFT, and `b` to 0."""
        del path
        layers, size_in, size_out = shape
        bound = size_in**-0.5
        a = jax.random.uniform(
            key, (layers, size_in, self.rank), minval=-bound, maxval=bound
        )
        b = jnp.zeros((layers, self.rank, size_out))
        return LowRank(a, b, self.scaling, axes)

    @classmethod
    def rebuild(cls, adapter: Adapter) -> tuple["LoRA", ...]:
        """Returns one spec for each rank and scaling.

        Raises:
          InputError: if the scaling of a LoRA is unknown.
        """
        groups: dict[tuple[int, float], list[str]] = {}
        for path, leaf in adapter.parameters.items():
            if not path.endswith(LORA_A):
                continue
            projection = path.removesuffix(LORA_A)
            if projection not in adapter.scalings:
                raise InputError(
                    f"the scaling (alpha / r) of the LoRA of {projection} is unknown: "
                    "give the adapters that it was trained with, by --method "
                    "and --rank or Run.adapters"
                )
            group = (leaf.shape[2], adapter.scalings[projection])
            groups.setdefault(group, []).append(re.escape(projection))
        return tuple(
            cls(regexes=regexes, rank=rank, alpha=rank * scaling)
            for (rank, scaling), regexes in groups.items()
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class IA3(AdapterSpec):
    """Trained scales of keys, values and feed-forward values (Liu et al. 2022).

    The smallest adapter: one number per column that it scales. It can be merged into
    the weights, like `LoRA`. The input of `mlp/down` is scaled, also of a shared
    expert, and the output of any other projection. All scales start at 1.

    Attributes:
      regexes: expressions that match the whole paths of the projections to adapt.

    Raises:
      InputError: if an expression matches no projection.

    Examples:
      >>> trained, _ = model.attach(pt.IA3()).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/layers/mlp/down/adapters/ia3/scale (4, 344)
      decoder/layers/self_attention/key/adapters/ia3/scale (4, 128)
      decoder/layers/self_attention/value/adapters/ia3/scale (4, 128)
    """

    name: ClassVar[str] = "ia3"
    kind: ClassVar[str] = IA3_KIND
    regexes: Sequence[str] = (r".*/(key|value)", r".*/mlp/down")

    def build(
        self,
        key: Key[Array, ""],
        path: str,
        shape: tuple[int, int, int],
        axes: tuple[str, str],
    ) -> ProjectionAdapter:
        """Initializes the scales to 1."""
        del key
        layers, size_in, size_out = shape
        if path.endswith(("mlp/down", "shared/down")):
            return InputScale(jnp.ones((layers, size_in)), axes)
        return OutputScale(jnp.ones((layers, size_out)), axes)

    @classmethod
    def rebuild(cls, adapter: Adapter) -> tuple["IA3", ...]:
        """Returns one spec for all projections."""
        projections = [path.removesuffix(IA3_SCALE) for path in adapter.parameters]
        return (cls(regexes=[re.escape(path) for path in projections]),)
