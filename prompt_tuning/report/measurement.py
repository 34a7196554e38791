"""Measure a run's model for a page: comparison, samples, and the prompt itself."""

import dataclasses
import functools
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from jaxtyping import Float

from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_choices import Pooling
from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.core.quantization.tables import wide_table
from prompt_tuning.data.examples.example_groups import ExampleGroups
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.source_reading import files_of
from prompt_tuning.evaluation import example_description, retrieval
from prompt_tuning.evaluation.results import EvaluationResult
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.prompts.tools import inspection
from prompt_tuning.report.prompt_effects import PromptEffects, measure_effects
from prompt_tuning.report.token_marks import TokenMarks
from prompt_tuning.settings.evaluation_settings import Evaluation
from prompt_tuning.tuned.adapter_conversion import source_of_model, write_adapters
from prompt_tuning.tuned.comparison import NO_PROMPT, measure_each, open_comparison
from prompt_tuning.tuned.load_tuned import load_tuned

NEAREST = 5
"""Number of nearest tokens per prompt vector."""
MAXIMUM_COUNTED = 2**28
"""Size in bytes of training files above which their examples are not counted."""

Prediction = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class MeasuredVectors:
    """Prompt vectors at the input, compared with token embeddings.

    `nearest` has the text and cosine of each vector's nearest tokens, `similarities`
    the cosines between the vectors.
    """

    norms: Float[np.ndarray, "P"]
    nearest: Sequence[Sequence[tuple[str, float]]]
    similarities: Float[np.ndarray, "P P"]


@dataclasses.dataclass(frozen=True)
class PromptCard:
    """The trained parameters.

    Attributes:
      leaves: shape and norm of each trained array, by path.
      vectors: input vectors, by stack and task.
      no_vectors: why there are none; empty if there are.
      token_norms: norms of the token embeddings: 5th percentile, median, 95th.
      peft_bytes: size of its PEFT file, or why there is none.
      effects: effect of each vector on held-out examples, or why it is unknown.
    """

    leaves: Mapping[str, tuple[tuple[int, ...], float]]
    vectors: Mapping[str, MeasuredVectors]
    no_vectors: str
    token_norms: tuple[float, float, float]
    peft_bytes: int | str
    effects: PromptEffects | str


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The measurements of a run for its page.

    The tuned system is the first of `results`, which are on the same examples;
    `seconds` tells how long each took. `predictions` has a line for each system and
    example; see `prediction_lines`. `no_predictions` and `not_compared` (with no
    prompt) tell why there is none; empty if there is. `left_out` describes truncated
    and skipped examples, and those with nothing to learn; `parameters` counts those of
    the frozen model. Without a tokenizer, `marks` is None.
    """

    results: Mapping[str, EvaluationResult]
    seconds: Mapping[str, float]
    predictions: Sequence[Prediction]
    no_predictions: str
    examples: str
    left_out: Sequence[str]
    evaluation: Evaluation
    vocabulary_size: int
    parameters: int
    card: PromptCard
    restored: str
    marks: TokenMarks | None = None
    not_compared: str = ""

    @property
    def tuned(self) -> EvaluationResult:
        """Result of the tuned model."""
        return next(iter(self.results.values()))

    @property
    def bare(self) -> EvaluationResult | None:
        """Result of the frozen model alone; None if the run trained nothing."""
        return self.results.get(NO_PROMPT) if len(self.results) > 1 else None


def measure_run(
    run: Run,
    *,
    text_prompts: Sequence[str] = (),
    loaded: tuple[PromptedModel, Parameters] | None = None,
) -> Measurement | None:
    """Measures a run's best checkpoint and the frozen model on its held-out data.

    `prompt-tuning evaluate --baseline` prints the same numbers. Returns None if the run
    has no held-out data.

    Raises:
      InputError: if the run has no checkpoint, or cannot be opened.
    """
    evaluation = run.evaluation
    if evaluation is None:
        return None
    # The frozen model has no class head to compare with.
    compares, not_compared = run.tuning.class_head is None, ""
    if loaded is None:
        loaded = load_tuned(run)
    open_systems = functools.partial(
        open_comparison, run, evaluation, text_prompts=text_prompts, loaded=loaded
    )
    try:
        systems = open_systems(baseline=compares)
    except InputError as problem:
        if not compares:
            raise
        # E.g. rows that are cut at other tokens. A problem of the run itself is raised
        # again.
        systems, not_compared = open_systems(baseline=False), str(problem)
    model, first = systems[0].model, systems[0].evaluator
    pooling = None if run.objective is None else run.objective.embeds
    effects = "not measured, because vectors of texts are compared"
    if pooling is None:
        tuned = systems[0].read()
        effects = measure_effects(model, tuned, first.examples, evaluation.data)
    card = _describe_prompt(run, model, systems[0].read(), effects)
    left_out = _left_out("held-out", first.examples)
    left_out += _training_left_out(run, model, pooling)
    results, seconds, lines = {}, {}, []
    no_predictions = _no_predictions(model, pooling)
    started = time.monotonic()
    texts = not no_predictions
    for name, evaluator, result in measure_each(systems, with_texts=texts):
        results[name], seconds[name] = result, time.monotonic() - started
        if texts:
            lines += map(json.loads, evaluator.predictions(name, result))
        started = time.monotonic()
    return Measurement(
        results,
        seconds,
        lines,
        no_predictions,
        example_description.describe_examples(first, evaluation.resamples),
        left_out,
        evaluation,
        model.config.vocabulary_size,
        _count_frozen(model),
        card,
        model.plan.report(),
        _token_marks(model, first.examples, results),
        not_compared,
    )


def _no_predictions(model: PromptedModel, pooling: Pooling | None) -> str:
    """Returns why there are no predictions; empty if there are."""
    if pooling is not None:
        return "Vectors of texts are compared, which are no answers."
    if model.tokenizer is None:
        return "The model has no tokenizer to show texts with."
    return ""


def _token_marks(
    model: PromptedModel,
    examples: Examples | ExampleGroups,
    results: Mapping[str, EvaluationResult],
) -> TokenMarks | None:
    """Returns a reader of the samples' tokens, if the model has a tokenizer."""
    tuned, *others = (result.tokens for result in results.values())
    if isinstance(examples, ExampleGroups) or model.tokenizer is None or tuned is None:
        return None
    bare = others[0] if NO_PROMPT in results and others else None
    return TokenMarks(examples, model.tokenizer, tuned, bare)


def _count_frozen(model: PromptedModel) -> int:
    plan = model.plan
    return sum(
        int(np.prod(leaf.shape))
        for path, leaf in plan.abstract.items()
        if path not in plan.fresh
    )


def _training_left_out(
    run: Run, model: PromptedModel, pooling: Pooling | None
) -> list[str]:
    """Counts training examples that were left out or cut, unless files are large."""
    if run.data is None:
        return []
    size = sum(path.stat().st_size for path in files_of(run.data) if path.is_file())
    if size > MAXIMUM_COUNTED:
        return []
    if pooling is not None:
        return _left_out("training", retrieval.open_texts(model, run.data, pooling))
    return _left_out("training", load_examples(run.data, model.interface))


def _left_out(kind: str, examples: Examples | ExampleGroups) -> list[str]:
    counts = {
        "are truncated because they are too long": examples.truncated,
        "are left out because they are too long": examples.skipped,
        "are left out because nothing in them is learned": examples.unlearned,
        "are left out because they have no completion": examples.without_completion,
    }
    total = len(examples) + examples.skipped + examples.unlearned
    total += examples.without_completion
    return [
        f"{count:,} of {total:,} {kind} examples {what}"
        for what, count in counts.items()
        if count
    ]


def _describe_prompt(
    run: Run, model: PromptedModel, parameters: Parameters, effects: PromptEffects | str
) -> PromptCard:
    """Describes the trained parameters, and compares prompt vectors with tokens."""
    leaves: Any = model.weight_storage.abstract_streamed() | parameters
    tuned = merge(model.graph, leaves)
    assert isinstance(tuned, LanguageModel)
    trained = {p: x for p, x in parameters.items() if p in model.plan.fresh}
    try:
        prompts, problem = inspection.input_vectors(tuned.prompts()), ""
    except InputError as error:
        prompts, problem = {}, str(error)
    if not prompts and not problem:
        problem = "no vectors among the input were trained"
    table, embeddings = "token_embedder/embedding", np.zeros((0, 1))
    if table in parameters:
        embeddings = wide_table(parameters, table)
    norms = np.linalg.norm(embeddings, axis=1)
    quantiles = np.quantile(norms, (0.05, 0.5, 0.95)) if len(norms) else np.zeros(3)
    return PromptCard(
        {
            path: (tuple(leaf.shape), float(np.linalg.norm(np.asarray(leaf))))
            for path, leaf in trained.items()
        },
        {name: _measure_vectors(model, x, embeddings) for name, x in prompts.items()}
        if len(norms)
        else {},
        problem,
        (float(quantiles[0]), float(quantiles[1]), float(quantiles[2])),
        _peft_bytes(run, model, parameters),
        effects,
    )


def _measure_vectors(
    model: PromptedModel,
    vectors: Float[np.ndarray, "P D"],
    embeddings: Float[np.ndarray, "V D"],
) -> MeasuredVectors:
    vectors = np.asarray(vectors, np.float32)
    norms = np.linalg.norm(vectors, axis=1)
    directions = vectors / np.maximum(norms, 1e-12)[:, None]
    count = min(NEAREST, len(embeddings))
    nearest = [
        [
            (inspection.shown_token(model.tokenizer, token), cosine)
            for token, cosine in zip(each.tokens, each.similarities, strict=True)
        ]
        for each in inspection.nearest_tokens(vectors, embeddings, count)
    ]
    return MeasuredVectors(norms, nearest, directions @ directions.T)


def _peft_bytes(run: Run, model: PromptedModel, parameters: Parameters) -> int | str:
    """Returns the size of the trained parameters as PEFT stores them."""
    try:
        source = source_of_model("the run", model, parameters, run.model.checkpoint)
        with TemporaryDirectory() as folder:
            target = Path(folder) / "adapter"
            write_adapters(source, target, "peft")
            return sum(x.stat().st_size for x in target.glob("*.safetensors"))
    except InputError as problem:
        return str(problem)
