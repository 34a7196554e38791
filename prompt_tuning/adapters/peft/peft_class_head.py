"""Convert a trained class head between PEFT's tensors and our parameters.

With `task_type` SEQ_CLS or TOKEN_CLS, PEFT trains the module `score` or `classifier` as
a whole (`modules_to_save`) and stores it with any adapter: as `base_model.score.weight`
for prompts and prefixes, and as `base_model.model.score.weight` for LoRA and IA3. In
some encoders the module contains a dense layer (RoBERTa); BERT's does not, and is only
stored if `modules_to_save` also names its `pooler` (ModernBERT: `head`). The module of
TOKEN_CLS is one layer with a bias.
"""

from typing import Any

import numpy as np

from prompt_tuning.adapters.adapter import CLASSES_FOLDER, CLASSES_PATH, Adapter, Arrays
from prompt_tuning.adapters.peft.folder import AdapterFolder
from prompt_tuning.adapters.peft.peft_settings import (
    SAVED_HEADS,
    SEQ_CLS,
    TOKEN_CLS,
)
from prompt_tuning.adapters.peft.shape_checks import MODEL_PREFIX
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.class_labels import (
    BIAS,
    DENSE,
    DENSE_BIAS,
    DENSE_NORM,
    HEAD,
    OF_DECODERS,
    ClassLayers,
)
from prompt_tuning.families.hf_folder import find_family

PREFIXES = ("base_model.", MODEL_PREFIX)
_OURS = {HEAD: "kernel", BIAS: "bias", DENSE: "dense", DENSE_BIAS: "dense_bias"}
_OURS[DENSE_NORM] = "dense_norm"
"""Our names for the frozen layers of a model with a class head."""


def split_class_head(
    folder: AdapterFolder, config: ModelConfig
) -> tuple[Arrays, Arrays]:
    """Splits off our parameters of a class head, if any, from the other tensors.

    Raises:
      InputError: if the head does not fit the model's family and width.
    """
    task, tensors = folder.settings.get("task_type"), folder.tensors
    if task not in (SEQ_CLS, TOKEN_CLS):
        return {}, tensors
    layers = _layers(config, task)
    leaves = _leaves(layers)
    modules = {name.rpartition(".")[0] for name in leaves.values()} | {*SAVED_HEADS}
    starts = tuple(f"{prefix}{module}." for prefix in PREFIXES for module in modules)
    head = {name: x for name, x in tensors.items() if name.startswith(starts)}
    others = {name: x for name, x in tensors.items() if name not in head}
    if not head:
        return {}, others
    found: Arrays = {}
    for name, array in head.items():
        bare = name.removeprefix(PREFIXES[1]).removeprefix(PREFIXES[0])
        if not layers.dense:  # PEFT's two names of the one matrix of a decoder
            bare = bare.replace(SAVED_HEADS[0], layers.rows, 1)
        leaf = next((leaf for leaf, theirs in leaves.items() if theirs == bare), bare)
        found[leaf] = np.ascontiguousarray(array.T) if leaf == "dense" else array
    classes = len(found["kernel"]) if found.get("kernel", np.empty(())).ndim else 0
    expected = _shapes(leaves, classes, config.width)
    needed = {leaf for leaf in expected if layers.saved or not leaf.startswith("dense")}
    fits = all(found[leaf].shape == expected.get(leaf) for leaf in found)
    if not classes or not fits or not needed <= found.keys():
        shapes = {name: x.shape for name, x in head.items()}
        wanted = {leaves[leaf]: shape for leaf, shape in expected.items()}
        raise InputError(
            f"{folder.source} has a head of classes {shown(shapes)}, expected one of a "
            f"class or more and the model's width, {config.width}: {shown(wanted)}"
        )
    return {CLASSES_FOLDER + leaf: x for leaf, x in found.items()}, others


def _layers(config: ModelConfig, task: str) -> ClassLayers:
    tags = task == TOKEN_CLS
    return find_family(config).class_layers.of("tokens" if tags else "single_label")


def _leaves(layers: ClassLayers) -> dict[str, str]:
    """Returns the stored name of each of our leaves."""
    return {_OURS[p]: x.sources[0] for p, x in layers.recipes().items() if p in _OURS}


def _shapes(leaves: dict[str, str], classes: int, width: int) -> dict[str, tuple]:
    shapes = {"kernel": (classes, width), "bias": (classes,)}
    shapes |= {"dense": (width, width), "dense_bias": (width,), "dense_norm": (width,)}
    return {leaf: shape for leaf, shape in shapes.items() if leaf in leaves}


def without_class_head(adapter: Adapter) -> Arrays:
    """Returns an adapter's parameters without its class head."""
    parameters = adapter.parameters.items()
    return {p: x for p, x in parameters if not p.startswith(CLASSES_FOLDER)}


def class_head_of(adapter: Adapter) -> Arrays:
    """Returns the parameters of an adapter's class head; none without one."""
    parameters = adapter.parameters.items()
    return {p: x for p, x in parameters if p.startswith(CLASSES_FOLDER)}


def write_class_head(
    head: Arrays,
    config: ModelConfig | None,
    *,
    beside_prompt: bool,
    task: str | None = None,
) -> tuple[Arrays, dict[str, Any]]:
    """Returns PEFT's tensors and settings of a class head.

    Args:
      head: parameters of the head.
      config: config of the model; None if unknown, which stands for a decoder.
      beside_prompt: whether the adapter is a prompt or a prefix.
      task: task type of the adapter; None for that of the model's head.

    Raises:
      InputError: if the model is unknown, and the head is not a decoder's.
    """
    if config is None and head.keys() != {CLASSES_PATH}:
        raise InputError(
            "names of the head of classes depend on its model: set the model that it "
            "is for (convert --base_model)"
        )
    tags = task == TOKEN_CLS or (config is not None and config.problem == "tokens")
    task = TOKEN_CLS if tags else SEQ_CLS
    layers = OF_DECODERS if config is None else _layers(config, task)
    leaves, prefix = _leaves(layers), PREFIXES[0 if beside_prompt else 1]
    tensors = {}
    for path, array in head.items():
        leaf = path.removeprefix(CLASSES_FOLDER)
        stored = np.ascontiguousarray(array.T) if leaf == "dense" else array
        tensors[f"{prefix}{leaves[leaf]}"] = stored
    saved = [*SAVED_HEADS]
    if f"{CLASSES_FOLDER}dense" in head and not layers.saved:
        # The module that contains the dense layer: "pooler", or "head" of ModernBERT.
        saved.append(layers.dense.split(".")[-2])
    if (module := layers.rows.partition(".")[0]) not in SAVED_HEADS:
        saved.append(module)  # BART and T5, where PEFT trains it only if it is named
    return tensors, {"modules_to_save": saved, "task_type": task}
