"""How a prompt starts: `f(key, (P, D), vocabulary) -> [P, D]`.

Each function here takes the choices and returns such an initialiser. Semantics are
those of google-research/prompt-tuning; what it let pass silently is an error here.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.checkpoints.stored_table import StoredTable
from prompt_tuning.core.errors import InputError
from prompt_tuning.data.text.templates import check_length, parse_template, soft_counts
from prompt_tuning.data.text.tokenizers import Tokenizer


class StackShape(NamedTuple):
    """Shape of the stack of blocks that a prompt is put into.

    Attributes:
      layers: blocks `L`.
      key_value_heads: `G` of each block's self-attention.
      head_width: `K`.
    """

    layers: int
    key_value_heads: int
    head_width: int


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """What an initialiser may know of the frozen model.

    Attributes:
      embeddings: the token embedding table, `[V, D]`; where it stays in its checkpoint,
        only the rows that are asked for are read.
      tokenizer: None where the model comes without one.
      stack: of the blocks that the prompt is put into, for prompts of every block;
        None where only the input is of concern.
    """

    embeddings: Float[Array, "V D"] | Float[np.ndarray, "V D"] | StoredTable
    tokenizer: Tokenizer | None = None
    stack: StackShape | None = None

    @property
    def width(self) -> int:
        """Model width `D`."""
        return self.embeddings.shape[1]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text.

        Raises:
          InputError: if there is no tokenizer, or the text gives no token.
        """
        if self.tokenizer is None:
            raise InputError(
                f"a prompt cannot start from the text {text!r}: the model has no "
                "tokenizer; name one with `tokenizer`"
            )
        ids = self.tokenizer.encode(text)
        if not ids:
            raise InputError(
                f"the text {text!r} gives no token, so there is no embedding to start "
                "a prompt vector from; use another text"
            )
        return ids

    def rows(
        self, ids: Sequence[int] | Int[Array, "n"] | Int[np.ndarray, "n"]
    ) -> Float[Array, "n D"]:
        """Embeddings of some tokens, in float32.

        Raises:
          InputError: for a token that a checkpoint's table has no row of.
        """
        table = self.embeddings
        if not isinstance(table, StoredTable):
            return jnp.asarray(table)[jnp.asarray(ids)].astype(jnp.float32)
        places = np.asarray(ids)
        beyond = places[(places < 0) | (places >= len(table))]
        if len(beyond):
            raise InputError(
                f"a prompt is to start from token {beyond[0]}, but the model's table "
                f"has the embeddings of {len(table)}; does the tokenizer belong to "
                "this checkpoint?"
            )
        return jnp.asarray(table[places])


Initializer = Callable[
    [Key[Array, ""], tuple[int, int], Vocabulary], Float[Array, "P D"]
]


def uniform(scale: float = 0.5) -> Initializer:
    """Uniform on `[0, scale)`.

    Not symmetric, unlike the range of Lester et al. 2021: this is what their code does.
    """

    def initialize(key, shape, vocabulary):
        del vocabulary
        return jax.random.uniform(key, shape, maxval=scale)

    return initialize


def from_array(array: Float[np.ndarray, "..."] | Float[Array, "..."]) -> Initializer:
    """The array itself.

    Raises (when it starts the prompt):
      InputError: if its shape is not the prompt's.
    """

    def initialize(key, shape, vocabulary):
        del key, vocabulary
        return _checked(array, shape, "the array given")

    return initialize


def from_file(path: str | Path) -> Initializer:
    """The vectors of a file: NumPy, a run's checkpoint, or a PEFT adapter folder.

    Raises (when it starts the prompt):
      InputError: if the file cannot be read or its shape is not the prompt's.
    """

    def initialize(key, shape, vocabulary):
        del key, vocabulary
        return _checked(read_prompt(Path(path)), shape, str(path))

    return initialize


def _checked(array, shape: tuple[int, int], origin: str) -> Array:
    if tuple(array.shape) != tuple(shape):
        raise InputError(
            f"the prompt in {origin} has shape {tuple(array.shape)}, expected {shape} "
            "(prompt vectors, model width); set the prompt's length to match, or use a "
            "prompt that was trained on this model"
        )
    return jnp.asarray(array)


def from_sampled_vocabulary(population_size: int | None = 5000) -> Initializer:
    """Rows drawn from the first `population_size` of the embedding table.

    Without replacement, unless the prompt is longer than the population (warned).

    Args:
      population_size: the commonest tokens, which stand first in most vocabularies;
        None for all. More than there are is warned of and clamped.

    Raises (when it starts the prompt):
      InputError: if the population is not positive.
    """

    def initialize(key, shape, vocabulary):
        rows = vocabulary.embeddings.shape[0]
        population = rows if population_size is None else population_size
        if population <= 0:
            raise InputError(f"population_size is {population}, expected at least 1")
        if population > rows:
            warnings.warn(
                f"population_size {population} is more than the {rows} rows of the "
                "embedding table; all of them are used",
                stacklevel=2,
            )
            population = rows
        replace = shape[0] > population
        if replace:
            warnings.warn(
                f"a prompt of {shape[0]} vectors is longer than the population of "
                f"{population}, so some rows are drawn more than once",
                stacklevel=2,
            )
        ids = jax.random.choice(key, population, (shape[0],), replace=replace)
        return vocabulary.rows(ids)

    return initialize


def from_class_labels(
    labels: Sequence[str], fallback: Initializer | None = None
) -> Initializer:
    """Vector `i` is the mean embedding of label `i`; the rest comes from `fallback`.

    Args:
      labels: the verbalizers; those beyond the prompt's length are warned of.
      fallback: for the other vectors; uniform if None.

    Raises (when it starts the prompt):
      InputError: if a label tokenizes to nothing.
    """

    def initialize(key, shape, vocabulary):
        used = _at_most(labels, shape[0], "class labels")
        means = [vocabulary.rows(vocabulary.encode(label)).mean(0) for label in used]
        return _filled(means, key, shape, vocabulary, fallback)

    return initialize


def from_text(text: str, fallback: Initializer | None = None) -> Initializer:
    """Vector `i` is the embedding of the text's token `i`.

    Args:
      text: of which tokens beyond the prompt's length are warned of.
      fallback: for the vectors that the text does not reach; uniform if None.

    Raises (when it starts the prompt):
      InputError: if the text tokenizes to nothing.
    """

    def initialize(key, shape, vocabulary):
        ids = _at_most(vocabulary.encode(text), shape[0], "tokens of the text")
        return _filled(list(vocabulary.rows(ids)), key, shape, vocabulary, fallback)

    return initialize


def _at_most(items: Sequence, count: int, what: str) -> Sequence:
    if len(items) > count:
        warnings.warn(
            f"{len(items)} {what} do not fit a prompt of {count} vectors; the last "
            f"{len(items) - count} are left out",
            stacklevel=3,
        )
    return items[:count]


def _filled(vectors, key, shape, vocabulary, fallback) -> Array:
    """The vectors given, and the fallback's where they end."""
    rest = (fallback or uniform())(key, shape, vocabulary)
    return jnp.concatenate([jnp.stack(vectors), rest[len(vectors) :]])


def from_template(template: str, fallback: Initializer | None = None) -> Initializer:
    """The vectors of a `{soft:"words"}` piece are the embeddings of the words' tokens.

    Args:
      template: that of the data; see `prompt_tuning.data.text.templates`.
      fallback: for the vectors that no words reach; uniform if None.

    Raises (when it starts the prompt):
      InputError: if the template cannot be read, or has another number of vectors.
    """

    def initialize(key, shape, vocabulary):
        parsed = parse_template(template)
        counts = soft_counts(parsed, vocabulary.tokenizer)
        check_length(counts, shape[0])
        vectors, first = (fallback or uniform())(key, shape, vocabulary), 0
        for piece, count in zip(parsed.soft, counts, strict=True):
            if piece.words is not None:
                ids = vocabulary.encode(piece.words)
                used = _at_most(ids, count, f"tokens of {piece.words!r}")
                place = slice(first, first + len(used))
                vectors = vectors.at[place].set(vocabulary.rows(used))
            first += count
        return vectors

    return initialize
