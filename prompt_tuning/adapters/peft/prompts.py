"""Prompts and prefixes between PEFT's tensors and our parameters."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from prompt_tuning.adapters.adapter import MULTITASK, PREFIX, PROMPT, Adapter, Arrays
from prompt_tuning.adapters.peft.peft_settings import Settings, submodules
from prompt_tuning.adapters.peft.shape_checks import COLUMNS, EMBEDDINGS, ROWS
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig

PREFIX_PATH = "decoder/prompt/prompt"
STACKS = {"decoder_only": "decoder", "encoder_decoder": "encoder"}


def read_prompt_tuning(tensors: Arrays, settings: Settings, stack: str) -> Adapter:
    """A plain prompt; P-tuning saves what its encoder made, which is one.

    For an encoder-decoder PEFT stores as many rows again, which it neither trains nor
    uses.

    Args:
      tensors: PEFT's, of checked shapes.
      settings: of the adapter.
      stack: "encoder" or "decoder": where the prompt goes.
    """
    rows, length = tensors[EMBEDDINGS], settings["num_virtual_tokens"]
    return Adapter(
        kind=PROMPT,
        parameters={f"{stack}/prompt/prompt": rows[:length]},
        settings=settings if settings["peft_type"] == PROMPT else _origin(settings),
        unused=rows[length:] if len(rows) > length else None,
    )


def _origin(settings: Settings) -> dict[str, Any]:
    """The settings of P-tuning that mean the same for a plain prompt."""
    names = ("base_model_name_or_path", "revision", "task_type")
    return {name: settings[name] for name in names if name in settings}


def write_prompt_tuning(adapter: Adapter) -> tuple[Arrays, dict[str, Any]]:
    """PEFT's tensor and the settings that follow from it.

    An encoder-decoder gets a second half: the decoder's prompt where there is one (PEFT
    keeps it and does not use it), else what was read there, else zeros.

    Raises:
      InputError: if the prompts of encoder and decoder differ in shape.
    """
    paths = prompts_of(adapter, "prompt")
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
    _check_alike(halves)
    return {EMBEDDINGS: np.concatenate(halves)}, _row_settings(first, len(halves))


def read_multitask(
    tensors: Arrays, settings: Settings, stack: str, source: str
) -> Adapter:
    """A factorised prompt for each task (Wang et al. 2023, section 3.2).

    An encoder-decoder's second half of rows is the decoder's prompt, with the rows of
    the task in common.

    Args:
      tensors: PEFT's, of checked shapes.
      settings: of the adapter.
      stack: where the first half goes.
      source: for messages.

    Raises:
      InputError: if a decoder-only model gets two halves.
    """
    length = settings["num_virtual_tokens"]
    stacks = [stack, "decoder"][: len(tensors[EMBEDDINGS]) // length]
    if len(set(stacks)) != len(stacks):
        raise InputError(
            f"{source} has prompts for an encoder and a decoder, but the model has a "
            "decoder alone"
        )
    parameters: Arrays = {}
    for index, name in enumerate(stacks):
        part = slice(index * length, (index + 1) * length)
        parameters |= {
            f"{name}/prompt/shared": tensors[EMBEDDINGS][part],
            f"{name}/prompt/columns": tensors[COLUMNS][:, part],
            f"{name}/prompt/rows": tensors[ROWS],
        }
    return Adapter(kind=MULTITASK, parameters=parameters, settings=settings)


def write_multitask(adapter: Adapter) -> tuple[Arrays, dict[str, Any]]:
    """PEFT's tensors and the settings that follow from them.

    PEFT has one set of rows for both stacks. Where ours differ each gets its own place
    in the rank: columns `[c, 0]` and `[0, c']`, rows `[r; r']`.

    Raises:
      InputError: if the prompts of encoder and decoder differ in shape.
    """
    stacks = [p.split("/")[0] for p in prompts_of(adapter, "shared")]
    shared, columns, rows = (
        [adapter.parameters[f"{stack}/prompt/{leaf}"] for stack in stacks]
        for leaf in ("shared", "columns", "rows")
    )
    _check_alike(shared)
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


def read_prefix(
    tensors: Arrays, settings: Settings, config: ModelConfig, source: str
) -> Adapter:
    """Keys and values of every layer of the decoder, `[L, 2, P, G, K]`.

    PEFT stores `[P, L 2 G K]`, rotated as in the cache. Of an encoder-decoder layer `l`
    reads the stored layer `2 l mod L`: PEFT doubles the table for cross-attention, cuts
    it into `L` parts of four and takes keys and values from the first half of each
    (PEFT 0.21.2, `PeftModel.get_prompt`). With an even `L` half of it is never read.

    Args:
      tensors: PEFT's, of checked shapes.
      settings: of the adapter.
      config: the model.
      source: for messages.

    Raises:
      InputError: if it is the prefix of a model of another shape.
    """
    stored = tensors[EMBEDDINGS]
    layers, heads = settings["num_layers"], settings["num_attention_heads"]
    found = (layers, heads, settings["token_dim"] // heads)
    expected = (config.layers, config.key_value_heads, config.head_width)
    order = _stored_layers(config, layers, submodules(settings, source))
    if found[1:] != expected[1:] or len(order) < config.layers:
        raise InputError(
            f"{source} is a prefix for {found[0]} layers of {found[1]} key/value heads "
            f"of width {found[2]}, but the model has {expected[0]} of {expected[1]} of "
            f"{expected[2]}"
        )
    order = order[: config.layers]
    table = stored.reshape(len(stored), layers, 2, *found[1:])
    table = table.transpose(1, 2, 0, 3, 4)
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
    """PEFT's tensor and the settings that follow from it.

    For an encoder-decoder with an even number of layers that differ, a table of twice
    as many layers is written, of which PEFT reads every second (see `read_prefix`).

    Raises:
      InputError: if the prefix has another shape than the model's cache.
    """
    if PREFIX_PATH not in adapter.parameters:
        raise InputError(
            "PEFT puts prefixes into a decoder alone; found "
            f"{sorted(adapter.parameters)}"
        )
    prefix = adapter.parameters[PREFIX_PATH]
    length = prefix.shape[2] if prefix.ndim == 5 else 0
    heads, width = config.key_value_heads, config.head_width
    if prefix.shape != (config.layers, 2, length, heads, width):
        raise InputError(
            f"the prefix has shape {prefix.shape}, expected [L, 2, P, G, K] with L, G, "
            f"K = {config.layers}, {heads}, {width}"
        )
    count = 1 if config.architecture == "decoder_only" else 2
    table = _stored_table(prefix, config, count, adapter.unused)
    flat = table.transpose(2, 0, 1, 3, 4).reshape(length, -1)
    settings = {
        "num_attention_heads": heads,
        "num_layers": len(table),
        "num_transformer_submodules": count,
        "num_virtual_tokens": length,
        "token_dim": heads * width,
    }
    if adapter.settings.get("encoder_hidden_size") is None:
        settings["encoder_hidden_size"] = heads * width
    return {EMBEDDINGS: np.ascontiguousarray(flat)}, settings


def _stored_table(
    prefix: Float[np.ndarray, "L 2 P G K"],
    config: ModelConfig,
    count: int,
    unused: np.ndarray | None,
) -> Float[np.ndarray, "stored 2 P G K"]:
    """The layers in the order, and as often, as PEFT stores them."""
    stored = config.layers
    order = _stored_layers(config, stored, count)
    if any(
        not np.array_equal(prefix[layer], prefix[order.index(place)])
        for layer, place in enumerate(order)
    ):
        stored *= 2
        order = _stored_layers(config, stored, count)[: config.layers]
    table = np.zeros((stored, *prefix.shape[1:]), np.float32)
    rest = [layer for layer in range(stored) if layer not in order]
    if unused is not None and unused.shape == table[rest].shape:
        table[rest] = unused
    table[order] = prefix
    return table


def prompts_of(adapter: Adapter, leaf: str) -> list[str]:
    """The paths of an adapter's prompts, the encoder's first.

    Raises:
      InputError: if there is none.
    """
    found = [f"{stack}/prompt/{leaf}" for stack in ("encoder", "decoder")]
    found = [path for path in found if path in adapter.parameters]
    if not found:
        raise InputError(
            f"an adapter of kind {adapter.kind} needs encoder/prompt/{leaf} or "
            f"decoder/prompt/{leaf}; found {sorted(adapter.parameters)}"
        )
    return found


def _stored_layers(config: ModelConfig, stored: int, count: int) -> list[int]:
    """Which stored layer each of PEFT's cache layers is made of."""
    if config.architecture == "decoder_only" or count == 1:
        return list(range(stored))
    return [2 * layer % stored for layer in range(stored)]


def _row_settings(prompt: Float[np.ndarray, "P D"], stacks: int) -> dict[str, Any]:
    return {
        "num_transformer_submodules": stacks,
        "num_virtual_tokens": prompt.shape[0],
        "token_dim": prompt.shape[1],
    }


def _check_alike(prompts: Sequence[Float[np.ndarray, "P D"]]) -> None:
    shapes = {prompt.shape for prompt in prompts}
    if len(shapes) > 1:
        raise InputError(
            f"the prompts of encoder and decoder have the shapes {sorted(shapes)}; "
            "PEFT has one length for both"
        )
