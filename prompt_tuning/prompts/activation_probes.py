"""Principal components of projections' inputs, for LoRA that starts from data.

EVA (Paischer et al. 2024, section 3) starts LoRA's first factor from the directions in
which a projection's inputs vary most. While a few batches are read, probes take the
place of the LoRAs, and each updates its components with a batch's (Ross et al. 2008,
"Incremental learning for robust visual tracking", figure 1).
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Key

from prompt_tuning.core.adapted_rows import marked_positions
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.prompts.dora import LORA_A
from prompt_tuning.prompts.low_rank import EVA, LowRank
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.prompts.projection_adapters import (
    AdaptedProjection,
    FrozenProjection,
    ProjectionAdapter,
)

ROUNDS = 4
"""Rounds of subspace iteration, as in PEFT."""


class Components(NamedTuple):
    """Principal components of the vectors read so far.

    Attributes:
      scaled: the first right singular vectors of the centered vectors, each times its
        singular value, `[k, in]`.
      mean: their mean, `[in]`.
      count: their number.
      squares: sum of their squared distances to the mean.
    """

    scaled: Float32[Array, "*L k in"]
    mean: Float32[Array, "*L in"]
    count: Float32[Array, "*L"]
    squares: Float32[Array, "*L"]

    @property
    def lengths(self) -> Float32[Array, "*L k"]:
        """The singular values."""
        return jnp.linalg.norm(self.scaled, axis=-1)

    @property
    def directions(self) -> Float32[Array, "*L k in"]:
        """The right singular vectors; zeros where the singular value is 0."""
        return self.scaled / jnp.maximum(self.lengths, 1e-30)[..., None]

    @property
    def shares(self) -> Float32[Array, "*L k"]:
        """Share of the variance that each component explains."""
        return self.lengths**2 / jnp.maximum(self.squares, 1e-30)[..., None]

    def likeness(self, other: "Components") -> Float32[Array, "*L k"]:
        """Absolute cosine between each direction and the same direction of `other`."""
        return jnp.abs((self.directions * other.directions).sum(-1))


def add_vectors(
    known: Components, vectors: Float[Array, "n in"], used: Bool[Array, "n"]
) -> Components:
    """Updates components with more vectors; `used` marks the ones that count."""
    marks = used.astype(jnp.float32)[:, None]
    vectors, count = vectors.astype(jnp.float32), marks.sum()
    mean = (vectors * marks).sum(0) / jnp.maximum(count, 1)
    centered = (vectors - mean) * marks
    total = known.count + count
    share = count / jnp.maximum(total, 1)
    shift = jnp.sqrt(known.count * share) * (known.mean - mean)
    rows = jnp.concatenate([known.scaled, centered, shift[None]])
    return Components(
        _largest_components(rows, len(known.scaled)),
        known.mean + share * (mean - known.mean),
        total,
        known.squares + (centered**2).sum() + (shift**2).sum(),
    )


def _largest_components(
    rows: Float32[Array, "m in"], count: int
) -> Float32[Array, "k in"]:
    """Returns the first right singular vectors times their values, by iteration.

    It iterates in a space of twice as many dimensions (Halko et al. 2011, algorithm
    4.4).
    """
    width = min(2 * count, *rows.shape)
    with jax.default_matmul_precision("highest"):
        start = jax.random.normal(jax.random.key(0), (rows.shape[1], width))
        space = jnp.linalg.qr(rows @ start)[0]  # [m, width]
        for _ in range(ROUNDS):
            space = jnp.linalg.qr(rows @ jnp.linalg.qr(rows.T @ space)[0])[0]
        _, values, vectors = jnp.linalg.svd(space.T @ rows, full_matrices=False)
    # As in PEFT, the largest element of each is positive.
    largest = jnp.argmax(jnp.abs(vectors), axis=1, keepdims=True)
    signs = jnp.sign(jnp.take_along_axis(vectors, largest, axis=1))
    return (values[:, None] * signs * vectors)[:count]


@jax.custom_vjp
def _watch(
    y: Float[Array, "n out"],
    x: Float[Array, "n in"],
    known: Components,
    marks: Float[Array, "n"] | None,
) -> Float[Array, "n out"]:
    """Returns `y`; the "gradient" of `known` is its value after reading `x`.

    The backward pass of the scan over blocks stacks it like any gradient. If nothing
    marks real positions, it counts those that the loss depends on.
    """
    del x, known, marks
    return y


def _watch_forward(y, x, known, marks):
    return y, (x, known, marks)


def _watch_backward(saved, gradient):
    x, known, marks = saved
    used = (gradient != 0).any(-1) if marks is None else marks > 0
    zeros = jax.tree.map(jnp.zeros_like, (x, marks))
    return gradient, zeros[0], add_vectors(known, x, used), zeros[1]


_watch.defvjp(_watch_forward, _watch_backward)


class ActivationProbe(ProjectionAdapter):
    """Leaves the projection alone, and updates its components in the backward pass.

    The attributes are the same as in `Components`, with a leading axis `L`.
    """

    def __init__(self, count: int, shape: tuple[int, int]):
        """Starts without vectors, for `count` components; `shape` is `(L, in)`."""
        zeros = Components(
            jnp.zeros((shape[0], count, shape[1])),
            jnp.zeros(shape),
            jnp.zeros(shape[:1]),
            jnp.zeros(shape[:1]),
        )
        for name, array in zeros._asdict().items():
            axes = ("layers", *["adapter"] * (array.ndim - 1))
            setattr(self, name, nnx.Param(array, axes=axes))

    def adapt(
        self,
        x: Float[Array, "*lead in"],
        y: Float[Array, "*lead out"],
        frozen: FrozenProjection,
    ) -> Float[Array, "*lead out"]:
        """Reads the input; returns the output unchanged."""
        del frozen
        known = Components(*(getattr(self, name)[...] for name in Components._fields))
        flat = (array.reshape(-1, array.shape[-1]) for array in (y, x))
        marks = marked_positions()
        marks = None if marks is None else marks.astype(jnp.float32)
        return _watch(*flat, known, marks).reshape(y.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationProbes(LoRA):
    """Probes instead of a LoRA."""

    @classmethod
    def of(cls, spec: LoRA) -> "ActivationProbes":
        """Returns the probes of a LoRA, which train nothing else."""
        fields = {x.name: getattr(spec, x.name) for x in dataclasses.fields(spec)}
        return cls(**fields | {"bias": "none", "invocation": None, "dora": False})

    def build(
        self, key: Key[Array, ""], projection: AdaptedProjection
    ) -> ProjectionAdapter:
        """Builds a probe with as many components as the LoRA has ranks."""
        lora = super().build(key, projection)
        assert isinstance(lora, LowRank)
        layers, size_in, rank = lora.a.shape
        return ActivationProbe(rank, (layers, size_in))


def components_by_path(probes: Parameters) -> dict[str, Components]:
    """Groups the parameters of probes by the path of their projection."""
    paths = dict.fromkeys(path.rpartition("/")[0] for path in probes)
    return {
        path.removesuffix("/adapters/lora"): Components(
            *(jnp.asarray(probes[f"{path}/{name}"]) for name in Components._fields)
        )
        for path in paths
    }


def check_without_data(loras: Mapping[str, LowRank]) -> None:
    """Checks that no LoRA starts from data.

    Raises:
      InputError: if one does.
    """
    if any(lora.initial == EVA for lora in loras.values()):
        raise InputError(
            f"LoRA.initial is {EVA!r}, which starts from the data of a run: use tune, "
            "or another LoRA.initial"
        )


def distribute_ranks(
    shares: Mapping[str, Float[np.ndarray, "L k"]], loras: Mapping[str, LowRank]
) -> dict[str, list[int]]:
    """Distributes the LoRAs' ranks to the components that explain most variance.

    The sum of the ranks stays the same. `shares` is the share of variance that each
    component explains, by projection. Returns the rank in each layer, by projection.
    """
    places, values = [], []
    for path, table in shares.items():
        for layer, most in enumerate(loras[path].most_ranks):
            places += [(path, layer)] * most
            values += table[layer, :most].tolist()
    ranks = {path: [0] * len(table) for path, table in shares.items()}
    budget = sum(sum(loras[path].ranks) for path in shares)
    for index in np.argsort(-np.array(values), kind="stable")[:budget].tolist():
        path, layer = places[index]
        ranks[path][layer] += 1
    return ranks


def first_factors(
    components: Mapping[str, Components],
    ranks: Mapping[str, list[int]],
    parameters: Parameters,
) -> Parameters:
    """Returns `a` of each LoRA, `[L, in, r]`, with zeros beyond a layer's rank.

    If the data have fewer directions, the values in `parameters` stay.
    """
    factors = {}
    for path, found in components.items():
        used = (
            np.arange(found.scaled.shape[1]) < np.array(ranks[path])[:, None]
        )  # [L, r]
        initial = parameters[path + LORA_A]
        known = (found.lengths > 0)[:, None]
        a = jnp.where(known, found.directions.swapaxes(1, 2), initial)
        factors[path + LORA_A] = jnp.where(used[:, None], a, 0)
    return factors
