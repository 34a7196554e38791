"""Export a model's trained parameters as adapters.

Prompts are evaluated first, so an adapter contains only arrays and does not need the
module that computed them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from prompt_tuning.adapters.adapter import (
    CLASSES,
    CLASSES_FOLDER,
    HEAD_PATH,
    LORA,
    MULTITASK,
    PEFT_KINDS,
    PREFIX,
    PREFIX_PATH,
    PROMPT,
    ROWS_PATH,
    TOKENS,
    Adapter,
    Arrays,
    TokenIds,
    factorized_adapter,
)
from prompt_tuning.adapters.peft import peft_class_head
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.layer_kinds import check_all_attention
from prompt_tuning.families.hf_folder import class_layers
from prompt_tuning.models.build import adaptable
from prompt_tuning.models.decoder_only import DecoderOnly
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.prompts.adapter_kinds import adapter_specs, prompt_classes
from prompt_tuning.prompts.prompt_module import InputDependentPrompt
from prompt_tuning.prompts.token_rows import NAME, TokenRows
from prompt_tuning.settings.prompting import Prompting


def export_adapters(model: LanguageModel) -> list[Adapter]:
    """Exports the prompts and adapters of a model, one adapter per kind.

    A prompt is evaluated by its module without dropout: reparameterized prompts are
    folded, padding is removed, and prompts of several tasks are factorized unless they
    already are.
    """
    parameters: dict[str, Arrays] = {}
    settings: dict[str, dict[str, Any]] = {}
    for stack, prompt in model.prompts().items():
        kind, arrays, own = prompt.export()
        settings.setdefault(kind, {}).update(own)
        leaves = {f"{stack}/prompt/{leaf}": array for leaf, array in arrays.items()}
        parameters.setdefault(kind, {}).update(leaves)
    if MULTITASK in parameters and PROMPT in parameters:
        # One stack has a prompt for each task, and the other has one for all tasks.
        multitask = parameters[MULTITASK]
        tasks = next(len(leaf) for path, leaf in multitask.items() if "rows" in path)
        for path, vectors in parameters.pop(PROMPT).items():
            repeated = np.broadcast_to(vectors, (tasks, *vectors.shape))
            multitask |= factorized_adapter({_stack(path): repeated}).parameters
    prompts = [
        Adapter(kind=kind, parameters=x, settings=settings[kind])
        for kind, x in parameters.items()
    ]
    others = _export_projections(model) + _export_tokens(model)
    return prompts + others + _export_classes(model)


def _export_tokens(model: LanguageModel) -> list[Adapter]:
    """Exports trained token rows, if any."""
    rows = model.token_embedder.adapters.get(NAME)
    if not isinstance(rows, TokenRows):
        return []
    parameters = {ROWS_PATH: np.asarray(rows.rows[...])}
    if rows.head is not None:
        parameters[HEAD_PATH] = np.asarray(rows.head[...])
    ids = TokenIds(rows.ids, rows.head_ids)
    return [Adapter(kind=TOKENS, parameters=parameters, tokens=ids)]


def _export_classes(model: LanguageModel) -> list[Adapter]:
    """Exports the class head, if any; a frozen one too, as PEFT does."""
    classes, head = model.class_rows, model.head
    if head is None or not model.config.labels:
        return []
    if classes is None:
        leaves = {"kernel": head.kernel, "bias": head.bias}
        if head.transform is not None and class_layers(model.config).saved:
            dense = head.transform
            leaves |= {"dense": dense.kernel, "dense_bias": dense.bias}
    else:
        names = ("kernel", "bias", "dense", "dense_bias")
        leaves = {name: getattr(classes, name) for name in names}
    usual = model.config.pooling
    if model.pooling != usual:
        raise InputError(
            f"ClassHead.pooling is {model.pooling!r}, but only a run's own checkpoints "
            f"record that: export a head with pooling={usual!r}"
        )
    arrays = {
        CLASSES_FOLDER + name: np.asarray(leaf[...])
        for name, leaf in leaves.items()
        if leaf is not None
    }
    return [Adapter(kind=CLASSES, parameters=arrays)]


def join_classes(adapters: Sequence[Adapter]) -> list[Adapter]:
    """Puts a class head into the only other adapter, as PEFT stores it."""
    heads = [x for x in adapters if x.kind == CLASSES]
    others = [x for x in adapters if x.kind != CLASSES]
    if len(heads) != 1 or len(others) != 1:
        return list(adapters)
    parameters = others[0].parameters | heads[0].parameters
    return [dataclasses.replace(others[0], parameters=parameters)]


def join_tokens(adapters: Sequence[Adapter]) -> list[Adapter]:
    """Puts token rows into the LoRA, as PEFT stores them."""
    rows = next((x for x in adapters if x.kind == TOKENS), None)
    lora = next((x for x in adapters if x.kind == LORA), None)
    if rows is None or lora is None:
        return list(adapters)
    parameters = lora.parameters | rows.parameters
    joined = dataclasses.replace(lora, parameters=parameters, tokens=rows.tokens)
    return [joined if x is lora else x for x in adapters if x is not rows]


def _stack(path: str) -> str:
    """Returns the stack that a parameter belongs to."""
    return path.split("/")[0]


def _export_projections(model: LanguageModel) -> list[Adapter]:
    """Exports projection adapters, in the order of application.

    Kinds that no projection combines are in the order of the list of factories.
    """
    parameters: dict[str, Arrays] = {}
    scalings: dict[str, dict[str, float]] = {}
    settings: dict[str, dict[str, Any]] = {}
    order: list[str] = []
    for path, dense in adaptable(model):
        applied = []
        for name, adapter in dense.adapters.items():
            exported = adapter.export(f"{path}/adapters/{name}")
            arrays = {
                f"{path}/adapters/{name}/{leaf}": array
                for leaf, array in exported.arrays.items()
            }
            parameters.setdefault(exported.kind, {}).update(arrays)
            if exported.scaling is not None:
                scaling = float(exported.scaling)
                scalings.setdefault(exported.kind, {})[path] = scaling
            settings.setdefault(exported.kind, {}).update(exported.settings)
            applied.append(exported.kind)
        if len(applied) > max(1, len(order)):
            order = applied
    kinds = dict.fromkeys([*order, *adapter_specs()])
    return [
        Adapter(
            kind=kind,
            parameters=parameters[kind],
            scalings=scalings.get(kind, {}),
            settings=settings[kind],
        )
        for kind in kinds
        if kind in parameters
    ]


def runs_model_for_peft(adapter: Adapter) -> bool:
    """Whether `convert_for_peft` needs to run the model for this adapter."""
    return adapter.kind not in PEFT_KINDS


def convert_for_peft(
    adapter: Adapter, model: LanguageModel | None, prompting: Prompting | None
) -> Adapter:
    """Converts an adapter to a form with the same effect in PEFT.

    PEFT trains and uses a second prompt, the decoder's, only in multi-task prompts; two
    plain prompts become one task of it. A deep prompt of a decoder-only model becomes
    the keys and values that it computes.

    Raises:
      InputError: if its effect in PEFT would differ.
    """
    if adapter.kind in adapter_specs() or adapter.kind in (TOKENS, CLASSES):
        return adapter
    kind = prompt_classes().get(adapter.kind)
    if kind is not None and issubclass(kind, InputDependentPrompt):
        raise InputError(
            "PEFT has no prompts that depend on the text; write a checkpoint "
            "(convert --to checkpoint)"
        )
    _check_prompting(prompting or Prompting())
    if runs_model_for_peft(adapter) and model is not None:
        prefix, head = _convert_to_prefix(model), peft_class_head.class_head_of(adapter)
        return dataclasses.replace(prefix, parameters=prefix.parameters | head)
    if adapter.kind == PROMPT and len(peft_class_head.without_class_head(adapter)) == 2:
        return factorized_adapter(
            {_stack(path): x[None] for path, x in adapter.parameters.items()}
        )
    return adapter


def _check_prompting(prompting: Prompting) -> None:
    """Checks that a prompt has the position and visibility of PEFT's prompts."""
    if (
        prompting.placement != "prefix"
        or prompting.prefix_attention
        or prompting.sees != Prompting().sees
    ):
        raise InputError(
            "PEFT puts every prompt before the text, where it sees what a prefix sees; "
            f"this one was trained with {prompting}. Write it as an array, e.g. to "
            "prompt.npy, for a program that supports this"
        )


def _convert_to_prefix(model: LanguageModel) -> Adapter:
    """Computes the keys and values of a prompt that precedes the decoder's text."""
    check_all_attention(
        model.config,
        "PEFT could have this prompt only as a key/value prefix",
        "write a checkpoint (convert --to checkpoint)",
    )
    context = model.prefix() if isinstance(model, DecoderOnly) else None
    if context is None:
        raise InputError(
            "PEFT has no deep prompts, and this one cannot become a key/value prefix: "
            "it is not in a decoder-only model, or does not run before the text"
        )
    # [L, G, 1, P, K] each; the prompt is the only row.
    pair = np.stack(
        [np.asarray(x, np.float32) for x in context.kept.key_values], axis=1
    )
    by_position = pair[:, :, :, 0].swapaxes(2, 3)  # [L, 2, P, G, K]
    return Adapter(kind=PREFIX, parameters={PREFIX_PATH: by_position})
