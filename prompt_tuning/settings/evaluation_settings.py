"""Settings of an evaluation, as a config sets them."""

import dataclasses
import importlib.util
from collections.abc import Sequence

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import AxisLength, NonnegativeInteger, RowCount
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.settings.data_source import DataSource

PERPLEXITY = "perplexity"
ROUGE_NAMES = ("rouge1", "rouge2", "rougeL")
METRIC_NAMES = {
    "squad": ("squad_f1", "squad_exact_match"),
    "rouge": ROUGE_NAMES,
    "bleu": ("bleu",),
}
"""Names of the values that each metric of generated text computes."""

_LIBRARIES = {"rouge": ("rouge_score", "rouge-score"), "bleu": ("sacrebleu",) * 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics on held-out data, during training and afterwards.

    `tune(..., evaluation=pairs)` measures loss and accuracy; pass an `Evaluation` for
    more.

    Attributes:
      data: held-out data, in any form that `tune` takes or as a `DataSource`; columns
        of a training objective are not read.
      exact_match: whether to measure the share of completions that greedy decoding
        reproduces token for token.
      metrics: additional metrics: "squad" (F1 and exact match of normalized words),
        "rouge" and "bleu" of generated completions, and "perplexity".
      labels: texts of the classes; each example's completion is one of them. The
        model's answer is the one that it finds most likely. None for a task without
        labels.
      length_normalize: whether to score a label by the mean of its tokens'
        log-probabilities instead of their sum.
      calibrate: inputs without content, e.g. ["N/A"]. Labels are ranked a second time,
        by their probability relative to that given these inputs.
      new_tokens: maximum number of generated tokens.
      references_key: jsonl key of the reference completions, a text or a list of texts,
        for the metrics of generated text; None for the completion alone.
      category_key: key of each example's category, for metrics by category: a jsonl
        key, or an HDF5 data set (usually `category_ids`) with -1 for no category.
      category_names: names of the numbers in that data set, in order, or a JSON file
        that maps names to numbers, e.g. `category_to_id.json`.
      resamples: number of bootstrap resamples for the 95 % intervals.
      bootstrap_seed: seed of the resampling.

    Raises:
      InputError: if the settings contradict each other or name an unknown metric.

    Examples:
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     pairs,
      ...     evaluation=pt.Evaluation(data=pairs[:4], metrics=["perplexity"]),
      ...     steps=2,
      ...     progress=False,
      ... )
      >>> sorted(tuned.result.metrics)
      ['accuracy', 'loss', 'perplexity']
    """

    data: DataSource
    exact_match: bool = False
    metrics: Sequence[str] = ()
    labels: Sequence[str] | None = None
    length_normalize: bool = False
    calibrate: Sequence[str] | None = None
    new_tokens: AxisLength = 32
    references_key: str | None = None
    category_key: str | None = None
    category_names: Sequence[str] | str | None = None
    resamples: RowCount = 1000
    bootstrap_seed: NonnegativeInteger = 0

    @property
    def text_metrics(self) -> list[str]:
        """The names in `metrics` that compare generated text."""
        return [name for name in self.metrics if name in METRIC_NAMES]

    @property
    def generates(self) -> bool:
        """Whether any metric needs generated completions."""
        return self.exact_match or bool(self.text_metrics)

    def __post_init__(self):
        check_fields(self)
        # A binding without a scope applies to the training data and to this data.
        without = dataclasses.replace(self.data, advantages_key=None, columns=None)
        held_out = dataclasses.replace(without, split=without.split or "dev")
        object.__setattr__(self, "data", held_out)
        self._check_metrics()
        self._check_labels()
        if self.references_key is not None and not self.text_metrics:
            raise InputError(
                f"Evaluation.references_key is {shown(self.references_key)}, but no "
                "metric uses references: give "
                f"{how_to_set('Evaluation.metrics', list(METRIC_NAMES))} or some of "
                "them, or leave references_key out"
            )
        if self.category_names is not None and self.category_key is None:
            raise InputError(
                "Evaluation.category_names is set without category_key, which names "
                "the column of the categories: give "
                f"{how_to_set('Evaluation.category_key', 'category_ids')} for HDF5, or "
                "the key of the lines"
            )

    def _check_metrics(self) -> None:
        choices = (PERPLEXITY, *METRIC_NAMES)
        if isinstance(self.metrics, str):
            raise InputError(
                f"Evaluation.metrics is {shown(self.metrics)}, expected a list such as "
                f"[{shown(self.metrics)}]"
            )
        for name in self.metrics:
            if name not in choices:
                raise InputError(
                    f"Evaluation.metrics has {name!r}, expected some of "
                    f"{', '.join(choices)} (exact_match and labels are separate "
                    "settings)"
                )
            check_library(name)

    def _check_labels(self) -> None:
        for name in ("labels", "calibrate"):
            if isinstance(getattr(self, name), str):
                raise InputError(
                    f"Evaluation.{name} is the text {shown(getattr(self, name))}, "
                    "expected a list of texts"
                )
        if self.labels and len(self.labels) < 2:
            raise InputError(
                f"Evaluation.labels is {list(self.labels)}, expected at least two to "
                f"rank: give {how_to_set('Evaluation.labels', ['LABEL', 'LABEL'])}, or "
                "leave labels out for a task without them"
            )
        if self.calibrate is None:
            return
        if not self.labels:
            raise InputError(
                "Evaluation.calibrate is set, but there are no labels to calibrate: "
                f"give {how_to_set('Evaluation.labels', ['LABEL', 'LABEL'])} too, or "
                "leave calibrate out"
            )
        if not self.calibrate:
            raise InputError(
                "Evaluation.calibrate is empty, expected at least one text without "
                "content, such as ['N/A'], or None"
            )


def check_library(metric: str) -> None:
    """Checks that the library of a metric is installed.

    Raises:
      InputError: if it is missing, with the command that installs it.
    """
    if metric not in _LIBRARIES:
        return
    module, name = _LIBRARIES[metric]
    if importlib.util.find_spec(module) is None:
        raise InputError(
            f"Evaluation.metrics has {shown(metric)}, which needs {name}: pip install "
            f"{name}"
        )
