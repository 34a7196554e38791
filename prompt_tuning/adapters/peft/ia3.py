"""IA3 between PEFT's tensors and our parameters (Liu et al. 2022, section 3.3).

PEFT keeps `ia3_l [out, 1]` for a module whose output is scaled, `[1, in]` for one whose
input is; we keep `scale [L, out]` or, of the feed-forward layer's `down`, `[L, in]`.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from prompt_tuning.adapters.adapter import Arrays
from prompt_tuning.adapters.peft.modules import Projection, by_module
from prompt_tuning.adapters.peft.shape_checks import IA3, MODEL_PREFIX
from prompt_tuning.core.errors import InputError

SCALE = "adapters/ia3/scale"


def read_ia3(
    tensors: Arrays,
    names: Mapping[str, str],
    known: Mapping[str, Projection],
    source: str,
) -> Arrays:
    """Our parameters; layers without a scale have ones.

    Args:
      tensors: PEFT's.
      names: for the full name of each adapted module, its name in `tensors`.
      known: the model's projections.
      source: for messages.

    Raises:
      InputError: for a shape that is not the projection's, or a scale on its other
        side.
    """
    parameters: Arrays = {}
    for path, projection in known.items():
        if not any(module in names for module in projection.modules):
            continue
        scale = np.ones((len(projection.modules), _size(projection)), np.float32)
        for layer, module in enumerate(projection.modules):
            if module in names:
                stored = tensors[f"{MODEL_PREFIX}{names[module]}{IA3}"]
                scale[layer] = _part(stored, projection, f"{source}: {module}")
        parameters[f"{path}/{SCALE}"] = scale
    return parameters


def write_ia3(parameters: Arrays, known: Mapping[str, Projection]) -> Arrays:
    """PEFT's tensors; a part of a module that has no scale gets ones.

    Args:
      parameters: ours.
      known: the model's projections.

    Raises:
      InputError: for a shape that is not the projection's.
    """
    tensors: Arrays = {}
    for module, parts in by_module(known).items():
        if not any(f"{part.path}/{SCALE}" in parameters for part in parts):
            continue
        whole = np.concatenate([scale_of(parameters, part, module) for part in parts])
        shape = (1, -1) if parts[0].scales_input else (-1, 1)
        tensors[f"{MODEL_PREFIX}{module}{IA3}"] = whole.reshape(shape)
    return tensors


def _size(projection: Projection) -> int:
    return projection.size_in if projection.scales_input else projection.size_out


def _part(
    stored: np.ndarray, projection: Projection, source: str
) -> Float[np.ndarray, "size"]:
    """What a stored scale says of one projection."""
    index, parts = projection.part
    count = _size(projection) * parts
    expected = (1, count) if projection.scales_input else (count, 1)
    if stored.shape == expected:
        return np.split(stored.ravel(), parts)[index]
    side = "input" if projection.scales_input else "output"
    raise InputError(
        f"{source} has an IA3 scale of shape {stored.shape}, expected {expected}: "
        f"{projection.path} is scaled at its {side}; was it made for another model, or "
        "with other feedforward_modules?"
    )


def scale_of(
    parameters: Arrays, projection: Projection, module: str
) -> Float[np.ndarray, "size"]:
    """The scale that we have for one projection in one layer; ones if there is none.

    Args:
      parameters: ours.
      projection: of the model.
      module: of the layer.

    Raises:
      InputError: for a shape that is not the projection's.
    """
    scale = parameters.get(f"{projection.path}/{SCALE}")
    if scale is None:
        return np.ones(_size(projection), np.float32)
    expected = (len(projection.modules), _size(projection))
    if scale.shape != expected:
        raise InputError(
            f"{projection.path} has an IA3 scale of shape {scale.shape}, expected "
            f"{expected}; was it trained on another model?"
        )
    return scale[projection.modules.index(module)]
