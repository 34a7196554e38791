"""Outlines have the parameters of the factories that they stand for."""

import ast
import inspect
from typing import Any

import pytest

from prompt_tuning.config.deferred_factories import factory_signature
from prompt_tuning.config.factories import FACTORIES, import_factories
from prompt_tuning.config.factory_outlines import outline
from prompt_tuning.config.parameter_checks import check_parameter
from prompt_tuning.core.errors import InputError

VALUES = (True, 3, 0.5, "text", None, [], ["text"], [3], [["text", 3]], {"key": [1]})
"""Values that a config can contain, one of each type."""


@pytest.mark.parametrize("name", FACTORIES)
def test_parameters_and_defaults(name):
    parameters = dict(factory_signature(import_factories()[name]).parameters)
    parameters.pop("self", None)
    outlined = inspect.signature(outline(name)).parameters
    assert list(outlined) == list(parameters)
    for key, parameter in outlined.items():
        if not isinstance(parameter.default, ast.expr):
            assert parameter.default == parameters[key].default


def refusal(factory: Any, name: str, value: object) -> str | None:
    try:
        check_parameter(factory, name, value)
    except InputError as problem:
        return str(problem)
    return None


@pytest.mark.parametrize("name", FACTORIES)
def test_values_are_refused_as_by_the_factory(name):
    """An outline may leave a check to the factory, but never refuses more."""
    factory, left = import_factories()[name], set()
    for parameter in inspect.signature(outline(name)).parameters:
        for value in VALUES:
            refused = refusal(outline(name), parameter, value)
            if refused is None and refusal(factory, parameter, value):
                left.add(parameter)
            else:
                assert refused == refusal(factory, parameter, value)
    # Types of other libraries, and classes that are no dataclasses.
    assert left <= {"objective", "optimizer", "path", "key"}
