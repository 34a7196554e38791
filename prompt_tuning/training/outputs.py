"""A step as named outputs, each with an output gradient that is set when it runs.

The loss of a step is one way to say which way its outputs should move: the weights of
the tokens over their sum, as gradients of their negative log likelihoods. Any other
arrays do as well: ones, random numbers, advantages, the way from a student's logits to
a teacher's. Here the outputs are traced once, forth and back, and the output gradients
are arguments of the compiled program: zeros until set, set to any array without a new
compile, added up where several outputs have them. So a framework works that compiles
the backward pass ahead of time and fills in the output gradients later (SambaFlow,
"Backpropagation best practices").
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.data.batches import Batch
from prompt_tuning.errors import InputError
from prompt_tuning.losses.cross_entropy import token_loss
from prompt_tuning.losses.objective import advantage_weights, learned_targets
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.parameters import Parameters, merge, named_key
from prompt_tuning.training.step import prompt_norm

TOKEN_NLL, LOGITS = "token_nll", "logits"
Arrays = Mapping[str, Array]
Shapes = Mapping[str, Any]
"""Of each output, something that has its `shape` and `dtype`."""

AddedOutputs = Callable[[LanguageModel, Batch], dict[str, Array]]
"""A function of the model and a batch that gives outputs of its own."""


class Traced:
    """What the outputs of one batch are made of; the model runs once, if at all.

    Attributes:
      model: with all of its parameters.
      parameters: these, by path.
      batch: without an accumulation axis.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        parameters: Parameters,
        batch: Batch,
        key: Key[Array, ""] | None,
    ):
        self.model = cast(LanguageModel, merge(graph, parameters))
        self.parameters, self.batch, self._key = parameters, batch, key

    @functools.cached_property
    def hidden(self) -> Float[Array, "B m D"]:
        """The hidden states that predict the targets at `batch.loss_positions`."""
        return self.model.hidden(self.batch, self._key)


def _token_nll(traced: Traced) -> Float[Array, "B m"]:
    head = traced.model.head_kernel()
    return token_loss(traced.hidden, head, learned_targets(traced.batch)).nll


OUTPUTS: dict[str, Callable[[Traced], Array]] = {
    TOKEN_NLL: _token_nll,
    "hidden": lambda traced: traced.hidden,
    LOGITS: lambda traced: traced.model.logits(traced.hidden),
    "prompt_norm": lambda traced: prompt_norm(traced.parameters),
    "penalty": lambda traced: traced.model.penalty(),
}
"""The outputs that every model has, by name.

`token_nll [B, m]`, `hidden [B, m, D]` and `logits [B, m, V]` are at the positions that
carry weight, `batch.loss_positions`: nothing is computed at the others. `prompt_norm`
and `penalty` are numbers.
"""


@dataclasses.dataclass(frozen=True)
class OutputStep:
    """The outputs of a batch, and the gradient that any of their gradients lead to.

    Of the outputs that are not named nothing is computed. It is compiled once for each
    shape of batch, whatever the output gradients are.

    Attributes:
      graph: the model's structure.
      names: of the outputs, in `OUTPUTS`.
      added: gives outputs besides them.

    Raises:
      InputError: if there is no output of a name.
    """

    graph: nnx.GraphDef
    names: Sequence[str] = (TOKEN_NLL,)
    added: AddedOutputs | None = None

    def __post_init__(self):
        unknown = [name for name in self.names if name not in OUTPUTS]
        if unknown:
            raise InputError(
                f"no output is named {unknown[0]!r}, expected some of "
                f"{', '.join(OUTPUTS)}; what else a step gives is for `added` to say"
            )

    def outputs(
        self,
        parameters: Parameters,
        batch: Batch,
        key: Key[Array, ""] | None = None,
    ) -> dict[str, Array]:
        """The outputs of one batch; to be traced.

        Args:
          parameters: all of the model's.
          batch: without an accumulation axis.
          key: for dropout; None for none.

        Raises:
          InputError: if an added output has a name of another, or is not floating.
        """
        traced = Traced(self.graph, parameters, batch, key)
        found = {name: OUTPUTS[name](traced) for name in self.names}
        if self.added is None:
            return found
        added = self.added(traced.model, batch)
        for name, array in added.items():
            if name in OUTPUTS:
                raise InputError(
                    f"the added output {name!r} has the name of one that every model "
                    "has; choose another"
                )
            if not jnp.issubdtype(array.dtype, jnp.floating):
                raise InputError(
                    f"the added output {name!r} has type {array.dtype}, expected a "
                    "floating one, which has a gradient"
                )
        return found | added

    def shapes(
        self,
        trained: Parameters,
        frozen: Parameters,
        batch: Batch,
        key: Key[Array, ""] | None = None,
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """The shape and type of each output, and so of its gradient.

        Arguments as for the step; nothing is computed.
        """
        return self._forth.eval_shape(trained | frozen, batch, key)

    def __call__(
        self,
        trained: Parameters,
        frozen: Parameters,
        batch: Batch,
        output_gradients: Arrays,
        key: Key[Array, ""] | None = None,
    ) -> tuple[dict[str, Array], Parameters]:
        """Runs the outputs forth, and their gradients back.

        Args:
          trained: what is differentiated.
          frozen: what is not.
          batch: one batch, or micro-batches on a leading axis `A`, which each output
            has then too; their gradients are added up.
          output_gradients: by the outputs' names; zeros where there is none.
          key: for dropout; None for none.

        Returns:
          the outputs, and the gradient of the trained leaves: of the sum of all
          outputs, each times its output gradient.

        Raises:
          InputError: if an output gradient is of no output, or of another shape.
        """
        shapes = self.shapes(trained, frozen, batch, key)
        gradients = filled(output_gradients, shapes)
        return self.jitted(trained, frozen, batch, gradients, key)

    @functools.cached_property
    def jitted(self) -> Any:
        """The program, which takes all output gradients."""
        return jax.jit(self._run)

    @functools.cached_property
    def _forth(self) -> Any:
        """The outputs alone; jitted, so that what was traced once is kept."""
        return jax.jit(self._outputs_of_all)

    def _outputs_of_all(self, parameters, batch, key) -> dict[str, Array]:
        if batch.tokens.ndim == 2:
            return self.outputs(parameters, batch, key)
        return jax.lax.map(lambda micro: self.outputs(parameters, micro, key), batch)

    def _run(self, trained, frozen, batch, gradients, key):
        if batch.tokens.ndim == 2:
            return self._forth_and_back(trained, frozen, batch, gradients, key)

        def add(total, micro):
            batch, gradients, index = micro
            own = None if key is None else jax.random.fold_in(key, index)
            step = self._forth_and_back(trained, frozen, batch, gradients, own)
            return jax.tree.map(jnp.add, total, step[1]), step[0]

        micro_batches = batch, gradients, jnp.arange(batch.tokens.shape[0])
        zeros = jax.tree.map(jnp.zeros_like, trained)
        gradient, outputs = jax.lax.scan(add, zeros, micro_batches)
        return outputs, gradient

    def _forth_and_back(self, trained, frozen, batch, gradients, key):
        outputs, pull_back = jax.vjp(
            lambda trained: self.outputs(trained | frozen, batch, key), trained
        )
        (gradient,) = pull_back(gradients)
        return outputs, gradient


def filled(given: Arrays, shapes: Shapes) -> dict[str, Array]:
    """Output gradients for all outputs: those given, and zeros.

    Raises:
      InputError: if one is of no output, or of another shape than its output.
    """
    unknown = [name for name in given if name not in shapes]
    if unknown:
        raise InputError(
            f"an output gradient is set for {unknown[0]!r}, but the step's outputs are "
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


def ones(shapes: Shapes) -> dict[str, Array]:
    """A gradient of 1 at each number of each output: their plain sum."""
    return {name: jnp.ones(x.shape, x.dtype) for name, x in shapes.items()}


def random_normal(shapes: Shapes, key: Key[Array, ""]) -> dict[str, Array]:
    """Standard normal numbers; those of an output depend on its name alone."""
    return {
        name: jax.random.normal(named_key(key, name), x.shape, x.dtype)
        for name, x in shapes.items()
    }


def mean_loss(batch: Batch) -> dict[str, Array]:
    """The usual loss: each token's weight over the sum of the weights."""
    weights = jnp.asarray(batch.loss_weights)
    return {TOKEN_NLL: weights / jnp.sum(weights)}


def policy_gradient(batch: Batch) -> dict[str, Array]:
    """Each token's weight times its advantage, over the sum of the weights.

    Raises:
      InputError: if the batch has no advantages.
    """
    weighted = jnp.asarray(advantage_weights(batch))
    return {TOKEN_NLL: weighted / jnp.sum(batch.loss_weights)}


def from_teacher(
    logits: Float[Array, "*lead m V"],
    teacher_logits: Float[Array, "*lead m V"],
    batch: Batch,
) -> dict[str, Array]:
    """The gradient, at the logits, of the weighted mean of `KL(teacher || student)`.

    Args:
      logits: the student's, an output of the same batch.
      teacher_logits: at the same positions.
      batch: gives the weights.
    """
    apart = jax.nn.softmax(logits) - jax.nn.softmax(teacher_logits)
    return {LOGITS: mean_loss(batch)[TOKEN_NLL][..., None] * apart}
