"""Convert trained token rows between PEFT's tensors and our parameters.

PEFT stores the rows of `trainable_token_indices`, a setting of LoRA, as
`{module}.token_adapter.trainable_tokens_delta [n, D]`, and those of its method
TRAINABLE_TOKENS as `{module}.trainable_tokens_delta`. Despite the name, they are rows,
not differences. A tied head shares them. If the vocabulary was resized, PEFT also
stores the whole resized tables; rows beyond the frozen model's are read, too.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from prompt_tuning.adapters.adapter import (
    HEAD_PATH,
    LORA,
    ROWS_PATH,
    TOKENS,
    Adapter,
    Arrays,
    TokenIds,
)
from prompt_tuning.adapters.peft.folder import AdapterFolder
from prompt_tuning.adapters.peft.peft_settings import Settings
from prompt_tuning.adapters.peft.shape_checks import MODEL_PREFIX, require_tensor
from prompt_tuning.adapters.peft.table_copies import FrozenReader
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.model_sizes import MAXIMUM_SIZE
from prompt_tuning.families import hf_folder

TABLE, HEAD = "token_embedder/embedding", "head/kernel"
DELTA = ".trainable_tokens_delta"
BESIDE, BASE = ".token_adapter", ".base_layer"
_SETTINGS = {LORA: "trainable_token_indices", TOKENS: "token_indices"}


def has_token_rows(settings: Settings) -> bool:
    """Whether a PEFT adapter has trained token rows."""
    return bool(settings.get(_SETTINGS.get(settings["peft_type"], "")))


def split_token_rows(tensors: Arrays, config: ModelConfig) -> tuple[Arrays, Arrays]:
    """Splits tensors into those of token rows and resized tables, and all others."""
    names = [name for module in _modules(config) for name in _copies(module)]
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if name.endswith(DELTA)
        or (name in names and len(tensor) > config.vocabulary_size)
    }
    return kept, {name: x for name, x in tensors.items() if name not in kept}


def without_rows(adapter: Adapter) -> Arrays:
    """Returns an adapter's parameters without token rows."""
    rows = (ROWS_PATH, HEAD_PATH)
    return {path: x for path, x in adapter.parameters.items() if path not in rows}


def read_token_rows(
    folder: AdapterFolder, config: ModelConfig, frozen: FrozenReader | None
) -> tuple[Arrays, TokenIds]:
    """Returns our parameters and their tokens.

    Args:
      folder: the adapter, with the first result of `split_token_rows` as its tensors.
      config: config of the frozen model.
      frozen: reads the model's tables, to compare with resized ones.

    Raises:
      InputError: if rows do not fit the settings or the model, or our head does not
        support the tokens.
    """
    table, head = _modules(config)
    ids = _ids_by_module(folder, (table, head))
    rows = {x: _read_rows(x, each, folder, config) for x, each in ids.items()}
    if config.tied_head:
        if ids.pop(head, ids[table]) != ids[table]:
            raise InputError(
                f"{folder.source} trains other tokens of the head ({head}) than of the "
                f"embedding table ({table}), but in this model they are the same"
            )
        rows.pop(head, None)
    for module, path in ((table, TABLE), (head, HEAD)):
        if module == head and config.tied_head:
            continue
        copied = _copied_rows(module, folder, config, path, frozen)
        more = [id for id in copied if id not in ids.get(module, ())]
        if more:
            ids[module] = [*ids.get(module, ()), *more]
            parts = [rows[module]] if module in rows else []
            parts.append(np.stack([copied[id] for id in more]))
            rows[module] = np.concatenate(parts)
    parameters = {ROWS_PATH: rows[table]}
    if head in rows:
        parameters[HEAD_PATH] = rows[head]
    return parameters, TokenIds(tuple(ids[table]), tuple(ids.get(head, ())))


def _copies(module: str) -> list[str]:
    """Returns the names that PEFT uses for a whole table."""
    start = f"{MODEL_PREFIX}{module}"
    return [f"{start}{x}.weight" for x in (f"{BESIDE}{BASE}", BASE, "")]


def _modules(config: ModelConfig) -> tuple[str, str]:
    """Returns the names of the embedding table and the head in transformers."""
    recipes, family = hf_folder.find_recipes(config), hf_folder.find_family(config)
    head = recipes[HEAD].sources[0] if HEAD in recipes else family.head_name
    names = recipes[TABLE].sources[0], head or "lm_head.weight"
    return names[0].removesuffix(".weight"), names[1].removesuffix(".weight")


def _ids_by_module(
    folder: AdapterFolder, modules: tuple[str, str]
) -> dict[str, list[int]]:
    """Returns the tokens in the settings, by the module with their rows."""
    settings, source = folder.settings, folder.source
    name = _SETTINGS[settings["peft_type"]]
    value, (table, head) = settings[name], modules
    by_name = value if isinstance(value, dict) else {table: value}
    targets = settings.get("target_modules")
    if name == "token_indices" and isinstance(targets, list):
        by_name = dict.fromkeys(targets, value)
    ids: dict[str, list[int]] = {}
    for end, each in by_name.items():
        found = [x for x in modules if x == end or x.endswith(f".{end}")]
        if not found:
            raise InputError(
                f"{source} trains tokens of {shown(end)}, expected the embedding table "
                f"{table} or the head {head}"
            )
        if not _are_ids(each):
            raise InputError(
                f"{source} has {name} {shown(value)}, expected different ids of "
                "tokens, 0 or more"
            )
        ids[found[0]] = list(each)
    if table not in ids:
        raise InputError(
            f"{source} has {name} {shown(value)}, expected tokens of the embedding "
            f"table, {table}, among them"
        )
    return ids


def _are_ids(given: Any) -> bool:
    if not isinstance(given, list) or not given:
        return False
    good = all(type(id) is int and 0 <= id < MAXIMUM_SIZE for id in given)
    return good and len(set(given)) == len(given)


def _read_rows(
    module: str, ids: list[int], folder: AdapterFolder, config: ModelConfig
) -> Float[np.ndarray, "n D"]:
    """Returns the stored rows of a module."""
    start = f"{MODEL_PREFIX}{module}"
    names = [f"{start}{BESIDE}{DELTA}", f"{start}{DELTA}"]
    name = next((name for name in names if name in folder.tensors), names[0])
    rows = require_tensor(folder.tensors, name, 2, folder.source)
    if rows.shape != (len(ids), config.width):
        raise InputError(
            f"{folder.source}: {name} has shape {rows.shape}, expected "
            f"{(len(ids), config.width)}: its settings name {len(ids)} tokens, and the "
            f"model's width is {config.width}"
        )
    return rows


def _copied_rows(
    module: str,
    folder: AdapterFolder,
    config: ModelConfig,
    path: str,
    frozen: FrozenReader | None,
) -> dict[int, Float[np.ndarray, "D"]]:
    """Returns the rows of a resized table beyond the frozen model's, by token.

    Raises:
      InputError: if the other rows differ from the frozen model's.
    """
    name = next((name for name in _copies(module) if name in folder.tensors), None)
    if name is None:
        return {}
    size, copy = config.vocabulary_size, folder.tensors[name]
    if frozen is not None and not np.array_equal(
        copy[:size], frozen(path).astype(np.float32)
    ):
        raise InputError(
            f"{folder.source} has a resized copy of the model's table ({name}) whose "
            f"first {size:,} rows differ from the model's: it is another model's, or "
            "was trained as a whole"
        )
    return dict(enumerate(copy[size:], start=size))


def write_token_rows(
    parameters: Mapping[str, np.ndarray], ids: TokenIds, config: ModelConfig, kind: str
) -> tuple[Arrays, dict[str, Any]]:
    """Returns PEFT's tensors and the settings that name the tokens.

    Args:
      parameters: our parameters, of an adapter of this kind.
      ids: their tokens.
      config: config of the model.
      kind: LORA, or TRAINABLE_TOKENS for rows alone.

    Raises:
      InputError: if PEFT's method cannot train these tokens of the head.
    """
    table, head = _modules(config)
    rows, beside = {table: parameters[ROWS_PATH]}, BESIDE if kind == LORA else ""
    if HEAD_PATH in parameters:
        rows[head] = parameters[HEAD_PATH]
    tensors = {f"{MODEL_PREFIX}{x}{beside}{DELTA}": each for x, each in rows.items()}
    short = [module.rpartition(".")[2] for module in (table, head)]
    if kind == LORA:
        indices: Any = list(ids.rows)
        if ids.head:
            indices = dict(zip(short, map(list, (ids.rows, ids.head)), strict=True))
        return tensors, {_SETTINGS[kind]: indices}
    if ids.head and ids.head != ids.rows:
        raise InputError(
            f"PEFT's {TOKENS} trains the same tokens of the embedding table and of the "
            "head, and these differ: name all tokens in TrainedTokens.head, or train a "
            "LoRA beside them"
        )
    if config.tied_head:
        tensors[f"{MODEL_PREFIX}{head}{DELTA}"] = parameters[ROWS_PATH]
    targets = short if ids.head else [short[0]]
    return tensors, {_SETTINGS[kind]: list(ids.rows), "target_modules": targets}
