"""Prompts of several tasks that share some of their parameters.

Each returns `[N, P, D]`, one prompt for each of `N` tasks; which row has which is the
batch's `prompt_ids`. How `shared` and a task's own parameters make a prompt is what
google-research/prompt-tuning does for its batch of looked-up tasks; its table
`task_prompts`, `[N, size]`, is our `task` with the axes after the first flattened.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import fan_in, named_key
from prompt_tuning.prompts.initializers import Initializer, Vocabulary
from prompt_tuning.prompts.soft import InputPrompt, initial_vectors

TASK_AXES = ("tasks", "prompt", "prompt_embed")


class _MultiTaskPrompt(InputPrompt):
    """What all share: vectors of every task, and parameters of each.

    Attributes:
      shared: `[P, H]`, float32.
      task: float32, `N` first.
    """

    shared: nnx.Param
    task: nnx.Param

    def _share(self, vectors: Float[Array, "P H"]) -> None:
        self.shared = nnx.Param(vectors, axes=("prompt", "prompt_embed"))

    def _start_vectors(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        tasks: int,
        shared: tuple[int, int],
        own: tuple[int, int],
        initializers: tuple[Initializer | None, Initializer | None],
    ) -> None:
        """Starts shared vectors and those of each task, of the sizes given."""
        (length, width), (of_shared, of_tasks) = shared, initializers
        self._share(initial_vectors(key, vocabulary, length, of_shared, width=width))
        initial = _vectors_of_tasks(key, vocabulary, tasks, own, of_tasks)
        self.task = nnx.Param(initial, axes=TASK_AXES)

    @property
    def length(self) -> int:
        """Vectors `P` of each task's prompt."""
        return self.shared.shape[0]

    @property
    def count(self) -> int:
        """Tasks `N`."""
        return self.task.shape[0]


class AddMultiTaskPrompt(_MultiTaskPrompt):
    """A task's prompt is `shared + task[n]`.

    Attributes:
      shared: `[P, D]`, float32.
      task: `[N, P, D]`, float32.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: int,
        tasks: int,
        initializer: Initializer | None = None,
        task_initializer: Initializer | None = None,
    ):
        """Starts the vectors.

        Args:
          key: random key of the initialisers.
          vocabulary: of the frozen model; gives the width `D`.
          length: vectors `P`, at least 1.
          tasks: how many, `N`, at least 1.
          initializer: of the shared vectors; uniform on `[0, 0.5)` if None.
          task_initializer: of each task's; uniform on `[0, 0.5)` if None.

        Raises:
          InputError: if a number is below 1, or an initialiser refuses.
        """
        size = (length, vocabulary.width)
        starts = (initializer, task_initializer)
        self._start_vectors(key, vocabulary, tasks, size, size, starts)

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "N P D"]:
        """The prompts of all tasks."""
        del key
        return self.shared[...] + self.task[...]


class ConcatTimeMultiTaskPrompt(_MultiTaskPrompt):
    """A task's prompt is the shared vectors, and after them the task's own.

    Attributes:
      shared: `[P - task_length, D]`, float32.
      task: `[N, task_length, D]`, float32.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: int,
        tasks: int,
        task_length: int | None = None,
        initializer: Initializer | None = None,
        task_initializer: Initializer | None = None,
    ):
        """Starts the vectors.

        Args:
          key: random key of the initialisers.
          vocabulary: of the frozen model; gives the width `D`.
          length: shared vectors, at least 1.
          tasks: how many, `N`, at least 1.
          task_length: vectors of each task's own; as many as are shared if None.
          initializer: of the shared vectors; uniform on `[0, 0.5)` if None.
          task_initializer: of each task's; uniform on `[0, 0.5)` if None.

        Raises:
          InputError: if a number is below 1, or an initialiser refuses.
        """
        width = vocabulary.width
        own = (length if task_length is None else task_length, width)
        starts = (initializer, task_initializer)
        self._start_vectors(key, vocabulary, tasks, (length, width), own, starts)

    @property
    def length(self) -> int:
        """Vectors `P` of each task's prompt, shared and own."""
        return self.shared.shape[0] + self.task.shape[1]

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "N P D"]:
        """The prompts of all tasks."""
        del key
        return _beside(self.shared[...], self.task[...], axis=1)


class ConcatFeaturesMultiTaskPrompt(_MultiTaskPrompt):
    """Of each vector the first features are shared, the others the task's own.

    Attributes:
      shared: `[P, shared_features]`, float32.
      task: `[N, P, task_features]`, float32.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: int,
        tasks: int,
        shared_features: int,
        task_features: int,
        initializer: Initializer | None = None,
        task_initializer: Initializer | None = None,
    ):
        """Starts the vectors.

        Args:
          key: random key of the initialisers.
          vocabulary: of the frozen model; gives the width `D`.
          length: vectors `P`, at least 1.
          tasks: how many, `N`, at least 1.
          shared_features: how many of a vector's `D` numbers all tasks share.
          task_features: how many are a task's own.
          initializer: of the shared features; uniform on `[0, 0.5)` if None.
          task_initializer: of each task's; uniform on `[0, 0.5)` if None.

        Raises:
          InputError: if a number is below 1, the features are not `D` together, or an
            initialiser refuses.
        """
        if (
            min(shared_features, task_features) < 1
            or shared_features + task_features != vocabulary.width
        ):
            raise InputError(
                f"shared_features {shared_features} and task_features {task_features} "
                f"must be positive and together {vocabulary.width}, the model's width"
            )
        shared, own = (length, shared_features), (length, task_features)
        starts = (initializer, task_initializer)
        self._start_vectors(key, vocabulary, tasks, shared, own, starts)

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "N P D"]:
        """The prompts of all tasks."""
        del key
        return _beside(self.shared[...], self.task[...], axis=2)


class ProjectMultiTaskPrompt(_MultiTaskPrompt):
    """A task's prompt is an affine map of the shared vectors: `K shared[p] + bias`.

    Attributes:
      shared: `[P, H]`, float32, `H` the shared features.
      task: `[N, D * H + D]`, float32: kernel `[D, H]` flattened, then bias `[D]`.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: int,
        tasks: int,
        shared_features: int | None = None,
        initializer: Initializer | None = None,
        task_initializer: Initializer | None = None,
    ):
        """Starts the vectors and the maps.

        Args:
          key: random key of the initialisers.
          vocabulary: of the frozen model; gives the width `D`.
          length: vectors `P`, at least 1.
          tasks: how many, `N`, at least 1.
          shared_features: width `H` of the shared vectors; `D` if None.
          initializer: of the shared vectors; uniform on `[0, 0.5)` if None.
          task_initializer: of the maps, given the shape `(N, D * H + D)`; if None,
            normal kernels that keep a vector's length, and biases of 0.

        Raises:
          InputError: if a number is below 1, or an initialiser refuses.
        """
        features = vocabulary.width if shared_features is None else shared_features
        if features < 1:
            raise InputError(f"shared_features is {features}, expected at least 1")
        _check_tasks(tasks)
        self._share(
            initial_vectors(key, vocabulary, length, initializer, width=features)
        )
        kernel = vocabulary.width * features
        initial = initial_vectors(
            named_key(key, "tasks"),
            vocabulary,
            tasks,
            task_initializer or _affine(kernel, features),
            width=kernel + vocabulary.width,
        )
        self.task = nnx.Param(initial, axes=("tasks", "task_projection"))

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "N P D"]:
        """The prompts of all tasks."""
        del key
        shared, task = self.shared[...], self.task[...]
        features = shared.shape[1]
        width = task.shape[1] // (features + 1)
        kernel = task[:, : width * features].reshape(-1, width, features)
        bias = task[:, width * features :]
        return jnp.einsum("ph,ndh->npd", shared, kernel) + bias[:, None]


Factors = Callable[
    [Key[Array, ""], tuple[int, int, int, int]],
    tuple[Float[Array, "N P r"], Float[Array, "N r D"]],
]
"""How a factorised prompt's columns and rows start, from the sizes (N, P, r, D)."""


def factors_of_ones(scale: float = 0.02) -> Factors:
    """Their product is 1 everywhere, so that each task starts at the shared prompt.

    One rank gives that product; the others have columns of deviation `scale` and rows
    of 0, so that they may grow apart.
    """

    def start(key, sizes):
        tasks, length, rank, width = sizes
        columns = scale * jax.random.normal(key, (tasks, length, rank))
        rows = jnp.zeros((tasks, rank, width))
        return columns.at[:, :, 0].set(1.0), rows.at[:, 0].set(1.0)

    return start


def normal_factors(scale: float = 0.02) -> Factors:
    """Normal numbers of deviation `scale`, as PEFT starts them.

    Their product has the deviation `sqrt(r) * scale**2`, so that with 0.02 all prompts
    start near zero, whatever the shared one is.
    """

    def start(key, sizes):
        tasks, length, rank, width = sizes
        of_columns, of_rows = jax.random.split(key)
        columns = scale * jax.random.normal(of_columns, (tasks, length, rank))
        return columns, scale * jax.random.normal(of_rows, (tasks, rank, width))

    return start


class FactorizedMultiTaskPrompt(InputPrompt):
    """A task's prompt is `shared * (columns[n] @ rows[n])` (Wang et al. 2023).

    Attributes:
      shared: `[P, D]`, float32.
      columns: `[N, P, r]`, float32.
      rows: `[N, r, D]`, float32.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: int,
        tasks: int,
        rank: int = 1,
        initializer: Initializer | None = None,
        factors: Factors | None = None,
    ):
        """Starts the vectors and their factors.

        Args:
          key: random key of the initialisers.
          vocabulary: of the frozen model; gives the width `D`.
          length: vectors `P`, at least 1.
          tasks: how many, `N`, at least 1.
          rank: `r` of each task's factors, at least 1.
          initializer: of the shared vectors; uniform on `[0, 0.5)` if None.
          factors: how columns and rows start; `factors_of_ones()` if None.

        Raises:
          InputError: if a number is below 1, or the initialiser refuses.
        """
        _check_tasks(tasks)
        if rank < 1:
            raise InputError(f"rank is {rank}, expected at least 1")
        initial = initial_vectors(key, vocabulary, length, initializer)
        sizes = (tasks, length, rank, vocabulary.width)
        columns, rows = (factors or factors_of_ones())(named_key(key, "tasks"), sizes)
        self.shared = nnx.Param(initial, axes=("prompt", "prompt_embed"))
        self.columns = nnx.Param(columns, axes=("tasks", "prompt", "rank"))
        self.rows = nnx.Param(rows, axes=("tasks", "rank", "prompt_embed"))

    @property
    def length(self) -> int:
        """Vectors `P` of each task's prompt."""
        return self.shared.shape[0]

    @property
    def count(self) -> int:
        """Tasks `N`."""
        return self.columns.shape[0]

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "N P D"]:
        """The prompts of all tasks."""
        del key
        factor = jnp.einsum("npr,nrd->npd", self.columns[...], self.rows[...])
        return self.shared[...] * factor


def _vectors_of_tasks(
    key: Key[Array, ""],
    vocabulary: Vocabulary,
    tasks: int,
    size: tuple[int, int],
    initializer: Initializer | None,
) -> Float[Array, "N P W"]:
    """Vectors of each task, started as if each were a prompt of its own."""
    _check_tasks(tasks)
    keys = jax.random.split(named_key(key, "tasks"), tasks)
    return jnp.stack(
        [
            initial_vectors(task, vocabulary, size[0], initializer, width=size[1])
            for task in keys
        ]
    )


def _beside(
    shared: Float[Array, "P H"], task: Float[Array, "N Q W"], *, axis: int
) -> Float[Array, "N _ _"]:
    """The shared array, the same for each task, and then the task's."""
    every = jnp.broadcast_to(shared, (len(task), *shared.shape))
    return jnp.concatenate([every, task], axis=axis)


def _affine(kernel: int, features: int) -> Initializer:
    """Kernels of fan-in scale and biases of 0, of each row of `(N, D * H + D)`."""

    def initialize(key, shape, vocabulary):
        del vocabulary
        start = fan_in(features)(key, (shape[0], kernel), jnp.float32)
        return jnp.pad(start, ((0, 0), (0, shape[1] - kernel)))

    return initialize


def _check_tasks(tasks: int) -> None:
    if tasks < 1:
        raise InputError(f"tasks is {tasks}, expected at least 1")
