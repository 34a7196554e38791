"""Storage of kernels and tables, as the config and the checkpoint ask for."""

from collections.abc import Iterator, Mapping

from flax import nnx
from jaxtyping import Array

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.quantization.nibbles import GROUP, group_size
from prompt_tuning.core.quantization.stores import (
    INT8,
    STORES,
    TABLES,
    Store,
    is_packed,
    weight_shape,
)
from prompt_tuning.models.experts import MixtureOfExperts
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.layers import Dense, TableModule


def store_as(model: LanguageModel, stores: Mapping[str, Store]) -> None:
    """Changes how the parameters at some paths are stored.

    Raises:
      InputError: if a kernel's inputs cannot be packed, or not in groups of that size.
    """
    if not stores:
        return
    for path, (module, name) in dict(_kernels(model)).items():
        # Tables that are not quantized change as all other parameters.
        if path in stores and (stores[path].quantized or path not in TABLES):
            size_in = _inputs(path, getattr(module, name)[...])
            if size_in % (stores[path].group or 1):
                raise InputError(
                    f"{path} is stored as {stores[path]}, but the model expects "
                    f"{size_in} inputs; does the config belong to this checkpoint?"
                )
            module.store_as(name, stores[path])
    for path, node in list(nnx.iter_graph(model)):
        store = stores.get("/".join(map(str, path)))
        if isinstance(node, nnx.Param) and store is not None and not store.quantized:
            node.set_value(node[...].astype(store.name))


def _inputs(path: str, kernel: Array) -> int:
    """Returns the number of a kernel's inputs, or of a table's columns."""
    return weight_shape(path, kernel)[-1 if path in TABLES else -2]


def _kernels(
    model: LanguageModel,
) -> Iterator[tuple[str, tuple[Dense | MixtureOfExperts | TableModule, str]]]:
    """Yields each kernel's path, its module, and its name in the module."""
    for path, node in nnx.iter_graph(model):
        parent = "/".join(map(str, path))
        if isinstance(node, Dense):
            yield f"{parent}/kernel", (node, "kernel")
        elif isinstance(node, MixtureOfExperts):
            for name in node.experts:
                yield f"{parent}/expert_{name}", (node, f"expert_{name}")
        elif isinstance(node, TableModule):
            for name in ("embedding", "kernel"):
                table = f"{parent}/{name}"
                if table in TABLES and getattr(node, name, None) is not None:
                    yield table, (node, name)


def chosen_stores(model: LanguageModel) -> dict[str, Store]:
    """Returns the stores of tables, and of kernels with a chosen group size."""
    config, stores = model.config, {}
    store, chosen = config.parameter_dtype, config.quantization_group
    tables = config.quantized_tables and store in STORES
    for path, (module, name) in _kernels(model):
        kernel = getattr(module, name)[...]
        # A head of classes is small, and may be trained.
        table = tables and path in TABLES and not (config.labels and "head" in path)
        if table or (chosen is not None and is_packed(kernel)):
            size = _inputs(path, kernel)
            group = None if store == INT8 else group_size(size, chosen or GROUP)
            stores[path] = Store(store, group)
    return stores
