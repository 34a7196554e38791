"""Opens the source of a frozen model without reading its arrays."""

import dataclasses
from pathlib import Path

import numpy as np

from prompt_tuning.checkpoints.formats import t5x_checkpoint
from prompt_tuning.checkpoints.published_kernel import is_quantized, published_stores
from prompt_tuning.checkpoints.stored_table import StoredTable
from prompt_tuning.checkpoints.stored_tensors import Recipe, StoredTensor
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.gguf_files import is_gguf
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.quantization.stores import DTYPES, UNQUANTIZED
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.data.text.tokenizers import Tokenizer, has_tokenizer, load_tokenizer
from prompt_tuning.families import hf_folder, t5x
from prompt_tuning.pretrained.checkpoint_path import BUNDLED_PREFIX, find_checkpoint
from prompt_tuning.pretrained.weight_storage import check_by_layer
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.settings.pretrained import Pretrained


def open_checkpoint(
    source: Pretrained,
) -> tuple[ModelConfig, dict[str, Recipe], dict[str, StoredTensor]]:
    """Opens a checkpoint in either format without reading its arrays.

    Returns the config of the model, the recipes of its parameters, and the stored
    tensors.
    """
    choices = {
        "compute_dtype": source.compute_dtype,
        "parameter_dtype": source.parameter_dtype or DTYPES[0],
        "quantization_group": source.quantization_group,
        "quantized_tables": source.quantized_tables,
        "dropout_rate": source.dropout_rate,
        "attention": source.attention,
        "rematerialization": source.rematerialization or Rematerialization(),
        "encoder_rematerialization": source.encoder_rematerialization,
    }
    if source.eos_id is not None:
        choices["eos_id"] = source.eos_id
    path = find_checkpoint(source.checkpoint)
    if is_gguf(path) or (path / "config.json").exists():
        if source.config is not None:
            found = "is a GGUF file" if is_gguf(path) else "has a config.json"
            raise InputError(f"{path} {found}; remove the binding of Pretrained.config")
        config = hf_folder.read_config(path, **choices)
        check_by_layer(source.weights, config)
        stored = hf_folder.with_buffers(path, hf_folder.open_stored(path), config)
        recipes = hf_folder.find_recipes(config, stored)
        config = _as_published(config, source.parameter_dtype, recipes, stored)
        return config, recipes, stored
    if source.config is None:
        raise InputError(
            f"{path} has no config.json. If it is a T5X checkpoint, give its "
            "Pretrained.config, for example by --gin_file models/t5_1_1_base.gin"
        )
    config = dataclasses.replace(source.config, **choices)
    return config, t5x.t5x_recipes(config), t5x_checkpoint.open_t5x(path)


def _as_published(
    config: ModelConfig,
    parameter_dtype: str | None,
    recipes: dict[str, Recipe],
    stored: dict[str, StoredTensor],
) -> ModelConfig:
    """Returns the config of a model that is kept as published.

    Without a dtype, all parameters are. With a quantized store's, only kernels
    published in it are, which thus need no second rounding.
    """
    if not is_quantized(stored):
        return config
    stores = published_stores(recipes, stored)
    if parameter_dtype is not None:
        stores = {p: x for p, x in stores.items() if x.name == parameter_dtype}
        kept = {p: x for p, x in stores.items() if x.quantized}
        return dataclasses.replace(config, stores=tuple(kept.items()))
    return dataclasses.replace(
        config, parameter_dtype=UNQUANTIZED, stores=tuple(stores.items())
    )


def with_whole_scales(config: ModelConfig, mesh: MeshShape | None) -> ModelConfig:
    """Returns the config without scales in codes, if a mesh divides the weights.

    A mesh would cut through the blocks of scales that share a second-level scale.
    """
    if mesh is None or mesh.keeps_weights_whole:
        return config
    stores = [(p, dataclasses.replace(x, nested=None)) for p, x in config.stores]
    return dataclasses.replace(config, stores=tuple(stores))


def read_frozen(source: Pretrained, path: str) -> np.ndarray:
    """Reads one parameter of a checkpoint, in its stored dtype."""
    _, recipes, stored = open_checkpoint(source)
    recipe, arrays = recipes[path], []
    for name in recipe.sources:
        if name not in stored:
            raise InputError(f"{source.checkpoint} has no array {name}")
        arrays.append(recipe.transform(stored[name].read()))
    return np.stack(arrays) if recipe.stacked else arrays[0]


def read_vocabulary(source: Pretrained) -> Vocabulary:
    """Opens the embedding table and the tokenizer of a checkpoint.

    Rows of the table are read on request.
    """
    config, recipes, stored = open_checkpoint(source)
    return Vocabulary(
        open_embeddings(config, recipes, stored), find_tokenizer(source, config)
    )


def with_tokenizer(
    source: Pretrained, config: ModelConfig
) -> tuple[ModelConfig, Tokenizer | None]:
    """Loads the tokenizer; its end token separates texts of different types."""
    tokenizer = find_tokenizer(source, config)
    if config.token_types > 1 and tokenizer is not None:
        config = dataclasses.replace(config, separator_id=tokenizer.eos_id)
    return config, tokenizer


def find_tokenizer(source: Pretrained, config: ModelConfig) -> Tokenizer | None:
    """Loads the tokenizer of the source or the checkpoint; None if absent.

    A tokenizer that defines no EOS gets the model's.
    """
    if source.tokenizer is not None:
        bundled = source.tokenizer.startswith(BUNDLED_PREFIX)
        path = Path(find_checkpoint(source.tokenizer) if bundled else source.tokenizer)
    else:
        path = find_checkpoint(source.checkpoint)
        if path.is_file() and (has_tokenizer(path.parent) or not is_gguf(path)):
            path = path.parent
        if not has_tokenizer(path):
            return None
    tokenizer = load_tokenizer(path, eos_id=source.eos_id)
    if tokenizer.eos_id is None and config.eos_id is not None:
        return load_tokenizer(path, eos_id=config.eos_id)
    return tokenizer


def open_embeddings(
    config: ModelConfig, recipes: dict[str, Recipe], stored: dict[str, StoredTensor]
) -> StoredTable:
    """Opens the embedding table, given the results of `open_checkpoint`.

    Its rows are what the model reads for a token, e.g. scaled in Gemma.

    Raises:
      InputError: if there is none, or its shape differs from the config.
    """
    path = "token_embedder/embedding"
    missing = [name for name in recipes[path].sources if name not in stored]
    if missing:
        raise InputError(
            f"the checkpoint has no array {missing[0]}, the embedding table; it "
            f"contains {shown(sorted(stored)[:5])}, ..."
        )
    shape = (config.vocabulary_size, config.width)
    return StoredTable(path, shape, recipes[path], stored, config.embedding_multiplier)
