"""Open examples and held-out measures as a training objective needs them."""

import functools
from collections.abc import Sequence

from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.metric_directions import AUTO
from prompt_tuning.core.model_choices import UNRANKED
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.examples.context_column import ContextColumn
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.preference_examples import (
    PreferenceExamples,
    has_preferences,
    load_preferences,
)
from prompt_tuning.data.examples.rated_examples import has_ratings, load_ratings
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.evaluation.preference_measure import PreferenceMeasure
from prompt_tuning.evaluation.retrieval import RetrievalEvaluator
from prompt_tuning.losses.context_distillation import ContextDistillation
from prompt_tuning.losses.contrastive import Contrastive
from prompt_tuning.losses.objective import HeldOutObjective, ObjectiveConfig
from prompt_tuning.losses.preference import AnswerObjective, StoredReference
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.settings.evaluation_settings import Evaluation
from prompt_tuning.training.distillation import open_teacher
from prompt_tuning.training.stored_reference import with_stored_reference


def open_evaluator_of(
    run: Run, model: PromptedModel, evaluation: Evaluation
) -> Evaluator:
    """Opens the evaluation of a run; see `open_evaluator`.

    Raises:
      InputError: also if the metric of the best step depends on the problem of the
        run's head, and only the checkpoint knows that.
    """
    head, problem = run.tuning.class_head, model.config.problem
    known = head is None or head.problem or not head.labels
    if run.keep_best == AUTO and not known and problem in UNRANKED:
        raise InputError(
            f"the checkpoint has a head for the problem {problem!r}, and "
            "ClassHead.problem is None, so the metric of the best step is not known: "
            f"give {how_to_set('ClassHead.problem', problem)}"
        )
    return open_evaluator(run.objective, model, evaluation)


def load_learned(
    source: DataSource,
    model: ModelInterface,
    objective: ObjectiveConfig | None,
    *,
    context_ids: Sequence[int] = (),
) -> Examples:
    """Opens examples, with the contexts that a distillation reads before them."""
    contexts = context_column(objective)
    return load_examples(source, model, context_ids=context_ids, contexts=contexts)


def context_column(objective: ObjectiveConfig | None) -> ContextColumn | None:
    """Returns the column of the examples' contexts, if the objective reads one.

    Raises:
      InputError: if its table of contexts cannot be read.
    """
    if not isinstance(objective, ContextDistillation) or objective.context_key is None:
        return None
    return ContextColumn(objective.context_key, objective.contexts)


def open_evaluator(
    objective: ObjectiveConfig | None,
    model: PromptedModel,
    evaluation: Evaluation,
    examples: Examples | None = None,
) -> Evaluator:
    """Opens an evaluation, which also measures the training objective if possible."""
    if isinstance(objective, Contrastive):
        return RetrievalEvaluator(model, evaluation, objective)
    preferences = held_out_preferences(objective, model, evaluation)
    if examples is None and preferences is not None:
        compared = preferences.examples
        examples = compared.chosen if isinstance(compared, PreferenceExamples) else None
    if examples is None:
        examples = load_learned(evaluation.data, model.interface, objective)
    return Evaluator(
        model,
        evaluation,
        examples=examples,
        objective=held_out_objective(objective, model, examples),
        preferences=preferences,
    )


def held_out_objective(
    objective: ObjectiveConfig | None, model: PromptedModel, examples: Examples
) -> HeldOutObjective | None:
    """Builds an objective for held-out examples; None if it is not measured on them."""
    if objective is None or objective.judges_answers:
        return None
    prepared = objective.prepare(
        functools.partial(open_teacher, model=model, trained=(), examples=examples)
    )
    return prepared if isinstance(prepared, HeldOutObjective) else None


def held_out_preferences(
    objective: ObjectiveConfig | None, model: PromptedModel, evaluation: Evaluation
) -> PreferenceMeasure | None:
    """Opens held-out answers for an objective that compares or rates them.

    Returns:
      None for other objectives, and for data that has only completions.
    """
    if objective is None or not objective.judges_answers:
        return None
    data = evaluation.data
    if objective.compares_answers and has_preferences(data):
        examples = load_preferences(data, model.interface, share=True)
    elif objective.rates_answers and has_ratings(data):
        examples = load_ratings(data, model.interface)
    else:
        return None
    prepared = objective.prepare(
        functools.partial(open_teacher, model=model, trained=(), examples=examples)
    )
    assert isinstance(prepared, AnswerObjective)
    reference, precompute = getattr(prepared, "reference", None), None
    if isinstance(reference, StoredReference):
        precompute = functools.partial(
            with_stored_reference, reference.model, examples, model, data
        )
    return PreferenceMeasure(model, data, examples, prepared, precompute)
