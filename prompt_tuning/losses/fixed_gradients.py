"""Fixed output gradients, from files, for a model's intermediate arrays."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.intermediates import PARTS, IntermediatePath, parse_path
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.numpy_files import read_npy
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses.objective import (
    LossSums,
    Objective,
    ObjectiveConfig,
    OpenTeacher,
)
from prompt_tuning.losses.output_head import AnyHead
from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT, TokenObjective


@dataclasses.dataclass(frozen=True)
class OutputGradients(ObjectiveConfig):
    """Adds fixed output gradients of intermediate arrays to the loss of the tokens.

    For experiments that push a model's activations in a given direction. The loss is
    `(loss sum + sum(array * gradient)) / divisor`, so each array's gradient is its
    file's content over the objective's divisor.

    Attributes:
      files: `.npy` file for each intermediate array, by the array's path, e.g.
        `decoder/layers/3/hidden` (or `.../self_attention`, `.../cross_attention`,
        `.../mlp`). Its shape is `[D]`, for every position, or `[S, D]`; it is the same
        for every row. Padding gets none.
      objective: loss of the tokens.

    Raises:
      InputError: if no file is given, or a path or a shape does not fit the model.

    Examples:
      >>> numpy.save("direction.npy", numpy.ones(model.config.width, "float32"))
      >>> loss = pt.OutputGradients(files={"decoder/layers/0/hidden": "direction.npy"})
      >>> loss.build().intermediates
      ('decoder/layers/0/hidden',)
    """

    files: Mapping[str, str]
    objective: TokenObjective = NATS_PER_WEIGHT

    def __post_init__(self):
        check_fields(self)
        if not self.files:
            raise InputError(
                "OutputGradients.files is empty, expected a dict such as "
                "{'decoder/layers/0/hidden': 'direction.npy'}"
            )
        for path in self.files:
            if parse_path(path) is None:
                raise InputError(
                    f"OutputGradients.files has {shown(path)}, expected paths such as "
                    f"decoder/layers/0/hidden, with one of {', '.join(PARTS)} at the "
                    "end"
                )

    @property
    def intermediates(self) -> tuple[str, ...]:
        """Paths of the arrays that have gradients."""
        return tuple(self.files)

    @property
    def counts_padding(self) -> bool:
        """Whether the objective's normalizer counts padding."""
        return self.objective.counts_padding

    def check_packing(self) -> None:
        """Refuses packed rows: their examples share the positions of a row.

        Raises:
          InputError: always.
        """
        raise InputError(
            "DataSource.packing is True, but Run.objective is OutputGradients, whose "
            "files have one gradient for each position of a row: set packing = False"
        )

    def check_model(self, config: ModelConfig) -> None:
        """Checks that a model has the arrays, and that the files fit them.

        Raises:
          InputError: names the path or the file.
        """
        for path, array in self.arrays.items():
            parsed = parse_path(path)
            assert parsed is not None
            _check_path(path, parsed, config)
            if array.ndim not in (1, 2) or array.shape[-1] != config.width:
                raise InputError(
                    f"{self.files[path]}, in OutputGradients.files for {path}, has "
                    f"shape {array.shape}, expected ({config.width},), or (positions, "
                    f"{config.width})"
                )

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays of the files, by path."""
        return {path: _read(file) for path, file in self.files.items()}

    def prepare(self, open_teacher: OpenTeacher) -> "WithOutputGradients":
        """Reads the files; see `ObjectiveConfig`."""
        del open_teacher
        return WithOutputGradients(self.objective, self.arrays)


def _read(file: str) -> np.ndarray:
    array = read_npy(Path(file))
    if not np.issubdtype(array.dtype, np.floating) or not np.isfinite(array).all():
        raise InputError(
            f"{file} contains {array.dtype.name} or numbers that are not finite, "
            "expected finite floating-point numbers"
        )
    return array.astype(np.float32)


def _check_path(path: str, parsed: IntermediatePath, config: ModelConfig) -> None:
    joint = config.architecture == "encoder_decoder"
    count = config.layers if parsed.stack == "decoder" else config.encoder_layers
    crosses = parsed.part != "cross_attention" or (joint and parsed.stack == "decoder")
    if parsed.block >= count or not crosses:
        stacks = f"{config.encoder_layers} in the encoder, " * joint
        raise InputError(
            f"OutputGradients.files has {path}, which the model does not have: it has "
            f"{stacks}{config.layers} blocks in the decoder, numbered from 0"
            f"{' and no cross-attention there' * (not crosses)}"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class WithOutputGradients(Objective):
    """An objective plus fixed output gradients of intermediate arrays.

    Attributes:
      objective: the loss of the tokens.
      arrays: gradient of each array, `[D]` or `[S, D]`, by path.
    """

    objective: TokenObjective
    arrays: Mapping[str, np.ndarray]

    @property
    def intermediates(self) -> tuple[str, ...]:
        """Paths of the arrays that have gradients."""
        return tuple(self.arrays)

    @property
    def counts_padding(self) -> bool:
        """Whether the objective's normalizer counts padding."""
        return self.objective.counts_padding

    def sums(
        self,
        hidden: Float[Array, "B m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> LossSums:
        """Computes the sums of the tokens; see `Objective`."""
        return self.objective.sums(hidden, head, batch, parameters)

    def divisor(self, batch: Batch) -> Float[Array, ""] | float:
        """Computes the divisor of the tokens' objective."""
        return self.objective.divisor(batch)

    def intermediate_loss(
        self, arrays: Mapping[str, Float[Array, "B S D"]], batch: Batch
    ) -> Float[Array, ""]:
        """Computes the sum of the arrays times their gradients.

        Raises:
          InputError: if a gradient and its array differ in the number of positions.
        """
        total = jnp.zeros((), jnp.float32)
        for path, gradient in self.arrays.items():
            array = arrays[path].astype(jnp.float32)
            if gradient.ndim == 2 and len(gradient) != array.shape[1]:
                raise InputError(
                    f"the output gradient of {path} has {len(gradient)} positions, but "
                    f"a batch has rows of {array.shape[1]}: give one gradient of shape "
                    f"({array.shape[2]},) for all positions, or set "
                    "DataSource.buckets = 1"
                )
            real = _real_positions(path, batch, array.shape[1])
            total += jnp.sum(jnp.where(real[..., None], array * gradient, 0))
        return total


def _real_positions(path: str, batch: Batch, length: int) -> Bool[Array, "B S"]:
    """Marks the positions before padding, in rows with learned tokens.

    In a decoder they end with the last learned token.
    """
    learned = batch.loss_weights != 0  # [B, m]
    if path.startswith("encoder/"):
        ends, text = jnp.asarray(batch.lengths), batch.tokens.shape[1]
    else:
        ends = jnp.max(jnp.where(learned, batch.loss_positions + 1, 0), axis=1)
        text = batch.targets.shape[1]
    # Prompt vectors within the rows make them longer.
    ends = jnp.where(learned.any(axis=1), ends + (length - text), 0)
    return jnp.arange(length) < ends[:, None]
