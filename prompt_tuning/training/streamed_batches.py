"""The micro-batches and parameters of steps whose weights are streamed.

The parts of such a step are shared by `StreamedStep` and `OutputStep`: each micro-batch
has its own prefix, and on a mesh the prefix always runs apart from the rows, because
only the rows are divided among the devices.
"""

import operator
from collections.abc import Container
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int, Key

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.parameters import Parameters, merge, optional_key
from prompt_tuning.models.language_model import LanguageModel, Prefix
from prompt_tuning.sharding.array_placement import Placement

OptionalKey = Key[Array, ""] | None


def divide_batch(
    batch: Batch, key: OptionalKey, placement: Placement | None
) -> list[tuple[Any, ...]]:
    """Returns tuples of a batch `[B, T]`, the key and the index of the micro-batch.

    Args:
      batch: one batch, whose index is None, or micro-batches on a leading axis.
      key: dropout key; None without dropout.
      placement: the parameters' shardings on a mesh; None on one device.
    """
    if batch.tokens.ndim == 2:
        return [(batch, key, None)]
    parts = [
        jax.tree.map(operator.itemgetter(i), batch) for i in range(len(batch.tokens))
    ]
    if placement is not None:
        parts = [placement.put_batch(part) for part in parts]
    return [(part, key, jnp.int32(i)) for i, part in enumerate(parts)]


def unpad_others(
    parameters: Parameters, streamed: Container[str], placement: Placement | None
) -> Parameters:
    """Removes the padding that a mesh adds to parameters; blocks have none.

    Args:
      parameters: all parameters.
      streamed: paths of the streamed ones.
      placement: the parameters' shardings on a mesh; None on one device.
    """
    if placement is None:
        return parameters
    here = {p: x for p, x in parameters.items() if p not in streamed}
    return parameters | placement.unpad(here)


def prefix_and_key(
    graph: nnx.GraphDef,
    parameters: Parameters,
    key: OptionalKey,
    index: Int[Array, ""] | None,
    placement: Placement | None,
) -> tuple[Prefix, OptionalKey]:
    """Runs the prefix of a micro-batch; returns it and the key of the rows.

    The keys are those of `training.step`: one for the prefix, one per micro-batch.

    Args:
      graph: the model's structure.
      parameters: all parameters.
      key: dropout key of the batch; None without dropout.
      index: number of the micro-batch; None without micro-batches, where on one device
        the prefix runs with the rows and is None.
      placement: the parameters' shardings on a mesh; None on one device.
    """
    if index is None and placement is None:
        return None, key
    model = cast(LanguageModel, merge(graph, parameters))
    prefix = model.prefix(optional_key(key, "prefix"))
    if key is None or index is None:
        return prefix, key
    return prefix, jax.random.fold_in(key, index)
