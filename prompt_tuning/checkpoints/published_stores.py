"""Chooses stores that hold a quantized checkpoint exactly as published."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax.numpy as jnp

from prompt_tuning.checkpoints.fused_experts import experts_apart
from prompt_tuning.checkpoints.published_kernel import codes_of, keeps_inputs
from prompt_tuning.checkpoints.quantized.codes import WidenedTensor
from prompt_tuning.checkpoints.stored_tensors import Recipe, StoredTensor, identity
from prompt_tuning.core.quantization import stores as kernel_stores
from prompt_tuning.core.quantization.stores import TABLES, UNQUANTIZED, Store, is_kernel

KERNEL = "/kernel"


def is_quantized(stored: Mapping[str, StoredTensor]) -> bool:
    """Tests whether any tensor of a checkpoint is quantized."""
    return any(isinstance(tensor, WidenedTensor) for tensor in stored.values())


def published_stores(
    recipes: Mapping[str, Recipe], stored: Mapping[str, StoredTensor]
) -> dict[str, Store]:
    """Returns the store that holds each parameter exactly as published.

    Kernels keep their codes, and unquantized parameters their dtype. Quantized
    parameters without such a store become bfloat16, e.g. if groups differ in size, or
    only some layers or experts of a stack are quantized.
    """
    stores = {}
    for path, recipe in recipes.items():
        tensors = [stored[name] for name in recipe.sources if name in stored]
        if tensors:
            store = _of_table(recipe, stored) if path in TABLES else None
            if is_kernel(path) and path not in TABLES:
                store = _of_kernel(path, recipe, stored)
            stores[path] = store or Store(_widest(tensors))
    return stores


def _of_kernel(
    path: str, recipe: Recipe, stored: Mapping[str, StoredTensor]
) -> Store | None:
    apart, tensors = experts_apart(path, recipe, stored)
    return _common(list(tensors.values())) if keeps_inputs(apart) else None


def _of_table(recipe: Recipe, stored: Mapping[str, StoredTensor]) -> Store | None:
    """Returns the store of a published table, which is the transpose of a kernel."""
    if recipe.stacked or recipe.transform is not identity:
        return None
    store = _common([stored[name] for name in recipe.sources])
    if store is None or store.ordered:
        return None
    return dataclasses.replace(store, nested=None)


def _common(tensors: Sequence[StoredTensor]) -> Store | None:
    """Returns the store for the codes of all layers; None if there is none."""
    codes = [codes_of(tensor) for tensor in tensors]
    present = [held for held in codes if held is not None]
    names = {held.store.name for held in present}
    sizes = {held.values.shape[1] for held in present}
    if len(present) < len(codes) or len(names) > 1 or len(sizes) > 1:
        return None
    groups = {held.store.group for held in present}
    zeros = any(held.zeros is not None for held in present)
    (size_in,) = sizes
    ordered = any(held.order is not None for held in present)
    sizes_of_nested = {held.store.nested for held in present}
    alike = len(groups) == len(sizes_of_nested) == 1
    nested = sizes_of_nested.pop() if alike else None
    (name,) = names
    if groups == {None} and not zeros:
        return Store(name)
    # A larger group is several of the smaller ones with the same scale.
    group = math.gcd(*(group or size_in for group in groups))
    return (
        None
        if group < min(kernel_stores.SMALLEST_GROUP, size_in)
        else Store(name, group, zeros, ordered, nested)
    )


def _widest(tensors: Sequence[StoredTensor]) -> str:
    if any(isinstance(tensor, WidenedTensor) for tensor in tensors):
        return UNQUANTIZED
    dtypes = {tensor.dtype for tensor in tensors}
    # Unlike NumPy's, this knows a type for bfloat16 next to float16.
    widest = functools.reduce(jnp.promote_types, dtypes)
    return "float32" if widest.name == "float64" else widest.name
