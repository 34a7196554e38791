"""Convert prompts and prefixes between PEFT's tensors and our parameters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from prompt_tuning.adapters.adapter import (
    MULTITASK,
    PREFIX,
    PREFIX_PATH,
    PROMPT,
    Adapter,
    Arrays,
)
from prompt_tuning.adapters.peft.folder import AdapterFolder
from prompt_tuning.adapters.peft.peft_settings import DEFAULTS, Settings, submodules
from prompt_tuning.adapters.peft.shape_checks import COLUMNS, EMBEDDINGS, ROWS
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.layer_kinds import key_layers
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families import hf_folder

KEPT = ("base_model_name_or_path", "revision", "task_type")
STACKS = {"decoder_only": "decoder", "encoder_decoder": "encoder"}


def read_prompt_tuning(folder: AdapterFolder, stack: str) -> Adapter:
    """Reads a plain prompt, or the vectors that P-tuning or CPT saved.

    For an encoder-decoder PEFT stores as many rows again, which it neither trains nor
    uses.
    """
    rows, settings = folder.tensors[EMBEDDINGS], folder.settings
    length = settings["num_virtual_tokens"]
    if folder.kind == "P_TUNING":  # only these also apply to a plain prompt
        settings = {name: settings[name] for name in KEPT if name in settings}
    return Adapter(
        kind=PROMPT,
        parameters={f"{stack}/prompt/prompt": rows[:length]},
        settings=settings,
        unused=rows[length:] if len(rows) > length else None,
    )


def write_prompt_tuning(adapter: Adapter) -> tuple[Arrays, dict[str, Any]]:
    """Returns PEFT's tensor and the settings that follow from it.

    An encoder-decoder gets a second half, which PEFT stores but does not use: the
    decoder's prompt if there is one, else the rows read from PEFT, else zeros.

    Raises:
      InputError: if the prompts of encoder and decoder differ in shape.
    """
    paths = prompt_paths(adapter, "prompt")
    first = adapter.parameters[paths[0]]
    halves = [first]
    if "encoder/prompt/prompt" in paths and adapter.settings.get(
        "num_transformer_submodules"
    ) in (None, 2):
        halves.append(
            np.zeros_like(first) if adapter.unused is None else adapter.unused
        )
    if len(paths) == 2:
        halves = [first, adapter.parameters[paths[1]]]
    _check_shapes(halves)
    return {EMBEDDINGS: np.concatenate(halves)}, _row_settings(first, len(halves))


def read_multitask(folder: AdapterFolder, stack: str) -> Adapter:
    """Reads a factorized prompt for each task (Wang et al. 2023, section 3.2).

    The second half of an encoder-decoder's rows is the decoder's prompt. Both prompts
    share the task's factor `rows`. `stack` is that of the first half.

    Raises:
      InputError: if a decoder-only model gets two halves.
    """
    tensors, length = folder.tensors, folder.settings["num_virtual_tokens"]
    stacks = [stack, "decoder"][: len(tensors[EMBEDDINGS]) // length]
    if len(set(stacks)) != len(stacks):
        raise InputError(
            f"{folder.source} has prompts for an encoder and a decoder, but the model "
            "only has a decoder"
        )
    parameters: Arrays = {}
    for index, name in enumerate(stacks):
        part = slice(index * length, (index + 1) * length)
        parameters |= {
            f"{name}/prompt/shared": tensors[EMBEDDINGS][part],
            f"{name}/prompt/columns": tensors[COLUMNS][:, part],
            f"{name}/prompt/rows": tensors[ROWS],
        }
    return Adapter(kind=MULTITASK, parameters=parameters, settings=folder.settings)


def write_multitask(adapter: Adapter) -> tuple[Arrays, dict[str, Any]]:
    """Returns PEFT's tensors and the settings that follow from them.

    PEFT has one set of rows for both stacks. If ours differ, each stack gets its own
    ranks: columns `[c, 0]` and `[0, c']`, rows `[r; r']`.

    Raises:
      InputError: if the prompts of encoder and decoder differ in shape.
    """
    stacks = [p.split("/")[0] for p in prompt_paths(adapter, "shared")]
    shared, columns, rows = (
        [adapter.parameters[f"{stack}/prompt/{leaf}"] for stack in stacks]
        for leaf in ("shared", "columns", "rows")
    )
    _check_shapes(shared)
    if len(stacks) == 2 and not np.array_equal(rows[0], rows[1]):
        if len(rows[0]) != len(rows[1]):
            raise InputError(
                f"the encoder has prompts for {len(rows[0])} tasks and the decoder for "
                f"{len(rows[1])}; PEFT has one number of tasks"
            )
        first, second = columns
        columns = [
            np.concatenate([first, np.zeros_like(second)], axis=2),
            np.concatenate([np.zeros_like(first), second], axis=2),
        ]
        rows = [np.concatenate(rows, axis=1)]
    tensors = {
        EMBEDDINGS: np.concatenate(shared),
        COLUMNS: np.concatenate(columns, axis=1),
        ROWS: rows[0],
    }
    tasks, rank, _ = rows[0].shape
    counts = {"num_tasks": tasks, "num_ranks": rank}
    return tensors, _row_settings(shared[0], len(stacks)) | counts


def check_vectors(config: ModelConfig) -> None:
    """Checks that transformers treats prompt vectors like token embeddings.

    Raises:
      InputError: with what it does only to tokens.
    """
    reason, scaled = None, config.embedding_multiplier != 1
    if config.layer_input_width:
        reason = "transformers looks up further inputs of layers by token"
    elif config.family and scaled and hf_folder.find_family(config).scales_ids:
        reason = "transformers does not scale the tokens behind a prompt"
    if reason:
        raise InputError(
            f"PEFT's soft prompts do not fit this model, because {reason}: use LoRA, "
            "or write the prompt as an array, e.g. to prompt.npy"
        )


def _check_cached_heads(config: ModelConfig) -> None:
    """Checks that transformers' cache has keys and values per head.

    Raises:
      InputError: if it has compressed ones, or layers differ in their number of heads.
    """
    if config.key_value_rank:
        raise InputError(
            "PEFT has no prefixes for a model with latent attention, because the cache "
            "of transformers holds compressed keys there: train a soft prompt or LoRA"
        )
    if config.full_key_value_heads not in (0, config.key_value_heads):
        raise InputError(
            "PEFT skips layers in prefixes for a model with "
            f"{config.full_key_value_heads} key/value heads in some layers and "
            f"{config.key_value_heads} in others: train a soft prompt or LoRA"
        )


def read_prefix(folder: AdapterFolder, config: ModelConfig) -> Adapter:
    """Reads the keys and values of every decoder layer, `[L, 2, P, G, K]`.

    PEFT stores `[P, L 2 G K]`, rotated as in the cache. In an encoder-decoder, layer
    `l` reads the stored layer `2 l mod L`: PEFT doubles the table for cross-attention,
    cuts it into `L` parts of four, and takes keys and values from the first half of
    each (PEFT 0.21.2, `PeftModel.get_prompt`). With an even `L`, half of the table is
    never read.

    Raises:
      InputError: if the prefix belongs to a model of another shape, or differs between
        query heads that share keys and values (Falcon 40B: see `Family.cached_heads`).
    """
    _check_cached_heads(config)
    stored, settings, source = (
        folder.tensors[EMBEDDINGS],
        folder.settings,
        folder.source,
    )
    layers, heads = settings["num_layers"], settings["num_attention_heads"]
    shape = (layers, heads, settings["token_dim"] // heads)
    cached = hf_folder.find_family(config).cached_heads(config)
    expected = (key_layers(config), cached, config.head_width)
    order = _stored_layers(config, layers, submodules(settings, source))
    if shape[1:] != expected[1:] or len(order) < expected[0]:
        raise InputError(
            f"{source} is a prefix for {shape[0]} layers of {shape[1]} key/value heads "
            f"of width {shape[2]}, but the model has {expected[0]} of {expected[1]} of "
            f"{expected[2]}"
        )
    order = order[: expected[0]]
    groups = config.key_value_heads
    table = stored.reshape(len(stored), layers, 2, groups, -1, shape[2])
    table = table.transpose(1, 2, 0, 3, 4, 5)  # [L, 2, P, G, heads of a group, K]
    if not (table[..., 1:, :] == table[..., :1, :]).all():
        raise InputError(
            f"{source} is a prefix that differs between query heads, which share "
            f"{groups} key/value heads in this model; only prefixes that were exported "
            "from a run can be read"
        )
    table = table[..., 0, :]
    rest = [layer for layer in range(layers) if layer not in order]
    return Adapter(
        kind=PREFIX,
        parameters={PREFIX_PATH: np.ascontiguousarray(table[order])},
        settings=settings,
        unused=np.ascontiguousarray(table[rest]) if rest else None,
    )


def write_prefix(
    adapter: Adapter, config: ModelConfig
) -> tuple[Arrays, dict[str, Any]]:
    """Returns PEFT's tensor and the settings that follow from it.

    For an encoder-decoder with an even number of layers that differ, the table has
    twice as many layers, and PEFT reads every second one (see `read_prefix`).

    Raises:
      InputError: if the shape of the prefix does not fit the model's cache.
    """
    _check_cached_heads(config)
    if PREFIX_PATH not in adapter.parameters:
        raise InputError(
            "PEFT puts prefixes into a decoder only; found "
            f"{shown(sorted(adapter.parameters))}"
        )
    prefix = adapter.parameters[PREFIX_PATH]
    length = prefix.shape[2] if prefix.ndim == 5 else 0
    heads, width = config.key_value_heads, config.head_width
    layers = key_layers(config)
    if prefix.shape != (layers, 2, length, heads, width):
        raise InputError(
            f"the prefix has shape {prefix.shape}, expected [L, 2, P, G, K] with L, G, "
            f"K = {layers}, {heads}, {width}"
        )
    count = 1 if config.architecture == "decoder_only" else 2
    table = _stored_table(prefix, config, count, adapter.unused)
    cached = hf_folder.find_family(config).cached_heads(config)
    table = table.repeat(cached // heads, axis=3)
    flat = table.transpose(2, 0, 1, 3, 4).reshape(length, -1)
    settings = {
        "num_attention_heads": cached,
        "num_layers": len(table),
        "num_transformer_submodules": count,
        "num_virtual_tokens": length,
        "token_dim": cached * width,
    }
    names = DEFAULTS[adapter.settings.get("peft_type", PREFIX)]
    hidden = "encoder_hidden_size"
    if hidden in names and adapter.settings.get(hidden) is None:
        settings[hidden] = cached * width
    return {EMBEDDINGS: np.ascontiguousarray(flat)}, settings


def _stored_table(
    prefix: Float[np.ndarray, "L 2 P G K"],
    config: ModelConfig,
    count: int,
    unused: np.ndarray | None,
) -> Float[np.ndarray, "stored 2 P G K"]:
    """Returns the layers in PEFT's order, with repetitions."""
    stored = config.layers
    order = _stored_layers(config, stored, count)[: len(prefix)]
    if any(
        not np.array_equal(prefix[layer], prefix[order.index(stored_layer)])
        for layer, stored_layer in enumerate(order)
    ):
        stored *= 2
        order = _stored_layers(config, stored, count)[: config.layers]
    table = np.zeros((stored, *prefix.shape[1:]), np.float32)
    rest = [layer for layer in range(stored) if layer not in order]
    if unused is not None and unused.shape == table[rest].shape:
        table[rest] = unused
    table[order] = prefix
    return table


def prompt_paths(adapter: Adapter, leaf: str) -> list[str]:
    """Returns the paths of an adapter's prompts, the encoder's first.

    Raises:
      InputError: if there are none.
    """
    paths = [f"{stack}/prompt/{leaf}" for stack in ("encoder", "decoder")]
    paths = [path for path in paths if path in adapter.parameters]
    if not paths:
        raise InputError(
            f"an adapter of kind {adapter.kind} needs encoder/prompt/{leaf} or "
            f"decoder/prompt/{leaf}; found {shown(sorted(adapter.parameters))}"
        )
    return paths


def _stored_layers(config: ModelConfig, stored: int, count: int) -> list[int]:
    """Returns the stored layer that each of PEFT's cache layers reads."""
    if config.architecture == "decoder_only" or count == 1:
        return list(range(stored))
    return [2 * layer % stored for layer in range(stored)]


def repeated_layers(settings: Settings, config: ModelConfig) -> tuple[int, ...]:
    """Returns layers that share a stored layer; none if each has its own."""
    count = submodules(settings, "the prefix")
    order = _stored_layers(config, settings["num_layers"], count)[: config.layers]
    layers = tuple(i for i, stored in enumerate(order) if stored == order[0])
    return layers if len(layers) > 1 else ()


def _row_settings(prompt: Float[np.ndarray, "P D"], stacks: int) -> dict[str, Any]:
    return {
        "num_transformer_submodules": stacks,
        "num_virtual_tokens": prompt.shape[0],
        "token_dim": prompt.shape[1],
    }


def _check_shapes(prompts: Sequence[Float[np.ndarray, "P D"]]) -> None:
    shapes = {prompt.shape for prompt in prompts}
    if len(shapes) > 1:
        raise InputError(
            f"the prompts of encoder and decoder have the shapes {sorted(shapes)}; "
            "PEFT has one length for both"
        )
