"""Folders of small models with quantized weights, written as their makers describe.

The codes and scales are random: what they stand for follows from the layout alone.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from prompt_tuning.core.quantization.nibbles import NORMAL_FLOAT

Tensors = dict[str, np.ndarray]
GROUP = 32
SMALLEST = 8
"""Number of outputs of the smallest quantized weight."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def packed(codes: np.ndarray, bits: int, order=None) -> np.ndarray:
    """Packs the columns of integers into words, the first in the lowest bits."""
    if bits == 3:
        return packed_in_three_words(codes)
    count = 32 // bits
    order = range(count) if order is None else order
    words = np.zeros((len(codes), codes.shape[1] // count), np.uint32)
    for column in range(codes.shape[1]):
        shift = np.uint32(bits * order[column % count])
        words[:, column // count] |= codes[:, column].astype(np.uint32) << shift
    return words.view(np.int32)


def packed_in_three_words(codes: np.ndarray) -> np.ndarray:
    """Packs 32 columns of three bits into three words, as AutoGPTQ's `pack` does.

    Column 10 has two bits in the first word and one in the second, and column 21 one
    in the second word and two in the third.
    """
    columns = codes.astype(np.uint32).T
    words = []
    for first in range(0, len(columns), 32):
        some = columns[first : first + 32]
        one, two, three = (np.zeros(len(codes), np.uint32) for _ in range(3))
        for i in range(10):
            one |= some[i] << np.uint32(3 * i)
            two |= some[11 + i] << np.uint32(3 * i + 1)
            three |= some[22 + i] << np.uint32(3 * i + 2)
        one |= some[10] << np.uint32(30)
        two |= some[10] >> np.uint32(2) & np.uint32(1)
        two |= some[21] << np.uint32(31)
        three |= some[21] >> np.uint32(1) & np.uint32(3)
        words += [one, two, three]
    return np.stack(words, axis=1).view(np.int32)


def drawn_scales(
    random: np.random.Generator, shape: tuple[int, ...], step: float
) -> np.ndarray:
    """Draws scales with which weights have a size of about 0.1."""
    return (random.uniform(0.5, 1.5, shape) * 0.1 / step).astype(np.float16)


def nf4(random: np.random.Generator, rows: int, columns: int) -> Tensors:
    """Returns a weight in NF4 of bitsandbytes, in blocks of 64."""
    count = rows * columns
    codes = random.integers(0, 256, (count // 2, 1)).astype(np.uint8)
    state = {"blocksize": 64, "shape": [rows, columns], "quant_type": "nf4"}
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    scales = drawn_scales(random, (count // 64,), 1).astype(np.float32)
    return {
        "weight": codes,
        "weight.absmax": scales,
        "weight.quant_map": NORMAL_FLOAT,
        "weight.quant_state.bitsandbytes__nf4": text.copy(),
    }


def nf4_nested(random: np.random.Generator, rows: int, columns: int) -> Tensors:
    """Returns the same with scales in eight bits, in blocks of 256."""
    tensors = nf4(random, rows, columns)
    count = len(tensors["weight.absmax"])
    state = {"blocksize": 64, "shape": [rows, columns], "quant_type": "nf4"}
    state |= {"nested_blocksize": 256, "nested_offset": 0.1}
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return tensors | {
        "weight.absmax": random.integers(0, 256, count).astype(np.uint8),
        "weight.nested_absmax": random.uniform(0.02, 0.05, -(-count // 256)).astype(
            np.float32
        ),
        "weight.nested_quant_map": np.linspace(-1, 1, 256, dtype=np.float32),
        "weight.quant_state.bitsandbytes__nf4": text.copy(),
    }


def rows_of_int8(random: np.random.Generator, rows: int, columns: int) -> Tensors:
    """Returns a weight in int8 of bitsandbytes."""
    codes = random.integers(-127, 128, (rows, columns)).astype(np.int8)
    scales = drawn_scales(random, (rows,), 1).astype(np.float32)
    return {"weight": codes, "SCB": scales}


def gptq(random: np.random.Generator, rows: int, columns: int, bits: int) -> Tensors:
    """Returns a weight of GPTQ, with inputs in order."""
    groups = columns // GROUP
    return {
        "qweight": packed(random.integers(0, 2**bits, (rows, columns)), bits).T.copy(),
        "qzeros": packed(random.integers(0, 2**bits, (groups, rows)), bits),
        "scales": drawn_scales(random, (groups, rows), 2 ** (bits - 1)),
        "g_idx": (np.arange(columns) // GROUP).astype(np.int32),
    }


def awq(random: np.random.Generator, rows: int, columns: int) -> Tensors:
    """Returns a weight of AWQ."""
    groups = columns // GROUP
    codes = random.integers(0, 16, (columns, rows))
    return {
        "qweight": packed(codes, 4, AWQ_ORDER),
        "qzeros": packed(random.integers(0, 16, (groups, rows)), 4, AWQ_ORDER),
        "scales": drawn_scales(random, (groups, rows), 8),
    }


def pack_int4(random: np.random.Generator, rows: int, columns: int) -> Tensors:
    """Returns a weight of compressed-tensors in four bits, without zero points."""
    scales = drawn_scales(random, (rows, columns // GROUP), 8)
    return {
        "weight_packed": packed(random.integers(0, 16, (rows, columns)), 4),
        "weight_scale": scales.astype(ml_dtypes.bfloat16),
        "weight_shape": np.array([rows, columns], np.int64),
    }


def blocks_of_float8(random: np.random.Generator, rows: int, columns: int) -> Tensors:
    """Returns a weight in float8 with a scale for each 128 x 128 weights."""
    numbers = random.uniform(-400, 400, (rows, columns))
    shape = (-(-rows // 128), -(-columns // 128))
    scales = drawn_scales(random, shape, 1).astype(np.float32) / 400
    return {
        "weight": numbers.astype(ml_dtypes.float8_e4m3fn),
        "weight_scale_inv": scales,
    }


GROUPS_OF_FOUR_BITS = {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
KINDS: Mapping[str, tuple[dict, Callable[..., Tensors]]] = {
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4),
    "nf4 nested": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        nf4_nested,
    ),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, rows_of_int8),
    "gptq": (
        {"quant_method": "gptq", "bits": 4},
        lambda *arguments: gptq(*arguments, bits=4),
    ),
    "gptq 8": (
        {"quant_method": "gptq", "bits": 8},
        lambda *arguments: gptq(*arguments, bits=8),
    ),
    "awq": ({"quant_method": "awq", "bits": 4}, awq),
    "pack int4": (
        {"quant_method": "compressed-tensors", **GROUPS_OF_FOUR_BITS},
        pack_int4,
    ),
    "fp8": ({"quant_method": "fp8"}, blocks_of_float8),
}
"""Settings in `config.json`, and the function that draws a weight, by kind."""


def write_quantized(base: Path, folder: Path, kind: str, more: str = "-") -> Path:
    """Writes a copy of a folder with random quantized weights for its projections.

    Other tensors are stored in bfloat16, except those with `more` in their names.
    """
    shutil.copytree(base, folder)
    file, config = folder / "model.safetensors", folder / "config.json"
    settings, draw = KINDS[kind]
    random, tensors = np.random.default_rng(0), {}
    for name, array in load_file(file).items():
        few = array.ndim != 2 or len(array) < SMALLEST  # such as routers
        if few or not (".layers." in name or more in name):
            tensors[name] = array.astype(ml_dtypes.bfloat16)
            continue
        module = name.removesuffix("weight")
        parts = draw(random, *array.shape)
        tensors |= {f"{module}{part}": x for part, x in parts.items()}
    save_file(tensors, file)
    content = json.loads(config.read_text())
    config.write_text(json.dumps(content | {"quantization_config": settings}))
    return folder


def enlarge(base: Path, folder: Path, factor: int) -> Path:
    """Writes a folder with random weights, whose widths are multiples of another's."""
    shutil.copytree(base, folder)
    random, tensors = np.random.default_rng(0), {}
    counted = ("embed", "lm_head", "router", "moe.gate.", "mlp.gate.", "sinks")
    counted += ("experts.gate_up",)
    for name, array in load_file(folder / "model.safetensors").items():
        first, *others = array.shape
        counts = any(part in name for part in (*counted, "experts.down"))
        shape = (first if counts else factor * first, *(factor * x for x in others))
        drawn = random.standard_normal(shape) * shape[-1] ** -0.5
        tensors[name] = (drawn + ("norm" in name)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    file = folder / "config.json"
    content = json.loads(file.read_text())
    sizes = ("hidden_size", "intermediate_size", "moe_intermediate_size", "head_dim")
    for name in sizes:
        if content.get(name) is not None:
            content[name] *= factor
    file.write_text(json.dumps(content))
    return folder


def write_mxfp4(folder: Path) -> Path:
    """Packs the experts of a folder of gpt-oss, `[E, in, out]`, with random codes."""
    file = folder / "model.safetensors"
    random, tensors = np.random.default_rng(0), load_file(file)
    for name in [name for name in tensors if name.endswith("_proj")]:
        experts, columns, rows = tensors.pop(name).shape
        shape = experts, rows, columns // 32
        blocks = random.integers(0, 256, (*shape, 16), np.uint8)
        tensors[f"{name}_blocks"] = blocks
        tensors[f"{name}_scales"] = random.integers(122, 127, shape, np.uint8)
    narrow = {
        name: array.astype(ml_dtypes.bfloat16) if array.dtype == np.float32 else array
        for name, array in tensors.items()
    }
    save_file(narrow, file)
    config = folder / "config.json"
    quantized = {"quantization_config": {"quant_method": "mxfp4"}}
    config.write_text(json.dumps(json.loads(config.read_text()) | quantized))
    return folder
