"""Reads and writes Hugging Face folders: `config.json` and safetensors files.

A GGUF file (llama.cpp) is read like the folder that it was made from. transformers 4
and 5 are supported. `families` lists the families of models.
"""

import dataclasses
import difflib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from prompt_tuning.checkpoints.quantized.methods import (
    METHOD,
    METHODS,
    SETTINGS,
    open_weights,
)
from prompt_tuning.checkpoints.stored_tensors import (
    FusedPart,
    Recipe,
    StoredTensor,
    transpose,
)
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.file_names import check_links
from prompt_tuning.core.gguf_files import is_gguf, read_gguf
from prompt_tuning.core.model_choices import check_dtype
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import ALIASES, FAMILIES, REFUSED, class_labels, hf_settings
from prompt_tuning.families.class_labels import ClassLayers
from prompt_tuning.families.default_positions import with_positions
from prompt_tuning.families.family import Family, Recipes, StoredNames
from prompt_tuning.families.gguf.settings import (
    check_model_type,
    make_settings,
    rotary_divisors,
)
from prompt_tuning.families.gguf.weights import open_gguf_weights
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields
from prompt_tuning.families.layer_settings import SOFT_CAPS

TOKEN_IDS = {
    "bos_id": "bos_token_id",
    "pad_id": "pad_token_id",
    "decoder_start_id": "decoder_start_token_id",
}
EOS = "eos_token_id"
TIED = "tie_word_embeddings"
EMBEDDING = "token_embedder/embedding"
CONFIG, GENERATION = "config.json", "generation_config.json"
MAXIMUM_END_IDS = 64
"""Maximum number of tokens that end a generated text; each is compared in each step."""


def read_config(path: str | Path, **overrides: Any) -> ModelConfig:
    """Reads `config.json`, and `generation_config.json` for token ids that it lacks.

    The checkpoint also has a say: an `lm_head.weight` that equals the embedding table
    is tied to it, and some families have a bias of logits only if it is stored. Dropout
    rates are not read: a frozen model has no dropout unless you set `dropout_rate`.

    Args:
      path: folder of the model, or a GGUF file; its metadata is used if there is no
        `config.json` next to it.
      **overrides: fields of `ModelConfig` that replace those in the files; with
        `tied_head` the checkpoint is not opened.

    Raises:
      InputError: for a missing file or setting, an unknown `model_type`, activation or
        rope type, or an unsupported choice.
    """
    path = Path(path)
    sources = _read_sources(path)
    settings = sources[0]
    family = FAMILIES[_model_type(settings)]
    fields: dict[str, Any] = {"family": family.model_type}
    fields |= family.read_fields(settings)
    for field, name in SOFT_CAPS.items():
        if field not in fields:
            settings.require(name, None, "this family has no soft caps")
    fields |= _token_ids(sources, overrides)
    if is_gguf(path):
        fields |= _fields_of_gguf(path, family, settings, fields)
    elif "tied_head" not in overrides:
        stored = open_weights(path)
        fields["tied_head"] = _has_tied_head(family, settings, fields, stored)
        if family.logit_bias:
            fields["head_bias"] = any(name in stored for name in family.logit_bias)
            if not fields["head_bias"]:  # a base model, if it is an encoder
                fields["transform_activation"] = None
        fields |= class_labels.class_fields(
            settings, fields, stored, family.class_layers
        )
    try:
        return ModelConfig(**(fields | overrides))
    except InputError as error:
        raise InputError(f"{settings.source} cannot be followed: {error}") from error


def open_stored(path: Path) -> dict[str, StoredTensor]:
    """Opens the tensors of a folder or a GGUF file, by their names in a folder."""
    return open_gguf_weights(read_gguf(path)) if is_gguf(path) else open_weights(path)


def with_buffers(
    path: Path, stored: Mapping[str, StoredTensor], config: ModelConfig
) -> dict[str, StoredTensor]:
    """Adds arrays that transformers computes and the checkpoint lacks."""
    return {
        name: StoredTensor(array.shape, array.dtype, str(path), array.__getitem__)
        for name, array in find_family(config).buffers(config, stored).items()
    } | dict(stored)


def _read_sources(path: Path) -> list[HuggingFaceSettings]:
    folder = path.parent if is_gguf(path) else path
    file = folder / CONFIG
    check_links(folder, CONFIG, GENERATION)
    if is_gguf(path) and not file.exists():
        return [make_settings(read_gguf(path))]
    settings = hf_settings.read_settings(file)
    model_type = _model_type(settings)
    if model_type not in FAMILIES:
        reason = REFUSED.get(model_type)
        hint = "" if reason is None else f": {reason}"
        settings.refuse("model_type", f"{_known_families(model_type)}{hint}")
    if is_gguf(path):
        check_model_type(read_gguf(path), settings)
    _check_quantization(settings)
    sources = [with_positions(settings, model_type)]
    if (folder / GENERATION).exists():
        sources.append(hf_settings.read_settings(folder / GENERATION))
    parts = FAMILIES[model_type].token_parts
    return sources + [settings.part(name) for name in parts]


def _model_type(settings: HuggingFaceSettings) -> str:
    name: str = settings.text("model_type")
    return ALIASES.get(name, name)


def _fields_of_gguf(
    path: Path, family: Family, settings: HuggingFaceSettings, fields: dict[str, Any]
) -> ModelFields:
    """Returns the fields that a GGUF file's tensors determine."""
    file = read_gguf(path)
    tied = family.head_name not in open_gguf_weights(file)
    if settings.source == str(path.with_name(CONFIG)):
        return {"tied_head": tied}
    rotated = fields.get("rotary_width") or fields["head_width"]
    return {"tied_head": tied} | rotary_divisors(file, rotated)


def _check_quantization(settings: HuggingFaceSettings) -> None:
    if SETTINGS not in settings:
        return
    quantized = settings.part(SETTINGS)
    if quantized.text(METHOD) not in METHODS:
        quantized.refuse(
            METHOD,
            f"one of {', '.join(METHODS)}; transformers can widen the weights of other "
            "methods: model.dequantize(), then model.save_pretrained(FOLDER)",
        )


def _token_ids(
    sources: Sequence[HuggingFaceSettings], overrides: Mapping[str, Any]
) -> ModelFields:
    ids: dict[str, Any] = _end_ids(sources, overrides.get("eos_id"))
    for field, name in TOKEN_IDS.items():
        source = next((source for source in sources if name in source), None)
        if source is None or field in overrides:
            continue
        # Early conversions of Llama write -1 for a token that the model lacks.
        token = source.integer(name, minimum=-1)
        if token >= 0:
            ids[field] = token
    return ids


def _end_ids(sources: Sequence[HuggingFaceSettings], eos_id: int | None) -> ModelFields:
    """Returns the tokens that end a text: one or a list in each of the files.

    Like transformers, `generate` stops at any of those in `generation_config.json`; the
    first one in `config.json` also ends rows of models without a tokenizer.
    """
    listed: list[int] = []
    for source in sources:
        if EOS not in source:
            continue
        several = isinstance(source.values[EOS], list)
        ids = source.integers(EOS) if several else [source.integer(EOS, minimum=-1)]
        listed += [token for token in ids if token >= 0]
    if len(listed) > MAXIMUM_END_IDS:
        raise InputError(
            f"{sources[0].source} and its generation config name {len(listed)} end "
            f"tokens, expected at most {MAXIMUM_END_IDS}"
        )
    first = listed[0] if eos_id is None and listed else eos_id
    further = [token for token in dict.fromkeys(listed) if token != first]
    return {"stop_ids": tuple(further)} | ({} if first is None else {"eos_id": first})


def _has_tied_head(
    family: Family,
    settings: HuggingFaceSettings,
    fields: dict[str, Any],
    stored: dict[str, StoredTensor],
) -> bool:
    declared, name = fields["tied_head"], family.head_name
    if name not in stored:
        return declared or family.tied_without_head
    table = next((name for name in family.embedding_tables if name in stored), None)
    if not declared or table is None:
        return declared
    head, embedding = stored[name], stored[table]
    if head.shape == embedding.shape and np.array_equal(head.read(), embedding.read()):
        return True
    # A T5 that does not scale its outputs was not trained with a tied head.
    if not fields.get("scale_tied_hidden", True):
        return False
    if family.omits_tied_setting and TIED not in settings:
        return False
    raise InputError(
        f"{settings.source} ties the head to the embedding table, but {name} "
        f"in {head.source} differs from {table}; choose with tied_head=True or False"
    )


def find_family(config: ModelConfig) -> Family:
    """Returns the family that a config names.

    Raises:
      InputError: if it names none, or an unknown one.
    """
    if config.family not in FAMILIES:
        raise InputError(
            f"ModelConfig.family is {shown(config.family)}, expected "
            f"{_known_families(str(config.family))}"
        )
    return FAMILIES[config.family]


def _known_families(name: str) -> str:
    """Says where all families are listed, and names similar ones."""
    near = difflib.get_close_matches(name[:100], FAMILIES, 3) or [*FAMILIES][:1]
    return (
        f"one of the {len(FAMILIES)} in prompt_tuning/families/README.md, such as "
        f"{', '.join(near)}"
    )


def find_recipes(config: ModelConfig, names: StoredNames = ()) -> Recipes:
    """Returns how each parameter of a model is made from its stored tensors.

    Without the stored `names`, it assumes the full model with its head.
    """
    family = find_family(config)
    recipes = family.recipes(config, names)
    table, head = recipes.get(EMBEDDING), family.head_name
    has_table = table is None or any(name in names for name in table.sources)
    # Of two tensors that share memory, some programs store the head alone.
    if table is not None and config.tied_head and head in names and not has_table:
        recipes[EMBEDDING] = dataclasses.replace(table, sources=(head,))
    if not config.labels:
        return recipes
    return class_labels.with_class_head(recipes, config, class_layers(config), names)


def as_tagger(config: ModelConfig) -> ModelConfig:
    """Returns the config of a token classifier: for a T5 its encoder."""
    encoder = config.architecture == "encoder_decoder"
    if not encoder or not find_family(config).class_layers.encodes_tokens:
        return config
    return dataclasses.replace(
        config, **class_labels.encoder_alone(config.encoder_layers)
    )


def class_layers(config: ModelConfig) -> ClassLayers:
    """Returns the layers of the class head that a model has or may have."""
    return find_family(config).class_layers.of(config.problem)


def write_folder(
    folder: Path,
    config: ModelConfig,
    parameters: Mapping[str, np.ndarray],
    *,
    dtype: str = "float32",
) -> None:
    """Writes a model as an ordinary Hugging Face folder, created if needed.

    Writes `config.json`, `generation_config.json` and `model.safetensors`.

    Args:
      folder: folder to write to.
      config: config of the model; its `parameter_dtype` is ignored.
      parameters: every parameter by its slash-joined path.
      dtype: dtype of the written weights, "float32" or "bfloat16".

    Raises:
      InputError: if the family cannot express the config, `parameters` has missing or
        unknown paths, or for any other dtype.
    """
    check_dtype("dtype", dtype)
    family = find_family(config)
    if family.write_settings is None:
        raise InputError(f"models of the family {family.model_type} are only read")
    settings = family.write_settings(config)
    _check_settings(family, settings, config)
    recipes = find_recipes(config)
    _check_paths(family, parameters, recipes)
    numpy_dtype = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    tensors = {
        name: np.ascontiguousarray(array, dtype=numpy_dtype)
        for name, array in stored_arrays(parameters, recipes)
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / CONFIG, settings | {"torch_dtype": dtype})
    generation = {
        name: settings[name] for name in (EOS, *TOKEN_IDS.values()) if name in settings
    }
    _write_json(folder / GENERATION, generation | {"do_sample": False})


def _check_settings(
    family: Family, settings: dict[str, Any], config: ModelConfig
) -> None:
    """Checks that reading the settings would give the same config."""
    fields = family.read_fields(HuggingFaceSettings(CONFIG, settings))
    read_back = dataclasses.replace(config, **fields)
    changed = [
        f"{field.name} = {shown(getattr(config, field.name))}"
        for field in dataclasses.fields(ModelConfig)
        if getattr(config, field.name) != getattr(read_back, field.name)
    ]
    if changed:
        raise InputError(
            f"the {family.model_type} family cannot express {', '.join(changed)}"
        )


def _check_paths(
    family: Family, parameters: Collection[str], expected: Collection[str]
) -> None:
    missing = sorted(set(expected) - set(parameters))
    unknown = sorted(set(parameters) - set(expected))
    if missing or unknown:
        raise InputError(
            f"the parameters lack {missing} and have {unknown}, for which the "
            f"{family.model_type} family has no name"
        )


def stored_arrays(
    parameters: Mapping[str, np.ndarray], recipes: Mapping[str, Recipe]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields name and array of each stored tensor: the inverse of the recipes."""
    fused: dict[str, list[tuple[FusedPart, np.ndarray]]] = {}
    for path, recipe in recipes.items():
        parameter, transform = parameters[path], recipe.transform
        layers = parameter if recipe.stacked else [parameter]
        for name, array in zip(recipe.sources, layers, strict=True):
            if isinstance(transform, FusedPart):
                fused.setdefault(name, []).append((transform, array))
            else:
                yield name, array.T if transform is transpose else array
    for name, parts in fused.items():
        count = sum(array.shape[-1] for _, array in parts)
        whole = np.empty((*parts[0][1].shape[:-1], count), np.float32)
        for part, array in parts:
            whole[..., part.columns(count)] = array
        yield name, whole if parts[0][0].in_first else whole.T


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
