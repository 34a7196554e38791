"""Tables of trained biases, one entry per adapter."""

import math
from collections.abc import Iterable, Mapping
from typing import cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from prompt_tuning.decoding.row_adapters import RowBias
from prompt_tuning.models.build import biased_layers
from prompt_tuning.models.head import Head
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.layers import Dense
from prompt_tuning.models.norms import Norm
from prompt_tuning.prompts.low_rank import LowRank
from prompt_tuning.prompts.projection_adapters import OutputScale, ProjectionAdapter


def bias_tables(models: Mapping[int, LanguageModel], count: int) -> dict[str, RowBias]:
    """Returns the tables of trained biases by layer path, given the models by entry."""
    changes: dict[str, dict[int, np.ndarray]] = {}
    for entry, model in models.items():
        for path, layer in biased_layers(model):
            change = _bias_change(layer)
            if change is not None and not path.startswith("encoder"):
                changes.setdefault(path, {})[entry] = change
    tables = {}
    for path, by_entry in changes.items():
        *stack, size = next(iter(by_entry.values())).shape
        table = np.zeros((*stack, count, size), np.float32)
        for entry, change in by_entry.items():
            table[..., entry, :] = change
        tables[path] = RowBias(jnp.asarray(table))
    return tables


def _bias_change(layer: Dense | Norm | Head) -> Float[np.ndarray, "*L out"] | None:
    """Returns a layer's trained bias minus its frozen one; None if it is frozen.

    IA3 in the same layer scales both biases, and therefore the difference.
    """
    adapters = list(cast(Iterable[ProjectionAdapter], layer.adapters.values()))
    for adapter in adapters:
        if adapter.bias is not None and layer.bias is not None:
            frozen = np.asarray(layer.bias[...], np.float32)
            change = np.asarray(adapter.bias[...]) - frozen
            if isinstance(adapter, LowRank) and adapter.biases == "lora_only":
                adapted = np.asarray(adapter.a[...]).any(axis=(1, 2), keepdims=True)
                change = np.where(np.squeeze(adapted, 1), change, 0)
            scales = [x.scale[...] for x in adapters if isinstance(x, OutputScale)]
            return math.prod(map(np.asarray, scales), start=change)
    return None
