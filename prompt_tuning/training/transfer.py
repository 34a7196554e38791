"""Starting a run from what another one trained, or from an adapter in a file.

Every run counts its own steps: schedules begin again. What the optimiser has averaged
goes on with the steps that it averages over (see `moments`).
"""

import dataclasses
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array

from prompt_tuning.adapters.adapter import Adapter, Arrays
from prompt_tuning.adapters.adapter_files import SCALINGS, kind_of, read_adapter
from prompt_tuning.adapters.prompt_files import find_checkpoint
from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.orbax_arrays import Leaf, like
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.prompts.projection_adapters import LoRA
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.streaming.layered_weights import LayeredWeight
from prompt_tuning.training.optimizer_transfer import CarriedState, carry_over
from prompt_tuning.training.run_directory import recorded_model
from prompt_tuning.training.state import TrainState, fingerprint

LISTED = 10
Shapes = Mapping[str, Any]
"""Arrays or `jax.ShapeDtypeStruct`s by path."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferSource:
    """Trained parameters from elsewhere.

    Attributes:
      origin: the file or folder; of a run the checkpoint.
      leaves: float32 arrays by our paths; of a checkpoint in orbax's form they are
        read where they are put.
      scalings: by projection, what each LoRA was multiplied by, where that is known.
      checkpoint: the directory that it is; None where there is none.
      frozen_model: the fingerprint of what they were trained beside, if known.
    """

    origin: str
    leaves: Mapping[str, Leaf]
    scalings: Mapping[str, float] = dataclasses.field(default_factory=dict)
    checkpoint: Path | None = None
    frozen_model: str | None = None

    def read_optimizer(self) -> dict[str, Leaf]:
        """The optimiser's leaves by place; nothing where there is no checkpoint."""
        if self.checkpoint is None:
            return {}
        return checkpoint_files.read_optimizer_leaves(self.checkpoint)

    @property
    def adapter(self) -> Adapter:
        """The one adapter that it is.

        Raises:
          InputError: if it is several.
        """
        leaves: Arrays = {path: np.asarray(leaf) for path, leaf in self.leaves.items()}
        kind = kind_of(leaves, self.origin)
        return Adapter(kind=kind, parameters=leaves, scalings=self.scalings)

    def with_model_path(self, paths: Iterable[str]) -> "TransferSource":
        """The same with a lone prompt where the model has its only one.

        A file does not say where its vectors belong; with dropout, for one, they are
        not the prompt itself but in it.
        """
        paths = set(paths)
        prompts = [path for path in paths if "/prompt/" in path]
        if len(self.leaves) != 1 or len(prompts) != 1:
            return self
        ((path, leaf),) = self.leaves.items()
        if path in paths or "/prompt/" not in path:
            return self
        return dataclasses.replace(self, leaves={prompts[0]: leaf})

    def check_scalings(self, loras: Mapping[str, LoRA]) -> None:
        """Refuses LoRAs that the model would multiply by another number.

        Args:
          loras: the model's, by projection.

        Raises:
          InputError: with what to set.
        """
        for projection, scaling in self.scalings.items():
            lora = loras.get(projection)
            if lora is None or math.isclose(lora.scaling, scaling, rel_tol=1e-6):
                continue
            alpha = lora.alpha * scaling / lora.scaling
            raise InputError(
                f"{self.origin} multiplies the LoRA of {projection} by {scaling:g}, "
                f"and this model by {lora.scaling:g} (rank {lora.rank}, alpha "
                f"{lora.alpha:g}): set LoRA.alpha = {alpha:g} for it"
            )


def read_source(path: Path, config: ModelConfig) -> TransferSource:
    """Reads a run's best checkpoint, a checkpoint, a PEFT folder or a prompt's file.

    Args:
      path: of any of them.
      config: the frozen model that it is for.

    Raises:
      InputError: if there is nothing there that can be read for this model.
    """
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        adapter = read_adapter(path, config)
        return TransferSource(
            origin=str(path), leaves=adapter.parameters, scalings=adapter.scalings
        )
    state = checkpoint_files.verify(checkpoint)
    return TransferSource(
        origin=str(checkpoint),
        leaves=checkpoint_files.open_trained(checkpoint, state),
        scalings=state["extra"].get(SCALINGS, {}),
        checkpoint=checkpoint,
        frozen_model=recorded_model(checkpoint.parent.parent),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """What a run's trained parameters start from.

    Attributes:
      source: where that comes from.
      trained: all parameters that the run trains.
      frozen: all others of its model.
      state: what goes on of the optimiser's state.
    """

    source: TransferSource
    trained: Shapes
    frozen: Shapes
    state: CarriedState = dataclasses.field(default_factory=CarriedState)

    @property
    def initial_values(self) -> dict[str, Leaf]:
        """The values that the source gives, by path."""
        return {p: x for p, x in self.source.leaves.items() if p in self.trained}

    def check_model(
        self,
        restored: Mapping[str, Array | LayeredWeight],
        placement: Placement | None = None,
    ) -> None:
        """Warns if the source was trained beside another frozen model.

        Args:
          restored: the parameters that this run's model has from its checkpoint.
          placement: where they lie on a mesh; None on one device.
        """
        found = self.source.frozen_model
        frozen = {p: x for p, x in restored.items() if p not in self.source.leaves}
        ours = fingerprint(frozen, placement)
        if found not in (None, ours):
            warnings.warn(
                f"{self.source.origin} was trained on another frozen model, or one in "
                f"another type: its fingerprint is {found}, and this one's {ours}",
                stacklevel=2,
            )

    def start(
        self,
        fresh: Parameters,
        optimizer: optax.GradientTransformation,
        key: jax.Array,
    ) -> TrainState:
        """The state before the first step.

        Args:
          fresh: the trained parameters as they would start without the source.
          optimizer: of them.
          key: of the run.
        """
        started = {
            path: like(x, fresh[path]) for path, x in self.initial_values.items()
        }
        state = TrainState.create(fresh | started, optimizer, key)
        carried = self.state.insert_into(state.optimizer_state)
        return dataclasses.replace(state, optimizer_state=carried)

    def report(self) -> str:
        """A table of trained parameters, then what of the source is ignored."""
        started, kept = self.initial_values, self.state.paths
        rows = [("trained", "starts", "optimiser state")]
        for path, leaf in self.trained.items():
            how = "kept" if path in kept else "fresh"
            if path in self.state.shared_counts:
                how += f", beside a step count of {self.state.shared_counts[path]}"
            values = "from it" if path in started else "fresh"
            rows.append((f"{path} {tuple(leaf.shape)}", values, how))
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [f"start_from {self.source.origin}"]
        lines += [f"  {a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in rows]
        if self.state.shared_counts:
            lines.append(
                "  (a group has one step count, and takes all its state for averages "
                "of so many: give what starts apart a ParameterGroup of its own)"
            )
        ignored = [
            f"  {path} {leaf.shape}: "
            + ("frozen in this run" if path in self.frozen else "not in this model")
            for path, leaf in self.source.leaves.items()
            if path not in started
        ]
        if ignored:
            lines += ["ignored, in the source but not trained here:", *ignored]
        return "\n".join(lines)


def plan_transfer(
    source: TransferSource,
    trained: Shapes,
    frozen: Shapes,
    loras: Mapping[str, LoRA],
    optimizer: optax.GradientTransformation | None,
) -> Transfer:
    """Decides what starts from a source; nothing of the model is read.

    Args:
      source: what there is.
      trained: what the run trains.
      frozen: all else in its model.
      loras: of the model, by projection.
      optimizer: whose state is to go on; None to start it afresh.

    Raises:
      InputError: if nothing of the source is trained here, a shape is another, or a
        LoRA is multiplied by another number.
    """
    if source.checkpoint is None:
        source = source.with_model_path([*trained, *frozen])
    started = source.leaves.keys() & trained.keys()
    if not started:
        raise InputError(
            f"{source.origin} holds nothing that this run trains. It holds\n"
            f"{_listed(source.leaves)}\nand the run trains\n{_listed(trained)}"
        )
    for path in sorted(started):
        check_shape(source.origin, path, source.leaves[path], trained[path])
    source.check_scalings(loras)
    state = CarriedState()
    moments = {} if optimizer is None else source.read_optimizer()
    if optimizer is not None and moments:
        leaves = {
            path: jax.ShapeDtypeStruct(leaf.shape, np.float32)
            for path, leaf in trained.items()
        }
        template = jax.eval_shape(optimizer.init, leaves)
        kept = [path for path in trained if path in started]
        state = carry_over(moments, template, kept)
    return Transfer(source=source, trained=trained, frozen=frozen, state=state)


def check_shape(origin: str, path: str, found: Any, expected: Any) -> None:
    """Refuses a parameter of another shape than the model's.

    Raises:
      InputError: with both.
    """
    if tuple(found.shape) != tuple(expected.shape):
        raise InputError(
            f"{origin} holds {path} of shape {tuple(found.shape)}, but the model has "
            f"shape {tuple(expected.shape)}; was it tuned on another model, or with "
            "another prompt length or rank?"
        )


def _listed(shapes: Shapes) -> str:
    rows = [f"  {path} {tuple(leaf.shape)}" for path, leaf in shapes.items()]
    more = len(rows) - LISTED
    return "\n".join(rows[:LISTED] + ([f"  and {more} more"] if more > 0 else []))
