"""Metrics that can choose a run's best checkpoint, and whether higher is better."""

from collections.abc import Sequence
from typing import Any

from prompt_tuning.core.errors import InputError, shown

LOSS, LABEL_ACCURACY, ENTITY_F1 = "loss", "label_accuracy", "entity_f1"
OUTSIDE, BEGINS, CONTINUES = "O", "B-", "I-"
"""The tag of words that belong to no entity, and starts of other tags, in IOB2."""
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
    ENTITY_F1: "max",
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
"""Chooses by `label_accuracy` if there are labels, by `entity_f1` if there are tags of
entities, and by `loss` otherwise."""


def mark_entities(tags: Sequence[str]) -> bool:
    """Tests whether tags mark entities in IOB2 form."""
    starts = [tag[:2] for tag in tags if tag != OUTSIDE]
    return BEGINS in starts and {*starts} <= {BEGINS, CONTINUES}


def metric_and_direction(
    keep_best: Any,
    labels: Any = None,
    setting: str = "Run.keep_best",
    *,
    tags: Sequence[str] = (),
) -> tuple[str, str] | None:
    """Returns the metric that selects the best checkpoint, and "min" or "max".

    Args:
      keep_best: a metric in `DIRECTIONS`, "auto", a metric with "min" or "max", or None
        for no selection.
      labels: labels of the evaluation, if any.
      setting: name of the setting, for messages.
      tags: tags of words, if the evaluation measures any.

    Raises:
      InputError: for any other value; lists the metrics.
    """
    if keep_best is None:
        return None
    if keep_best == AUTO:
        by_tags = ENTITY_F1 if mark_entities(tags) else LOSS
        keep_best = LABEL_ACCURACY if labels else by_tags
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
