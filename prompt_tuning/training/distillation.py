"""Teachers and references: the frozen model, alone or with a context before rows."""

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int64

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.compilation import WeightedJit
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import CONTEXT, Parameters, describe, merge, split
from prompt_tuning.core.quantization.tables import table_at
from prompt_tuning.data.examples.example_groups import ExampleGroups
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.text.tokenizers import encode_prompt
from prompt_tuning.losses.objective import OwnContexts, TeacherContext, TeacherModel
from prompt_tuning.models.build import build_model, frozen_graph
from prompt_tuning.models.decoder_only import DecoderPrefix
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.placement import TEMPLATE
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.settings.prompting import Position, Prompting
from prompt_tuning.sharding import collectives
from prompt_tuning.training.example_teacher import ExampleTeacher, without_bos
from prompt_tuning.training.run_reference import open_run_reference

EMBEDDING = "token_embedder/embedding"

SAMPLED_EXAMPLES = 256
"""Examples checked for BOS at the start; all rows of a file have it or none."""


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A frozen model that may read a fixed text before each row.

    Attributes:
      graph: the model's structure, with a prompt as long as the tokens.
      paths: paths of the frozen parameters that it shares with the student.
      prompt: path of its prompt; None without one.
      tokens: tokens whose embeddings are its prompt.
      shared: if the text follows each row's BOS, the model that reads BOS and the text
        once for all rows, and rows without BOS; else None.
    """

    graph: nnx.GraphDef
    paths: tuple[str, ...]
    prompt: str | None = None
    tokens: tuple[int, ...] = ()
    shared: "Teacher | None" = None

    def parameters(self, student: Parameters) -> Parameters:
        """Returns the student's frozen parameters and the embeddings of the tokens."""
        shared = {path: student[path] for path in self.paths}
        if self.prompt is None:
            return shared
        table = table_at(student, EMBEDDING)
        rows = collectives.embedding_rows(table, jnp.asarray(self.tokens))
        return shared | {self.prompt: rows.astype(jnp.float32)}

    def hidden(self, student: Parameters, batch: Batch) -> Float[Array, "B m D"]:
        """Returns the states that predict the learned tokens, without a gradient.

        Args:
          student: all parameters of the student, plus the result of `read_context`
            unless this batch should compute it.
          batch: a batch without an accumulation axis.
        """
        known = self.prompt is not None and _context(0) in student
        if known and self.shared is not None and batch.segment_ids is None:
            return self.shared.hidden(student, without_bos(batch))
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
        """Reads the tokens once, if all rows share them; see `TeacherModel`."""
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
    """Returns the path of a leaf of a text's `DecoderPrefix`."""
    return f"{CONTEXT}{number}"


def open_teacher(
    context: TeacherContext = None,
    *,
    run: str | None = None,
    model: PromptedModel,
    trained: Collection[str],
    examples: Examples | ExampleGroups,
) -> TeacherModel:
    """Builds the teacher of a context distillation, or a reference.

    The teacher reads BOS, the context, and the row's text. If rows begin with BOS, the
    context is inserted after it in each row. Otherwise, BOS and the context run once
    for the whole batch.

    Args:
      context: text that the teacher reads before each row; `OwnContexts` if each
        example has its own; None for a reference, which reads only the rows.
      run: directory of a run that provides the reference's prompts and adapters; None
        for the frozen model alone.
      model: the student.
      trained: paths of the parameters that the run trains.
      examples: training examples.

    Raises:
      InputError: if the model cannot read the context, the context does not fit in the
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
            "the new tokens, and whose head has the trained rows: leave "
            "TrainedTokens out, or choose another loss"
        )
    if context is None:
        teacher = make_reference(model.config)
        _check_untrained(teacher, trained)
        if run is None:
            return teacher
        return open_run_reference(Path(run), model, _longest_row(model, examples))
    if isinstance(context, OwnContexts):
        own_teacher = _open_example_teacher(context, model, examples)
        _check_untrained(own_teacher, trained)
        return own_teacher
    ids, placement = tokens_before_rows(context, model, examples)
    teacher = make_teacher(model.config, ids, placement)
    if placement == "after_bos":
        behind_bos = make_teacher(model.config, [*model.interface.begin_ids, *ids])
        teacher = dataclasses.replace(teacher, shared=behind_bos)
    _check_untrained(teacher, trained)
    _check_room(len(ids), _longest_row(model, examples), model.config)
    return teacher


def _row_lengths(
    model: PromptedModel, examples: Examples | ExampleGroups
) -> Int64[np.ndarray, "E"]:
    """Counts the tokens of each row, as a model without a prompt reads it."""
    lengths = examples.input_lengths
    if examples.shares_prompt and model.config.architecture == "decoder_only":
        lengths = lengths + examples.target_lengths
    return lengths


def _longest_row(model: PromptedModel, examples: Examples | ExampleGroups) -> int:
    return int(_row_lengths(model, examples).max(initial=0))


def _open_example_teacher(
    own: OwnContexts, model: PromptedModel, examples: Examples | ExampleGroups
) -> ExampleTeacher:
    """Builds the teacher that reads each example's own context before it."""
    config, reason = model.config, None
    if config.architecture != "decoder_only" or config.bidirectional:
        reason = "the model is not a decoder alone"
    elif model.placement is not None or model.weight_storage.by_layer:
        reason = "no device holds all weights"
    if reason is not None or examples.contexts is None:
        raise InputError(
            "ContextDistillation.context_key names a context of each example, but "
            f"{reason or 'these examples have none'}: give one context for all rows"
        )
    encoded = examples.contexts.encode(model.needed_tokenizer())
    begin, size = model.interface.begin_ids, config.vocabulary_size
    contexts = tuple((*begin, *ids) for ids in encoded)
    for number, ids in enumerate(contexts):
        if not ids:
            raise InputError(f"context {number} has no tokens: give a longer text")
        if max(ids) >= size:
            raise InputError(
                f"context {number} has the token {max(ids)}, expected tokens from 0 to "
                f"{size - 1} (the vocabulary): was it prepared for another model?"
            )
    after_bos = begin_with_bos(examples, model)
    lengths = np.array([len(ids) - after_bos for ids in contexts])
    context, row = int(lengths.max()), _longest_row(model, examples)
    if not _has_room(context + row, config):
        # The longest row may follow a shorter context. This reads the data again.
        lengths = lengths[examples.context_numbers]
        rows = _row_lengths(model, examples)
        longest = int(np.argmax(lengths + rows))
        context, row = int(lengths[longest]), int(rows[longest])
    _check_room(context, row, config)
    graph, abstract = frozen_graph(config)
    return ExampleTeacher(graph, abstract, contexts, after_bos, own.cache_bytes)


def _has_room(length: int, config: ModelConfig) -> bool:
    return config.maximum_positions is None or length <= config.maximum_positions


def _check_room(context: int, row: int, config: ModelConfig) -> None:
    """Checks that a context fits in the model together with the longest example."""
    if not _has_room(context + row, config):
        raise InputError(
            f"the context has {context} tokens, and with the longest example "
            f"{context + row}, but the model has {config.maximum_positions} positions"
            f"{config.positions_note}; shorten one of them"
        )


def _check_untrained(
    teacher: Teacher | ExampleTeacher, trained: Collection[str]
) -> None:
    """Checks that a run trains no parameter of the teacher."""
    shared = sorted(set(teacher.paths) & set(trained))
    if shared:
        more = f" and {len(shared) - 1} more" if shared[1:] else ""
        raise InputError(
            f"the run trains {shared[0]}{more}, which the frozen model that it is "
            "compared with uses too: train only a prompt or adapters"
        )


def make_reference(config: ModelConfig) -> Teacher:
    """Builds the frozen model of a config, with nothing before the rows."""
    return Teacher(*frozen_graph(config))


def tokens_before_rows(
    text: str, model: PromptedModel, examples: Examples | ExampleGroups
) -> tuple[list[int], Position]:
    """Encodes a text that a model reads before rows.

    Returns:
      the tokens, and their placement: "after_bos" if rows begin with BOS; else
      "prefix", with BOS before the text in a decoder-only model that expects it.

    Raises:
      InputError: if there is no tokenizer, or only some rows begin with BOS.
    """
    tokenizer = model.needed_tokenizer()
    ids = tokenizer.encode(text)
    if begin_with_bos(examples, model):
        return ids, "after_bos"
    if model.config.architecture == "decoder_only":
        ids = [*encode_prompt(tokenizer, ""), *ids]
    return ids, "prefix"


def make_teacher(
    config: ModelConfig, tokens: list[int], placement: Position = "prefix"
) -> Teacher:
    """Builds the frozen model of a config, with tokens as its prompt.

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
      InputError: if only some do.
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
