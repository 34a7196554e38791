"""LoRA that starts from the frozen weights: PiSSA and OLoRA.

Both take their first product out of the frozen weights, so that the model is unchanged
at first: `x @ (w - scaling * a_0 @ b_0) + scaling * x @ a @ b`. Here the weights stay
as they are, and the first factors, which are constant, are stored along with `a` and
`b`. A plain LoRA `[a a_0]`, `[b; -b_0]` of twice the rank computes the same.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from prompt_tuning.adapters.adapter import Arrays
from prompt_tuning.core.quantization.product import as_float32
from prompt_tuning.prompts.dora import LORA_A, LORA_B, stacked_kernel

START_A, START_B = "/adapters/lora/start_a", "/adapters/lora/start_b"
FROM_WEIGHTS = ("pissa", "olora")
"""The values of `LoRA.initial` that start from the frozen weights."""


def factors_of_weights(
    kernel: Float32[Array, "in out"], scaling: float, rank: int, initial: str
) -> tuple[Float32[Array, "in r"], Float32[Array, "r out"]]:
    """Computes the first factors from a projection's weights.

    `initial` chooses:

    - "pissa": the largest singular values and their vectors, so that `scaling * a @ b`
      is the best approximation of the weights (Meng et al. 2024, equations 2 and 3).
    - "olora": the first rows and columns of the QR decomposition of the transposed
      weights (Büyükakyüz 2024).
    """
    if initial == "olora":
        q, r = jnp.linalg.qr(kernel.T)
        return r[:rank].T, q[:, :rank].T
    u, values, v = jnp.linalg.svd(kernel, full_matrices=False)
    roots = jnp.sqrt(values[:rank] / scaling)
    return u[:, :rank] * roots, roots[:, None] * v[:rank]


def initial_starts(
    parameters: Mapping[str, Array],
    ranks: Mapping[str, Sequence[int]],
    scalings: Mapping[str, float],
    initial: Mapping[str, str],
) -> dict[str, Float[Array, "..."]]:
    """Computes `a`, `b` and the constants that they start as, by path.

    All arguments are by the path of a projection; `parameters` has the kernels.
    """
    found = {}
    for path, layer_ranks in ranks.items():
        rank = max(layer_ranks)
        used = jnp.asarray(np.arange(rank) < np.array(layer_ranks)[:, None])  # [L, r]

        def factors(layer, path=path, rank=rank):
            stored, used = layer
            wide = as_float32(*stored)
            a, b = factors_of_weights(wide, scalings[path], rank, initial[path])
            return jnp.where(used, a, 0), jnp.where(used[:, None], b, 0)

        a, b = jax.lax.map(factors, (stacked_kernel(parameters, path), used))
        found |= {path + LORA_A: a, path + LORA_B: b}
        found |= {path + START_A: a, path + START_B: b}
    return found


def plain_factors(parameters: Arrays) -> Arrays:
    """Returns the parameters of a LoRA without constants, of twice the rank."""
    plain = {p: x for p, x in parameters.items() if not p.endswith((START_A, START_B))}
    for path in parameters:
        if path.endswith(START_A):
            layer = path.removesuffix(START_A)
            a, b = (parameters[layer + x] for x in (LORA_A, LORA_B))
            first, second = (parameters[layer + x] for x in (START_A, START_B))
            plain[layer + LORA_A] = np.concatenate([a, first], axis=2)
            plain[layer + LORA_B] = np.concatenate([b, -second], axis=1)
    return plain
