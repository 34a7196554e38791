"""Interface of fused attention kernels: attention to one source in one pass.

A kernel never stores scores. It returns the output and the log-sum-exp of each query's
scores, from which `flash_attention` merges the sources. Its backward pass takes the
output and log-sum-exp over all sources as arguments.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.setting_hints import how_to_set

Query = Float[Array, "B h Q K"]
"""Queries of `h` heads, all of which attend to the same keys."""
Keys = Float[Array, "B S K"]
LogSumExp = Float[Array, "B h Q"]
Segments = Int[Array, "B Q"] | None
"""Number of each position's segment; None if a row is one segment."""


class Obstacle(NamedTuple):
    """Why a fused kernel cannot be used.

    Attributes:
      reason: a clause, without a full stop.
      remedy: what to change, in the imperative.
    """

    reason: str
    remedy: str


def dtype_obstacle(config: ModelConfig) -> Obstacle | None:
    """Returns an obstacle unless the model computes in bfloat16."""
    if config.compute_dtype == "bfloat16":
        return None
    return Obstacle(
        f"compute_dtype is {config.compute_dtype!r}, and fused kernels compute in "
        "bfloat16",
        f"give {how_to_set('Pretrained.compute_dtype', 'bfloat16')}",
    )


class FusedKernel(NamedTuple):
    """A fused attention kernel for one kind of device.

    Attributes:
      name: name of its library.
      forward: `f(query, keys, values, segments, scale, causal)` returns the output `[B,
        h, Q, K]` and the log-sum-exp of the scores in float32.
      backward: `f(query, keys, values, segments, output, log_sum_exp, d_output, scale,
        causal)` returns the gradients of query, keys and values, summed over heads that
        share keys. Output and log-sum-exp may include other sources.
      packs: whether `segments` may be an array, for causal attention.
      obstacle: why the kernel cannot run a model's attention on this machine, or None.
    """

    name: str
    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]
    packs: bool
    obstacle: Callable[[ModelConfig], Obstacle | None]


def folding_batches(kernel_pass: Callable[..., Any], scale: float, causal: bool) -> Any:
    """Wraps a kernel's pass so that `jax.vmap` makes one call with a longer batch.

    Args:
      kernel_pass: `forward` or `backward` of a kernel.
      scale: factor of the scores.
      causal: whether each query attends only to keys up to its own position.

    Returns:
      a function of the arrays; pass None for absent segments.
    """

    @jax.custom_batching.custom_vmap
    def run(*arrays: Array | None) -> Any:
        return kernel_pass(*arrays, scale, causal)

    @run.def_vmap
    def folded(size: int, batched: Any, *arrays: Array | None) -> Any:
        def fold(array: Array | None, is_batched: bool) -> Array | None:
            if array is None:
                return None
            if not is_batched:
                array = jnp.broadcast_to(array, (size, *array.shape))
            return array.reshape(-1, *array.shape[2:])

        flat = [fold(*pair) for pair in zip(arrays, batched, strict=True)]
        outputs = run(*flat)
        split = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), outputs)
        return split, jax.tree.map(lambda _: True, outputs)

    return run
