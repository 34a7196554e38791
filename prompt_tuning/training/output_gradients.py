"""A step with named outputs, which takes their gradients as arguments.

A loss is one way to choose the gradients of a step's outputs: the negative log
likelihood of a token gets its loss weight divided by the sum of the weights. Here you
can set any array. The forward and backward pass are compiled once; output gradients are
zero until you set them, and setting one compiles nothing (SambaFlow, "Backpropagation
best practices").
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core import intermediates
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.parameters import Parameters, named_key
from prompt_tuning.losses.objective import scatter_to_targets
from prompt_tuning.losses.policy_gradient import advantage_weights
from prompt_tuning.models.language_model import LanguageModel, Prefix
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.sharding.shard_map import gradient_on_shards
from prompt_tuning.streaming.layered_weights import LayeredWeight
from prompt_tuning.streaming.streamed_function import StreamedFunction
from prompt_tuning.training.gradients import value_and_gradient
from prompt_tuning.training.model_outputs import (
    LOGITS,
    NUMBERS,
    OUTPUTS,
    TOKEN_NLL,
    Arrays,
    Shapes,
    TracedOutputs,
    fill_missing,
    is_output,
    refuse_lost,
)
from prompt_tuning.training.streamed_step import (
    divide_batch,
    prefix_and_key,
    unpad_others,
)

AddedOutputs = Callable[[LanguageModel, Batch], dict[str, Array]]
"""A function of the model and a batch that returns additional outputs."""


@dataclasses.dataclass(frozen=True)
class OutputStep:
    """Computes a batch's outputs, and the gradient for given output gradients.

    Only the named outputs are computed. The step is compiled once per batch shape,
    whatever the output gradients are.

    Attributes:
      graph: the model's structure.
      names: names from `OUTPUTS`, and paths of intermediate arrays such as
        `decoder/layers/3/hidden`, `[B, S, D]`; see `core.intermediates`. `S` counts the
        tokens of a row and the prompt vectors within it.
      added: function that returns additional outputs.
      placement: the parameters' shardings on a mesh; None on one device. Its
        `put_batch` shards the batch by row; outputs are sharded likewise.
      streamed: frozen parameters that are not in memory, by path; read layer by layer,
        once per pass.
      output_gradients: default output gradients, by name.

    Raises:
      InputError: if a name is unknown, or `added` is used on a mesh.
    """

    graph: nnx.GraphDef
    names: Sequence[str] = (TOKEN_NLL,)
    added: AddedOutputs | None = None
    placement: Placement | None = None
    streamed: Mapping[str, LayeredWeight] = dataclasses.field(default_factory=dict)
    output_gradients: dict[str, Array] = dataclasses.field(
        default_factory=dict, init=False, compare=False
    )

    def __post_init__(self):
        if self.placement is not None and self.added is not None:
            raise InputError(
                "OutputStep has `added` outputs and a placement: on a mesh each device "
                "has only a part of the model and of the rows, which only the named "
                "outputs support; leave `added` out, or use one device"
            )
        unknown = [name for name in self.names if not is_output(name)]
        if unknown:
            raise InputError(
                f"no output is named {shown(unknown[0])}, expected some of "
                f"{', '.join(OUTPUTS)}, or paths such as decoder/layers/0/hidden with "
                f"one of {', '.join(intermediates.PARTS)} at the end; for other "
                "outputs, use `added`"
            )

    def set_output_gradient(self, name: str, value: Array | None) -> None:
        """Sets the default gradient of an output.

        Args:
          name: name of the output.
          value: array of the output's shape; None for zeros, the initial value.

        Raises:
          InputError: if the step has no output of this name.
        """
        if self.added is None and name not in self.names:
            raise InputError(
                f"an output gradient is set for {name!r}, but the step's outputs are "
                f"{', '.join(self.names)}; name it in OutputStep.names"
            )
        self.output_gradients.pop(name, None)
        if value is not None:
            self.output_gradients[name] = jnp.asarray(value)

    def outputs(
        self,
        parameters: Parameters,
        batch: Batch,
        key: Key[Array, ""] | None = None,
        prefix: Prefix = None,
    ) -> dict[str, Array]:
        """Computes the outputs of one batch; call it inside `jax.jit`.

        Raises:
          InputError: if an added output has an existing name, or is not floating-point.
        """
        paths = [name for name in self.names if name not in OUTPUTS]
        traced = TracedOutputs(self.graph, parameters, batch, key, prefix, paths)
        named = {name: traced.output(name) for name in self.names}
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
        """Returns the shape and dtype of each output and its gradient.

        The arguments are the same as for the step. Nothing is computed.
        """
        absent = {path: leaf.abstract for path, leaf in self.streamed.items()}
        return self._forward.eval_shape(trained | frozen | absent, batch, key)

    def __call__(
        self,
        trained: Parameters,
        frozen: Parameters,
        batch: Batch,
        output_gradients: Arrays | None = None,
        key: Key[Array, ""] | None = None,
    ) -> tuple[dict[str, Array], Parameters]:
        """Computes the outputs and backpropagates their gradients.

        Args:
          trained: parameters to differentiate.
          frozen: all other parameters.
          batch: one batch, or micro-batches on a leading axis `A`, which outputs then
            have, too; the gradients are summed over it.
          output_gradients: output gradients by output name; zeros for missing names.
            None for the defaults (`set_output_gradient`).
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
        if output_gradients is None:
            output_gradients = self.output_gradients
        shapes = self.shapes(trained, frozen, batch, key)
        gradients = fill_missing(output_gradients, shapes)
        if TOKEN_NLL in output_gradients:
            refuse_lost(gradients[TOKEN_NLL], batch)
        if self.streamed:
            return self._run_streamed(trained, frozen, batch, gradients, key)
        return self.jitted(trained, frozen, batch, gradients, key)

    @functools.cached_property
    def jitted(self) -> Any:
        """The compiled program; it takes all output gradients and checks none."""
        return jax.jit(self._run)

    @functools.cached_property
    def _forward(self) -> Any:
        """Outputs without gradients; jitted so that its trace is cached."""
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

    @functools.cached_property
    def _streamed_outputs(self) -> StreamedFunction:
        return StreamedFunction(self._micro_batch_outputs)

    def _micro_batch_outputs(self, trained, frozen, batch, key, index):
        """Returns the outputs of a batch, or of the micro-batch with an index."""
        parameters = unpad_others(trained | frozen, self.streamed, self.placement)
        prefix, key = prefix_and_key(self.graph, parameters, key, index, self.placement)
        return self.outputs(parameters, batch, key, prefix)

    def _run_streamed(self, trained, frozen, batch, gradients, key):
        """Runs the blocks one by one, each on all micro-batches."""
        whole = batch.tokens.ndim == 2
        seeds = [gradients]
        if not whole:
            seeds = [
                jax.tree.map(operator.itemgetter(i), gradients)
                for i in range(len(batch.tokens))
            ]
        gradient, outputs = self._streamed_outputs.value_and_gradient(
            trained,
            frozen | self.streamed,
            divide_batch(batch, key, self.placement),
            seeds,
        )
        if whole:
            return outputs[0], gradient
        return jax.tree.map(lambda *parts: jnp.stack(parts), *outputs), gradient

    def _run_on_mesh(self, trained, frozen, batch, gradients, key):
        """Runs each device on its rows; scalar outputs are computed once."""
        assert self.placement is not None
        row_outputs = [name for name in self.names if name not in NUMBERS]
        on_device = OutputStep(self.graph, row_outputs)

        def run(trained, frozen, batch, gradients, key):
            gradient, outputs = value_and_gradient(
                self.graph, on_device.outputs, gradients, trained, frozen, batch, key
            )
            return gradient, (), outputs

        # What remains in `gradients` belongs to outputs without rows.
        row_gradients = {name: gradients.pop(name) for name in row_outputs}
        layout, rows = self.placement.layout, [batch, row_gradients]
        gradient, _, outputs = gradient_on_shards(
            layout, self.graph, run, trained, frozen, rows, [key]
        )
        # Computed from the global arrays, like the penalty in `gradients`.
        numbers, pull_back = jax.vjp(
            lambda trained: self._numbers(trained | frozen, batch), trained
        )
        (number_gradient,) = pull_back(gradients)
        return outputs | numbers, jax.tree.map(jnp.add, gradient, number_gradient)

    def _numbers(self, parameters, batch) -> dict[str, Array]:
        """Returns the scalar outputs, repeated for each micro-batch: `[]` or `[A]`."""
        traced = TracedOutputs(self.graph, parameters, batch, None)
        return {
            name: jnp.broadcast_to(OUTPUTS[name](traced), batch.tokens.shape[:-2])
            for name in self.names
            if name in NUMBERS
        }


def ones(shapes: Shapes, batch: Batch) -> dict[str, Array]:
    """Returns gradients of 1 everywhere: the gradient of the outputs' sum."""
    everywhere = {name: jnp.ones(x.shape, x.dtype) for name, x in shapes.items()}
    return _where_computed(everywhere, batch)


def random_normal(
    shapes: Shapes, batch: Batch, key: Key[Array, ""]
) -> dict[str, Array]:
    """Samples standard normal gradients; each output's depend on its name and the key.

    Gradients are 0 where the batch computes nothing.
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
    """Returns the gradients of the mean loss: weights divided by their sum."""
    return {TOKEN_NLL: scatter_to_targets(_shares(batch), batch)}


def _shares(batch: Batch) -> Float[Array, "*lead m"]:
    """Returns each learned position's weight divided by the sum of the weights."""
    return batch.loss_weights / jnp.sum(batch.loss_weights)


def policy_gradient(batch: Batch) -> dict[str, Array]:
    """Returns each token's weight times advantage, divided by the sum of the weights.

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
    """Returns the logits' gradient of the weighted mean of `KL(teacher || student)`."""
    # d KL / d logits = softmax(logits) - softmax(teacher_logits), [..., m, V]
    difference = jax.nn.softmax(logits) - jax.nn.softmax(teacher_logits)
    return {LOGITS: _shares(batch)[..., None] * difference}
