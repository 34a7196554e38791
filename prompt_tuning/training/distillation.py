"""Teachers and references: the frozen model, alone or with a context before rows."""

import dataclasses
from collections.abc import Collection
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.compilation import WeightedJit
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import CONTEXT, Parameters, describe, merge, split
from prompt_tuning.data.examples.example_groups import ExampleGroups
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.examples.preference_examples import (
    PreferenceExamples,
    has_preferences,
    load_preferences,
)
from prompt_tuning.data.examples.rated_examples import has_ratings, load_ratings
from prompt_tuning.data.text.tokenizers import encode_prompt
from prompt_tuning.evaluation.evaluation_settings import Evaluation
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.evaluation.preference_measure import PreferenceMeasure
from prompt_tuning.losses.objective import HeldOutObjective, ObjectiveConfig
from prompt_tuning.losses.preference import AnswerObjective
from prompt_tuning.models.build import build_model
from prompt_tuning.models.decoder_only import DecoderPrefix
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.placement import TEMPLATE
from prompt_tuning.prompts.prompt_settings import Prompting
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.sharding import collectives

EMBEDDING = "token_embedder/embedding"

SAMPLED_EXAMPLES = 256
"""Examples that are checked for BOS at the start; all rows of a file have it or
none."""


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A frozen model that reads some tokens before each row, or none.

    Attributes:
      graph: the model's structure, with a prompt as long as the tokens.
      paths: paths of the frozen parameters that it shares with the student.
      prompt: path of its prompt; None without one.
      tokens: tokens whose embeddings are its prompt.
      shared: for a text after the BOS of each row, the model that reads BOS and the
        text once for all rows, and rows without BOS; None otherwise.
    """

    graph: nnx.GraphDef
    paths: tuple[str, ...]
    prompt: str | None = None
    tokens: tuple[int, ...] = ()
    shared: "Teacher | None" = None

    def parameters(self, student: Parameters) -> Parameters:
        """The student's frozen parameters, and the embeddings of the tokens."""
        shared = {path: student[path] for path in self.paths}
        if self.prompt is None:
            return shared
        rows = collectives.embedding_rows(student[EMBEDDING], jnp.asarray(self.tokens))
        return shared | {self.prompt: rows.astype(jnp.float32)}

    def hidden(self, student: Parameters, batch: Batch) -> Float[Array, "B m D"]:
        """The hidden states that predict the learned tokens, without a gradient.

        Args:
          student: all parameters of the student, with the result of `read_context`
            unless it is to be computed for this batch.
          batch: a batch without an accumulation axis.
        """
        known = self.prompt is not None and _context(0) in student
        if known and self.shared is not None and batch.segment_ids is None:
            return self.shared.hidden(student, _without_bos(batch))
        model = cast(LanguageModel, merge(self.graph, self.parameters(student)))
        prefix = None
        if known and self.shared is None:
            form = jax.tree.structure(jax.eval_shape(model.prefix))
            leaves = [student[_context(i)] for i in range(form.num_leaves)]
            prefix = jax.tree.unflatten(form, leaves)
        # Rows may choose among the student's prompts; the teacher has one context.
        alone = dataclasses.replace(batch, prompt_ids=None)
        return jax.lax.stop_gradient(model.hidden(alone, prefix=prefix))

    def read_context(self, student: Parameters) -> Parameters:
        """Reads the tokens once, where all rows share them; see `TeacherModel`."""
        if self.prompt is None:
            return {}
        if self.shared is not None:
            return self.shared.read_context(student)

        def read(parameters: Parameters) -> DecoderPrefix | None:
            prefix = cast(LanguageModel, merge(self.graph, parameters)).prefix()
            return prefix if isinstance(prefix, DecoderPrefix) else None

        prefix = WeightedJit(read)(self.parameters(student))
        return {_context(i): leaf for i, leaf in enumerate(jax.tree.leaves(prefix))}


def _context(number: int) -> str:
    """Returns the path of a leaf of the `DecoderPrefix` of a text."""
    return f"{CONTEXT}{number}"


def _without_bos(batch: Batch) -> Batch:
    """Returns rows that are not packed without their first token."""
    return dataclasses.replace(
        batch,
        tokens=batch.tokens[:, 1:],
        targets=batch.targets[:, 1:],
        lengths=jnp.maximum(batch.lengths - 1, 0),
        prefix_lengths=jnp.maximum(batch.prefix_lengths - 1, 0),
        # BOS is never learned: a 0 belongs to no learned target.
        loss_positions=jnp.maximum(batch.loss_positions - 1, 0),
    )


def open_teacher(
    context: str | None,
    model: PromptedModel,
    trained: Collection[str],
    examples: Examples | ExampleGroups,
) -> Teacher:
    """Builds the teacher of a run that distills a context, or a reference.

    The teacher reads BOS, the context, and the row's text. If rows begin with BOS, the
    context is inserted after it in each row. If they do not, BOS and the context run
    once for the whole batch.

    Args:
      context: text that the teacher reads before each row; None for a reference, which
        reads the rows alone.
      model: the student.
      trained: paths of the parameters that the run trains.
      examples: training examples.

    Raises:
      InputError: if the model cannot read the context, the context does not fit the
        model's positions, or the run trains parameters of the teacher.
    """
    if model.prompting.placement == TEMPLATE:
        raise InputError(
            "the frozen model reads the same rows as the trained one, but a template "
            "puts vectors among the tokens: use another Prompting.placement"
        )
    if model.prompts.tokens is not None:
        raise InputError(
            "this loss compares the model with the frozen one, which has no rows for "
            "the new tokens, and whose head has the trained rows: leave TrainedTokens "
            "out (--add_tokens), or choose another loss"
        )
    if context is None:
        teacher = make_reference(model.config)
        _check_untrained(teacher, trained)
        return teacher
    ids, placement = tokens_before_rows(context, model, examples)
    teacher = make_teacher(model.config, ids, placement)
    if placement == "after_bos":
        behind_bos = make_teacher(model.config, [*model.interface.begin_ids, *ids])
        teacher = dataclasses.replace(teacher, shared=behind_bos)
    _check_untrained(teacher, trained)
    longest = int(examples.input_lengths.max()) + len(ids)
    positions = model.config.maximum_positions
    if positions is not None and longest > positions:
        raise InputError(
            f"the context has {len(ids)} tokens, and with the longest example "
            f"{longest}, but the model has {positions} positions"
            f"{model.config.positions_note}; shorten one of them"
        )
    return teacher


def _check_untrained(teacher: Teacher, trained: Collection[str]) -> None:
    """Refuses to train what the frozen model has, too.

    Raises:
      InputError: if a run trains some of it.
    """
    shared = sorted(set(teacher.paths) & set(trained))
    if shared:
        more = f" and {len(shared) - 1} more" if shared[1:] else ""
        raise InputError(
            f"the run trains {shared[0]}{more}, which the frozen model that it is "
            "compared with uses too: train only a prompt or adapters"
        )


def make_reference(config: ModelConfig) -> Teacher:
    """Builds the frozen model of a config without anything before the rows."""
    graph, abstract = describe(
        lambda key: split(build_model(key, config)), jax.random.key(0)
    )
    return Teacher(graph, tuple(abstract))


def open_evaluator(
    objective: ObjectiveConfig | None,
    model: PromptedModel,
    evaluation: Evaluation,
    examples: Examples | None = None,
) -> Evaluator:
    """Opens an evaluation that measures a training objective if possible.

    Args:
      objective: objective of the run that the model belongs to.
      model: evaluated model.
      evaluation: settings of the evaluation.
      examples: examples to use instead of all examples of the files.

    Raises:
      InputError: if the held-out data cannot be used.
    """
    preferences = held_out_preferences(objective, model, evaluation)
    if examples is None and preferences is not None:
        compared = preferences.examples
        examples = compared.chosen if isinstance(compared, PreferenceExamples) else None
    if examples is None:
        examples = load_examples(evaluation.data, model.interface)
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
        lambda context: open_teacher(context, model, (), examples)
    )
    return prepared if isinstance(prepared, HeldOutObjective) else None


def held_out_preferences(
    objective: ObjectiveConfig | None, model: PromptedModel, evaluation: Evaluation
) -> PreferenceMeasure | None:
    """Opens held-out answers, if an objective compares or rates them.

    Returns:
      None also if the data has completions alone.

    Raises:
      InputError: if the answers cannot be used.
    """
    if objective is None or not objective.judges_answers:
        return None
    if getattr(objective, "reference", None) == "precomputed":
        # Held-out rows are read too seldom to store what the reference makes of them.
        in_step: Any = dataclasses.replace(cast(Any, objective), reference="in_step")
        objective = cast(ObjectiveConfig, in_step)
    data = evaluation.data
    if objective.compares_answers and has_preferences(data):
        examples = load_preferences(data, model.interface)
    elif objective.rates_answers and has_ratings(data):
        examples = load_ratings(data, model.interface)
    else:
        return None
    prepared = objective.prepare(
        lambda context: open_teacher(context, model, (), examples)
    )
    assert isinstance(prepared, AnswerObjective)
    return PreferenceMeasure(model, data, examples, prepared)


def tokens_before_rows(
    text: str, model: PromptedModel, examples: Examples | ExampleGroups
) -> tuple[list[int], str]:
    """Encodes a text that a model reads before rows.

    Returns:
      The tokens, and their placement: "after_bos" if rows begin with BOS; else
      "prefix", with BOS before the text in a decoder-only model that expects it.

    Raises:
      InputError: if there is no tokenizer, or some rows begin with BOS and some do not.
    """
    tokenizer = model.needed_tokenizer()
    ids = tokenizer.encode(text)
    if begin_with_bos(examples, model):
        return ids, "after_bos"
    if model.config.architecture == "decoder_only":
        ids = [*encode_prompt(tokenizer, ""), *ids]
    return ids, "prefix"


def make_teacher(
    config: ModelConfig, tokens: list[int], placement: str = "prefix"
) -> Teacher:
    """Builds the frozen model of a config with some tokens as its prompt.

    Args:
      config: config of the frozen model.
      tokens: tokens that it reads before each row.
      placement: "prefix", or "after_bos" if the rows begin with BOS.

    Raises:
      InputError: if there are no tokens.
    """
    vocabulary = Vocabulary(np.zeros((config.vocabulary_size, config.width), "f4"))

    def build(key):
        prompt = SoftPrompt(key, vocabulary, length=len(tokens))
        return split(build_model(key, config, prompt, Prompting(placement=placement)))

    graph, abstract = describe(build, jax.random.key(0))
    (prompt,) = (path for path in abstract if path.endswith("/prompt/prompt"))
    paths = tuple(path for path in abstract if path != prompt)
    return Teacher(graph, paths, prompt, tuple(tokens))


def begin_with_bos(examples: Examples | ExampleGroups, model: PromptedModel) -> bool:
    """Whether rows of a decoder-only model begin with BOS.

    Raises:
      InputError: if some do and some do not.
    """
    begin = model.interface.begin_ids
    if model.config.architecture != "decoder_only" or not begin:
        return False
    count = min(len(examples), SAMPLED_EXAMPLES)
    rows = [examples[i] for i in range(count)]
    first = [row[0] if isinstance(row, list) else row for row in rows]
    lengths = {model.interface.begin_length(row.inputs) for row in first}
    if len(lengths) > 1:
        raise InputError(
            f"of the first {count} examples some begin with BOS ({begin[0]}) and some "
            "do not: a text is put after BOS in all rows or in none; prepare the rows "
            "again"
        )
    if lengths != {0}:
        model.interface.check_single_begin("a text before all rows")
    return lengths != {0}
