"""Read key/value prefixes from all kinds of files.

These are runs and checkpoints, PEFT folders of the kinds PREFIX_TUNING and CARTRIDGE,
NumPy and safetensors files `[L, 2, P, G, K]`, and cartridges of HazyResearch/cartridges
in `torch.save` files. The latter have, per layer, a tensor `[1, G, P, K]` in the lists
`trainable_keys` and `trainable_values`, and optionally `frozen_keys` and
`frozen_values` for the slots before them. Nothing is unpickled.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from prompt_tuning.adapters.peft import folder as peft_folder
from prompt_tuning.adapters.peft.shape_checks import EMBEDDINGS
from prompt_tuning.adapters.prompt_files import (
    find_checkpoint,
    read_array,
    read_checkpoint,
)
from prompt_tuning.checkpoints.formats.torch_archive import read_torch_lists
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.setting_hints import how_to_set

TORCH = (".pt", ".pth", ".bin")
KEYS_VALUES = ("keys", "values")
KINDS = ("PREFIX_TUNING", "CARTRIDGE")

MovePrefix = Callable[[Float[Array, "L 2 P G K"], int], Float[Array, "L 2 P G K"]]


def read_prefixes(
    path: str | Path | Sequence[str], shape: tuple[int, ...], move: MovePrefix | None
) -> Float[Array, "L 2 P G K"]:
    """Reads one or more prefixes, and joins them.

    Args:
      path: file or folder, or a list of them.
      shape: shape `[L, 2, P, G, K]` of all of them together.
      move: moves the keys of a prefix so that the following text may start some
        positions later; None if no model is known.

    Raises:
      InputError: as `read_prefix_file`, and if the number of slots differs.
    """
    paths = [path] if isinstance(path, str | Path) else path
    if not paths:
        raise InputError("from_file() has an empty list of files: name at least one")
    stack = (shape[0], shape[3], shape[4])
    parts = [jnp.asarray(read_prefix_file(each, stack)) for each in paths]
    slots = sum(part.shape[2] for part in parts)
    if slots != shape[2]:
        raise InputError(
            f"the prefix in {', '.join(map(str, paths))} has {slots} slots, expected "
            f"{shape[2]}: set {how_to_set('KeyValuePrefix.length', slots)}"
        )
    if len(parts) > 1:
        assert move is not None  # the sizes are those of a model
        parts = [move(part, slots - part.shape[2]) for part in parts]
    return jnp.concatenate(parts, axis=2)


def read_prefix_file(
    path: Path | str, stack: tuple[int, int, int]
) -> Float[np.ndarray, "L 2 P G K"]:
    """Reads a prefix in float32.

    Args:
      path: file or folder.
      stack: number of layers `L`, number of key/value heads `G`, and their width `K`.

    Raises:
      InputError: if there is no prefix, or it belongs to a model of another shape.
    """
    path = Path(path)
    if path.is_file():
        torch = path.suffix in TORCH
        prefix = _read_cartridge(path, stack) if torch else read_array(path)
    elif not path.is_dir():
        raise InputError(f"{path} does not exist; expected a prefix's file or folder")
    elif (checkpoint := find_checkpoint(path)) is not None:
        prefix = read_checkpoint(checkpoint)
    else:
        prefix = _read_adapter(path, stack)
    found = tuple(prefix.shape)
    layers, groups, width = stack
    if len(found) != 5 or found != (layers, 2, found[2], groups, width):
        raise InputError(
            f"{path} has an array of shape {found}, expected a prefix ({layers}, 2, P, "
            f"{groups}, {width}): layers, keys and values, slots, key/value heads and "
            "their width; was it trained on another model?"
        )
    prefix = prefix.astype(np.float32)
    if not np.isfinite(prefix).all():
        raise InputError(f"{path} has numbers that are not finite")
    return prefix


def _read_cartridge(
    file: Path, stack: tuple[int, int, int]
) -> Float[np.ndarray, "L 2 P G K"]:
    lists, parts = read_torch_lists(file), []
    for kind in ("frozen", "trainable"):
        pair = [_read_layers(lists, f"{kind}_{x}", file, stack) for x in KEYS_VALUES]
        if pair[0].shape != pair[1].shape:
            raise InputError(f"{file}: its {kind} keys and values differ in length")
        parts.append(np.stack(pair, axis=1))  # [L, 2, G, P, K]
    if not parts[1].shape[3]:
        raise InputError(
            f"{file} has {shown(sorted(lists))}, expected trainable_keys and "
            "trainable_values of a cartridge"
        )
    return np.concatenate(parts, axis=3).swapaxes(2, 3)


def _read_layers(
    lists: dict[str, list[np.ndarray]],
    name: str,
    file: Path,
    stack: tuple[int, int, int],
) -> Float[np.ndarray, "L G P K"]:
    """Reads the keys or the values of all layers; zero slots if there are none."""
    layers, groups, width = stack
    tensors = lists.get(name, [])
    if not tensors:
        return np.zeros((layers, groups, 0, width), np.float32)
    if len(tensors) != layers:
        raise InputError(
            f"{file}: {name} has {len(tensors)} layers, expected {layers}; was it "
            "trained on another model?"
        )
    shape = tensors[0].shape
    for tensor in tensors:
        expected = len(shape) == 4 and (1, groups, shape[2], width)
        if tensor.shape != expected:
            raise InputError(
                f"{file}: {name} has a tensor of shape {tensor.shape}, expected (1, "
                f"{groups}, P, {width}) in each layer: key/value heads, slots and the "
                "width of heads; was it trained on another model?"
            )
    return np.concatenate([tensor.astype(np.float32) for tensor in tensors])


def _read_adapter(folder: Path, stack: tuple[int, int, int]) -> np.ndarray:
    adapter = peft_folder.read_folder(folder)
    if adapter.kind not in KINDS:
        raise InputError(
            f"{folder} has peft_type {shown(adapter.kind)}, expected a prefix: "
            f"{' or '.join(KINDS)}"
        )
    layers, groups, width = stack
    table = adapter.tensors[EMBEDDINGS]
    if table.shape[1] != 2 * layers * groups * width:
        return table  # refused with its shape
    return table.reshape(-1, layers, 2, groups, width).transpose(1, 2, 0, 3, 4)
