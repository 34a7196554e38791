"""Repeat a run, and compare its trained parameters with the recorded ones."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.config.config_values import CONFIG_FILE
from prompt_tuning.config.gin_sources import MAXIMUM_BYTES
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import read_limited
from prompt_tuning.training.continuation import state_at
from prompt_tuning.training.fingerprint_log import FINGERPRINTS_FILE, read_fingerprints
from prompt_tuning.training.loop import train
from prompt_tuning.training.opening import open_run
from prompt_tuning.training.progress import Reporter
from prompt_tuning.training.run_directory import check_model
from prompt_tuning.training.step_fingerprints import as_text, fingerprint
from prompt_tuning.training.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class Verification:
    """Whether a repeated run has the same trained parameters.

    Attributes:
      step: the last compared step, or the first one that differs.
      compared: number of compared fingerprints.
      difference: what differs, as a sentence; None if all bits are the same.
    """

    step: int
    compared: int
    difference: str | None = None


def steps_to_verify(directory: Path, limit: int | None) -> dict[int, str]:
    """Returns the recorded fingerprints of a run by step, up to `limit`.

    Raises:
      InputError: if there are none.
    """
    recorded = read_fingerprints(directory)
    found = {k: x for k, x in recorded.items() if limit is None or k <= limit}
    if any(found):
        return found
    after = min(filter(None, recorded), default=None)
    raise InputError(
        f"{directory / FINGERPRINTS_FILE} has no fingerprint of a step to compare "
        "with: train the run until its log has a line"
        if after is None
        else f"--steps is {limit}, and the first step with a recorded fingerprint is "
        f"{after}: give at least {after}"
    )


def verify_run(
    run: Run,
    scratch: Path,
    recorded: Mapping[int, str],
    make_reporter: Callable[[int], Reporter],
) -> Verification:
    """Repeats a run, and compares the fingerprints of its trained parameters.

    It stops at the first step that differs. Evaluations are skipped: nothing that is
    learned depends on them. The directory of the recorded run is only read.
    """
    directory = Path(run.directory)
    config = read_limited(directory / CONFIG_FILE, MAXIMUM_BYTES).decode()
    trainer = open_run(
        dataclasses.replace(
            run,
            directory=str(scratch),
            steps=max(recorded),
            evaluation=None,
            early_stopping=0,
        )
    )
    check_model(directory, trainer.fingerprint)
    kept = _check_kept(trainer, directory, recorded)
    if kept is not None:
        return kept
    comparison = _Comparison(recorded, scratch / FINGERPRINTS_FILE)
    train(
        trainer,
        config=config,
        make_reporter=make_reporter,
        callbacks=[comparison.differs],
    )
    return comparison.result()


def _check_kept(
    trainer: Trainer, directory: Path, recorded: Mapping[int, str]
) -> Verification | None:
    """Compares the newest checkpoint that has a recorded fingerprint with it.

    Returns None if they agree, or there is no such checkpoint.
    """
    store = CheckpointStore(directory, read_only=True)
    steps = [step for step in store.steps() if step in recorded]
    if not steps:
        return None
    step, name = steps[-1], f"the checkpoint of step {steps[-1]}"
    try:
        state = state_at(trainer, store, step)
    except InputError as problem:
        return Verification(step, 1, f"{name} cannot be read: {problem}")
    if as_text(fingerprint(state.trained)) == recorded[step]:
        return None
    return Verification(
        step, 1, f"{name} has other bits than those that the run recorded"
    )


class _Comparison:
    """Compares the fingerprints of a run in progress with recorded ones."""

    def __init__(self, recorded: Mapping[int, str], file: Path):
        self._recorded, self._file = recorded, file
        self._read = 0
        self._step, self._compared = 0, 0
        self._different: int | None = None

    def differs(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Whether a fingerprint differs; a callback of the new run."""
        with self._file.open("rb") as lines:
            lines.seek(self._read)
            for line in lines:
                self._read += len(line)
                self._compare(**json.loads(line))
        return self._different is not None

    def _compare(self, step: int, trained: str) -> None:
        if step not in self._recorded or self._different is not None:
            return
        self._step, self._compared = step, self._compared + 1
        if trained != self._recorded[step]:
            self._different = step

    def result(self) -> Verification:
        """Returns the outcome at the end of the new run."""
        self.differs(0, {})
        if self._different is None:
            return Verification(self._step, self._compared)
        at = f"after step {self._different}" if self._different else "at the start"
        last_same = max(
            (k for k in self._recorded if k < self._different), default=None
        )
        same = (
            "" if last_same is None else f"; they are the same after step {last_same}"
        )
        return Verification(
            self._different,
            self._compared,
            f"the trained parameters {at} have other bits{same}",
        )
