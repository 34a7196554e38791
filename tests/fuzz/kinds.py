"""All kinds of input, by name."""

from tests.fuzz import adapter_kinds, command_kinds, data_kinds, model_kinds, run_kinds

KINDS = {
    kind.name: kind
    for module in (model_kinds, data_kinds, adapter_kinds, run_kinds, command_kinds)
    for kind in module.KINDS
}
