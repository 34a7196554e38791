"""Ends a run whose numbers are no longer finite, before they are saved."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from prompt_tuning.checkpoints.run_store.checkpoint_files import named_leaves
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.core.errors import NotFiniteError
from prompt_tuning.sharding.array_placement import Placement, largest_magnitudes
from prompt_tuning.training.state import TrainState


def largest_on_host(state: TrainState) -> dict[str, float]:
    """The largest absolute value of each saved leaf, by name."""
    return _named(
        jax.tree.map(
            lambda leaf: np.max(np.abs(leaf), initial=0),
            (state.trained, state.optimizer_state),
        )
    )


def largest_on_devices(
    state: TrainState, placement: Placement | None
) -> dict[str, float]:
    """Computes `largest_on_host` on the devices, the same in all processes."""
    leaves = (state.trained, state.optimizer_state)
    reduce = (
        jax.jit(largest_magnitudes)
        if placement is None
        else placement.largest_magnitudes
    )
    return _named(jax.device_get(reduce(leaves)))


def _named(largest: tuple[dict[str, Any], Any]) -> dict[str, float]:
    trained, optimizer_state = largest
    moments = {f"optimizer's {p}": x for p, x in named_leaves(optimizer_state).items()}
    return {name: float(x) for name, x in (trained | moments).items()}


def refuse_not_finite(
    when: str, values: Mapping[str, Any], store: CheckpointStore
) -> None:
    """Raises an error if a value is not finite.

    Args:
      when: when the values were computed, for the message.
      values: values by name.
      store: store with the last good checkpoint; a save in progress is awaited first.

    Raises:
      NotFiniteError: with the first such value, and the newest checkpoint.
    """
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    if not bad:
        return
    name = "loss" if "loss" in bad else bad[0]
    store.wait()
    steps = store.steps()
    kept = (
        f"the checkpoint of step {steps[-1]} is kept as the last good one"
        if steps
        else "no checkpoint had been written yet"
    )
    raise NotFiniteError(
        f"the {name} {when} is {values[name]}; {kept}. Lower the learning rate, "
        "clip the gradient, or start the prompt from vocabulary rows"
    )
