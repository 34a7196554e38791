"""Base class of all language models: embedding table, stacks, output head."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core import masks
from prompt_tuning.core.adapted_rows import invoked_positions
from prompt_tuning.core.batch import Batch, LabelBatch
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import named_key
from prompt_tuning.core.quantization.tables import QuantizedTable, Table
from prompt_tuning.losses.output_head import (
    AnyHead,
    OutputHead,
    ReplacedColumns,
    as_output_head,
    head_logits,
)
from prompt_tuning.models.cache import Cache
from prompt_tuning.models.head import Head
from prompt_tuning.models.layers import TokenEmbedding, adapted_output, applied_bias
from prompt_tuning.models.streams import Context, Kept, Stream
from prompt_tuning.prompts.class_rows import NAME as CLASSES
from prompt_tuning.prompts.class_rows import ClassRows
from prompt_tuning.prompts.token_rows import NAME, HeadRows
from prompt_tuning.sharding import collectives

Prefix = Any
"""A tree of arrays, defined by each family, that holds the result of the prefix."""


class LanguageModel(nnx.Module):
    """Token embedding and output head; subclasses add the stacks between them.

    Attributes:
      token_embedder: embedding table `[V, D]` of the inputs.
      head: output head; None if it is the embedding table alone.
      invocation: tokens that invoke the model's LoRA; empty if it always acts.
    """

    invocation: tuple[int, ...] = ()

    def __init__(self, key: Key[Array, ""], config: ModelConfig):
        self.config = config
        self.token_embedder = TokenEmbedding(
            named_key(key, "token_embedder"), config, config.table_rows, "vocab"
        )
        only_table = config.tied_head and not (
            config.head_bias or config.labels or config.transform_activation
        )
        self.head = None if only_table else Head(named_key(key, "head"), config)

    def prefix(self, key: Key[Array, ""] | None = None) -> Prefix:
        """Runs the prompts that precede every row, once for the whole batch.

        Returns a tree of floating-point arrays only, so you can take a gradient with
        respect to it; None if nothing runs ahead of the rows.
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
        """Computes the hidden states that predict the targets at `loss_positions`."""
        raise NotImplementedError

    def prefill(
        self,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, "B"],
        capacity: int,
        prompt_ids: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Reads input rows and allocates a cache for `capacity` more tokens.

        Args:
          tokens: rows, padded on the right.
          lengths: number of real tokens of each row; 0 requires a prompt.
          capacity: maximum number of tokens to generate.
          prompt_ids: prompt of each row; see `Batch`.

        Returns:
          the hidden state that predicts each row's next token, and the cache.
        """
        raise NotImplementedError

    def extend(
        self,
        stream: Stream,
        past: Sequence[Context],
        cross: Sequence[Context] = (),
    ) -> tuple[Float[Array, "B Q D"], Kept]:
        """Reads more tokens of rows, after earlier ones.

        Args:
          stream: embeddings of the tokens, at their positions in each row.
          past: keys and values of all blocks that the tokens attend to.
          cross: an encoder's output; empty in a decoder-only model.

        Returns:
          the states that predict the tokens after these, and for later tokens their
          keys and values, `[L, G, B, Q, K]`, and recurrent states.
        """
        raise NotImplementedError

    def _answer_states(
        self, batch: Batch, key: Key[Array, ""] | None, prefix: Prefix
    ) -> Float[Array, "B m D"]:
        """Computes `hidden` for a batch that stores the prompt of many answers once."""
        answers = batch.targets.reshape(-1, batch.answers, batch.targets.shape[-1])
        texts = LabelBatch(
            batch.tokens, batch.lengths, answers, None, prompt_ids=batch.prompt_ids
        )
        first, later = self.label_states(texts, key, prefix=prefix)
        states = jnp.repeat(first[:, None], batch.answers, axis=0)  # [B, 1, D]
        if later is not None:
            states = jnp.concatenate([states, later], axis=1)  # [B, U, D]
        return jnp.take_along_axis(states, batch.loss_positions[..., None], axis=1)

    def label_states(
        self,
        batch: LabelBatch,
        key: Key[Array, ""] | None = None,
        *,
        prefix: Prefix = None,
    ) -> tuple[Float[Array, "B D"], Float[Array, "R Q D"] | None]:
        """Computes the hidden states that predict the tokens of labels.

        Each text is read once, and all of its labels attend to the same keys. The
        lengths of labels are not read.

        Returns:
          the state that predicts the first token of a text's labels, and the states
          that predict the later tokens of the `R = B * C` labels; None if no label has
          more than one token.
        """
        raise NotImplementedError

    def _label_streams(
        self, batch: LabelBatch, start: Int[Array, "#B"]
    ) -> list[Stream]:
        """Returns the stream of all labels; none if each label is a single token.

        A text's labels are consecutive rows, `[B * C, Q]`, without their last tokens,
        which predict nothing. `start` is the position after each text.
        """
        rows, count, width = batch.labels.shape
        if width == 1:
            return []
        tokens = batch.labels[..., :-1].reshape(rows * count, width - 1)
        positions = start[:, None] + jnp.arange(width - 1)  # [1 or B, Q]
        if len(positions) > 1:
            positions = jnp.repeat(positions, count, axis=0)  # [B * C, Q]
        embedded = self.output_embedder(tokens, self.config.dtype)
        mask = masks.decoder_causal_mask(width - 1)
        active = None
        if self.invocation:
            length = batch.tokens.shape[1]
            segments = masks.real_tokens(batch.lengths, length).astype(jnp.int32)
            marks = invoked_positions(batch.tokens, segments, self.invocation)
            active = jnp.repeat(marks.any(1), count)[:, None]  # [B * C, 1]
        return [Stream(embedded, positions, mask, active=active)]

    def decode(
        self, tokens: Int[Array, "B"], cache: Cache
    ) -> tuple[Float[Array, "B D"], Cache]:
        """Reads one more token per row and returns the state that predicts the next."""
        embedded = self.output_embedder(tokens[:, None], self.config.dtype)
        hidden, kept = self.extend(
            cache.stream(embedded), cache.contexts(), cache.cross
        )
        return hidden[:, 0], cache.append(kept)

    def prompts(self) -> dict[str, Any]:
        """Returns the prompt modules by stack, "encoder" or "decoder"."""
        stacks = {name: getattr(self, name, None) for name in ("encoder", "decoder")}
        modules = {name: getattr(x, "prompt", None) for name, x in stacks.items()}
        return {name: prompt for name, prompt in modules.items() if prompt is not None}

    @property
    def has_penalty(self) -> bool:
        """Whether `penalty` can be nonzero; known before anything runs."""
        return any(prompt.has_penalty for prompt in self.prompts().values())

    def penalty(self) -> Float[Array, ""]:
        """Penalty of the prompts, added once to a training batch's loss; usually 0."""
        penalties = [prompt.penalty() for prompt in self.prompts().values()]
        return sum(penalties, jnp.zeros(()))

    @property
    def output_embedder(self) -> TokenEmbedding:
        """Embedding table of generated tokens, also the kernel of a tied head."""
        return self.token_embedder

    def head_kernel(self) -> Table:
        """Kernel of the output head, tied or not."""
        kernel = None if self.head is None else self.head.table
        return self.output_embedder.table if kernel is None else kernel

    @property
    def class_rows(self) -> ClassRows | None:
        """The trained class head, or None."""
        return None if self.head is None else self.head.adapters.get(CLASSES)

    @property
    def pooling(self) -> str:
        """Which state of a row the head reads; see `ModelConfig.pooling`."""
        classes = self.class_rows
        if classes is not None:
            return classes.pooling
        return self.config.pooling if self.config.labels else "last"

    def output_head(self) -> AnyHead:
        """Returns the output head: a bare kernel, or more if the config asks for it."""
        if not self.config.labels:
            return self._linear_head()
        head, problem = as_output_head(self._linear_head()), self.config.problem
        return dataclasses.replace(head, problem=problem, of_classes=True)

    def _linear_head(self) -> AnyHead:
        classes = self.class_rows
        if classes is not None:
            return classes.output_head()
        kernel, cap = self.head_kernel(), self.config.logit_soft_cap
        bias = None
        if self.head is not None:
            bias = applied_bias(self.head.bias, self.head.adapters)
        replaced = self._replaced_rows()
        plain = cap is None and bias is None and replaced is None
        if plain and not isinstance(kernel, QuantizedTable):
            return kernel
        if replaced is None:
            return OutputHead(kernel, bias, cap)
        columns = ReplacedColumns(replaced.ids, self.config.vocabulary_size)
        return OutputHead(kernel, bias, cap, replaced.rows, columns)

    def _replaced_rows(self) -> HeadRows | None:
        """Returns trained rows that replace some of the head's, or None."""
        rows = self.token_embedder.adapters.get(NAME)
        if rows is None or self.config.labels:
            return None
        return rows.head_rows(tied=self.config.tied_head)

    def logits(self, hidden: Float[Array, "*lead D"]) -> Float[Array, "*lead V"]:
        """Computes the scores of every token, or of every class, in float32."""
        head = as_output_head(self.output_head())
        if head.of_classes:
            return head_logits(hidden, head)  # nothing else acts on classes
        hidden = collectives.gather_rows(hidden)
        logits = head_logits(hidden, head)
        for rows in self.token_embedder.adapters.values():
            logits = rows.row_logits(hidden, logits, self.config)
        if self.head is not None:
            logits = adapted_output(hidden, logits, self.head.adapters)
        return collectives.local_rows(collectives.gather_vocabulary(logits))

    def token_logits(self, hidden: Float[Array, "*lead D"]) -> Float[Array, "*lead V"]:
        """Computes the scores of the vocabulary, without a mesh's padding."""
        return self.logits(hidden)[..., : self.config.vocabulary_size]
