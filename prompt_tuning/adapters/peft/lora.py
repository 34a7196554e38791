"""Convert LoRA between PEFT's tensors and our parameters (Hu et al. 2021).

PEFT stores `A [r, in]` and `B [out, r]` for each module of each layer, and adds `alpha
/ r * B A x`. We store `a [L, in, r]` and `b [L, r, out]` for each projection. With DoRA
(Liu et al. 2024) there are also magnitudes, `[out]` and `[L, out]`.

For `E` experts PEFT stores `A [E * r, in]`, expert after expert, and `B [out, r * E]`,
rank after rank; we store `a [L, E, in, r]` and `b [L, E, r, out]`.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from prompt_tuning.adapters.adapter import Arrays
from prompt_tuning.adapters.peft import peft_settings
from prompt_tuning.adapters.peft.folder import AdapterFolder
from prompt_tuning.adapters.peft.modules import ExpertPlace, Projection, by_module
from prompt_tuning.adapters.peft.peft_settings import Settings
from prompt_tuning.adapters.peft.shape_checks import (
    LORA_A,
    LORA_B,
    LORA_MAGNITUDE,
    MODEL_PREFIX,
    require_tensor,
)
from prompt_tuning.checkpoints.stored_tensors import FusedPart
from prompt_tuning.core.errors import InputError

A, B, M = "adapters/lora/a", "adapters/lora/b", "adapters/lora/magnitude"


@dataclasses.dataclass(frozen=True)
class Factors:
    """The LoRA of one projection in one layer: `scaling * x @ a @ b`.

    Attributes:
      a: first factor of each of `E` experts; `E` is 1 without experts.
      b: second factor.
      scaling: factor of the product.
      magnitude: magnitude of each output, for DoRA.
    """

    a: Float[np.ndarray, "E in r"]
    b: Float[np.ndarray, "E r out"]
    scaling: float
    magnitude: Float[np.ndarray, "out"] | None = None


def read_lora(
    folder: AdapterFolder, names: Mapping[str, str], known: Mapping[str, Projection]
) -> tuple[Arrays, dict[str, float]]:
    """Returns our parameters and scalings.

    Layers of lower rank are padded with zeros, layers without a LoRA are zero, and if
    scalings differ among layers, `b` absorbs the difference.

    Args:
      folder: the adapter.
      names: name in its tensors of each adapted module, by the module's full name.
      known: projections of the model, by path.

    Raises:
      InputError: if a shape does not fit the projection.
    """
    parameters: Arrays = {}
    scalings = {}
    for path, projection in known.items():
        layers = {
            layer: _read_module(folder, names[module], projection)
            for layer, module in enumerate(projection.modules)
            if module in names
        }
        if not layers:
            continue
        everywhere = [(layer, slice(None), x) for layer, x in layers.items()]
        a, b, scalings[path] = _stack_factors(everywhere, projection)
        if not projection.experts:
            a, b = a[:, 0], b[:, 0]
        parameters |= {f"{path}/{A}": a, f"{path}/{B}": b}
        if peft_settings.setting(folder.settings, "use_dora"):
            stack = len(projection.modules), projection.size_out
            magnitudes = np.zeros(stack, np.float32)
            for layer, factors in layers.items():
                magnitudes[layer] = factors.magnitude
            parameters[f"{path}/{M}"] = magnitudes
    return parameters, scalings


def _stack_factors(
    placed: Sequence[tuple[int, slice, Factors]], projection: Projection
) -> tuple[Float[np.ndarray, "L E in r"], Float[np.ndarray, "L E r out"], float]:
    """Stacks factors by layer and experts, with zeros where there are none.

    Also returns their common scaling.
    """
    present = [factors for _, _, factors in placed]
    scaling = _common_scaling(present)
    rank = max(factors.a.shape[2] for factors in present)
    stack = len(projection.modules), projection.experts or 1
    a = np.zeros((*stack, projection.size_in, rank), np.float32)
    b = np.zeros((*stack, rank, projection.size_out), np.float32)
    for layer, experts, factors in placed:
        own_rank = factors.a.shape[2]
        a[layer, experts, :, :own_rank] = factors.a
        b[layer, experts, :own_rank] = _rescale(factors, scaling)
    return a, b, scaling


def read_single_experts(
    folder: AdapterFolder,
    names: Mapping[str, str],
    places: Mapping[str, ExpertPlace],
    known: Mapping[str, Projection],
) -> tuple[Arrays, dict[str, float]]:
    """Returns the same for experts that have their own modules.

    `places` has the kernel of each such module. The other arguments are as in
    `read_lora`.

    Raises:
      InputError: if a shape does not fit the kernel, or there is DoRA.
    """
    if names and peft_settings.setting(folder.settings, "use_dora"):
        raise InputError(
            f"{folder.source} has use_dora and adapts experts ({next(iter(names))}), "
            "which is not supported together: merge it with PEFT (merge_and_unload)"
        )
    found: dict[str, list[tuple[int, slice, Factors]]] = {}
    for module, name in names.items():
        path, layer, expert = places[module]
        one = dataclasses.replace(known[path], experts=0, part=FusedPart())
        factors = _read_module(folder, name, one)
        place = layer, slice(expert, expert + 1), factors
        found.setdefault(path, []).append(place)
    parameters: Arrays = {}
    scalings = {}
    for path, placed in found.items():
        a, b, scalings[path] = _stack_factors(placed, known[path])
        parameters |= {f"{path}/{A}": a, f"{path}/{B}": b}
    return parameters, scalings


def _read_module(folder: AdapterFolder, module: str, projection: Projection) -> Factors:
    tensors, settings, source = folder.tensors, folder.settings, folder.source
    a, b = (
        require_tensor(tensors, f"{MODEL_PREFIX}{module}{half}", 2, source)
        for half in (LORA_A, LORA_B)
    )
    sizes = (projection.size_in, projection.module_out)
    experts = projection.experts or 1
    if len(a) % experts:
        raise InputError(
            f"{source}: the LoRA of {module} has rank {len(a)}, expected a multiple of "
            f"the model's {experts} experts; was it made for another model?"
        )
    if (a.shape[1], b.shape[0]) != sizes:
        raise InputError(
            f"{source}: the LoRA of {module} maps {a.shape[1]} to {b.shape[0]} "
            f"numbers, but the model's projection maps {sizes[0]} to {sizes[1]}; was "
            "it made for another model?"
        )
    columns = projection.part.columns(len(b))
    magnitude = None
    if peft_settings.setting(settings, "use_dora"):
        name = f"{MODEL_PREFIX}{module}{LORA_MAGNITUDE}"
        magnitude = require_tensor(tensors, name, 1, source)
        if len(magnitude) != len(b):
            raise InputError(
                f"{source}: {name} has shape {magnitude.shape}, expected {len(b)} "
                "numbers, one of each output"
            )
        magnitude = magnitude[columns]
    a = a.reshape(experts, -1, a.shape[1])  # [E, r, in]
    b = b[columns].reshape(projection.size_out, -1, experts)  # [out, r, E]
    scaling = peft_settings.scaling_of(settings, module)
    return Factors(a.swapaxes(1, 2), b.transpose(2, 1, 0), scaling, magnitude)


def write_lora(
    parameters: Arrays,
    scalings: Mapping[str, float],
    known: Mapping[str, Projection],
) -> tuple[Arrays, dict[str, float]]:
    """Returns PEFT's tensors and the scaling of each module.

    Zeros that pad lower ranks and layers without a LoRA are not written.

    Raises:
      InputError: if a shape does not fit the projection, or a scaling is missing.
    """
    tensors: Arrays = {}
    module_scalings: dict[str, float] = {}
    for module, parts in by_module(known).items():
        factors = [read_factors(parameters, scalings, part, module) for part in parts]
        if all(part is None for part in factors):
            continue
        whole = _without_zeros(fuse(factors, parts))
        if whole is None:
            continue
        a = whole.a.swapaxes(1, 2).reshape(-1, whole.a.shape[1])
        b = whole.b.transpose(2, 1, 0).reshape(whole.b.shape[2], -1)
        tensors[f"{MODEL_PREFIX}{module}{LORA_A}"] = np.ascontiguousarray(a)
        tensors[f"{MODEL_PREFIX}{module}{LORA_B}"] = np.ascontiguousarray(b)
        module_scalings[module] = whole.scaling
        if whole.magnitude is not None:
            tensors[f"{MODEL_PREFIX}{module}{LORA_MAGNITUDE}"] = whole.magnitude
    return tensors, module_scalings


def _without_zeros(factors: Factors) -> Factors | None:
    """Removes ranks that are zero in both factors; None if nothing is left."""
    used = factors.a.any(axis=(0, 1)) | factors.b.any(axis=(0, 2))
    if used.all():
        return factors
    if not used.any():
        return None
    return dataclasses.replace(factors, a=factors.a[:, :, used], b=factors.b[:, used])


def read_factors(
    parameters: Arrays,
    scalings: Mapping[str, float],
    projection: Projection,
    module: str,
) -> Factors | None:
    """Returns the LoRA of one projection in one layer, if it has one.

    Raises:
      InputError: if a shape does not fit the projection, or a scaling is missing.
    """
    path = projection.path
    if f"{path}/{A}" not in parameters:
        return None
    a, b = parameters[f"{path}/{A}"], parameters[f"{path}/{B}"]
    rank, stack = a.shape[-1], (len(projection.modules),)
    if projection.experts:
        stack = (*stack, projection.experts)
    expected = (*stack, projection.size_in, rank), (*stack, rank, projection.size_out)
    if (a.shape, b.shape) != expected:
        raise InputError(
            f"{path} has a LoRA of shapes {a.shape} and {b.shape}, expected "
            f"{expected[0]} and {expected[1]}; was it trained on another model?"
        )
    if path not in scalings:
        raise InputError(f"the LoRA of {path} has no scaling (alpha / r)")
    layer = projection.modules.index(module)
    magnitudes = parameters.get(f"{path}/{M}")
    magnitude = None if magnitudes is None else magnitudes[layer]
    a, b = (x[layer] if projection.experts else x[layer][None] for x in (a, b))
    return Factors(a, b, scalings[path], magnitude)


def fuse(parts: Sequence[Factors | None], projections: Sequence[Projection]) -> Factors:
    """Fuses the LoRAs of projections that are columns of one module.

    If all have the same `a` and scaling, `a` is kept, and projections without a LoRA
    get zeros in `b`. Otherwise each LoRA gets its own ranks: `[a_1 a_2]` and `[[b_1,
    0], [0, b_2]]`.

    Args:
      parts: LoRA of each projection; at least one is not None.
      projections: all projections within the module.

    Raises:
      InputError: if only some of the projections have DoRA.
    """
    present = [part for part in parts if part is not None]
    first, scaling = present[0], _common_scaling(present)
    same = all(
        part.scaling == first.scaling and np.array_equal(part.a, first.a)
        for part in present
    )
    ranks = [0 if part is None else part.a.shape[2] for part in parts]
    starts = [0] * len(parts) if same else [sum(ranks[:i]) for i in range(len(parts))]
    rank = first.a.shape[2] if same else sum(ranks)
    count = projections[0].module_out
    b = np.zeros((len(first.a), rank, count), np.float32)
    for index, part in enumerate(parts):
        if part is not None:
            rows = slice(starts[index], starts[index] + ranks[index])
            columns = projections[index].part.columns(count)
            b[:, rows, columns] = _rescale(part, scaling)
    a = first.a if same else np.concatenate([part.a for part in present], axis=2)
    return Factors(a, b, scaling, _fuse_magnitudes(parts, projections))


def _fuse_magnitudes(
    parts: Sequence[Factors | None], projections: Sequence[Projection]
) -> Float[np.ndarray, "out"] | None:
    """Returns the magnitudes of all outputs of a module; None without DoRA."""
    magnitudes = [None if part is None else part.magnitude for part in parts]
    if all(x is None for x in magnitudes):
        return None
    whole = np.zeros(projections[0].module_out, np.float32)
    for magnitude, projection in zip(magnitudes, projections, strict=True):
        if magnitude is None:
            raise InputError(
                f"{projection.path} has no DoRA, but others in the same module of "
                "transformers have: PEFT rescales a module as a whole, so adapt all of "
                "its projections"
            )
        whole[projection.part.columns(len(whole))] = magnitude
    return whole


def lora_settings(
    tensors: Arrays,
    scalings: Mapping[str, float],
    settings: Settings,
    known: Mapping[str, Sequence[Projection]],
) -> dict[str, object]:
    """Returns `r` and `lora_alpha`, with patterns for modules that differ.

    Args:
      tensors: PEFT's tensors.
      scalings: scaling of each module.
      settings: settings of the new adapter, which decide whether alpha is divided by
        `sqrt(r)`.
      known: projections within each module.
    """
    ranks = {
        module: len(tensors[f"{MODEL_PREFIX}{module}{LORA_A}"])
        // (known[module][0].experts or 1)
        for module in scalings
    }
    alphas = {
        module: _alpha(scaling, peft_settings.divisor(settings, ranks[module]))
        for module, scaling in scalings.items()
    }
    rank = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {name: x for name, x in alphas.items() if x != alpha},
    }


def _common_scaling(parts: Sequence[Factors]) -> float:
    """Returns a common scaling for all parts: the first nonzero one."""
    return next((part.scaling for part in parts if part.scaling), 0.0)


def _rescale(factors: Factors, scaling: float) -> Float[np.ndarray, "E r out"]:
    """Returns `b` for another scaling; bit-identical if the scaling is unchanged."""
    if factors.scaling == scaling:
        return factors.b
    return (factors.b * np.float64(factors.scaling / scaling)).astype(np.float32)


def _alpha(scaling: float, divided_by: float) -> float | int:
    """Returns alpha, rounded to an integer if only rounding keeps it from one."""
    alpha = scaling * divided_by
    whole = round(alpha)
    return whole if abs(alpha - whole) <= 1e-9 * max(1.0, abs(alpha)) else alpha
