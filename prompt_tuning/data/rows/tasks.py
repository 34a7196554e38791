"""Which of the `N` prompts of a multi-task model an example has: its task."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from prompt_tuning.core.errors import InputError

PROMPT_IDS = "prompt_ids"
"""The HDF5 data set that says it, unless another is named."""


@dataclasses.dataclass(frozen=True)
class TaskToken:
    """A token at the head of each example that says its task, and is no text.

    The token is dropped where the example is read, so lengths and weights are those of
    the rest. Its id is the task, or a sentinel's: `end - 1` stands for task 0, the id
    before it for task 1 and so on (T5's `<extra_id_0>` is 32,099).

    Attributes:
      end: one more than the id of the first sentinel; None where ids are tasks.
      at: where the token stands: behind BOS (1) where the tokenizer puts it before
        every text, else first.
    """

    end: int | None = None
    at: int = 0

    def tasks(self, ids: Integer[np.ndarray, "..."]) -> Int64[np.ndarray, "..."]:
        """The tasks that tokens stand for, not checked yet."""
        numbers = ids.astype(np.int64)
        return numbers if self.end is None else np.asarray(self.end - 1 - numbers)

    def taken(
        self, ids: Integer[np.ndarray, "*rows n"]
    ) -> tuple[Int64[np.ndarray, "*rows"], Integer[np.ndarray, "*rows _"]]:
        """The task of each row, and the row without the token.

        Raises:
          InputError: if the rows are too short to have one.
        """
        if ids.shape[-1] <= self.at:
            raise InputError(
                f"{ids.shape[-1]} tokens, and token {self.at} was to say the task "
                "(DataSource.task_token)"
            )
        return self.tasks(ids[..., self.at]), self.without(ids)

    def without(self, row: Integer[np.ndarray, "*rows n"]) -> np.ndarray:
        """What is known of each token, but for the one that says the task."""
        return np.delete(row, self.at, axis=-1)


@dataclasses.dataclass(frozen=True)
class Tasks:
    """Where data says which prompt each example has.

    Attributes:
      count: `N`, prompts that there are.
      key: of a `.jsonl` line, or an HDF5 data set `[rows]`; None where `token` says it.
      names: of the tasks in order, where lines name them; None where they number them.
      token: at the head of each example; None where `key` says it.

    Raises:
      InputError: unless one of key and token is given, or if there are not as many
        different names as prompts.
    """

    count: int
    key: str | None = None
    names: Sequence[str] | None = None
    token: TaskToken | None = None

    def __post_init__(self):
        if (self.key is None) == (self.token is None):
            raise InputError(
                "an example's task is said by prompt_id_key or by task_token: set one "
                "of them"
            )
        if self.names is None:
            return
        if self.key is None:
            raise InputError(
                "prompt_id_names are given, but no prompt_id_key whose values they are"
            )
        names = [] if isinstance(self.names, str) else list(self.names)
        if len(set(names)) != self.count or len(names) != self.count:
            raise InputError(
                f"prompt_id_names are {self.names!r}, expected a list of {self.count} "
                "different names, one for each prompt"
            )

    def behind_bos(self) -> "Tasks":
        """The same where BOS stands before every example, and so before the token."""
        if self.token is None:
            return self
        return dataclasses.replace(self, token=dataclasses.replace(self.token, at=1))

    def number(self, value: Any, place: str) -> int:
        """The task that a `.jsonl` line says, a name or a number not checked yet.

        Raises:
          InputError: if the value is neither.
        """
        if self.names is not None and value in self.names:
            return list(self.names).index(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        wanted = "an integer; or set DataSource.prompt_id_names for names"
        if self.names is not None:
            wanted = f"one of {list(self.names)} or its number"
        raise InputError(f"{place}: {self.key!r} is {value!r}, expected {wanted}")

    def explain(self, task: int) -> str:
        """What is wrong with a task that is out of range."""
        wrong = f"the task is {task}, expected 0 to {self.count - 1}"
        if self.token is None:
            return f"{wrong} ({self.key!r}), for the prompts that there are"
        if self.token.end is None:
            return f"{wrong}, which token {self.token.at} says (task_token 'index')"
        first = self.token.end - 1
        return (
            f"{wrong}; token {self.token.at} is {first - task}, and task 0 is {first} "
            "(task_token 'sentinel'). DataSource.sentinel_vocabulary_size is 32100 for "
            "T5, whose spiece.model has no sentinels: with that file, say the task by "
            "prompt_id_key"
        )
