"""A teacher for a run: the frozen model behind a text, built and checked."""

from collections.abc import Collection

import jax
import numpy as np

from prompt_tuning.data.examples import Examples
from prompt_tuning.data.tokenizers import given_ids
from prompt_tuning.errors import InputError
from prompt_tuning.losses.distillation import (
    ContextDistillation,
    Distillation,
    Teacher,
)
from prompt_tuning.models.build import build_model
from prompt_tuning.models.config import ModelConfig
from prompt_tuning.models.parameters import describe, split
from prompt_tuning.models.prompting import Prompting
from prompt_tuning.pretrained import PromptedModel
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.modules import SoftPrompt
from prompt_tuning.prompts.placement import TEMPLATE

LOOKED_AT = 256
"""Examples that say whether rows begin with BOS; all rows of a file do, or none."""


def open_distillation(
    settings: ContextDistillation,
    model: PromptedModel,
    trained: Collection[str],
    examples: Examples,
) -> Distillation:
    """The objective of a run, with its teacher.

    The teacher reads BOS, the context, and the row's text. Where rows begin with BOS
    the context is put behind it in each row; where they do not, BOS and context run
    once for the batch.

    Args:
      settings: what was asked for.
      model: the student.
      trained: paths of what the run trains.
      examples: of training.

    Raises:
      InputError: if the context cannot be read by the model, does not fit its
        positions, or the run trains what the teacher is made of.
    """
    if model.prompting.placement == TEMPLATE:
        raise InputError(
            "ContextDistillation compares rows that student and teacher both read, but "
            "a template puts vectors among the tokens: use another Prompting.placement"
        )
    behind_bos = begin_with_bos(examples, model)
    tokenizer = model.needed_tokenizer()
    ids = tokenizer.encode(settings.context)
    if not behind_bos and model.config.architecture == "decoder_only":
        ids = [*given_ids(tokenizer, ""), *ids]
    placement = "after_bos" if behind_bos else "prefix"
    teacher = make_teacher(model.config, ids, placement)
    own = sorted(set(teacher.paths) & set(trained))
    if own:
        raise InputError(
            f"the run trains {own[0]}{f' and {len(own) - 1} more' if own[1:] else ''}, "
            "which the teacher of a ContextDistillation is made of: train a prompt or "
            "adapters alone"
        )
    longest = int(examples.input_lengths.max()) + len(ids)
    positions = model.config.maximum_positions
    if positions is not None and longest > positions:
        raise InputError(
            f"the context has {len(ids)} tokens, and with the longest example "
            f"{longest}, but the model has {positions} positions; shorten one of them"
        )
    return Distillation(teacher)


def make_teacher(
    config: ModelConfig, tokens: list[int], placement: str = "prefix"
) -> Teacher:
    """The frozen model of a config behind some tokens.

    Args:
      config: of the frozen model.
      tokens: that it reads before each row.
      placement: "prefix", or "after_bos" where the rows begin with BOS.

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
    bos = model.config.bos_id
    if bos is None and model.tokenizer is not None:
        bos = model.tokenizer.bos_id
    if model.config.architecture != "decoder_only" or bos is None:
        return False
    count = min(len(examples), LOOKED_AT)
    firsts = {bool(examples[i].inputs[0] == bos) for i in range(count)}
    if len(firsts) > 1:
        raise InputError(
            f"of the first {count} examples some begin with BOS ({bos}) and some do "
            "not: a ContextDistillation puts its context behind BOS in all rows or in "
            "none; write the rows again"
        )
    return firsts.pop()
