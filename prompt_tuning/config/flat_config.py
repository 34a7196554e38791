"""The gin files and bindings that the options of the flat command line stand for."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from prompt_tuning.config.config_table import (
    BASE,
    DEFAULT_METHOD,
    FOLDERS,
    TEMPLATE,
    ShippedConfig,
    find_choice,
    shipped,
)
from prompt_tuning.config.flat_options import ADDED, HEAD, PROBLEM
from prompt_tuning.config.option_checks import (
    EVALUATES,
    Choices,
    check_frozen,
    check_training,
    default_directory,
)
from prompt_tuning.config.options import TABLE

IMPLIED = {
    "Prompting": "Run.prompting = @Prompting()",
    "Rematerialization": "Pretrained.rematerialization = @Rematerialization()",
    "MeshShape": "Run.mesh = @MeshShape()",
    "Pipeline": "Run.pipeline = @Pipeline()",
}
"""Bindings that refer to a factory if a user sets one of the factory's values."""
MODEL_FILE = BASE[0]
ADAPTERS_FILE, HEAD_FILE = "adapters/training.gin", "adapters/class_head.gin"
LABELS = "ClassHead.labels"


class FlatConfig(NamedTuple):
    """A config that options stand for.

    Attributes:
      files: gin files.
      lines: bindings that override them, and that the bindings of a user override.
    """

    files: list[str]
    lines: list[str]


def flat_config(
    choices: Choices,
    bindings: Sequence[str] = (),
    directory: str | None = None,
    files: Sequence[str] = (),
) -> FlatConfig:
    """Returns the config of a run that options train.

    Args:
      choices: values of the options that were given, by name.
      bindings: a user's bindings, which the config leaves out.
      directory: directory of the run, which overrides `--out`.
      files: gin files of the model.

    Raises:
      InputError: for an option that is missing or cannot be used.
    """
    check_training(choices)
    out = directory or choices.get("out") or default_directory(choices)
    method = find_choice("method", choices.get("method", DEFAULT_METHOD))
    chosen = [method]
    if "template" in choices:
        chosen.append(shipped(TEMPLATE))
    for option in FOLDERS:
        if option in choices and option != "method":
            chosen.append(find_choice(option, choices[option]))
    names = [*BASE, *(config.name for config in chosen)]
    macros = set[str]().union(*(shipped(name).macros for name in names))
    if HEAD in choices:
        macros |= shipped(HEAD_FILE).macros
    lines = _set({**choices, "out": str(out)}, macros)
    if "eval" not in choices:
        lines += ["Run.evaluation = None", "EVALUATION_FILES = []"]
    if "template" in choices:
        lines += _in_template(method)
    lines += _trained_beside(method, choices)
    return FlatConfig(
        [*names[: len(BASE)], *files, *names[len(BASE) :]], lines + _implied(bindings)
    )


def frozen_config(choices: Choices, bindings: Sequence[str] = ()) -> FlatConfig:
    """Returns the config of a run that trains nothing.

    It has a frozen model, and held-out data if they are given.

    Args:
      choices: values of the options that were given, by name.
      bindings: a user's bindings, which the config leaves out.

    Raises:
      InputError: if there is no model.
    """
    check_frozen(choices)
    lines = _set(choices, shipped(MODEL_FILE).macros)
    if "eval" in choices:
        lines += EVALUATES
    return FlatConfig([MODEL_FILE], lines + _implied(bindings))


def _set(choices: Choices, macros: Collection[str]) -> list[str]:
    """Binds the settings of options, and the macros that files use for them."""
    lines = []
    for option in TABLE:
        value = choices.get(option.name)
        if value is None and type(option.default) is int and option.macro in macros:
            value = option.default
        if value is None or option.name in FOLDERS:
            continue
        text = repr(value)
        if option.macro in macros:
            lines.append(f"{option.macro} = {text}")
            text = f"%{option.macro}"
        # Numbers of a regression and tags of tokens have names that are not ranked.
        unranked = choices.get(PROBLEM) in ("regression", "tokens")
        named = option.name == "labels" and unranked
        if option.setting and not named:
            lines.append(f"{option.setting} = {text}")
    return lines


def _trained_beside(method: ShippedConfig, choices: Choices) -> list[str]:
    """Lets a method train rows of tokens or a class head too.

    Rows of tokens are trained by the method's optimizer. So is a head beside an
    adapter; beside a prompt, whose rate would be far too high, it has its own.
    """
    adapters = method.values.get("Run.adapters", "[]").strip("[]")
    listed = {ADDED: "@TrainedTokens()", HEAD: "@ClassHead()"}
    more = [x for name, x in listed.items() if name in choices and x not in adapters]
    lines = []
    if HEAD in choices or LABELS in method.values:
        labels = "%CLASS_LABELS" if "labels" in choices else "None"
        lines.append(f"{LABELS} = {labels}")
    if not more:
        return lines
    beside = [*filter(None, [adapters]), *more]
    lines.append(f"Run.adapters = [{', '.join(beside)}]")
    training = shipped(ADAPTERS_FILE)
    if listed[HEAD] not in more or set(training.regexes) <= set(method.regexes):
        regexes = dict.fromkeys([*method.regexes, *training.regexes])
        return [*lines, f"ParameterGroup.regexes = {list(regexes)}"]
    regexes = [*method.regexes, *["token_embedder/adapters/.*"] * (ADDED in choices)]
    optimizer, rate = training.optimizer
    return [
        *lines,
        f"ParameterGroup.regexes = {regexes}",
        "Run.groups = [@ParameterGroup(), @head/ParameterGroup()]",
        "head/ParameterGroup.regexes = ['head/adapters/.*']",
        f"head/ParameterGroup.optimizer = @head/{optimizer}()",
        f"head/{optimizer}.learning_rate = {rate}",
    ]


def _in_template(method: ShippedConfig) -> list[str]:
    """Lets only a soft prompt of the input start from the words of a template."""
    lines = [IMPLIED["Prompting"]]
    initializer = method.values.get("SoftPrompt.initializer")
    if initializer is None:
        return lines
    if method.values.get("Run.prompt") != "@SoftPrompt":
        return [*lines, f"SoftPrompt.initializer = {initializer}"]
    lines.append(f"from_template.fallback = {initializer}")
    if "Run.decoder_prompt" in method.values:
        lines += [
            "Run.prompt = @prompt/SoftPrompt",
            "prompt/SoftPrompt.initializer = @from_template()",
            "Run.decoder_prompt = @decoder_prompt/SoftPrompt",
            f"decoder_prompt/SoftPrompt.initializer = {initializer}",
        ]
    return lines


def _implied(bindings: Sequence[str]) -> list[str]:
    """Returns the bindings of `IMPLIED` that a user's bindings need."""
    return [
        line
        for name, line in IMPLIED.items()
        if any(binding.startswith(f"{name}.") for binding in bindings)
    ]
