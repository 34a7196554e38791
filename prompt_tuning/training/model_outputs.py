"""The outputs that every model has, by name, and checks of their gradients."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Key

from prompt_tuning.core import intermediates
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.losses.cross_entropy import token_loss
from prompt_tuning.losses.objective import learned_targets, scatter_to_targets
from prompt_tuning.models.language_model import LanguageModel, Prefix
from prompt_tuning.training.step import prompt_norm

TOKEN_NLL, LOGITS = "token_nll", "logits"
Arrays = Mapping[str, Array]
Shapes = Mapping[str, Any]
"""Objects with a `shape` and a `dtype`, by output."""
NUMBERS = ("prompt_norm", "penalty")
"""Scalar outputs that depend only on parameters; all others have the batch's rows."""


class TracedOutputs:
    """Values shared by the outputs of one batch; the model runs at most once."""

    def __init__(
        self,
        graph: nnx.GraphDef,
        parameters: Parameters,
        batch: Batch,
        key: Key[Array, ""] | None,
        prefix: Prefix = None,
        paths: Sequence[str] = (),
    ):
        self.model = cast(LanguageModel, merge(graph, parameters))
        self.parameters, self.batch = parameters, batch
        self._key, self._prefix, self._paths = key, prefix, paths

    @property
    def hidden(self) -> Float[Array, "B m D"]:
        """The hidden states that predict the targets at `batch.loss_positions`."""
        return self._run[0]

    def output(self, name: str) -> Array:
        """Returns an output by its name in `OUTPUTS` or its path."""
        if name in OUTPUTS:
            return OUTPUTS[name](self)
        return self._run[1][name]

    @functools.cached_property
    def _run(self) -> tuple[Array, dict[str, Array]]:
        with intermediates.capture(self._paths) as arrays:
            hidden = self.model.hidden(self.batch, self._key, prefix=self._prefix)
        return hidden, arrays


def _token_nll(traced: TracedOutputs) -> Float[Array, "B T"]:
    # Computed at the learned positions [B, m] and scattered to the targets [B, T].
    head, batch = traced.model.output_head(), traced.batch
    return scatter_to_targets(
        token_loss(traced.hidden, head, learned_targets(batch)).nll, batch
    )


OUTPUTS: dict[str, Callable[[TracedOutputs], Array]] = {
    TOKEN_NLL: _token_nll,
    "hidden": lambda traced: traced.hidden,
    LOGITS: lambda traced: traced.model.logits(traced.hidden),
    "prompt_norm": lambda traced: prompt_norm(traced.parameters),
    "penalty": lambda traced: traced.model.penalty(),
}
"""The outputs that every model has, by name.

`token_nll [B, T]` is the negative log likelihood of each of `batch.targets` in nats; it
is computed for learned tokens and 0 elsewhere. `hidden [B, m, D]` and `logits [B, m,
V]` are the hidden states and logits that predict the learned tokens, in the order of
`batch.loss_positions`; in a row with fewer learned tokens, the remaining positions
predict its first target. `prompt_norm` and `penalty` are scalars.
"""


def is_output(name: str) -> bool:
    """Whether a name is an output or the path of an intermediate."""
    return name in OUTPUTS or intermediates.parse_path(name) is not None


def fill_missing(given: Arrays, shapes: Shapes) -> dict[str, Array]:
    """Completes output gradients with zeros for the missing outputs.

    Raises:
      InputError: if a name is unknown, or a gradient's shape is not its output's.
    """
    unknown = [name for name in given if name not in shapes]
    if unknown:
        raise InputError(
            f"an output gradient is set for {shown(unknown[0])}, but the step's "
            "outputs are "
            f"{', '.join(shapes)}; name it in OutputStep.names, or leave it out"
        )
    for name, array in given.items():
        if array.shape != shapes[name].shape:
            raise InputError(
                f"the output gradient of {name!r} has shape {array.shape}, expected "
                f"that of the output, {shapes[name].shape}"
            )
    return {
        name: jnp.asarray(given[name], shape.dtype)
        if name in given
        else jnp.zeros(shape.shape, shape.dtype)
        for name, shape in shapes.items()
    }


def refuse_lost(gradient: Float[Array, "*lead T"], batch: Batch) -> None:
    """Checks that no gradient is set at a `token_nll` that is 0 for any parameters.

    Raises:
      InputError: with the position of the first such target.
    """
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((gradient, batch))):
        return
    count, first = _lost(gradient, batch)
    if not count:
        return
    position = tuple(map(int, jnp.unravel_index(first, gradient.shape)))
    raise InputError(
        f"the output gradient of {TOKEN_NLL!r} is set for {int(count)} targets that "
        f"the batch does not compute, the first at {position}: expected 0 where a "
        "target has no loss weight; give it a weight in the data, or use "
        "losses.objective.scatter_to_targets on an array at batch.loss_positions"
    )


@jax.jit
def _lost(gradient, batch):
    """Counts gradients where nothing is computed; also returns the first's index."""
    # [..., T]: set where `scatter_to_targets` writes no learned token.
    lost = (gradient != 0) & (
        scatter_to_targets(jnp.ones(batch.loss_weights.shape), batch) == 0
    )
    return jnp.sum(lost), jnp.argmax(lost)
