"""What is measured on held-out data, as a config says it."""

import dataclasses
from collections.abc import Sequence

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.data.data_source import DataSource
from prompt_tuning.evaluation.text_metrics import TEXT_METRICS, check_library

PERPLEXITY = "perplexity"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is measured on held-out data.

    Attributes:
      data: the held-out files; columns for a training objective are not read.
      exact_match: whether completions are generated and compared.
      metrics: what else is measured: "squad" (F1 and exact match of normalised words),
        "rouge" and "bleu" of generated completions, "perplexity".
      labels: verbalizers; each example's completion is one of them, and the model's
        answer is the one it finds most likely. None if the task has no labels.
      length_normalize: whether a label is judged by the mean of its tokens'
        log-probabilities and not by the sum.
      calibrate: texts without content, such as ["N/A"], given in place of an example's;
        the labels are ranked once more, by their probabilities over those that they
        have there. See `calibration`.
      new_tokens: most tokens to generate.
      references_key: jsonl key of the completions that are right, a text or a list of
        them, for the metrics of generated text; the completion alone if None.
      category_key: what says which category an example is of, for metrics of each: a
        jsonl key, or an HDF5 data set (usually `category_ids`), -1 for none.
      category_names: of the numbers in that data set, in order, or a JSON file that has
        the number of each name, as `category_to_id.json` does.
      resamples: of the bootstrap, from which the 95 % intervals are.
      bootstrap_seed: of these.

    Raises:
      InputError: if something cannot be measured as it is asked for.
    """

    data: DataSource
    exact_match: bool = False
    metrics: Sequence[str] = ()
    labels: Sequence[str] | None = None
    length_normalize: bool = False
    calibrate: Sequence[str] | None = None
    new_tokens: int = 32
    references_key: str | None = None
    category_key: str | None = None
    category_names: Sequence[str] | str | None = None
    resamples: int = 1000
    bootstrap_seed: int = 0

    @property
    def text_metrics(self) -> list[str]:
        """Those of `metrics` that compare generated text."""
        return [name for name in self.metrics if name in TEXT_METRICS]

    @property
    def generates(self) -> bool:
        """Whether something is measured of generated completions."""
        return self.exact_match or bool(self.text_metrics)

    def __post_init__(self):
        check_fields(self)
        # A binding without a scope applies to the training data and to this data.
        without = dataclasses.replace(self.data, advantages_key=None, columns=None)
        object.__setattr__(self, "data", without)
        self._check_metrics()
        self._check_labels()
        if self.resamples < 1:
            raise InputError(
                f"Evaluation.resamples is {self.resamples}, expected at least 1"
            )
        if self.references_key is not None and not self.text_metrics:
            raise InputError(
                f"Evaluation.references_key is {self.references_key!r}, but nothing is "
                f"compared with references: set Evaluation.metrics to some of "
                f"{', '.join(TEXT_METRICS)}, or leave it out"
            )
        if self.category_names is not None and self.category_key is None:
            raise InputError(
                "Evaluation.category_names is set, but no category_key says where the "
                "categories are: set it too (HDF5: 'category_ids')"
            )

    def _check_metrics(self) -> None:
        known = (PERPLEXITY, *TEXT_METRICS)
        if isinstance(self.metrics, str):
            raise InputError(
                f"Evaluation.metrics is {self.metrics!r}, expected a list such as "
                f"[{self.metrics!r}]"
            )
        for name in self.metrics:
            if name not in known:
                raise InputError(
                    f"Evaluation.metrics has {name!r}, expected some of "
                    f"{', '.join(known)} (exact_match and labels are settings of their "
                    "own)"
                )
            check_library(name)

    def _check_labels(self) -> None:
        for name in ("labels", "calibrate"):
            if isinstance(getattr(self, name), str):
                raise InputError(
                    f"Evaluation.{name} is the text {getattr(self, name)!r}, expected "
                    "a list of texts"
                )
        if self.labels and len(self.labels) < 2:
            raise InputError(
                f"Evaluation.labels is {list(self.labels)}, expected at least two to "
                "rank, or None for a task without labels"
            )
        if self.calibrate is None:
            return
        if not self.labels:
            raise InputError(
                "Evaluation.calibrate is set, but there are no labels whose ranking "
                "could be calibrated: set Evaluation.labels too, or leave it out"
            )
        if not self.calibrate:
            raise InputError(
                "Evaluation.calibrate is empty, expected at least one text without "
                "content, such as ['N/A'], or None"
            )
