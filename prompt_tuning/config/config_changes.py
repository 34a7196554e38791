"""Compares the config of a run with the config that continues it.

You may continue a run with other settings if they change nothing that it has learned:
where and how it computes, how long it trains, and what it logs, saves and measures.
"""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from prompt_tuning.config.config_values import (
    config_lines,
    config_values,
    factory_of,
    literal,
    macros_in,
    resolved,
)
from prompt_tuning.config.deferred_factories import default_text
from prompt_tuning.config.recorded_paths import is_path, locate_text
from prompt_tuning.core.errors import MAXIMUM_LINES, shortened
from prompt_tuning.core.metric_directions import AUTO, metric_and_direction

MEASUREMENT = "Run.evaluation"
CHOSEN_BY = "Run.keep_best"
STOPPED_BY = "Run.early_stopping_metric"
LABELS = "Evaluation.labels"
STEPS = "Run.steps"
PROMPTING = "Run.prompting"
MAXIMUM_NESTING = 3
_FREE = re.compile(
    r"Run\.(steps|log_every|loggers|save_every|keep_last|keep_best|keep_prompts"
    r"|save_paths|evaluate_every"
    r"|early_stopping|early_stopping_metric|evaluation)"
)
"""Settings of a run that change nothing that it learns."""
_COMPUTATION = re.compile(
    r"(\w+/)*(Run\.(mesh|pipeline|checkpoint_form)"
    r"|(MeshShape|Pipeline|AxisRules|Rematerialization|BlockRange)\.\w+"
    r"|Pretrained\.(attention|slices|checkpoint_activation|(trained_)?weights"
    r"|(encoder_)?rematerialization))"
)
"""Settings of where and in which order a run computes: they change its results only by
rounding."""
EARLIER_DEFAULTS = {"DataSource.buckets": "8"}
"""Defaults of earlier versions, which did not always write them to the config."""
REPLACED_DEFAULTS = {"Pretrained.parameter_dtype": ("'float32'", "None")}
"""Values that earlier versions wrote for a default, and the default that means the same
now. Quantized folders differ, but so does their fingerprint."""
_FROM_PYTHON = "@optimizer_from_python"


@dataclasses.dataclass(frozen=True)
class ConfigChanges:
    """Changes of a run's config.

    Attributes:
      learning: a line for each setting that determines what the run learns, with its
        value before and now.
      steps: whether the number of steps differs.
      measurement: whether the run is measured in another way.
      selection: whether another metric chooses the best checkpoint or the end of the
        run.
      others: whether any other setting differs that may change.
    """

    learning: tuple[str, ...] = ()
    steps: bool = False
    measurement: bool = False
    selection: bool = False
    others: bool = False

    @property
    def any_allowed(self) -> bool:
        """Whether the run's config is to be replaced."""
        return self.steps or self.measurement or self.selection or self.others


def compare_configs(
    before: str,
    after: str,
    locate: Callable[[str], str] = str,
    *,
    complete: bool = True,
) -> ConfigChanges:
    """Compares the operative configs of a run.

    The number of steps may change, unless a schedule depends on it: `Run.steps` may
    then have a macro that nothing else uses.

    Args:
      before: config in the run directory.
      after: config that the run is to continue with.
      locate: returns the path of a file of `before` from here.
      complete: whether both configs have all values; if not, settings in only one of
        them are not compared.
    """
    new, old = _Config.parse(after), _Config.parse(before)
    old, new = _in_one_form(old, new)
    old = old.with_new_settings(new)
    measuring = (old.measured | new.measured) - (old.learned | new.learned)
    settings, others = old.learning(measuring), new.learning(measuring)
    both = settings.keys() & others.keys()
    names = [
        name
        for name in {**settings, **others}
        # A macro that one of them lacks is compared as the value of its settings.
        if name in both or (complete and not (old.users(name) or new.users(name)))
    ]
    pairs = {
        name: (old.expanded(settings.get(name)), new.expanded(others.get(name)))
        for name in names
        if settings.get(name) != others.get(name)
    }
    lines = [
        _describe(name, *pair, new)
        for name, pair in pairs.items()
        if _differ(*pair, new.is_path(name), locate)
    ]
    measures = old.measuring(measuring), new.measuring(measuring)
    counts = old.resolved(STEPS), new.resolved(STEPS)
    steps = counts[0] != counts[1]
    if steps and not lines and any(_FROM_PYTHON in x for x in others.values()):
        line = _describe(STEPS, *counts, new)
        lines = [f"{line}: an optimizer from Python may have a schedule of the steps"]
    return ConfigChanges(
        learning=tuple(lines[:MAXIMUM_LINES]),
        steps=steps,
        measurement=any(
            _differ(measures[0].get(name), measures[1].get(name), is_path(name), locate)
            for name in {**measures[0], **measures[1]}
        ),
        selection=old.selection() != new.selection(),
        others=old.free() != new.free(),
    )


def relevant_lines(config: str) -> list[str]:
    """Returns a config's bindings without the run directory, which may move."""
    return [
        line
        for line in config_lines(config)
        if not line.startswith(("Run.directory", "RUN_DIRECTORY"))
    ]


@dataclasses.dataclass(frozen=True)
class _Config:
    """The values of a config, as text, by name; macros are names without a dot."""

    values: Mapping[str, str]

    @classmethod
    def parse(cls, config: str) -> "_Config":
        return cls(config_values("\n".join(relevant_lines(config))))

    def with_new_settings(self, later: "_Config") -> "_Config":
        """Returns the config with settings that its version did not have yet.

        Defaults of `later` keep what earlier versions did, but for `EARLIER_DEFAULTS`.
        """
        factories, added = set(map(factory_of, self.values)) - {""}, {}
        for name, value in later.values.items():
            if name in self.values or factory_of(name) not in factories:
                continue
            earlier = EARLIER_DEFAULTS.get(name.rpartition("/")[2])
            if earlier is not None or later.expanded(value) == default_text(name):
                added[name] = value if earlier is None else earlier
        return _Config({**self.values, **added})

    def scopes(self, factory: str) -> dict[str, dict[str, str]]:
        scopes: dict[str, dict[str, str]] = {}
        for name, value in self.values.items():
            scope, _, inner = factory_of(name).rpartition("/")
            if inner == factory:
                scopes.setdefault(scope, {})[name.rpartition(".")[2]] = value
        return scopes

    def without_scopes(self, factory: str) -> "_Config":
        """Returns the config with one factory, if all its scopes have equal values."""
        same = list(self.scopes(factory).values())
        if any(values != same[0] for values in same):
            return self
        scoped = re.compile(rf"@(?:\w+/)+{factory}\b")
        others = {
            name: scoped.sub(f"@{factory}", value)
            for name, value in self.values.items()
            if factory_of(name).rpartition("/")[2] != factory
        }
        return _Config(others | {f"{factory}.{k}": x for k, x in same[0].items()})

    def without_default_position(self) -> "_Config":
        """Returns the config with None for the default position of a prompt."""
        written = {k: x for k, x in self.values.items() if factory_of(k) == "Prompting"}
        if any(value != default_text(name) for name, value in written.items()):
            return self
        others = {k: x for k, x in self.values.items() if k not in written}
        return _Config(others | {PROMPTING: "None"})

    def expanded(self, value: str | None) -> str | None:
        if value is None:
            return None
        known = self.values
        return re.sub(r"%(\w+)", lambda name: known.get(name[1], name[0]), value)

    @property
    def measured(self) -> set[str]:
        return self._reached([self.values.get(MEASUREMENT, "")])

    @property
    def learned(self) -> set[str]:
        return self._reached(
            value
            for name, value in self.values.items()
            if factory_of(name) == "Run" and name != MEASUREMENT
        )

    def learning(self, measuring: Collection[str]) -> dict[str, str]:
        """Returns the settings that determine what the run learns.

        The factories `measuring` are left out: only evaluations use them.
        """
        chosen = {
            name: value
            for name, value in self.values.items()
            if not _COMPUTATION.fullmatch(name)
            and not _FREE.fullmatch(name)
            and factory_of(name) not in measuring
        }
        # Macros that only the omitted settings use are omitted as well.
        omitted = [value for name, value in self.values.items() if name not in chosen]
        unused = macros_in(omitted) - macros_in(chosen.values())
        return {name: value for name, value in chosen.items() if name not in unused}

    def measuring(self, factories: Collection[str]) -> dict[str, str]:
        return {
            name: self.resolved(name)
            for name in self.values
            if factory_of(name) in factories or name == MEASUREMENT
        }

    def selection(self) -> list[Any]:
        """Returns the metrics of the best checkpoint and of early stopping."""
        return [
            metric_and_direction(literal(self.resolved(name), AUTO), self._labels)
            for name in (CHOSEN_BY, STOPPED_BY)
            if name in self.values
        ]

    @property
    def _labels(self) -> Any:
        return literal(self.resolved(LABELS)) if LABELS in self.values else None

    def free(self) -> dict[str, str]:
        names = filter(_FREE.fullmatch, self.values)
        return {name: self.resolved(name) for name in names}

    def resolved(self, name: str) -> str:
        return resolved(self.values, name)

    def is_path(self, name: str) -> bool:
        return is_path(name) or any(map(is_path, self.users(name)))

    def users(self, macro: str) -> list[str]:
        """Returns the settings that a macro determines."""
        return [n for n, value in self.values.items() if macro in macros_in([value])]

    def _reached(self, values: Iterable[str]) -> set[str]:
        """Returns the factories that values refer to, also through other values."""
        reached: set[str] = set()
        pending = list(values)
        while pending:
            value = pending.pop()
            names = {*re.findall(r"@([\w./]+)", value), *macros_in([value])} - reached
            reached |= names
            pending += [
                inner
                for name, inner in self.values.items()
                if name in names or factory_of(name) in names
            ]
        return reached


def _in_one_form(old: _Config, new: _Config) -> tuple[_Config, _Config]:
    """Returns configs that write equal settings equally.

    Python, and options in earlier versions, give each use of a factory a scope, or none
    to a single use, and write None for the default position of a prompt.
    """
    names = {factory_of(name).rpartition("/")[2] for name in old.values} - {""}
    # Those that others refer to come first.
    for _ in range(MAXIMUM_NESTING):
        for name in sorted(names):
            before, after = old.scopes(name), new.scopes(name)
            if after and before.keys() != after.keys():
                old, new = old.without_scopes(name), new.without_scopes(name)
    if "None" in (old.values.get(PROMPTING), new.values.get(PROMPTING)):
        old, new = old.without_default_position(), new.without_default_position()
    replaced = {
        name: new.values[name]
        for name, value in old.values.items()
        if (value, new.values.get(name))
        == REPLACED_DEFAULTS.get(name.rpartition("/")[2])
    }
    return _Config({**old.values, **replaced}), new


def _differ(
    before: str | None, after: str | None, path: bool, locate: Callable[[str], str]
) -> bool:
    """Tests whether values differ, and are not paths of the same files."""
    if before is None or after is None or before == after:
        return before != after
    if not path:
        return _plain(literal(before, before)) != _plain(literal(after, after))
    return locate_text(before, locate) != locate_text(after, str)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _describe(name: str, before: str | None, after: str | None, config: _Config) -> str:
    """Describes a setting that differs, and what uses it if it is a macro."""
    old, new = ("not set" if x is None else x for x in (before, after))
    users = [user for user in config.users(name) if "." not in name]
    used = f" (used by {', '.join(users)})" if users else ""
    return shortened(f"{name} = {shortened(old)}, now {shortened(new)}{used}", 600)
