"""Runs configured by the flat command line: its options as the arguments of `tune`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.config.configured import Configured
from prompt_tuning.config.flat_choices import (
    Choices,
    check_frozen,
    check_training,
    default_directory,
)
from prompt_tuning.config.methods import (
    ADAPTER_RATE,
    DEFAULT,
    PROMPT_RATE,
    find_method,
)
from prompt_tuning.config.python_runs import TuneRequest, recipe_of, tune_request
from prompt_tuning.config.run import Run
from prompt_tuning.core.flat_options import SCHEDULES, TABLE

IMPLIED = {
    "Prompting": ("Run", "prompting"),
    "Rematerialization": ("Pretrained", "rematerialization"),
    "MeshShape": ("Run", "mesh"),
    "Pipeline": ("Run", "pipeline"),
}
"""Parameters that refer to a factory if bindings set some of the factory's values."""
DEFAULT_RATES = dict((PROMPT_RATE, ADAPTER_RATE))
"""Learning rates of the optimizers where `--optimizer` chooses one."""


def read_flat_run(
    choices: Choices,
    bindings: Sequence[str] = (),
    directory: str | None = None,
    *,
    files: Sequence[str] = (),
    allow_imports: bool = False,
    allow_unused: bool = False,
) -> Run:
    """Reads the run that the options describe, without a config of the run.

    Args:
      choices: values of the options that were given, by name.
      bindings: bindings of parameters, which override the options.
      directory: directory of the run, which overrides `--out`.
      files: gin files of the model, which the options override.
      allow_imports: see `read_run`.
      allow_unused: see `read_run`.

    Raises:
      InputError: for options or bindings that cannot be used.
    """
    request = flat_request(choices, bindings, directory)
    return request.read(
        bindings, files=files, allow_imports=allow_imports, allow_unused=allow_unused
    )


def flat_request(
    choices: Choices, bindings: Sequence[str] = (), directory: str | None = None
) -> TuneRequest:
    """Turns options into the request that `tune` makes of the same arguments.

    Raises:
      InputError: for an option that is missing or cannot be used.
    """
    check_training(choices)
    folder = Path(directory or choices.get("out") or default_directory(choices))
    implied = _implied(bindings)
    settings = _fields(choices, "Run") | _fields(choices, "DataSource")
    settings |= implied["Run"]
    method, decoder = find_method(choices.get("method", DEFAULT)).fill(choices)
    if decoder is not None:
        settings["decoder_prompt"] = decoder
    if "template" in choices:
        prompting = settings.get("prompting", Configured("Prompting"))
        settings["prompting"] = prompting.replace(placement="template")
        method = _from_template(method, choices["template"])
    objective, fields = _objective(choices)
    methods = [] if method is None else [method]
    return tune_request(
        _model(choices, implied["Pretrained"]),
        methods,
        choices["train"],
        directory=folder,
        evaluation=_evaluation(choices),
        learning_rate=_learning_rate(choices, method or decoder),
        optimizer=_optimizer(choices),
        objective=objective,
        settings=settings | fields,
    )


def read_frozen_run(
    choices: Choices,
    bindings: Sequence[str],
    *,
    allow_imports: bool = False,
    allow_unused: bool = False,
) -> Run:
    """Reads a run that trains nothing: a frozen model, and held-out data if given.

    Args:
      choices: values of the options that were given, by name.
      bindings: see `read_flat_run`.
      allow_imports: see `read_run`.
      allow_unused: see `read_run`.

    Raises:
      InputError: for options or bindings that cannot be used.
    """
    check_frozen(choices)
    implied = _implied(bindings)
    fields: dict[str, Any] = {"model": _model(choices, implied["Pretrained"])}
    fields |= _fields(choices, "Run") | implied["Run"]
    source = _fields(choices, "DataSource")
    if "eval" in choices:
        evaluation = _fields(choices, "Evaluation")
        data = Configured("DataSource", {"files": choices["eval"], **source})
        fields["evaluation"] = Configured("Evaluation", {"data": data, **evaluation})
    request = TuneRequest(Configured("Run", fields), {}, ())
    return request.read(
        bindings, allow_imports=allow_imports, allow_unused=allow_unused
    )


def _model(choices: Choices, implied: Mapping[str, Any]) -> Configured:
    return Configured("Pretrained", {**_fields(choices, "Pretrained"), **implied})


def _fields(choices: Choices, factory: str) -> dict[str, Any]:
    """Returns the given parameters of a factory by name."""
    fields = {}
    for option in TABLE:
        name, _, parameter = option.setting.partition(".")
        if name == factory and option.name in choices and option.name != "out":
            fields[parameter] = choices[option.name]
    return fields


def _implied(bindings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns references to factories that bindings set values of; see `IMPLIED`."""
    fields: dict[str, dict[str, Any]] = {"Run": {}, "Pretrained": {}}
    for name, (owner, parameter) in IMPLIED.items():
        if any(binding.startswith(f"{name}.") for binding in bindings):
            fields[owner][parameter] = Configured(name)
    return fields


def _from_template(method: Configured | None, template: str) -> Configured | None:
    """Lets a soft prompt start from the words of a template."""
    if method is None or method.name != "SoftPrompt":
        return method
    fallback = method.parameters["initializer"]
    return method.replace(
        initializer=Configured(
            "from_template", {"template": template, "fallback": fallback}
        )
    )


def _evaluation(choices: Choices) -> Any:
    """Returns held-out files, or the settings of an evaluation if some are given."""
    if "eval" not in choices:
        return None
    settings = _fields(choices, "Evaluation")
    if choices.get("loss", "").startswith("class_"):
        settings["length_normalize"] = True
    if not settings:
        return choices["eval"]
    return Configured("Evaluation", {"data": choices["eval"], **settings})


def _objective(choices: Choices) -> tuple[Configured | None, dict[str, Any]]:
    """Returns the objective of `--loss`, and fields of the run that belong to it."""
    loss = choices.get("loss", "cross_entropy")
    if loss.startswith("class_"):
        kind = loss.removeprefix("class_")
        objective = Configured(
            "ClassObjective",
            {"labels": choices["labels"], "loss": kind, "length_normalize": True},
        )
        return objective, {}
    if loss == "policy_gradient":
        return Configured("PolicyGradient"), {"advantages_key": "advantages"}
    if loss == "context_distillation":
        context = {"context": choices["context"]}
        return Configured("ContextDistillation", context), {}
    parameters = {
        "cross_entropy": None,
        "average_per_sequence": {"normalizer": loss},
        "label_smoothing": {"label_smoothing": 0.1},
        "reference": {"z_loss": 1e-4, "label_smoothing": 0.0, "normalizer": None},
    }[loss]
    if parameters is None:
        return None, {}
    return Configured("TokenObjective", parameters), {}


def _optimizer(choices: Choices) -> Configured | None:
    name = choices.get("optimizer")
    return None if name is None else Configured(name)


def _learning_rate(choices: Choices, method: Configured | None) -> Any:
    """Returns the learning rate, or the schedule that peaks at it."""
    rate = choices.get("learning_rate")
    schedule = SCHEDULES[choices.get("schedule", "constant")]
    if schedule is None or method is None:
        return rate
    if rate is None and "optimizer" in choices:
        rate = DEFAULT_RATES[choices["optimizer"]]
    elif rate is None:
        rate = recipe_of(method).parameters["learning_rate"]
    # A decay over all steps gets their number from the request.
    return Configured(schedule, {"peak": rate})
