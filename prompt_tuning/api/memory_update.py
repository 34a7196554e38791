"""Update a memory when its text changes, and check that old answers still hold."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from prompt_tuning.adapters.adapter import PREFIX_PATH
from prompt_tuning.api.memory_budget import EPOCHS, MemoryPlan
from prompt_tuning.api.model import Model
from prompt_tuning.api.tune import TunedModel, load_sharing
from prompt_tuning.config.deferred_factories import Configurable, Configured
from prompt_tuning.core.atomic_files import write_file
from prompt_tuning.core.errors import InputError
from prompt_tuning.losses.context_distillation import ContextDistillation
from prompt_tuning.texts.memory_comparison import key_value_prefix
from prompt_tuning.texts.study_update import OldStudy, update_study
from prompt_tuning.texts.text_study import TextStudy

STUDY, UPDATE = "study", "update.json"


def study_of(memory: TunedModel) -> OldStudy:
    """Reads the rows that a memory learned from.

    Raises:
      InputError: if the model has no memory of a text, or its rows are gone.
    """
    folder, objective = memory.directory, memory.run.objective
    prefix = key_value_prefix(memory.trained)
    context = isinstance(objective, ContextDistillation) and objective.context
    if folder is None or prefix is None or context is False:
        raise InputError(
            f"{folder or 'a memory'} is no run that made a memory of a text, whose "
            "rows could be learned again: give the directory of a run of remember"
        )
    rows = folder / STUDY
    if not rows.exists():  # memories of several sizes share their rows
        rows = folder.parent / STUDY
    return OldStudy.read(rows, context or None)


@runtime_checkable
class UpdatePlan(MemoryPlan, Protocol):
    """How to write and learn rows about a text."""

    @property
    def model(self) -> Model:
        """The frozen model."""
        ...

    @property
    def study(self) -> TextStudy:
        """Settings of the rows."""
        ...

    @property
    def batch_size(self) -> int:
        """Rows per step."""
        ...


@dataclasses.dataclass(frozen=True)
class OldMemory:
    """A memory of an earlier version of a text.

    Attributes:
      memory: the run.
      slots: number of slots.
      study: rows that it learned from.
    """

    memory: TunedModel
    slots: int
    study: OldStudy

    @classmethod
    def open(cls, folder: Path, model: Model, slots: int | None) -> "OldMemory":
        """Opens a memory to start from.

        Raises:
          InputError: if the folder has no memory, or one of another model or length.
        """
        memory = load_sharing(folder, [model])
        study, prefix = study_of(memory), memory.trained[PREFIX_PATH]
        if memory.run.model != model.run.model:
            raise InputError(
                f"{folder} is a memory of {memory.run.model.checkpoint}, and this is "
                f"{model.run.model.checkpoint}, or it is read with other settings: a "
                "prefix acts on its own model alone"
            )
        length = prefix.shape[2]
        if slots not in (None, length):
            raise InputError(
                f"{folder} has {length} slots, and this memory is to have {slots}: "
                "leave out the number of slots, or remember the text anew"
            )
        return cls(memory, length, study)

    @property
    def prefix(self) -> Configured:
        """Settings of a prefix that starts from the old one."""
        frozen = int(self.slots > 1)
        return Configurable("KeyValuePrefix")(length=self.slots, frozen_slots=frozen)

    def teacher_text(self, text: str | None) -> str | None:
        """Returns the text that the teacher reads before each row; None for chunks.

        Args:
          text: the text if the model can read all of it; else None.

        Raises:
          InputError: if the old teacher read the whole text and the new text is too
            long for that.
        """
        if self.study.text is None:
            return None
        if text is None:
            raise InputError(
                "the text has become too long for the model to read it whole, as the "
                "old memory's teacher did: leave out what to start from, to remember "
                "it in chunks"
            )
        return text

    def train(
        self,
        plan: UpdatePlan,
        rows: Path,
        text: str,
        steps: int | None,
        *,
        progress: bool,
        **settings: Any,
    ) -> TunedModel:
        """Writes rows about what is new, trains on them, and compares both memories.

        Args:
          plan: how rows are written and learned.
          rows: folder of the rows.
          text: the new text.
          steps: number of steps; None to read each row `EPOCHS` times.
          progress: whether to show progress.
          settings: other settings of `tune`.
        """
        model = plan.model
        written = model.prompted, model.parameters
        update = update_study(rows, self.study, text, plan.study, *written)
        if progress:
            print(f"{update.new} rows about what is new, and {update.old} old rows")
        if steps is None:
            steps = max(EPOCHS * (update.new + update.old) // plan.batch_size, 1)
        start = str(self.memory.run.directory)
        shown = {"progress": progress, "start_from": start}
        tuned = plan.train(update.files, steps, **shown, **settings)
        complete = tuned.result is None or tuned.result.finished
        if update.kept is not None and complete:
            compare_update(self.memory, tuned, update.kept, progress=progress)
        return tuned


def compare_update(
    before: TunedModel, after: TunedModel, rows: Path, *, progress: bool
) -> None:
    """Measures the old and the new memory on old held-out rows with the new teacher."""
    measured = {
        name: model.evaluate([str(rows)], exact_match=True)
        for name, model in (
            ("before", after.with_parameters(before.trained)),
            ("after", after),
        )
    }
    folder = Path(after.run.directory)
    write_file(
        folder / UPDATE, (json.dumps(measured, indent=2) + "\n").encode(), force=True
    )
    if progress:
        for name, values in measured.items():
            print(
                f"old held-out rows {name} the update: KL {values['loss']:.4f}, "
                f"accuracy {values['accuracy']:.1%}, exact match "
                f"{values['exact_match']:.1%}"
            )
