"""Where the frozen weights of a model's blocks are kept."""

import dataclasses
from collections.abc import Container, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array

from prompt_tuning.checkpoints.restore_plan import RestorePlan
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import logical_axes, merge
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.models import host_memory
from prompt_tuning.streaming.layered_weights import LayeredWeight

DEVICE, PINNED_HOST, STREAMED = "device", "pinned_host", "streamed"
LOCATIONS = (DEVICE, PINNED_HOST, STREAMED)


def check_location(
    weights: str, on_mesh: bool, again: Iterable[Rematerialization | None]
) -> None:
    """Refuses a place that there is not, and settings that do not go with it.

    Args:
      weights: `Pretrained.weights`.
      on_mesh: whether the model is divided among devices.
      again: what is computed again in the backward pass, of each stack.

    Raises:
      InputError: with what to set.
    """
    if weights not in LOCATIONS:
        listed = ", ".join(map(repr, LOCATIONS))
        raise InputError(f"Pretrained.weights is {weights!r}, expected one of {listed}")
    if weights == DEVICE:
        return
    said = f"Pretrained.weights is {weights!r}"
    if on_mesh:
        raise InputError(
            f"{said} and Run.mesh divides the model among devices, which keep their "
            "parts themselves: set weights = 'device', or Run.mesh = None"
        )
    if weights == PINNED_HOST:
        return
    if any(how is not None and how.active for how in again):
        raise InputError(
            f"{said}, which keeps what enters each block, in the host's memory, and "
            "computes the block again in any case: leave rematerialization out"
        )


@dataclasses.dataclass(frozen=True)
class WeightStorage:
    """The weights that are not on the device.

    Attributes:
      streamed: by path, those that stay in their file.
      pinned: paths of those in the host's pinned memory.
    """

    streamed: Mapping[str, LayeredWeight] = dataclasses.field(default_factory=dict)
    pinned: frozenset[str] = frozenset()

    @classmethod
    def create(
        cls, weights: str, graph: nnx.GraphDef, plan: RestorePlan
    ) -> "WeightStorage":
        """Of the weights of blocks that a checkpoint has.

        Args:
          weights: one of `PLACES`.
          graph: the model's structure.
          plan: how it is restored.
        """
        if weights == DEVICE:
            return cls()
        abstract: Any = dict(plan.abstract)
        axes = logical_axes(merge(graph, abstract))
        stacked = [
            path
            for path, recipe in plan.restored.items()
            if recipe.stacked and axes[path].names[0] == "layers"
        ]
        if weights == PINNED_HOST:
            return cls(pinned=frozenset(stacked))
        readers = dict(plan.readers())
        return cls(
            {
                path: LayeredWeight(
                    path,
                    tuple(abstract[path].shape),
                    np.dtype(abstract[path].dtype),
                    readers[path],
                )
                for path in stacked
            }
        )

    def without_trained(self, trained: Container[str]) -> "WeightStorage":
        """Without the weights that are trained, which are on the device.

        Raises:
          InputError: if no other is left.
        """
        streamed = {p: x for p, x in self.streamed.items() if p not in trained}
        pinned = frozenset(path for path in self.pinned if path not in trained)
        if (self.streamed or self.pinned) and not (streamed or pinned):
            raise InputError(
                "the parameter groups train every weight of the blocks, so that none "
                "can be kept elsewhere: set Pretrained.weights = 'device', or let "
                "Run.groups match prompts or adapters alone"
            )
        return WeightStorage(streamed, pinned)

    def with_streamed(
        self, parameters: Mapping[str, Array]
    ) -> dict[str, Array | LayeredWeight]:
        """Parameters that are in memory, and streamed ones that are not among them."""
        return {**self.streamed, **parameters}

    def abstract_streamed(self) -> dict[str, Any]:
        """What stands for streamed weights where a model is looked at, but not run."""
        return {path: weight.abstract for path, weight in self.streamed.items()}

    def reject_streamed(self, what: str) -> None:
        """Refuses what reads the weights too often to stream them.

        Args:
          what: that is, as a sentence begins with it.

        Raises:
          InputError: if some are streamed.
        """
        if self.streamed:
            raise InputError(
                f"{what}, and Pretrained.weights is 'streamed', so that each time is a "
                "pass over the checkpoint's files: set it to 'pinned_host' or 'device'"
            )

    def put(self, path: str, array: np.ndarray) -> Array:
        """A parameter, in the host's memory or on the device."""
        if path in self.pinned:
            return host_memory.put_in_pinned_memory(array)
        return jax.device_put(array)
