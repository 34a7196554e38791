"""A tuned prompt beside the frozen model without one, and with a text in its place.

All are measured on the same tokens of the same examples. One after the other, so that
no more than one set of parameters is in memory.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax

from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.data_source import DataSource
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.rows.row_sources import JSONL_SUFFIX, list_files
from prompt_tuning.evaluation.aligned_examples import align_examples
from prompt_tuning.evaluation.evaluation_settings import Evaluation
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.evaluation.results import EvaluationResult
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.placement import TEMPLATE
from prompt_tuning.prompts.prompt_settings import Prompting
from prompt_tuning.tuned.load_tuned import load_tuned

NO_PROMPT = "no prompt"


@dataclasses.dataclass(frozen=True)
class PlannedModel:
    """What is to be measured, before its examples are read; see `System`.

    Attributes:
      name: of its column.
      model: that answers.
      evaluation: what is measured of it.
      read: gives all of its parameters.
      context_ids: ids of a text that is put before what each example is given.
    """

    name: str
    model: PromptedModel
    evaluation: Evaluation
    read: Callable[[], Parameters]
    context_ids: Sequence[int] = ()

    def examples(self) -> Examples:
        """All that its files hold."""
        data = self.evaluation.data
        return load_examples(data, self.model.interface, context_ids=self.context_ids)

    def open(self, examples: Examples) -> "ComparedModel":
        """The system that answers some of them."""
        evaluator = Evaluator(
            self.model,
            self.evaluation,
            context_ids=self.context_ids,
            examples=examples,
        )
        return ComparedModel(self.name, evaluator, self.read)


@dataclasses.dataclass(frozen=True)
class ComparedModel:
    """Something that answers held-out examples.

    Attributes:
      name: of its column.
      evaluator: opened for its model.
      read: gives all of its parameters.
    """

    name: str
    evaluator: Evaluator
    read: Callable[[], Parameters]


def open_comparison(
    run: Run,
    evaluation: Evaluation,
    *,
    prompt_file: Path | None = None,
    baseline: bool = False,
    text_prompts: Sequence[str] = (),
) -> list[ComparedModel]:
    """Opens and checks what is measured, the run's own model first.

    A first token that one of them has nothing to predict from counts in none; see
    `align_examples`.

    Args:
      run: with neither prompts nor adapters, the frozen model is its own.
      evaluation: what is measured.
      prompt_file: what stands in place of what the run trained; see `load_tuned`.
      baseline: whether the frozen model is measured without a prompt too.
      text_prompts: texts that are put before what the frozen model is given, each for
        a measurement of its own.

    Raises:
      InputError: if something cannot be used, a text leaves other examples out, or
        other tokens would count.
    """
    model, parameters = load_tuned(run, prompt_file)
    bare = run.tuning.is_empty and prompt_file is None
    name = NO_PROMPT if bare else "tuned" if prompt_file is None else prompt_file.stem
    opened = [PlannedModel(name, model, evaluation, lambda: parameters)]
    if baseline and not bare:
        opened.append(_frozen(run, _without_tasks(evaluation), NO_PROMPT))
    for text in text_prompts:
        opened.append(_with_text(run, _without_tasks(evaluation), text))
    tables = align_examples([(one.name, one.examples()) for one in opened])
    return [one.open(table) for one, table in zip(opened, tables, strict=True)]


def measure_each(
    systems: list[ComparedModel],
) -> Iterator[tuple[str, Evaluator, EvaluationResult]]:
    """Measures each in turn, takes it off the list, and lets go of its parameters."""
    while systems:
        system = systems.pop(0)
        name, evaluator = system.name, system.evaluator
        findings = evaluator.measure(system.read())
        del system
        yield name, evaluator, findings


def _open_frozen(run: Run, placement: str | None) -> PromptedModel:
    """The frozen model alone, reading rows as a placement says."""
    prompting = None if placement is None else Prompting(placement=placement)
    tuning = Tuning(prompting=prompting)
    key = jax.random.key(run.seed)
    return open_pretrained(run.model, tuning, key=key, mesh=run.mesh)


def _frozen(run: Run, evaluation: Evaluation, name: str) -> PlannedModel:
    placement = None if evaluation.data.template is None else TEMPLATE
    model = _open_frozen(run, placement)
    return PlannedModel(name, model, evaluation, model.read_parameters)


def _with_text(run: Run, evaluation: Evaluation, text: str) -> PlannedModel:
    """The frozen model with a text before each given one.

    Texts are joined before they are encoded; ids of HDF5 rows stay as they are, behind
    those of the text.
    """
    data, name = evaluation.data, f"text {text!r}"
    if not text:
        raise InputError("--text_prompt is empty; --baseline measures without a text")
    if list_files(data.files)[0].suffix == JSONL_SUFFIX:
        with_text = dataclasses.replace(data, template=_template(data, text))
        return _frozen(run, dataclasses.replace(evaluation, data=with_text), name)
    model = _open_frozen(run, None)
    ids = model.needed_tokenizer().encode(text)
    return PlannedModel(name, model, evaluation, model.read_parameters, ids)


def _template(data: DataSource, text: str) -> str:
    """The data's template, or the text under its key, behind another text."""
    before = text.replace("{", "{{").replace("}", "}}")
    if data.template is not None:
        return before + data.template
    return before if data.prompt_key is None else before + f"{{{data.prompt_key}}}"


def _without_tasks(evaluation: Evaluation) -> Evaluation:
    """For a model that has no prompts to choose from.

    Raises:
      InputError: if the rows themselves say their tasks.
    """
    data = evaluation.data
    if data.task_token is not None:
        raise InputError(
            "each row begins with a token that says its task (DataSource.task_token), "
            "which the frozen model would read as text: measure the run alone, or say "
            "the task by DataSource.prompt_id_key"
        )
    data = dataclasses.replace(data, prompt_id_key=None, prompt_id_names=None)
    return dataclasses.replace(evaluation, data=data)
