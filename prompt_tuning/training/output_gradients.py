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
from jax.core import Tracer
from jaxtyping import Array, Float, Key

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters, merge, named_key
from prompt_tuning.losses.cross_entropy import token_loss
from prompt_tuning.losses.objective import by_target, learned_targets
from prompt_tuning.losses.policy_gradient import advantage_weights
from prompt_tuning.models.language_model import LanguageModel, Prefix
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.sharding.shard_map import gradient_and_rows
from prompt_tuning.training.step import prompt_norm, value_and_gradient

TOKEN_NLL, LOGITS = "token_nll", "logits"
Arrays = Mapping[str, Array]
Shapes = Mapping[str, Any]
"""Of each output, something that has its `shape` and `dtype`."""

NUMBERS = ("prompt_norm", "penalty")
"""Outputs that are of the parameters alone; all others have the batch's rows."""

AddedOutputs = Callable[[LanguageModel, Batch], dict[str, Array]]
"""A function of the model and a batch that gives outputs of its own."""


class TracedOutputs:
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
    head, batch = traced.model.head_kernel(), traced.batch
    return by_target(token_loss(traced.hidden, head, learned_targets(batch)).nll, batch)


OUTPUTS: dict[str, Callable[[TracedOutputs], Array]] = {
    TOKEN_NLL: _token_nll,
    "hidden": lambda traced: traced.hidden,
    LOGITS: lambda traced: traced.model.logits(traced.hidden),
    "prompt_norm": lambda traced: prompt_norm(traced.parameters),
    "penalty": lambda traced: traced.model.penalty(),
}
"""The outputs that every model has, by name.

`token_nll [B, T]` is that of each of `batch.targets`, in nats, worked out where they
carry weight and 0 where they carry none. `hidden [B, m, D]` and `logits [B, m, V]` are
what predicts those that carry weight, in the order of `batch.loss_positions`; in a row
that has fewer, the last places are about its first target. `prompt_norm` and `penalty`
are numbers.
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
      placement: where the parameters lie on a mesh; None on one device. It puts the
        batch there too (`put_rows`), and outputs have their rows where that has them.

    Raises:
      InputError: if there is no output of a name, or outputs are added on a mesh.
    """

    graph: nnx.GraphDef
    names: Sequence[str] = (TOKEN_NLL,)
    added: AddedOutputs | None = None
    placement: Placement | None = None

    def __post_init__(self):
        if self.placement is not None and self.added is not None:
            raise InputError(
                "OutputStep has `added` outputs and a placement: on a mesh each device "
                "has a part of the model and of the rows, of which only the named "
                "outputs know; leave `added` out, or use one device"
            )
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
        prefix: Prefix = None,
    ) -> dict[str, Array]:
        """The outputs of one batch; to be traced.

        Args:
          parameters: all of the model's.
          batch: without an accumulation axis.
          key: for dropout; None for none.
          prefix: what the model's `prefix` gave, where it was run before.

        Raises:
          InputError: if an added output has a name of another, or is not floating.
        """
        traced = TracedOutputs(self.graph, parameters, batch, key, prefix)
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
          key: for dropout; None for none. Micro-batches have keys of their own, and
            what they share of the model runs once, as in training.

        Returns:
          the outputs, and the gradient of the trained leaves: of the sum of all
          outputs, each times its output gradient.

        Raises:
          InputError: if an output gradient is of no output, or of another shape, or
            is set for a target whose `token_nll` the batch does not compute. To look
            waits for the array, which a function that is traced around this cannot.
        """
        shapes = self.shapes(trained, frozen, batch, key)
        gradients = fill_missing(output_gradients, shapes)
        if TOKEN_NLL in output_gradients:
            _refuse_lost(gradients[TOKEN_NLL], batch)
        return self.jitted(trained, frozen, batch, gradients, key)

    @functools.cached_property
    def jitted(self) -> Any:
        """The program, which takes all output gradients and looks at none."""
        return jax.jit(self._run)

    @functools.cached_property
    def _forth(self) -> Any:
        """The outputs alone; jitted, so that what was traced once is kept."""
        return jax.jit(self._outputs_of_all)

    def _outputs_of_all(self, parameters, batch, key) -> dict[str, Array]:
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
        """Each device runs its rows; what is of no row is worked out once."""
        assert self.placement is not None
        of_rows = [name for name in self.names if name not in NUMBERS]
        on_device = OutputStep(self.graph, of_rows)

        def run(trained, frozen, batch, gradients, key):
            return value_and_gradient(
                self.graph, on_device.outputs, gradients, trained, frozen, batch, key
            )

        gradient, found = gradient_and_rows(
            *(self.placement.layout, self.graph, run, trained, frozen, batch),
            *({name: gradients.pop(name) for name in of_rows}, key),
        )
        numbers, pull_back = jax.vjp(
            lambda trained: self._numbers(trained | frozen, batch), trained
        )
        (own,) = pull_back(gradients)
        return found | numbers, jax.tree.map(jnp.add, gradient, own)

    def _numbers(self, parameters, batch) -> dict[str, Array]:
        """The outputs that are of no row, the same for each micro-batch."""
        traced = TracedOutputs(self.graph, parameters, batch, None)
        return {
            name: jnp.broadcast_to(OUTPUTS[name](traced), batch.tokens.shape[:-2])
            for name in self.names
            if name in NUMBERS
        }


def fill_missing(given: Arrays, shapes: Shapes) -> dict[str, Array]:
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


def _refuse_lost(gradient: Float[Array, "*lead T"], batch: Batch) -> None:
    """Refuses a gradient at a `token_nll` that is 0 whatever the parameters are.

    Raises:
      InputError: with the first such place.
    """
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((gradient, batch))):
        return
    count, first = _lost(gradient, batch)
    if not count:
        return
    place = tuple(map(int, jnp.unravel_index(first, gradient.shape)))
    raise InputError(
        f"the output gradient of {TOKEN_NLL!r} is set for {int(count)} targets that "
        f"the batch does not compute, the first at {place}: expected 0 where a target "
        "carries no weight; give it weight in the data, or take what "
        "losses.objective.by_target makes of an array at batch.loss_positions"
    )


@jax.jit
def _lost(gradient, batch):
    """How many numbers are set where nothing is computed, and where the first is."""
    lost = (gradient != 0) & (by_target(jnp.ones(batch.loss_weights.shape), batch) == 0)
    return jnp.sum(lost), jnp.argmax(lost)


def ones(shapes: Shapes, batch: Batch) -> dict[str, Array]:
    """A gradient of 1 at each number of each output that is computed: their sum.

    Args:
      shapes: of the outputs.
      batch: that they are of.
    """
    everywhere = {name: jnp.ones(x.shape, x.dtype) for name, x in shapes.items()}
    return _where_computed(everywhere, batch)


def random_normal(
    shapes: Shapes, batch: Batch, key: Key[Array, ""]
) -> dict[str, Array]:
    """Standard normal numbers; those of an output depend on its name alone.

    Args:
      shapes: of the outputs.
      batch: that they are of; 0 where it computes nothing.
      key: of the numbers.
    """
    everywhere = {
        name: jax.random.normal(named_key(key, name), x.shape, x.dtype)
        for name, x in shapes.items()
    }
    return _where_computed(everywhere, batch)


def _where_computed(gradients: dict[str, Array], batch: Batch) -> dict[str, Array]:
    if TOKEN_NLL not in gradients:
        return gradients
    computed = by_target(jnp.ones(batch.loss_weights.shape), batch)
    return gradients | {TOKEN_NLL: gradients[TOKEN_NLL] * computed}


def mean_loss(batch: Batch) -> dict[str, Array]:
    """The usual loss: each token's weight over the sum of the weights."""
    return {TOKEN_NLL: by_target(_shares(batch), batch)}


def _shares(batch: Batch) -> Float[Array, "*lead m"]:
    """The weight of each learned position over the sum of the weights."""
    return batch.loss_weights / jnp.sum(batch.loss_weights)


def policy_gradient(batch: Batch) -> dict[str, Array]:
    """Each token's weight times its advantage, over the sum of the weights.

    Raises:
      InputError: if the batch has no advantages.
    """
    weighted = advantage_weights(batch) / jnp.sum(batch.loss_weights)
    return {TOKEN_NLL: by_target(weighted, batch)}


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
    return {LOGITS: _shares(batch)[..., None] * apart}
