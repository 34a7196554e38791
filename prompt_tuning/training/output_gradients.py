"""A step with named outputs, whose output gradients are arguments of the program.

A loss is one way to choose the gradients of a step's outputs: each token's negative log
likelihood gets its loss weight over the sum of the weights. Here any array can be set.
The forward and backward pass are compiled once; output gradients are zero until they
are set, and setting one compiles nothing (SambaFlow, "Backpropagation best practices").
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Key

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters, merge, named_key
from prompt_tuning.losses.cross_entropy import token_loss
from prompt_tuning.losses.objective import learned_targets, scatter_to_targets
from prompt_tuning.losses.policy_gradient import advantage_weights
from prompt_tuning.models.language_model import LanguageModel, Prefix
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.sharding.shard_map import gradient_and_rows
from prompt_tuning.training.step import prompt_norm, value_and_gradient

TOKEN_NLL, LOGITS = "token_nll", "logits"
Arrays = Mapping[str, Array]
Shapes = Mapping[str, Any]
"""Objects with a `shape` and a `dtype`, by output."""
NUMBERS = ("prompt_norm", "penalty")
"""Scalar outputs of the parameters alone; all others have the batch's rows."""

AddedOutputs = Callable[[LanguageModel, Batch], dict[str, Array]]
"""A function of the model and a batch that returns additional outputs."""


class TracedOutputs:
    """The values that the outputs of one batch share; the model runs at most once.

    Attributes:
      model: the model with all of its parameters.
      parameters: the model's parameters by path.
      batch: a batch without an accumulation axis.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        parameters: Parameters,
        batch: Batch,
        key: Key[Array, ""] | None,
        prefix: Prefix = None,
    ):
        self.model = cast(LanguageModel, merge(graph, parameters))
        self.parameters, self.batch = parameters, batch
        self._key, self._prefix = key, prefix

    @functools.cached_property
    def hidden(self) -> Float[Array, "B m D"]:
        """The hidden states that predict the targets at `batch.loss_positions`."""
        return self.model.hidden(self.batch, self._key, prefix=self._prefix)


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


@dataclasses.dataclass(frozen=True)
class OutputStep:
    """Computes a batch's outputs, and the gradient for any of their output gradients.

    Only the named outputs are computed. The step is compiled once for each shape of
    batch, whatever the output gradients are.

    Attributes:
      graph: the model's structure.
      names: names of the outputs, from `OUTPUTS`.
      added: function that returns additional outputs.
      placement: the parameters' shardings on a mesh; None on one device. Its
        `put_batch` shards the batch by row, and outputs are sharded in the same way.

    Raises:
      InputError: if a name is unknown, or `added` is used on a mesh.
    """

    graph: nnx.GraphDef
    names: Sequence[str] = (TOKEN_NLL,)
    added: AddedOutputs | None = None
    placement: Placement | None = None

    def __post_init__(self):
        if self.placement is not None and self.added is not None:
            raise InputError(
                "OutputStep has `added` outputs and a placement: on a mesh each device "
                "has only a part of the model and of the rows, which only the named "
                "outputs support; leave `added` out, or use one device"
            )
        unknown = [name for name in self.names if name not in OUTPUTS]
        if unknown:
            raise InputError(
                f"no output is named {unknown[0]!r}, expected some of "
                f"{', '.join(OUTPUTS)}; for other outputs, use `added`"
            )

    def outputs(
        self,
        parameters: Parameters,
        batch: Batch,
        key: Key[Array, ""] | None = None,
        prefix: Prefix = None,
    ) -> dict[str, Array]:
        """Computes the outputs of one batch; call it inside `jax.jit`.

        Args:
          parameters: all of the model's parameters.
          batch: a batch without an accumulation axis.
          key: dropout key; None without dropout.
          prefix: result of the model's `prefix` if it has run already.

        Raises:
          InputError: if an added output has the name of another, or is not of a
            floating-point type.
        """
        traced = TracedOutputs(self.graph, parameters, batch, key, prefix)
        named = {name: OUTPUTS[name](traced) for name in self.names}
        if self.added is None:
            return named
        added = self.added(traced.model, batch)
        for name, array in added.items():
            if name in OUTPUTS:
                raise InputError(
                    f"the added output {name!r} has the name of an output that every "
                    "model has; choose another name"
                )
            if not jnp.issubdtype(array.dtype, jnp.floating):
                raise InputError(
                    f"the added output {name!r} has type {array.dtype}, expected a "
                    "floating-point type, which has a gradient"
                )
        return named | added

    def shapes(
        self,
        trained: Parameters,
        frozen: Parameters,
        batch: Batch,
        key: Key[Array, ""] | None = None,
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """The shape and dtype of each output, which are also those of its gradient.

        The arguments are the same as for the step. Nothing is computed.
        """
        return self._forward.eval_shape(trained | frozen, batch, key)

    def __call__(
        self,
        trained: Parameters,
        frozen: Parameters,
        batch: Batch,
        output_gradients: Arrays,
        key: Key[Array, ""] | None = None,
    ) -> tuple[dict[str, Array], Parameters]:
        """Computes the outputs and backpropagates their gradients.

        Args:
          trained: parameters to differentiate.
          frozen: all other parameters.
          batch: one batch, or micro-batches on a leading axis `A`; each output then has
            this axis too, and the gradients are summed over it.
          output_gradients: output gradients by output name; zeros for missing names.
          key: dropout key; None without dropout. Each micro-batch has its own key, and
            the prefix that micro-batches share runs once, as in training.

        Returns:
          the outputs, and the gradient of the trained parameters: the gradient of
          `sum(output * output_gradient)` over all outputs.

        Raises:
          InputError: if an output gradient has an unknown name or the wrong shape, or
            is nonzero for a target whose `token_nll` the batch does not compute. The
            last check waits for the array, so it is skipped inside another traced
            function.
        """
        shapes = self.shapes(trained, frozen, batch, key)
        gradients = fill_missing(output_gradients, shapes)
        if TOKEN_NLL in output_gradients:
            _refuse_lost(gradients[TOKEN_NLL], batch)
        return self.jitted(trained, frozen, batch, gradients, key)

    @functools.cached_property
    def jitted(self) -> Any:
        """The compiled program; it takes all output gradients and checks none."""
        return jax.jit(self._run)

    @functools.cached_property
    def _forward(self) -> Any:
        """The outputs without gradients; jitted so that its trace is cached."""
        return jax.jit(self._all_outputs)

    def _all_outputs(self, parameters, batch, key) -> dict[str, Array]:
        if self.placement is not None:
            parameters = self.placement.unpad(parameters)
        if batch.tokens.ndim == 2:
            return self.outputs(parameters, batch, key)
        return jax.lax.map(lambda micro: self.outputs(parameters, micro, key), batch)

    def _run(self, trained, frozen, batch, gradients, key):
        if self.placement is not None:
            return self._run_on_mesh(trained, frozen, batch, gradients, key)
        gradient, outputs = value_and_gradient(
            self.graph, self.outputs, gradients, trained, frozen, batch, key
        )
        return outputs, gradient

    def _run_on_mesh(self, trained, frozen, batch, gradients, key):
        """Runs each device on its rows; outputs without rows are computed once."""
        assert self.placement is not None
        row_outputs = [name for name in self.names if name not in NUMBERS]
        on_device = OutputStep(self.graph, row_outputs)

        def run(trained, frozen, batch, gradients, key):
            return value_and_gradient(
                self.graph, on_device.outputs, gradients, trained, frozen, batch, key
            )

        # What remains in `gradients` belongs to outputs without rows.
        row_gradients = {name: gradients.pop(name) for name in row_outputs}
        layout = self.placement.layout
        gradient, outputs = gradient_and_rows(
            layout, self.graph, run, trained, frozen, batch, row_gradients, key
        )
        # Computed from the global arrays, like the penalty in `gradients`.
        numbers, pull_back = jax.vjp(
            lambda trained: self._numbers(trained | frozen, batch), trained
        )
        (number_gradient,) = pull_back(gradients)
        return outputs | numbers, jax.tree.map(jnp.add, gradient, number_gradient)

    def _numbers(self, parameters, batch) -> dict[str, Array]:
        """The outputs without rows, repeated for each micro-batch: `[]` or `[A]`."""
        traced = TracedOutputs(self.graph, parameters, batch, None)
        return {
            name: jnp.broadcast_to(OUTPUTS[name](traced), batch.tokens.shape[:-2])
            for name in self.names
            if name in NUMBERS
        }


def fill_missing(given: Arrays, shapes: Shapes) -> dict[str, Array]:
    """Completes output gradients with zeros for the remaining outputs.

    Raises:
      InputError: if a name is unknown, or a shape is not that of its output.
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


def _refuse_lost(gradient: Float[Array, "*lead T"], batch: Batch) -> None:
    """Refuses a gradient at a `token_nll` that is 0 for any parameters.

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
    """The number of gradients where nothing is computed, and the first one's index."""
    # [..., T]: set where `scatter_to_targets` writes no learned token.
    lost = (gradient != 0) & (
        scatter_to_targets(jnp.ones(batch.loss_weights.shape), batch) == 0
    )
    return jnp.sum(lost), jnp.argmax(lost)


def ones(shapes: Shapes, batch: Batch) -> dict[str, Array]:
    """Returns gradients of 1 at every computed number: the gradient of their sum.

    Args:
      shapes: shapes of the outputs.
      batch: batch of the outputs.
    """
    everywhere = {name: jnp.ones(x.shape, x.dtype) for name, x in shapes.items()}
    return _where_computed(everywhere, batch)


def random_normal(
    shapes: Shapes, batch: Batch, key: Key[Array, ""]
) -> dict[str, Array]:
    """Draws standard normal gradients; each output's depend on its name and the key.

    Args:
      shapes: shapes of the outputs.
      batch: batch of the outputs; gradients are 0 where it computes nothing.
      key: random key.
    """
    everywhere = {
        name: jax.random.normal(named_key(key, name), x.shape, x.dtype)
        for name, x in shapes.items()
    }
    return _where_computed(everywhere, batch)


def _where_computed(gradients: dict[str, Array], batch: Batch) -> dict[str, Array]:
    if TOKEN_NLL not in gradients:
        return gradients
    computed = scatter_to_targets(jnp.ones(batch.loss_weights.shape), batch)
    return gradients | {TOKEN_NLL: gradients[TOKEN_NLL] * computed}


def mean_loss(batch: Batch) -> dict[str, Array]:
    """Returns the gradients of the mean loss: weights over the sum of the weights."""
    return {TOKEN_NLL: scatter_to_targets(_shares(batch), batch)}


def _shares(batch: Batch) -> Float[Array, "*lead m"]:
    """The weight of each learned position over the sum of the weights."""
    return batch.loss_weights / jnp.sum(batch.loss_weights)


def policy_gradient(batch: Batch) -> dict[str, Array]:
    """Returns each token's weight times its advantage, over the sum of the weights.

    Raises:
      InputError: if the batch has no advantages.
    """
    weighted = advantage_weights(batch) / jnp.sum(batch.loss_weights)
    return {TOKEN_NLL: scatter_to_targets(weighted, batch)}


def from_teacher(
    logits: Float[Array, "*lead m V"],
    teacher_logits: Float[Array, "*lead m V"],
    batch: Batch,
) -> dict[str, Array]:
    """Returns the logits' gradient of the weighted mean of `KL(teacher || student)`.

    Args:
      logits: the student's logits, an output of the same batch.
      teacher_logits: the teacher's logits at the same positions.
      batch: batch with the loss weights.
    """
    # d KL / d logits = softmax(logits) - softmax(teacher_logits), [..., m, V]
    difference = jax.nn.softmax(logits) - jax.nn.softmax(teacher_logits)
    return {LOGITS: _shares(batch)[..., None] * difference}
