"""One training step of `K` prompts over one frozen model, as one pure function.

The gradient is one `vmap` over what differs among members: each frozen weight is in the
program once, and its products have the rows of all members, or of as many as are worth
computing at once, group after group in a `scan`. The optimisers run member by member on
leaves of each member's own shape, so that nothing an optimiser does over a whole leaf
(Adafactor's clipping) ever mixes members.
"""

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.compiled_step import CompiledStep
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses.objective import Objective
from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import (
    PROMPT,
    Metrics,
    batch_metrics,
    gradients,
    step_key,
    update,
)

COUNT = "/prompt/real"

States = tuple[TrainState, ...]
ROWS_ON_CPU = 1900
"""Rows of text and prompt computed at once on a CPU. With fewer, each step is overhead;
with more, activations fall out of its caches. At width 512 and 8 layers a member of 8
takes 0.64 of a single run's step at batch 4 (all at once) and 0.80 at batch 16 (three
at once)."""


def sweep_step(
    states: States,
    frozen: Parameters,
    batch: Batch,
    *,
    graph: nnx.GraphDef,
    optimizers: Sequence[optax.GradientTransformation],
    own_batches: bool,
    dropout: bool,
    objective: Objective = NATS_PER_WEIGHT,
    at_once: int | None = None,
    placements: Sequence[Placement] = (),
) -> tuple[States, tuple[Metrics, ...]]:
    """Moves the trained parameters of each member once.

    Args:
      states: of the members, each in its own shapes.
      frozen: what all members share.
      batch: one batch, or with `own_batches` one for each member on a leading axis `K`.
      graph: the model's structure; where prompts differ in length, with a
        `PaddedPrompt` of the greatest.
      optimizers: of each member's trained parameters.
      own_batches: whether members read batches of their own.
      dropout: whether the model drops out.
      objective: what each member descends.
      at_once: members whose gradients are computed at once; None for `members_at_once`.
      placements: where each member's parameters lie on a mesh; none on one device.

    Returns:
      the next states, and the metrics of each member as `train_step` gives them.
    """
    layout = placements[0].layout if placements else None
    members = [state.trained for state in states]
    counts = prompt_counts(members)
    # Without dropout no state gives a key, and None is a tree without leaves.
    keys = jax.tree.map(
        lambda *keys: jnp.stack(keys), *(step_key(state, dropout) for state in states)
    )

    def member_gradients(own):
        trained, counts, key, own_batch = own
        this = own_batch if own_batches else batch
        rest = frozen | counts
        gradient, sums = gradients(graph, trained, rest, this, key, objective, layout)
        return gradient, batch_metrics(graph, trained | rest, this, sums, objective)

    stacked = stack_members(members)
    if at_once is None:
        parts = 1 if layout is None else layout.row_parts
        at_once = members_at_once(len(states), stacked, batch, parts)
    gradient, metrics = jax.lax.map(
        member_gradients,
        (stacked, counts, keys, batch if own_batches else None),
        batch_size=at_once,
    )
    outcomes = [
        update(
            state,
            {path: _own(gradient[path][k], leaf) for path, leaf in members[k].items()},
            {name: values[k] for name, values in metrics.items()},
            optimizers[k],
            placements[k] if placements else None,
        )
        for k, state in enumerate(states)
    ]
    following, measured = zip(*outcomes, strict=True)
    return following, measured


def members_at_once(
    count: int, stacked: Parameters, batch: Batch, row_parts: int = 1
) -> int:
    """How many of `count` members are computed at once: all, but on a CPU.

    Args:
      count: members.
      stacked: what they train.
      batch: of one, or of each.
      row_parts: devices among which its rows are divided.
    """
    if jax.default_backend() != "cpu":
        return count
    prompts = [leaf.shape[1] for path, leaf in stacked.items() if path.endswith(PROMPT)]
    text = batch.tokens.shape[-2] // row_parts * batch.tokens.shape[-1]
    rows = text + sum(prompts)
    groups = -(-count // max(1, ROWS_ON_CPU // rows))
    return -(-count // groups)


def stack_members(members: Sequence[Parameters]) -> Parameters:
    """The members' leaves on a leading axis `K`, shorter prompts padded with zeros."""

    def stacked(leaves: list[Array]) -> Array:
        longest = max(leaf.shape[0] for leaf in leaves) if leaves[0].ndim else 0
        return jnp.stack([_padded(leaf, longest) for leaf in leaves])

    return {path: stacked([m[path] for m in members]) for path in members[0]}


def _padded(leaf: Array, length: int) -> Array:
    if not leaf.ndim or leaf.shape[0] == length:
        return leaf
    return jnp.pad(leaf, [(0, length - leaf.shape[0]), *[(0, 0)] * (leaf.ndim - 1)])


def _own(gradient: Array, leaf: Array) -> Array:
    """A member's part of what was padded."""
    return gradient[: leaf.shape[0]] if leaf.ndim else gradient


def prompt_counts(members: Sequence[Mapping[str, Array]]) -> dict[str, Int[Array, "K"]]:
    """How many vectors of each padded prompt are the member's, by a parameter's path.

    Empty where no prompts differ in length, and none is padded.
    """
    counts = {}
    for path in members[0]:
        lengths = [member[path].shape[0] for member in members if member[path].ndim]
        if path.endswith(PROMPT) and len(set(lengths)) > 1:
            count = path.removesuffix(PROMPT) + COUNT
            counts[count] = jnp.array(lengths, jnp.int32)
    return counts


def compile_sweep_step(
    graph: nnx.GraphDef,
    optimizers: Sequence[optax.GradientTransformation],
    *,
    own_batches: bool,
    dropout: bool,
    objective: Objective = NATS_PER_WEIGHT,
    at_once: int | None = None,
    placements: Sequence[Placement] = (),
) -> CompiledStep:
    """The jitted step; the states given to it are used up."""
    step = functools.partial(
        sweep_step,
        graph=graph,
        optimizers=optimizers,
        own_batches=own_batches,
        dropout=dropout,
        objective=objective,
        at_once=at_once,
        placements=placements,
    )
    return CompiledStep(step)
