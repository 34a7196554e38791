"""Biases of a model that are trained along with LoRA, as with PEFT's `bias`.

A trained bias replaces the frozen one and starts from it. Its path is the layer's with
`/adapters/lora/bias`: a projection with LoRA has it in its `LowRank`, and any other
layer has a `TrainedBias`.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float32

from prompt_tuning.adapters.adapter import LORA
from prompt_tuning.adapters.peft.lora_biases import BIAS, FROZEN
from prompt_tuning.prompts.projection_adapters import ProjectionAdapter
from prompt_tuning.settings.axis_rules import SPLIT_NAMES


class TrainedBias(ProjectionAdapter):
    """The trained bias of a layer without LoRA.

    Attributes:
      bias: `[L, out]`, or `[out]` for a layer outside the blocks.
    """

    kind = LORA

    def __init__(self, frozen: nnx.Param):
        self.bias = started_like(frozen)

    @property
    def settings(self) -> dict[str, Any]:
        """PEFT's setting: biases without LoRA are trained only if all are."""
        return {"bias": "all"}


def started_like(frozen: nnx.Param) -> nnx.Param:
    """Declares the trained bias of a frozen one; `frozen_biases` has its values."""
    names = (
        x if x in (*SPLIT_NAMES, "layers", "vocab") else "adapter" for x in frozen.axes
    )
    return nnx.Param(
        jnp.zeros(frozen.shape, jnp.float32),
        axes=tuple(names),
        partial_over=frozen.partial_over,
    )


def frozen_biases(parameters: Mapping[str, Array]) -> dict[str, Float32[Array, "..."]]:
    """Returns the first values of the trained biases: the frozen ones.

    `parameters` has both by path.
    """
    paths = [path for path in parameters if path.endswith(BIAS)]
    return {
        path: parameters[path.removesuffix(BIAS) + FROZEN].astype(jnp.float32)
        for path in paths
    }
