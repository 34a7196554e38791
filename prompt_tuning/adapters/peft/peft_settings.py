"""The settings of PEFT's adapters that we know: their defaults and what they mean.

As PEFT 0.21.2 writes them; readers of it fill in what is missing and warn of what they
do not know, and so do we.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from prompt_tuning.core.errors import InputError

Settings = Mapping[str, Any]

_COMMON: dict[str, Any] = {
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "inference_mode": True,
    "modules_to_save": None,
    "peft_version": "0.21.2",
    "revision": None,
    "task_type": None,
}
_PROMPT_LEARNING = _COMMON | {
    "num_attention_heads": None,
    "num_layers": None,
    "num_transformer_submodules": None,
    "num_virtual_tokens": None,
    "token_dim": None,
}
_PROMPT_TUNING = _PROMPT_LEARNING | {
    "prompt_tuning_init": "RANDOM",
    "prompt_tuning_init_text": None,
    "tokenizer_kwargs": None,
    "tokenizer_name_or_path": None,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "PROMPT_TUNING": _PROMPT_TUNING,
    "P_TUNING": _PROMPT_LEARNING,
    "PREFIX_TUNING": _PROMPT_LEARNING
    | {"encoder_hidden_size": None, "init_weights": None, "prefix_projection": False},
    "MULTITASK_PROMPT_TUNING": _PROMPT_TUNING
    | {
        "num_ranks": 1,
        "num_tasks": 1,
        "prompt_tuning_init_state_dict_path": None,
        "prompt_tuning_init_task": 0,
    },
    "IA3": _COMMON
    | {
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "feedforward_modules": None,
        "init_ia3_weights": True,
        "target_modules": None,
    },
    "LORA": _COMMON
    | {
        "alora_invocation_tokens": None,
        "alpha_pattern": {},
        "arrow_config": None,
        "bias": "none",
        "corda_config": None,
        "ensure_weight_tying": False,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "kasa_config": None,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 8,
        "lora_bias": False,
        "lora_dropout": 0.0,
        "lora_ga_config": None,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "monteclora_config": None,
        "qalora_group_size": 16,
        "r": 8,
        "rank_pattern": {},
        "target_modules": None,
        "target_parameters": None,
        "trainable_token_indices": None,
        "use_bdlora": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
        "velora_config": None,
    },
}
# Of each the value that changes nothing, and why any other is refused.
_REFUSED: dict[str, tuple[Any, str]] = {
    "bias": ("none", "biases of the frozen model were trained as well"),
    "use_dora": (False, "DoRA's magnitudes rescale whole kernels"),
    "lora_bias": (False, "biases were added to the adapter"),
    "use_qalora": (False, "QALoRA pools its inputs"),
    "use_bdlora": (None, "BD-LoRA's factors are block diagonal"),
    "kasa_config": (None, "KaSA's singular values stand between the factors"),
    "monteclora_config": (None, "MonteCLoRA mixes sampled factors"),
    "velora_config": (None, "VeLoRA's factors are not plain"),
    "alora_invocation_tokens": (None, "aLoRA acts on a part of each text"),
    "arrow_config": (None, "Arrow routes each token to other adapters"),
    "layer_replication": (None, "the model's layers were repeated"),
    "target_parameters": (None, "parameters outside of linear layers were adapted"),
    "trainable_token_indices": (None, "rows of the embedding table were trained"),
    "megatron_config": (None, "Megatron's parallel layers are named otherwise"),
}

# Ways to start LoRA that take the start away from the frozen weights.
_MOVES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")


def setting(settings: Settings, name: str) -> Any:
    """A setting, or PEFT's default where it is missing; None where there is neither."""
    defaults = DEFAULTS.get(settings["peft_type"], {})
    return settings.get(name, defaults.get(name))


def check_supported(settings: Settings, source: str) -> None:
    """Refuses variants of a method that change more than we can express.

    Raises:
      InputError: with the setting and the reason.
    """
    reasons = _REFUSED if settings["peft_type"] == "LORA" else {}
    wanted = {"modules_to_save": (None, "whole modules were trained"), **reasons}
    for name, (plain, reason) in wanted.items():
        found = setting(settings, name)
        if found != plain and found:
            raise InputError(
                f"{source} has {name} = {found!r}, expected {plain!r}: {reason}, which "
                "is not read here. Merge the adapter with PEFT (merge_and_unload), or "
                "train it without that"
            )
    start = setting(settings, "init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_MOVES_BASE):
        raise InputError(
            f"{source} has init_lora_weights = {start!r}, which changes the frozen "
            "weights: save it with path_initial_model_for_weight_conversion, which "
            "makes a plain LoRA of it"
        )


def positive(settings: Settings, name: str, source: str) -> int:
    """A setting that counts something.

    Raises:
      InputError: unless it is a positive integer.
    """
    found = setting(settings, name)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise InputError(f"{source} has {name} {found!r}, expected a positive integer")
    return found


def submodules(settings: Settings, source: str) -> int:
    """How many stacks get rows: 2 for an encoder-decoder unless the settings say 1.

    Raises:
      InputError: for any other number.
    """
    found = setting(settings, "num_transformer_submodules")
    if found is None:
        return 2 if setting(settings, "task_type") == "SEQ_2_SEQ_LM" else 1
    if found not in (1, 2):
        raise InputError(
            f"{source} has num_transformer_submodules {found!r}, expected 1 or 2"
        )
    return found


def rank_of(settings: Settings, module: str) -> int:
    """The rank of a module's LoRA."""
    return _patterned(settings, "rank_pattern", "r", module)


def scaling_of(settings: Settings, module: str) -> float:
    """What a module's low-rank product is multiplied by.

    `alpha / r` (Hu et al. 2021, section 4.1), or `alpha / sqrt(r)` where the settings
    ask for rank stabilisation (Kalajdzievski 2023).
    """
    alpha = _patterned(settings, "alpha_pattern", "lora_alpha", module)
    return alpha / divisor(settings, rank_of(settings, module))


def divisor(settings: Settings, rank: int) -> float:
    """By what alpha is divided."""
    return math.sqrt(rank) if setting(settings, "use_rslora") else float(rank)


def _patterned(settings: Settings, patterns: str, plain: str, module: str) -> Any:
    """The value of the first pattern that a module's name ends with, else the plain."""
    for pattern, value in (setting(settings, patterns) or {}).items():
        try:
            found = re.match(rf"(.*\.)?({pattern})$", module)
        except re.error as error:
            raise InputError(
                f"{patterns} has {pattern!r}, which is no regular expression: {error}"
            ) from error
        if found:
            return value
    return setting(settings, plain)
