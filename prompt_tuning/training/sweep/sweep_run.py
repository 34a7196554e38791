"""A sweep: `K` runs trained together over one copy of a frozen model.

Each member is an ordinary run with its own directory inside the sweep's: evaluate, use
and resume it like any other. A killed sweep resumes from the newest step with intact
checkpoints of all members, and ends with the same bits. A member is dropped if its loss
or parameters are no longer finite; the others continue.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.config.config_changes import ConfigChanges
from prompt_tuning.config.config_values import IDENTITY_FILE
from prompt_tuning.config.run import Run
from prompt_tuning.core import atomic_files, typed_json
from prompt_tuning.core.errors import InputError, NotFiniteError, shown
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.training.continuation import resumed_message, state_at
from prompt_tuning.training.loop import loop
from prompt_tuning.training.progress import Callback, Reporter
from prompt_tuning.training.recorder import Member
from prompt_tuning.training.run_directory import check_steps, claim_run, open_store
from prompt_tuning.training.trainer import Trainer
from prompt_tuning.training.training_result import TrainingResult

DIVERGED_FILE = "diverged.json"
SWEEP_FILE = "sweep.json"


@dataclasses.dataclass(frozen=True)
class SweepMember:
    """A member, ready to step.

    Attributes:
      name: name of its directory.
      varies: settings that differ among members, as the user wrote them.
      trainer: its trainer, which shares the frozen parameters.
      config: operative config of its run.
    """

    name: str
    varies: Mapping[str, str]
    trainer: Trainer
    config: str

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.trainer.run.directory)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Runs, ready to step together.

    Attributes:
      directory: directory of the sweep, with the members' directories inside.
      members: the runs.
    """

    directory: Path
    members: tuple[SweepMember, ...]

    @property
    def run(self) -> Run:
        """The first member's run; all members share its steps, data and model."""
        return self.members[0].trainer.run

    def report(self) -> str:
        """The first member's report, and a line about what the members share."""
        rows = "all read the same batches"
        if self.run.rollouts is not None:
            rows = "each learns from its own answers"
        elif len({m.trainer.run.order_seed for m in self.members}) > 1:
            rows = (
                "each reads its own batches, padded to the same shape (with "
                "Run.data_seed they would share batches)"
            )
        count = f"{len(self.members)} members, one copy of the frozen parameters"
        return f"{self.members[0].trainer.report()}\n{count}; {rows}"


def train_sweep(
    sweep: Sweep,
    *,
    record: dict[str, Any] | None = None,
    make_reporter: Callable[[int], Reporter],
    callbacks: Sequence[Callback] = (),
) -> tuple[TrainingResult, dict[str, str]]:
    """Starts or resumes a sweep, and runs it to the end or until SIGTERM or SIGINT.

    The caller holds the directories (see `hold_run`).

    Args:
      sweep: the prepared members.
      record: JSON that is stored with each config, such as compiler flags.
      make_reporter: returns a progress reporter, given the number of steps already
        done.
      callbacks: functions called with a step and its logged metrics. If one returns
        True, all members save and stop.

    Returns:
      the first member's result, and the reason for each dropped member, by name.

    Raises:
      InputError: if a directory belongs to another run or sweep, or the members have no
        intact checkpoint of the same step.
    """
    changes = _claim(sweep, record or {})
    # One more than a run keeps: a kill may come between the saves of two members, and
    # the previous checkpoint of the one saved first must still exist.
    stores = [open_store(member.trainer.run, spare=1) for member in sweep.members]
    messages: list[str] = []
    done, diverged = common_step(sweep.members, stores, messages.append)
    check_steps(sweep.directory, done, sweep.run.steps)
    members, states = [], []
    for member, store in zip(sweep.members, stores, strict=True):
        dropped, trainer = member.name in diverged, member.trainer
        members.append(
            Member(
                trainer,
                store,
                member.config,
                changes[member.name],
                member.name,
                dropped,
            )
        )
        resumes = done and not dropped
        states.append(state_at(trainer, store, done) if resumes else trainer.start)
        if not dropped:
            # Left over if all members resume from before it was dropped.
            (member.directory / DIVERGED_FILE).unlink(missing_ok=True)

    def drop(member: Member, step: int, problem: NotFiniteError) -> None:
        diverged[member.name] = str(problem)
        content = {"step": step, "reason": str(problem)}
        atomic_files.replace_file(
            Path(member.trainer.run.directory) / DIVERGED_FILE,
            json.dumps(content, indent=1) + "\n",
        )

    results = loop(
        members,
        tuple(states),
        done,
        make_reporter=make_reporter,
        messages=messages,
        callbacks=callbacks,
        drop=drop,
    )
    return results[0], diverged


def _claim(sweep: Sweep, record: dict[str, Any]) -> dict[str, ConfigChanges]:
    """Claims the directories, or checks that they belong to this sweep.

    Returns:
      by member, the differences from its recorded config.
    """
    names = [member.name for member in sweep.members]
    file = sweep.directory / SWEEP_FILE
    if (sweep.directory / IDENTITY_FILE).exists():
        raise InputError(
            f"{sweep.directory} belongs to a single run; choose another directory: "
            f"{how_to_set('Run.directory', 'DIRECTORY')}"
        )
    if file.exists():
        previous = list(typed_json.read_object(file).nested("members").values)
        if previous != names:
            raise InputError(
                f"{sweep.directory} belongs to a sweep with other members: found "
                f"{shown(', '.join(previous))}; this one has {', '.join(names)}. "
                f"Choose another directory: {how_to_set('Run.directory', 'DIRECTORY')}"
            )
    frozen_model = sweep.members[0].trainer.fingerprint
    # Existing directories first: if one is refused, nothing has been created yet.
    changes = {
        member.name: claim_run(
            member.trainer.run,
            member.trainer.model,
            member.config,
            frozen_model,
            record,
        )
        for member in sorted(
            sweep.members,
            key=lambda member: not (member.directory / IDENTITY_FILE).exists(),
        )
    }
    if not file.exists():
        content = {
            "members": {m.name: {"varies": dict(m.varies)} for m in sweep.members}
        }
        atomic_files.replace_file(file, json.dumps(content, indent=1) + "\n")
    return changes


def common_step(
    members: Sequence[SweepMember],
    stores: Sequence[CheckpointStore],
    say: Callable[[str], None],
) -> tuple[int, dict[str, str]]:
    """Finds the step that a sweep resumes from, and the members dropped before it.

    Args:
      members: members of the sweep.
      stores: checkpoints of each member.
      say: receives messages about damaged checkpoints and the step.

    Returns:
      the newest step with intact checkpoints of all members, 0 if some have none yet;
      and by name, the reasons for members dropped at or before that step.

    Raises:
      InputError: if every member has checkpoints, but none of the same step.
    """
    records = {m.name: read_diverged(m.directory) for m in members}
    dropped = {name: record for name, record in records.items() if record is not None}
    while True:
        live = [
            (member, store)
            for member, store in zip(members, stores, strict=True)
            if member.name not in dropped
        ]
        step = (
            _newest_common(live, say) if live else max(s for s, _ in dropped.values())
        )
        # A member dropped after this step takes part again, which may make the common
        # step even older.
        revived = [name for name, (at, _) in dropped.items() if at > step]
        if not revived:
            break
        for name in revived:
            del dropped[name]
    if step and len(dropped) < len(members):
        say(resumed_message(step, members[0].trainer.run.steps))
    return step, {name: reason for name, (_, reason) in dropped.items()}


def _newest_common(
    live: Sequence[tuple[SweepMember, CheckpointStore]], say: Callable[[str], None]
) -> int:
    """Returns the newest step with intact checkpoints of all live members, or 0."""
    steps_of_members = [set(store.steps()) for _, store in live]
    for step in sorted(set.intersection(*steps_of_members), reverse=True):
        try:
            for _, store in live:
                checkpoint_files.verify(store.folder / f"checkpoint_{step}")
        except InputError as problem:
            say(f"{problem}; step {step} is skipped")
        else:
            return step
    # A kill between the first saves leaves some members without a checkpoint.
    if all(steps_of_members) or max(map(len, steps_of_members)) > 1:
        raise InputError(
            "the members have no intact checkpoint of the same step: "
            + "; ".join(
                f"{member.name} has {sorted(steps)}"
                for (member, _), steps in zip(live, steps_of_members, strict=True)
            )
            + ". Resume each one separately (prompt-tuning train), or start the sweep "
            "in another directory"
        )
    if any(steps_of_members):
        say("starting from the beginning: not every member has a checkpoint")
    return 0


def read_diverged(directory: Path) -> tuple[int, str] | None:
    """Returns the step at which a member was dropped, and why; None if it was not."""
    file = directory / DIVERGED_FILE
    if not file.exists():
        return None
    record = typed_json.read_object(file)
    return record.integer("step"), record.text("reason")
