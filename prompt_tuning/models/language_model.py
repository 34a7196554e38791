"""What every language model has: a vocabulary in and a vocabulary out."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import named_key
from prompt_tuning.models.cache import Cache
from prompt_tuning.models.layers import Head, TokenEmbedding
from prompt_tuning.sharding import collectives

Prefix = Any
"""A tree of what a family of models keeps of its prefix."""


class LanguageModel(nnx.Module):
    """Token embedding and head; the families add what lies between.

    Attributes:
      token_embedder: the embedding table `[V, D]`.
      head: untied output head `[V, D]`; None where the table is the head.
    """

    def __init__(self, key: Key[Array, ""], config: ModelConfig):
        self.config = config
        self.token_embedder = TokenEmbedding(
            named_key(key, "token_embedder"), config, config.vocabulary_size, "vocab"
        )
        self.head = None if config.tied_head else Head(named_key(key, "head"), config)

    def prefix(self, key: Key[Array, ""] | None = None) -> Prefix:
        """Runs what stands before every row and sees none: once, whatever the rows.

        Args:
          key: for dropout; None for none.

        Returns:
          floating arrays alone, so that a gradient can be taken at them; None where
          nothing of the kind is.
        """
        del key
        return None

    def hidden(
        self,
        batch: Batch,
        key: Key[Array, ""] | None = None,
        *,
        prefix: Prefix = None,
    ) -> Float[Array, "B m D"]:
        """The hidden states that predict the targets at `batch.loss_positions`.

        Args:
          batch: rows, and the places in them that carry weight.
          key: for dropout; None for none.
          prefix: what `prefix` gave, where it was run before.
        """
        raise NotImplementedError

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, "B"],
        capacity: int,
        prompt_ids: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Reads the rows given and makes room for `capacity` tokens more.

        Args:
          tokens: rows, padded on the right.
          lengths: real tokens of each row; 0 is of use with a prompt alone.
          capacity: tokens that may follow.
          prompt_ids: which prompt each row has; see `Batch`.

        Returns:
          the hidden state that predicts each row's next token, and the cache.
        """
        raise NotImplementedError

    def decode(
        self, tokens: Int[Array, "B"], cache: Cache
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Reads one token more of each row; returns what predicts the next."""
        raise NotImplementedError

    def prompts(self) -> dict[str, Any]:
        """The prompt modules by the stack that each is in: "encoder", "decoder"."""
        stacks = {name: getattr(self, name, None) for name in ("encoder", "decoder")}
        found = {name: getattr(stack, "prompt", None) for name, stack in stacks.items()}
        return {name: prompt for name, prompt in found.items() if prompt is not None}

    @property
    def has_penalty(self) -> bool:
        """Whether `penalty` may be other than 0, known before anything runs."""
        return any(prompt.has_penalty for prompt in self.prompts().values())

    def penalty(self) -> Float[Array, ""]:
        """What the prompts add to the loss of a training batch, once; 0 for most."""
        penalties = [prompt.penalty() for prompt in self.prompts().values()]
        return sum(penalties, jnp.zeros(()))

    def head_kernel(self) -> Float[Array, "V D"]:
        """The output head, tied or not."""
        head = self.token_embedder.embedding if self.head is None else self.head.kernel
        return head[...]

    def logits(self, hidden: Float[Array, "*lead D"]) -> Float[Array, "*lead V"]:
        """Scores of every token, in float32."""
        head = self.head_kernel().astype(hidden.dtype)
        logits = jnp.einsum(
            "...d,vd->...v",
            collectives.gather_rows(hidden),
            head,
            preferred_element_type=jnp.float32,
        )
        return collectives.local_rows(collectives.gather_vocabulary(logits))
