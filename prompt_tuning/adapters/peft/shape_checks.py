"""Check the shapes of a PEFT adapter's arrays against its settings."""

from collections.abc import Mapping

import numpy as np

from prompt_tuning.adapters.peft.expert_parameters import is_of_experts
from prompt_tuning.adapters.peft.peft_settings import (
    Settings,
    positive_setting,
    rank_of,
    setting,
    submodules,
)
from prompt_tuning.core.errors import InputError, shown

Tensors = Mapping[str, np.ndarray]
EMBEDDINGS = "prompt_embeddings"
COLUMNS = "prefix_task_cols"
ROWS = "prefix_task_rows"
MODEL_PREFIX = "base_model.model."
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
LORA_MAGNITUDE = ".lora_magnitude_vector"
IA3 = ".ia3_l"


def check_shapes(settings: Settings, tensors: Tensors, source: str) -> None:
    """Compares shapes with settings for all supported kinds.

    Raises:
      InputError: for the first array that is missing or has another shape.
    """
    check = _CHECKS.get(settings["peft_type"])
    if check is not None:
        check(settings, tensors, source)


def require_tensor(tensors: Tensors, name: str, axes: int, source: str) -> np.ndarray:
    """Returns an array by its name.

    Raises:
      InputError: if it is missing or has another number of axes.
    """
    if name not in tensors:
        raise InputError(f"{source} has {shown(sorted(tensors))}, expected {name!r}")
    if tensors[name].ndim != axes:
        raise InputError(
            f"{source}: {name} has shape {tensors[name].shape}, expected {axes} axes"
        )
    return tensors[name]


def _rows(settings: Settings, tensors: Tensors, source: str) -> int:
    """Checks the shared rows of a prompt, and returns their number."""
    rows = require_tensor(tensors, EMBEDDINGS, 2, source)
    length = positive_setting(settings, "num_virtual_tokens", source)
    count = submodules(settings, source)
    width = setting(settings, "token_dim")
    if len(rows) not in (length, length * count):
        raise InputError(
            f"{source}: {EMBEDDINGS} has shape {rows.shape}, expected {length} rows "
            f"or {count} times as many, by its settings"
        )
    if width is not None and rows.shape[1] != width:
        raise InputError(
            f"{source}: {EMBEDDINGS} has shape {rows.shape}, but token_dim is {width}"
        )
    return len(rows)


def _multitask(settings: Settings, tensors: Tensors, source: str) -> None:
    rows = _rows(settings, tensors, source)
    width = tensors[EMBEDDINGS].shape[1]
    tasks = positive_setting(settings, "num_tasks", source)
    rank = positive_setting(settings, "num_ranks", source)
    for name, shape in ((COLUMNS, (tasks, rows, rank)), (ROWS, (tasks, rank, width))):
        factor = require_tensor(tensors, name, 3, source)
        if factor.shape != shape:
            raise InputError(
                f"{source}: {name} has shape {factor.shape}, expected {shape}, by the "
                "tasks and ranks of its settings"
            )


def _prefix(settings: Settings, tensors: Tensors, source: str) -> None:
    table = require_tensor(tensors, EMBEDDINGS, 2, source)
    length, layers, width = (
        positive_setting(settings, name, source)
        for name in ("num_virtual_tokens", "num_layers", "token_dim")
    )
    heads = positive_setting(settings, "num_attention_heads", source)
    if width % heads:
        raise InputError(
            f"{source} has token_dim {width}, not a multiple of its {heads} heads"
        )
    if table.shape != (length, 2 * layers * width):
        raise InputError(
            f"{source}: {EMBEDDINGS} has shape {table.shape}, expected "
            f"{(length, 2 * layers * width)}: a key and a value of {width} numbers for "
            f"each of {layers} layers"
        )


def _lora(settings: Settings, tensors: Tensors, source: str) -> None:
    for name, array in tensors.items():
        if not name.endswith((LORA_A, LORA_B)):
            continue
        module = module_name(name)
        rank = rank_of(settings, module)
        inner = array.shape[0 if name.endswith(LORA_A) else -1] if array.ndim else 0
        # Each expert has as many rows of its own.
        fits = inner % rank == 0 and inner if is_of_experts(module) else inner == rank
        if array.ndim != 2 or not fits:
            raise InputError(
                f"{source}: {name} has shape {array.shape}, expected rank {rank}, by r "
                "or rank_pattern"
            )
        if name.endswith(LORA_A):
            _check_magnitude(settings, tensors, name.removesuffix(LORA_A), source)
        twin = LORA_B if name.endswith(LORA_A) else LORA_A
        if name.removesuffix(LORA_A).removesuffix(LORA_B) + twin not in tensors:
            raise InputError(f"{source} has {name}, but not its {twin[1:]}")


def _check_magnitude(
    settings: Settings, tensors: Tensors, module: str, source: str
) -> None:
    """Checks that a module has magnitudes if and only if the settings use DoRA."""
    name, dora = module + LORA_MAGNITUDE, bool(setting(settings, "use_dora"))
    if dora != (name in tensors):
        found, needed = ("no ", "") if dora else ("", "not ")
        raise InputError(
            f"{source} has {found}{name}, but its settings are {needed}those of DoRA "
            f"(use_dora is {dora}); is the file complete?"
        )


def _ia3(settings: Settings, tensors: Tensors, source: str) -> None:
    for name, array in tensors.items():
        if name.endswith(IA3) and (array.ndim != 2 or 1 not in array.shape):
            raise InputError(
                f"{source}: {name} has shape {array.shape}, expected [out, 1] or "
                "[1, in]"
            )


def module_name(name: str) -> str:
    """Returns the module that a LoRA or IA3 tensor belongs to."""
    name = name.removeprefix(MODEL_PREFIX)
    for suffix in (LORA_A, LORA_B, LORA_MAGNITUDE, IA3):
        name = name.removesuffix(suffix)
    return name


_CHECKS = {
    "PROMPT_TUNING": _rows,
    "P_TUNING": _rows,
    "CPT": _rows,
    "MULTITASK_PROMPT_TUNING": _multitask,
    "PREFIX_TUNING": _prefix,
    "CARTRIDGE": _prefix,
    "LORA": _lora,
    "IA3": _ia3,
}
