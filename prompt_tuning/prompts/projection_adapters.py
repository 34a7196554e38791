"""Adapters of projections: parameters trained next to a frozen kernel.

An adapter acts on a projection twice: before it, on its input, and after it, on its
output. Its parameters are stacked on `L` like the kernel's, at
`.../query/adapters/{name}/...`. Prompts and adapters can be tuned together.

To add an adapter, write a module with a `ProjectionAdapter` and an `AdapterSpec`, and
add a line to `prompt_tuning.prompts.FACTORIES`. Both classes state the adapter's kind,
how to export it and how to rebuild it.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Float32, Key

from prompt_tuning.adapters.adapter import IA3 as IA3_KIND
from prompt_tuning.adapters.adapter import Adapter, Arrays
from prompt_tuning.core.errors import InputError, kind_of, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.parameter_groups import match_any
from prompt_tuning.core.parameters import split
from prompt_tuning.settings.axis_rules import SPLIT_NAMES

IA3_SCALE = "/adapters/ia3/scale"
NAMES_IN_PEFT = {
    **dict.fromkeys(("q_proj", "q"), "query"),
    **dict.fromkeys(("k_proj", "k"), "key"),
    **dict.fromkeys(("v_proj", "v"), "value"),
    **dict.fromkeys(("o_proj", "o"), "out"),
    "c_attn": "(query|key|value)",
    **dict.fromkeys(("gate_proj", "wi_0"), "mlp/gate"),
    **dict.fromkeys(("up_proj", "c_fc", "wi", "wi_1"), "mlp/up"),
    **dict.fromkeys(("down_proj", "wo"), "mlp/down"),
}
"""Names of projections by the names of modules in PEFT's `target_modules`."""


class ExportedAdapter(NamedTuple):
    """One projection's adapter as arrays.

    Attributes:
      kind: the kind of the adapter.
      arrays: float32 arrays by leaf.
      scaling: factor of a low-rank product; None for adapters without one.
      settings: PEFT settings that the arrays do not reveal, if not the defaults.
    """

    kind: str
    arrays: Arrays
    scaling: float | None = None
    settings: Mapping[str, Any] = {}


@runtime_checkable
class FrozenProjection(Protocol):
    """One block's frozen projection, as adapters may use it."""

    def applied_bias(self) -> Float[Array, "out"] | None:
        """Returns the bias, trained or frozen."""
        ...

    def product(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead out"]:
        """Multiplies by the kernel, without the bias."""
        ...

    def wide_kernel(self) -> Float32[Array, "in out"]:
        """Returns the weights, or this device's shard of them."""
        ...


class ProjectionAdapter(nnx.Module):
    """The adapter of one projection in all blocks; this base class changes nothing.

    Attributes:
      kind: the kind of the adapter, by PEFT's name; None if it cannot be exported.
      scaling: factor of a low-rank product; None for adapters without one.
      drops: whether training drops something, which needs a random key.
      alone: whether no other adapter may act on the same projection.
      bias: a trained bias, `[L, out]`, or None.
    """

    kind: ClassVar[str | None] = None
    scaling: float | None = None
    drops: bool = False
    alone: bool = False
    bias: nnx.Param | None = None

    def bias_instead_of(self, frozen: Float[Array, "out"]) -> Float[Array, "out"]:
        """Returns one block's bias if `bias` is trained."""
        return frozen if self.bias is None else self.bias[...]

    @property
    def settings(self) -> dict[str, Any]:
        """PEFT settings that the arrays do not reveal, if not the defaults."""
        return {}

    def before(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead in"]:
        """Returns the input of the frozen projection."""
        return x

    def after(
        self, x: Float[Array, "*lead in"], y: Float[Array, "*lead out"]
    ) -> Float[Array, "*lead out"]:
        """Returns the adapted projection's output.

        `x` is its input, before `before` changes it, and `y` the frozen output.
        """
        del x
        return y

    def adapt(
        self,
        x: Float[Array, "*lead in"],
        y: Float[Array, "*lead out"],
        frozen: FrozenProjection,
    ) -> Float[Array, "*lead out"]:
        """Returns the adapted projection's output; see `after`.

        Override this instead if the adapter depends on the `frozen` weights.
        """
        del frozen
        return self.after(x, y)

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
        return ExportedAdapter(self.kind, arrays, self.scaling, self.settings)


def adapter_axes(axes: tuple[str, str]) -> tuple[str, str]:
    """Returns the logical axes of an adapter's parameters, from the kernel's.

    They are sharded like the kernel, except along the model's width, where they are
    small.
    """
    axis_in, axis_out = (name if name in SPLIT_NAMES else "adapter" for name in axes)
    return axis_in, axis_out


class OutputScale(ProjectionAdapter):
    """`y * scale` (Liu et al. 2022, "Few-shot parameter-efficient...", section 3.3).

    Attributes:
      scale: `[L, out]`.
    """

    kind = IA3_KIND

    def __init__(self, scale: Float[Array, "L out"], axes: tuple[str, str]):
        self.scale = nnx.Param(scale, axes=("layers", adapter_axes(axes)[1]))

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
        names = ("layers", adapter_axes(axes)[0])
        self.scale = nnx.Param(scale, axes=names, partial_over=axes[1])

    def before(self, x: Float[Array, "*lead in"]) -> Float[Array, "*lead in"]:
        """Scales the input."""
        return x * self.scale[...].astype(x.dtype)


class AdaptedProjection(NamedTuple):
    """A projection to build an adapter for.

    Attributes:
      path: path of the projection.
      shape: shape of its kernel, `(L, in, out)`.
      axes: logical axes of its input and output.
      modules: each layer's module name in transformers; empty unless the adapter
        `names_modules`.
      experts: number of experts with such a kernel; 0 for a plain projection.
    """

    path: str
    shape: tuple[int, int, int]
    axes: tuple[str, str]
    modules: Sequence[str] = ()
    experts: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterSpec:
    """An adapter for all projections that match some regular expressions.

    Attributes:
      regexes: expressions that each match the whole path of at least one projection,
        e.g. "decoder/layers/self_attention/query".
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

    @property
    def names_modules(self) -> bool:
        """Whether a setting names modules as transformers does."""
        return False

    def select(self, modules: Mapping[str, Sequence[str]]) -> list[str]:
        """Returns the paths of the projections to adapt.

        `modules` has each layer's module name in transformers, by the projection's
        path; names are empty unless the adapter `names_modules`.

        Raises:
          InputError: if an expression matches none.
        """
        for regex in self.regexes:
            if not any(map(match_any([regex]), modules)):
                raise InputError(_describe_mismatch(self, regex, list(modules)))
        return list(filter(match_any(self.regexes), modules))

    def build(
        self, key: Key[Array, ""], projection: AdaptedProjection
    ) -> ProjectionAdapter:
        """Builds the adapter of one projection; `key` is a random key."""
        raise NotImplementedError

    @classmethod
    def rebuild(cls, adapter: Adapter) -> tuple["AdapterSpec", ...]:
        """Returns the specs that build exactly the parameters of an adapter.

        Raises:
          InputError: if the adapter lacks something that its parameters do not reveal.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class IA3(AdapterSpec):
    """Trained scales of keys, values and feed-forward values (Liu et al. 2022).

    The smallest adapter: one number per column that it scales. It can be merged into
    the weights, like `LoRA`. For `mlp/down` it scales the input, also in a shared
    expert, and for any other projection the output. All scales start at 1.

    Attributes:
      regexes: expressions that match the whole paths of the projections to adapt. By
        default, keys, values, and what feed-forward layers compute last, except in
        routed experts.

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
    regexes: Sequence[str] = (r".*/(key|value|(mlp|dense_mlp|shared)/down)",)

    def build(
        self, key: Key[Array, ""], projection: AdaptedProjection
    ) -> ProjectionAdapter:
        """Initializes the scales to 1."""
        del key
        layers, size_in, size_out = projection.shape
        path, axes = projection.path, projection.axes
        if path.endswith(("mlp/down", "shared/down")):
            return InputScale(jnp.ones((layers, size_in)), axes)
        return OutputScale(jnp.ones((layers, size_out)), axes)

    @classmethod
    def rebuild(cls, adapter: Adapter) -> tuple["IA3", ...]:
        """Returns one spec for all projections."""
        projections = [path.removesuffix(IA3_SCALE) for path in adapter.parameters]
        return (cls(regexes=[re.escape(path) for path in projections]),)


def _describe_mismatch(spec: AdapterSpec, regex: str, paths: list[str]) -> str:
    """Lists the projections, and those that PEFT's names in an expression mean."""
    words = [word for word in NAMES_IN_PEFT if re.search(rf"\b{word}\b", regex)]
    hints = [f"{word} of PEFT is '.*/{NAMES_IN_PEFT[word]}'" for word in words]
    return (
        f"the expression {regex!r} of {type(spec).__name__} matches no projection (it "
        f"must match the whole path); expected some of {', '.join(paths)}"
        f"{'; ' * bool(hints)}{', '.join(hints)}"
    )
