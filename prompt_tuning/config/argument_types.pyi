"""Types of arguments of the Python interface.

Written by `python -m scripts.make_stub`; change the sources.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import optax

from prompt_tuning.config.deferred_factories import Configured
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameter_groups import ParameterGroup as _ParameterGroup
from prompt_tuning.core.rematerialization import Rematerialization as _Rematerialization
from prompt_tuning.losses.foreign_objective import LossFunction, LossFunctions
from prompt_tuning.losses.objective import ObjectiveConfig
from prompt_tuning.prompts.projection_adapters import AdapterSpec
from prompt_tuning.prompts.prompt_module import PromptModule
from prompt_tuning.settings.class_head import ClassHead as _ClassHead
from prompt_tuning.settings.mesh_shape import MeshShape as _MeshShape
from prompt_tuning.settings.pipeline import Pipeline as _Pipeline
from prompt_tuning.settings.prompting import Prompting as _Prompting
from prompt_tuning.settings.rollout_settings import Rollouts as _Rollouts
from prompt_tuning.settings.trained_tokens import TrainedTokens as _TrainedTokens

Method = (
    Configured[PromptModule]
    | Configured[AdapterSpec]
    | Configured[_TrainedTokens]
    | Configured[_ClassHead]
    | functools.partial[Any]
    | type[PromptModule]
)
Methods = Method | Sequence[Method] | Literal["auto"]
Objectives = Configured[ObjectiveConfig] | LossFunctions | LossFunction
Optimizer = Configured[optax.GradientTransformation] | optax.GradientTransformation
LearningRates = float | Configured[optax.Schedule]

class PretrainedFields(TypedDict, total=False):
    config: Configured[ModelConfig] | None
    tokenizer: str | None
    compute_dtype: str
    parameter_dtype: str | None
    quantization_group: int | None
    quantized_tables: bool
    weights: Literal["device", "pinned_host", "streamed"]
    trained_weights: Literal["device", "host"]
    slices: int | None
    checkpoint_activation: bool
    dropout_rate: float
    attention: Literal["auto", "reference", "flash"]
    rematerialization: Configured[_Rematerialization] | None
    encoder_rematerialization: Configured[_Rematerialization] | None
    eos_id: int | None
    assignment_map: Sequence[tuple[str, str | None]]
    fallback_to_scratch: bool

class TuneFields(TypedDict, total=False):
    start_from: str | None
    keep_optimizer_state: bool
    accumulate: int
    evaluate_every: int
    save_every: int
    log_every: int
    loggers: Sequence[str] | None
    keep_last: int
    keep_prompts: int | Literal["all"]
    save_paths: Sequence[str]
    keep_best: tuple[str, str] | str | None
    checkpoint_form: Literal["auto", "numpy", "orbax"]
    early_stopping: int
    early_stopping_metric: tuple[str, str] | str | None
    seed: int
    data_seed: int | None
    prompting: Configured[_Prompting] | None
    decoder_prompt: Method | None
    decoder_prompting: Configured[_Prompting] | None
    mesh: Configured[_MeshShape] | None
    pipeline: Configured[_Pipeline] | None
    groups: Sequence[Configured[_ParameterGroup]]
    rollouts: Configured[_Rollouts] | None
    split: Literal["train", "dev", "test"] | None
    batch_size: int
    batch_tokens: int | None
    buckets: int | None
    packing: bool
    packed_length: int | None
    use_token_type_ids: bool | None
    prompt_loss_weight: float
    on_nothing_learned: Literal["error", "skip"]
    separate_articles: bool
    use_loss_weights: bool
    example_weight_key: str | None
    balance_key: str | None
    advantages_key: str | None
    columns: Mapping[str, str] | None
    format: Literal["auto", "pairs", "messages", "sharegpt", "alpaca"]
    chat: bool
    chat_template: str | None
    chat_date: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    turns: Literal["auto", "together", "apart"]
    prompt_key: str | None
    completion_key: str
    joiner: str
    template: str | None
    prompt_id_key: str | None
    prompt_id_names: Sequence[str] | None
    prompt_id_aliases: Mapping[str, str] | None
    task_token: Literal["index", "sentinel"] | None
    sentinel_vocabulary_size: int | None
    add_eos: bool
    on_too_long: Literal["error", "skip", "truncate", "truncate_left", "truncate_right"]
    maximum_examples: int | None

class BatchFields(TypedDict, total=False):
    split: Literal["train", "dev", "test"] | None
    batch_tokens: int | None
    buckets: int | None
    packing: bool
    packed_length: int | None
    use_token_type_ids: bool | None
    prompt_loss_weight: float
    on_nothing_learned: Literal["error", "skip"]
    separate_articles: bool
    use_loss_weights: bool
    example_weight_key: str | None
    balance_key: str | None
    advantages_key: str | None
    columns: Mapping[str, str] | None
    format: Literal["auto", "pairs", "messages", "sharegpt", "alpaca"]
    chat: bool
    chat_template: str | None
    chat_date: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    turns: Literal["auto", "together", "apart"]
    prompt_key: str | None
    completion_key: str
    joiner: str
    template: str | None
    prompt_id_key: str | None
    prompt_id_names: Sequence[str] | None
    prompt_id_aliases: Mapping[str, str] | None
    task_token: Literal["index", "sentinel"] | None
    sentinel_vocabulary_size: int | None
    add_eos: bool
    on_too_long: Literal["error", "skip", "truncate", "truncate_left", "truncate_right"]
    maximum_examples: int | None

class EvaluationFields(TypedDict, total=False):
    exact_match: bool
    metrics: Sequence[str]
    labels: Sequence[str] | None
    length_normalize: bool
    calibrate: Sequence[str] | None
    new_tokens: int
    references_key: str | None
    category_key: str | None
    category_names: Sequence[str] | str | None
    resamples: int
    bootstrap_seed: int
    split: Literal["train", "dev", "test"] | None
    batch_size: int
    batch_tokens: int | None
    buckets: int | None
    packing: bool
    packed_length: int | None
    use_token_type_ids: bool | None
    prompt_loss_weight: float
    on_nothing_learned: Literal["error", "skip"]
    separate_articles: bool
    use_loss_weights: bool
    example_weight_key: str | None
    balance_key: str | None
    advantages_key: str | None
    columns: Mapping[str, str] | None
    format: Literal["auto", "pairs", "messages", "sharegpt", "alpaca"]
    chat: bool
    chat_template: str | None
    chat_date: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    turns: Literal["auto", "together", "apart"]
    prompt_key: str | None
    completion_key: str
    joiner: str
    template: str | None
    prompt_id_key: str | None
    prompt_id_names: Sequence[str] | None
    prompt_id_aliases: Mapping[str, str] | None
    task_token: Literal["index", "sentinel"] | None
    sentinel_vocabulary_size: int | None
    add_eos: bool
    on_too_long: Literal["error", "skip", "truncate", "truncate_left", "truncate_right"]
    maximum_examples: int | None
