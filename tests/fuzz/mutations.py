"""Random damage to files: bytes, text, JSON, and what lies under a file's name."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Mutation = Callable[[random.Random, bytes], bytes]

NUMBERS = (
    *(-1, 0, 1, 2, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64),
    *(10**12, 10**24, 10**300, -(2**31), -(2**63), 0.5, -0.0, 1e-320, 1e308, 3.0),
    *(float("nan"), float("inf"), float("-inf")),
)
TEXTS = (
    *("", " ", "a", "\0", "a\0b", "\n", "../../etc/passwd", "/etc/passwd", ".", ".."),
    *("None", "nan", "1e999", "{}", "[", "%s%n", "{0.__class__}", "{{7*7}}", "$(id)"),
    *("a" * 300, "a" * 70_000, "é" * 300, "\ud800", "\u202e", "\U0001f600", "💥\0"),
    *("float16", "int8", "auto", "-1", "0x10", "1_000", "9" * 24, "@Run()", "%MODEL"),
)


MAXIMUM_REPEATED = 100
"""Number of entries up to which a list is repeated often, so that damaging a file
several times takes no longer than reading it."""


def hostile_value(rng: random.Random) -> Any:
    """Returns a JSON value of any type and size that a reader may not expect."""
    kind = rng.randrange(8)
    if kind <= 2:
        return rng.choice(NUMBERS)
    if kind <= 4:
        return rng.choice(TEXTS)
    if kind == 5:
        return rng.choice((None, True, False))
    values = [rng.choice((*NUMBERS, *TEXTS)) for _ in range(rng.randrange(4))]
    if kind == 6:
        return values
    return {str(rng.choice(TEXTS)): value for value in values}


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flips, replaces, inserts, removes, repeats or cuts bytes."""
    if not data:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(20)))
    content = bytearray(data)
    # Headers are at the start, where most damage is interesting.
    end = len(content) if rng.random() < 0.5 else min(len(content), 512)
    at = rng.randrange(end)
    kind = rng.randrange(7)
    if kind <= 1:
        content[at] ^= 1 << rng.randrange(8)
    elif kind == 2:
        size = rng.choice((1, 2, 4, 8))
        value = rng.choice((0, 1, 2**7, 2**31, 2**63, 2**64 - 1)) % 256**size
        content[at : at + size] = value.to_bytes(size, rng.choice(("little", "big")))
    elif kind == 3:
        del content[at : at + rng.choice((1, 4, 100))]
    elif kind == 4:
        content[at:at] = bytes(rng.randrange(256) for _ in range(rng.choice((1, 8))))
    elif kind == 5:
        content[at:at] = content[at : at + 64] * rng.choice((1, 2, 50))
    else:
        del content[at:]
    return bytes(content)


def mutate_text(rng: random.Random, data: bytes) -> bytes:
    """Replaces, repeats or removes words and lines of UTF-8 text, or damages bytes."""
    lines = data.decode(errors="replace").splitlines(keepends=True) or [""]
    at = rng.randrange(len(lines))
    kind = rng.randrange(8)
    if kind == 0:
        return mutate_bytes(rng, data)
    if kind == 1:
        del lines[at]
    elif kind == 2:
        lines[at:at] = lines[at : at + 2] * rng.choice((1, 3))
    elif kind == 3:
        lines[at] = lines[at].rstrip("\n")
    elif kind == 4:
        lines.insert(at, f"{rng.choice(TEXTS)}\n")
    else:
        words = lines[at].split(" ")
        spot = rng.randrange(len(words))
        new = rng.choice((*map(str, NUMBERS), *TEXTS, *"\"'{}[](),:=@%#\\"))
        if kind == 5:
            words[spot] = new
        else:
            cut = rng.randrange(len(words[spot]) + 1)
            words[spot] = words[spot][:cut] + new + words[spot][cut + kind - 6 :]
        lines[at] = " ".join(words)
    return "".join(lines).encode(errors="surrogatepass")


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    """Replaces, removes, renames, repeats or nests a value of JSON, at any depth."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # damaged before
        return mutate_text(rng, data)
    if rng.random() < 0.05:
        return mutate_text(rng, data)
    if rng.random() < 0.02:
        depth = rng.choice((150, 5_000, 100_000))
        return b"[" * depth + b"]" * depth
    return json.dumps(_mutate_value(rng, value)).encode(errors="surrogatepass")


def _mutate_value(rng: random.Random, value: Any) -> Any:
    inner = list(value) if isinstance(value, dict) else range(len(_items(value)))
    if not inner or rng.random() < 0.1:
        return hostile_value(rng)
    key = rng.choice(list(inner))
    changed = dict(value) if isinstance(value, dict) else list(value)
    kind = rng.randrange(8)
    if kind <= 2 and isinstance(value[key], dict | list):
        changed[key] = _mutate_value(rng, value[key])
    elif kind <= 4:
        changed[key] = hostile_value(rng)
    elif kind == 5:
        del changed[key]
    elif kind == 6:
        changed[key] = rng.choice(([value[key]], {"a": value[key]}, str(value[key])))
    elif isinstance(changed, dict):
        changed[str(rng.choice(TEXTS))] = changed.pop(key)
    else:
        changed *= 2 if len(changed) > MAXIMUM_REPEATED else rng.choice((2, 1000))
    return changed


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def replace_path(rng: random.Random, path: Path) -> str:
    """Puts something else under a file's name; returns its description."""
    kinds = ("missing", "empty", "folder", "dangling", "circular", "pipe", "device")
    kind = rng.choice(kinds)
    path.unlink()
    if kind == "empty":
        path.touch()
    elif kind == "folder":
        path.mkdir()
    elif kind == "dangling":
        path.symlink_to(path.with_name("nowhere"))
    elif kind == "circular":
        path.symlink_to(path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    return kind
