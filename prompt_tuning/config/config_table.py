"""The methods, losses, optimizers and schedules: the shipped gin files, as a table.

Each file is a choice of an option, e.g. `prompts/mlp.gin` is `--method mlp`. Its first
sentence is the help, and its macros are options. The files are read as text, without
gin, so that help is instant.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping

from prompt_tuning.config.config_values import config_lines, literal
from prompt_tuning.config.shipped_configs import first_sentence
from prompt_tuning.core.config_folder import config_folder
from prompt_tuning.core.errors import InputError, did_you_mean

DEFAULT_METHOD, DEFAULT_LOSS = "soft", "cross_entropy"
TRAINED = ("Run.prompt", "Run.decoder_prompt", "Run.adapters")
SELECTED = {
    "method": TRAINED,
    "loss": ("Run.objective",),
    "optimizer": ("ParameterGroup.optimizer",),
    "schedule": ("adafactor.learning_rate",),
}
"""Settings by option; a file that sets one of them is a choice."""
FOLDERS = {
    "method": ("prompts", "adapters"),
    "loss": ("losses",),
    "optimizer": ("optimizers",),
    "schedule": ("schedules",),
}
UNTRAINED = ("prompts/inference_only.gin",)
BASE = ("models/checkpoint.gin", "data/pairs.gin", "runs/adafactor.gin")
"""Files of every run that options configure, before those of the options."""
TEMPLATE = "data/template.gin"
RATE = "LEARNING_RATE"


@dataclasses.dataclass(frozen=True)
class ShippedConfig:
    """A shipped gin file, with the files that it includes.

    `name` is below `configs/`, `help` is the first sentence of its comment, and
    `values` has texts by setting or macro.
    """

    name: str
    help: str
    values: Mapping[str, str]

    @property
    def macros(self) -> set[str]:
        """Names of the macros that it uses."""
        values = " ".join(self.values.values())
        return set(re.findall(r"%(\w+)", values))

    @property
    def needed(self) -> list[str]:
        """Names of the macros that it uses and does not set."""
        return sorted(self.macros - self.values.keys())

    @property
    def trained(self) -> set[str]:
        """Names of the classes of its prompts and adapters."""
        values = " ".join(self.values.get(name, "") for name in TRAINED)
        return set(re.findall(r"@(\w+)", values))

    @property
    def optimizer(self) -> tuple[str, float]:
        """Name of its optimizer and its learning rate, which `BASE` may set."""
        values = {**shipped("runs/adafactor.gin").values, **self.values}
        name = values["ParameterGroup.optimizer"].strip("@()")
        return name, literal(values[RATE])

    @property
    def regexes(self) -> list[str]:
        """Expressions for the parameters that it trains, which `BASE` may set."""
        values = {**shipped("runs/adafactor.gin").values, **self.values}
        return literal(values["ParameterGroup.regexes"])


@functools.cache
def shipped(name: str) -> ShippedConfig:
    """Reads a shipped config by its name below `configs/`."""
    text, values = (config_folder() / name).read_text("utf-8"), {}
    for line in config_lines(text):
        setting, _, value = line.partition(" = ")
        included = re.fullmatch(r"include '(.+)'", line)
        values |= shipped(included[1]).values if included else {setting: value}
    return ShippedConfig(name, first_sentence(text), values)


@functools.cache
def choices_of(option: str) -> dict[str, ShippedConfig]:
    """Returns the choices of an option, e.g. "method", by name; the default first."""
    files = {
        path.stem: shipped(f"{folder}/{path.name}")
        for folder in FOLDERS[option]
        for path in sorted((config_folder() / folder).glob("*.gin"))
    }
    first = {"method": DEFAULT_METHOD, "loss": DEFAULT_LOSS}.get(option)
    return {
        name: files[name]
        for name in sorted(files, key=lambda name: name != first)
        if files[name].values.keys() & set(SELECTED[option])
        and files[name].name not in UNTRAINED
    }


def find_choice(option: str, name: str) -> ShippedConfig:
    """Returns the config of a choice."""
    known = choices_of(option)
    if name not in known:
        raise InputError(
            f"--{option} {name} is unknown{did_you_mean(name.lower(), known)} "
            "(`prompt-tuning train --help` lists them)"
        )
    return known[name]


@functools.cache
def settings_of(macro: str) -> frozenset[str]:
    """Returns the settings that shipped choices set by a macro."""
    files = [file for option in FOLDERS for file in choices_of(option).values()]
    return frozenset(
        name
        for file in files
        for name, value in file.values.items()
        if value == f"%{macro}" and "." in name
    )


def recipe_of_class(name: str, *, adapts: bool = False) -> ShippedConfig:
    """Returns the shipped config that trains a class of prompts or adapters.

    It states the optimizer. If no config has the class, an adapter gets the optimizer
    of adapters.
    """
    for file in choices_of("method").values():
        if name in file.trained:
            return file
    return shipped("adapters/training.gin" if adapts else "runs/adafactor.gin")


def list_rates() -> str:
    """Describes the methods' optimizers and learning rates in a line, for help."""
    usual = choices_of("method")[DEFAULT_METHOD].optimizer
    rates: dict[tuple[str, float], list[str]] = {}
    for name, file in choices_of("method").items():
        rates.setdefault(file.optimizer, []).append(name)
    return "; ".join(
        f"{rate:g} with {optimizer}"
        + ("" if (optimizer, rate) == usual else f" for {', '.join(names)}")
        for (optimizer, rate), names in rates.items()
    )
