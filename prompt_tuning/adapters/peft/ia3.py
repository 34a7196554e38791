"""Convert IA3 between PEFT's tensors and our parameters (Liu et al. 2022, 3.3).

PEFT stores `ia3_l [out, 1]` if it scales the output of a module, and `[1, in]` if it
scales the input. We store `scale [L, out]`, or `[L, in]` for the feed-forward layer's
`down`.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float

from prompt_tuning.adapters.adapter import Arrays
from prompt_tuning.adapters.peft.folder import AdapterFolder
from prompt_tuning.adapters.peft.modules import Projection, by_module
from prompt_tuning.adapters.peft.shape_checks import IA3, MODEL_PREFIX, require_tensor
from prompt_tuning.core.errors import InputError

SCALE = "adapters/ia3/scale"


def read_ia3(
    folder: AdapterFolder, names: Mapping[str, str], known: Mapping[str, Projection]
) -> Arrays:
    """Returns our parameters; layers without an adapter get ones.

    Arguments are as in `lora.read_lora`.

    Raises:
      InputError: if a shape does not fit the projection, or the wrong side is scaled.
    """
    parameters: Arrays = {}
    for path, projection in known.items():
        if not any(module in names for module in projection.modules):
            continue
        scale = np.ones((len(projection.modules), _size(projection)), np.float32)
        for layer, module in enumerate(projection.modules):
            if module in names:
                name = f"{MODEL_PREFIX}{names[module]}{IA3}"
                stored = require_tensor(folder.tensors, name, 2, folder.source)
                source = f"{folder.source}: {module}"
                scale[layer] = _read_part(stored, projection, source)
        parameters[f"{path}/{SCALE}"] = scale
    return parameters


def write_ia3(parameters: Arrays, known: Mapping[str, Projection]) -> Arrays:
    """Returns PEFT's tensors; a part of a module without a scale gets ones.

    Raises:
      InputError: if a shape does not fit the projection.
    """
    tensors: Arrays = {}
    for module, parts in by_module(known).items():
        if not any(f"{part.path}/{SCALE}" in parameters for part in parts):
            continue
        count = _size(parts[0]) if parts[0].scales_input else parts[0].module_out
        whole = np.ones(count, np.float32)
        for part in parts:
            whole[part.part.columns(count)] = read_scale(parameters, part, module)
        shape = (1, -1) if parts[0].scales_input else (-1, 1)
        tensors[f"{MODEL_PREFIX}{module}{IA3}"] = whole.reshape(shape)
    return tensors


def _size(projection: Projection) -> int:
    return projection.size_in if projection.scales_input else projection.size_out


def _read_part(
    stored: np.ndarray, projection: Projection, source: str
) -> Float[np.ndarray, "size"]:
    """Returns the part of a stored scale for one projection."""
    scales_input = projection.scales_input
    count = projection.size_in if scales_input else projection.module_out
    expected = (1, count) if projection.scales_input else (count, 1)
    if stored.shape == expected:
        return stored.ravel()[projection.part.columns(count)]
    side = "input" if projection.scales_input else "output"
    raise InputError(
        f"{source} has an IA3 scale of shape {stored.shape}, expected {expected}: "
        f"{projection.path} is scaled at its {side}; was it made for another model, or "
        "with other feedforward_modules?"
    )


def read_scale(
    parameters: Arrays, projection: Projection, module: str
) -> Float[np.ndarray, "size"]:
    """Returns the scale of one projection in one layer; ones if it has none.

    Raises:
      InputError: if the shape does not fit the projection.
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
