"""Rules of a decaying memory: what their computation by positions and chunks shares.

A memory is a matrix for each head. It decays at every position, which then adds to it
and reads it. Within a chunk a rule is a product of matrices, and only the memory passes
from one chunk to the next.
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
    """The examples of the positions of a chunk, and what they begin with.

    Attributes:
      starts: memory before the first position of each example, `[R, n, H, K, V]`.
      together: whether the second position is in the example of the first, and not
        after it, `[1 or R, C, C]`.
      continues: whether a position's example began before the chunk, `[R, C]`; None if
        all of them did.
      base: which of `starts` each position's example begins with, `[R, C, n]`, or None.
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
        before: Int[Array, "R"],
        length: int,
    ) -> "ChunkExamples":
        """Returns the examples of a chunk of a length; `before` is the one before."""
        together = jnp.tri(length, dtype=bool)[None]
        if examples is None:
            return cls(starts, together, None, None)
        together &= examples[:, :, None] == examples[:, None, :]
        base = jax.nn.one_hot(jnp.maximum(examples - 1, 0), starts.shape[1])
        if starts.shape[1] == 1:
            base = jnp.ones((*examples.shape, 1))
        return cls(starts, together, examples == before[:, None], base)

    def decays(
        self, decay: Float[Array, "R H C"]
    ) -> tuple[Float[Array, "R H C"], Float[Array, "R H C C"]]:
        """Adds up logarithms of decays.

        Returns:
          their sum since the chunk or the example began; and how much of what each
            position added is left at each later one.
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
        """Reads what each position's example remembers from before the chunk.

        Args:
          x: what to read, for equal groups of heads.
          memory: memory before the chunk.
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
        """Returns the memory that the last position's example began the chunk with."""
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
      inputs: what the positions give, a tree of `[R, T, ...]`.
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
      inputs: what the positions give, a tree of `[R, T, ...]`; where all of it is 0, a
        position leaves the memory as it is.
      starts: memory before the first position of each row, or of each of the `n`
        examples of a packed row; one for all examples if `n` is 1.
      segments: number of each position's example, from 1, and 0 for padding, each of
        which begins with its own memory; None if each row is one example.
      chunk: number of positions of a chunk.

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
    def run(carry, each):
        (memory, before), (of_chunk, numbers) = carry, each
        examples = ChunkExamples.create(starts, numbers, before, chunk)
        output, memory = rule(of_chunk, memory, examples)
        before = before if numbers is None else numbers[:, -1]
        return (memory, before), output

    # Before the first position there is no example, so all begin with their memory.
    last = jnp.full(rows, -1)
    (memory, _), output = jax.lax.scan(run, (starts[:, 0], last), (wide, numbers))
    joined = output.swapaxes(0, 1).reshape(rows, count * chunk, *output.shape[3:])
    return joined[:, :length], memory
