"""Prompts and adapters that tune a frozen model, as a run configures them."""

import dataclasses
import functools
from collections.abc import Sequence

from jaxtyping import Array, Key

from prompt_tuning.adapters.adapter import (
    CLASSES,
    CLASSES_FOLDER,
    CLASSES_PATH,
    TOKENS,
    Adapter,
)
from prompt_tuning.adapters.peft.peft_class_head import without_class_head
from prompt_tuning.adapters.peft.peft_settings import SEQ_CLS, TOKEN_CLS
from prompt_tuning.core.bounded_updates import Ball
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.layer_kinds import key_layers
from prompt_tuning.core.model_choices import Pooling
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import named_key
from prompt_tuning.families.hf_folder import as_tagger
from prompt_tuning.pretrained.attention_matching import move_prefix
from prompt_tuning.prompts import adapter_kinds
from prompt_tuning.prompts.class_rows import ClassRows
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.projection_adapters import AdapterSpec
from prompt_tuning.prompts.prompt_module import PromptFactory, PromptModule
from prompt_tuning.prompts.stack_shape import PrefixStart, StackShape, StateShape
from prompt_tuning.prompts.token_rows import TokenRows
from prompt_tuning.settings.class_head import ClassHead
from prompt_tuning.settings.prompting import Prompting
from prompt_tuning.settings.trained_tokens import TrainedTokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tuning:
    """Prompts and adapters of a frozen model.

    Attributes:
      prompt: prompt of a decoder-only model, or of an encoder-decoder's encoder.
      prompting: position and visibility of that prompt; None puts it first.
      decoder_prompt: prompt of an encoder-decoder's decoder.
      decoder_prompting: position and visibility of the decoder's prompt.
      adapters: adapters of projections, the tokens with trained rows, and the class
        head.
    """

    prompt: PromptFactory | None = None
    prompting: Prompting | None = None
    decoder_prompt: PromptFactory | None = None
    decoder_prompting: Prompting | None = None
    adapters: Sequence[AdapterSpec | TrainedTokens | ClassHead] = ()

    def __post_init__(self):
        known = AdapterSpec | TrainedTokens | ClassHead
        listed = isinstance(self.adapters, Sequence)
        if not listed or not all(isinstance(x, known) for x in self.adapters):
            raise InputError(
                f"Run.adapters is {shown(self.adapters)}, expected a list of adapters, "
                "such as [@LoRA()] with the brackets of both"
            )
        for kind, hint in ((TrainedTokens, "tokens"), (ClassHead, "labels")):
            count = sum(isinstance(x, kind) for x in self.adapters)
            if count > 1:
                raise InputError(
                    f"Run.adapters has {count} {kind.__name__}, expected at most one: "
                    f"list all {hint} in it"
                )
        self._check_pooling()

    def _check_pooling(self) -> None:
        head, prompting = self.class_head, self.prompting or Prompting()
        if head is None or self.prompt is None:
            return
        tags = head.problem == "tokens"
        if not tags and head.pooling != "mean":
            return
        if "suffix" in prompting.placement and not prompting.prefix_attention:
            found = "problem is 'tokens'" if tags else "pooling is 'mean'"
            raise InputError(
                f"ClassHead.{found} and Prompting.placement "
                f"{prompting.placement!r}, but the head reads the states of the text, "
                "and these do not depend on a prompt that comes after it: set "
                + ("" if tags else "pooling to 'last', or ")
                + "placement to 'prefix'"
            )

    @property
    def projection_adapters(self) -> list[AdapterSpec]:
        """The adapters of projections."""
        return [x for x in self.adapters if isinstance(x, AdapterSpec)]

    @property
    def tokens(self) -> TrainedTokens | None:
        """Tokens with trained rows, or None."""
        found = (x for x in self.adapters if isinstance(x, TrainedTokens))
        return next(found, None)

    @property
    def class_head(self) -> ClassHead | None:
        """The class head, or None."""
        found = (x for x in self.adapters if isinstance(x, ClassHead))
        return next(found, None)

    @property
    def is_empty(self) -> bool:
        """Whether it leaves the frozen model unchanged."""
        return self.prompt is None and self.decoder_prompt is None and not self.adapters

    def start(
        self, key: Key[Array, ""], vocabulary: Vocabulary, config: ModelConfig
    ) -> "PromptPair":
        """Builds and initializes the prompts.

        Raises:
          InputError: if a prompt cannot be built, or the prompts of encoder and decoder
            do not go together.
        """
        move = functools.partial(move_prefix, config=config)
        vocabulary = dataclasses.replace(vocabulary, prefix_starts=[], move_prefix=move)
        decoder = stack_shape(config, config.layers)
        first = decoder
        if config.architecture == "encoder_decoder":
            first = stack_shape(config, config.encoder_layers)
        pair = PromptPair(
            _start(self.prompt, "prompt", key, vocabulary, first),
            _start(self.decoder_prompt, "decoder_prompt", key, vocabulary, decoder),
        )
        if vocabulary.prefix_starts:
            pair = dataclasses.replace(pair, prefix_start=vocabulary.prefix_starts[-1])
        counts = [prompt.count for prompt in pair.prompts]
        if len({count for count in counts if count > 1}) > 1:
            raise InputError(
                f"the encoder has {counts[0]} prompts and the decoder {counts[1]}, but "
                "an example has the same one of both: give them the same number of "
                "tasks, or one of them a single prompt"
            )
        return pair


@dataclasses.dataclass(frozen=True)
class PromptPair:
    """The prompt modules of a `Tuning`.

    `prefix_start` is what to compute the values of `prompt` from; None if it starts as
    it is.
    """

    prompt: PromptModule | None = None
    decoder_prompt: PromptModule | None = None
    prefix_start: PrefixStart | None = None
    tokens: TokenRows | None = None
    classes: ClassRows | None = None

    @property
    def prompts(self) -> list[PromptModule]:
        """The existing prompts, the encoder's first."""
        pair = (self.prompt, self.decoder_prompt)
        return [prompt for prompt in pair if prompt is not None]

    @property
    def count(self) -> int:
        """Number of prompts that an example chooses from, `N`."""
        return max([1, *(prompt.count for prompt in self.prompts)])

    @property
    def length(self) -> int:
        """Number of vectors or positions `P` of `prompt`; 0 without one."""
        return 0 if self.prompt is None else self.prompt.length

    def check_positions(self, config: ModelConfig) -> None:
        """Checks that a model has positions for more than the prompt."""
        positions = config.maximum_positions
        if positions is not None and self.length >= positions:
            raise InputError(
                f"a prompt of {self.length} vectors leaves no room for text: the model "
                f"has {positions} positions{config.positions_note}"
            )

    @property
    def pooling(self) -> Pooling | None:
        """State of a row that a class head reads; None without a trained one."""
        return None if self.classes is None else self.classes.pooling

    @property
    def decoder_length(self) -> int:
        """Number of vectors or positions of `decoder_prompt`; 0 without one."""
        return 0 if self.decoder_prompt is None else self.decoder_prompt.length

    def frozen_slots(self, architecture: str) -> dict[str, int]:
        """Returns how many of each prefix's first slots are frozen, by path."""
        prompts = self._by_path(architecture)
        return {p: x.frozen_slots for p, x in prompts.items() if x.frozen_slots}

    def balls(self, architecture: str) -> dict[str, Ball]:
        """Regions that training must keep vectors in, by path."""
        balls = {p: x.ball for p, x in self._by_path(architecture).items()}
        return {path: ball for path, ball in balls.items() if ball is not None}

    def _by_path(self, architecture: str) -> dict[str, PromptModule]:
        first = "decoder" if architecture == "decoder_only" else "encoder"
        stacks = {first: self.prompt}
        if self.decoder_prompt is not None:
            stacks["decoder"] = self.decoder_prompt
        return {f"{s}/prompt/prompt": x for s, x in stacks.items() if x is not None}

    @property
    def at_input(self) -> bool:
        """Whether `prompt` has vectors among the model's input."""
        return self.prompt is not None and self.prompt.attachment.at_input

    @property
    def drops(self) -> bool:
        """Whether a prompt drops something in training."""
        return any(prompt.drops for prompt in self.prompts)


def _start(
    factory: PromptFactory | None,
    name: str,
    key: Key[Array, ""],
    vocabulary: Vocabulary,
    stack: StackShape,
) -> PromptModule | None:
    if factory is None:
        return None
    return factory(named_key(key, name), dataclasses.replace(vocabulary, stack=stack))


def stack_shape(config: ModelConfig, layers: int) -> StackShape:
    """Returns the shape of a stack with a number of layers."""
    states, recurrent = None, len(config.recurrent_layers)
    if recurrent:
        window = config.window_inputs, config.convolution_channels
        widths = config.recurrent_key_width, config.recurrent_width
        memory = (config.recurrent_heads, *widths) if config.recurrent_heads else None
        without_keys = config.layers - key_layers(config)
        states = StateShape(recurrent, without_keys, window, memory)
    sizes = config.key_value_heads, config.head_width
    return StackShape(layers, *sizes, states, config.sharing_layers)


def rebuild_tuning(
    adapter: Adapter, config: ModelConfig, prompting: Prompting | None = None
) -> Tuning:
    """Returns the prompts and adapters that have exactly an adapter's parameters.

    Raises:
      InputError: if the scaling of a LoRA is unknown.
    """
    if adapter.settings.get("task_type") == TOKEN_CLS:
        config = as_tagger(config)
    rows: list[TrainedTokens | ClassHead] = _rebuild_classes(adapter, config)
    adapter = dataclasses.replace(adapter, parameters=without_class_head(adapter))
    if adapter.tokens.rows:
        head = list(adapter.tokens.head) or None
        rows.append(TrainedTokens(tokens=list(adapter.tokens.rows), head=head))
    spec = adapter_kinds.adapter_specs().get(adapter.kind)
    if spec is not None:
        return Tuning(adapters=[*spec.rebuild(adapter), *rows])
    if adapter.kind in (TOKENS, CLASSES):
        return Tuning(adapters=rows)
    factories: dict[str, PromptFactory] = {}
    for stack, shapes in adapter_kinds.prompt_shapes(adapter.parameters).items():
        prompt_class = adapter_kinds.find_prompt_class(shapes)
        assert prompt_class is not None  # the adapter's kind was found by its shapes
        factories[stack] = prompt_class.factory_for(shapes)
        if not prompt_class.attachment.at_input:
            prompting = None
    decoder = factories.get("decoder")
    if config.architecture == "decoder_only":
        return Tuning(prompt=decoder, prompting=prompting, adapters=rows)
    encoder = factories.get("encoder")
    return Tuning(prompt=encoder, prompting=prompting, decoder_prompt=decoder)


def _rebuild_classes(
    adapter: Adapter, config: ModelConfig
) -> list[TrainedTokens | ClassHead]:
    """Returns the class head for an adapter's rows, which carry no names."""
    if CLASSES_PATH not in adapter.parameters:
        return []
    count = len(adapter.parameters[CLASSES_PATH])
    labels, problem = config.labels, config.problem
    task = adapter.settings.get("task_type")
    tags = task == TOKEN_CLS or (problem == "tokens" and task != SEQ_CLS)
    if len(labels) != count or tags != (problem == "tokens"):
        labels = [f"LABEL_{number}" for number in range(count)]
        problem = "regression" if count == 1 else "single_label"  # as in transformers
        problem = "tokens" if tags else problem
    dense = f"{CLASSES_FOLDER}dense" in adapter.parameters
    return [ClassHead(labels=labels, dense=dense, problem=problem)]
