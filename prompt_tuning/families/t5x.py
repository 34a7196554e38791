"""T5X checkpoints in its native format (version 3), and its names to our paths.

A checkpoint is a folder `checkpoint_<step>` with a msgpack file `checkpoint`, the
Flax-serialised tree `{version, optimizer: {state, target}}`. A leaf of `target` is an
array inside that file or a TensorStore spec that points at a zarr folder beside it.
Linear layers are stored `[in, out]`, as ours are. The file is mapped into memory: most
of it belongs to the optimizer, and is never read.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from prompt_tuning.checkpoints.formats.msgpack import ARRAY_CODES, PackedFile, Span
from prompt_tuning.checkpoints.formats.zarr import named_dtype, open_zarr
from prompt_tuning.checkpoints.stored_tensors import (
    Recipe,
    StoredTensor,
    layered,
    transpose,
)
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.slices import Block, extent

CHUNKED = "__msgpack_chunked_array__"


def open_t5x(path: str | Path) -> dict[str, StoredTensor]:
    """Opens the parameters of a T5X checkpoint, by name without `target/`.

    Args:
      path: a `checkpoint_<step>` folder, a folder of those (the latest is opened), or
        the msgpack file itself.

    Raises:
      InputError: if there is no checkpoint, if the file is cut short or of another
        format, or if an array is stored in a way that is not read here.
    """
    file = find_checkpoint(Path(path))
    packed, tree = _unpack(file)
    target = tree.get("optimizer", {})
    target = target.get("target") if isinstance(target, dict) else None
    if not isinstance(target, dict) or not target:
        raise InputError(
            f"{file} has no optimizer/target, only {', '.join(map(str, tree))}; "
            "expected a T5X checkpoint of version 3"
        )
    return {
        name: _open_leaf(file, packed, name, leaf) for name, leaf in _leaves(target)
    }


def find_checkpoint(path: Path) -> Path:
    """The msgpack file that a path means.

    Raises:
      InputError: if it means none.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputError(f"{path} is missing; expected a T5X checkpoint")
    if (path / "checkpoint").is_file():
        return path / "checkpoint"
    steps = {
        int(found[1]): entry
        for entry in path.iterdir()
        if (found := re.fullmatch(r"checkpoint_(\d+)", entry.name))
    }
    if not steps:
        found = ", ".join(sorted(entry.name for entry in path.iterdir())) or "nothing"
        raise InputError(
            f"{path} has neither the file 'checkpoint' nor a 'checkpoint_<step>', "
            f"only {found}"
        )
    latest = steps[max(steps)]
    file = latest if latest.is_file() else latest / "checkpoint"
    if not file.is_file():
        raise InputError(f"{file} is missing; the copy of {latest} is incomplete")
    return file


def _unpack(file: Path) -> tuple[PackedFile, dict]:
    try:
        packed = PackedFile(file)
        tree = packed.value()
    except ValueError as error:
        raise InputError(
            f"{file} ({file.stat().st_size:,} bytes) is not a whole msgpack file: "
            f"{error}"
        ) from error
    if not isinstance(tree, dict):
        raise InputError(f"{file} is not a T5X checkpoint: it holds no tree of names")
    return packed, tree


def _leaves(tree: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        is_spec = isinstance(value, dict) and {"driver", "kvstore"} <= value.keys()
        if isinstance(value, dict) and not is_spec and CHUNKED not in value:
            yield from _leaves(value, f"{path}/")
        else:
            yield path, value


def _open_leaf(file: Path, packed: PackedFile, name: str, leaf: object) -> StoredTensor:
    if isinstance(leaf, Span):
        array = _decode(file, packed, name, leaf)
        return StoredTensor(array.shape, array.dtype, str(file), array.__getitem__)
    if isinstance(leaf, dict) and CHUNKED in leaf:
        return _open_chunks(file, packed, name, leaf)
    if isinstance(leaf, dict):
        return open_zarr(_zarr_folder(file, name, leaf))
    raise InputError(
        f"{name} in {file} is {leaf!r}, neither an array nor a TensorStore spec; "
        "checkpoints of Orbax are not read"
    )


def _decode(file: Path, packed: PackedFile, name: str, leaf: Span) -> np.ndarray:
    """An array as Flax packs it, as a view of the file."""
    if leaf.code not in ARRAY_CODES:
        raise InputError(f"{name} in {file} has the extension type {leaf.code}")
    try:
        shape, dtype_name, data = packed.value(leaf)
        dtype = named_dtype(dtype_name, f"{name} in {file}")
        expected = math.prod(shape) * dtype.itemsize
        if data.size != expected:
            raise InputError(
                f"{name} in {file} has {data.size:,} bytes, expected {expected:,} for "
                f"{dtype.name}{tuple(shape)}"
            )
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{name} in {file} is not a packed array: {error}") from error
    view = np.frombuffer(packed.data, dtype, math.prod(shape), data.start)
    return view.reshape(shape)


def _open_chunks(file: Path, packed: PackedFile, name: str, leaf: dict) -> StoredTensor:
    """An array that Flax cut into flat pieces, because msgpack ends at 4 GiB."""
    try:
        shape = tuple(leaf["shape"][str(i)] for i in range(len(leaf["shape"])))
        chunks = [leaf["chunks"][str(i)] for i in range(len(leaf["chunks"]))]
        pieces = [_decode(file, packed, name, chunk) for chunk in chunks]
        found = sum(piece.size for piece in pieces)
        if not (shape and found) or found != math.prod(shape):
            raise ValueError(f"{found:,} numbers for the shape {shape}")
    except InputError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise InputError(
            f"{name} in {file} is not an array in whole chunks: {error!r}"
        ) from error
    read = functools.partial(_read_pieces, pieces, shape)
    return StoredTensor(shape, pieces[0].dtype, str(file), read)


def _read_pieces(
    pieces: Sequence[np.ndarray], shape: tuple[int, ...], block: Block
) -> np.ndarray:
    """A block of an array `[rows, ...]` in flat pieces, which end within rows.

    Only a row that a piece ends in is read whole, where the block has it.
    """
    rows, *rest = block
    width = math.prod(shape[1:])
    result = np.empty(extent(block), pieces[0].dtype)
    ends = itertools.accumulate(piece.size for piece in pieces)
    # Whole rows before an end, and the row that it cuts.
    cuts = {row for end in ends for row in (end // width, math.ceil(end / width))}
    inner = sorted(row for row in cuts if rows.start < row < rows.stop)
    for first, last in itertools.pairwise([rows.start, *inner, rows.stop]):
        flat = _read_flat(pieces, first * width, last * width)
        some = flat.reshape(last - first, *shape[1:])
        result[first - rows.start : last - rows.start] = some[:, *rest]
    return result


def _read_flat(pieces: Sequence[np.ndarray], first: int, last: int) -> np.ndarray:
    """Some numbers of the joined pieces, as a view where one piece has them all."""
    found, start = [], 0
    for piece in pieces:
        part = piece[max(0, first - start) : max(0, last - start)]
        if part.size:
            found.append(part)
        start += piece.size
    return found[0] if len(found) == 1 else np.concatenate(found or [pieces[0][:0]])


def _zarr_folder(file: Path, name: str, spec: dict) -> Path:
    """Where a spec points; its driver (gfile, gcs) and bucket say where it was."""
    if spec["driver"] != "zarr":
        raise InputError(
            f"{name} in {file}: driver {spec['driver']!r}, expected 'zarr'"
        )
    path = str(spec["kvstore"].get("path", "")).rstrip("/")
    if not path or Path(path).is_absolute() or ".." in Path(path).parts:
        raise InputError(
            f"{name} in {file} points at {path!r}, expected a folder beside the file"
        )
    return file.parent / path


def recipes(config: ModelConfig) -> dict[str, Recipe]:
    """How each parameter of a T5 is made of the arrays that T5X stores.

    Args:
      config: as `t5_config` gives it.

    Raises:
      InputError: if the model is not an encoder-decoder.
    """
    if config.architecture != "encoder_decoder":
        raise InputError(
            f"T5X checkpoints hold encoder-decoders, the config says "
            f"{config.architecture!r}; use a Hugging Face checkpoint"
        )
    table = {
        "token_embedder/embedding": Recipe(("token_embedder/embedding",)),
        **_stack_recipes("encoder", config.encoder_layers, config.gated),
        **_stack_recipes("decoder", config.layers, config.gated),
    }
    if not config.tied_head:
        head = Recipe(("decoder/logits_dense/kernel",), transform=transpose)
        table["head/kernel"] = head
    return table


def _stack_recipes(stack: str, layers: int, gated: bool) -> dict[str, Recipe]:
    names = {
        "mlp_norm/scale": "pre_mlp_layer_norm/scale",
        "mlp/up/kernel": "mlp/wi_1/kernel" if gated else "mlp/wi/kernel",
        "mlp/down/kernel": "mlp/wo/kernel",
    }
    if gated:
        names["mlp/gate/kernel"] = "mlp/wi_0/kernel"
    if stack == "encoder":
        names |= _attention_names("self_attention", "attention", "attention")
    else:
        names |= _attention_names("self_attention", "self_attention", "self_attention")
        names |= _attention_names(
            "cross_attention", "encoder_decoder_attention", "cross_attention"
        )
    return {
        f"{stack}/relative_position_bias/embedding": Recipe(
            (f"{stack}/relpos_bias/rel_embedding",)
        ),
        f"{stack}/final_norm/scale": Recipe((f"{stack}/{stack}_norm/scale",)),
        **{
            f"{stack}/layers/{ours}": layered(f"{stack}/layers_{{}}/{theirs}", layers)
            for ours, theirs in names.items()
        },
    }


def _attention_names(ours: str, theirs: str, norm: str) -> dict[str, str]:
    return {
        f"{ours}_norm/scale": f"pre_{norm}_layer_norm/scale",
        **{
            f"{ours}/{projection}/kernel": f"{theirs}/{projection}/kernel"
            for projection in ("query", "key", "value", "out")
        },
    }
