"""A frozen model that reads each row's own context before the row."""

import dataclasses
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from prompt_tuning.core import masks
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.compilation import WeightedJit
from prompt_tuning.core.parameters import CONTEXT, Parameters, merge
from prompt_tuning.data.rows.token_columns import CONTEXTS
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.streams import Context, Kept, Stream


@dataclasses.dataclass(frozen=True)
class ExampleTeacher:
    """A frozen model that reads one of several contexts before each row.

    `Batch.columns["contexts"]` has the number of each row's context. A context is read
    by itself; all rows of a batch with the same context share its keys and values. Rows
    are not packed.

    Attributes:
      graph: the model's structure, without a prompt.
      paths: paths of the frozen parameters that it shares with the student.
      contexts: token ids of each context, with BOS if rows have it.
      after_bos: whether rows begin with BOS, which the contexts replace.
      cache_bytes: maximum size of the keys and values of all contexts. If they fit,
        they are computed once per run; otherwise each batch computes those of its rows.
    """

    graph: nnx.GraphDef
    paths: tuple[str, ...]
    contexts: tuple[tuple[int, ...], ...]
    after_bos: bool
    cache_bytes: int

    def hidden(self, student: Parameters, batch: Batch) -> Float[Array, "B m D"]:
        """Returns the states that predict the learned tokens, without a gradient.

        Args:
          student: all parameters of the student, optionally with the result of
            `read_context`.
          batch: a batch without an accumulation axis, with the column "contexts".
        """
        # A row has one context, which the column repeats for each learned target.
        rows = jnp.asarray(batch.columns[CONTEXTS])[:, 0].astype(jnp.int32)  # [B]
        lengths = jnp.asarray(self._lengths)[rows]  # [B]
        frozen = {path: student[path] for path in self.paths}
        form = jax.tree.structure(self._form(frozen, 1))
        if f"{CONTEXT}0" in student:
            leaves = [student[f"{CONTEXT}{i}"] for i in range(form.num_leaves)]
        else:
            size = min(len(rows), len(self.contexts))
            distinct, rows = jnp.unique(
                rows, size=size, fill_value=-1, return_inverse=True
            )
            leaves = jax.tree.leaves(self._read_each(frozen, distinct))
        kept, last = jax.tree.unflatten(form, leaves)
        if self.after_bos:
            batch = without_bos(batch)
        model = cast(LanguageModel, merge(self.graph, frozen))
        stream = Stream(
            model.token_embedder(batch.tokens, model.config.dtype),
            lengths[:, None] + jnp.arange(batch.tokens.shape[1]),
            masks.CausalMask(None),
            lengths=batch.lengths,
        )
        longest = int(self._lengths.max())
        past = Context(
            kept.key_values,
            masks.encoder_mask(lengths, longest),
            rows if len(last) > 1 else None,
            jnp.arange(longest)[None],
            kept.state,
        )
        states, _ = model.extend(stream, [past])  # [B, T, D]
        previous = jnp.maximum(batch.loss_positions - 1, 0)[..., None]  # [B, m, 1]
        selected = jnp.take_along_axis(states, previous, axis=1)
        first = (batch.loss_positions == 0)[..., None]
        return jax.lax.stop_gradient(jnp.where(first, last[rows][:, None], selected))

    def read_context(self, student: Parameters) -> Parameters:
        """Reads all contexts if their keys and values fit in the cache."""
        frozen = {path: student[path] for path in self.paths}
        form = jax.tree.leaves(self._form(frozen, len(self.contexts)))
        size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in form)
        if size > self.cache_bytes:
            return {}
        numbers = jnp.arange(len(self.contexts))
        leaves = jax.tree.leaves(WeightedJit(self._read_each)(frozen, numbers))
        return {f"{CONTEXT}{i}": leaf for i, leaf in enumerate(leaves)}

    @property
    def _lengths(self) -> Int[np.ndarray, "N"]:
        return np.array([len(context) for context in self.contexts], np.int32)

    def _tokens(self) -> Int[np.ndarray, "N P"]:
        """Returns the contexts, padded on the right."""
        tokens = np.zeros((len(self.contexts), int(self._lengths.max())), np.int32)
        for row, context in zip(tokens, self.contexts, strict=True):
            row[: len(context)] = context
        return tokens

    def _form(self, own: Parameters, count: int) -> Any:
        """Returns the shapes of `_read`'s results for `count` contexts."""
        tokens = jax.ShapeDtypeStruct((count, int(self._lengths.max())), jnp.int32)
        lengths = jax.ShapeDtypeStruct((count,), jnp.int32)
        return jax.eval_shape(self._read, own, tokens, lengths)

    def _read_each(self, own: Parameters, numbers: Int[Array, "n"]) -> Any:
        """Reads contexts one by one; negative numbers are skipped."""
        tokens, lengths = jnp.asarray(self._tokens()), jnp.asarray(self._lengths)
        form = self._form(own, len(numbers))
        axes = jax.tree.map(_differing_axis, form, self._form(own, len(numbers) + 1))
        empty = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), form)

        def read(index: Array, everything: Any) -> Any:
            number = numbers[index]
            new = self._read(own, tokens[number][None], lengths[number][None])
            return jax.tree.map(
                lambda whole, part, axis: jax.lax.dynamic_update_slice_in_dim(
                    whole, part, index, axis
                ),
                everything,
                new,
                axes,
            )

        # Run only as many iterations as there are different contexts.
        return jax.lax.fori_loop(0, (numbers >= 0).sum(), read, empty)

    def _read(
        self, own: Parameters, tokens: Int[Array, "n P"], lengths: Int[Array, "n"]
    ) -> tuple[Kept, Float[Array, "n D"]]:
        """Returns the keys and values of contexts, and the states after their ends."""
        model = cast(LanguageModel, merge(self.graph, own))
        stream = Stream(
            model.token_embedder(jnp.asarray(tokens), model.config.dtype),
            jnp.arange(tokens.shape[1])[None],
            masks.CausalMask(None),
            lengths=jnp.asarray(lengths),
        )
        hidden, kept = model.extend(stream, ())
        ends = jnp.asarray(lengths)[:, None, None] - 1
        return kept, jnp.take_along_axis(hidden, ends, axis=1)[:, 0]


def _differing_axis(one: jax.ShapeDtypeStruct, two: jax.ShapeDtypeStruct) -> int:
    """Returns the axis of a leaf that counts contexts."""
    shapes = zip(one.shape, two.shape, strict=True)
    return next(axis for axis, (a, b) in enumerate(shapes) if a != b)


def without_bos(batch: Batch) -> Batch:
    """Removes the first token of rows that are not packed."""
    return dataclasses.replace(
        batch,
        tokens=batch.tokens[:, 1:],
        targets=batch.targets[:, 1:],
        lengths=jnp.maximum(batch.lengths - 1, 0),
        prefix_lengths=jnp.maximum(batch.prefix_lengths - 1, 0),
        # BOS is never learned: a 0 belongs to no learned target.
        loss_positions=jnp.maximum(batch.loss_positions - 1, 0),
    )
