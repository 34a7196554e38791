"""Settings of PEFT's adapters: their defaults and their meaning.

The defaults are those of PEFT 0.21.2. Like PEFT, we fill in missing settings.
"""

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_sizes import MAXIMUM_SIZE
from prompt_tuning.core.patterns import compile_pattern
from prompt_tuning.core.typed_json import JsonObject

Settings = Mapping[str, Any]

SEQ_CLS, TOKEN_CLS, SAVED_HEADS = "SEQ_CLS", "TOKEN_CLS", ("classifier", "score")
"""PEFT's tasks for class heads, and the names of such a head."""
POOLERS = ("pooler", "head", "classification_head")
"""Modules with the dense layer before the head that PEFT trains on request.

BERT's is `pooler`, ModernBERT's `head`.
"""

LARGEST = 1e30
"""Maximum absolute value of an alpha; float32 can represent it."""
SIZES = (
    "num_attention_heads",
    "num_layers",
    "num_ranks",
    "num_tasks",
    "num_transformer_submodules",
    "num_virtual_tokens",
    "r",
    "token_dim",
)
MODULES = ("exclude_modules", "feedforward_modules", "target_modules")
TEXTS = ("base_model_name_or_path", "revision", "task_type")


def _unset(*names: str) -> dict[str, None]:
    """Returns settings that are None by default."""
    return dict.fromkeys(names)


_COMMON: dict[str, Any] = {
    **_unset("auto_mapping", "base_model_name_or_path", "modules_to_save"),
    **_unset("revision", "task_type"),
    "inference_mode": True,
    "peft_version": "0.21.2",
}
_PROMPT_LEARNING = _COMMON | _unset(
    *("num_attention_heads", "num_layers", "num_transformer_submodules"),
    *("num_virtual_tokens", "token_dim"),
)
_PROMPT_TUNING = _PROMPT_LEARNING | {
    **_unset("prompt_tuning_init_text", "tokenizer_kwargs", "tokenizer_name_or_path"),
    "prompt_tuning_init": "RANDOM",
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "PROMPT_TUNING": _PROMPT_TUNING,
    "P_TUNING": _PROMPT_LEARNING,
    "CARTRIDGE": _PROMPT_LEARNING | {"num_frozen_tokens": 1},
    "CPT": _PROMPT_LEARNING
    | {
        **_unset("cpt_mask", "cpt_token_ids", "cpt_tokens_type_mask"),
        **_unset("tokenizer_name_or_path"),
        "opt_loss_decay_factor": 1.0,
        "opt_projection_epsilon": 0.1,
        "opt_projection_format_epsilon": 0.1,
        "opt_weighted_loss_type": "none",
    },
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
        **_unset("exclude_modules", "feedforward_modules", "target_modules"),
        "fan_in_fan_out": False,
        "init_ia3_weights": True,
    },
    "TRAINABLE_TOKENS": _COMMON
    | {"init_weights": True, "target_modules": None, "token_indices": []},
    "LORA": _COMMON
    | {
        **_unset("alora_invocation_tokens", "arrow_config", "corda_config"),
        **_unset("eva_config", "exclude_modules", "kasa_config", "layer_replication"),
        **_unset("layers_pattern", "layers_to_transform", "lora_ga_config"),
        **_unset("megatron_config", "monteclora_config", "target_modules"),
        **_unset("target_parameters", "trainable_token_indices", "use_bdlora"),
        **_unset("velora_config"),
        "alpha_pattern": {},
        "bias": "none",
        "ensure_weight_tying": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "loftq_config": {},
        "lora_alpha": 8,
        "lora_bias": False,
        "lora_dropout": 0.0,
        "megatron_core": "megatron.core",
        "qalora_group_size": 16,
        "r": 8,
        "rank_pattern": {},
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
    },
}
# For each setting, the value that changes nothing, and why others are not supported.
_REFUSED: dict[str, tuple[Any, str]] = {
    "lora_bias": (False, "biases were added to the adapter"),
    "use_qalora": (False, "QALoRA pools its inputs"),
    "use_bdlora": (None, "BD-LoRA's factors are block diagonal"),
    "kasa_config": (None, "KaSA has singular values between the factors"),
    "monteclora_config": (None, "MonteCLoRA mixes sampled factors"),
    "velora_config": (None, "VeLoRA's factors are not plain"),
    "arrow_config": (None, "Arrow routes each token to other adapters"),
    "layer_replication": (None, "the model's layers were repeated"),
    "megatron_config": (None, "Megatron's parallel layers have other names"),
}

# Variants that depend on the text; PEFT cannot merge them either.
_UNMERGED = ("arrow_config",)

# Settings of other releases that do not change what an adapter computes.
_WITHOUT_EFFECT = ("enable_lora", "merge_weights", "runtime_config")

# LoRA initializations that subtract an initial product, which depends on data or random
# numbers, from the frozen weights; `moved_base` handles the others.
_MOVES_BASE = ("pissa_", "corda", "lora_ga", "loftq")


def check_types(settings: JsonObject) -> None:
    """Checks the types and ranges of all settings that we read.

    Settings of unsupported methods are not checked.

    Raises:
      InputError: for the first setting with a wrong type or out of range.
    """
    known = DEFAULTS.get(settings.text("peft_type"), {})
    for name in SIZES:
        if name in known:
            settings.integer(name, None, minimum=1, maximum=MAXIMUM_SIZE)
    for name in TEXTS:
        settings.text(name, None)
    for name in MODULES:
        if name in known and name in settings and not _names_modules(settings, name):
            settings.refuse(name, "a text or a list of texts")
    if "r" in known:
        _check_lora(settings)


def _names_modules(settings: JsonObject, name: str) -> bool:
    value = settings.values[name]
    return type(value) is str or (
        type(value) is list and all(type(module) is str for module in value)
    )


def _check_lora(settings: JsonObject) -> None:
    bounds = {"minimum": -LARGEST, "maximum": LARGEST}
    settings.flag("use_rslora", None)
    settings.flag("use_dora", None)
    if settings.values.get("alora_invocation_tokens") is not None:
        tokens = settings.sequence("alora_invocation_tokens")
        known = all(type(x) is int and 0 <= x < MAXIMUM_SIZE for x in tokens)
        if not tokens or not known:
            expected = "a list of one or more token ids, or null"
            settings.refuse("alora_invocation_tokens", expected)
    settings.number("lora_dropout", None, minimum=0.0, maximum=1.0)
    settings.number("lora_alpha", None, **bounds)
    alphas = settings.nested("alpha_pattern", {})
    for pattern in alphas.values:
        alphas.number(pattern, **bounds)
    ranks = settings.nested("rank_pattern", {})
    for pattern in ranks.values:
        ranks.integer(pattern, minimum=1, maximum=MAXIMUM_SIZE)


def setting(settings: Settings, name: str) -> Any:
    """Returns a setting, or PEFT's default if it is missing or null."""
    defaults = DEFAULTS.get(settings["peft_type"], {})
    value = settings.get(name)
    return defaults.get(name) if value is None else value


def check_supported(settings: Settings, source: str) -> None:
    """Checks that an adapter does not use an unsupported variant.

    Raises:
      InputError: with the setting and the reason.
    """
    reasons = _REFUSED if settings["peft_type"] == "LORA" else {}
    supported = {"modules_to_save": (None, "whole modules were trained"), **reasons}
    if only_saves_head(settings):
        del supported["modules_to_save"]
    for name, (neutral, reason) in supported.items():
        value = setting(settings, name)
        if value != neutral and value:
            merge = "Merge the adapter with PEFT (merge_and_unload), or train"
            remedy = "Train" if name in _UNMERGED else merge
            raise InputError(
                f"{source} has {name} = {shown(value)}, expected {neutral!r}: "
                f"{reason}, which is not supported. {remedy} it without this setting"
            )
    bias = setting(settings, "bias")
    if settings["peft_type"] == "LORA" and bias not in ("none", "lora_only", "all"):
        raise InputError(
            f"{source} has bias = {shown(bias)}, expected 'none', 'lora_only' or 'all'"
        )
    _warn_of_unknown(settings, source)
    start = setting(settings, "init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_MOVES_BASE):
        raise InputError(
            f"{source} has init_lora_weights = {shown(start)}, which changes the "
            "frozen weights: save it with path_initial_model_for_weight_conversion, "
            "which converts it to a plain LoRA"
        )


def only_saves_head(settings: Settings) -> bool:
    """Whether a class head is all that PEFT trained as a whole."""
    saved = settings.get("modules_to_save")
    return (
        settings.get("task_type") in (SEQ_CLS, TOKEN_CLS)
        and isinstance(saved, list)
        and all(name in (*SAVED_HEADS, *POOLERS) for name in saved)
    )


def _warn_of_unknown(settings: Settings, source: str) -> None:
    """Warns of each unknown setting of LoRA or IA3 that may matter."""
    if settings["peft_type"] not in ("LORA", "IA3"):
        return
    known = {*DEFAULTS[settings["peft_type"]], *_WITHOUT_EFFECT, "peft_type"}
    for name, value in settings.items():
        if name not in known and value:
            warnings.warn(
                f"{source} has the unknown setting {shown(name)} = {shown(value)}, "
                "which is ignored, as PEFT 0.21 does: what the adapter computes may "
                "depend on it",
                stacklevel=3,
            )


def positive_setting(settings: Settings, name: str, source: str) -> int:
    """Returns the positive integer of a setting.

    Raises:
      InputError: if it is not.
    """
    value = setting(settings, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(
            f"{source} has {name} {shown(value)}, expected a positive integer"
        )
    return value


def submodules(settings: Settings, source: str) -> int:
    """Returns the number of stacks with rows, by default 2 for an encoder-decoder.

    Raises:
      InputError: if the setting is neither 1 nor 2.
    """
    count = setting(settings, "num_transformer_submodules")
    if count is None:
        return 2 if setting(settings, "task_type") == "SEQ_2_SEQ_LM" else 1
    if count not in (1, 2):
        raise InputError(
            f"{source} has num_transformer_submodules {shown(count)}, expected 1 or 2"
        )
    return count


def rank_of(settings: Settings, module: str) -> int:
    """Returns the rank of a module's LoRA."""
    return _patterned(settings, "rank_pattern", "r", module)


def scaling_of(settings: Settings, module: str) -> float:
    """Returns the factor of a module's low-rank product.

    This is `alpha / r` (Hu et al. 2021, section 4.1), or `alpha / sqrt(r)` with rank
    stabilization (Kalajdzievski 2023).
    """
    alpha = _patterned(settings, "alpha_pattern", "lora_alpha", module)
    return alpha / divisor(settings, rank_of(settings, module))


def divisor(settings: Settings, rank: int) -> float:
    """Returns the divisor of alpha."""
    return math.sqrt(rank) if setting(settings, "use_rslora") else float(rank)


def _patterned(settings: Settings, patterns: str, plain: str, module: str) -> Any:
    """Returns the value of the first pattern that matches, else the default."""
    values = setting(settings, patterns) or {}
    pattern = find_pattern(values, patterns, module)
    return setting(settings, plain) if pattern is None else values[pattern]


def find_pattern(patterns: Iterable[str], name: str, module: str) -> str | None:
    """Returns the first pattern that matches a module, as PEFT does; None if none does.

    Args:
      patterns: expressions that match a module's name, or its end after a dot.
      name: name of the setting, for messages.
      module: name of the module.
    """
    for pattern in patterns:
        if compile_pattern(pattern, name, r"(.*\.)?({})").matches(module):
            return pattern
    return None
