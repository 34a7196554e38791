"""`retrieve`: find the memories that fit a question."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from prompt_tuning.api.memory_composition import check_same_model, load_memories
from prompt_tuning.api.model import Model
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_value
from prompt_tuning.core.number_ranges import PositiveInteger


def retrieve(
    memories: Sequence[Model | str | Path], question: str, *, count: int = 1
) -> list[int]:
    """Chooses the memories that make a question most likely.

    A memory's score is the log-probability of the question's tokens, except the first
    one, which nothing predicts. The frozen model therefore reads the question once per
    memory. Pass the chosen memories to `compose` to answer with all of them.

    Args:
      memories: results of `remember`, or their directories.
      question: the question, exactly as the model reads it.
      count: maximum number of memories to choose.

    Returns:
      indices of the chosen memories, best first.

    Raises:
      InputError: if there are no memories, or the question has only one token.

    Examples:
      >>> texts = "upper: apple=APPLE", "reverse: dog=god"
      >>> memories = [
      ...     model.attach(pt.KeyValuePrefix(length=8, initializer=pt.from_text(text)))
      ...     for text in texts
      ... ]
      >>> len(pt.retrieve(memories, "reverse: dog="))
      1
    """
    check_value("count", count, PositiveInteger)
    check_value("question", question, str)
    if not memories:
        raise InputError("retrieve has no memories, expected at least one")
    loaded = load_memories(memories)
    check_same_model(loaded)
    scores = [-_score(memory, question) for memory in loaded]
    return [int(number) for number in np.argsort(scores, stable=True)[:count]]


def _score(memory: Model, question: str) -> float:
    ids = list(memory.texts.find().encoding.encode(question))
    if len(ids) < 2:
        raise InputError(
            f"the question has {len(ids)} tokens, expected at least two: the first one "
            "cannot be scored"
        )
    return memory.loglikelihood([(ids[:1], ids[1:])])[0].logprob
