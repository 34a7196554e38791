"""Tables of one projection's adapters and biases, with one entry per adapter."""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from prompt_tuning.core.parameters import Parameters, merge, split
from prompt_tuning.decoding import row_adapters
from prompt_tuning.decoding.row_adapters import RowBias
from prompt_tuning.models.build import biased_layers
from prompt_tuning.models.expert_adapters import ExpertProjection
from prompt_tuning.models.head import Head
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.layers import Dense
from prompt_tuning.models.norms import Norm
from prompt_tuning.prompts.low_rank import LowRank
from prompt_tuning.prompts.projection_adapters import (
    InputScale,
    OutputScale,
    ProjectionAdapter,
)

Kind = TypeVar("Kind", bound=ProjectionAdapter)

ROW_INPUT_SCALE, ROW_OUTPUT_SCALE = "row_ia3_input", "row_ia3_output"
ROW_LORA, ROW_BIAS = "row_lora", "row_lora_bias"
"""Names of a projection's tables.

Merged modules sort their adapters by name: IA3 therefore acts before LoRA, as in a
model with both, and a bias comes after DoRA, which rescales only the product of the
weights.
"""

RANK_MULTIPLE = 8
"""Ranks are padded to multiples of this, to compile few table shapes."""


def projection_tables(
    adapted: Mapping[int, Dense | ExpertProjection], count: int
) -> dict[str, nnx.Module]:
    """Returns the tables of one projection by name."""
    low_rank = _by_entry(adapted, LowRank)
    first = next(iter(adapted.values()))
    if isinstance(first, ExpertProjection):
        if not low_rank:
            return {}
        a, b, scaling = _stacked_factors(low_rank, count)
        b *= scaling[:, :, None, None, None]
        return {ROW_LORA: row_adapters.RowExpertLowRank(jnp.asarray(a), jnp.asarray(b))}
    dense = cast(Mapping[int, Dense], adapted)
    layers, (size_in, size_out) = first.kernel.shape[0], first.sizes
    modules: dict[str, nnx.Module] = {}
    if low_rank:
        arrays = list(_stacked_factors(low_rank, count))
        if any(each.magnitude is not None for each in low_rank.values()):
            factors = np.ones((layers, count, size_out), np.float32)
            for entry, each in low_rank.items():
                if each.magnitude is not None:
                    graph, parameters = split(dense[entry])
                    factors[:, entry] = _factors_of_blocks(parameters, graph=graph)
            arrays.append(factors)
        modules[ROW_LORA] = row_adapters.RowLowRank(*map(jnp.asarray, arrays))
    for kind, row_kind, name, size in (
        (OutputScale, row_adapters.RowOutputScale, ROW_OUTPUT_SCALE, size_out),
        (InputScale, row_adapters.RowInputScale, ROW_INPUT_SCALE, size_in),
    ):
        scaled = _by_entry(adapted, kind)
        if scaled:
            scale = np.ones((layers, count, size), np.float32)
            for entry, each in scaled.items():
                scale[:, entry] = np.asarray(each.scale[...])
            modules[name] = row_kind(jnp.asarray(scale))
    return modules


def _stacked_factors(
    low_rank: Mapping[int, LowRank], count: int
) -> tuple[
    Float[np.ndarray, "L N *E in r"],
    Float[np.ndarray, "L N *E r out"],
    Float[np.ndarray, "L N"],
]:
    """Stacks the factors and scalings of LoRAs by entry, padded to one rank."""
    factors = {entry: each.whole_factors() for entry, each in low_rank.items()}
    rank = max(factor.shape[-1] for factor, _ in factors.values())
    rank = -(-rank // RANK_MULTIPLE) * RANK_MULTIPLE
    first, second = next(iter(factors.values()))
    layers, *lead, size_in = first.shape[:-1]
    a = np.zeros((layers, count, *lead, size_in, rank), np.float32)
    b = np.zeros((layers, count, *lead, rank, second.shape[-1]), np.float32)
    scaling = np.zeros((layers, count), np.float32)
    for entry, each in low_rank.items():
        own_a, own_b = map(np.asarray, factors[entry])
        a[:, entry, ..., : own_a.shape[-1]] = own_a
        b[:, entry, ..., : own_b.shape[-2], :] = own_b
        scaling[:, entry] = each.scaling
    return a, b, scaling


@functools.partial(jax.jit, static_argnames="graph")
def _factors_of_blocks(
    parameters: Parameters, *, graph: nnx.GraphDef
) -> Float[Array, "L out"]:
    """Computes DoRA's output factors of a projection with its adapter."""

    def of_block(block: Parameters) -> Float[Array, "out"]:
        dense = cast(Dense, merge(graph, block))
        ((_, lora),) = _by_entry({0: dense}, LowRank).items()
        return lora.factors_of_outputs(dense.wide_kernel())

    return jax.lax.map(of_block, parameters)


def _by_entry(
    adapted: Mapping[int, Dense | ExpertProjection], kind: type[Kind]
) -> dict[int, Kind]:
    """Returns the adapters of one kind by entry."""
    return {
        entry: adapter
        for entry, dense in adapted.items()
        for adapter in cast(Iterable, dense.adapters.values())
        if isinstance(adapter, kind)
    }


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
