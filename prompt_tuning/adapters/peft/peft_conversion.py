"""Convert adapters between PEFT's form and ours.

PEFT's files (`folder`) and our parameters by path (`adapter`) differ in names, axes and
scalings. Where both forms can represent an adapter, no number changes.
"""

import dataclasses
from typing import Any

from prompt_tuning.adapters.adapter import (
    CARTRIDGE,
    CLASSES,
    IA3,
    LORA,
    MULTITASK,
    PREFIX,
    PROMPT,
    TOKENS,
    Adapter,
    Arrays,
    TokenIds,
)
from prompt_tuning.adapters.peft import adapted_projections, peft_settings, prompts
from prompt_tuning.adapters.peft.folder import AdapterFolder
from prompt_tuning.adapters.peft.lora_biases import read_biases, split_biases
from prompt_tuning.adapters.peft.peft_class_head import (
    class_head_of,
    split_class_head,
    without_class_head,
    write_class_head,
)
from prompt_tuning.adapters.peft.peft_settings import Settings
from prompt_tuning.adapters.peft.peft_token_rows import (
    has_token_rows,
    read_token_rows,
    split_token_rows,
    without_rows,
    write_token_rows,
)
from prompt_tuning.adapters.peft.shape_checks import (
    COLUMNS,
    EMBEDDINGS,
    LORA_A,
    LORA_B,
    LORA_MAGNITUDE,
    ROWS,
)
from prompt_tuning.adapters.peft.shape_checks import IA3 as IA3_ENDING
from prompt_tuning.adapters.peft.table_copies import FrozenReader, without_copies
from prompt_tuning.core.errors import InputError, shortened, shown
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.hf_folder import as_tagger

READ = (PROMPT, "P_TUNING", "CPT", MULTITASK, PREFIX, CARTRIDGE, LORA, IA3, TOKENS)
TASKS = {"decoder_only": "CAUSAL_LM", "encoder_decoder": "SEQ_2_SEQ_LM"}
_ENDINGS = {LORA: (LORA_A, LORA_B, LORA_MAGNITUDE), IA3: (IA3_ENDING,)}
_NAMES = {
    PROMPT: {EMBEDDINGS},
    "P_TUNING": {EMBEDDINGS},
    "CPT": {EMBEDDINGS},
    PREFIX: {EMBEDDINGS},
    CARTRIDGE: {EMBEDDINGS},
    MULTITASK: {EMBEDDINGS, COLUMNS, ROWS},
}


def from_peft(
    folder: AdapterFolder,
    config: ModelConfig,
    source: str,
    frozen: FrozenReader | None = None,
) -> Adapter:
    """Converts a PEFT adapter to ours.

    Args:
      folder: contents of the adapter's folder.
      config: config of the adapter's model.
      source: origin of the adapter, for messages.
      frozen: reads the model's parameters: embeddings and head for comparison with
        copies in the folder, and weights that a LoRA starts from; None if not
        available.

    Raises:
      InputError: if the method or variant is not supported, a tensor does not belong to
        it, or a shape does not fit the model.
    """
    if folder.settings.get("task_type") == peft_settings.TOKEN_CLS:
        config = as_tagger(config)
    folder = dataclasses.replace(folder, source=source)
    head, tensors = split_class_head(folder, config)
    adapter = _read(folder.with_tensors(tensors), config, frozen)
    return dataclasses.replace(adapter, parameters=adapter.parameters | head)


def _read(
    folder: AdapterFolder, config: ModelConfig, frozen: FrozenReader | None
) -> Adapter:
    """Converts an adapter without a class head; see `from_peft`."""
    kind, settings, source = folder.kind, folder.settings, folder.source
    if kind not in READ:
        raise InputError(
            f"{source} has peft_type {shown(kind)}, expected one of {', '.join(READ)}"
        )
    peft_settings.check_supported(settings, source)
    _check_task(folder, config)
    token_rows: Arrays = {}
    tensors = folder.tensors
    if has_token_rows(settings):
        token_rows, tensors = split_token_rows(tensors, config)
    biases, tensors = split_biases(settings, tensors)
    rest = without_copies(folder.with_tensors(tensors), config, frozen)
    _check_names(rest)
    tokens = TokenIds()
    if has_token_rows(settings):
        trained = folder.with_tensors(token_rows)
        token_rows, tokens = read_token_rows(trained, config, frozen)
    if kind == TOKENS:
        return Adapter(
            kind=kind, parameters=token_rows, settings=settings, tokens=tokens
        )
    if kind in (LORA, IA3):
        adapter = adapted_projections.read_projections(rest, config, frozen)
        if kind == LORA:
            token_rows |= read_biases(biases, adapter, config, source)
        parameters = adapter.parameters | token_rows
        return dataclasses.replace(adapter, parameters=parameters, tokens=tokens)
    if kind in (PREFIX, CARTRIDGE):
        return prompts.read_prefix(rest, config)
    width = rest.tensors[EMBEDDINGS].shape[1]
    if width != config.width:
        raise InputError(
            f"{source} has vectors of {width} numbers, but the model's width is "
            f"{config.width}; was it trained on another model?"
        )
    _check_model(folder, config)
    prompts.check_vectors(config)
    stack = prompts.STACKS[config.architecture]
    if kind == MULTITASK:
        return prompts.read_multitask(rest, stack)
    return prompts.read_prompt_tuning(rest, stack)


def _check_task(folder: AdapterFolder, config: ModelConfig) -> None:
    """Checks that an adapter's task fits the model's architecture."""
    task = folder.settings.get("task_type")
    if task in TASKS.values() and task != TASKS[config.architecture]:
        trained, needed = (
            ("an encoder-decoder", "decoder-only")
            if task == TASKS["encoder_decoder"]
            else ("a decoder-only model", "an encoder-decoder")
        )
        raise InputError(
            f"{folder.source} has task_type {task}, so it was trained on {trained}, "
            f"but the model is {needed}{_trained_on(folder.settings)}"
        )


def _check_model(folder: AdapterFolder, config: ModelConfig) -> None:
    """Checks that prompt vectors belong to a model with the same depth and heads.

    Prompts of other models have the right shape if only the widths agree.
    """
    # Where PEFT does not find the sizes itself, as of T5Gemma, users may have given
    # those of the decoder's keys, which PEFT needs for prefixes.
    also = {"num_attention_heads": config.key_value_heads, "num_layers": config.layers}
    for name, expected in _describe_model(config).items():
        number = folder.settings.get(name)
        if number not in (None, expected, also[name]):
            raise InputError(
                f"{folder.source} has {name} {shown(number)}, but the model has "
                f"{expected}; was it trained on another model?"
                f"{_trained_on(folder.settings)}"
            )


def _trained_on(settings: Settings) -> str:
    """Returns the name of an adapter's model, for messages."""
    base = settings.get("base_model_name_or_path")
    return f" (base_model_name_or_path is {shown(base)})" if base else ""


def to_peft(
    adapter: Adapter,
    config: ModelConfig | None,
    *,
    base_model: str | None = None,
    task_type: str | None = None,
) -> AdapterFolder:
    """Converts an adapter to PEFT's form.

    If the adapter was read from PEFT, its settings are kept, including unknown ones,
    unless they no longer hold. All others get PEFT's defaults.

    Args:
      adapter: our adapter.
      config: config of the adapter's model; None if unknown, which is enough for input
        prompts.
      base_model: `base_model_name_or_path`; None to keep it.
      task_type: PEFT's task type; None to keep it, or derive it from the model.

    Raises:
      InputError: if PEFT cannot represent the adapter, or its shapes do not fit the
        model.
    """
    classes = class_head_of(adapter)
    adapter = dataclasses.replace(adapter, parameters=without_class_head(adapter))
    if config is not None and config.architecture == "encoder_decoder":
        adapter = _without_frozen_tokens(adapter)
    tensors, derived = _convert_tensors(adapter, config)
    if classes:
        beside_prompt = adapter.kind in _NAMES
        task = adapter.settings.get("task_type")
        head, of_head = write_class_head(
            classes, config, beside_prompt=beside_prompt, task=task
        )
        tensors, derived = tensors | head, derived | of_head
    settings = adapted_projections.with_defaults(adapter) | derived
    settings["task_type"] = task_type or settings["task_type"] or _task(adapter, config)
    if base_model is not None:
        settings["base_model_name_or_path"] = base_model
    return AdapterFolder(settings, tensors)


def _without_frozen_tokens(adapter: Adapter) -> Adapter:
    """Returns a cartridge, which PEFT only has for decoders, as a plain prefix."""
    if adapter.settings.get("peft_type") != CARTRIDGE:
        return adapter
    dropped = ("peft_type", "num_frozen_tokens")
    kept = {name: x for name, x in adapter.settings.items() if name not in dropped}
    return dataclasses.replace(adapter, settings=kept)


def _convert_tensors(
    adapter: Adapter, config: ModelConfig | None
) -> tuple[Arrays, dict[str, Any]]:
    """Returns PEFT's tensors and the settings that follow from them."""
    if adapter.kind in (PROMPT, MULTITASK):
        _check_stacks(adapter, config)
        if config is not None:
            prompts.check_vectors(config)
        write = (
            prompts.write_prompt_tuning
            if adapter.kind == PROMPT
            else prompts.write_multitask
        )
        tensors, settings = write(adapter)
        return tensors, settings | _describe_model(config)
    if adapter.kind == CLASSES:
        raise InputError(
            "PEFT stores a head of classes only beside an adapter: train a prompt or "
            "LoRA beside it"
        )
    if adapter.kind not in (LORA, IA3, PREFIX, TOKENS):
        raise InputError(
            f"PEFT has no method {adapter.kind}; for a run of a decoder-only model, an "
            "equivalent prefix is written"
        )
    if config is None:
        raise InputError(
            f"names and shapes of an adapter of kind {adapter.kind} depend on its "
            "model: set the model that it is for (convert --base_model)"
        )
    if adapter.kind == PREFIX:
        return prompts.write_prefix(adapter, config)
    tensors: Arrays = {}
    settings: dict[str, Any] = {}
    if adapter.tokens.rows:
        arguments = (adapter.parameters, adapter.tokens, config, adapter.kind)
        tensors, settings = write_token_rows(*arguments)
        adapter = dataclasses.replace(adapter, parameters=without_rows(adapter))
    if adapter.kind == TOKENS:
        return tensors, settings
    adapted, derived = adapted_projections.write_projections(adapter, config)
    return adapted | tensors, derived | settings


def _check_stacks(adapter: Adapter, config: ModelConfig | None) -> None:
    """Checks that an encoder-decoder's prompts include the encoder's.

    Raises:
      InputError: if not, because PEFT would move the decoder's prompt to the encoder.
    """
    if (
        config is not None
        and config.architecture == "encoder_decoder"
        and not any(path.startswith("encoder/") for path in adapter.parameters)
    ):
        raise InputError(
            "PEFT has no prompt for the decoder of an encoder-decoder alone: give the "
            "encoder one of the same length, or train a key/value prefix"
        )


def _task(adapter: Adapter, config: ModelConfig | None) -> str:
    if config is not None and config.bidirectional:
        return "FEATURE_EXTRACTION"
    if config is not None:
        return TASKS[config.architecture]
    encoder = any(path.startswith("encoder/") for path in adapter.parameters)
    return TASKS["encoder_decoder" if encoder else "decoder_only"]


def _describe_model(config: ModelConfig | None) -> dict[str, Any]:
    """Returns the settings that describe the model; PEFT fills in missing ones."""
    if config is None:
        return {}
    # For an encoder-decoder PEFT counts the encoder's layers.
    return {
        "num_attention_heads": config.heads,
        "num_layers": config.encoder_layers or config.layers,
    }


def _check_names(folder: AdapterFolder) -> None:
    """Checks that all tensors belong to the method; others would be lost."""
    kind = folder.kind
    endings, names = _ENDINGS.get(kind, ()), _NAMES.get(kind, set())
    others = [
        n for n in folder.tensors if n not in names and not n.endswith(endings or "\0")
    ]
    if others:
        raise InputError(
            f"{folder.source} contains {shortened(others[0])} and {len(others) - 1} "
            f"other tensors that do not belong to {kind}; modules that were trained as "
            "a whole are not supported"
        )
