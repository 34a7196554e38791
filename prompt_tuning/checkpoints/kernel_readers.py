"""Chooses how the arrays of each parameter are read."""

import functools
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.typing import DTypeLike

from prompt_tuning.checkpoints.fused_experts import experts_apart
from prompt_tuning.checkpoints.packed_kernel import PackedKernel
from prompt_tuning.checkpoints.published_kernel import PublishedKernel
from prompt_tuning.checkpoints.quantized_kernel import QuantizedKernel
from prompt_tuning.checkpoints.stored_tensors import (
    PartReader,
    Recipe,
    StoredTensor,
    assemble_parts,
)
from prompt_tuning.core.quantization.stores import (
    Store,
    codebook_path,
    is_packed,
    is_quantized,
    order_path,
    scale_path,
    weight_shape,
    zero_path,
)

Abstract = Mapping[str, jax.ShapeDtypeStruct]
Readers = Iterator[tuple[str, PartReader]]


def published_readers(
    path: str,
    abstract: Abstract,
    recipe: Recipe,
    stored: Mapping[str, StoredTensor],
    store: Store,
) -> Readers:
    """Yields readers of a kernel that stays in its codes, and of what belongs to it."""
    shape = weight_shape(abstract[path])
    recipe, stored = experts_apart(path, recipe, stored)
    kernel = PublishedKernel(path, shape, recipe, stored, store)
    yield path, kernel.read
    yield scale_path(path), kernel.read_scales
    if zero_path(path) in abstract:
        yield zero_path(path), kernel.read_zeros
    if order_path(path) in abstract:
        yield order_path(path), kernel.read_order
    if codebook_path(path) in abstract:
        yield codebook_path(path), kernel.read_codebooks


def readers(
    path: str,
    abstract: Abstract,
    recipe: Recipe,
    stored: Mapping[str, StoredTensor],
    dtype: DTypeLike | None,
) -> Readers:
    """Yields the reader of a parameter, and of the scales of one that is quantized.

    Args:
      path: path of the parameter.
      abstract: shape and dtype of every parameter.
      recipe: recipe of the parameter.
      stored: stored tensors by name.
      dtype: dtype of parameters that are not quantized; None for that of the leaf.
    """
    leaf = abstract[path]
    shape = weight_shape(leaf)
    if is_quantized(leaf):
        recipe, stored = experts_apart(path, recipe, stored)
    if is_packed(leaf):
        codebook = codebook_path(path)
        packed = PackedKernel(
            path,
            shape,
            recipe,
            stored,
            codebook=codebook in abstract,
            group=shape[-2] // abstract[scale_path(path)].shape[-2],
        )
        yield path, packed.read
        yield scale_path(path), packed.read_scales
        if packed.codebook is not None:
            yield codebook, packed.read_codebooks
    elif is_quantized(leaf):
        kernel = QuantizedKernel(path, shape, recipe, stored)
        yield path, kernel.read
        yield scale_path(path), kernel.read_scales
    else:
        cast_to = np.dtype(leaf.dtype if dtype is None else dtype)
        read = functools.partial(assemble_parts, path, shape, cast_to, recipe, stored)
        yield path, read
