"""The options of the command line, with the types and defaults of what they set."""

import dataclasses
from collections.abc import Mapping
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from prompt_tuning.config import flat_options
from prompt_tuning.config.flat_option import FlatOption
from prompt_tuning.settings.class_head import ClassHead
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.settings.distillation_settings import DistillationSettings
from prompt_tuning.settings.evaluation_settings import Evaluation
from prompt_tuning.settings.lora_settings import LoRASettings
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.settings.rollout_settings import Rollouts
from prompt_tuning.settings.run_settings import RunSettings
from prompt_tuning.settings.trained_tokens import TrainedTokens

SETTINGS: Mapping[str, Any] = {
    "ContextDistillation": DistillationSettings,
    "LoRA": LoRASettings,
    "Run": RunSettings,
    **{
        settings.__name__: settings
        for settings in (
            ClassHead,
            DataSource,
            Evaluation,
            Pretrained,
            Rollouts,
            TrainedTokens,
        )
    },
}
"""The class with the fields that options set, by the name that configs have for it."""


def _completed(option: FlatOption) -> FlatOption:
    """Returns an option with the type, choices and default of its setting."""
    owner, _, name = option.setting.rpartition(".")
    settings = SETTINGS.get(owner.rpartition("/")[2])
    if settings is None:
        return option
    default = settings.__dataclass_fields__[name].default
    hint = get_type_hints(settings, include_extras=True)[name]
    if NoneType in get_args(hint):
        hint = get_args(hint)[0]
    is_choice = get_origin(hint) is Literal
    kind = str if is_choice or option.choices else hint
    has_default = default is not dataclasses.MISSING
    return dataclasses.replace(
        option,
        kind=option.kind or kind,
        default=default if option.default is None and has_default else option.default,
        choices=get_args(hint) if is_choice else option.choices,
    )


TABLE = tuple(map(_completed, flat_options.TABLE))
OPTIONS: Mapping[str, FlatOption] = {option.name: option for option in TABLE}
