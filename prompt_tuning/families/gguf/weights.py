"""The tensors of a GGUF file by their names in a Hugging Face folder."""

import re

import numpy as np
from jaxtyping import Int

from prompt_tuning.checkpoints import rearranged
from prompt_tuning.checkpoints.quantized.gguf_tensors import open_tensors
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.gguf_files import GgufFile
from prompt_tuning.families.gguf.architecture import Architecture, Fields
from prompt_tuning.families.gguf.settings import ROTARY, find_architecture

LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
OUTSIDE = re.compile(r"(\w+)\.(weight|bias)")
QUERY, KEY = "attn_q", "attn_k"
SHARED_GATE = "ffn_gate_inp_shexp"
"""Module with one output, whose weight may be stored as a vector."""


def open_gguf_weights(file: GgufFile) -> dict[str, StoredTensor]:
    """Opens the tensors of a file, arranged as they were before its conversion.

    Raises:
      InputError: for a tensor that the architecture lacks or that cannot be rearranged,
        and for more layers than the metadata says.
    """
    architecture, fields = find_architecture(file)
    layers = fields.values.integer("block_count", minimum=1)
    stored: dict[str, StoredTensor] = {}
    for name, tensor in open_tensors(file).items():
        inside, outside = LAYER.fullmatch(name), OUTSIDE.fullmatch(name)
        if name in ROTARY:
            continue
        if inside is not None and int(inside[1]) < layers:
            prefix = architecture.layers.format(int(inside[1]))
            arranged = _in_layer(architecture, fields, name, tensor)
            stored |= {f"{prefix}{theirs}": x for theirs, x in arranged.items()}
        elif outside is not None and outside[1] in architecture.tables:
            module, kind = outside.groups()
            if module.endswith("_norm") and architecture.norm_offset:
                tensor = rearranged.shifted(tensor, -architecture.norm_offset)
            stored[f"{architecture.tables[module]}.{kind}"] = tensor
        else:
            _refuse(file, name, architecture, f"{layers} layers")
    return stored


def _in_layer(
    architecture: Architecture, fields: Fields, name: str, tensor: StoredTensor
) -> dict[str, StoredTensor]:
    """Returns a layer's tensor by its name, or those of its experts."""
    _, _, module, kind = name.split(".")
    pattern = architecture.experts.get(module)
    if pattern is not None:
        return {
            f"{pattern.format(i)}.{kind}": rearranged.stacked_part(tensor, i)
            for i in range(tensor.shape[0])
        }
    if module not in architecture.modules:
        _refuse(fields.file, name, architecture, "others")
    if module.endswith("_norm") and architecture.norm_offset:
        tensor = rearranged.shifted(tensor, -architecture.norm_offset)
    if module in architecture.transposed and kind == "weight":
        if len(tensor.shape) != 2:
            raise InputError(
                f"{fields.file.path}: the tensor {shown(name)} has the shape "
                f"{tensor.shape}, expected 2 axes"
            )
        tensor = rearranged.turned(tensor)
    if module == SHARED_GATE and len(tensor.shape) == 1:
        tensor = rearranged.as_row(tensor)
    order = _row_order(architecture, fields, module, tensor.shape[0])
    if order is not None:
        if len(order) != tensor.shape[0]:
            raise InputError(
                f"{fields.file.path}: the tensor {shown(name)} has {tensor.shape[0]:,} "
                f"rows, expected a multiple of {len(order):,} for its heads"
            )
        tensor = rearranged.reordered(tensor, order)
    return {f"{architecture.modules[module]}.{kind}": tensor}


def _row_order(
    architecture: Architecture, fields: Fields, module: str, rows: int
) -> Int[np.ndarray, "rows"] | None:
    """Returns the stored row of each row; None if they are in order."""
    heads = fields.values.integer("attention.head_count", minimum=1)
    if architecture.permuted and module in (QUERY, KEY):
        groups = "attention.head_count_kv"
        if module == KEY:
            heads = fields.values.integer(groups, heads, minimum=1)
        # The first and the second half of each head alternate.
        return _exchanged(rows, heads, 2, last=True)
    if module == architecture.by_part:
        return _exchanged(rows, heads, 3, last=False)
    return None


def _exchanged(
    rows: int, heads: int, parts: int, *, last: bool
) -> Int[np.ndarray, "rows"]:
    """Returns the stored row of each row, for `H` heads that have `P` parts.

    Rows are stored as `[H, K / P, P]` if `last`, otherwise as `[P, H, K]`.
    """
    width = rows // (heads * parts)
    stored = np.arange(heads * parts * width)
    if last:
        return stored.reshape(heads, width, parts).swapaxes(1, 2).reshape(-1)
    return stored.reshape(parts, heads, width).swapaxes(0, 1).reshape(-1)


def _refuse(
    file: GgufFile, name: str, architecture: Architecture, expected: str
) -> None:
    raise InputError(
        f"{file.path} has the tensor {shown(name)}, expected {expected} in a model of "
        f"the family {architecture.model_type}: its logits would be wrong without it; "
        "use the Hugging Face folder that the file was made from"
    )
