"""How the examples of a multi-task model select one of its `N` prompts."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64, Integer

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.core.typed_json import MAXIMUM_INTEGER
from prompt_tuning.data.rows.jsonl import JsonLine

PROMPT_IDS = "prompt_ids"
"""Usual name of the HDF5 data set of each row's task."""


@dataclasses.dataclass(frozen=True)
class TaskToken:
    """A token at the start of every example that selects its task.

    The token is removed when the example is read; lengths and weights do not include
    it. Its id is either the task or a sentinel: id `sentinel_end - 1` selects task 0,
    the id before it task 1, and so on (`<extra_id_0>` of T5 is 32,099).

    Attributes:
      sentinel_end: one more than the id of the first sentinel; None if ids are tasks.
      position: position of the token: 1 if the tokenizer puts BOS before every text,
        else 0.
    """

    sentinel_end: int | None = None
    position: int = 0

    def decode(self, ids: Integer[np.ndarray, "..."]) -> Int64[np.ndarray, "..."]:
        """Returns the tasks that token ids select, without checking their range."""
        numbers = ids.astype(np.int64)
        if self.sentinel_end is None:
            return numbers
        return np.asarray(self.sentinel_end - 1 - numbers)

    def split(
        self, ids: Integer[np.ndarray, "*rows n"]
    ) -> tuple[Int64[np.ndarray, "*rows"], Integer[np.ndarray, "*rows _"]]:
        """Returns the tasks of rows, and the rows without the token."""
        if ids.shape[-1] <= self.position:
            raise InputError(
                f"{ids.shape[-1]} tokens, but token {self.position} should be the task "
                "token (DataSource.task_token)"
            )
        return self.decode(ids[..., self.position]), self.remove(ids)

    def remove(self, values: Integer[np.ndarray, "*rows n"]) -> np.ndarray:
        """Removes the task token's entry from values of the tokens."""
        return np.delete(values, self.position, axis=-1)


@dataclasses.dataclass(frozen=True)
class Tasks:
    """How each example selects its prompt: by a `key` or by a `token`.

    Attributes:
      count: `N`, number of prompts.
      key: jsonl key or HDF5 data set `[rows]` of the task; None if `token` is set.
      names: names of the tasks in order, if lines contain names; None for numbers.
      token: task token at the start of every example; None if `key` is set.
      aliases: tasks by their other names.
    """

    count: int
    key: str | None = None
    names: Sequence[str] | None = None
    token: TaskToken | None = None
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if (self.key is None) == (self.token is None):
            raise InputError(
                "an example's task is selected by prompt_id_key or by task_token: set "
                "one of them"
            )
        for alias, name in self.aliases.items():
            if alias in (self.names or ()) or name not in (self.names or ()):
                raise InputError(
                    f"prompt_id_aliases contain {shown(alias)} for {shown(name)}, "
                    "expected another name for one of the prompt_id_names "
                    f"{shown(self.names)}"
                )
        if self.names is None:
            return
        if self.key is None:
            raise InputError(
                "prompt_id_names are set, but not the prompt_id_key whose values they "
                "are"
            )
        names = [] if isinstance(self.names, str) else list(self.names)
        if len(set(names)) != self.count or len(names) != self.count:
            raise InputError(
                f"prompt_id_names are {shown(self.names)}, expected a list of "
                f"{self.count} different names, one for each prompt"
            )

    def after(self, count: int) -> "Tasks":
        """Returns the same tasks for rows with `count` tokens before the task token."""
        if self.token is None:
            return self
        return dataclasses.replace(
            self, token=dataclasses.replace(self.token, position=count)
        )

    def read_line(self, line: JsonLine) -> int:
        """Returns the task that a line selects by its key; see `parse`."""
        assert self.key is not None
        read = line.value if self.names is not None else line.scalar
        return self.parse(read(self.key, "DataSource.prompt_id_key"), line.location)

    def parse(self, value: Any, location: str) -> int:
        """Returns the task that a jsonl value selects, without checking its range."""
        name = self._without_alias(value)
        if self.names is not None and name in self.names:
            return list(self.names).index(name)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if is_integer and abs(value) <= MAXIMUM_INTEGER:
            return value
        names = how_to_set("DataSource.prompt_id_names", ["NAME", "NAME"])
        expected = f"an integer; or names, in order, by {names}"
        if self.names is not None:
            names = [*self.names, *self.aliases]
            expected = f"one of {shown(names)} or its number"
        raise InputError(
            f"{location}: {shown(self.key)} is {shown(value)}, expected {expected}"
        )

    def _without_alias(self, value: Any) -> Any:
        return self.aliases.get(value, value) if isinstance(value, str) else value

    def range_error(self, task: int) -> str:
        """Returns the message for a task out of range."""
        message = f"the task is {task}, expected 0 to {self.count - 1}"
        if self.token is None:
            return f"{message} ({shown(self.key)}), the prompts of the model"
        if self.token.sentinel_end is None:
            return (
                f"{message}; it is the id of token {self.token.position} "
                "(task_token 'index')"
            )
        first = self.token.sentinel_end - 1
        return (
            f"{message}; token {self.token.position} is {first - task}, and task 0 is "
            f"{first} (task_token 'sentinel'). DataSource.sentinel_vocabulary_size is "
            "32100 for T5, whose spiece.model has no sentinels: with that file, select "
            "the task by prompt_id_key"
        )
