"""Names of LoRA for experts and routers, which PEFT selects by `target_parameters`.

Transformers holds a projection of all experts as one parameter of the module `experts`.
PEFT wraps that module once per adapted parameter, in order, so the last one is
outermost:

    mlp.experts.lora_A.weight             of down_proj
    mlp.experts.base_layer.lora_A.weight  of gate_up_proj, if both are adapted

Here the parameter is a part of the name, e.g. `mlp.experts.gate_up_proj`, and
`mlp.gate.weight` for a router, whose LoRA is stored as `mlp.gate.lora_A.weight`.
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
WEIGHT = ".weight"
"""End of the name of a parameter that is the weight of a module."""

_WRAPPED = re.compile(r"(.*\.experts)((?:\.base_layer)*)(\.lora_[AB]\.weight)")
_NAMED = re.compile(rf"(.*\.experts)\.({'|'.join(PARAMETERS)})(\.lora_[AB]\.weight)")
_OF_MODULE = re.compile(r"(.*)(\.lora_[AB]\.weight)")
_OF_WEIGHT = re.compile(r"(.*)\.weight(\.lora_[AB]\.weight)")

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


def is_parameter(module: str) -> bool:
    """Whether a module's name belongs to a parameter of experts or of a router."""
    return is_of_experts(module) or module.endswith(WEIGHT)


def name_parameters(settings: Settings, tensors: Arrays, source: str) -> Arrays:
    """Returns an adapter's tensors with the selected parameters in their names.

    Raises:
      InputError: if `target_parameters` includes others than experts' and weights of
        modules, or selects fewer parameters than have tensors.
    """
    targets = settings.get("target_parameters")
    if settings["peft_type"] != LORA or not targets:
        return tensors
    listed = targets if isinstance(targets, list) else []
    ends = (*PARAMETERS, WEIGHT)
    known = [x for x in listed if isinstance(x, str) and x.endswith(ends)]
    if not known or len(known) < len(listed):
        raise InputError(
            f"{source} has target_parameters = {shown(targets)}, expected parameters "
            f"of experts and routers, such as mlp.experts.{PARAMETERS[0]} and "
            "mlp.gate.weight: merge the adapter with PEFT (merge_and_unload), or train "
            "it for these"
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
        elif of_module := _OF_MODULE.fullmatch(name):
            weight = f"{of_module[1]}{WEIGHT}"
            name = f"{weight}{of_module[2]}" if _is_selected(weight, known) else name
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
        elif of_weight := _OF_WEIGHT.fullmatch(name):
            name = f"{of_weight[1]}{of_weight[2]}"
        wrapped[name] = tensor
    return wrapped
