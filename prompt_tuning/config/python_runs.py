"""Runs configured from Python: the arguments of `tune` as a config.

Arguments become `Configured` settings, these become gin bindings, and the bindings are
read as if from a config file. Objects that a config cannot hold (an optax
transformation, a loss function) are put into the run afterwards.
"""

import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from prompt_tuning.config.config_table import ShippedConfig, recipe_of_class
from prompt_tuning.config.deferred_factories import Configured, built, parameter_names
from prompt_tuning.config.factories import FACTORIES
from prompt_tuning.config.gin_files import prompt_names, read_run
from prompt_tuning.config.gin_text import gin_bindings
from prompt_tuning.config.python_config import own_prompt, stand_in
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError, did_you_mean, kind_of, shown
from prompt_tuning.core.parameter_groups import ParameterGroup
from prompt_tuning.data.rows import python_rows
from prompt_tuning.losses.foreign_objective import (
    FunctionObjective,
    LossFunction,
    LossFunctions,
)
from prompt_tuning.prompts.projection_adapters import AdapterSpec
from prompt_tuning.settings.class_head import ClassHead
from prompt_tuning.settings.run_settings import RunSettings
from prompt_tuning.settings.trained_tokens import TrainedTokens

SCHEDULES = "prompt_tuning.core.learning_rates"
"""The module of the schedules of learning rates."""
ATTACHED = ("prompt", "decoder_prompt", "adapters", "groups")
MEASURES = ("labels", "exact_match")
"""Fields of `Evaluation` that users look for in `tune`."""
EVALUATED = frozenset(("keep_best", "evaluate_every"))
"""Fields of `Run` that have no effect without held-out data."""
SET_BY_TUNE = ("model", "prompt", "adapters", "groups", "objective", "data")


@dataclasses.dataclass(frozen=True)
class TuneRequest:
    """The arguments of `tune`, checked.

    Attributes:
      settings: the run's settings.
      replacements: objects that a config cannot hold, by field of `Run`.
      written: data files that were made for the run.
      arguments: the argument that a file of rows was written from, by the file's path.
    """

    settings: Configured
    replacements: Mapping[str, Any]
    written: Sequence[Path]
    arguments: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Number of steps of the run."""
        return self.settings.parameters.get("steps", RunSettings.steps)

    def with_steps(self, steps: int) -> "TuneRequest":
        """Returns the same request with another number of steps."""
        return dataclasses.replace(self, settings=self.settings.replace(steps=steps))

    def read(self) -> Run:
        """Builds the run through gin, so that its operative config is complete."""
        settings = _with_lengths(self.settings, self.steps)
        run = read_run([], [], defaults=gin_bindings(settings, prompt_names()))
        return dataclasses.replace(run, **self.replacements)


def tune_request(
    model: Configured,
    methods: Sequence[Any],
    data: Any,
    *,
    directory: Path,
    evaluation: Any,
    learning_rate: Any,
    optimizer: Any,
    objective: Any,
    settings: Mapping[str, Any],
    arguments: Sequence[str] = (),
) -> TuneRequest:
    """Turns the arguments of `tune` into a run's settings; writes data given in memory.

    `model` has settings of `Pretrained`, `methods` are prompts and adapters, and
    `settings` are other fields of `Run` and `DataSource`. `arguments` are the names of
    all others, for messages.
    """
    of_run, of_data = _sort_settings(settings, arguments)
    replacements: dict[str, Any] = {}
    fields: dict[str, Any] = {"directory": str(directory), "model": model}
    fields |= attachments(methods) | of_run
    if of_data.get("template") is not None:
        # The vectors stand where the template has them, as with `--template`.
        placement = {"placement": "template"}
        fields.setdefault("prompting", Configured("Prompting", placement))
    if not any(fields.get(name) for name in ATTACHED):
        raise InputError(
            "no method was given: expected a prompt or adapter such as "
            "SoftPrompt(length=20) or LoRA(rank=8), or groups=[ParameterGroup(...)]"
        )
    for name in ("prompt", "decoder_prompt"):
        own = own_prompt(fields.get(name))
        if own is not None:
            _check_arguments(own)
            given = {key: built(x) for key, x in own.keywords.items()}
            replacements[name] = functools.partial(own.func, **given)
            fields[name] = stand_in(own)
    if "groups" not in fields:
        decoder = of_run.get("decoder_prompt")
        trained = [_shipped(x) for x in (*methods, decoder) if x is not None]
        fields["groups"] = _groups(trained, learning_rate, optimizer, replacements)
    elif learning_rate is not None or optimizer is not None:
        raise InputError("give learning_rate and optimizer, or groups, not both")
    if objective is not None:
        fields["objective"] = _objective(objective, replacements)
    fields |= _rollouts(fields.get("rollouts"), replacements)
    if evaluation is None and python_rows.has_held_out(data):
        evaluation = data
    if evaluation is None:
        for name in EVALUATED.intersection(settings):
            raise InputError(f"{name} has no effect: there is no evaluation=...")
    files = _DataFiles(directory / "data", of_data)
    try:
        fields["data"] = files.source(data, "train")
        if evaluation is not None:
            fields["evaluation"] = files.evaluation(evaluation)
    except BaseException:
        remove(files.written)
        raise
    return TuneRequest(
        Configured("Run", fields), replacements, tuple(files.written), files.arguments
    )


def _with_lengths(value: Any, steps: int) -> Any:
    """Gives schedules the number of steps of the run, where they need it."""
    if type(value) in (list, tuple):
        return type(value)(_with_lengths(item, steps) for item in value)
    if not isinstance(value, Configured):
        return value
    values = {name: _with_lengths(item, steps) for name, item in value}
    is_schedule = FACTORIES.get(value.name) == SCHEDULES
    if is_schedule and "steps" in parameter_names(value.name):
        values.setdefault("steps", steps)
    return value.replace(**values)


def remove(files: Sequence[Path]) -> None:
    """Removes data files of a run that could not be opened, and emptied folders."""
    for file in files:
        file.unlink(missing_ok=True)
        for folder in (file.parent, file.parent.parent):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()


def _sort_settings(
    settings: Mapping[str, Any], arguments: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divides other settings into fields of `Run` and of `DataSource`."""
    of_run = [n for n in parameter_names("Run") if n not in SET_BY_TUNE]
    of_run += ["groups"]
    of_data = [n for n in parameter_names("DataSource") if n != "files"]
    for name in settings:
        if name in MEASURES:
            raise InputError(
                f"tune has no argument {name!r}: give "
                f"evaluation=Evaluation(data=..., {name}=...)"
            )
        if name not in of_run and name not in of_data:
            near = did_you_mean(name, [*of_run, *of_data, *arguments])
            raise InputError(f"tune has no argument {name!r}{near}")
    return (
        {name: value for name, value in settings.items() if name in of_run},
        {name: value for name, value in settings.items() if name in of_data},
    )


def attachments(methods: Sequence[Any]) -> dict[str, Any]:
    """Assigns methods to `Run.prompt` and `Run.adapters`."""
    own: list[Any] = [method for method in methods if own_prompt(method) is not None]
    named = [method for method in methods if own_prompt(method) is None]
    for method in named:
        if not isinstance(method, Configured):
            raise InputError(
                f"the method {shown(method)} is {kind_of(method)}, expected one such "
                "as SoftPrompt(length=20) or LoRA(rank=8), or a class of prompts, as "
                "in functools.partial(OwnPrompt, length=20)"
            )
    prompts = own + [method for method in named if method.name in prompt_names()]
    adapters = [method for method in named if _is_adapter(method)]
    for method in named:
        if method not in prompts and method not in adapters:
            raise InputError(f"{method} is neither a prompt nor an adapter")
    if len(prompts) > 1:
        raise InputError(
            f"found {len(prompts)} prompts, expected at most one; the prompt of an "
            "encoder-decoder's decoder is decoder_prompt=..."
        )
    fields: dict[str, Any] = {"prompt": prompts[0]} if prompts else {}
    return fields | ({"adapters": adapters} if adapters else {})


def _check_arguments(prompt: functools.partial) -> None:
    """Refuses a class of prompts with missing or unknown arguments."""
    cls: Any = prompt.func
    try:
        signature = inspect.signature(cls.__init__)
        signature.bind(None, None, None, **prompt.keywords)
    except TypeError as problem:
        name = prompt.func.__name__
        raise InputError(
            f"{name} cannot be made: {problem}; give its arguments, as in "
            f"functools.partial({name}, length=20)"
        ) from None


def _shipped(method: Any) -> Configured:
    """Returns the settings of a method, or of the shipped base of an own class."""
    own = own_prompt(method)
    if own is None:
        return method
    cls: Any = own.func
    names = [base.__name__ for base in cls.__mro__ if base.__name__ in prompt_names()]
    return Configured(names[0] if names else "SoftPrompt")


def _is_adapter(method: Configured) -> bool:
    factory = method.factory
    return isinstance(factory, type) and issubclass(
        factory, (AdapterSpec, TrainedTokens, ClassHead)
    )


def _groups(
    methods: Sequence[Any],
    learning_rate: Any,
    optimizer: Any,
    replacements: dict[str, Any],
) -> list[Configured]:
    """Makes the parameter groups: one for prompts, one for adapters."""
    kinds: dict[str, Configured] = {}
    for method in methods:
        (regex,) = _recipe(method).regexes
        kinds.setdefault(regex, method)
    if optimizer is not None and not isinstance(optimizer, Configured):
        if learning_rate is not None:
            raise InputError(
                "optimizer is an optax transformation, which has its own learning "
                "rate: leave learning_rate out"
            )
        return [_given_group(list(kinds), optimizer, replacements)]
    groups = []
    for regex, method in kinds.items():
        name, rate = _recipe(method).optimizer
        chosen = optimizer or Configured(name, {"learning_rate": rate})
        if learning_rate is not None:
            chosen = chosen.replace(learning_rate=learning_rate)
        groups.append(
            Configured("ParameterGroup", {"regexes": [regex], "optimizer": chosen})
        )
    return groups


def _given_group(
    regexes: list[str], optimizer: Any, replacements: dict[str, Any]
) -> Configured:
    """Makes the only group of an optax transformation that Python made."""
    replacements["groups"] = [ParameterGroup(regexes, optimizer)]
    return Configured(
        "ParameterGroup",
        {"regexes": regexes, "optimizer": stand_in(optimizer)},
    )


def _recipe(method: Configured) -> ShippedConfig:
    return recipe_of_class(method.name, adapts=_is_adapter(method))


def _objective(objective: Any, replacements: dict[str, Any]) -> Configured:
    """Returns an objective's settings; a function is put into the run afterwards."""
    if isinstance(objective, Configured):
        return objective
    if isinstance(objective, LossFunctions):
        replacements["objective"] = objective
        return stand_in(objective)
    if not callable(objective):
        raise InputError(
            f"objective is {shown(objective)}, expected settings such as "
            "TokenObjective(), "
            "a function (logits, targets) -> losses, or an object with the methods "
            "sums and divisor"
        )
    replacements["objective"] = FunctionObjective(
        function=cast(LossFunction, objective)
    )
    return stand_in(objective)


def _rollouts(settings: Any, replacements: dict[str, Any]) -> dict[str, Any]:
    """Returns the field of rollouts; functions are put into the run afterwards."""
    if not isinstance(settings, Configured):
        return {}
    replacements["rollouts"] = settings.build()
    rewards = replacements["rollouts"].described().rewards
    return {"rollouts": settings.replace(rewards=rewards)}


class _DataFiles:
    """Data of a run as files: given ones by their paths, rows as written ones."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]):
        self._folder, self._settings = folder, settings
        self.written: list[Path] = []
        self.arguments: dict[str, str] = {}

    def source(self, data: Any, name: str) -> Configured:
        """Returns the settings of `DataSource` for some data."""
        if isinstance(data, Configured) and data.name == "DataSource":
            files = self._files(data.parameters.get("files"), name)
            return Configured("DataSource", {**data.parameters, "files": files}, name)
        files = self._files(data, name)
        return Configured("DataSource", {"files": files, **self._settings}, name)

    def evaluation(self, data: Any) -> Configured:
        """Returns the settings of `Evaluation` for held-out data, or with it."""
        if isinstance(data, Configured) and data.name == "Evaluation":
            source = self.source(data.parameters.get("data"), "evaluation")
            return data.replace(data=source)
        source = self.source(data, "evaluation")
        return Configured("Evaluation", {"data": source})

    def _files(self, data: Any, name: str) -> list[str]:
        if data is None:
            raise InputError(f"the {name} data is None, expected rows or files")
        argument = "data" if name == "train" else "evaluation"
        data = python_rows.split_of(data, argument, held_out=name != "train")
        if python_rows.is_files(data):
            paths = [data] if isinstance(data, str | Path) else data
            return [str(path) for path in paths]
        file = (self._folder / f"{name}.jsonl").resolve()
        fresh = not file.exists()
        python_rows.write_rows(
            data,
            file,
            self._settings.get("prompt_key", "prompt"),
            self._settings.get("completion_key", "completion"),
            argument,
        )
        self.arguments[str(file)] = argument
        if fresh:
            self.written.append(file)
        return [str(file)]
