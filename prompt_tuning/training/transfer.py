"""Start a run from another run's trained parameters, or from an adapter in a file.

Every run counts its own steps, so schedules start anew. The optimizer's moments are
carried over with the step counts that belong to them (see `optimizer_transfer`).
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Array

from prompt_tuning.adapters.adapter import (
    HEAD_PATH,
    NO_TOKENS,
    ROWS_PATH,
    TOKENS,
    Adapter,
    Arrays,
    TokenIds,
)
from prompt_tuning.adapters.peft.lora_biases import BIAS
from prompt_tuning.adapters.peft.shared_parameters import trained_as_one
from prompt_tuning.adapters.prompt_files import find_checkpoint
from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.orbax_arrays import Leaf, like
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.pretrained.frozen_fingerprint import fingerprint
from prompt_tuning.pretrained.source import read_frozen
from prompt_tuning.prompts.adapter_files import read_adapter, read_scalings
from prompt_tuning.prompts.adapter_kinds import find_kind
from prompt_tuning.prompts.dora import LORA_A, MAGNITUDE
from prompt_tuning.prompts.low_rank import LowRank
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.streaming.layered_weights import LayeredWeight
from prompt_tuning.training.optimizer_transfer import CarriedState, carry_over
from prompt_tuning.training.run_directory import recorded_model
from prompt_tuning.training.state import TrainState

LISTED = 10
Shapes = Mapping[str, Any]
"""Arrays or `jax.ShapeDtypeStruct`s by path."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransferSource:
    """Trained parameters from another run or from a file.

    `origin` is the file or folder; for a run, its `checkpoint`. `leaves` are float32
    arrays by this package's paths; arrays of a checkpoint in Orbax's format are read
    when they are put on a device. `scalings` of LoRAs are by projection, as far as they
    are known, like the fingerprint of their `frozen_model`. A PEFT adapter has trained
    `tokens` and a `task` type, which tells the problem of a class head.
    `trained_as_one` is a clause, for messages, about parameters that are one in PEFT
    but several here.
    """

    origin: str
    leaves: Mapping[str, Leaf]
    scalings: Mapping[str, float] = dataclasses.field(default_factory=dict)
    checkpoint: Path | None = None
    frozen_model: str | None = None
    trained_as_one: str | None = None
    tokens: TokenIds = NO_TOKENS
    task: str | None = None

    def read_optimizer(self) -> dict[str, Leaf]:
        """Reads the optimizer's leaves by key path; empty without a checkpoint."""
        if self.checkpoint is None:
            return {}
        return checkpoint_files.read_optimizer_leaves(self.checkpoint)

    @property
    def adapter(self) -> Adapter:
        """Returns the source as a single adapter.

        Raises:
          InputError: if it contains more than one.
        """
        leaves: Arrays = {path: np.asarray(leaf) for path, leaf in self.leaves.items()}
        rows = (ROWS_PATH, HEAD_PATH) if self.tokens.rows else ()
        others = {path: leaf for path, leaf in leaves.items() if path not in rows}
        kind = find_kind(others, self.origin) if others or not rows else TOKENS
        return Adapter(
            kind=kind,
            parameters=leaves,
            scalings=self.scalings,
            settings={} if self.task is None else {"task_type": self.task},
            tokens=self.tokens,
        )

    def with_model_path(self, paths: Iterable[str]) -> "TransferSource":
        """Moves a single prompt to the path of the model's only prompt.

        A file does not store the path of its vectors in the model; with dropout, for
        example, they are wrapped in another module.
        """
        paths = set(paths)
        prompts = [path for path in paths if "/prompt/" in path]
        if len(self.leaves) != 1 or len(prompts) != 1:
            return self
        ((path, leaf),) = self.leaves.items()
        if path in paths or "/prompt/" not in path:
            return self
        return dataclasses.replace(self, leaves={prompts[0]: leaf})

    def check_scalings(self, loras: Mapping[str, LowRank]) -> None:
        """Checks that the model scales its LoRAs by the same numbers."""
        for projection, scaling in self.scalings.items():
            lora = loras.get(projection)
            if lora is None or math.isclose(lora.scaling, scaling, rel_tol=1e-6):
                continue
            alpha = lora.alpha * scaling / lora.scaling
            raise InputError(
                f"{self.origin} multiplies the LoRA of {projection} by {scaling:g}, "
                f"and this model by {lora.scaling:g} (rank {lora.rank}, alpha "
                f"{lora.alpha:g}): set LoRA.alpha = {alpha:g} "
                f"for it ({how_to_set('LoRA.alpha', alpha)})"
            )


def read_source(
    path: Path, config: ModelConfig, model: Pretrained | None = None
) -> TransferSource:
    """Reads a run's best checkpoint, a checkpoint, a PEFT folder or a prompt file.

    `model` is compared with copies of its embeddings and head in a PEFT folder; None
    for a run's own checkpoint, which has no copies.
    """
    checkpoint, config = find_checkpoint(path), config.without_new_tokens
    if checkpoint is None:
        frozen = None if model is None else functools.partial(read_frozen, model)
        adapter = read_adapter(path, config, frozen)
        return TransferSource(
            origin=str(path),
            leaves=adapter.parameters,
            scalings=adapter.scalings,
            trained_as_one=trained_as_one(adapter, config),
            tokens=adapter.tokens,
            task=adapter.settings.get("task_type"),
        )
    state = checkpoint_files.verify(checkpoint)
    return TransferSource(
        origin=str(checkpoint),
        leaves=checkpoint_files.open_trained(checkpoint, state),
        scalings=read_scalings(checkpoint, state),
        checkpoint=checkpoint,
        frozen_model=recorded_model(checkpoint.parent.parent),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """The initial values of a run's trained parameters and optimizer state."""

    source: TransferSource
    trained: Shapes
    frozen: Shapes
    state: CarriedState = dataclasses.field(default_factory=CarriedState)

    @property
    def initial_values(self) -> dict[str, Leaf]:
        """The source's values for trained parameters, by path."""
        return {p: x for p, x in self.source.leaves.items() if p in self.trained}

    def check_model(
        self,
        restored: Mapping[str, Array | LayeredWeight],
        placement: Placement | None = None,
    ) -> None:
        """Warns if the source was trained with another frozen model."""
        theirs = self.source.frozen_model
        frozen = {p: x for p, x in restored.items() if p not in self.source.leaves}
        ours = fingerprint(frozen, placement)
        if theirs not in (None, ours):
            warnings.warn(
                f"{self.source.origin} was trained on another frozen model, or one in "
                f"another type: its fingerprint is {theirs}, and this one's {ours}",
                stacklevel=2,
            )

    def start(
        self, fresh: Parameters, optimizer: optax.GradientTransformation, key: jax.Array
    ) -> TrainState:
        """Creates the state before the first step."""
        started = {
            path: like(x, fresh[path]) for path, x in self.initial_values.items()
        }
        state = TrainState.create(fresh | started, optimizer, key)
        carried = self.state.insert_into(state.optimizer_state)
        return dataclasses.replace(state, optimizer_state=carried)

    def report(self) -> str:
        """Returns a table of the trained parameters, then the source's ignored ones."""
        started, kept = self.initial_values, self.state.paths
        rows = [("trained", "starts", "optimizer state")]
        for path, leaf in self.trained.items():
            how = "kept" if path in kept else "fresh"
            if path in self.state.shared_counts:
                how += f", with a step count of {self.state.shared_counts[path]}"
            values = "from it" if path in started else "fresh"
            rows.append((f"{path} {tuple(leaf.shape)}", values, how))
        widths = [max(len(row[column]) for row in rows) for column in range(2)]
        lines = [f"start_from {self.source.origin}"]
        lines += [f"  {a:{widths[0]}}  {b:{widths[1]}}  {c}" for a, b, c in rows]
        if self.state.shared_counts:
            lines.append(
                "  (a group has one step count, and treats all of its state as "
                "averages over that many steps: put parameters that start fresh in a "
                "separate ParameterGroup)"
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
    loras: Mapping[str, LowRank],
    optimizer: optax.GradientTransformation | None,
) -> Transfer:
    """Decides which parameters start from a source, without reading the model.

    Without `optimizer`, the run starts with a fresh optimizer state.

    Raises:
      InputError: if the run trains no parameter of the source, a shape differs, or a
        LoRA has another scaling.
    """
    if source.checkpoint is None:
        source = source.with_model_path([*trained, *frozen])
    started = source.leaves.keys() & trained.keys()
    if not started:
        raise InputError(
            f"{source.origin} contains no parameter that this run trains. It contains\n"
            f"{_listed(source.leaves)}\nand the run trains\n{_listed(trained)}"
        )
    for path in sorted(started):
        check_shape(source.origin, path, source.leaves[path], trained[path])
    _check_magnitudes(source, trained, started)
    _check_biases(source, trained)
    source.check_scalings(loras)
    if source.trained_as_one is not None:
        warnings.warn(
            f"{source.origin}: {source.trained_as_one}: this run computes the same at "
            "its start, but trains more parameters than PEFT would",
            stacklevel=2,
        )
    state = CarriedState()
    moments = {} if optimizer is None else source.read_optimizer()
    if optimizer is not None and moments:
        leaves = {
            path: jax.ShapeDtypeStruct(leaf.shape, np.float32)
            for path, leaf in trained.items()
        }
        template = jax.eval_shape(optimizer.init, leaves)
        state = carry_over(moments, template, [p for p in trained if p in started])
    return Transfer(source=source, trained=trained, frozen=frozen, state=state)


def _check_magnitudes(
    source: TransferSource, trained: Shapes, started: Collection[str]
) -> None:
    """Checks that DoRA starts from DoRA, and LoRA from LoRA."""
    for path in started:
        magnitude = path.removesuffix(LORA_A) + MAGNITUDE
        found = magnitude in source.leaves
        if path.endswith(LORA_A) and found != (magnitude in trained):
            has, trains = ("DoRA", "LoRA") if found else ("LoRA", "DoRA")
            raise InputError(
                f"{source.origin} has {has} at {path.removesuffix(LORA_A)}, and this "
                f"run trains {trains}, which would compute something else at its start:"
                f" set LoRA.dora = {found} ({how_to_set('LoRA.dora', found)})"
            )


def _check_biases(source: TransferSource, trained: Shapes) -> None:
    """Checks that a run that starts from trained biases trains them, too."""
    others = [x for x in source.leaves if x.endswith(BIAS) and x not in trained]
    if others:
        raise InputError(
            f"{source.origin} has trained biases, such as {others[0]}, which this run "
            "does not train, so it would compute something else at its start: set "
            f"LoRA.bias to its choice ({how_to_set('LoRA.bias', 'all')})"
        )


def check_shape(origin: str, path: str, leaf: Any, expected: Any) -> None:
    """Checks that a parameter has the model's shape."""
    if tuple(leaf.shape) != tuple(expected.shape):
        raise InputError(
            f"{origin} contains {path} of shape {tuple(leaf.shape)}, but the model "
            f"has shape {tuple(expected.shape)}; was it tuned on another model, or "
            "with another prompt length or rank?"
        )


def _listed(shapes: Shapes) -> str:
    rows = [f"  {path} {tuple(leaf.shape)}" for path, leaf in shapes.items()]
    more = len(rows) - LISTED
    return "\n".join(rows[:LISTED] + ([f"  and {more} more"] if more > 0 else []))
