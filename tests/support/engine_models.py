"""One small frozen model with adapters of all kinds, as an engine serves them."""

import dataclasses
import functools
from unittest import mock

import jax
import numpy as np

from prompt_tuning.checkpoints.restore_plan import RestorePlan
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters, split
from prompt_tuning.models.build import build_model
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.tuning import PromptPair, stack_shape
from prompt_tuning.prompts.deep import DeepPrompt
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.prompts.multitask import AddMultiTaskPrompt
from prompt_tuning.prompts.prefix import KeyValuePrefix
from prompt_tuning.prompts.projection_adapters import IA3
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.prompts.state_prefix import StatePrefix
from prompt_tuning.settings.prompting import Prompting
from tests.support.dummies import with_numbers

KINDS = ("none", "soft", "suffix", "deep", "prefix", "tasks", "lora", "dora", "ia3")


def engine_model(config: ModelConfig, kind: str) -> tuple[PromptedModel, Parameters]:
    """Returns the frozen model of a config with an adapter of a kind.

    The frozen parameters are the same for all kinds.
    """
    model, parameters = _engine_model(config, kind)
    return dataclasses.replace(model), dict(parameters)


@functools.cache
def _engine_model(config: ModelConfig, kind: str) -> tuple[PromptedModel, Parameters]:
    layers = config.encoder_layers or config.layers
    shape = stack_shape(config, layers)
    table = np.zeros((config.vocabulary_size, config.width), np.float32)
    vocabulary, key = Vocabulary(table, stack=shape), jax.random.key(len(kind))
    random = jax.random.normal

    def vectors(key, shape, vocabulary):
        del vocabulary
        return random(key, shape)

    prompts = {
        "soft": lambda: SoftPrompt(key, vocabulary, length=3, initializer=vectors),
        "suffix": lambda: SoftPrompt(key, vocabulary, length=2, initializer=vectors),
        "deep": lambda: DeepPrompt(key, vocabulary, length=5, initializer=vectors),
        "prefix": lambda: KeyValuePrefix(
            key, vocabulary, length=6, initializer=vectors
        ),
        "state": lambda: StatePrefix(key, vocabulary, length=6, initializer=vectors),
        "tasks": lambda: AddMultiTaskPrompt(
            key, vocabulary, length=2, tasks=3, initializer=vectors
        ),
    }
    adapters = {
        "lora": [LoRA(regexes=[r".*/(query|value|up)"], rank=3)],
        "dora": [LoRA(regexes=[r".*/(query|out|down)"], rank=2, dora=True)],
        "biases": [LoRA(at="all-linear", rank=2, bias="all", dora=True)],
        "ia3": [IA3()],
        "alora": [LoRA(at="all-linear", rank=2, invocation=[5])],
        "alora_ia3": [LoRA(at="all-linear", rank=2, invocation=[5]), IA3()],
        "experts": [LoRA(regexes=[r".*/query", ".*/experts/.*"], rank=2)],
        "experts_down": [LoRA(regexes=[".*/experts/down"], rank=3)],
        "both": [LoRA(at="all-linear", rank=3, bias="lora_only"), IA3()],
    }
    prompt = prompts[kind]() if kind in prompts else None
    prompting = Prompting(placement="suffix" if kind == "suffix" else "prefix")
    graph, parameters = with_numbers(
        lambda key: build_model(
            key, config, prompt, prompting, adapters=adapters.get(kind, [])
        )
    )
    if prompt is not None:
        stack = "encoder" if config.encoder_layers else "decoder"
        own = {f"{stack}/prompt/{path}": x for path, x in split(prompt)[1].items()}
        parameters |= own
    plan = mock.Mock(spec=RestorePlan, origin="folder")
    model = PromptedModel(
        dataclasses.replace(config),
        graph,
        PromptPair(prompt),
        prompting,
        None,
        plan,
        dict,
    )
    return model, parameters
