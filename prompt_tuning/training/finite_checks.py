"""Ends a run whose numbers are no longer finite, before they are saved."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prompt_tuning.checkpoints.run_store.checkpoint_files import named_leaves
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.core.errors import NotFiniteError
from prompt_tuning.sharding.array_placement import Placement, largest_magnitudes
from prompt_tuning.streaming.layered_weights import LayeredWeight
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.trainer import Trainer


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
    when: str, values: Mapping[str, Any], store: CheckpointStore, training: Trainer
) -> None:
    """Raises an error if a value is not finite.

    Args:
      when: when the values were computed, for the message.
      values: values by name.
      store: store with the last good checkpoint; a save in progress is awaited first.
      training: the run, whose frozen parameters may be the cause.

    Raises:
      NotFiniteError: with the first such value, its cause if that is a frozen
        parameter, and the newest checkpoint.
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
    found = f"the {name} {when} is {values[name]}"
    weights = training.model.weight_storage.with_streamed(training.frozen)
    broken = find_not_finite(weights)
    if broken is not None:
        raise NotFiniteError(
            f"{found}, because the frozen parameter {broken} of "
            f"{training.run.model.checkpoint} has numbers that are not finite; {kept}. "
            "Copy or convert the model's weights again"
        )
    raise NotFiniteError(
        f"{found}; {kept}. Lower the learning rate, "
        "clip the gradient, or start the prompt from vocabulary rows"
    )


def find_not_finite(weights: Mapping[str, Any]) -> str | None:
    """Returns the path of the first parameter with a number that is not finite.

    Args:
      weights: parameters by path; of those on several processes, each process reads its
        own shards, because not all processes have the same parameters.

    Returns:
      the path; None if all numbers are finite.
    """
    for path, weight in weights.items():
        if jnp.issubdtype(weight.dtype, jnp.floating) and not all(
            np.isfinite(part).all() for part in _parts(weight)
        ):
            return path
    return None


def _parts(weight: Any) -> Iterator[np.ndarray]:
    """Yields a parameter in parts that are in host memory one at a time."""
    if isinstance(weight, LayeredWeight):
        yield from map(weight.read, range(weight.shape[0]))
    else:
        yield from (np.asarray(shard.data) for shard in weight.addressable_shards)
