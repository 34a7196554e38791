"""Quantization methods that folders may use, by `quant_method`."""

from collections.abc import Callable, Mapping
from pathlib import Path

from prompt_tuning.checkpoints.formats.safetensors import open_safetensors
from prompt_tuning.checkpoints.quantized import float8_tensors
from prompt_tuning.checkpoints.quantized.bitsandbytes_tensors import read_bitsandbytes
from prompt_tuning.checkpoints.quantized.compressed_tensors import read_compressed
from prompt_tuning.checkpoints.quantized.gptq_tensors import read_awq, read_gptq
from prompt_tuning.checkpoints.quantized.modelopt_tensors import read_modelopt
from prompt_tuning.checkpoints.quantized.mxfp4 import read_mxfp4
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.typed_json import JsonObject, read_object

SETTINGS = "quantization_config"
METHOD = "quant_method"
MODELOPT_SETTINGS = "hf_quant_config.json"
"""File with the settings of a folder of ModelOpt whose `config.json` has none."""

Reader = Callable[[Mapping[str, StoredTensor], JsonObject], dict[str, StoredTensor]]
METHODS: Mapping[str, Reader] = {
    "awq": read_awq,
    "bitsandbytes": read_bitsandbytes,
    "compressed-tensors": read_compressed,
    "fbgemm_fp8": float8_tensors.read_rows_of_float8,
    "fp8": float8_tensors.read_blocks_of_float8,
    "gptq": read_gptq,
    "modelopt": read_modelopt,
    "mxfp4": read_mxfp4,
}


def open_weights(folder: Path) -> dict[str, StoredTensor]:
    """Opens the tensors of a Hugging Face folder, with quantized ones as floats.

    Raises:
      InputError: see `open_safetensors`; also for quantized tensors that do not match
        `quantization_config`.
    """
    stored, settings = open_safetensors(folder), quantization_of(folder)
    if settings is None:
        return stored
    if settings.text(METHOD) not in METHODS:
        settings.refuse(METHOD, f"one of {', '.join(METHODS)}")
    return METHODS[settings.text(METHOD)](stored, settings)


def quantization_of(folder: Path) -> JsonObject | None:
    """Returns a folder's settings of quantization; None if it is not quantized."""
    config = read_object(folder / "config.json")
    if SETTINGS in config:
        return config.nested(SETTINGS)
    file = folder / MODELOPT_SETTINGS
    if not file.is_file():
        return None
    settings = read_object(file).nested("quantization")
    return JsonObject(settings.source, {METHOD: "modelopt", **settings.values})
