"""Multi-task prompts with a low-rank factor per task, the form that PEFT stores."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.adapters.adapter import MULTITASK
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.number_ranges import AxisLength, NonnegativeNumber
from prompt_tuning.core.parameters import named_key
from prompt_tuning.prompts import prompt_module
from prompt_tuning.prompts.initializers import Initializer, Vocabulary
from prompt_tuning.prompts.multitask import check_tasks
from prompt_tuning.prompts.prompt_module import ExportedPrompt, InputPrompt, StoredForm

LEAVES = {"shared": "P D", "columns": "N P r", "rows": "N r D"}

Factors = Callable[
    [Key[Array, ""], tuple[int, int, int, int]],
    tuple[Float[Array, "N P r"], Float[Array, "N r D"]],
]
"""Initializer of columns and rows, from a key and the sizes (N, P, r, D)."""


def factors_of_ones(scale: NonnegativeNumber = 0.02) -> Factors:
    """Starts each task of a `FactorizedMultiTaskPrompt` at the shared prompt.

    The product of the factors is 1, thanks to the first rank alone. The other ranks
    start with columns of standard deviation `scale` and rows of 0, so they can diverge.

    Args:
      scale: standard deviation of the columns after the first.

    Examples:
      >>> prompt = pt.FactorizedMultiTaskPrompt(
      ...     length=5, tasks=2, rank=2, factors=pt.factors_of_ones(scale=0.1)
      ... )
      >>> model.attach(prompt).partition()[0]["decoder/prompt/columns"][0, 0, 0].item()
      1.0
    """

    def start(key, sizes):
        tasks, length, rank, width = sizes
        columns = scale * jax.random.normal(key, (tasks, length, rank))
        rows = jnp.zeros((tasks, rank, width))
        return columns.at[:, :, 0].set(1.0), rows.at[:, 0].set(1.0)

    return start


def normal_factors(scale: NonnegativeNumber = 0.02) -> Factors:
    """Starts a `FactorizedMultiTaskPrompt`'s factors at normal numbers, like PEFT.

    Their product has the standard deviation `sqrt(r) * scale**2`: with 0.02 all prompts
    start near zero, whatever the shared prompt is. Prefer `factors_of_ones` unless you
    repeat a PEFT run.

    Args:
      scale: standard deviation of both factors.

    Examples:
      >>> prompt = pt.FactorizedMultiTaskPrompt(
      ...     length=5, tasks=2, factors=pt.normal_factors()
      ... )
      >>> model.attach(prompt).partition()[0]["decoder/prompt/rows"].shape
      (2, 1, 128)
    """

    def start(key, sizes):
        tasks, length, rank, width = sizes
        columns_key, rows_key = jax.random.split(key)
        columns = scale * jax.random.normal(columns_key, (tasks, length, rank))
        return columns, scale * jax.random.normal(rows_key, (tasks, rank, width))

    return start


class FactorizedMultiTaskPrompt(InputPrompt):
    """Prompts of `N` tasks, each `shared * (columns[n] @ rows[n])` (Wang et al. 2023).

    The smallest multi-task prompt (a task has `r * (P + D)` parameters), and the one
    that PEFT reads, as MULTITASK_PROMPT_TUNING. See `AddMultiTaskPrompt` on how an
    example chooses its task.

    Args:
      length: number of vectors `P`, at least 1.
      tasks: number of tasks `N`, at least 1.
      rank: rank `r` of each task's factors, at least 1.
      initializer: where the shared vectors start; uniform on `[0, 0.5)` if None.
      factors: where columns and rows start; `factors_of_ones()` if None.

    Attributes:
      shared: `[P, D]`, float32.
      columns: `[N, P, r]`, float32.
      rows: `[N, r, D]`, float32.

    Raises:
      InputError: if a number is below 1, or the initializer fails.

    Examples:
      >>> prompt = pt.FactorizedMultiTaskPrompt(length=5, tasks=2)
      >>> trained, _ = model.attach(prompt).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/prompt/columns (2, 5, 1)
      decoder/prompt/rows (2, 1, 128)
      decoder/prompt/shared (5, 128)
    """

    form = StoredForm(MULTITASK, LEAVES, {"length": "P", "tasks": "N", "rank": "r"})

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: AxisLength,
        tasks: AxisLength,
        rank: AxisLength = 1,
        initializer: Initializer | None = None,
        factors: Factors | None = None,
    ):
        check_tasks(tasks)
        if rank < 1:
            raise InputError(f"rank is {rank}, expected at least 1")
        initial = prompt_module.initial_vectors(key, vocabulary, length, initializer)
        sizes = (tasks, length, rank, vocabulary.width)
        columns, rows = (factors or factors_of_ones())(named_key(key, "tasks"), sizes)
        self.shared = nnx.Param(initial, axes=("prompt", "prompt_embed"))
        self.columns = nnx.Param(columns, axes=("tasks", "prompt", "rank"))
        self.rows = nnx.Param(rows, axes=("tasks", "rank", "prompt_embed"))

    @property
    def length(self) -> int:
        """Number of vectors `P` of each task's prompt."""
        return self.shared.shape[0]

    @property
    def count(self) -> int:
        """Number of tasks `N`."""
        return self.columns.shape[0]

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "N P D"]:
        """Returns the prompts of all tasks."""
        del key
        factor = jnp.einsum("npr,nrd->npd", self.columns[...], self.rows[...])
        return self.shared[...] * factor

    def export(self) -> ExportedPrompt:
        """Exports the parameters with the rank that they have."""
        arrays = {leaf: np.asarray(getattr(self, leaf)[...]) for leaf in LEAVES}
        return ExportedPrompt(MULTITASK, arrays)
