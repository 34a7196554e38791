"""Prompts for many tasks with shared parameters.

Each prompt returns `[N, P, D]`, one prompt per task; a batch's `prompt_ids` choose each
row's prompt. The ways to combine `shared` with a task's parameters follow
google-research/prompt-tuning. Its table `task_prompts`, `[N, size]`, is our `task` with
the axes after the first flattened.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.number_ranges import AxisLength
from prompt_tuning.core.parameters import fan_in, named_key
from prompt_tuning.prompts.initializers import Initializer, Vocabulary
from prompt_tuning.prompts.prompt_module import InputPrompt, initial_vectors

TASK_AXES = ("tasks", "prompt", "prompt_embed")


class MultiTaskPrompt(InputPrompt):
    """Base class of prompts with shared vectors and parameters for each task.

    A subclass combines both into prompts, and chooses their sizes.

    Attributes:
      shared: `[P, H]`, float32.
      task: float32, with `N` as the first axis.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        tasks: AxisLength,
        sizes: tuple[tuple[int, int], tuple[int, int]],
        initializers: tuple[Initializer | None, Initializer | None],
    ):
        """Initializes shared vectors, and each task's vectors as if they were a prompt.

        Args:
          key: random key of the initializers.
          vocabulary: vocabulary of the frozen model; gives the width `D`.
          tasks: number of tasks `N`, at least 1.
          sizes: number and width of the shared vectors, and of each task's.
          initializers: where the shared and each task's vectors start; uniform on `[0,
            0.5)` if None.

        Raises:
          InputError: if a number is below 1, or an initializer fails.
        """
        self._initialize_shared(key, vocabulary, sizes[0], initializers[0])
        check_tasks(tasks)
        length, width = sizes[1]
        initial = [
            initial_vectors(task, vocabulary, length, initializers[1], width=width)
            for task in jax.random.split(named_key(key, "tasks"), tasks)
        ]
        self.task = nnx.Param(jnp.stack(initial), axes=TASK_AXES)

    def _initialize_shared(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        size: tuple[int, int],
        initializer: Initializer | None,
    ) -> None:
        length, width = size
        vectors = initial_vectors(key, vocabulary, length, initializer, width=width)
        self.shared = nnx.Param(vectors, axes=("prompt", "prompt_embed"))

    @property
    def length(self) -> int:
        """Number of vectors `P` of each task's prompt."""
        return self.shared.shape[0]

    @property
    def count(self) -> int:
        """Number of tasks `N`."""
        return self.task.shape[0]


class AddMultiTaskPrompt(MultiTaskPrompt):
    """Prompts of `N` tasks, each the sum `shared + task[n]` of shared and own vectors.

    Prefer a multi-task prompt to `N` runs if the tasks are similar: through `shared`,
    each learns from all examples. The data choose each example's task with
    `DataSource.prompt_id_key`; texts choose it with `prompt_id`.

    Args:
      length: number of vectors `P` of each task's prompt, at least 1.
      tasks: number of tasks `N`, at least 1.
      initializer: where the shared vectors start; uniform on `[0, 0.5)` if None.
      task_initializer: where each task's vectors start, as if they were a prompt;
        uniform on `[0, 0.5)` if None.

    Attributes:
      shared: `[P, D]`, float32.
      task: `[N, P, D]`, float32.

    Raises:
      InputError: if a number is below 1, or an initializer fails.

    Examples:
      >>> prompt = pt.AddMultiTaskPrompt(length=5, tasks=2)
      >>> trained, _ = model.attach(prompt).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/prompt/shared (5, 128)
      decoder/prompt/task (2, 5, 128)
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: AxisLength,
        tasks: AxisLength,
        initializer: Initializer | None = None,
        task_initializer: Initializer | None = None,
    ):
        sizes = (length, vocabulary.width), (length, vocabulary.width)
        super().__init__(key, vocabulary, tasks, sizes, (initializer, task_initializer))

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "N P D"]:
        """Returns the prompts of all tasks."""
        del key
        return self.shared[...] + self.task[...]


class ConcatTimeMultiTaskPrompt(MultiTaskPrompt):
    """Prompts of `N` tasks: shared vectors, followed by the task's own.

    Shared and task vectors have different positions, so you can reuse the shared ones
    as a prompt. See `AddMultiTaskPrompt` on how an example chooses its task.

    Args:
      length: number of shared vectors, at least 1.
      tasks: number of tasks `N`, at least 1.
      task_length: number of each task's vectors after them; `length` if None.
      initializer: where the shared vectors start; uniform on `[0, 0.5)` if None.
      task_initializer: where each task's vectors start, as if they were a prompt;
        uniform on `[0, 0.5)` if None.

    Attributes:
      shared: `[P - task_length, D]`, float32.
      task: `[N, task_length, D]`, float32.

    Raises:
      InputError: if a number is below 1, or an initializer fails.

    Examples:
      >>> prompt = pt.ConcatTimeMultiTaskPrompt(length=4, tasks=2, task_length=1)
      >>> model.attach(prompt).partition()[0]["decoder/prompt/task"].shape
      (2, 1, 128)
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: AxisLength,
        tasks: AxisLength,
        task_length: AxisLength | None = None,
        initializer: Initializer | None = None,
        task_initializer: Initializer | None = None,
    ):
        task_length = length if task_length is None else task_length
        sizes = (length, vocabulary.width), (task_length, vocabulary.width)
        super().__init__(key, vocabulary, tasks, sizes, (initializer, task_initializer))

    @property
    def length(self) -> int:
        """Number of vectors `P` of each task's prompt, shared ones included."""
        return self.shared.shape[0] + self.task.shape[1]

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "N P D"]:
        """Returns the prompts of all tasks."""
        del key
        return _concatenate(self.shared[...], self.task[...], axis=1)


class ConcatFeaturesMultiTaskPrompt(MultiTaskPrompt):
    """Prompts of `N` tasks with each vector's first features shared.

    The remaining features are the task's own. See `AddMultiTaskPrompt` on how an
    example chooses its task.

    Args:
      length: number of vectors `P` of each task's prompt, at least 1.
      tasks: number of tasks `N`, at least 1.
      shared_features: number of features that all tasks share.
      task_features: number of each task's features; both add up to the model's width
        `D`.
      initializer: where the shared vectors start; uniform on `[0, 0.5)` if None.
      task_initializer: where each task's vectors start, as if they were a prompt;
        uniform on `[0, 0.5)` if None.

    Attributes:
      shared: `[P, shared_features]`, float32.
      task: `[N, P, task_features]`, float32.

    Raises:
      InputError: if a number is below 1, the features do not add up to `D`, or an
        initializer fails.

    Examples:
      >>> prompt = pt.ConcatFeaturesMultiTaskPrompt(
      ...     length=5, tasks=2, shared_features=100, task_features=28
      ... )
      >>> trained, _ = model.attach(prompt).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/prompt/shared (5, 100)
      decoder/prompt/task (2, 5, 28)
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: AxisLength,
        tasks: AxisLength,
        shared_features: AxisLength,
        task_features: AxisLength,
        initializer: Initializer | None = None,
        task_initializer: Initializer | None = None,
    ):
        if (
            min(shared_features, task_features) < 1
            or shared_features + task_features != vocabulary.width
        ):
            raise InputError(
                f"shared_features {shared_features} and task_features {task_features} "
                f"must be positive and add up to {vocabulary.width}, the model's width"
            )
        sizes = (length, shared_features), (length, task_features)
        super().__init__(key, vocabulary, tasks, sizes, (initializer, task_initializer))

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "N P D"]:
        """Returns the prompts of all tasks."""
        del key
        return _concatenate(self.shared[...], self.task[...], axis=2)


class ProjectMultiTaskPrompt(MultiTaskPrompt):
    """Prompts of `N` tasks, each an affine map of shared vectors.

    The map is `K[n] @ shared[p] + bias[n]`. The most expressive of the multi-task
    prompts and by far the largest: a task has `D * H + D` parameters. See
    `AddMultiTaskPrompt` on how an example chooses its task.

    Args:
      length: number of vectors `P`, at least 1.
      tasks: number of tasks `N`, at least 1.
      shared_features: width `H` of the shared vectors; `D` if None.
      initializer: where the shared vectors start; uniform on `[0, 0.5)` if None.
      task_initializer: initializer of all maps, of the shape `(N, D * H + D)`; if None,
        normal kernels that keep a vector's length, and biases of 0.

    Attributes:
      shared: `[P, H]`, float32.
      task: `[N, D * H + D]`, float32: flattened kernel `[D, H]`, then bias `[D]`.

    Raises:
      InputError: if a number is below 1, or an initializer fails.

    Examples:
      >>> prompt = pt.ProjectMultiTaskPrompt(length=5, tasks=2, shared_features=8)
      >>> trained, _ = model.attach(prompt).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/prompt/shared (5, 8)
      decoder/prompt/task (2, 1152)
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: AxisLength,
        tasks: AxisLength,
        shared_features: AxisLength | None = None,
        initializer: Initializer | None = None,
        task_initializer: Initializer | None = None,
    ):
        features = vocabulary.width if shared_features is None else shared_features
        if features < 1:
            raise InputError(f"shared_features is {features}, expected at least 1")
        check_tasks(tasks)
        self._initialize_shared(key, vocabulary, (length, features), initializer)
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
        """Returns the prompts of all tasks."""
        del key
        shared, task = self.shared[...], self.task[...]
        features = shared.shape[1]
        width = task.shape[1] // (features + 1)
        kernel = task[:, : width * features].reshape(-1, width, features)  # [N, D, H]
        bias = task[:, width * features :]  # [N, D]
        return jnp.einsum("ph,ndh->npd", shared, kernel) + bias[:, None]


def check_tasks(tasks: int) -> None:
    """Checks the number of tasks.

    Raises:
      InputError: if it is below 1.
    """
    if tasks < 1:
        raise InputError(f"tasks is {tasks}, expected at least 1")


def _concatenate(
    shared: Float[Array, "P H"], task: Float[Array, "N Q W"], *, axis: int
) -> Float[Array, "N _ _"]:
    """Concatenates the shared array, repeated for each task, with the task's."""
    repeated = jnp.broadcast_to(shared, (len(task), *shared.shape))
    return jnp.concatenate([repeated, task], axis=axis)


def _affine(kernel: int, features: int) -> Initializer:
    """Kernels of fan-in scale and biases of 0, in each row of `(N, D * H + D)`."""

    def initialize(key, shape, vocabulary):
        del vocabulary
        start = fan_in(features)(key, (shape[0], kernel), jnp.float32)
        return jnp.pad(start, ((0, 0), (0, shape[1] - kernel)))

    return initialize
