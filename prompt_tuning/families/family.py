"""Definition of a model family: its `config.json`, tensor names, and writer."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import numpy as np

from prompt_tuning.checkpoints.stored_tensors import (
    FusedPart,
    Recipe,
    Transform,
    identity,
    layered,
    transpose,
)
from prompt_tuning.core.layer_kinds import MIXERS
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.class_labels import OF_DECODERS, ClassLayers
from prompt_tuning.families.hf_settings import HuggingFaceSettings, ModelFields

Recipes = dict[str, Recipe]
"""How to make each parameter from stored tensors, by its path."""
StoredNames = Collection[str]
"""Names of all tensors of a checkpoint; empty if it is not known."""
LayerNames = Mapping[str, tuple[str, Transform]]
"""Name and transform of a layer's tensors, by the path of our parameter."""
QKV, GATED = ("query", "key", "value"), ("gate", "up")
"""Projections that many families store as one."""

Buffers = Callable[[ModelConfig, StoredNames], Mapping[str, np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models in Hugging Face format.

    Attributes:
      model_type: `model_type` in `config.json`, which identifies the family.
      title: models of the family, for the table in the documentation.
      read_fields: returns fields of `ModelConfig` from the settings in `config.json`;
        raises `InputError` for a missing setting or an unsupported choice.
      recipes: returns how to make each parameter from stored tensors, given the config
        and the stored names, which reveal whether the base model's prefix was written.
      write_settings: returns the settings of a config, which `read_fields` understands;
        None if models of the family are only read.
      embedding_tables: possible names of the embedding table, in order of preference.
      base_prefix: prefix of names in the full model that its base model lacks; PEFT
        omits it for adapters trained on a base model.
      prefix_aliases: prefixes of the text model that adapters' files may use
        interchangeably, because versions of transformers and text-only models differ in
        them.
      unread_parts: parts of the model that texts do not pass, by their first names.
      head_name: name of an untied head.
      token_parts: parts of `config.json` that may name special tokens, if neither
        `config.json` itself nor `generation_config.json` does.
      unread_modules: modules of a layer, in the unread parts of the model, that PEFT
        must not adapt, with `{}` for the layer's index.
      logit_bias: possible names of a bias of logits that some checkpoints lack.
      expert_block: module around the experts in transformers, if its name differs from
        the stored tensors.
      cached_heads: returns the number of key/value heads in transformers' cache, and
        therefore in the prefixes that PEFT stores.
      tied_without_head: whether a checkpoint without a head has a tied one, whatever
        `config.json` says.
      omits_tied_setting: whether published folders do not declare an untied head, so
        that a stored head that differs from the table is one.
      scales_ids: whether transformers scales the vectors of ids, but not given vectors,
        so that PEFT's prompt changes those of the text, too.
      buffers: returns arrays that transformers computes, by their stored names, given
        the arguments of `recipes`; a checkpoint may lack them.
      class_layers: the head of a sequence classifier.
      inert: settings that `read_fields` ignores because they change logits only in
        training.
    """

    model_type: str
    title: str
    read_fields: Callable[[HuggingFaceSettings], ModelFields]
    recipes: Callable[[ModelConfig, StoredNames], Recipes]
    embedding_tables: tuple[str, ...]
    write_settings: Callable[[ModelConfig], dict[str, Any]] | None = None
    base_prefix: str = ""
    prefix_aliases: tuple[str, ...] = ()
    unread_parts: tuple[str, ...] = ()
    head_name: str = "lm_head.weight"
    logit_bias: tuple[str, ...] = ()
    token_parts: tuple[str, ...] = ()
    unread_modules: tuple[str, ...] = ()
    expert_block: str | None = None
    cached_heads: Callable[[ModelConfig], int] = lambda config: config.key_value_heads
    tied_without_head: bool = False
    omits_tied_setting: bool = False
    scales_ids: bool = False
    buffers: Buffers = lambda config, names: {}
    class_layers: ClassLayers = OF_DECODERS
    inert: Set[str] = frozenset()

    def like(
        self,
        model_type: str,
        title: str,
        read_fields: Callable[[HuggingFaceSettings], ModelFields],
        *,
        more_inert: Set[str] = frozenset(),
        **changes: Any,
    ) -> "Family":
        """Returns a family with other fields, whose models are only read by default.

        `more_inert` adds to `inert`; `changes` replace any other attributes.
        """
        inert = self.inert | more_inert
        own = dict(model_type=model_type, title=title, read_fields=read_fields)
        changes = {"write_settings": None, "inert": inert} | own | changes
        return dataclasses.replace(self, **changes)


def projection_names(
    config: ModelConfig,
    modules: Mapping[str, str],
    fused: Mapping[str, tuple[str, Transform]] | None = None,
    *,
    kernel: Transform = transpose,
) -> dict[str, tuple[str, Transform]]:
    """Returns the stored names of kernels, and of the biases that the config has.

    `fused` has the module and part of projections that are stored together, `kernel`
    tells how one in `modules` is stored.
    """
    parts: dict[str, tuple[str, Transform, Transform]] = {
        ours: (module, kernel, identity) for ours, module in modules.items()
    }
    for ours, (module, part) in (fused or {}).items():
        parts[ours] = (module, part, part)
    names = {}
    for ours, (module, kernel_part, bias_part) in parts.items():
        names[f"{ours}/kernel"] = (f"{module}.weight", kernel_part)
        part, _, name = ours.rpartition("/")
        if name in config.biased_projections and part not in MIXERS:
            names[f"{ours}/bias"] = (f"{module}.bias", bias_part)
    return names


def fused_in_groups(
    config: ModelConfig, module: str
) -> dict[str, tuple[str, FusedPart]]:
    """Returns the parts of a module with groups of queries, a key and a value."""
    groups = config.key_value_heads
    return fused_parts(
        "self_attention", QKV, module, (config.heads // groups, 1, 1), groups
    )


def fused_parts(
    place: str,
    names: Sequence[str],
    module: str,
    shares: tuple[int, ...] | None = None,
    groups: int = 1,
) -> dict[str, tuple[str, FusedPart]]:
    """Returns the parts of a module that has several projections of a place in a layer.

    Their `shares` of each of `groups` groups are equal by default; see `FusedPart`.
    """
    shares = shares or (1,) * len(names)
    return {
        f"{place}/{name}": (module, FusedPart(i, shares, groups, in_first=False))
        for i, name in enumerate(names)
    }


def norm_names(
    config: ModelConfig, modules: Mapping[str, str]
) -> dict[str, tuple[str, Transform]]:
    """Returns the stored names of norms from the stored module of each, by our path."""
    if config.norm == "layer_fixed":
        return {}
    kinds = {"scale": "weight", "bias": "bias"}
    return {
        f"{ours}/{kind}": (f"{module}.{stored}", identity)
        for ours, module in modules.items()
        for kind, stored in kinds.items()
        if kind == "scale" or config.norm == "layer"
    }


def layer_recipes(stack: str, pattern: str, layers: int, names: LayerNames) -> Recipes:
    """Returns the recipes of the stacked parameters of all layers.

    `pattern` is the prefix of the stored names, with `{}` for the layer's index.
    """
    return {
        f"{stack}/layers/{path}": layered(pattern + name, layers, transform)
        for path, (name, transform) in names.items()
    }


def final_norm_recipes(config: ModelConfig, stack: str, module: str) -> Recipes:
    """Returns the recipes of the norm after a stack, "encoder" or "decoder"."""
    names = norm_names(config, {f"{stack}/final_norm": module})
    return {path: Recipe((name,)) for path, (name, _) in names.items()}


def head_recipe(config: ModelConfig, name: str = "lm_head.weight") -> Recipes:
    """Returns the recipes of an untied head, or none."""
    if config.tied_head:
        return {}
    recipes = {"head/kernel": Recipe((name,))}
    if config.head_bias:
        bias = f"{name.removesuffix('weight')}bias"
        recipes["head/bias"] = Recipe((bias,))
    return recipes


def token_settings(config: ModelConfig) -> dict[str, Any]:
    """Returns the settings of special tokens, which all families have."""
    return {
        "bos_token_id": config.bos_id,
        "eos_token_id": [config.eos_id, *config.stop_ids]
        if config.stop_ids
        else config.eos_id,
        "pad_token_id": config.pad_id,
    }
