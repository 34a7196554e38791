"""Splits arrays over a mesh by the rules for their dimensions."""

from collections.abc import Sequence

from jax.sharding import PartitionSpec

from prompt_tuning.core.errors import InputError
from prompt_tuning.settings.axis_rules import AxisRules


def partition_spec(
    rules: AxisRules, path: str, names: Sequence[str], *, whole: Sequence[str] = ()
) -> PartitionSpec:
    """Returns the PartitionSpec of an array.

    Args:
      rules: mesh axis of each dimension.
      path: path of the parameter, for the error.
      names: names of its dimensions.
      whole: names that are never sharded, whatever the rules say.

    Raises:
      InputError: if two of its dimensions would be sharded over one mesh axis, and no
        later rule applies to the second.
    """
    chosen: dict[str, tuple[str, ...]] = {name: () for name in whole}
    refused: dict[str, tuple[str, ...]] = {}
    for name, axes in rules.table:
        if name not in names or name in chosen:
            continue
        taken = {axis for used in chosen.values() for axis in used}
        if taken.intersection(axes):
            refused.setdefault(name, axes)
        else:
            chosen[name] = axes
    for name, axes in refused.items():
        if name not in chosen:
            raise InputError(
                f"{path} {tuple(names)} cannot be split: the rule for {name!r} "
                f"needs {', '.join(axes)}, which another of its dimensions uses; "
                f"add the rule ({name!r}, None), or change AxisRules"
            )
    return PartitionSpec(*(_entry(chosen.get(name, ())) for name in names))


def _entry(axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
    if len(axes) > 1:
        return axes
    return axes[0] if axes else None
