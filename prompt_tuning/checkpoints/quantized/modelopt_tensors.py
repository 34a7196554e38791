"""Weights in the formats of NVIDIA's ModelOpt: FP8 and NVFP4.

FP8 has `weight` in e4m3 and `weight_scale`, which multiplies it. NVFP4 packs two codes
into a byte of `weight`, and multiplies its float8 scales, `weight_scale`, by
`weight_scale_2`. Scales of activations, keys and values are not read.
"""

from collections.abc import Mapping

from prompt_tuning.checkpoints.quantized.compressed_tensors import nvfp4, single_number
from prompt_tuning.checkpoints.quantized.float8_tensors import read_rows_of_float8
from prompt_tuning.checkpoints.quantized.scaled_tensors import naming
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import JsonObject

OUTER = ".weight_scale_2"
CHANGES_INPUT = ".pre_quant_scale"


def read_modelopt(
    stored: Mapping[str, StoredTensor], settings: JsonObject
) -> dict[str, StoredTensor]:
    """Returns the tensors; those with scales become float32.

    Raises:
      InputError: for scales that do not match the weights, or scale the inputs.
    """
    result = dict(stored)
    for name in stored:
        if name.endswith(CHANGES_INPUT):
            raise InputError(
                f"{stored[name].source} has {name}, which scales the inputs of a "
                "layer and is not read: use a folder in FP8 or NVFP4"
            )
        module = name.removesuffix(OUTER)
        if module == name:
            continue
        weight, scale = f"{module}.weight", f"{module}.weight_scale"
        missing = [part for part in (weight, scale) if part not in stored]
        if missing:
            raise InputError(
                f"{stored[name].source} has {name}, but no {' and no '.join(missing)}"
            )
        del result[name], result[scale]
        with naming(weight):
            factor = single_number(stored[name])
            result[weight] = nvfp4(stored[weight], stored[scale], factor)
    return read_rows_of_float8(result, settings)
