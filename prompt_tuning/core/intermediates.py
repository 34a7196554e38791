"""Intermediate arrays of a model by path, e.g. `decoder/layers/3/hidden`.

Blocks record the outputs of their parts, and `capture` chooses which to keep. The
requested arrays are carried through the loop over the blocks, so they have gradients,
even with rematerialization, on meshes and with streamed weights.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from prompt_tuning.core.errors import InputError, shown

PARTS = ("hidden", "self_attention", "cross_attention", "mlp")
"""The arrays that a block records: its output, and what each part adds to the residual
stream, before dropout and the norm after it."""
ATTENTION_WEIGHTS = "attention_weights"
"""Another part: of each position of a row of text, the weights of self-attention on all
keys, `[B, Q, keys]` in float32, as means over the heads. The keys of prompts that run
ahead of the text come first, then the row's own."""
STACKS = ("encoder", "decoder")


class IntermediatePath(NamedTuple):
    """Where an intermediate array is.

    Attributes:
      stack: "encoder" or "decoder".
      block: index of the block.
      part: one of `PARTS`, or `ATTENTION_WEIGHTS`.
    """

    stack: str
    block: int
    part: str


def parse_path(path: str) -> IntermediatePath | None:
    """Parses a path like `decoder/layers/3/hidden`; None if it is not one."""
    match path.split("/"):
        case [stack, "layers", block, part] if (
            stack in STACKS
            and part in (*PARTS, ATTENTION_WEIGHTS)
            and block.isdecimal()
        ):
            return IntermediatePath(stack, int(block), part)
    return None


@dataclasses.dataclass(frozen=True)
class _Request:
    """Requested arrays.

    Attributes:
      paths: the parsed paths, by path.
      arrays: the arrays that the model has provided, by path.
    """

    paths: dict[str, IntermediatePath]
    arrays: dict[str, Array]


_request: contextvars.ContextVar[_Request | None] = contextvars.ContextVar(
    "requested intermediates", default=None
)
_block: contextvars.ContextVar[dict[str, Array] | None] = contextvars.ContextVar(
    "intermediates of a block", default=None
)
Captured = dict[str, Array]
"""The requested arrays of a stack by path, while its blocks run."""


@contextlib.contextmanager
def capture(paths: Sequence[str]) -> Iterator[dict[str, Array]]:
    """Captures intermediate arrays of the model that runs in the context.

    Yields:
      a dict that contains the arrays by path after the context.

    Raises:
      InputError: if the model has no such array.
    """
    parsed = {path: parse_path(path) for path in paths}
    request = _Request({p: x for p, x in parsed.items() if x is not None}, {})
    token = _request.set(request)
    try:
        yield request.arrays
    finally:
        _request.reset(token)
    for path in paths:
        if path not in request.arrays:
            raise _missing(path)


def _missing(path: str) -> InputError:
    return InputError(
        f"the model has no intermediate array {shown(path)}: expected "
        f"STACK/layers/BLOCK/PART with a stack of {', '.join(STACKS)}, the number of a "
        f"block from 0, and a part of {', '.join(PARTS)}"
    )


def start_capture(
    stack: str, count: int, hidden: Float[Array, "n D"], keys: int
) -> Captured:
    """Returns the requested arrays of a stack before its blocks run.

    Args:
      stack: "encoder" or "decoder".
      count: number of its blocks.
      hidden: input of the first block; the arrays hold its values until their block
        runs.
      keys: number of keys that each position of the text attends to.
    """
    request = _request.get()
    return {
        path: jnp.zeros((len(hidden), keys))
        if parsed.part == ATTENTION_WEIGHTS
        else hidden
        for path, parsed in (request.paths if request else {}).items()
        if parsed.stack == stack and parsed.block < count
    }


@contextlib.contextmanager
def collect_block(captured: Captured, number: Array | None) -> Iterator[Captured]:
    """Captures what block `number` records; None captures nothing.

    Yields:
      the captured arrays, updated once the context ends.

    Raises:
      InputError: if the block has no such part.
    """
    recorded: dict[str, Array] = {}
    after: Captured = {}
    token = _block.set(recorded if captured else None)
    try:
        yield after
    finally:
        _block.reset(token)
    for path, unchanged in captured.items():
        parsed = parse_path(path)
        assert parsed is not None
        if parsed.part not in recorded:
            raise _missing(path)
        array = recorded[parsed.part].astype(unchanged.dtype)
        after[path] = jnp.where(number == parsed.block, array, unchanged)


def record(array: Array, part: str) -> None:
    """Records the output of a part of a block."""
    recorded = _block.get()
    if recorded is not None:
        recorded[part] = array


def is_requested(part: str) -> bool:
    """Tests whether the running block should record a costly part."""
    request, recorded = _request.get(), _block.get()
    if request is None or recorded is None:
        return False
    return any(parsed.part == part for parsed in request.paths.values())


def provide(arrays: Captured) -> None:
    """Provides the captured arrays `[B, S, D]` of a stack."""
    request = _request.get()
    if request is not None:
        request.arrays.update(arrays)
