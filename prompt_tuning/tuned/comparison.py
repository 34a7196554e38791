"""Compare a tuned prompt with the frozen model alone and with text prompts.

All are measured on the same tokens of the same examples, one after the other, so that
only one set of parameters is in memory at a time.
"""

import dataclasses
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from jaxtyping import Array, Key

from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.data.examples.context_reader import FollowingExamples
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.preference_examples import has_preferences, load_chosen
from prompt_tuning.data.source_reading import has_pairs
from prompt_tuning.evaluation.aligned_examples import align_examples
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.evaluation.results import EvaluationResult
from prompt_tuning.evaluation.retrieval import RetrievalEvaluator
from prompt_tuning.losses.context_distillation import ContextDistillation
from prompt_tuning.losses.contrastive import Contrastive
from prompt_tuning.losses.objective import ObjectiveConfig
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.placement import TEMPLATE
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.settings.evaluation_settings import Evaluation
from prompt_tuning.settings.prompting import Position, Prompting
from prompt_tuning.training.distillation import tokens_before_rows
from prompt_tuning.training.objective_data import (
    held_out_objective,
    held_out_preferences,
    load_learned,
)
from prompt_tuning.tuned.load_tuned import load_tuned, open_with

NO_PROMPT = "no prompt"

ChooseTexts = Callable[[Examples], Sequence[Sequence[int]]]
"""Returns, for each example, token ids that the frozen model reads before it."""


@dataclasses.dataclass(frozen=True)
class PlannedModel:
    """A model to compare, before its examples are read; see `ComparedModel`.

    `name` is the heading of its column, and `read` returns all of its parameters.
    `context_ids` are inserted before each example's input, or `choose_texts` returns
    the token ids to insert; the objective is then not measured. Without `objective`,
    only the cross-entropy is.
    """

    name: str
    model: PromptedModel
    evaluation: Evaluation
    read: Callable[[], Parameters]
    context_ids: Sequence[int] = ()
    objective: ObjectiveConfig | None = None
    choose_texts: "ChooseTexts | None" = None

    def examples(self) -> Examples:
        """Loads all examples of its files."""
        data, interface = self.evaluation.data, self.model.interface
        compares = self.objective is not None and self.objective.compares_answers
        if compares and has_preferences(data):
            return load_chosen(data, interface, context_ids=self.context_ids)
        return load_learned(
            data, interface, self.objective, context_ids=self.context_ids
        )

    def open_retrieval(self, objective: Contrastive) -> "ComparedModel":
        """Opens the evaluation of the model's text vectors."""
        evaluator = RetrievalEvaluator(self.model, self.evaluation, objective)
        return ComparedModel(self.name, self.model, evaluator, self.read)

    def open(self, examples: Examples) -> "ComparedModel":
        """Opens the evaluation on a selection of the examples."""
        if self.choose_texts is not None:
            texts = self.choose_texts(examples)
            begin = self.model.interface.begin_ids
            following = FollowingExamples(examples, texts, begin)
            evaluator = Evaluator(self.model, self.evaluation, examples=following)
            return ComparedModel(self.name, self.model, evaluator, self.read)
        evaluator = Evaluator(
            self.model,
            self.evaluation,
            context_ids=self.context_ids,
            examples=examples,
            objective=held_out_objective(self.objective, self.model, examples),
            # A text would be read by the model and not by the reference.
            preferences=None
            if self.context_ids
            else held_out_preferences(self.objective, self.model, self.evaluation),
        )
        return ComparedModel(self.name, self.model, evaluator, self.read)


@dataclasses.dataclass(frozen=True)
class ComparedModel:
    """A model to compare on held-out examples."""

    name: str
    model: PromptedModel
    evaluator: Evaluator
    read: Callable[[], Parameters]


def open_comparison(
    run: Run,
    evaluation: Evaluation,
    *,
    prompt_file: Path | None = None,
    baseline: bool = False,
    text_prompts: Sequence[str] = (),
    own_texts: Mapping[str, ChooseTexts] = types.MappingProxyType({}),
    loaded: tuple[PromptedModel, Parameters] | None = None,
) -> list[ComparedModel]:
    """Opens and checks all models to compare, the run's model first.

    A first token that one of the models cannot predict counts for none of them; see
    `align_examples`.

    Args:
      run: the run to measure; without prompts and adapters, the frozen model.
      evaluation: settings of the evaluation.
      prompt_file: replaces what the run trained; see `load_tuned`.
      baseline: whether to measure the frozen model without a prompt, too.
      text_prompts: texts before the frozen model's input, each measured separately.
      own_texts: by name, texts that differ by example, before the input of a frozen
        decoder-only model; the run's objective is not measured with them.
      loaded: the run's model and its parameters, if already loaded.

    Raises:
      InputError: if a file cannot be used, or the models would be measured on different
        examples or tokens.
    """
    model, parameters = load_tuned(run, prompt_file) if loaded is None else loaded
    if run.tuning.class_head is not None and (baseline or text_prompts):
        raise InputError(
            "the frozen model has no class head, so there is nothing to compare: leave "
            "out --baseline and --text_prompt, and compare with a run of the head "
            "alone (--method class_head)"
        )
    bare = run.tuning.is_empty and prompt_file is None
    name = NO_PROMPT if bare else "tuned" if prompt_file is None else prompt_file.stem
    planned = [PlannedModel(name, model, evaluation, lambda: parameters)]
    if baseline and not bare:
        planned.append(_frozen(run, _without_tasks(evaluation), NO_PROMPT))
    if text_prompts and isinstance(run.objective, Contrastive):
        raise InputError("vectors of texts are compared without --text_prompt")
    for text in text_prompts:
        planned.append(_with_text(run, _without_tasks(evaluation), text))
    for name, choose in own_texts.items():
        frozen = _frozen(run, _without_tasks(evaluation), name)
        planned.append(dataclasses.replace(frozen, choose_texts=choose))
    if isinstance(run.objective, Contrastive):
        return [one.open_retrieval(run.objective) for one in planned]
    planned = [dataclasses.replace(one, objective=run.objective) for one in planned]
    tables = align_examples([(one.name, one.examples()) for one in planned])
    return [one.open(table) for one, table in zip(planned, tables, strict=True)]


def measure_each(
    systems: list[ComparedModel], *, with_texts: bool = False
) -> Iterator[tuple[str, Evaluator, EvaluationResult]]:
    """Measures each model, then removes it from the list to free its parameters."""
    while systems:
        system = systems.pop(0)
        name, evaluator = system.name, system.evaluator
        result = evaluator.measure(system.read(), with_texts=with_texts)
        del system
        yield name, evaluator, result


def open_frozen(run: Run, placement: Position | None = None) -> PromptedModel:
    """Opens the frozen model alone; with a template placement it reads its rows."""
    prompting = None if placement is None else Prompting(placement=placement)
    return open_with(run, Tuning(prompting=prompting))


def _frozen(run: Run, evaluation: Evaluation, name: str) -> PlannedModel:
    placement = None if evaluation.data.template is None else TEMPLATE
    model = open_frozen(run, placement)
    return PlannedModel(name, model, evaluation, model.read_parameters)


def _with_text(run: Run, evaluation: Evaluation, text: str) -> PlannedModel:
    """Plans the frozen model with a text before each input.

    For pairs, text and prompt are joined before they are encoded; ids of HDF5 rows and
    of conversations follow the ids of the text unchanged. Rows of pairs with a learned
    first token, and rows that a teacher reads, too, also stay unchanged: they follow
    the embeddings of the text.
    """
    data, name = evaluation.data, f"text {shown(text)}"
    if not text:
        raise InputError("--text_prompt is empty; --baseline measures without a text")
    distilled = isinstance(run.objective, ContextDistillation)
    model = open_frozen(run)
    if data.template is None and (has_pairs(data) or distilled):
        examples = load_examples(data, model.interface)
        if distilled or _learn_beginnings(data, examples, model):
            model = _open_after_text(run, model, examples, text)
            return PlannedModel(name, model, evaluation, model.read_parameters)
    if has_pairs(data):
        with_text = dataclasses.replace(data, template=_template(data, text))
        return _frozen(run, dataclasses.replace(evaluation, data=with_text), name)
    ids = model.needed_tokenizer().encode(text)
    return PlannedModel(name, model, evaluation, model.read_parameters, ids)


def _learn_beginnings(
    data: DataSource, examples: Examples, model: PromptedModel
) -> bool:
    """Whether any row is learned from its first token, apart from BOS.

    Encoded after another text, such a row could have different tokens.
    """
    if model.config.architecture == "encoder_decoder":
        return False
    if data.prompt_loss_weight or data.use_token_type_ids is False:
        return True
    return any(
        example.prefix_length <= model.interface.begin_length(example.inputs)
        for example in (examples[index] for index in range(len(examples)))
    )


def _open_after_text(
    run: Run, frozen: PromptedModel, examples: Examples, text: str
) -> PromptedModel:
    """Opens the frozen model with the embeddings of a text as its prompt."""
    ids, placement = tokens_before_rows(text, frozen, examples)

    def embed(key: Key[Array, ""], vocabulary: Vocabulary) -> SoftPrompt:
        return SoftPrompt(
            key,
            vocabulary,
            length=len(ids),
            initializer=lambda key, shape, vocabulary: vocabulary.rows(ids),
        )

    tuning = Tuning(prompt=embed, prompting=Prompting(placement=placement))
    return open_with(run, tuning)


def _template(data: DataSource, text: str) -> str:
    """Returns the data's template, or one of its prompt key, preceded by a text."""
    escaped = text.replace("{", "{{").replace("}", "}}")
    if data.template is not None:
        return escaped + data.template
    return escaped if data.prompt_key is None else escaped + f"{{{data.prompt_key}}}"


def _without_tasks(evaluation: Evaluation) -> Evaluation:
    """Removes the choice of a prompt, for a model without prompts."""
    data = evaluation.data
    if data.task_token is not None:
        raise InputError(
            "each row begins with a token that names its task (DataSource.task_token), "
            "which the frozen model would read as text: measure the run alone, or name "
            f"the task with {how_to_set('DataSource.prompt_id_key', 'KEY')}"
        )
    data = dataclasses.replace(
        data, prompt_id_key=None, prompt_id_names=None, prompt_id_aliases=None
    )
    return dataclasses.replace(evaluation, data=data)
