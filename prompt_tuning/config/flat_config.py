"""The gin files and bindings that the options of the flat command line stand for."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from prompt_tuning.config import config_table, option_checks
from prompt_tuning.config.flat_options import ADDED, HEAD, PROBLEM
from prompt_tuning.config.options import TABLE

IMPLIED = {
    "Prompting": "Run.prompting = @Prompting()",
    "Rematerialization": "Pretrained.rematerialization = @Rematerialization()",
    "MeshShape": "Run.mesh = @MeshShape()",
    "Pipeline": "Run.pipeline = @Pipeline()",
}
"""Bindings that refer to a factory if a user sets one of the factory's values."""
MODEL_FILE = config_table.BASE[0]
ADAPTERS_FILE, HEAD_FILE = "adapters/training.gin", "adapters/class_head.gin"
LABELS = "ClassHead.labels"


class FlatConfig(NamedTuple):
    """The gin files and bindings that options stand for.

    The bindings override the files, and a user's bindings override both.
    """

    files: list[str]
    lines: list[str]


def flat_config(
    choices: option_checks.Choices,
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
    """
    option_checks.check_training(choices)
    out = directory or choices.get("out") or option_checks.default_directory(choices)
    method = config_table.find_choice(
        "method", choices.get("method", config_table.DEFAULT_METHOD)
    )
    chosen = [method]
    if "template" in choices:
        chosen.append(config_table.shipped(config_table.TEMPLATE))
    for option in config_table.FOLDERS:
        if option in choices and option != "method":
            chosen.append(config_table.find_choice(option, choices[option]))
    names = [*config_table.BASE, *(config.name for config in chosen)]
    macros = set[str]().union(*(config_table.shipped(name).macros for name in names))
    if HEAD in choices:
        macros |= config_table.shipped(HEAD_FILE).macros
    lines = _set({**choices, "out": str(out)}, macros)
    if "eval" not in choices:
        lines += ["Run.evaluation = None", "EVALUATION_FILES = []"]
    if "template" in choices:
        lines += _in_template(method)
    lines += _trained_beside(method, choices)
    return FlatConfig(
        [*names[: len(config_table.BASE)], *files, *names[len(config_table.BASE) :]],
        lines + _implied(bindings),
    )


def frozen_config(
    choices: option_checks.Choices, bindings: Sequence[str] = ()
) -> FlatConfig:
    """Returns the config of a run that trains nothing: a model, and perhaps data.

    For the arguments see `flat_config`.
    """
    option_checks.check_frozen(choices)
    lines = _set(choices, config_table.shipped(MODEL_FILE).macros)
    if "eval" in choices:
        lines += option_checks.EVALUATES
    return FlatConfig([MODEL_FILE], lines + _implied(bindings))


def _set(choices: option_checks.Choices, macros: Collection[str]) -> list[str]:
    """Binds the settings of options, and the macros that files use for them."""
    lines = []
    for option in TABLE:
        value = choices.get(option.name)
        if value is None and type(option.default) is int and option.macro in macros:
            value = option.default
        if value is None or option.name in config_table.FOLDERS:
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


def _trained_beside(
    method: config_table.ShippedConfig, choices: option_checks.Choices
) -> list[str]:
    """Lets a method train rows of tokens or a class head too.

    The method's optimizer trains rows of tokens, and a head next to an adapter. Next to
    a prompt the head has another optimizer, because the prompt's rate would be far too
    high.
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
    training = config_table.shipped(ADAPTERS_FILE)
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


def _in_template(method: config_table.ShippedConfig) -> list[str]:
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
