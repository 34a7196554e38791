"""Sums of token, position and segment embeddings on a mesh, for any model.

This is the input layer of BERT (Devlin et al. 2019, figure 2). As in Megatron, the
token table is split by vocabulary (Shoeybi et al. 2019, section 3). Call it inside
`jax.shard_map`:

    embedding = ParallelEmbedding(key, (32000, 64), positions=512, segments=2)
    graph, arrays = nnx.split(embedding)
    specs = embedding.specs()

No family in `prompt_tuning.families` has a segment table. In transformers, GPT-2, GPT-J
and GPT-Neo add rows of the token table if you pass `token_type_ids`, but no checkpoint
was trained with them. The token types in our data are roles of tokens for the loss, not
inputs of a model.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Initializer
from prompt_tuning.settings.axis_rules import TENSOR
from prompt_tuning.sharding import shard_operators


class ParallelEmbedding(nnx.Module):
    """Token, position and segment embeddings, added.

    Attributes:
      token: `[V, D]`, or this device's rows; the axis must divide `V`.
      position: `[positions, D]`, whole on every device; None without positions.
      segment: `[segments, D]`, whole on every device; None without segments.
      axis: mesh axis that divides the rows of `token`; None on a single device.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        sizes: tuple[int, int],
        *,
        positions: int = 0,
        segments: int = 0,
        axis: str | None = TENSOR,
        initializer: Initializer | None = None,
    ):
        create = initializer or jax.nn.initializers.normal(0.02)
        vocabulary, width = sizes

        def table(name: str, rows: int) -> nnx.Param:
            keys = {"token": 0, "position": 1, "segment": 2}
            number = jax.random.fold_in(key, keys[name])
            return nnx.Param(create(number, (rows, width), jnp.float32))

        self.token = table("token", vocabulary)
        self.position = table("position", positions) if positions else None
        self.segment = table("segment", segments) if segments else None
        self.axis = axis

    def specs(self) -> dict[str, PartitionSpec]:
        """Returns how the mesh divides each array."""
        tables = {"position": self.position, "segment": self.segment}
        whole = {name: PartitionSpec() for name, x in tables.items() if x is not None}
        return {"token": PartitionSpec(self.axis, None)} | whole

    def __call__(
        self,
        tokens: Int[Array, "*lead T"],
        *,
        positions: Int[Array, "*#lead T"] | None = None,
        segments: Int[Array, "*lead T"] | None = None,
    ) -> Float[Array, "*lead T D"]:
        """Looks up ids, each below the size of its table.

        Args:
          tokens: token ids.
          positions: positions of the tokens; 0 to T - 1 by default.
          segments: segment of each token.

        Raises:
          InputError: if segments are given without a table of them, or are missing.
        """
        if (segments is None) != (self.segment is None):
            problem = "missing" if segments is None else "given"
            size = 0 if self.segment is None else len(self.segment[...])
            raise InputError(
                f"segments are {problem}, but the embedding has {size} of them: "
                "set `segments` to the number of segments, or leave both out"
            )
        embedded = self._tokens(tokens)
        if self.position is not None:
            if positions is None:
                positions = jnp.arange(tokens.shape[-1])
            embedded += self.position[...][positions]
        if self.segment is not None:
            embedded += self.segment[...][segments]
        return embedded

    def _tokens(self, tokens: Int[Array, "*lead T"]) -> Float[Array, "*lead T D"]:
        """Sums the devices' rows, all zeros but one."""
        rows = self.token[...]
        if self.axis is None:
            return rows[tokens]
        local = tokens - jax.lax.axis_index(self.axis) * len(rows)
        mine = (local >= 0) & (local < len(rows))
        found = rows[jnp.where(mine, local, 0)] * mine[..., None]
        return shard_operators.reduce_from((self.axis,), found)
