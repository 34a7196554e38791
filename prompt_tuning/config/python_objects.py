"""Stand-ins, in a config, for objects that only Python can make.

Every command reads the directory of a run that Python configured. Its training needs
the objects themselves, and a prompt is needed everywhere, so the stand-ins refuse it.
"""

import dataclasses
from typing import Any, NoReturn

import optax

from prompt_tuning.core.errors import InputError
from prompt_tuning.losses.objective import Objective
from prompt_tuning.prompts.prompt_module import PromptFactory


def optimizer_from_python(description: str) -> optax.GradientTransformation:
    """Stands for an optax transformation."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        _refuse(description)

    return optax.GradientTransformation(init=refuse, update=refuse)


@dataclasses.dataclass(frozen=True)
class ObjectiveFromPython(Objective):
    """Stands for an objective.

    Attributes:
      description: name of the object.
    """

    description: str

    def sums(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses to train."""
        _refuse(self.description)


def prompt_from_python(description: str) -> PromptFactory:
    """Stands for a class of prompts."""

    def refuse(*_: Any) -> NoReturn:
        _refuse(description)

    return refuse


def _refuse(description: str) -> NoReturn:
    raise InputError(
        f"this run was configured from Python with {description}, which its config "
        "cannot hold: continue or use it by prompt_tuning.tune with the same arguments "
        "and directory"
    )
