"""The head for the classes of a task."""

import dataclasses
from collections.abc import Sequence

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.model_choices import ClassProblem, Pooling


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
