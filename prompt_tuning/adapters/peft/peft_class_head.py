"""Converts a trained head of classes between PEFT's tensors and our parameters.

With `task_type` SEQ_CLS, PEFT trains the module `score` or `classifier` as a whole
(`modules_to_save`) and stores it beside any adapter: as `base_model.score.weight` with
prompts and prefixes, and as `base_model.model.score.weight` with LoRA and IA3.
"""

from typing import Any

import numpy as np

from prompt_tuning.adapters.adapter import CLASSES_PATH, Adapter, Arrays
from prompt_tuning.adapters.peft.peft_settings import SAVED_HEADS, SEQ_CLS, Settings
from prompt_tuning.adapters.peft.shape_checks import MODEL_PREFIX
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_config import ModelConfig

PREFIXES = ("base_model.", MODEL_PREFIX)
_NAMES = [f"{prefix}{module}." for prefix in PREFIXES for module in SAVED_HEADS]


def split_class_head(
    tensors: Arrays, settings: Settings, config: ModelConfig, source: str
) -> tuple[Arrays, Arrays]:
    """Returns our parameters of a head, none without one, and the other tensors.

    Raises:
      InputError: for a head that is not one matrix of the model's width.
    """
    if settings.get("task_type") != SEQ_CLS:
        return {}, tensors
    head = {name: x for name, x in tensors.items() if name.startswith(tuple(_NAMES))}
    others = {name: x for name, x in tensors.items() if name not in head}
    if not head:
        return {}, others
    shapes = {name: x.shape for name, x in head.items()}
    (name, kernel), *more = head.items()
    fits = name.endswith(".weight") and kernel.ndim == 2 and len(kernel) > 1
    if more or not fits or kernel.shape[1] != config.width:
        raise InputError(
            f"{source} has a head of classes {shown(shapes)}, expected one matrix of "
            f"two or more rows and the model's width, {config.width}"
        )
    return {CLASSES_PATH: kernel}, others


def without_class_head(adapter: Adapter) -> Arrays:
    """Returns the parameters of an adapter besides a head of classes."""
    return {p: x for p, x in adapter.parameters.items() if p != CLASSES_PATH}


def write_class_head(
    kernel: np.ndarray, *, beside_prompt: bool
) -> tuple[Arrays, dict[str, Any]]:
    """Returns PEFT's tensors of a head, and its settings.

    Args:
      kernel: `[C, D]`.
      beside_prompt: whether it is beside a prompt or a prefix.
    """
    prefix = PREFIXES[0] if beside_prompt else PREFIXES[1]
    settings = {"modules_to_save": list(SAVED_HEADS), "task_type": SEQ_CLS}
    return {f"{prefix}score.weight": kernel}, settings
