"""The order in which a run answers prompts, including replacements."""

from typing import NamedTuple

from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.data.batching.batch_plan import FILLING, BatchPlan, PlannedBatch


class Place(NamedTuple):
    """A prompt's place in a run's order.

    Attributes:
      prompt: number of the prompt.
      batch: number of its batch in the plan.
      position: its position in the batch.
      sampling: number of the sampling in the rollout: 0 for a prompt of the step's own
        batch, 1 or more for a replacement.
    """

    prompt: int
    batch: int
    position: int
    sampling: int = 0

    @property
    def fields(self) -> dict[str, int]:
        """The fields that `PromptOrder.resume` reads."""
        names = ("batch", "position", "sampling")
        return {name: getattr(self, name) for name in names}


class PromptOrder:
    """The prompts of a plan; each occurs once per epoch.

    A rollout answers a whole batch of the plan. Replacements come from another batch;
    what is left of it serves later rollouts.

    Args:
      plan: order of the prompts.
      done: number of earlier rollouts.
    """

    def __init__(self, plan: BatchPlan, done: int):
        self._plan, self._next = plan, done
        self._opened, self._taken = -1, 0

    def resume(self, line: JsonObject) -> None:
        """Continues after a logged answer, which has the fields of its `Place`."""
        if "batch" not in line:
            return
        batch, position = line.integer("batch"), line.integer("position")
        self._next = max(self._next, batch + 1)
        replaces = line.integer("sampling") > 0
        if replaces and (batch, position) >= (self._opened, self._taken):
            self._opened, self._taken = batch, position + 1

    def batch(self) -> tuple[list[Place], PlannedBatch]:
        """Returns the prompts of the next rollout."""
        places, planned = self._read(self._next)
        self._next += 1
        return places, planned

    def further(self, count: int, sampling: int) -> tuple[list[Place], int]:
        """Returns `count` replacement prompts and the padded length of their rows."""
        found: list[Place] = []
        longest = 0
        while len(found) < count:
            places, planned = [], None
            if self._opened >= 0:
                places, planned = self._read(self._opened)
            if self._taken >= len(places):
                self._opened, self._taken, self._next = self._next, 0, self._next + 1
                continue
            assert planned is not None
            longest = max(longest, planned.input_length)
            taken = places[self._taken :][: count - len(found)]
            self._taken += len(taken)
            found += [place._replace(sampling=sampling) for place in taken]
        return found, longest

    def _read(self, number: int) -> tuple[list[Place], PlannedBatch]:
        planned = self._plan.batch(number)
        prompts = planned.rows[planned.rows != FILLING].tolist()
        return [Place(prompt, number, n) for n, prompt in enumerate(prompts)], planned
