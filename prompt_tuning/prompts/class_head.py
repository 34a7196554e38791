"""A trained head that scores the classes of an example in the place of tokens.

The head takes the place of the model's output head: the logits are `[C]` scores of the
classes, and the target of an example is the number of its class. Cross-entropy,
accuracy, gradients, micro-batches and optimizers are then those of tokens, and nothing
of them knows of classes. The rows of the head are stored as the arrays of an adapter
are, so they are trained, saved and resumed beside any prompt or adapter.

`losses.class_objective` is something else: there the model's own head scores the text
of each label, at the cost of a row for each.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.model_choices import ClassProblem, Pooling
from prompt_tuning.losses.output_head import AnyHead, OutputHead

NAME = "classes"
"""Name of the rows among the adapters of the output head."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassHead:
    """A head `[C, D]` for the classes of a task, trained beside a frozen model.

    It stands alone or beside any prompt or adapter. Prefer it to labels that are ranked
    by their texts (`pt.ClassObjective`) if there are many examples or classes: a step
    reads each example once. The completion of each example is the name of its class.
    The model reads the prompt alone, and the head scores the classes by its last state
    or the mean of its states, as `AutoModelForSequenceClassification` of transformers
    does by the last one. With several labels for a text or numbers (`problem`), the
    completion is a list of names or a number, and the loss is that of transformers for
    the problem. For tokens the data has words and as many tags (`tokens`, `tags`), and
    the head is that of `AutoModelForTokenClassification`. A model with a head of
    classes generates no text. For texts, an encoder (BERT) has the head that
    transformers gives it: a dense layer of the first state, and a bias of each class.
    The dense layer is trained where PEFT trains it (RoBERTa), or the checkpoint has
    none; else it is frozen (the pooler of BERT).

    It starts from the head of a checkpoint that has one for as many classes, with the
    rows of the same names, or in its order if the names differ. Otherwise it starts
    from a normal distribution of deviation 0.02, as in transformers.

    Attributes:
      labels: names of the `C` classes; those of the checkpoint if None. In a
        regression those of its numbers, "value" for one.
      pooling: the states of the prompt that it reads: "last", "first" (of encoders, and
        of vectors before the text if there are some) or the "mean" of all tokens'
        states; as the model's own head if None, which is "last" in decoders, and
        "first" in most encoders.
      problem: "single_label" for one class of each text; "multi_label" for any of the
        classes, each with a probability of its own; "regression" for numbers, learned
        by their squared error; "tokens" for the class of each word, by the state of
        its first token. None for that of the checkpoint's head, or else
        "single_label".
      dense: whether the dense layer before the rows is trained even where PEFT and the
        default leave it frozen (the pooler of BERT).

    Raises:
      InputError: if there are fewer than two labels (one in a regression), or two are
        equal.

    Examples:
      >>> reviews = [("good: ", "yes"), ("awful: ", "no")] * 4
      >>> tuned = pt.tune(
      ...     model,
      ...     [pt.SoftPrompt(length=5), pt.ClassHead(labels=["yes", "no"])],
      ...     reviews,
      ...     steps=2,
      ...     progress=False,
      ... )
      >>> sorted(tuned.predict("good: ").probabilities)
      ['no', 'yes']
    """

    labels: Sequence[str] | None = None
    pooling: Pooling | None = None
    dense: bool = False
    problem: ClassProblem | None = None

    def __post_init__(self):
        check_fields(self)
        labels = self.labels
        if labels is None:
            return
        if isinstance(labels, str):
            raise InputError(
                f"ClassHead.labels is the text {shown(labels)}, expected a list of "
                "texts, such as ['yes', 'no']"
            )
        names = [label.strip() for label in labels]
        fewest = 1 if self.problem == "regression" else 2
        if len(names) < fewest or len(set(names)) < len(names) or "" in names:
            raise InputError(
                f"ClassHead.labels is {shown(list(labels))}, expected "
                f"{'two' if fewest == 2 else 'one'} or more names, all different and "
                "none of them empty"
            )

    def check_trained(self) -> None:
        """Checks that training can change what it does, which is always so."""


class ClassRows(nnx.Module):
    """The rows of a class head.

    Attributes:
      kernel: `[C, D]`, float32 whatever the model computes in, as all others.
      bias: `[C]`, or None.
      dense: kernel of the dense layer before it, `[D, D]`; None if it is frozen.
      dense_bias: bias of that layer, `[D]`, or None.
      dense_norm: scale of the norm after that layer, `[D]`, or None (ModernBERT).
      pooling: see `ClassHead.pooling`.
    """

    def __init__(
        self,
        kernel: Float[Array, "C D"],
        pooling: Pooling,
        bias: Float[Array, "C"] | None = None,
        dense: Float[Array, "D D"] | None = None,
        dense_bias: Float[Array, "D"] | None = None,
        dense_norm: Float[Array, "D"] | None = None,
    ):
        def declare(array):
            if array is None:
                return None
            return nnx.Param(array.astype(jnp.float32), axes=("adapter",) * array.ndim)

        self.kernel, self.bias = declare(kernel), declare(bias)
        self.dense, self.dense_bias = declare(dense), declare(dense_bias)
        self.dense_norm = declare(dense_norm)
        self.pooling: Pooling = pooling

    def output_head(self) -> AnyHead:
        """Returns the head as losses take it."""
        assert self.kernel is not None
        kernel = self.kernel[...]
        return kernel if self.bias is None else OutputHead(kernel, self.bias[...])


def mean_states(
    states: Float[Array, "B T D"], real: Bool[Array, "B T"]
) -> Float[Array, "B D"]:
    """Computes the mean of the states of real tokens, in float32.

    Args:
      states: normalized states of rows of tokens.
      real: which of the tokens are the row's; the mean of none is 0.
    """
    weights = real[..., None].astype(jnp.float32)  # [B, T, 1]
    total = jnp.sum(states.astype(jnp.float32) * weights, axis=1)
    # A row that only fills a batch has no token.
    count = jnp.maximum(jnp.sum(weights, axis=1), 1)
    return (total / count).astype(states.dtype)


def initial_rows(key: jax.Array, classes: int, width: int) -> Float[Array, "C D"]:
    """Draws the rows of a new head as transformers does."""
    return 0.02 * jax.random.normal(key, (classes, width), jnp.float32)
