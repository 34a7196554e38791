"""Parts of a model's parameters that stages have."""

from collections.abc import Mapping
from typing import Any

import jax

from prompt_tuning.core.parameters import Parameters
from prompt_tuning.pipeline.stage_joins import pad, replicated


class FrozenParts:
    """Frozen parameters on the devices of the stages, which pipelines share."""

    def __init__(self):
        """Starts with none."""
        self._frozen: Parameters | None = None
        self._parts: dict[tuple, Any] = {}

    def of(self, frozen: Parameters) -> dict[tuple, Any]:
        """Returns the parts of these parameters by device, path and rows."""
        if self._frozen is not frozen:
            self._frozen, self._parts = frozen, {}
        return self._parts


def take_rows(
    rows: Mapping[str, slice],
    whole: Mapping[str, jax.ShapeDtypeStruct],
    shapes: Mapping[str, jax.ShapeDtypeStruct],
    parameters: Parameters,
) -> Parameters:
    """Returns some rows of parameters, padded as a stage needs them.

    Args:
      rows: the rows.
      whole: shapes of the parameters without padding.
      shapes: shapes of the results.
      parameters: the parameters, possibly padded for another mesh.
    """
    taken = {}
    for path, array in parameters.items():
        part = array[tuple(map(slice, whole[path].shape))]
        part = part[rows[path]] if array.ndim else part
        taken[path] = pad(part, shapes[path].shape)
    return taken


def on_all_processes(parameters: Parameters) -> Any:
    """Returns a sharding that gives every process whole arrays; None in one process."""
    homes = {x.sharding for x in parameters.values() if not x.is_fully_addressable}
    return replicated(homes.pop()) if homes else None
