"""Which mesh axis each dimension of a parameter is split over: one table of rules.

Every parameter names its dimensions ("layers", "embed", "heads"); a rule sends a name
to a mesh axis, to several, or to none. Rules are read in order, and a mesh axis splits
at most one dimension of an array: a later rule for the same name is what is done where
an earlier one finds its axis taken (T5X's `logical_axis_rules`). Those of what prompts
and adapters have alone come after all others: what a device computes its own part of
is split alike in a kernel and in what is trained beside it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
MESH_AXES = (DATA, FSDP, TENSOR)
ROW_AXES = (DATA, FSDP)
"""The mesh axes that the rows of a batch are split over."""

SPLIT_NAMES = ("heads", "key_value_heads", "mlp")
"""Dimensions that a device computes its own part of; all others but the vocabulary are
put together again where they are used."""

MODEL_NAMES = (*SPLIT_NAMES, "vocab", "embed", "positions", "relative_buckets")
"""Dimensions of a frozen model's parameters."""

TRAINED_NAMES = (
    "prompt",
    "prompt_embed",
    "prompt_layers",
    "prompt_hidden",
    "prompt_middle",
    "key_value",
    "prompt_heads",
    "prompt_head",
    "tasks",
    "task_projection",
    "adapter",
    "rank",
)
"""Dimensions of prompts and adapters, of which no preset speaks: they are small."""

NAMES = (*MODEL_NAMES, *TRAINED_NAMES)
"""All names that a rule may speak of."""

Target = str | Sequence[str] | None

MEGATRON = (
    ("vocab", (FSDP, TENSOR)),
    ("heads", TENSOR),
    ("key_value_heads", TENSOR),
    ("mlp", TENSOR),
    ("embed", FSDP),
    ("embed", None),
)
_T5X = tuple((name, TENSOR) for name in ("vocab", *SPLIT_NAMES))
PRESETS: dict[str, tuple[tuple[str, Target], ...]] = {
    "megatron": MEGATRON,
    "t5x_1_1": _T5X,
    "t5x_2_1": (*_T5X, ("embed", TENSOR), ("embed", None)),
    "t5x_1_2": (*_T5X, ("embed", FSDP), ("embed", None)),
    "t5x_2_2": (*_T5X, ("embed", TENSOR), ("embed", FSDP), ("embed", None)),
}
"""Rule sets by name.

`megatron`: projections over `tensor` and over `fsdp`, the vocabulary over both. The
others are T5X's `standard_logical_axis_rules` for parameters, by its numbers of
activation and parameter dimensions, its axis `model` being `tensor` and its `data`,
where it splits parameters, `fsdp`; activations are never split over `embed`.
"""


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """The table of rules.

    Attributes:
      preset: the name of a rule set, which stands behind `rules`.
      rules: pairs of a dimension's name and a mesh axis, several, or None for none.

    Raises:
      InputError: if there is no such preset, name or mesh axis, or a rule cannot be
        followed.
    """

    preset: str = "megatron"
    rules: Sequence[Sequence[Any]] = ()

    def __post_init__(self):
        check_fields(self)
        if self.preset not in PRESETS:
            raise InputError(
                f"AxisRules.preset is {self.preset!r}, expected one of "
                f"{', '.join(PRESETS)}"
            )
        for rule in self.rules:
            _check_rule(rule)
        # Lists, as gin gives them, cannot stand among what a program is compiled for.
        fixed = tuple((name, _axes(target)) for name, target in self.rules)
        object.__setattr__(self, "rules", fixed)

    @property
    def table(self) -> list[tuple[str, tuple[str, ...]]]:
        """All rules in order, the preset's behind one's own."""
        rules = (*self.rules, *PRESETS[self.preset])
        table = [(name, _axes(target)) for name, target in rules]
        return sorted(table, key=lambda rule: rule[0] in TRAINED_NAMES)

    def spec(
        self, path: str, names: Sequence[str], *, whole: Sequence[str] = ()
    ) -> PartitionSpec:
        """How an array is split.

        Args:
          path: of the parameter, for the error.
          names: of its dimensions.
          whole: names that are not split in it, whatever the rules say.

        Raises:
          InputError: if two of its dimensions would be split over one mesh axis and no
            later rule says what to do with the second.
        """
        found: dict[str, tuple[str, ...]] = {name: () for name in whole}
        refused: dict[str, tuple[str, ...]] = {}
        for name, axes in self.table:
            if name not in names or name in found:
                continue
            taken = {axis for others in found.values() for axis in others}
            if taken.intersection(axes):
                refused.setdefault(name, axes)
            else:
                found[name] = axes
        for name, axes in refused.items():
            if name not in found:
                raise InputError(
                    f"{path} {tuple(names)} cannot be split: the rule for {name!r} "
                    f"wants {', '.join(axes)}, which another of its dimensions has; "
                    f"add the rule ({name!r}, None), or change AxisRules"
                )
        return PartitionSpec(*(_entry(found.get(name, ())) for name in names))


def _axes(target: Target) -> tuple[str, ...]:
    if target is None:
        return ()
    return (target,) if isinstance(target, str) else tuple(target)


def axes_of(entry: str | Sequence[str] | None) -> tuple[str, ...]:
    """The mesh axes that a dimension's entry in a `PartitionSpec` names."""
    return _axes(entry)


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    if len(axes) > 1:
        return axes
    return axes[0] if axes else None


def _check_rule(rule: Any) -> None:
    pair = isinstance(rule, list | tuple) and len(rule) == 2
    target = rule[1] if pair else None
    several = target if isinstance(target, list | tuple) else [target]
    if not pair or not all(axis is None or isinstance(axis, str) for axis in several):
        raise InputError(
            f"AxisRules.rules has {rule!r}, expected pairs such as ('embed', 'fsdp')"
        )
    name, axes = rule[0], _axes(rule[1])
    if name not in NAMES:
        raise InputError(
            f"AxisRules.rules speaks of the dimension {name!r}, expected one of "
            f"{', '.join(NAMES)}"
        )
    unknown = [axis for axis in axes if axis not in MESH_AXES]
    if unknown:
        raise InputError(
            f"AxisRules.rules sends {name!r} to the mesh axis {unknown[0]!r}, expected "
            f"some of {', '.join(MESH_AXES)}, or None"
        )
    if len(set(axes)) != len(axes):
        raise InputError(f"AxisRules.rules sends {name!r} to {axes}, one of them twice")
    if name in SPLIT_NAMES and axes not in ((), (TENSOR,)):
        raise InputError(
            f"AxisRules.rules sends {name!r} to {', '.join(axes)}, expected "
            f"{TENSOR!r} or None: each device computes its own part of it"
        )
    if DATA in axes:
        raise InputError(
            f"AxisRules.rules sends {name!r} to {DATA!r}, along which parameters are "
            f"whole: name the axis {FSDP!r}, over which rows are split too"
        )
