"""Layouts for writing quantized weights, so that other programs can read them.

NF4 as bitsandbytes stores it, and integers as compressed-tensors packs them; see the
modules that read these. A weight is rounded a few rows at a time.
"""

import abc
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from prompt_tuning.checkpoints.formats.safetensors import Entry
from prompt_tuning.checkpoints.quantized.scaled_tensors import WORD_BITS
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.quantization.nibbles import NORMAL_FLOAT, nearest_codes
from prompt_tuning.core.quantization.scales_in_codes import DYNAMIC_MAP, NestedScales
from prompt_tuning.core.quantization.stores import INT4, INT8, NF4

CHUNK = 2**20
"""Weights that are rounded at once, so that their steps stay in the cache."""
SCALE_DTYPES = ("float32", "float16", "bfloat16")


@dataclasses.dataclass
class Rounding:
    """Rounding errors of one weight, summed over its parts.

    `error` sums the squared changes, `total` the squared weights.
    """

    error: float = 0
    total: float = 0
    scales: list[np.ndarray] = dataclasses.field(default_factory=list)

    @classmethod
    def joined(cls, parts: "Sequence[Rounding]") -> "Rounding":
        """Adds up the changes of more than one weight."""
        return cls(sum(x.error for x in parts), sum(x.total for x in parts))

    def reset(self) -> None:
        """Forgets all parts."""
        self.error, self.total, self.scales = 0, 0, []

    @property
    def relative(self) -> float:
        """Norm of the changes, divided by the norm of the weights."""
        return math.sqrt(self.error / self.total) if self.total else 0.0

    def add(self, weights: np.ndarray, rounded: np.ndarray) -> None:
        """Adds a part."""
        change = (weights - rounded).ravel()
        self.error += float(np.dot(change, change))
        flat = np.ascontiguousarray(weights).ravel()
        self.total += float(np.dot(flat, flat))


class Layout(abc.ABC):
    """Writes weights `[out, in]` in the layout of another library.

    Attributes:
      experts: whether the layout has a place for experts, as separate tensors.
    """

    experts: ClassVar[bool]

    def __init__(self, group: int | None):
        self.group = group

    @abc.abstractmethod
    def entries(
        self, name: str, weight: StoredTensor, rounding: Rounding
    ) -> list[Entry]:
        """Returns the arrays of a weight; its changes are added when they are written.

        Raises:
          InputError: if the weight cannot be divided into groups.
        """

    @abc.abstractmethod
    def settings(self, unquantized: Sequence[str], dtype: str) -> dict[str, Any]:
        """Returns `quantization_config`.

        `unquantized` names the modules that stay as they are; `dtype` is that of the
        other tensors.
        """

    @abc.abstractmethod
    def _round(
        self,
        weights: Float32[np.ndarray, "rows in"],
        dtype: np.dtype,
        rounding: Rounding,
    ) -> np.ndarray:
        """Rounds some rows, with scales of some dtype, which are kept.

        The changes are added to those of other rows.
        """

    def _chunks(
        self, name: str, weight: StoredTensor, rounding: Rounding, multiple: int = 1
    ) -> Iterator[np.ndarray]:
        """Rounds a weight in parts, each with a multiple of some number of rows."""
        rounding.reset()
        rows, columns = weight.shape
        step = -(-max(CHUNK // columns, 1) // multiple) * multiple
        for row in range(0, rows, step):
            part = (slice(row, min(row + step, rows)), slice(0, columns))
            weights = weight.read(part).astype(np.float32)
            if not np.isfinite(weights).all():
                raise InputError(
                    f"{name} in {weight.source} contains numbers that are not finite "
                    "and cannot be quantized; is the checkpoint damaged?"
                )
            yield self._round(weights, _scale_dtype(weight), rounding)


def _scale_dtype(weight: StoredTensor) -> np.dtype:
    return weight.dtype if weight.dtype.name in SCALE_DTYPES else np.dtype(np.float32)


def _scales(
    rounding: Rounding, chunks: Callable[[], Iterator[np.ndarray]]
) -> list[np.ndarray]:
    """Returns the scales of a weight, rounding it first if necessary."""
    if not rounding.scales:
        for _ in chunks():
            pass
    return rounding.scales


class NormalFloatLayout(Layout):
    """NF4 of bitsandbytes: blocks of consecutive weights, two codes per byte.

    It has no place for experts: transformers 5 joins a layer's experts into one
    parameter, and quantizes only separate modules with bitsandbytes.
    """

    experts = False
    SIZES = (64, 128, 256, 512, 1024, 2048, 4096)

    def __init__(self, group: int | None, *, nested: bool = False):
        """Checks the size of a block.

        Args:
          group: number of weights in a block; None for 64.
          nested: whether to store scales in eight bits, with second-level scales.
        """
        super().__init__(64 if group is None else group)
        if self.group not in self.SIZES:
            listed = ", ".join(map(str, self.SIZES))
            raise InputError(
                f"--group is {group}, expected one of {listed} for {NF4}: the sizes of "
                "blocks that bitsandbytes reads"
            )
        self._size: int = self.group
        self._nested = nested

    def entries(
        self, name: str, weight: StoredTensor, rounding: Rounding
    ) -> list[Entry]:
        """Returns the codes, scales, table and settings of a weight."""
        size, count = self._size, weight.size
        state = {
            "quant_type": NF4,
            "blocksize": size,
            "dtype": weight.dtype.name,
            "shape": list(weight.shape),
        }
        # Parts begin at a block.
        multiple = size // math.gcd(size, weight.shape[1])

        def codes() -> Iterator[np.ndarray]:
            return self._chunks(name, weight, rounding, multiple)

        def scales() -> list[np.ndarray]:
            return _scales(rounding, codes)

        def nested() -> NestedScales:
            return NestedScales.of(np.concatenate(scales()))

        byte, wide = np.dtype(np.uint8), np.dtype(np.float32)
        kind = f"{name}.quant_state.bitsandbytes__{NF4}"
        blocks = -(-count // size)
        entries = [
            Entry(name, byte, (-(-count // 2), 1), codes),
            Entry(f"{name}.quant_map", wide, (16,), lambda: [NORMAL_FLOAT]),
        ]
        if not self._nested:
            text = np.frombuffer(json.dumps(state).encode(), np.uint8)
            return [
                *entries,
                Entry(f"{name}.absmax", wide, (blocks,), scales),
                Entry(kind, byte, text.shape, lambda: [text]),
            ]

        def settings(offset: float) -> np.ndarray:
            changed = state | {
                "nested_blocksize": NestedScales.BLOCK,
                "nested_dtype": wide.name,
                "nested_offset": offset,
            }
            # The file's places are fixed before the offset is known.
            padded = json.dumps(changed).ljust(NestedScales.SETTINGS)
            return np.frombuffer(padded.encode(), np.uint8)

        table, outer = DYNAMIC_MAP, (-(-blocks // NestedScales.BLOCK),)
        length = (NestedScales.SETTINGS,)
        return [
            *entries,
            Entry(f"{name}.absmax", byte, (blocks,), lambda: [nested().codes]),
            Entry(f"{name}.nested_absmax", wide, outer, lambda: [nested().largest]),
            Entry(f"{name}.nested_quant_map", wide, table.shape, lambda: [table]),
            Entry(kind, byte, length, lambda: [settings(nested().offset)]),
        ]

    def settings(self, unquantized: Sequence[str], dtype: str) -> dict[str, Any]:
        """Returns the settings of transformers' `BitsAndBytesConfig`."""
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": NF4,
            "bnb_4bit_use_double_quant": self._nested,
            "bnb_4bit_compute_dtype": dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(unquantized),
        }

    def _round(
        self,
        weights: Float32[np.ndarray, "rows in"],
        dtype: np.dtype,
        rounding: Rounding,
    ) -> UInt8[np.ndarray, "bytes"]:
        flat = weights.ravel()
        blocks = np.pad(flat, (0, -len(flat) % self._size)).reshape(-1, self._size)
        scale = np.abs(blocks).max(1)
        rounding.scales.append(scale)
        divisor = np.where(scale == 0, np.float32(1), scale)[:, None]
        codes = np.asarray(nearest_codes(blocks / divisor, NORMAL_FLOAT))
        rounded = (NORMAL_FLOAT[codes] * scale[:, None]).ravel()
        rounding.add(flat, rounded[: len(flat)])
        pairs = codes.reshape(-1, 2)
        return (pairs[:, 0] << 4 | pairs[:, 1])[: -(-len(flat) // 2)]


class PackedLayout(Layout):
    """Integers of compressed-tensors in words of 32 bits, with scales for groups.

    A scale is `max|w| / (2^bits - 1) * 2` (as in compressed-tensors), in the weights'
    dtype.
    """

    experts = True

    def __init__(self, bits: int, group: int | None):
        super().__init__(group)
        self._bits = bits

    def entries(
        self, name: str, weight: StoredTensor, rounding: Rounding
    ) -> list[Entry]:
        """Returns the words, scales and shape of a weight."""
        rows, columns = weight.shape
        if self.group is not None and columns % self.group:
            raise InputError(
                f"{name} in {weight.source} has {columns:,} inputs, which groups of "
                f"{self.group} do not divide: choose --group, e.g. "
                f"{math.gcd(columns, self.group)}"
            )
        groups = 1 if self.group is None else columns // self.group
        words = -(-columns * self._bits // WORD_BITS)

        def packed() -> Iterator[np.ndarray]:
            return self._chunks(name, weight, rounding)

        def scales() -> list[np.ndarray]:
            return _scales(rounding, packed)

        shape = np.array(weight.shape, np.int64)
        return [
            Entry(f"{name}_packed", np.dtype(np.int32), (rows, words), packed),
            Entry(f"{name}_scale", _scale_dtype(weight), (rows, groups), scales),
            Entry(f"{name}_shape", shape.dtype, (2,), lambda: [shape]),
        ]

    def settings(self, unquantized: Sequence[str], dtype: str) -> dict[str, Any]:
        """Returns the settings of compressed-tensors."""
        weights = {
            "num_bits": self._bits,
            "type": "int",
            "symmetric": True,
            "strategy": "channel" if self.group is None else "group",
            "group_size": self.group,
            "dynamic": False,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": list(unquantized),
        }

    def _round(
        self,
        weights: Float32[np.ndarray, "rows in"],
        dtype: np.dtype,
        rounding: Rounding,
    ) -> Int32[np.ndarray, "rows words"]:
        rows, columns = weights.shape
        grouped = weights.reshape(rows, -1, self.group or columns)
        half = 2 ** (self._bits - 1)
        largest = np.abs(grouped).max(-1)  # [rows, groups]
        scale = (largest / np.float32(half - 0.5)).astype(dtype)
        # A scale that is 0 in a narrow type would make zeros of all weights anyway.
        scale = np.where(scale == 0, dtype.type(1), scale)
        rounding.scales.append(scale)
        wide = scale.astype(np.float32)[..., None]
        integers = np.clip(np.rint(grouped / wide), -half, half - 1)
        rounding.add(grouped, integers * wide)
        codes = (integers + half).astype(np.uint32).reshape(rows, columns)
        count = WORD_BITS // self._bits
        codes = np.pad(codes, ((0, 0), (0, -columns % count)))
        shifts = np.arange(count, dtype=np.uint32) * np.uint32(self._bits)
        shifted = codes.reshape(rows, -1, count) << shifts
        return np.bitwise_or.reduce(shifted, axis=-1).view(np.int32)


def make_layout(store: str, group: int | None, *, nested: bool = False) -> Layout:
    """Returns the layout of a store, with groups of some size.

    By default NF4 has groups of 64, int4 of 128, and int8 one scale per output. With
    `nested`, NF4's scales are quantized, too.

    Raises:
      InputError: for a size that the library does not read, or nested scales in another
        store.
    """
    if nested and store != NF4:
        raise InputError(
            f"--double_quantization is for {NF4}, whose layout stores scales in eight "
            f"bits; {store} has none: leave the option out"
        )
    if group is not None and group < 1:
        raise InputError(f"--group is {group}, expected a positive number of inputs")
    if store == NF4:
        return NormalFloatLayout(group, nested=nested)
    bits = {INT4: 4, INT8: 8}[store]
    return PackedLayout(bits, 128 if group is None and store == INT4 else group)
