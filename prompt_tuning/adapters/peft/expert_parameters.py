"""Names of LoRA for experts, which PEFT selects by `target_parameters`.

Transformers holds a projection of all experts as one parameter of the module `experts`.
PEFT wraps that module once per adapted parameter, in order, so the last one is
outermost:

    mlp.experts.lora_A.weight             of down_proj
    mlp.experts.base_layer.lora_A.weight  of gate_up_proj, if both are adapted

Here the parameter is a part of the name, e.g. `mlp.experts.gate_up_proj`.
"""

import re
from collections.abc import Collection

from prompt_tuning.adapters.adapter import LORA, Arrays
from prompt_tuning.adapters.peft.peft_settings import Settings
from prompt_tuning.core.errors import InputError, shortened, shown

PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
"""Parameters of `experts`, in the order in which PEFT wraps them.

Experts without gates (Nemotron-H) have the second one instead of the first.
"""

_WRAPPED = re.compile(r"(.*\.experts)((?:\.base_layer)*)(\.lora_[AB]\.weight)")
_NAMED = re.compile(rf"(.*\.experts)\.({'|'.join(PARAMETERS)})(\.lora_[AB]\.weight)")

MISREAD_FAMILIES = frozenset(
    [
        "deepseek_v3",
        "flex_olmo",
        "glm4_moe",
        "hunyuan_v1_moe",
        "olmoe",
        "qwen3_moe",
        "qwen3_next",
    ]
)
"""Families in which PEFT mistakes other modules for experts.

PEFT 0.21 (for transformers 5) takes the names in `MISREAD`, in any module, for
parameters of experts.
"""
MISREAD = ("gate_proj", "up_proj", "down_proj")


def check_names(modules: Collection[str], family: str | None) -> None:
    """Checks that PEFT does not mistake other modules for experts.

    Raises:
      InputError: with the first such module.
    """
    if family not in MISREAD_FAMILIES:
        return
    for module in sorted(modules):
        if module.endswith(tuple(f".{name}" for name in MISREAD)):
            raise InputError(
                f"{module} has a LoRA, which PEFT would take for one of the experts of "
                f"{family}: merge it into the model (convert --merge), or train it at "
                "attention alone"
            )


def is_of_experts(module: str) -> bool:
    """Whether a module's name belongs to a parameter of experts."""
    return module.endswith(tuple(f".experts.{name}" for name in PARAMETERS))


def name_parameters(settings: Settings, tensors: Arrays, source: str) -> Arrays:
    """Returns an adapter's tensors with expert parameters in their names.

    Raises:
      InputError: if `target_parameters` includes others than experts', or selects fewer
        parameters than have tensors.
    """
    targets = settings.get("target_parameters")
    if settings["peft_type"] != LORA or not targets:
        return tensors
    listed = targets if isinstance(targets, list) else []
    known = [x for x in listed if isinstance(x, str) and x.endswith(PARAMETERS)]
    if not known or len(known) < len(listed):
        raise InputError(
            f"{source} has target_parameters = {shown(targets)}, expected parameters "
            f"of experts alone, such as mlp.experts.{PARAMETERS[0]}: merge the adapter "
            "with PEFT (merge_and_unload), or train it for these"
        )
    named: Arrays = {}
    for name, tensor in tensors.items():
        match = _WRAPPED.fullmatch(name)
        if match is not None:
            module, depth = match[1], match[2].count(".base_layer")
            selected = [p for p in PARAMETERS if _is_selected(f"{module}.{p}", known)]
            if depth >= len(selected):
                raise InputError(
                    f"{source} has {shortened(name)}, but its target_parameters "
                    f"{shown(targets)} select {len(selected)} parameters of that module"
                )
            name = f"{module}.{selected[-1 - depth]}{match[3]}"
        named[name] = tensor
    return named


def _is_selected(parameter: str, targets: list[str]) -> bool:
    return any(parameter == x or parameter.endswith(f".{x}") for x in targets)


def wrap_parameters(tensors: Arrays) -> Arrays:
    """Returns an adapter's tensors by PEFT's names; inverse of `name_parameters`."""
    matches = {name: _NAMED.fullmatch(name) for name in tensors}
    adapted = {(m[1], m[2]) for m in matches.values() if m is not None}
    wrapped: Arrays = {}
    for name, tensor in tensors.items():
        match = matches[name]
        if match is not None:
            module, last = match[1], PARAMETERS.index(match[2])
            outer = sum((module, other) in adapted for other in PARAMETERS[last + 1 :])
            name = f"{module}{'.base_layer' * outer}{match[3]}"
        wrapped[name] = tensor
    return wrapped
