"""Factorize multi-task prompts into the factors that PEFT stores."""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from prompt_tuning.adapters.adapter import MULTITASK, Adapter, Arrays


def factorize(vectors: Float[np.ndarray, "N P D"]) -> Arrays:
    """Factorizes prompts, one per task, without rounding.

    Prompt `n` is `shared * (columns[n] @ rows[n])`. `shared` is one, the rank is the
    largest possible, and either `columns` or `rows` is the identity matrix while the
    other holds the prompts bit for bit.

    Returns:
      `shared`, `columns` and `rows`, with shapes `[P, D]`, `[N, P, r]`, `[N, r, D]`.
    """
    count, length, width = vectors.shape
    identity = np.eye(min(length, width), dtype=np.float32)
    identity = np.broadcast_to(identity, (count, *identity.shape))
    columns, rows = (identity, vectors) if length <= width else (vectors, identity)
    shared = np.ones((length, width), np.float32)
    return {"shared": shared, "columns": columns, "rows": rows}


def factorized_adapter(prompts: Mapping[str, Float[np.ndarray, "N P D"]]) -> Adapter:
    """Returns a multi-task adapter.

    Args:
      prompts: one prompt per task, by stack ("encoder", "decoder").
    """
    parameters = {
        f"{stack}/prompt/{leaf}": array
        for stack, vectors in prompts.items()
        for leaf, array in factorize(vectors).items()
    }
    return Adapter(kind=MULTITASK, parameters=parameters)
