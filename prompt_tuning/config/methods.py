"""The methods that `--method` names: the trained settings of each shipped config.

A method of the same name is a config in `prompts/` or `adapters/`. Imports nothing
heavy, for help.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from prompt_tuning.config.configured import Configured
from prompt_tuning.core.errors import InputError, did_you_mean
from prompt_tuning.core.flat_options import OPTIONS

DEFAULT = "soft"
PROMPT_RATE = ("adafactor", 0.3)
ADAPTER_RATE = ("adamw", 1e-3)
RATES = {
    "KeyValuePrefix": ("adamw", 0.02),
    "ProjectedKeyValuePrefix": ("adamw", 0.02),
    "IA3": ("adamw", 0.01),
    "LoRA": ADAPTER_RATE,
}
"""Optimizer and learning rate by class; prompts have `PROMPT_RATE`, and adapters
`ADAPTER_RATE`, unless they are listed."""


@dataclasses.dataclass(frozen=True)
class Given:
    """A parameter that an option sets.

    Attributes:
      option: name of the option.
      default: value if the option is not given; an option without one is required.
    """

    option: str
    default: Any = None


@dataclasses.dataclass(frozen=True)
class Method:
    """A prompt or an adapter to train.

    Attributes:
      help: description, half a line.
      config: shipped config with the same settings.
      settings: the prompt of the encoder or of a decoder-only model, or the adapter.
      decoder: the prompt of an encoder-decoder's decoder.
    """

    help: str
    config: str
    settings: Configured | None = None
    decoder: Configured | None = None

    def options(self) -> Iterator[Given]:
        """Yields the options that its settings use."""
        for settings in (self.settings, self.decoder):
            if settings is not None:
                yield from _given(settings)

    def fill(
        self, choices: Mapping[str, Any]
    ) -> tuple[Configured | None, Configured | None]:
        """Returns `settings` and `decoder` with the values of options.

        Raises:
          InputError: if a required option is missing.
        """
        return _fill(self.settings, choices), _fill(self.decoder, choices)


def _given(value: Any) -> Iterator[Given]:
    if isinstance(value, Given):
        yield value
    elif isinstance(value, Configured):
        for _, inner in value:
            yield from _given(inner)


def _fill(value: Any, choices: Mapping[str, Any]) -> Any:
    if isinstance(value, Given):
        chosen = choices.get(value.option, value.default)
        if chosen is None:
            option = OPTIONS[value.option]
            raise InputError(
                f"--method {choices.get('method', DEFAULT)} needs {option.flag} "
                f"{option.metavar or ''}: {option.help}"
            )
        return chosen
    if isinstance(value, Configured):
        filled = {name: _fill(inner, choices) for name, inner in value}
        return value.replace(**filled)
    return value


LENGTH = Given("prompt_length", 20)
VOCABULARY = Configured("from_sampled_vocabulary")
UNIFORM = Configured("uniform")


def _soft(initializer: Configured) -> Configured:
    return Configured("SoftPrompt", {"length": LENGTH, "initializer": initializer})


def _multitask(name: str, **parameters: Any) -> Configured:
    return Configured(name, {"length": LENGTH, "tasks": Given("tasks"), **parameters})


SAMPLED = _soft(VOCABULARY)
PREFIX = Configured(
    "KeyValuePrefix",
    {"length": LENGTH, "initializer": Configured("normal", {"deviation": 0.5})},
)
SHARED_AND_TASK = {"initializer": UNIFORM, "task_initializer": UNIFORM}

METHODS = {
    DEFAULT: Method(
        "soft prompt, initialized like sampled_vocabulary",
        "prompts/sampled_vocabulary.gin",
        SAMPLED,
    ),
    "sampled_vocabulary": Method(
        "soft prompt from embeddings of frequent tokens",
        "prompts/sampled_vocabulary.gin",
        SAMPLED,
    ),
    "uniform": Method(
        "soft prompt from uniform numbers", "prompts/uniform.gin", _soft(UNIFORM)
    ),
    "class_labels": Method(
        "soft prompt from the embeddings of --labels",
        "prompts/class_labels.gin",
        _soft(
            Configured(
                "from_class_labels",
                {"labels": Given("labels"), "fallback": VOCABULARY},
            )
        ),
    ),
    "text": Method(
        "soft prompt from the embeddings of --prompt_text",
        "prompts/text.gin",
        _soft(
            Configured(
                "from_text", {"text": Given("prompt_text"), "fallback": VOCABULARY}
            )
        ),
    ),
    "file": Method(
        "soft prompt from --prompt_file",
        "prompts/file.gin",
        _soft(Configured("from_file", {"path": Given("prompt_file")})),
    ),
    "mlp": Method(
        "soft prompt reparameterized by a network",
        "prompts/mlp.gin",
        Configured("MLPPrompt", {"inner": _soft(UNIFORM)}),
    ),
    "residual": Method(
        "soft prompt plus a small network's output",
        "prompts/residual.gin",
        Configured("ResidualPrompt", {"inner": SAMPLED, "hidden_width": 400}),
    ),
    "dropped": Method(
        "soft prompt with dropout",
        "prompts/dropped.gin",
        Configured("DroppedPrompt", {"inner": SAMPLED, "rate": 0.1}),
    ),
    "wayward": Method(
        "prompt kept close to --prompt_text",
        "prompts/wayward.gin",
        Configured("WaywardPrompt", {"text": Given("prompt_text"), "gamma": 0.01}),
    ),
    "instance": Method(
        "soft prompt that depends on each text",
        "prompts/instance.gin",
        Configured("InstancePrompt", {"length": LENGTH, "initializer": VOCABULARY}),
    ),
    "pool": Method(
        "mixture of soft prompts, chosen by each text",
        "prompts/pool.gin",
        Configured("PromptPool", {"length": LENGTH, "initializer": VOCABULARY}),
    ),
    "deep": Method(
        "separate vectors in every block",
        "prompts/deep.gin",
        Configured("DeepPrompt", {"length": LENGTH, "initializer": VOCABULARY}),
    ),
    "added_deep": Method(
        "soft prompt to which every block adds vectors",
        "prompts/added_deep.gin",
        Configured("AddedDeepPrompt", {"length": LENGTH, "initializer": VOCABULARY}),
    ),
    "prefix": Method(
        "keys and values in every block (prefix tuning)", "prompts/prefix.gin", PREFIX
    ),
    "projected_prefix": Method(
        "prefix computed by a small network",
        "prompts/projected_prefix.gin",
        Configured("ProjectedKeyValuePrefix", {"length": LENGTH}),
    ),
    "decoder_prefix": Method(
        "prefix in the decoder of a T5", "prompts/decoder_prefix.gin", decoder=PREFIX
    ),
    "encoder_and_decoder": Method(
        "soft prompts in both stacks of a T5",
        "prompts/encoder_and_decoder.gin",
        SAMPLED,
        SAMPLED,
    ),
    "lora": Method(
        "low-rank adapters of queries and values (LoRA)",
        "adapters/lora.gin",
        Configured("LoRA", {"rank": Given("rank", 8)}),
    ),
    "ia3": Method(
        "scales of keys, values and activations (IA3)",
        "adapters/ia3.gin",
        Configured("IA3"),
    ),
    "multitask_add": Method(
        "shared vectors plus vectors of the task",
        "prompts/multitask_add.gin",
        _multitask("AddMultiTaskPrompt", **SHARED_AND_TASK),
    ),
    "multitask_concat_time": Method(
        "shared vectors, then vectors of the task",
        "prompts/multitask_concat_time.gin",
        _multitask("ConcatTimeMultiTaskPrompt", task_length=10, **SHARED_AND_TASK),
    ),
    "multitask_concat_features": Method(
        "shared columns and columns of the task",
        "prompts/multitask_concat_features.gin",
        _multitask(
            "ConcatFeaturesMultiTaskPrompt",
            shared_features=Given("shared_features"),
            task_features=Given("task_features"),
            **SHARED_AND_TASK,
        ),
    ),
    "multitask_factorized": Method(
        "shared vectors times a factor of the task",
        "prompts/multitask_factorized.gin",
        _multitask(
            "FactorizedMultiTaskPrompt",
            rank=Given("rank", 1),
            initializer=VOCABULARY,
            factors=Configured("factors_of_ones"),
        ),
    ),
    "multitask_project": Method(
        "narrow shared vectors, projected by the task",
        "prompts/multitask_project.gin",
        _multitask(
            "ProjectMultiTaskPrompt",
            shared_features=Given("shared_features", 64),
            initializer=UNIFORM,
        ),
    ),
}
"""Methods by the name that `--method` takes."""


def find_method(name: str) -> Method:
    """Returns a method.

    Raises:
      InputError: for an unknown name, with the nearest ones.
    """
    if name not in METHODS:
        raise InputError(
            f"--method {name} is unknown{did_you_mean(name.lower(), METHODS)} "
            "(`prompt-tuning train --help` lists them)"
        )
    return METHODS[name]


def list_methods() -> str:
    """Lists the methods, one a line, for help."""
    width = max(map(len, METHODS))
    return "\n".join(f"  {name:{width}}  {m.help}" for name, m in METHODS.items())


def list_rates() -> str:
    """Describes the methods' optimizers and learning rates in a line, for help."""
    names = {"KeyValuePrefix": "prefixes", "IA3": "ia3", "LoRA": "lora"}
    rates = [f"{PROMPT_RATE[1]} with {PROMPT_RATE[0]} for prompts"]
    for name, label in names.items():
        optimizer, rate = RATES[name]
        rates.append(f"{rate:g} with {optimizer} for {label}")
    return ", ".join(rates)
