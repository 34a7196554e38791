"""Merge LoRA and IA3 into the weights of a Hugging Face model.

The result is an ordinary model without adapters. LoRA gives `w + scaling * a @ b` (Hu
et al. 2021, section 4.1), with columns rescaled to DoRA's magnitudes. IA3 scales the
columns of a kernel and its bias, or the kernel's rows where it scales the input. All
other arrays and files are copied.
"""

import itertools
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors.numpy import save_file

from prompt_tuning.adapters.adapter import IA3, LORA, Adapter
from prompt_tuning.adapters.peft import modules
from prompt_tuning.adapters.peft.adapted_projections import check_projections
from prompt_tuning.adapters.peft.ia3 import SCALE, read_scale
from prompt_tuning.adapters.peft.lora import A, read_factors
from prompt_tuning.adapters.peft.lora_biases import write_biases
from prompt_tuning.adapters.peft.modules import Projection
from prompt_tuning.checkpoints.formats.safetensors import INDEX, open_safetensors
from prompt_tuning.checkpoints.quantized.methods import METHOD, quantization_of
from prompt_tuning.checkpoints.stored_tensors import StoredTensor, Transform
from prompt_tuning.core import atomic_files
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.file_names import check_links
from prompt_tuning.core.gguf_files import is_gguf
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.families.hf_folder import as_tagger, find_recipes, read_config

COPIED = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
)


def write_merged(
    folder: Path,
    base: Path,
    adapters: Sequence[Adapter],
    *,
    encoder: bool = False,
    force: bool = False,
) -> None:
    """Writes a model with adapters merged into its weights.

    The arrays keep their files and dtypes.

    Args:
      folder: folder to write.
      base: Hugging Face folder of the frozen model.
      adapters: adapters of kind LORA or IA3, in the order of application.
      encoder: whether the adapters belong to the model's encoder alone, as in a T5 that
        tags tokens; see `as_tagger`.
      force: whether to replace a merged model in this folder.

    Raises:
      InputError: if an adapter is of another kind, or does not belong to the model.
    """
    if is_gguf(base):
        raise InputError(
            f"{base} is a GGUF file, expected a Hugging Face folder: merge into the "
            "model that the file was made from (--base_model FOLDER)"
        )
    check_links(base, *COPIED)
    quantized = quantization_of(base)
    if quantized is not None:
        quantized.refuse(
            METHOD,
            "weights that are not quantized, since rounding would undo a part of the "
            "merge: merge into the model that was quantized",
        )
    stored = open_safetensors(base)
    model = as_tagger(read_config(base)) if encoder else read_config(base)
    by_path = modules.projections(model, stored)
    experts = modules.expert_projections(model)
    for adapter in adapters:
        _check_mergeable(adapter)
        check_projections(adapter, by_path | experts)
    biases: dict[str, np.ndarray] = {}
    for adapter in adapters:
        biases |= write_biases(adapter, model, stored)
    by_name = modules.by_module(by_path)
    of_experts = _parts_of_experts(model, stored, experts)
    copied = [path for name in COPIED for path in base.glob(name) if path.is_file()]
    if (base / INDEX).is_file():
        copied.append(base / INDEX)
    files: dict[str, list[str]] = {}
    for name, tensor in stored.items():
        files.setdefault(Path(tensor.source).name, []).append(name)

    def write(directory: Path) -> None:
        for path in copied:
            shutil.copyfile(path, directory / path.name)
        for file, names in files.items():
            arrays = {}
            for name in names:
                arguments = (stored[name], biases.get(name), by_name, adapters)
                parts = of_experts.get(name, ())
                arrays[name] = _merge_experts(_merge(name, *arguments), parts, adapters)
            save_file(arrays, directory / file, metadata={"format": "pt"})

    written = {*(path.name for path in copied), *files}
    atomic_files.write_folder(folder, write, known=written, force=force)


def _check_mergeable(adapter: Adapter) -> None:
    if adapter.kind not in (LORA, IA3):
        raise InputError(
            f"an adapter of kind {adapter.kind} does not change weights; only LORA "
            "and IA3 can be merged"
        )
    if adapter.settings.get("alora_invocation_tokens"):
        raise InputError(
            "an adapter that tokens invoke (aLoRA, LoRA.invocation) leaves the "
            "text before them as it is, so it cannot be merged into the weights: "
            "write it as a PEFT folder"
        )


def _merge(
    name: str,
    tensor: StoredTensor,
    bias: np.ndarray | None,
    by_name: Mapping[str, list[Projection]],
    adapters: Sequence[Adapter],
) -> np.ndarray:
    """Returns a stored array with the adapters merged in, else the same bits.

    A trained `bias` replaces the stored one.
    """
    module, _, leaf = name.rpartition(".")
    adapted = [part for part in by_name.get(module, ()) if _adapted(part, adapters)]
    array = tensor.read()
    if bias is not None:
        array = bias.astype(array.dtype)
    if not adapted or leaf not in ("weight", "bias"):
        return np.ascontiguousarray(array)
    wide = array.astype(np.float32)
    for part in adapted:
        whole = wide.T if leaf == "weight" and not part.in_first else wide  # a view
        columns = part.part.columns(whole.shape[-1])
        own = whole[..., columns]
        change = _change_kernel if leaf == "weight" else _change_bias
        # A LoRA reads the input before IA3 scales it.
        for adapter in sorted(adapters, key=lambda x: not _scales_input(x, part)):
            change(own, part, module, adapter)
        whole[..., columns] = own
    return wide.astype(array.dtype)


class _ExpertPart(NamedTuple):
    """Kernels of one projection of experts, or of their router, in a stored array.

    Attributes:
      projection: the projection.
      layer: index of its layer among those with experts.
      expert: the expert that the array belongs to, 0 for a router; None if it has all
        experts.
      transform: extracts the kernels from the array.
    """

    projection: Projection
    layer: int
    expert: int | None
    transform: Transform


def _parts_of_experts(
    config: ModelConfig, stored: Collection[str], experts: Mapping[str, Projection]
) -> dict[str, list[_ExpertPart]]:
    """Returns the parts of each stored array with kernels of experts or routers."""
    parts: dict[str, list[_ExpertPart]] = {}
    recipes = find_recipes(config, stored)
    for path, projection in experts.items():
        stored_as = path.replace("/experts/", "/expert_")
        recipe = recipes[stored_as if projection.experts else f"{path}/kernel"]
        for number, name in enumerate(recipe.sources):
            layer, expert = divmod(number, recipe.experts or 1)
            holds_all = projection.experts and recipe.experts is None
            single = None if holds_all else expert
            part = _ExpertPart(projection, layer, single, recipe.transform)
            parts.setdefault(name, []).append(part)
    return parts


def _merge_experts(
    array: np.ndarray, parts: Sequence[_ExpertPart], adapters: Sequence[Adapter]
) -> np.ndarray:
    """Returns a stored array with the LoRA of its parts, else the same bits."""
    wide = None
    for (projection, layer, expert, transform), adapter in itertools.product(
        parts, adapters
    ):
        module = projection.modules[layer]
        factors = read_factors(adapter.parameters, adapter.scalings, projection, module)
        if factors is None:
            continue
        wide = array.astype(np.float32) if wide is None else wide
        chosen = slice(None) if expert is None else expert
        view = transform(wide)  # [E, in, out] of a part of the array, or [in, out]
        view += factors.scaling * (factors.a[chosen] @ factors.b[chosen])
    return array if wide is None else wide.astype(array.dtype)


def _adapted(projection: Projection, adapters: Sequence[Adapter]) -> bool:
    leaves = (f"{projection.path}/{A}", f"{projection.path}/{SCALE}")
    return any(leaf in adapter.parameters for leaf in leaves for adapter in adapters)


def _scales_input(adapter: Adapter, projection: Projection) -> bool:
    return adapter.kind == IA3 and projection.scales_input


def _change_kernel(
    kernel: np.ndarray, projection: Projection, module: str, adapter: Adapter
) -> None:
    """Merges an adapter into a kernel `[in, out]` in place."""
    if adapter.kind == IA3:
        scale = read_scale(adapter.parameters, projection, module)
        kernel *= scale[:, None] if projection.scales_input else scale
        return
    factors = read_factors(adapter.parameters, adapter.scalings, projection, module)
    if factors is not None:
        kernel += factors.scaling * (factors.a[0] @ factors.b[0])
        present = factors.magnitude is not None and factors.magnitude.any()
        if present:
            kernel *= factors.magnitude / np.linalg.norm(kernel, axis=0)


def _change_bias(
    bias: np.ndarray, projection: Projection, module: str, adapter: Adapter
) -> None:
    """Merges an adapter into a bias `[out]` in place."""
    if adapter.kind == IA3 and not _scales_input(adapter, projection):
        bias *= read_scale(adapter.parameters, projection, module)
