"""The file of a run's answers and rewards, `rollouts.jsonl`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.step_log import StepLog, read_lines
from prompt_tuning.core.typed_json import JsonObject

ROLLOUTS_FILE = "rollouts.jsonl"
MAXIMUM_LOG = 2**32
"""Maximum size of the file in bytes."""


class RolloutLog:
    """Appends one JSON object per answer; a resumed run repeats none.

    Attributes:
      equal: number of consecutive rollouts at the end of the file that taught nothing.

    Args:
      directory: run directory.
      after_step: number of completed steps; later answers are removed.
      resume: called with each answer that is kept.
      last: step of the last rollout, if the next ones depend on it.

    Raises:
      InputError: if the file is a link out of the directory, is damaged, or does not
        end with step `last`.
    """

    def __init__(
        self,
        directory: Path,
        after_step: int,
        resume: Callable[[JsonObject], None] | None = None,
        last: int | None = None,
    ):
        file, self.equal = directory / ROLLOUTS_FILE, 0
        kept: list[bytes] = []
        learned: dict[int, bool] = {}
        for line, (content, step, advantage) in read_lines(file, _parse, MAXIMUM_LOG):
            if step <= after_step:
                kept.append(line)
                learned[step] = learned.get(step, False) or advantage != 0
                if resume is not None:
                    resume(content)
        found = max(learned, default=0)
        if last not in (None, found):
            raise InputError(
                f"{file} ends with step {found}, expected {last}: the next prompts "
                "depend on it (Rollouts.resample and replay); restore the file, or "
                "start again in another directory"
            )
        for step in sorted(learned, reverse=True):
            if learned[step]:
                break
            self.equal += 1
        self._lines = StepLog(file, kept)

    def write(self, answers: Sequence[Mapping[str, Any]], *, equal: bool) -> None:
        """Writes the fields of a rollout's answers; `equal` if it taught nothing."""
        self.equal = self.equal + 1 if equal else 0
        self._lines.write(*answers)

    def sync(self) -> None:
        """Flushes the lines to disk before their step's checkpoint."""
        self._lines.sync()

    def close(self) -> None:
        """Closes the file."""
        self._lines.close()


def _parse(answer: JsonObject) -> tuple[JsonObject, int, float | None]:
    """Returns an answer, its step, and its advantage if it has one."""
    return answer, answer.integer("step"), answer.number("advantage", None)
