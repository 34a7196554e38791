"""Types and ranges of the parameters of factories, however they are configured."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from prompt_tuning.core.field_checks import check_value


def check_parameter(factory: Callable[..., Any], name: str, value: Any) -> None:
    """Checks the type and the range of a value for a factory's parameter."""
    hints = parameter_hints(factory)
    if name in hints:
        check_value(f"{factory.__name__}.{name}", value, hints[name])


@functools.cache
def parameter_hints(factory: Callable[..., Any]) -> Mapping[str, Any]:
    """Returns the types of a factory's parameters, with their ranges."""
    function = factory.__init__ if isinstance(factory, type) else factory
    return get_type_hints(function, include_extras=True)
