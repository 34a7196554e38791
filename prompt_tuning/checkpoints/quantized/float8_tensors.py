"""Weights in float8 with scales for blocks or rows, as published by DeepSeek and Meta.

`fp8`: `weight` in e4m3 with `weight_scale_inv`, which multiplies the weights of each
block of 128 x 128. `fbgemm_fp8`: `weight_scale [out, 1]` for each row. Scales of
activations are not read, since we do not quantize activations.
"""

from collections.abc import Mapping

from prompt_tuning.checkpoints.quantized.scaled_tensors import as_matrix, naming, scaled
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.typed_json import JsonObject

BLOCK = (128, 128)
UNUSED = ("input_scale", "activation_scale", "input_scale_ub")


def read_blocks_of_float8(
    stored: Mapping[str, StoredTensor], settings: JsonObject
) -> dict[str, StoredTensor]:
    """Returns the tensors; those with `weight_scale_inv` become float32.

    Raises:
      InputError: for scales that do not match the weights.
    """
    block = BLOCK
    if "weight_block_size" in settings:
        block = tuple(settings.integers("weight_block_size", minimum=1))
    if len(block) != 2:
        settings.refuse("weight_block_size", "numbers of rows and columns")
    return _read(stored, "weight_scale_inv", block)


def read_rows_of_float8(
    stored: Mapping[str, StoredTensor], _: JsonObject
) -> dict[str, StoredTensor]:
    """Returns the tensors; those with `weight_scale` become float32.

    Raises:
      InputError: for scales that do not match the weights.
    """
    return _read(stored, "weight_scale", None)


def _read(
    stored: Mapping[str, StoredTensor], suffix: str, block: tuple[int, ...] | None
) -> dict[str, StoredTensor]:
    result = {
        name: tensor
        for name, tensor in stored.items()
        if not name.endswith(tuple(f".{unused}" for unused in UNUSED))
    }
    for name, scales in stored.items():
        module = name.removesuffix(suffix)
        weight = stored.get(f"{module}weight")
        if module == name or weight is None:
            continue
        rows, columns = weight.shape
        if block is None:
            scales = as_matrix(scales, (rows, 1))
        step = (1, columns) if block is None else (block[0], block[1])
        del result[name]
        with naming(f"{module}weight"):
            result[f"{module}weight"] = scaled(weight, scales, step)
    return result
