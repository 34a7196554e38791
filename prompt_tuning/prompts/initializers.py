"""Prompt initializers: `f(key, (P, D), vocabulary) -> [P, D]`.

Each function here takes options and returns such an initializer. They behave as in
google-research/prompt-tuning, except that invalid options which that library silently
accepts are errors here.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.adapters.prefix_files import MovePrefix, read_prefixes
from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.checkpoints.stored_table import StoredTable
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.number_ranges import NonnegativeNumber, PositiveInteger
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.text.templates import check_length, parse_template, soft_counts
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.prompts.stack_shape import PrefixStart, StackShape

PREFIX_DIMENSIONS = 5
"""Dimensions of the array of a `KeyValuePrefix`, `[L, 2, P, G, K]`."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Parts of the frozen model that an initializer can use.

    Attributes:
      embeddings: the token embedding table, `[V, D]`; if it stays in its checkpoint,
        only the requested rows are read.
      tokenizer: None if the model has no tokenizer.
      stack: shape of the stack, for prompts that attach at every block; None if only
        the input matters.
      prefix_starts: collects what prefixes start from, since their keys and values can
        be computed only after the model is read.
      move_prefix: moves a prefix's keys, so that the text after it may begin later;
        None if the model is unknown.
    """

    embeddings: Float[Array, "V D"] | Float[np.ndarray, "V D"] | StoredTable
    tokenizer: Tokenizer | None = None
    stack: StackShape | None = None
    prefix_starts: list[PrefixStart] = dataclasses.field(default_factory=list)
    move_prefix: MovePrefix | None = None

    @property
    def width(self) -> int:
        """Model width `D`."""
        return self.embeddings.shape[1]

    def encode(self, text: str) -> list[int]:
        """Returns a text's token ids.

        Raises:
          InputError: if there is no tokenizer, or the text has no tokens.
        """
        if self.tokenizer is None:
            raise InputError(
                f"a prompt cannot start from the text {shown(text)}: the model has no "
                "tokenizer; set `tokenizer`"
            )
        ids = self.tokenizer.encode(text)
        if not ids:
            raise InputError(
                f"the text {shown(text)} has no tokens, so there is no embedding to "
                "start a prompt vector from; use another text"
            )
        return ids

    def rows(
        self, ids: Sequence[int] | Int[Array, "n"] | Int[np.ndarray, "n"]
    ) -> Float[Array, "n D"]:
        """Returns the embeddings of some tokens, in float32.

        Raises:
          InputError: for a token without a row in a checkpoint's table.
        """
        table = self.embeddings
        if not isinstance(table, StoredTable):
            return jnp.asarray(table)[jnp.asarray(ids)].astype(jnp.float32)
        indices = np.asarray(ids)
        missing = indices[(indices < 0) | (indices >= len(table))]
        if len(missing):
            raise InputError(
                f"a prompt starts from token {missing[0]}, but the model's table has "
                f"the embeddings of {len(table)} tokens; does the tokenizer belong to "
                "this checkpoint?"
            )
        return jnp.asarray(table[indices])

    def stack_for(self, prompt: str) -> StackShape:
        """Returns the shape of the stack; messages name the class `prompt`.

        Raises:
          InputError: if the shape is unknown.
        """
        if self.stack is None:
            raise InputError(
                f"{prompt} has parameters for every block, but the number of blocks is "
                "unknown; let open_pretrained build it, or give Vocabulary a StackShape"
            )
        return self.stack


Initializer = Callable[
    [Key[Array, ""], tuple[int, int], Vocabulary], Float[Array, "P D"]
]


TextInitializer = Callable[
    [Key[Array, ""], tuple[int, ...], Vocabulary], Float[Array, "..."]
]
"""An initializer of vectors `[P, D]` and of prefixes `[L, 2, P, G, K]`."""


def uniform(scale: NonnegativeNumber = 0.5) -> Initializer:
    """Starts vectors at uniform numbers from `[0, scale)`, as prompts do by default.

    The range is not symmetric as in the paper (Lester et al. 2021), but as in its
    published code.

    Args:
      scale: upper bound, at least 0.

    Examples:
      >>> prompt = pt.SoftPrompt(length=5, initializer=pt.uniform(scale=0.1))
      >>> vectors = model.attach(prompt).prompt_vectors()["decoder/prompt"]
      >>> bool(vectors.min() >= 0 and vectors.max() < 0.1)
      True
    """

    def initialize(key, shape, vocabulary):
        del vocabulary
        return jax.random.uniform(key, shape, maxval=scale)

    return initialize


def from_array(array: Float[np.ndarray, "..."] | Float[Array, "..."]) -> Initializer:
    """Starts vectors at an array.

    Raises (when it initializes the prompt):
      InputError: if the shape is not the prompt's.
    """

    def initialize(key, shape, vocabulary):
        del key, vocabulary
        return _check_shape(array, shape, "the given array")

    return initialize


def from_file(path: str | Path | Sequence[str]) -> TextInitializer:
    """Starts at the vectors in a file, e.g. to continue from another task's prompt.

    A `KeyValuePrefix` may start at the slots of many files, concatenated. As in
    `compose`, keys with a rotary embedding are then rotated further, to keep their
    distance to the text.

    Args:
      path: NumPy file, a run's checkpoint, or PEFT adapter folder, with vectors `[P,
        D]`. For a prefix also a cartridge of HazyResearch/cartridges (`.pt`), or a list
        of paths.

    Raises:
      InputError: when it initializes the prompt, if the file cannot be read or its
        shape is not the prompt's.

    Examples:
      >>> numpy.save("prompt.npy", numpy.ones((5, 128), "float32"))
      >>> prompt = pt.SoftPrompt(length=5, initializer=pt.from_file("prompt.npy"))
      >>> model.attach(prompt).prompt_vectors()["decoder/prompt"].mean().item()
      1.0
    """

    def initialize(key, shape, vocabulary):
        del key
        if len(shape) == PREFIX_DIMENSIONS:
            return read_prefixes(path, shape, vocabulary.move_prefix)
        if not isinstance(path, str | Path):
            raise InputError("from_file() reads several files for a prefix alone")
        return _check_shape(read_prompt(Path(path)), shape, str(path))

    return initialize


def _check_shape(array, shape: tuple[int, ...], origin: str) -> Array:
    if tuple(array.shape) != tuple(shape):
        raise InputError(
            f"the prompt in {origin} has shape {tuple(array.shape)}, expected {shape} "
            "(prompt vectors, model width); set the prompt's length to match, or use a "
            "prompt that was trained on this model"
        )
    return jnp.asarray(array)


def from_sampled_vocabulary(
    population_size: PositiveInteger | None = 5000,
) -> Initializer:
    """Starts at the embeddings of random tokens: Lester et al.'s "sampled vocabulary".

    The first rows of most vocabularies are the most frequent tokens. Rows are drawn
    without replacement, unless the prompt is longer than the population (with a
    warning).

    Args:
      population_size: draw from this many rows at the start of the table; None, or more
        than the table has, for all.

    Raises:
      InputError: when it initializes the prompt, if the population is not positive.

    Examples:
      >>> start = pt.from_sampled_vocabulary(population_size=20)
      >>> prompt = pt.SoftPrompt(length=5, initializer=start)
      >>> model.attach(prompt).prompt_vectors()["decoder/prompt"].shape
      (5, 128)
    """

    def initialize(key, shape, vocabulary):
        rows = vocabulary.embeddings.shape[0]
        population = rows if population_size is None else min(population_size, rows)
        if population <= 0:
            raise InputError(f"population_size is {population}, expected at least 1")
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
    """Starts vector `i` at the mean embedding of label `i`: best for classification.

    Args:
      labels: the texts of the classes; labels beyond the prompt's length are dropped,
        with a warning.
      fallback: where the remaining vectors start; uniform if None.

    Raises:
      InputError: when it initializes the prompt, if a label has no tokens.

    Examples:
      >>> start = pt.from_class_labels(["yes", "no"], pt.from_sampled_vocabulary())
      >>> prompt = pt.SoftPrompt(length=5, initializer=start)
      >>> model.attach(prompt).prompt_vectors()["decoder/prompt"].shape
      (5, 128)
    """

    def initialize(key, shape, vocabulary):
        used = _truncate(labels, shape[0], "class labels")
        means = [vocabulary.rows(vocabulary.encode(label)).mean(0) for label in used]
        return _fill(means, key, shape, vocabulary, fallback)

    return initialize


def from_text(text: str, fallback: Initializer | None = None) -> TextInitializer:
    """Starts a prompt from a text, e.g. an instruction or a document.

    Vector `i` of a prompt starts at the embedding of the text's token `i`. Slot `i` of
    a `KeyValuePrefix` starts at the keys and values that the frozen model computes for
    token `i`, so the prefix acts like the beginning of the text; its first slots are
    for the tokens that begin every text, e.g. BOS.

    Args:
      text: the text; tokens beyond the prompt's length are dropped, with a warning.
      fallback: where the vectors after the text start; uniform if None. A prefix must
        not be longer than its text.

    Raises:
      InputError: when it initializes the prompt, if the text has no tokens, or fewer
        than a prefix has slots.

    Examples:
      >>> prompt = pt.SoftPrompt(length=8, initializer=pt.from_text("reverse"))
      >>> model.attach(prompt).prompt_vectors()["decoder/prompt"].shape
      (8, 128)
      >>> prefix = pt.KeyValuePrefix(length=4, initializer=pt.from_text("reverse: a=a"))
      >>> trained, _ = model.attach(prefix).partition()
      >>> trained["decoder/prompt/prompt"].shape
      (4, 2, 4, 4, 32)
    """

    def initialize(key, shape, vocabulary):
        ids = vocabulary.encode(text)
        if len(shape) == PREFIX_DIMENSIONS:
            ids = document_tokens(ids, shape, vocabulary)[: shape[2]]
            return request_start(PrefixStart(ids), shape, vocabulary)
        ids = _truncate(ids, shape[0], "tokens of the text")
        return _fill(list(vocabulary.rows(ids)), key, shape, vocabulary, fallback)

    return initialize


def document_tokens(
    ids: Sequence[int], shape: tuple[int, ...], vocabulary: Vocabulary
) -> tuple[int, ...]:
    """Returns a text's tokens, preceded by those that begin every text, e.g. BOS.

    Raises:
      InputError: if there are fewer than the prefix has slots.
    """
    tokenizer, slots = vocabulary.tokenizer, shape[2]
    assert tokenizer is not None  # it encoded the text
    ids = [*tokenizer.begin_ids, *ids]
    if len(ids) < slots:
        raise InputError(
            f"a prefix of {slots} slots starts from a text of {len(ids)} tokens: give "
            f"a longer text, or {how_to_set('KeyValuePrefix.length', len(ids))} at most"
        )
    return tuple(ids)


def request_start(
    start: PrefixStart, shape: tuple[int, ...], vocabulary: Vocabulary
) -> Array:
    """Notes what a prefix starts from, and returns zeros in its place."""
    vocabulary.prefix_starts.append(start)
    return jnp.zeros(shape)


def _truncate(items: Sequence, count: int, name: str) -> Sequence:
    if len(items) > count:
        warnings.warn(
            f"{len(items)} {name} do not fit a prompt of {count} vectors; the last "
            f"{len(items) - count} are left out",
            stacklevel=3,
        )
    return items[:count]


def _fill(vectors, key, shape, vocabulary, fallback) -> Array:
    """Returns the given vectors followed by the fallback's remaining ones."""
    rest = (fallback or uniform())(key, shape, vocabulary)
    return jnp.concatenate([jnp.stack(vectors), rest[len(vectors) :]])


def from_template(template: str, fallback: Initializer | None = None) -> Initializer:
    """Starts the vectors of `{soft:"words"}` in a template at the words' embeddings.

    Pass the template of your data (`DataSource.template`), which says where the vectors
    are in the text.

    Args:
      template: the template, e.g. `{soft:"Reverse"} {prompt} {soft:2}`; a soft part is
        a number of vectors, words in double quotes, or both, as in `{soft:5:"words"}`.
      fallback: where the vectors without words start; uniform if None.

    Raises:
      InputError: when it initializes the prompt, if the template cannot be read, or has
        another number of vectors.

    Examples:
      >>> template = '{soft:3:"abc"}{prompt}{soft:2}'
      >>> prompt = pt.SoftPrompt(length=5, initializer=pt.from_template(template))
      >>> model.attach(prompt).prompt_vectors()["decoder/prompt"].shape
      (5, 128)
    """

    def initialize(key, shape, vocabulary):
        parsed = parse_template(template)
        counts = soft_counts(parsed, vocabulary.tokenizer)
        check_length(counts, shape[0])
        vectors, first = (fallback or uniform())(key, shape, vocabulary), 0
        for piece, count in zip(parsed.soft, counts, strict=True):
            if piece.words is not None:
                ids = vocabulary.encode(piece.words)
                used = _truncate(ids, count, f"tokens of {shown(piece.words)}")
                covered = slice(first, first + len(used))
                vectors = vectors.at[covered].set(vocabulary.rows(used))
            first += count
        return vectors

    return initialize
