"""Types of arguments of the Python interface, for editors and type checkers.

They are in the stub next to this file, which scripts/make_stub.py writes. When a
program runs, every value is accepted here: the run checks it and tells more than a type
can.
"""

from typing import Any, TypedDict

Method = Methods = Objectives = Optimizer = LearningRates = Any


class PretrainedFields(TypedDict, total=False):
    """Fields of `Pretrained` besides the checkpoint."""


class TuneFields(TypedDict, total=False):
    """Fields of `Run` and of `DataSource` that `tune` passes on."""


class BatchFields(TypedDict, total=False):
    """Fields of `DataSource` that `Model.batches` passes on."""


class EvaluationFields(TypedDict, total=False):
    """Fields of `Evaluation` and of `DataSource` that `Model.evaluate` passes on."""
