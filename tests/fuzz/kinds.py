"""All kinds of input, by name."""

import importlib.util

from tests.fuzz import (
    adapter_kinds,
    command_kinds,
    data_kinds,
    edge_kinds,
    model_kinds,
    run_kinds,
)

_MODULES = [model_kinds, data_kinds, adapter_kinds, run_kinds, command_kinds]
_MODULES.append(edge_kinds)
if importlib.util.find_spec("starlette") is not None:  # of the extra serve
    from tests.fuzz import server_kinds

    _MODULES.append(server_kinds)
KINDS = {kind.name: kind for module in _MODULES for kind in module.KINDS}
