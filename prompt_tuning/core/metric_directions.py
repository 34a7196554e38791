"""The metrics that can choose a run's best checkpoint, and whether higher is better."""

from typing import Any

from prompt_tuning.core.errors import InputError, shown

LOSS, LABEL_ACCURACY = "loss", "label_accuracy"
DIRECTIONS = {
    LOSS: "min",
    "cross_entropy": "min",
    "perplexity": "min",
    "accuracy": "max",
    "exact_match": "max",
    LABEL_ACCURACY: "max",
    "label_macro_f1": "max",
    "label_micro_f1": "max",
    "entity_precision": "max",
    "entity_recall": "max",
    "entity_f1": "max",
    "mse": "min",
    "pearson": "max",
    "spearman": "max",
    "calibrated_accuracy": "max",
    "calibrated_macro_f1": "max",
    "squad_f1": "max",
    "squad_exact_match": "max",
    "rouge1": "max",
    "rouge2": "max",
    "rougeL": "max",
    "bleu": "max",
    "preference_loss": "min",
    "preference_accuracy": "max",
    "preference_margin": "max",
    "recall_at_1": "max",
    "mrr": "max",
}
"""Whether a metric of an evaluation is better when it is smaller or larger."""
AUTO = "auto"
"""Chooses by `label_accuracy` if there are labels, and by `loss` otherwise."""


def metric_and_direction(
    keep_best: Any, labels: Any = None, setting: str = "Run.keep_best"
) -> tuple[str, str] | None:
    """Returns the metric that selects the best checkpoint, and "min" or "max".

    Args:
      keep_best: a metric of `DIRECTIONS`, "auto", a metric with "min" or "max", or None
        for no selection.
      labels: labels of the evaluation, if it has any.
      setting: name of the setting, for messages.

    Raises:
      InputError: for any other value, with the metrics.
    """
    if keep_best is None:
        return None
    if keep_best == AUTO:
        keep_best = LABEL_ACCURACY if labels else LOSS
    if isinstance(keep_best, str):
        if keep_best not in DIRECTIONS:
            raise InputError(
                f"{setting} is {shown(keep_best)}, expected one of the metrics "
                f"{', '.join(DIRECTIONS)}"
            )
        return keep_best, DIRECTIONS[keep_best]
    if len(keep_best) != 2 or keep_best[1] not in ("min", "max"):
        raise InputError(
            f"{setting} is {shown(keep_best)}, expected a metric such as 'loss', or a "
            "metric and 'min' or 'max'"
        )
    return keep_best[0], keep_best[1]
