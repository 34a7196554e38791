"""Rewards of answers: functions of Python, and built-in ones by name."""

import dataclasses
import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.patterns import compile_pattern
from prompt_tuning.core.typed_json import read_object
from prompt_tuning.settings.rollout_settings import (
    FROM_PYTHON,
    RewardFunction,
    reward_name,
)

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
_FINAL_ANSWER = "####"


@dataclasses.dataclass(frozen=True)
class Reward:
    """A reward with its name.

    Attributes:
      name: name, for messages and metrics.
      function: see `RewardFunction`.
      answer_key: key of the record field that it reads; None for none.
      is_logprob: whether it is the answer's log-probability under the frozen model; it
        then has no function.
    """

    name: str
    function: RewardFunction | None
    answer_key: str | None = None
    is_logprob: bool = False


def runs_module(reward: str | RewardFunction) -> bool:
    """Whether a reward imports a module named in it."""
    return isinstance(reward, str) and not (
        reward.partition("=")[0] in BUILT_IN or reward.startswith(FROM_PYTHON)
    )


def open_rewards(
    rewards: Sequence[str | RewardFunction], answer_key: str
) -> list[Reward]:
    """Finds rewards by name.

    Args:
      rewards: names and functions.
      answer_key: key of the right answer in the records.

    Raises:
      InputError: for an unknown name, or a function that cannot be imported.
    """
    return [_open(reward, answer_key) for reward in rewards]


def _open(reward: str | RewardFunction, answer_key: str) -> Reward:
    name = reward_name(reward)
    if not isinstance(reward, str):
        return Reward(name.removeprefix(FROM_PYTHON), reward)
    if name.startswith(FROM_PYTHON):
        raise InputError(
            f"this run was configured from Python with the reward "
            f"{name.removeprefix(FROM_PYTHON)}, which its config cannot hold: continue "
            "it by prompt_tuning.reinforce with the same arguments and directory"
        )
    kind, equals, value = name.partition("=")
    if kind in BUILT_IN:
        return BUILT_IN[kind](kind, value if equals else None, answer_key)
    return Reward(name, _import(name))


def _import(name: str) -> RewardFunction:
    """Imports a function named `module:function`."""
    module, _, function = name.partition(":")
    if not module or not function:
        raise InputError(
            f"the reward {shown(name)} is unknown, expected {', '.join(FORMS)}, or a "
            "function of a module such as rewards:judge"
        )
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as problem:
        raise InputError(
            f"the reward {shown(name)} cannot be imported: {problem}. Write "
            "module:function, and set PYTHONPATH to the module's folder"
        ) from problem
    if not callable(found):
        raise InputError(f"the reward {shown(name)} is {shown(found)}, not a function")
    return found


def exact_match(completion: str, answer: str) -> float:
    """Returns 1 if two texts are equal up to spaces around them, else 0."""
    return float(completion.strip() == answer.strip())


def numeric_answer(completion: str, answer: str) -> float:
    """Returns 1 if two texts give the same number, else 0.

    The number of a text is the one after its last "####", as in GSM8K (Cobbe et al.
    2021), or else its last number. Commas in it and a dollar sign are ignored.
    """
    found, right = _final_number(completion), _final_number(answer)
    return float(found is not None and found == right)


def _final_number(text: str) -> Decimal | None:
    """Returns the number that a text ends in; None without one."""
    *_, end = text.rpartition(_FINAL_ANSWER)
    numbers = _NUMBER.findall(end)
    if not numbers:
        return None
    number = numbers[0] if _FINAL_ANSWER in text else numbers[-1]
    try:
        return Decimal(number.replace(",", "").replace("$", ""))
    except InvalidOperation:
        return None


def _compares(compare: Callable[[str, str], float]) -> Callable[..., Reward]:
    """Makes a built-in reward that compares an answer with the record's."""

    def build(name: str, value: str | None, answer_key: str) -> Reward:
        if value is not None:
            raise InputError(f"the reward {name} has no value: leave out ={value}")

        def judge(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
            del prompt
            return compare(completion, str(row[answer_key]))

        return Reward(name, judge, answer_key)

    return build


def _regex(name: str, value: str | None, answer_key: str) -> Reward:
    """Scores 1 if an RE2 expression matches the whole completion, else 0."""
    del answer_key
    if not value:
        raise InputError(f"the reward {name} needs an expression: {name}=[0-9]+")
    pattern = compile_pattern(value, f"the reward {name}")

    def judge(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        del prompt, row
        return float(pattern.matches(completion))

    return Reward(f"{name}={value}", judge)


def _length(name: str, value: str | None, answer_key: str) -> Reward:
    """Scores 1 up to a number of characters, falling to 0 at twice as many."""
    del answer_key
    if value is None or not value.isdecimal() or int(value) < 1:
        raise InputError(
            f"the reward {name} has the value {shown(value)}, expected a number of "
            f"characters of 1 or more: {name}=20"
        )
    limit = int(value)

    def judge(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        del prompt, row
        return min(1.0, max(0.0, 2 - len(completion) / limit))

    return Reward(f"{name}={value}", judge)


def _logprob(name: str, value: str | None, answer_key: str) -> Reward:
    """Scores the mean log-probability of the answer's tokens under the frozen model."""
    del answer_key
    if value is not None:
        raise InputError(f"the reward {name} has no value: leave out ={value}")
    return Reward(name, None, is_logprob=True)


def _json_schema(name: str, value: str | None, answer_key: str) -> Reward:
    """Scores 1 if a completion is JSON that the schema in a file allows, else 0.

    A schema must not refer to another file or address.
    """
    del answer_key
    if not value:
        raise InputError(f"the reward {name} needs a file: {name}=schema.json")
    try:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for
        from jsonschema_specifications import REGISTRY
        from referencing import Registry, Resource
        from referencing.exceptions import Unresolvable
        from referencing.jsonschema import DRAFT202012
    except ImportError as problem:
        raise InputError(
            f"the reward {name} needs the package jsonschema: pip install jsonschema"
        ) from problem
    schema = read_object(Path(value))
    schema.text("$schema", None)  # what follows would fail with another type
    contents = dict(schema.values)
    validator_class = validator_for(contents)
    try:
        validator_class.check_schema(contents)
        # An empty registry: nothing is fetched from elsewhere.
        validator = validator_class(contents, registry=Registry())
        resource = Resource.from_contents(contents, DRAFT202012)
        _look_up_references(resource, REGISTRY.resolver_with_root(resource))
        validator.is_valid(None)
    except (SchemaError, Unresolvable, RecursionError) as problem:
        raise InputError(
            f"the JSON schema {value} cannot be used: {shown(str(problem))}"
        ) from problem

    def judge(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        del prompt, row
        try:
            answer = json.loads(completion, parse_constant=_refuse_constant)
            return float(validator.is_valid(answer))
        except (ValueError, RecursionError, OverflowError):
            return 0.0

    return Reward(f"{name}={value}", judge)


def _look_up_references(resource: Any, resolver: Any) -> None:
    """Resolves the references of a schema and its parts."""
    resolver = resolver.in_subresource(resource)
    contents = resource.contents
    reference = contents.get("$ref") if isinstance(contents, Mapping) else None
    if isinstance(reference, str):
        resolver.lookup(reference)
    for part in resource.subresources():
        _look_up_references(part, resolver)


def _refuse_constant(name: str) -> None:
    """Rejects NaN and the infinities, which are not JSON."""
    raise ValueError(name)


BUILT_IN: Mapping[str, Callable[[str, str | None, str], Reward]] = {
    "exact_match": _compares(exact_match),
    "numeric_answer": _compares(numeric_answer),
    "regex": _regex,
    "json_schema": _json_schema,
    "length": _length,
    "logprob": _logprob,
}
"""Factories of the built-in rewards, given name, value and key of the answers."""
FORMS = (
    *("exact_match", "numeric_answer", "regex=EXPRESSION"),
    *("json_schema=FILE", "length=CHARACTERS", "logprob"),
)
"""The built-in rewards as users write them."""
