"""Context distillation: builds a teacher, the frozen model with a context before it."""

import dataclasses
from collections.abc import Collection
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters, describe, merge, split
from prompt_tuning.data.examples.class_examples import ClassExamples
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.text.tokenizers import encode_prompt
from prompt_tuning.evaluation.evaluation_settings import Evaluation
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.losses.objective import HeldOutObjective, ObjectiveConfig
from prompt_tuning.models.build import build_model
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
    """A frozen model that reads some tokens before each row.

    Attributes:
      graph: the model's structure, with a prompt as long as the tokens.
      paths: paths of the frozen parameters that it shares with the student.
      prompt: path of its prompt.
      tokens: tokens whose embeddings are its prompt.
    """

    graph: nnx.GraphDef
    paths: tuple[str, ...]
    prompt: str
    tokens: tuple[int, ...]

    def parameters(self, student: Parameters) -> Parameters:
        """The student's frozen parameters, and the embeddings of the tokens."""
        shared = {path: student[path] for path in self.paths}
        rows = collectives.embedding_rows(student[EMBEDDING], jnp.asarray(self.tokens))
        return shared | {self.prompt: rows.astype(jnp.float32)}

    def hidden(self, student: Parameters, batch: Batch) -> Float[Array, "B m D"]:
        """The hidden states that predict the learned tokens, without a gradient.

        Args:
          student: all parameters of the student.
          batch: a batch without an accumulation axis.
        """
        model = cast(LanguageModel, merge(self.graph, self.parameters(student)))
        # Rows may choose among the student's prompts; the teacher has one context.
        hidden = model.hidden(dataclasses.replace(batch, prompt_ids=None))
        return jax.lax.stop_gradient(hidden)


def open_teacher(
    context: str,
    model: PromptedModel,
    trained: Collection[str],
    examples: Examples | ClassExamples,
) -> Teacher:
    """Builds the teacher of a run that distills a context.

    The teacher reads BOS, the context, and the row's text. If rows begin with BOS, the
    context is inserted after it in each row. If they do not, BOS and the context run
    once for the whole batch.

    Args:
      context: text that the teacher reads before each row.
      model: the student.
      trained: paths of the parameters that the run trains.
      examples: training examples.

    Raises:
      InputError: if the model cannot read the context, the context does not fit the
        model's positions, or the run trains parameters of the teacher.
    """
    if model.prompting.placement == TEMPLATE:
        raise InputError(
            "ContextDistillation compares rows that both student and teacher read, but "
            "a template puts vectors among the tokens: use another Prompting.placement"
        )
    assert isinstance(examples, Examples)  # a distillation has no candidate labels
    ids, placement = tokens_before_rows(context, model, examples)
    teacher = make_teacher(model.config, ids, placement)
    shared = sorted(set(teacher.paths) & set(trained))
    if shared:
        more = f" and {len(shared) - 1} more" if shared[1:] else ""
        raise InputError(
            f"the run trains {shared[0]}{more}, "
            "which the teacher of a ContextDistillation uses too: train only a prompt "
            "or adapters"
        )
    longest = int(examples.input_lengths.max()) + len(ids)
    positions = model.config.maximum_positions
    if positions is not None and longest > positions:
        raise InputError(
            f"the context has {len(ids)} tokens, and with the longest example "
            f"{longest}, but the model has {positions} positions"
            f"{model.config.positions_note}; shorten one of them"
        )
    return teacher


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
    if examples is None:
        examples = load_examples(evaluation.data, model.interface)
    return Evaluator(
        model,
        evaluation,
        examples=examples,
        objective=held_out_objective(objective, model, examples),
    )


def held_out_objective(
    objective: ObjectiveConfig | None, model: PromptedModel, examples: Examples
) -> HeldOutObjective | None:
    """Builds an objective for held-out examples; None if it is not measured on them."""
    if objective is None:
        return None
    prepared = objective.prepare(
        lambda context: open_teacher(context, model, (), examples)
    )
    return prepared if isinstance(prepared, HeldOutObjective) else None


def tokens_before_rows(
    text: str, model: PromptedModel, examples: Examples
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


def begin_with_bos(examples: Examples, model: PromptedModel) -> bool:
    """Whether rows of a decoder-only model begin with BOS.

    Raises:
      InputError: if some do and some do not.
    """
    begin = model.interface.begin_ids
    if model.config.architecture != "decoder_only" or not begin:
        return False
    count = min(len(examples), SAMPLED_EXAMPLES)
    lengths = {model.interface.begin_length(examples[i].inputs) for i in range(count)}
    if len(lengths) > 1:
        raise InputError(
            f"of the first {count} examples some begin with BOS ({begin[0]}) and some "
            "do not: a text is put after BOS in all rows or in none; prepare the rows "
            "again"
        )
    if lengths != {0}:
        model.interface.check_single_begin("a text before all rows")
    return lengths != {0}
