"""Where the frozen weights of a model's blocks are stored while it runs.

They are on the device, in pinned host memory, or streamed from the checkpoint's files.
"""

import dataclasses
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from prompt_tuning import processes
from prompt_tuning.checkpoints.restore_plan import RestorePlan
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.layer_kinds import check_alike
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import logical_axes, merge
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.models import host_memory
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.streaming.layered_weights import LayeredWeight, LayerReader

DEVICE, PINNED_HOST, STREAMED = "device", "pinned_host", "streamed"
HOST = "host"


def check_location(
    weights: str,
    trained_weights: str,
    on_mesh: bool,
    policies: Iterable[Rematerialization | None],
) -> None:
    """Checks that the other settings permit a location of weights."""
    if trained_weights == HOST and weights != STREAMED:
        raise InputError(
            f"Pretrained.trained_weights is {HOST!r} and Pretrained.weights "
            f"{weights!r}: weights in host memory are brought to the device layer by "
            f"layer, so give {how_to_set('Pretrained.weights', STREAMED)}"
        )
    if weights == DEVICE:
        return
    setting = f"Pretrained.weights is {shown(weights)}"
    if on_mesh and processes.count() > 1:
        raise InputError(
            f"{setting}, but Run.mesh divides the model among devices of several "
            f"processes: give {how_to_set('Pretrained.weights', DEVICE)}, "
            f"{how_to_set('Run.mesh', None)}, or start one process"
        )
    if on_mesh and trained_weights == HOST:
        raise InputError(
            f"Pretrained.trained_weights is {HOST!r}, but Run.mesh divides the model "
            f"among devices: give {how_to_set('Pretrained.trained_weights', DEVICE)} "
            f"or {how_to_set('Run.mesh', None)}"
        )
    if weights == PINNED_HOST:
        return
    if any(policy is not None and policy.active for policy in policies):
        raise InputError(
            f"{setting}, which always saves the input of each block in host memory "
            "and recomputes the block: leave out rematerialization"
        )


def check_by_layer(weights: str, config: ModelConfig) -> None:
    """Checks that a model's layers can be brought to the device one by one."""
    if weights != DEVICE:
        check_alike(
            config,
            f"Pretrained.weights is {shown(weights)}",
            f"give {how_to_set('Pretrained.weights', DEVICE)}",
        )


@dataclasses.dataclass(frozen=True)
class WeightStorage:
    """Weights that are not kept on the device.

    Attributes:
      streamed: weights that stay in their file, by path.
      pinned: paths of the weights in the host's pinned memory.
      trained: trained weights in host memory, as NumPy arrays; for each path, whether
        it is stacked over layers.
      slices: how many slices a stack's layers are read in; None for one layer at a
        time.
    """

    streamed: Mapping[str, LayeredWeight] = dataclasses.field(default_factory=dict)
    pinned: frozenset[str] = frozenset()
    trained: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    slices: int | None = None

    @property
    def by_layer(self) -> bool:
        """Whether Python loops over the layers and brings each one to the device."""
        return bool(self.streamed or self.trained)

    @classmethod
    def create(
        cls, weights: str, graph: nnx.GraphDef, plan: RestorePlan
    ) -> "WeightStorage":
        """Creates the storage of a checkpoint's weights of blocks.

        `weights` is `Pretrained.weights`.
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

    def on_mesh(self, placement: Placement) -> "WeightStorage":
        """Returns the storage of which each device streams its shard."""
        streamed = {}
        for path, weight in self.streamed.items():
            sharding = placement.shardings[path]
            layer = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
            streamed[path] = dataclasses.replace(weight, sharding=layer)
        return dataclasses.replace(self, streamed=streamed)

    def in_training(
        self, trained_weights: str, trained: Collection[str], plan: RestorePlan
    ) -> "WeightStorage":
        """Returns the storage in a run that trains some parameters."""
        if trained_weights == HOST:
            return self.with_trained(trained, plan)
        return self.without_trained(trained)

    def reader(self) -> LayerReader:
        """Returns the reader that brings layers to the device in a training step."""
        return LayerReader(slices=self.slices)

    def with_trained(
        self, trained: Iterable[str], plan: RestorePlan
    ) -> "WeightStorage":
        """Returns the storage with the checkpoint's trained weights in host memory."""
        here = {p: p in self.streamed for p in trained if p in plan.restored}
        streamed = {p: x for p, x in self.streamed.items() if p not in here}
        return dataclasses.replace(self, streamed=streamed, trained=here)

    def without_trained(self, trained: Container[str]) -> "WeightStorage":
        """Returns the storage without trained weights, which are on the device.

        Raises:
          InputError: if no other weight is left.
        """
        streamed = {p: x for p, x in self.streamed.items() if p not in trained}
        pinned = frozenset(path for path in self.pinned if path not in trained)
        if (self.streamed or self.pinned) and not (streamed or pinned):
            raise InputError(
                "the parameter groups train every weight of the blocks, so none can be "
                "stored elsewhere: give "
                f"{how_to_set('Pretrained.weights', DEVICE)}, let Run.groups match "
                "only prompts or adapters, or, to train weights in host memory, give "
                f"{how_to_set('Pretrained.weights', STREAMED)} and "
                f"{how_to_set('Pretrained.trained_weights', HOST)}"
            )
        return dataclasses.replace(self, streamed=streamed, pinned=pinned)

    def with_streamed(
        self, parameters: Mapping[str, Array | np.ndarray]
    ) -> dict[str, Any]:
        """Adds streamed weights to parameters, and streams those in host memory."""
        every: dict[str, Any] = {**self.streamed, **parameters}
        for path, stacked in self.trained.items():
            if stacked and path in every:
                every[path] = LayeredWeight.from_array(path, np.asarray(every[path]))
        return every

    def abstract_streamed(self) -> dict[str, Any]:
        """Returns shapes and dtypes of the streamed weights, by path."""
        return {path: weight.abstract for path, weight in self.streamed.items()}

    def reject_streamed(self, action: str) -> None:
        """Rejects an action that reads the weights too often to stream them.

        The message begins with `action`, a clause.
        """
        if self.by_layer:
            raise InputError(
                f"{action}, but Pretrained.weights is 'streamed', so each read is a "
                "pass over the checkpoint's files: set it to 'pinned_host' or 'device'"
            )

    def put(self, path: str, array: np.ndarray) -> Array | np.ndarray:
        """Puts a parameter into host memory or on the device."""
        if path in self.trained:
            return np.array(array, np.float32)
        if path in self.pinned:
            return host_memory.put_in_pinned_memory(array)
        return jax.device_put(array)
