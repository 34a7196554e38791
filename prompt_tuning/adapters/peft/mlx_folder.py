"""Read MLX's LoRA adapters (`mlx_lm.lora`) as PEFT adapters with the same effect.

    adapter_config.json    settings: JSON
    adapters.safetensors   `{module}.lora_a` `[in, r]`, `{module}.lora_b` `[r, out]`

MLX computes `y + scale * x @ a @ b`; PEFT stores the transposes, and scales by `alpha /
r`. Modules are named as in transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from prompt_tuning.adapters.peft.peft_settings import LARGEST
from prompt_tuning.adapters.peft.shape_checks import LORA_A, LORA_B, MODEL_PREFIX
from prompt_tuning.core.errors import InputError, shortened, shown
from prompt_tuning.core.model_sizes import MAXIMUM_SIZE
from prompt_tuning.core.typed_json import JsonObject

MLX_TENSORS = "adapters.safetensors"
A, B = ".lora_a", ".lora_b"


def read_mlx(
    config: JsonObject, tensors: Mapping[str, np.ndarray], file: Path
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns PEFT's settings and tensors for an MLX adapter.

    Args:
      config: its settings.
      tensors: its float32 arrays.
      file: the file of the arrays, for messages.

    Raises:
      InputError: if it is not a LoRA of projections, or a factor is missing or has
        another rank.
    """
    kind = config.text("fine_tune_type", "lora")
    if kind != "lora":
        raise InputError(
            f"{config.source} has fine_tune_type {shown(kind)}, expected 'lora': "
            "fuse it into the model by mlx_lm.fuse, or train it as LoRA"
        )
    options = config.nested("lora_parameters")
    rank = options.integer("rank", minimum=1, maximum=MAXIMUM_SIZE)
    scale = options.number("scale", minimum=-LARGEST / rank, maximum=LARGEST / rank)
    names = {name.removesuffix(A).removesuffix(B) for name in tensors}
    converted: dict[str, np.ndarray] = {}
    for module in sorted(names):
        for part, axis, ending in ((A, 1, LORA_A), (B, 0, LORA_B)):
            array = tensors.get(module + part)
            if array is None:
                other = next(name for name in tensors if name.startswith(module))
                raise InputError(
                    f"{file} has {shortened(other)} and no {shortened(module + part)}, "
                    "expected both factors of each projection and nothing else"
                )
            if array.ndim != 2 or array.shape[axis] != rank:
                raise InputError(
                    f"{file}: {shortened(module + part)} has shape {array.shape}, "
                    f"expected rank {rank} on axis {axis}, by lora_parameters"
                )
            converted[f"{MODEL_PREFIX}{module}{ending}"] = np.ascontiguousarray(array.T)
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": config.text("model", None),
        "lora_alpha": scale * rank,
        "lora_dropout": options.number("dropout", 0.0, minimum=0.0, maximum=1.0),
        "r": rank,
        "target_modules": sorted(names),
    }
    return settings, converted
