"""A stand-in, in a config, for an object that only Python can make."""

import dataclasses
from typing import Any, NoReturn

from prompt_tuning.core.errors import InputError
from prompt_tuning.losses.objective import Objective


@dataclasses.dataclass(frozen=True)
class set_in_python(Objective):
    """Stands in a config for an optimizer or objective that was given from Python.

    Every command reads the directory of such a run; only its training needs the object
    itself, so that training refuses the stand-in.

    Attributes:
      description: name of the object.
    """

    description: str

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise InputError(
            f"this run was configured from Python with {self.description}, which its "
            "config cannot hold: continue it by prompt_tuning.tune with the same "
            "arguments and directory"
        )

    init = update = sums = _refuse
