"""Scores from content and relative positions (DeBERTa: He et al. 2021, section 3.1).

With a head's content vectors `q`, `k` and vectors `r` of bucketed distances, projected
with the same kernels as queries and keys, position `i` scores position `j` as

    q_i·k_j + q_i·key(r[i - j]) + k_j·query(r[i - j])

times the scale of all scores (equations 3 and 4 there; version 2 shares the kernels).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import declare, named_key
from prompt_tuning.models.norms import Norm, normalize


class RelativePositions(NamedTuple):
    """Vectors of all distances within rows of length `Q`.

    Attributes:
      vectors: one per bucket that occurs, `[E, D]`.
      rows: index into `vectors` for each distance from `-Q` to `Q`.
    """

    vectors: Float[Array, "E D"]
    rows: Int[np.ndarray, "_"]


def relative_vectors(
    key: Key[Array, ""], config: ModelConfig
) -> "RelativeVectors | None":
    """Creates the table of relative positions, if the model has one."""
    if config.positions != "disentangled":
        return None
    return RelativeVectors(named_key(key, "relative_vectors"), config)


class RelativeVectors(nnx.Module):
    """A vector for each bucket of distances, shared by all blocks.

    Attributes:
      embedding: vectors for distances in both directions, `[2 * buckets, D]`.
      norm: norm of these vectors.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig):
        self.buckets, self.dtype = config.relative_buckets, config.dtype
        self.maximum = config.relative_maximum_distance
        self.embedding = declare(
            named_key(key, "embedding"),
            (2 * self.buckets, config.width),
            ("relative_buckets", "embed"),
            jax.nn.initializers.normal(0.02),
            config.parameter_dtype,
        )
        self.norm = Norm(named_key(key, "norm"), config, stacked=None)

    def within(self, length: int) -> RelativePositions:
        """Returns the vectors of all distances within rows of length `length`."""
        distances = np.arange(-length, length + 1)
        buckets = logarithmic_bucket(distances, self.buckets, self.maximum)
        rows = np.clip(buckets + self.buckets, 0, 2 * self.buckets - 1)
        first, last = rows.min(), rows.max()
        vectors = self.embedding[...][first : last + 1].astype(self.dtype)
        return RelativePositions(normalize(self.norm, vectors), rows - first)


def logarithmic_bucket(
    distance: Int[np.ndarray, "*lead"], buckets: int, maximum: int
) -> Int[np.ndarray, "*lead"]:
    """Maps distances to signed buckets, as DeBERTa's version 2.

    The first `buckets / 2` distances have one bucket each; larger ones share buckets
    that grow logarithmically up to `maximum`. Computed in float32, since its rounding
    decides at the borders.
    """
    exact = buckets // 2
    size = np.maximum(np.abs(distance), exact).astype(np.float32)
    whole = np.log(np.float32((maximum - 1) / exact))
    far = np.ceil(np.log(size / np.float32(exact)) / whole * (exact - 1)) + exact
    near = np.abs(distance) <= exact
    return np.where(near, distance, np.sign(distance) * far).astype(np.int64)


def distance_products(
    query: Float[Array, "R Q H K"],
    keys: Float[Array, "R Q H K"],
    vectors: tuple[Float[Array, "E H K"], Float[Array, "E H K"]],
    rows: Int[np.ndarray, "_"],
) -> Float[Array, "R H Q Q"]:
    """Computes the part of the scores that depends on distances, unscaled.

    `vectors` are the distance vectors projected to queries and to keys; for `rows` see
    `RelativePositions`.
    """
    of_query, of_key = vectors
    # Row i of the first product has column c for j = i + c - (Q - 1); in the second,
    # row j has it for i = j + c - (Q - 1).
    of_key = of_key[rows[: 2 * query.shape[1]][::-1]]  # [2 Q, H, K]
    to_keys = jnp.einsum("rqhk,chk->rhqc", query, of_key)
    to_queries = jnp.einsum("rshk,chk->rhsc", keys, of_query[rows[1:]])
    return _diagonals(to_keys) + _diagonals(to_queries).swapaxes(2, 3)


def _diagonals(x: Float[Array, "R H Q C"]) -> Float[Array, "R H Q Q"]:
    """Selects column `j - i + Q - 1` of the `C = 2 Q` for each row `i` and each `j`."""
    *lead, length, columns = x.shape
    flat = x.reshape(*lead, -1)[..., length - 1 : length * columns - 1]
    return flat.reshape(*lead, length, columns - 1)[..., :length]
