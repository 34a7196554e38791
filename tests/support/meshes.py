"""Training curves of small models on meshes of host devices."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from prompt_tuning.config import gin_files
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.pretrained.prompted_model import build_tuned
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.settings.axis_rules import AxisRules
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.sharding.mesh import build_mesh
from prompt_tuning.sharding.mesh_layout import MeshLayout
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import train_step
from tests.support import dummies
from tests.support.methods import Method

STEPS = 20
# Lengths and weights differ, so that the devices have unequal work.
ROWS = [(4, 3), (1, 5), (6, 1), (3, 3), (2, 2), (5, 2), (1, 1), (4, 4)]
# The bundled models' settings, scaled to the dummies' width of 16.
NARROW = {
    "SHARED_FEATURES = 28": "SHARED_FEATURES = 6",
    "TASK_FEATURES = 100": "TASK_FEATURES = 10",
    "PROMPT_TEXT = 'up:'": "PROMPT_TEXT = 'up'",
}

Model = tuple[nnx.GraphDef, Parameters, Sequence[parameter_groups.ParameterGroup]]


def devices(shape: MeshShape) -> list[Any]:
    """Returns as many devices as a mesh needs."""
    return jax.devices()[: int(np.prod(list(shape.sizes.values())))]


def layout_of(
    shape: MeshShape, config: ModelConfig, rules: AxisRules | None = None
) -> MeshLayout:
    """Returns a model's layout on a mesh of some of the host's devices."""
    return MeshLayout(build_mesh(shape, devices(shape)), rules or AxisRules(), config)


def placed(
    layout: MeshLayout, graph: nnx.GraphDef, parameters: Parameters
) -> Placement:
    """Returns the placement of a model's parameters."""
    shapes: Any = jax.eval_shape(lambda: parameters)
    return Placement.create(layout, graph, shapes)


def tuned(config: ModelConfig, method: Method) -> Model:
    """Returns a dummy model with a method's trained parameters, all random."""
    names = ("MODEL", "TRAIN_FILES", "EVALUATION_FILES", "RUN_DIRECTORY")
    run = gin_files.read_run(
        ["runs/first_prompt.gin", *method.files],
        [
            "BATCH_SIZE = 8",
            "PROMPT_LENGTH = 3",
            "LoRA.rank = 2",
            # Its factors are random and large: at full strength nothing is learned.
            "LoRA.alpha = 0.5",
            "from_sampled_vocabulary.population_size = None",
            *(f"{name} = 'none'" for name in names),
            *method.choices,
            *(NARROW.get(size, size) for size in method.sizes),
        ],
        # The sizes are of all methods.
        allow_unused=True,
    )
    table = np.zeros((config.vocabulary_size, config.width), np.float32)
    vocabulary = Vocabulary(table, dummies.LetterTokenizer())
    started = run.tuning.start(jax.random.key(0), vocabulary, config)

    def build(key):
        return build_tuned(key, config, started, run.tuning)

    graph, parameters = dummies.with_numbers(build)
    return graph, parameters, run.groups


def batch_of(config: ModelConfig, *, tasks: bool = False, soft: int = 0) -> Batch:
    """Returns eight rows of two tasks, with a template's vectors if requested."""
    rows = dummies.random_rows(ROWS)
    if soft:
        soft_ids = [config.vocabulary_size + i for i in range(soft)]
        rows = [([*given, *soft_ids], completion) for given, completion in rows]
    batch = dummies.make_batch(config, rows)
    if tasks:
        numbers = np.arange(len(rows), dtype=np.int32) % 2
        batch = dataclasses.replace(batch, prompt_ids=numbers)
    return batch


# Adam would amplify the rounding error of a nearly zero gradient to a full step.
DESCENT = optax.sgd(0.01)


def curve(
    model: Model,
    batch: Batch,
    layout: MeshLayout | None,
    *,
    optimizer: optax.GradientTransformation = DESCENT,
) -> np.ndarray:
    """Returns the losses of a run's first steps with dropout, from one program."""
    graph, parameters, groups = model
    groups = [dataclasses.replace(group, optimizer=optimizer) for group in groups]
    step, given = begun((graph, parameters, groups), batch, layout)

    @jax.jit
    def run(state, frozen, batch):
        def body(state, _):
            state, metrics = step(state, frozen, batch)
            return state, metrics["loss"]

        return jax.lax.scan(body, state, None, length=STEPS)[1]

    return np.asarray(jnp.asarray(run(*given)))


def begun(
    model: Model, batch: Batch, layout: MeshLayout | None
) -> tuple[Callable[..., Any], tuple[TrainState, Parameters, Batch]]:
    """Returns a step with dropout to be jitted, and the arguments of the first one.

    Args:
      model: graph, parameters and parameter groups.
      batch: batch of every step.
      layout: layout on a mesh; None for one device without a mesh.
    """
    graph, parameters, groups = model
    labels = parameter_groups.label(parameters, groups)
    trained, frozen = parameter_groups.partition(parameters, labels)
    optimizer = parameter_groups.group_optimizer(groups, labels)
    state = TrainState.create(trained, optimizer, jax.random.key(1))
    placement: Placement | None = None
    if layout is not None:
        placement = placed(layout, graph, parameters)
        state = placement.put_tree(state)
        frozen = {path: placement.put(path, leaf) for path, leaf in frozen.items()}
        batch = placement.put_batch(batch)
    step = functools.partial(
        train_step, graph=graph, optimizer=optimizer, dropout=True, placement=placement
    )
    return step, (state, frozen, batch)
