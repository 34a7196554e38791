"""Weights in float8 with scales for blocks, rows or the whole tensor.

`fp8`: `weight` in e4m3 with `weight_scale_inv`, which multiplies the weights of each
block of 128 x 128 (DeepSeek), or of the tensor (Mistral); AutoFP8 calls the scale of
the tensor `weight_scale`. `fbgemm_fp8`: `weight_scale [out, 1]` for each row. Scales of
activations are not read, since we do not quantize activations.
"""

from collections.abc import Mapping

from prompt_tuning.checkpoints.quantized.scaled_tensors import as_matrix, naming, scaled
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.typed_json import JsonObject

BLOCK = (128, 128)
SCALES = ("weight_scale_inv", "weight_scale")
UNUSED = ("input_scale", "activation_scale", "input_scale_ub", "output_scale")


def read_blocks_of_float8(
    stored: Mapping[str, StoredTensor], settings: JsonObject
) -> dict[str, StoredTensor]:
    """Returns the tensors; those with a scale become float32.

    Raises:
      InputError: for scales that do not match the weights.
    """
    block = BLOCK
    if settings.value("weight_block_size", None) is not None:
        block = tuple(settings.integers("weight_block_size", minimum=1))
    if len(block) != 2:
        settings.refuse("weight_block_size", "numbers of rows and columns")
    return _read(stored, block)


def read_rows_of_float8(
    stored: Mapping[str, StoredTensor], _: JsonObject
) -> dict[str, StoredTensor]:
    """Returns the tensors; those with `weight_scale` become float32.

    Raises:
      InputError: for scales that do not match the weights.
    """
    return _read(stored, None)


def _read(
    stored: Mapping[str, StoredTensor], block: tuple[int, ...] | None
) -> dict[str, StoredTensor]:
    """Scales weights by blocks, or by rows if `block` is None."""
    result = {
        name: tensor
        for name, tensor in stored.items()
        if not name.endswith(tuple(f".{unused}" for unused in UNUSED))
    }
    for name, scales in stored.items():
        module, _, suffix = name.rpartition(".")
        weight = stored.get(f"{module}.weight")
        if suffix not in SCALES or weight is None:
            continue
        del result[name]
        with naming(f"{module}.weight"):
            result[f"{module}.weight"] = _scaled(weight, scales, block)
    return result


def _scaled(
    weight: StoredTensor, scales: StoredTensor, block: tuple[int, ...] | None
) -> StoredTensor:
    rows, columns = weight.shape
    if scales.size == 1:
        return scaled(weight, as_matrix(scales, (1, 1)), (rows, columns))
    if block is None:
        return scaled(weight, as_matrix(scales, (rows, 1)), (1, columns))
    return scaled(weight, scales, (block[0], block[1]))
