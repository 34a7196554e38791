"""Rules of a decaying memory, computed by positions or by chunks.

Each head has a matrix as its memory. At every position it decays, is updated, and is
read. Within a chunk a rule is a matrix product, and only the memory passes from one
chunk to the next.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from prompt_tuning.core.recomputation import MEMORY, named

HIGHEST = jax.lax.Precision.HIGHEST
FORGOTTEN = -128.0
"""Logarithm of a decay that leaves nothing: its exponential is 0 in float32."""
STEPS = 256
"""Steps per unit of coarse logarithms: a sum of up to 512 of them is exact in float32,
because none is below `FORGOTTEN`."""
CHUNK = 64
"""Positions of a chunk; all pairs within one are computed together."""


class ChunkNumbers(NamedTuple):
    """Numbers of the examples in a chunk of packed rows, or stacked in all chunks.

    Attributes:
      examples: example of each position, `[R, C]`.
      previous: example of the last position before the chunk, `[R]`.
    """

    examples: Int[Array, "*chunks R C"]
    previous: Int[Array, "*chunks R"]


class ChunkExamples(NamedTuple):
    """The examples in a chunk of packed rows, and the memory that each starts with.

    Attributes:
      starts: memory before the first position of each example, `[R, n, H, K, V]`.
      together: whether two positions are in one example, with the second not after the
        first, `[1 or R, C, C]`.
      continues: whether a position's example began before the chunk, `[R, C]`; None if
        all did.
      base: index into `starts` for each position's example, one-hot `[R, C, n]`, or
        None.
    """

    starts: Float[Array, "R n H K V"]
    together: Bool[Array, "#R C C"]
    continues: Bool[Array, "R C"] | None
    base: Float[Array, "R C n"] | None

    @classmethod
    def create(
        cls,
        starts: Float[Array, "R n H K V"],
        numbers: ChunkNumbers | None,
        length: int,
    ) -> "ChunkExamples":
        """Describes a chunk of `length` positions; `numbers` is None unless packed."""
        together = jnp.tri(length, dtype=bool)[None]
        if numbers is None:
            return cls(starts, together, None, None)
        examples, previous = numbers
        together &= examples[:, :, None] == examples[:, None, :]
        base = jax.nn.one_hot(jnp.maximum(examples - 1, 0), starts.shape[1])
        if starts.shape[1] == 1:
            base = jnp.ones((*examples.shape, 1))
        return cls(starts, together, examples == previous[:, None], base)

    def decays(
        self, decay: Float[Array, "R H C"]
    ) -> tuple[Float[Array, "R H C"], Float[Array, "R H C C"]]:
        """Accumulates logarithms of decays.

        Returns:
          their sum since the chunk or the example began; and the share of each
          position's update that is left at each later position.
        """
        together = self.together.astype(jnp.float32)
        decay = jnp.maximum(decay, FORGOTTEN)
        coarse = jax.lax.stop_gradient(jnp.round(decay * STEPS) / STEPS)
        parts = jnp.stack([coarse, decay - coarse])
        sums = jnp.einsum("prhj,rij->prhi", parts, together, precision=HIGHEST)
        since = sums[0] + sums[1]
        # The coarse sums are exact, so a small difference loses no digits.
        apart = sum(part[..., :, None] - part[..., None, :] for part in sums)
        left = jnp.exp(jnp.where(self.together[:, None], apart, -jnp.inf))
        return since, left

    def read(
        self, x: Float[Array, "R H C K"], memory: Float[Array, "R H K V"]
    ) -> Float[Array, "R H C V"]:
        """Reads, with the keys `x`, what each position's example knew before the chunk.

        `memory` is the one before the chunk.
        """
        held = x @ memory
        if self.continues is None or self.base is None:
            return held
        fresh = jnp.einsum("rhck,rnhkv,rcn->rhcv", x, self.starts, self.base)
        return jnp.where(self.continues[:, None, :, None], held, fresh)

    def at_end(self, memory: Float[Array, "R H K V"]) -> Float[Array, "R H K V"]:
        """Returns the memory with which the last position's example began the chunk."""
        if self.continues is None or self.base is None:
            return memory
        first = jnp.einsum("rnhkv,rn->rhkv", self.starts, self.base[:, -1])
        return jnp.where(self.continues[:, -1, None, None, None], memory, first)


Step = Callable[[Array, Any], tuple[Array, Array]]
"""Takes the memory and the inputs of a position, each `[R, ...]`, in float32; returns
the memory after it, and the output `[R, H, V]`."""
Rule = Callable[..., tuple[Array, Array]]
"""Takes the inputs of a chunk, each `[R, H, C, ...]`, in float32, the memory before it,
its examples and the rule's constants; returns the output `[R, H, C, V]` and the memory
after the chunk."""


def run_positions(
    step: Step, inputs: Any, memory: Float[Array, "R H K V"]
) -> tuple[Float[Array, "R T H V"], Float[Array, "R H K V"]]:
    """Applies a rule position by position.

    Args:
      step: the rule.
      inputs: inputs of the positions, a tree of `[R, T, ...]`.
      memory: memory before the first position.

    Returns:
      the output, and the memory after the last position.
    """
    wide = jax.tree.map(lambda x: x.astype(jnp.float32).swapaxes(0, 1), inputs)
    memory, output = jax.lax.scan(step, memory.astype(jnp.float32), wide)
    return output.swapaxes(0, 1), memory


def run_chunks(
    rule: Rule,
    inputs: Any,
    starts: Float[Array, "R n H K V"],
    segments: Int[Array, "R T"] | None,
    chunk: int,
    constants: Any = (),
) -> tuple[Float[Array, "R T H V"], Float[Array, "R H K V"]]:
    """Applies a rule chunk by chunk.

    The backward pass keeps the inputs and the memory before each chunk, and recomputes
    everything else, whatever the layer around it saves.

    Args:
      rule: the rule.
      inputs: inputs of the positions, a tree of `[R, T, H, ...]`, where `H` may also be
        the number of groups of heads; a position with all zeros leaves the memory
        unchanged.
      starts: memory before each row, or before each of the `n` examples of a packed
        row; with `n = 1`, the same for all examples.
      segments: example of each position, from 1, and 0 for padding; each example starts
        with its own memory. None if each row is one example.
      chunk: number of positions in a chunk.
      constants: tree of arrays that the rule uses in every chunk.

    Returns:
      the output, and the memory after the last position.
    """
    rows, length = jax.tree.leaves(inputs)[0].shape[:2]
    chunk = min(chunk, length)
    count = -(-length // chunk)
    padding = count * chunk - length

    def split(x: Array, mode: str = "constant") -> Array:
        """Pads `[R, T, ...]` and splits it into chunks, `[chunks, R, C, ...]`."""
        widths = [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)
        padded = jnp.pad(x, widths, mode=mode)
        return padded.reshape(rows, count, chunk, *x.shape[2:]).swapaxes(0, 1)

    wide = jax.tree.map(lambda x: split(x.astype(jnp.float32)).swapaxes(2, 3), inputs)
    numbers = None
    if segments is not None:
        examples = split(segments, "edge")
        # Before the first position there is no example, so all begin with their memory.
        last = jnp.concatenate([jnp.full((1, rows), -1), examples[:-1, :, -1]])
        numbers = ChunkNumbers(examples, last)
    outputs: Any = _scan_chunks(
        rule, wide, starts.astype(jnp.float32), constants, numbers
    )
    output, memory = outputs
    joined = jnp.moveaxis(output, (0, 3), (1, 2))  # [R, chunks, C, H, V]
    joined = joined.reshape(rows, count * chunk, *joined.shape[3:])
    return named(joined[:, :length], MEMORY), memory


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan_chunks(rule, inputs, starts, constants, numbers):
    """Scans over chunks; returns the outputs, stacked on them, and the last memory."""
    (output, memory), _ = _scan_forward(rule, inputs, starts, constants, numbers)
    return output, memory


def _scan_forward(rule, inputs, starts, constants, numbers):
    def run(memory, chunk):
        inputs, numbers = chunk
        output, after = _apply(rule, inputs, numbers, memory, starts, constants)
        return after, (output, memory)

    memory, (output, before) = jax.lax.scan(run, starts[:, 0], (inputs, numbers))
    kept = inputs, starts, constants, numbers, named(before, MEMORY)
    return (output, memory), kept


def _scan_backward(rule, kept, gradients):
    inputs, starts, constants, numbers, before = kept
    of_output, of_memory = gradients

    def run(carry, chunk):
        of_memory, of_others = carry
        of_output, inputs, numbers, before = chunk

        def function(inputs, memory, starts, constants):
            return _apply(rule, inputs, numbers, memory, starts, constants)

        _, pull = jax.vjp(function, inputs, before, starts, constants)
        of_inputs, of_memory, *others = pull((of_output, of_memory))
        return (of_memory, jax.tree.map(jnp.add, of_others, others)), of_inputs

    zeros = jax.tree.map(jnp.zeros_like, [starts, constants])
    (of_memory, (of_starts, of_constants)), of_inputs = jax.lax.scan(
        run, (of_memory, zeros), (of_output, inputs, numbers, before), reverse=True
    )
    return of_inputs, of_starts.at[:, 0].add(of_memory), of_constants, None


_scan_chunks.defvjp(_scan_forward, _scan_backward)


def _apply(rule, inputs, numbers, memory, starts, constants):
    length = jax.tree.leaves(inputs)[0].shape[2]
    examples = ChunkExamples.create(starts, numbers, length)
    return rule(inputs, memory, examples, *constants)
