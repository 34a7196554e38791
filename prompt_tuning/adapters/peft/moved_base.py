"""PEFT's LoRAs that subtracted their initial product from the frozen weights.

PEFT does so again when it loads such an adapter. Here it becomes a plain LoRA of twice
the rank, `[A; A_0]` and `[B, -B_0]`. PEFT itself makes the same one when it saves with
`path_initial_model_for_weight_conversion` (`subtract_mutated_init`).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from prompt_tuning.adapters.peft import peft_settings
from prompt_tuning.adapters.peft.folder import AdapterFolder
from prompt_tuning.adapters.peft.modules import Projection, by_module
from prompt_tuning.adapters.peft.peft_settings import Settings
from prompt_tuning.adapters.peft.shape_checks import LORA_A, LORA_B, MODEL_PREFIX
from prompt_tuning.adapters.peft.table_copies import FrozenReader
from prompt_tuning.core.errors import InputError

RECOMPUTED = ("pissa", "olora")
"""Values of `init_lora_weights` with an initial product that depends on the weights."""


def moves_base(settings: Settings) -> bool:
    """Whether an adapter belongs to changed weights that can be recomputed."""
    return _initial(settings) in RECOMPUTED


def _initial(settings: Settings) -> str:
    """Returns the initialization in lower case, as PEFT compares `OLoRA`."""
    return str(peft_settings.setting(settings, "init_lora_weights")).lower()


def as_plain_lora(
    folder: AdapterFolder,
    names: Mapping[str, str],
    known: Mapping[str, Projection],
    frozen: FrozenReader | None,
) -> AdapterFolder:
    """Returns the plain LoRA of twice the rank that computes the same.

    `folder` is a LoRA for which `moves_base` holds; `frozen` reads the model's weights,
    or is None if they are not available. Other arguments are as in `lora.read_lora`.

    Raises:
      InputError: if the weights are not available, are quantized, or have other shapes.
    """
    initial = _initial(folder.settings)
    has = f"{folder.source} has init_lora_weights = {initial!r}"
    if frozen is None:
        raise InputError(
            f"{has}, whose first product is computed from the model's weights: name "
            "the folder of the model that the adapter is for"
        )
    if peft_settings.setting(folder.settings, "use_dora"):
        raise InputError(f"{has} and use_dora, which is not supported together")
    tensors, kernels = dict(folder.tensors), {}
    for module, parts in by_module(known).items():
        if module not in names:
            continue
        whole = []
        for part in parts:
            if part.path not in kernels:
                kernels[part.path] = frozen(f"{part.path}/kernel")
            whole.append(kernels[part.path][part.modules.index(module)])
        kernel = _fused(whole, parts)
        if kernel.dtype.kind != "f" and kernel.dtype.name != "bfloat16":
            raise InputError(f"{has}, which needs a model that is not quantized")
        a, b = (f"{MODEL_PREFIX}{names[module]}{x}" for x in (LORA_A, LORA_B))
        scaling, rank = (
            peft_settings.scaling_of(folder.settings, module),
            peft_settings.rank_of(folder.settings, module),
        )
        first, second = _first_factors(kernel.astype("f4"), scaling, rank, initial)
        if (tensors[a].shape, tensors[b].shape) != (first.shape, second.shape):
            raise InputError(
                f"{folder.source}: the LoRA of {module} has shapes {tensors[a].shape} "
                f"and {tensors[b].shape}, but the model's weights {kernel.shape}; was "
                "it made for another model?"
            )
        tensors[a] = np.concatenate([tensors[a], first])
        tensors[b] = np.concatenate([tensors[b], -second], axis=1)
    settings = _doubled(folder.settings)
    return dataclasses.replace(folder, settings=settings, tensors=tensors)


def _fused(
    kernels: list[np.ndarray], parts: list[Projection]
) -> Float[np.ndarray, "in out"]:
    """Returns the weights of a module from those of its projections."""
    count = parts[0].module_out
    whole = np.empty((parts[0].size_in, count), kernels[0].dtype)
    for kernel, part in zip(kernels, parts, strict=True):
        whole[:, part.part.columns(count)] = kernel
    return whole


def _first_factors(
    kernel: Float[np.ndarray, "in out"], scaling: float, rank: int, initial: str
) -> tuple[Float[np.ndarray, "r in"], Float[np.ndarray, "out r"]]:
    """Returns PEFT's initial `A` and `B`, up to the signs of their ranks."""
    if initial == "olora":
        q, r = np.linalg.qr(kernel.T)
        return r[:rank], q[:, :rank]
    v, values, u = np.linalg.svd(kernel.T, full_matrices=False)
    roots = np.sqrt(values[:rank] / np.float32(scaling))
    return roots[:, None] * u[:rank], v[:, :rank] * roots


def _doubled(settings: Settings) -> dict[str, Any]:
    """Returns the settings of the plain LoRA, with the same scalings."""
    factor = math.sqrt(2) if peft_settings.setting(settings, "use_rslora") else 2
    ranks, alphas = (
        peft_settings.setting(settings, name) or {}
        for name in ("rank_pattern", "alpha_pattern")
    )
    return dict(settings) | {
        "init_lora_weights": True,
        "r": 2 * peft_settings.setting(settings, "r"),
        "lora_alpha": factor * peft_settings.setting(settings, "lora_alpha"),
        "rank_pattern": {pattern: 2 * rank for pattern, rank in ranks.items()},
        "alpha_pattern": {pattern: factor * x for pattern, x in alphas.items()},
    }
