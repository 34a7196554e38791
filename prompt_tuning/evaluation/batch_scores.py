"""Score batches on one device, on a mesh, or with streamed weights."""

import collections
import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax
from flax import nnx

from prompt_tuning.core.batch import Batch, LabelBatch
from prompt_tuning.core.compilation import WeightedJit
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.status_line import status, update_status
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.sharding.mesh_layout import MeshLayout
from prompt_tuning.sharding.shard_map import map_rows
from prompt_tuning.streaming.streamed_function import stream_over_batches

Scores = TypeVar("Scores")
AnyBatch = TypeVar("AnyBatch", Batch, LabelBatch)
BatchFunction = Callable[[nnx.GraphDef, Parameters, Any], Scores]
"""A function of a model and a batch; the first axis of its results is the batch's."""

AT_ONCE = 2
"""Number of batches computed in parallel on a CPU; more would take more memory."""


def bind(function: Callable[..., Scores], objective: Any) -> Callable[..., Scores]:
    """Binds a function's first argument, an objective.

    Equal objectives give the same function, so that the next evaluation, which makes
    its objective anew, uses the programs that are compiled. A user's own objective may
    change, unless it is a frozen dataclass.
    """
    settings = getattr(objective, "__dataclass_params__", None)
    if settings is not None and settings.frozen:
        with contextlib.suppress(TypeError):  # a field without a hash
            return _bind(function, objective)
    return functools.partial(function, objective)


@functools.lru_cache(maxsize=32)
def _bind(function: Callable[..., Any], objective: Any) -> Callable[..., Any]:
    return functools.partial(function, objective)


def _score_rows(function, graph, layout, parameters, batch):
    update_status(f"compiling the evaluation ({batch.describe()})")
    run = map_rows(layout, graph, functools.partial(function, graph))
    return run(parameters, batch)


_JIT = WeightedJit(_score_rows, static_argnums=(0, 1, 2))


def score_rows(
    function: BatchFunction[Scores],
    graph: nnx.GraphDef,
    layout: MeshLayout | None,
    parameters: Parameters,
    batch: Batch | LabelBatch,
) -> Scores:
    """Computes a function of a batch; each device computes its own rows."""
    return _JIT.given(parameters)(function, graph, layout, parameters, batch)


def compile_scores(
    function: BatchFunction[Scores],
    model: PromptedModel,
    parameters: Mapping[str, jax.ShapeDtypeStruct],
    batch: Batch,
) -> None:
    """Compiles `score_rows` for the shapes of its arguments."""
    jitted = _JIT.given(parameters)
    jitted.lower(function, model.graph, model.layout, parameters, batch).compile()


def score_batches(
    function: BatchFunction[Scores],
    model: PromptedModel,
    parameters: Parameters,
    batches: Iterable[AnyBatch],
) -> Iterator[tuple[AnyBatch, Any]]:
    """Yields each batch with its scores as NumPy arrays, in order.

    On a CPU, two batches are computed in parallel, each in a thread, because the
    operations of a small model are too short to be split among cores. Elsewhere batches
    are computed one by one: two would keep streamed weights in memory twice, and
    devices of a mesh would wait for each other.
    """
    # Only work started by different threads runs in parallel. The lock keeps a program
    # from being compiled twice.
    starting = threading.Lock()

    def score(batch: AnyBatch) -> Any:
        with starting:
            scores = score_batch(function, model, parameters, batch)
        return jax.device_get(scores)

    one_by_one = model.layout is not None or model.weight_storage.by_layer
    if one_by_one or jax.default_backend() != "cpu":
        yield from ((batch, score(batch)) for batch in batches)
        return
    running: collections.deque[tuple[AnyBatch, Future[Any]]] = collections.deque()
    with ThreadPoolExecutor(AT_ONCE) as executor:
        for batch in batches:
            context = contextvars.copy_context()  # shows what is compiled
            running.append((batch, executor.submit(context.run, score, batch)))
            if len(running) > AT_ONCE:
                first, scores = running.popleft()
                yield first, scores.result()
        for first, scores in running:
            yield first, scores.result()


def score_batch(
    function: BatchFunction[Scores],
    model: PromptedModel,
    parameters: Parameters,
    batch: Batch | LabelBatch,
) -> Any:
    """Computes `score_rows`, layer by layer if weights are streamed."""
    if model.weight_storage.by_layer:
        if model.placement is not None:
            batch = model.placement.put_batch(batch)
        slices = model.weight_storage.slices
        streamed = stream_over_batches(model.graph, function, slices)
        return streamed.forward({}, model.by_layer(parameters), batch)
    # Only a shape that needs compilation renames it.
    with status():
        return score_rows(function, model.graph, model.layout, parameters, batch)
