"""Fingerprints of the trained parameters.

Two runs with the same fingerprint at a step have the same trained parameters, bit for
bit. A fingerprint takes 16 bytes. It is computed on the device, so nothing waits for
it, and it is a sum of integers over all elements, so it does not depend on the mesh.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

WORDS = 4
"""Number of 32-bit words in a fingerprint."""

Fingerprint = Sequence[UInt32[Array | np.ndarray, "4"]]
"""Parts of a fingerprint in 32-bit words; their sum modulo 2^32 is the fingerprint."""


def as_text(fingerprint: Fingerprint) -> str:
    """Returns a fingerprint as 32 hexadecimal digits."""
    total = np.zeros(WORDS, np.uint32)
    for part in fingerprint:
        total = total + np.asarray(part)
    return "".join(f"{int(word):08x}" for word in total)


def fingerprint(trained: Mapping[str, Any]) -> Fingerprint:
    """Computes the fingerprint of trained parameters.

    Args:
      trained: arrays by path. NumPy arrays, which may change in place, are read before
        the function returns.

    Returns parts of the fingerprint, one array per group of devices, which may still be
    in computation.
    """
    parts: list[Any] = []
    groups: dict[Any, dict[str, Array]] = {}
    for path, leaf in trained.items():
        if isinstance(leaf, np.ndarray):
            parts.append(_leaf_words(np, path, leaf))
        else:
            # A program cannot read leaves of more than one stage.
            groups.setdefault(frozenset(leaf.sharding.device_set), {})[path] = leaf
    return [*parts, *map(_on_device, groups.values())]


@jax.jit
def _on_device(trained: dict[str, Array]) -> UInt32[Array, "4"]:
    words = [_leaf_words(jnp, path, leaf) for path, leaf in trained.items()]
    return jnp.stack(words).sum(0, dtype=jnp.uint32)


def _leaf_words(xp: Any, path: str, leaf: Any) -> Any:
    """Returns the words of one leaf: sums of mixed elements, `[WORDS]`.

    `xp` is `numpy` or `jax.numpy`; both compute the same integers.
    """
    # Each element is mixed with its position, by the finalizer of MurmurHash3.
    bits = _as_integers(xp, leaf) ^ (_positions(xp, leaf.shape) * _word(0x9E3779B1))
    digest = hashlib.sha256(f"{path} {leaf.shape} {leaf.dtype}".encode()).digest()
    words = []
    for seed in np.frombuffer(digest, "<u4", WORDS).tolist():
        mixed = bits ^ _word(seed)
        mixed = (mixed ^ (mixed >> _word(16))) * _word(0x85EBCA6B)
        mixed = (mixed ^ (mixed >> _word(13))) * _word(0xC2B2AE35)
        mixed = mixed ^ (mixed >> _word(16))
        words.append(xp.sum(mixed, dtype=np.uint32))
    return xp.stack(words)


def _word(number: int) -> np.ndarray:
    # An array, because NumPy warns where numbers overflow.
    return np.array(number, np.uint32)


def _as_integers(xp: Any, leaf: Any) -> Any:
    """Returns the bits of each element as a word; 64 bits are folded to 32."""
    width = leaf.dtype.itemsize
    unsigned = np.dtype(f"u{width}")
    bits = leaf.astype(unsigned) if leaf.dtype == bool else leaf.view(unsigned)
    if width == 8:
        bits = bits ^ (bits >> unsigned.type(32))
    return bits.astype(np.uint32)


def _positions(xp: Any, shape: tuple[int, ...]) -> Any:
    """Returns the position of each element in row-major order, modulo 2^32."""
    total, stride = xp.zeros([1] * len(shape), np.uint32), 1
    for axis in reversed(range(len(shape))):
        count = xp.arange(shape[axis], dtype=np.uint32) * _word(stride % 2**32)
        total = total + count.reshape(
            [-1 if i == axis else 1 for i in range(len(shape))]
        )
        stride *= shape[axis]
    return total
