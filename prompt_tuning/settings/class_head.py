"""Settings of a classification head."""

import dataclasses
from collections.abc import Sequence

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.model_choices import ClassProblem, Pooling


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassHead:
    """A classification head `[C, D]`, trained on a frozen model.

    Use it alone or with any prompt or adapter. With many examples or classes, prefer it
    to ranking label texts (`pt.ClassObjective`): a step reads each example once. The
    model reads only the prompt; the completion names the class. The head scores the
    classes from the last state of the prompt, as `AutoModelForSequenceClassification`
    of transformers does, or from another pooling.

    `problem` selects the task and its loss, both as in transformers. With several
    labels per text or with regression, the completion is a list of names or a number.
    For tagging, the data has words and a tag for each (`tokens`, `tags`), and the head
    is that of `AutoModelForTokenClassification`. A model with a class head generates no
    text.

    An encoder (e.g. BERT) gets the same head as in transformers, with a bias per class
    and, for whole texts, a dense layer on the first state. That layer is trained where
    PEFT trains it (RoBERTa) or where the checkpoint has none; otherwise it is frozen
    (BERT's pooler).

    The head starts from the checkpoint's own if that has the same number of classes;
    rows are matched by name, or by position if the names differ. Otherwise it starts
    from a normal distribution with standard deviation 0.02, as in transformers.

    Attributes:
      labels: names of the `C` classes, or of the numbers in a regression; None for
        those of the checkpoint ("value" for a regression with one number).
      pooling: state that the head reads: the "last" state of the prompt, the "first"
        (encoders only; a soft prompt's first vector if one comes before the text), or
        the "mean" over all tokens. None for the model's own choice: "last" in decoders,
        "first" in most encoders.
      problem: "single_label" for one class per text; "multi_label" for any number of
        classes, each with its own probability; "regression" for numbers with squared
        error; "tokens" for the class of each word, read from the state of its first
        token. None for the checkpoint's problem, or else "single_label".
      dense: whether to train the dense layer where PEFT and the default leave it frozen
        (BERT's pooler).

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
        """Does nothing: a head can always be trained."""
