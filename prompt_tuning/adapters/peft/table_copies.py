"""Copies of the frozen model's embeddings and head in an adapter's file.

PEFT stores both if the adapter adapts one of them, if the vocabulary was resized, or on
request (`save_embedding_layers`), whether or not they were trained.
"""

from collections.abc import Callable

import numpy as np

from prompt_tuning.adapters.peft.folder import AdapterFolder
from prompt_tuning.adapters.peft.modules import find_name
from prompt_tuning.adapters.peft.shape_checks import MODEL_PREFIX
from prompt_tuning.core.errors import InputError, shortened
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import hf_folder

FrozenReader = Callable[[str], np.ndarray]
"""Reads a parameter of the frozen model by its path."""

EMBEDDING, DECODER_EMBEDDING = (
    "token_embedder/embedding",
    "decoder_embedder/embedding",
)
HEAD, HEAD_BIAS = "head/kernel", "head/bias"
TITLES = {
    EMBEDDING: "embeddings",
    DECODER_EMBEDDING: "embeddings of the decoder",
    HEAD: "head",
    HEAD_BIAS: "bias of the head",
}
WEIGHT = ".weight"
_LOW_RANK = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A")
_LOW_RANK += (".lora_embedding_B", ".base_layer.weight", ".base_layer.bias")


def without_copies(
    folder: AdapterFolder, config: ModelConfig, frozen: FrozenReader | None
) -> AdapterFolder:
    """Removes copies of the model's embeddings and head from an adapter's tensors.

    `frozen` reads the frozen model's parameters, or is None if not available.

    Raises:
      InputError: if a copy differs from the model's, or cannot be compared, or the
        embeddings or the head have a low-rank adapter.
    """
    tables, source = _tables(config), folder.source
    aliases = hf_folder.find_family(config).prefix_aliases

    def find(name: str) -> str | None:
        stems = (name.removeprefix(x) for x in (MODEL_PREFIX, "base_model."))
        found = (find_name(stem, tables, aliases) for stem in stems)
        return next((tables[x] for x in found if x is not None), None)

    kept = {}
    for name, tensor in folder.tensors.items():
        ending = next((x for x in _LOW_RANK if name.endswith(x)), None)
        module = name.removesuffix(ending or "")
        if ending is not None and (path := find(module + WEIGHT)):
            raise InputError(
                f"{source} has a low-rank adapter of the model's {TITLES[path]} "
                f"({shortened(module.removeprefix(MODEL_PREFIX))}), expected adapters "
                "of projections within layers; merge it into the model with PEFT "
                "(merge_and_unload), or train without this module in target_modules"
            )
        path = find(name)
        if path is None:
            kept[name] = tensor
        else:
            _check_copy(name, tensor, path, source, frozen)
    return folder.with_tensors(kept)


def _tables(config: ModelConfig) -> dict[str, str]:
    """Returns the path of each table by its names in transformers."""
    recipes, family = hf_folder.find_recipes(config), hf_folder.find_family(config)
    table = DECODER_EMBEDDING if DECODER_EMBEDDING in recipes else EMBEDDING
    head = HEAD if HEAD in recipes else table
    names = dict.fromkeys(family.embedding_tables, table)
    names |= {family.head_name: head, "lm_head.weight": head}
    return names | {
        recipe.sources[0]: path for path, recipe in recipes.items() if path in TITLES
    }


def _check_copy(
    name: str,
    copy: np.ndarray,
    path: str,
    source: str,
    frozen: FrozenReader | None,
) -> None:
    """Checks that a copy equals the frozen model's table."""
    has = f"{source} has a copy of the model's {TITLES[path]} ({shortened(name)})"
    if frozen is None:
        raise InputError(
            f"{has}, which must be compared with the model's: name the folder of the "
            "model that the adapter is for"
        )
    original = frozen(path)
    if copy.shape != original.shape:
        raise InputError(
            f"{has} of shape {copy.shape}, but in the model they have shape "
            f"{original.shape}: the vocabulary was resized for this adapter; name the "
            "resized model, or merge the adapter with PEFT (merge_and_unload)"
        )
    different = int((copy != original.astype(np.float32)).sum())
    if different:
        raise InputError(
            f"{has} of which {different:,} of {copy.size:,} numbers differ from the "
            "model's: they were trained as a whole, which is not supported, or the "
            "model is another one; merge the adapter with PEFT (merge_and_unload)"
        )
