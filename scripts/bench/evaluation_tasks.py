"""The texts that both sides of the evaluation cases read, as token ids.

This module has only light imports, so that PEFT's process can use it.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

Rows = list[list[int]]

EXACT_MATCH, RANKING, LOSS = TASKS = ("exact_match", "ranking", "loss")
METRICS = {EXACT_MATCH: "exact_match", RANKING: "label_accuracy", LOSS: "loss"}
"""The metric of each task that both sides must agree on."""

NEW_TOKENS = 32
BATCH = 64


@dataclasses.dataclass(frozen=True)
class Task:
    """Rows of one task.

    Attributes:
      given: tokens before the answer, of each row.
      answers: tokens that are compared, ranked or learned, of each row.
      labels: tokens of each label; empty for tasks without labels.
      label_texts: text of each label.
    """

    given: Rows
    answers: Rows
    labels: Rows = dataclasses.field(default_factory=list)
    label_texts: Sequence[str] = ()


def write_task(task: Task, folder: Path, name: str) -> None:
    """Writes a task to a folder."""
    (folder / f"{name}.json").write_text(json.dumps(dataclasses.asdict(task)))


def read_task(folder: Path, name: str) -> Task:
    """Reads a task that `write_task` wrote."""
    return Task(**json.loads((folder / f"{name}.json").read_text()))
