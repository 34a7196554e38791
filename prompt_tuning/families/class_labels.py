"""Heads of classes that published folders have in the place of an output head.

`AutoModelForSequenceClassification` of transformers stores the head of decoder-only
models as `score.weight`, `[C, D]`, without a bias. It scores the last token that is not
padding, after the final norm, and the names of the classes are in `id2label`.
"""

from collections.abc import Mapping
from typing import Any

from prompt_tuning.checkpoints.stored_tensors import Recipe, StoredTensor
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.families.hf_settings import HuggingFaceSettings

HEAD, STORED = "head/kernel", "score.weight"
ARCHITECTURES, NAMES, PROBLEM = "architectures", "id2label", "problem_type"
PAD = "pad_token_id"
SINGLE_LABEL = "single_label_classification"
OF_TOKENS: dict[str, Any] = {
    "tied_head": False,
    "head_bias": False,
    "logit_soft_cap": None,
    "logit_multiplier": 1.0,
}
"""Fields of `ModelConfig` for a head of classes: what a family does to the logits of
tokens is left out, as in transformers."""


def class_fields(
    settings: HuggingFaceSettings,
    fields: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
) -> dict[str, Any]:
    """Returns the fields of a model with a head of classes; none for any other.

    Args:
      settings: settings of `config.json`.
      fields: fields of the language model.
      stored: stored tensors.

    Raises:
      InputError: for a head that does not choose one class, or names that do not fit.
    """
    classes = settings.values.get(ARCHITECTURES)
    classifies = isinstance(classes, list) and any(
        isinstance(name, str) and name.endswith("ForSequenceClassification")
        for name in classes
    )
    if not classifies or STORED not in stored:
        return {}
    if fields["architecture"] != "decoder_only":
        return {}
    problem = settings.values.get(PROBLEM)
    if problem not in (None, SINGLE_LABEL):
        settings.refuse(PROBLEM, f"{SINGLE_LABEL!r}: other heads are not read")
    names = _read_names(settings, stored[STORED])
    pad = settings.integer(PAD, minimum=-1) if PAD in settings else -1
    skipped = None if pad < 0 else pad
    return {**OF_TOKENS, "labels": names, "unscored_end": skipped}


def _read_names(settings: HuggingFaceSettings, head: StoredTensor) -> tuple[str, ...]:
    """Returns the name of each class; transformers leaves out those of two classes."""
    count = head.shape[0]
    if count < 2:
        raise InputError(
            f"{head.source} has a head of one number, which is a regression, expected "
            "the scores of two or more classes"
        )
    default = {str(number): f"LABEL_{number}" for number in range(count)}
    given = settings.values.get(NAMES, default)
    expected = [str(number) for number in range(count)]
    if not isinstance(given, dict) or sorted(given) != sorted(expected):
        settings.refuse(NAMES, f"a name for each of the {count} classes from 0")
    names = tuple(given[number] for number in expected)
    plain = [name.strip() for name in names if isinstance(name, str)]
    if len(set(plain)) < count or "" in plain:
        raise InputError(
            f"{settings.source} names the classes {shown(list(names))}, expected "
            "different texts that are not empty"
        )
    return names


def with_class_head(recipes: dict[str, Recipe]) -> dict[str, Recipe]:
    """Returns the recipes of a model that has a head of classes."""
    return {**recipes, HEAD: Recipe((STORED,))} if HEAD in recipes else recipes
