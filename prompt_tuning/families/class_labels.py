"""Class heads that published folders have instead of an output head.

`AutoModelForSequenceClassification` in transformers stores the head of a decoder-only
model as `score.weight`, `[C, D]`, without a bias. It scores the last token before
padding, after the final norm; `id2label` names the classes. Encoders have a bias for
each class, and a dense layer before the head, which `ClassLayers` names. So have BART
and T5, whose decoder reads the text again, up to its end. The head of
`AutoModelForTokenClassification` scores each token, with a bias and, except in
ModernBERT, without a dense layer; T5's reads only the encoder.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from prompt_tuning.checkpoints.stored_tensors import Recipe, StoredTensor, transpose
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_choices import ClassProblem, TransformActivation
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields

HEAD = "head/kernel"
BIAS = "head/bias"
DENSE, DENSE_BIAS = "head/transform/kernel", "head/transform/bias"
DENSE_NORM = "head/transform/norm/scale"
ARCHITECTURES, NAMES, PROBLEM = "architectures", "id2label", "problem_type"
PAD = "pad_token_id"
PROBLEMS: Mapping[str, ClassProblem] = {
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}
"""Our name of each `problem_type`."""
OF_TOKENS: ModelFields = {
    "tied_head": False,
    "head_bias": False,
    "logit_soft_cap": None,
    "logit_multiplier": 1.0,
    "scale_tied_hidden": False,
}
"""Fields of `ModelConfig` for a head of classes: what a family does to the logits of
tokens is left out, as in transformers."""


@dataclasses.dataclass(frozen=True)
class ClassLayers:
    """Layers of a family's head for classes of texts, by their stored modules.

    Attributes:
      rows: module that scores the classes.
      dense: module of the dense layer before it; empty without one, as in decoder-only
        families, whose head has no bias either.
      norm: module of the norm after the activation, or empty.
      activation: activation of the dense layer.
      bias: whether the dense layer has a bias.
      saved: whether PEFT trains that layer with the head.
      token_rows: module that scores the classes of tokens; by default the first part of
        `rows`.
      token_dense: whether a head for tokens has the dense layer, too.
      biased: whether the rows have a bias even without a dense layer.
      encodes_tokens: whether an encoder-decoder scores tokens with its encoder.
    """

    rows: str = "score"
    dense: str = ""
    norm: str = ""
    activation: TransformActivation = "tanh"
    bias: bool = True
    saved: bool = True
    token_rows: str = ""
    token_dense: bool = False
    biased: bool = False
    encodes_tokens: bool = False

    def of(self, problem: ClassProblem) -> "ClassLayers":
        """Returns the layers of the family's head for a problem."""
        if problem != "tokens":
            return self
        rows = self.token_rows or self.rows.partition(".")[0]
        if self.token_dense:
            return dataclasses.replace(self, rows=rows)
        alone = self.encodes_tokens
        return ClassLayers(rows, biased=True, encodes_tokens=alone)

    @property
    def has_bias(self) -> bool:
        """Whether each class has a bias."""
        return bool(self.dense) or self.biased

    @property
    def fields(self) -> ModelFields:
        """Fields of `ModelConfig` that a class head changes."""
        if not self.dense:
            fields = {"head_bias": self.biased, "transform_activation": None}
            return OF_TOKENS | fields
        return OF_TOKENS | {
            "head_bias": True,
            "transform_activation": self.activation,
            "transform_norm": bool(self.norm),
            "transform_bias": self.bias,
        }

    def recipes(self, names: Collection[str] = ()) -> dict[str, Recipe]:
        """Returns the recipes of the head.

        A base model's stored `names` lack the first part.
        """
        recipes = {HEAD: Recipe((f"{self.rows}.weight",))}
        if self.has_bias:
            recipes[BIAS] = Recipe((f"{self.rows}.bias",))
        if not self.dense:
            return recipes
        bare = self.dense.partition(".")[2]
        dense = bare if f"{bare}.weight" in names else self.dense
        recipes[DENSE] = Recipe((f"{dense}.weight",), transform=transpose)
        if self.bias:
            recipes[DENSE_BIAS] = Recipe((f"{dense}.bias",))
        if self.norm:
            recipes[DENSE_NORM] = Recipe((f"{self.norm}.weight",))
        return recipes


OF_DECODERS = ClassLayers()
"""The head of classes of decoder-only families."""


def class_fields(
    settings: HuggingFaceSettings,
    fields: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    layers: ClassLayers,
) -> ModelFields:
    """Returns the fields of a model with a class head; none for any other model.

    Raises:
      InputError: for an unknown problem, or names that do not fit.
    """
    classes = settings.values.get(ARCHITECTURES)
    named = str(classes[0]) if isinstance(classes, list) and classes else ""
    tags = named.endswith("ForTokenClassification")
    layers = layers.of("tokens") if tags else layers
    rows = f"{layers.rows}.weight"
    classifies = tags or named.endswith("ForSequenceClassification")
    if not classifies or rows not in stored:
        return {}
    encodes = fields["architecture"] != "decoder_only"
    if encodes and not (layers.dense or layers.encodes_tokens):
        return {}
    problem = "tokens" if tags else _read_problem(settings, stored[rows])
    names = _read_names(settings, stored[rows])
    alone = encoder_alone(fields["encoder_layers"]) if encodes and tags else {}
    fields = {**layers.fields, **alone, "labels": names, "problem": problem}
    if tags:
        return fields | {"pooling": "last"}
    if layers.dense:
        return fields
    pad = settings.integer(PAD, minimum=-1) if PAD in settings else -1
    return fields | {"unscored_end": None if pad < 0 else pad}


def encoder_alone(layers: int) -> ModelFields:
    """Returns the fields of a model with only the `layers` of an encoder."""
    return {
        "architecture": "decoder_only",
        "bidirectional": True,
        "layers": layers,
        "encoder_layers": 0,
    }


def _read_problem(settings: HuggingFaceSettings, head: StoredTensor) -> ClassProblem:
    """Returns what a head decides: numbers if it has one row, as in transformers."""
    problem = settings.values.get(PROBLEM)
    single = head.shape[:1] == (1,)
    if problem is None:
        return "regression" if single else "single_label"
    if problem not in PROBLEMS or (single and problem != "regression"):
        rows = " of a head with one row" if single else ""
        expected = ["regression"] if single else list(PROBLEMS)
        settings.refuse(PROBLEM, f"{' or '.join(map(repr, expected))}{rows}")
    return PROBLEMS[problem]


def _read_names(settings: HuggingFaceSettings, head: StoredTensor) -> tuple[str, ...]:
    """Returns the name of each class; transformers omits the names of two classes."""
    count = head.shape[0] if len(head.shape) == 2 else 0
    if not count:
        raise InputError(
            f"{head.source} has a head of classes of shape {head.shape}, expected a "
            "row for each class"
        )
    default = {str(number): f"LABEL_{number}" for number in range(count)}
    by_index = settings.value(NAMES, default)
    expected = [str(number) for number in range(count)]
    if not isinstance(by_index, dict) or sorted(by_index) != sorted(expected):
        settings.refuse(NAMES, f"a name for each of the {count} classes from 0")
    names = tuple(by_index[number] for number in expected)
    plain = [name.strip() for name in names if isinstance(name, str)]
    if len(set(plain)) < count or "" in plain:
        raise InputError(
            f"{settings.source} names the classes {shown(list(names))}, expected "
            "different texts that are not empty"
        )
    return names


def with_class_head(
    recipes: dict[str, Recipe],
    config: ModelConfig,
    layers: ClassLayers,
    names: Collection[str],
) -> dict[str, Recipe]:
    """Returns the recipes of a model with a class head, stored or trained."""
    without_head = {
        path: x for path, x in recipes.items() if not path.startswith("head/")
    }
    head = layers.recipes(names)
    if config.tied_head:  # the rows are trained, and the dense layer may be frozen
        head = {p: x for p, x in head.items() if p.startswith("head/transform/")}
    return without_head | head
