"""What is trained beside a frozen model: prompts and adapters, as a run names them."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Sequence

from jaxtyping import Array, Key

from prompt_tuning.adapters.adapter import (
    ADDED_DEEP,
    DEEP,
    LORA,
    MULTITASK,
    PREFIX,
    PROMPT,
    Adapter,
)
from prompt_tuning.adapters.adapter import IA3 as IA3_KIND
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameter_groups import match_any
from prompt_tuning.core.parameters import named_key
from prompt_tuning.models.build import Prompt
from prompt_tuning.prompts.deep import AddedDeepPrompt, DeepPrompt
from prompt_tuning.prompts.initializers import StackShape, Vocabulary
from prompt_tuning.prompts.multitask import FactorizedMultiTaskPrompt
from prompt_tuning.prompts.prefix import KeyValuePrefix
from prompt_tuning.prompts.projection_adapters import IA3, AdapterSpec, LoRA
from prompt_tuning.prompts.prompting import Prompting
from prompt_tuning.prompts.soft import SoftPrompt

LORA_A = "/adapters/lora/a"
PromptFactory = Callable[[Key[Array, ""], Vocabulary], Prompt]
"""A prompt class to which everything but the key and the vocabulary is bound."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """What is put into a frozen model to be trained.

    Attributes:
      prompt: of a decoder-only model, or of the encoder of an encoder-decoder.
      prompting: how it stands among the text; as a prefix if None.
      decoder_prompt: of the decoder of an encoder-decoder.
      decoder_prompting: how that stands among the targets.
      adapters: which projections are adapted, and how.
    """

    prompt: PromptFactory | None = None
    prompting: Prompting | None = None
    decoder_prompt: PromptFactory | None = None
    decoder_prompting: Prompting | None = None
    adapters: Sequence[AdapterSpec] = ()

    def __post_init__(self):
        listed = isinstance(self.adapters, Sequence)
        if not listed or not all(isinstance(x, AdapterSpec) for x in self.adapters):
            raise InputError(
                f"Run.adapters is {self.adapters!r}, expected a list of adapters, such "
                "as [@LoRA()] with the brackets of both"
            )

    @property
    def is_empty(self) -> bool:
        """Whether it leaves the frozen model as it is."""
        return self.prompt is None and self.decoder_prompt is None and not self.adapters

    def loras(self, paths: Iterable[str]) -> dict[str, LoRA]:
        """The LoRAs among some parameters, by the projection that each is beside.

        Args:
          paths: of parameters, of any kind.
        """
        found = [path.removesuffix(LORA_A) for path in paths if path.endswith(LORA_A)]
        return {
            projection: spec
            for projection in found
            for spec in self.adapters
            if isinstance(spec, LoRA) and match_any(spec.regexes)(projection)
        }

    def start(
        self, key: Key[Array, ""], vocabulary: Vocabulary, config: ModelConfig
    ) -> "PromptModules":
        """Starts the prompts.

        Args:
          key: random key.
          vocabulary: of the frozen model.
          config: of the frozen model.

        Raises:
          InputError: if a prompt refuses.
        """
        decoder = _stack(config, config.layers)
        first = decoder
        if config.architecture == "encoder_decoder":
            first = _stack(config, config.encoder_layers)
        made = {}
        for name, stack in (("prompt", first), ("decoder_prompt", decoder)):
            factory: PromptFactory | None = getattr(self, name)
            into = dataclasses.replace(vocabulary, stack=stack)
            made[name] = factory and factory(named_key(key, name), into)
        started = PromptModules(made["prompt"], made["decoder_prompt"])
        counts = {p.count for p in made.values() if p is not None and p.count > 1}
        if len(counts) > 1:
            raise InputError(
                f"the encoder has {made['prompt'].count} prompts and the decoder "
                f"{made['decoder_prompt'].count}, and an example has the same of both: "
                "give them the same number of tasks, or one of them a single prompt"
            )
        return started


@dataclasses.dataclass(frozen=True)
class PromptModules:
    """The prompt modules of a `Tuning`."""

    prompt: Prompt | None = None
    decoder_prompt: Prompt | None = None

    @property
    def count(self) -> int:
        """How many prompts an example chooses from, `N`."""
        prompts = (self.prompt, self.decoder_prompt)
        return max(1 if prompt is None else prompt.count for prompt in prompts)


def _stack(config: ModelConfig, layers: int) -> StackShape:
    return StackShape(layers, config.key_value_heads, config.head_width)


def tuning_of(
    adapter: Adapter, config: ModelConfig, prompting: Prompting | None = None
) -> Tuning:
    """What has to be put into a frozen model for an adapter's parameters to have place.

    Args:
      adapter: as it was read from a file.
      config: the frozen model.
      prompting: how a prompt at the input stands among the text.

    Raises:
      InputError: if a LoRA does not say by what it is multiplied.
    """
    if adapter.kind in (LORA, IA3_KIND):
        return Tuning(adapters=_specs(adapter))
    decoder = _factory(adapter, "decoder")
    if adapter.kind == PREFIX:
        prompting = None
    if config.architecture == "decoder_only":
        return Tuning(prompt=decoder, prompting=prompting)
    encoder = _factory(adapter, "encoder")
    return Tuning(prompt=encoder, prompting=prompting, decoder_prompt=decoder)


def _factory(adapter: Adapter, stack: str) -> PromptFactory | None:
    """Makes the prompt module of one stack, if the adapter has one."""
    start = f"{stack}/prompt/"
    shapes = {
        path.removeprefix(start): leaf.shape
        for path, leaf in adapter.parameters.items()
        if path.startswith(start)
    }
    if not shapes:
        return None
    if adapter.kind == PREFIX:
        return functools.partial(KeyValuePrefix, length=shapes["prompt"][2])
    if adapter.kind == MULTITASK:
        tasks, length, rank = shapes["columns"]
        return functools.partial(
            FactorizedMultiTaskPrompt, length=length, tasks=tasks, rank=rank
        )
    if adapter.kind == DEEP:
        return functools.partial(DeepPrompt, length=shapes["prompt"][1])
    if adapter.kind == ADDED_DEEP:
        return functools.partial(AddedDeepPrompt, length=shapes["prompt"][0])
    assert adapter.kind == PROMPT
    return functools.partial(SoftPrompt, length=shapes["prompt"][0])


def _specs(adapter: Adapter) -> tuple[AdapterSpec, ...]:
    """One spec for all projections that are adapted alike."""
    alike: dict[tuple[int, float], list[str]] = {}
    for path, leaf in adapter.parameters.items():
        if adapter.kind == LORA and path.endswith(LORA_A):
            projection = path.removesuffix(LORA_A)
            if projection not in adapter.scalings:
                raise InputError(
                    f"nothing says by what the LoRA of {projection} is multiplied "
                    "(alpha / r): set Run.adapters to what it was trained with"
                )
            how = (leaf.shape[2], adapter.scalings[projection])
            alike.setdefault(how, []).append(re.escape(projection))
    if adapter.kind == LORA:
        return tuple(
            LoRA(regexes=regexes, rank=rank, alpha=rank * scaling)
            for (rank, scaling), regexes in alike.items()
        )
    scaled = [path.removesuffix("/adapters/ia3/scale") for path in adapter.parameters]
    return (IA3(regexes=[re.escape(path) for path in scaled]),)
