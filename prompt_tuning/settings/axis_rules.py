"""Rules that map logical axes to mesh axes.

Every parameter names its dimensions ("layers", "embed", "heads"). A rule maps a name to
one mesh axis, to several, or to none. Rules are tried in order, and a mesh axis shards
at most one dimension of an array: if a rule's axis is taken, a later rule for the same
name applies (as in T5X's `logical_axis_rules`). Rules for dimensions that only prompts
and adapters have come last, so an adapter is sharded like its kernel wherever a
dimension is computed in shards.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields

STAGE, DATA, FSDP, TENSOR = "stage", "data", "fsdp", "tensor"
MESH_AXES = (DATA, FSDP, TENSOR)
"""The mesh axes within a stage; with several stages, `STAGE` is the outermost axis."""

ROW_AXES = (DATA, FSDP)
"""The mesh axes that shard the rows of a batch."""

MEMORY_HEADS, MEMORY_KEYS = "memory_heads", "memory_keys"
"""Heads of the values and of the keys in recurrent mixers (Mamba, gated delta rule)."""

SPLIT_NAMES = ("heads", "key_value_heads", "mlp", MEMORY_HEADS, MEMORY_KEYS)
"""Dimensions that are computed in shards.

All others, except the vocabulary, are gathered where they are used.
"""

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
    "prompt_state",
    "tasks",
    "task_projection",
    "adapter",
    "rank",
)
"""Dimensions of prompts and adapters. They are small; no preset shards them."""

NAMES = (*MODEL_NAMES, *TRAINED_NAMES)
"""All dimension names that a rule may use."""

Target = str | Sequence[str] | None

MEGATRON = (
    ("vocab", (FSDP, TENSOR)),
    ("heads", TENSOR),
    ("key_value_heads", TENSOR),
    ("mlp", TENSOR),
    (MEMORY_HEADS, TENSOR),
    (MEMORY_KEYS, TENSOR),
    ("embed", FSDP),
    ("embed", None),
)
_T5X = tuple((name, TENSOR) for name in ("vocab", *SPLIT_NAMES))
Preset = Literal["megatron", "t5x_1_1", "t5x_2_1", "t5x_1_2", "t5x_2_2"]
PRESETS: dict[Preset, tuple[tuple[str, Target], ...]] = {
    "megatron": MEGATRON,
    "t5x_1_1": _T5X,
    "t5x_2_1": (*_T5X, ("embed", TENSOR), ("embed", None)),
    "t5x_1_2": (*_T5X, ("embed", FSDP), ("embed", None)),
    "t5x_2_2": (*_T5X, ("embed", TENSOR), ("embed", FSDP), ("embed", None)),
}
"""Rule sets by name.

`megatron` shards projections over `tensor` and `fsdp`, and the vocabulary over both.
The others are T5X's `standard_logical_axis_rules` for parameters, named after its
numbers of activation and parameter dimensions. T5X's axis `model` is `tensor` here, and
its axis `data`, where it shards parameters, is `fsdp`. Activations are never sharded
over `embed`.
"""


@dataclasses.dataclass(frozen=True)
class AxisRules:
    """Mesh axes that the dimensions of the parameters are split over.

    You need it only for a layout other than Megatron's, e.g. to repeat one of T5X.
    Rules are tried in order; a mesh axis splits at most one dimension of an array.

    Attributes:
      preset: rules that apply after `rules`: "megatron", or one of T5X's layouts
        "t5x_1_1", "t5x_2_1", "t5x_1_2", "t5x_2_2", named after T5X's numbers of
        activation and parameter dimensions.
      rules: pairs of a dimension name and a mesh axis, a list of axes, or None.

    Raises:
      InputError: if a preset, name or mesh axis does not exist, or a rule is not
        supported.

    Examples:
      >>> rules = pt.AxisRules(rules=[("vocab", None)])
      >>> pt.MeshShape(tensor=2, rules=rules).build().rules.table[0]
      ('vocab', ())
    """

    preset: Preset = "megatron"
    rules: Sequence[Sequence[Any]] = ()

    def __post_init__(self):
        check_fields(self)
        for rule in self.rules:
            _check_rule(rule)
        # gin gives lists, but a static argument of a compiled program must be hashable.
        fixed = tuple((name, axes_of(target)) for name, target in self.rules)
        object.__setattr__(self, "rules", fixed)

    @property
    def table(self) -> list[tuple[str, tuple[str, ...]]]:
        """All rules in order: `rules`, then the preset's."""
        rules = (*self.rules, *PRESETS[self.preset])
        table = [(name, axes_of(target)) for name, target in rules]
        return sorted(table, key=lambda rule: rule[0] in TRAINED_NAMES)


def axes_of(target: Target) -> tuple[str, ...]:
    """Returns the mesh axes that a rule, or an entry of a `PartitionSpec`, names."""
    if target is None:
        return ()
    return (target,) if isinstance(target, str) else tuple(target)


def _check_rule(rule: Any) -> None:
    pair = isinstance(rule, list | tuple) and len(rule) == 2
    target = rule[1] if pair else None
    several = target if isinstance(target, list | tuple) else [target]
    if not pair or not all(axis is None or isinstance(axis, str) for axis in several):
        raise InputError(
            f"AxisRules.rules has {shown(rule)}, expected pairs such as ('embed', "
            "'fsdp')"
        )
    name, axes = rule[0], axes_of(rule[1])
    if name not in NAMES:
        raise InputError(
            f"AxisRules.rules has the dimension {name!r}, expected one of "
            f"{', '.join(NAMES)}"
        )
    unknown = [axis for axis in axes if axis not in MESH_AXES]
    if unknown:
        raise InputError(
            f"AxisRules.rules maps {name!r} to the mesh axis {shown(unknown[0])}, "
            f"expected some of {', '.join(MESH_AXES)}, or None"
        )
    if len(set(axes)) != len(axes):
        raise InputError(f"AxisRules.rules maps {name!r} to {axes}, one of them twice")
    if name in SPLIT_NAMES and axes not in ((), (TENSOR,)):
        raise InputError(
            f"AxisRules.rules maps {name!r} to {', '.join(axes)}, expected "
            f"{TENSOR!r} or None: each device computes its own part of it"
        )
    if DATA in axes:
        raise InputError(
            f"AxisRules.rules maps {name!r} to {DATA!r}, along which parameters are "
            f"replicated: use {FSDP!r}, along which rows are split too"
        )
