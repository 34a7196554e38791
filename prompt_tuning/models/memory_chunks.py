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

CHUNK = 64
"""Positions of a chunk; all pairs within one are computed together."""


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
        examples: Int[Array, "R C"] | None,
        previous: Int[Array, "R"],
        length: int,
    ) -> "ChunkExamples":
        """Describes a chunk of `length` positions after the example `previous`."""
        together = jnp.tri(length, dtype=bool)[None]
        if examples is None:
            return cls(starts, together, None, None)
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
        since = jnp.einsum("rhj,rij->rhi", decay, self.together.astype(jnp.float32))
        # A difference of two sums would lose the digits of a small one.
        length = decay.shape[-1]
        later = jnp.tri(length, k=-1) * decay[..., None]  # [R, H, i, j], for i > j
        apart = jnp.cumsum(later, axis=-2)
        left = jnp.exp(jnp.where(self.together[:, None], apart, -jnp.inf))
        return since, left

    def read(
        self, x: Float[Array, "R G C K"], memory: Float[Array, "R H K V"]
    ) -> Float[Array, "R H C V"]:
        """Reads, with the keys `x`, what each position's example knew before the chunk.

        The `G` rows of keys serve equal groups of heads; `memory` is the one before the
        chunk.
        """
        rows, groups, length, width = x.shape
        values = memory.shape[-1]
        split = memory.reshape(rows, groups, -1, width, values)
        held = jnp.einsum("rgck,rghkv->rghcv", x, split)
        if self.continues is not None and self.base is not None:
            starts = self.starts.reshape(rows, -1, *split.shape[1:])
            fresh = jnp.einsum("rgck,rnghkv,rcn->rghcv", x, starts, self.base)
            held = jnp.where(self.continues[:, None, None, :, None], held, fresh)
        return held.reshape(rows, -1, length, values)

    def at_end(self, memory: Float[Array, "R H K V"]) -> Float[Array, "R H K V"]:
        """Returns the memory with which the last position's example began the chunk."""
        if self.continues is None or self.base is None:
            return memory
        first = jnp.einsum("rnhkv,rn->rhkv", self.starts, self.base[:, -1])
        return jnp.where(self.continues[:, -1, None, None, None], memory, first)


Step = Callable[[Array, Any], tuple[Array, Array]]
"""Takes the memory and the inputs of a position, each `[R, ...]`, in float32; returns
the memory after it, and the output `[R, H, V]`."""
Rule = Callable[[Any, Array, ChunkExamples], tuple[Array, Array]]
"""Takes the inputs of a chunk, each `[R, C, ...]`, in float32, the memory before it and
its examples; returns the output `[R, C, H, V]` and the memory after the chunk."""


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
) -> tuple[Float[Array, "R T H V"], Float[Array, "R H K V"]]:
    """Applies a rule chunk by chunk.

    Args:
      rule: the rule.
      inputs: inputs of the positions, a tree of `[R, T, ...]`; a position with all
        zeros leaves the memory unchanged.
      starts: memory before each row, or before each of the `n` examples of a packed
        row; with `n = 1`, the same for all examples.
      segments: example of each position, from 1, and 0 for padding; each example starts
        with its own memory. None if each row is one example.
      chunk: number of positions in a chunk.

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

    wide = jax.tree.map(lambda x: split(x.astype(jnp.float32)), inputs)
    starts = starts.astype(jnp.float32)
    numbers = None if segments is None else split(segments, "edge")

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def run(carry, chunk_inputs):
        (memory, last_example), (of_chunk, numbers) = carry, chunk_inputs
        examples = ChunkExamples.create(starts, numbers, last_example, chunk)
        output, memory = rule(of_chunk, memory, examples)
        last_example = last_example if numbers is None else numbers[:, -1]
        return (memory, last_example), output

    # Before the first position there is no example, so all begin with their memory.
    last = jnp.full(rows, -1)
    (memory, _), output = jax.lax.scan(run, (starts[:, 0], last), (wide, numbers))
    joined = output.swapaxes(0, 1).reshape(rows, count * chunk, *output.shape[3:])
    return joined[:, :length], memory
