"""One training step of `K` prompts over one frozen model, as a pure function.

The gradient is one `vmap` over the arrays that differ among members. Each frozen weight
is in the program once, and is multiplied with the rows of all members together, or with
groups of members in a `scan` if that is faster. Optimizers run member by member on
leaves of the member's own shape, so operations over a whole leaf, e.g. Adafactor's
clipping, never mix members.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses.objective import Objective
from prompt_tuning.losses.token_objective import NATS_PER_WEIGHT
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.training.gradients import gradients
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import (
    PROMPT,
    CompiledStep,
    Metrics,
    batch_metrics,
    step_key,
    update,
)

COUNT = "/prompt/real"

States = tuple[TrainState, ...]
ROWS_ON_CPU = 1900
"""Number of text and prompt positions computed together on a CPU.

With fewer, overhead dominates a step; with more, activations do not fit in the caches.
At width 512 and 8 layers, each of 8 members takes 0.64 of the time of a single run's
step at batch 4 (all together) and 0.80 at batch 16 (three together).
"""


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
    """Computes one training step of every member.

    Each member's state has its own shapes. There is one batch, or with `own_batches`
    one per member on a leading axis `K`. If prompts differ in length, `graph` has a
    `PaddedPrompt` of the maximum length. `at_once` members compute gradients together;
    None for `members_at_once`.

    Returns:
      the next states, and each member's metrics (see `train_step`).
    """
    layout = placements[0].layout if placements else None
    members = [state.trained for state in states]
    counts = prompt_counts(members)
    # [K] keys, or None without dropout: None is a tree without leaves.
    keys = jax.tree.map(
        lambda *keys: jnp.stack(keys), *(step_key(state, dropout) for state in states)
    )

    def member_gradients(member):
        trained, counts, key, own_batch = member
        member_batch = own_batch if own_batches else batch
        # A padded prompt reads its real length from among the frozen parameters.
        rest = frozen | counts
        gradient, sums = gradients(
            graph, trained, rest, member_batch, key, objective, layout
        )
        metrics = batch_metrics(graph, trained | rest, member_batch, sums, objective)
        return gradient, metrics

    stacked = stack_members(members)  # leaves [K, ...]
    if at_once is None:
        parts = 1 if layout is None else layout.row_parts
        at_once = members_at_once(len(states), stacked, batch, parts)
    # A `vmap` over groups of `at_once` members, and a scan over the groups.
    gradient, metrics = jax.lax.map(
        member_gradients,
        (stacked, counts, keys, batch if own_batches else None),
        batch_size=at_once,
    )
    outcomes = [
        update(
            state,
            {path: _crop(gradient[path][k], leaf) for path, leaf in members[k].items()},
            {name: values[k] for name, values in metrics.items()},
            optimizers[k],
            placements[k] if placements else None,
        )
        for k, state in enumerate(states)
    ]
    next_states, next_metrics = zip(*outcomes, strict=True)
    return next_states, next_metrics


def members_at_once(
    count: int, stacked: Parameters, batch: Batch, row_parts: int = 1
) -> int:
    """Chooses how many members compute together: all, except on a CPU.

    `row_parts` devices share the batch's rows.
    """
    if jax.default_backend() != "cpu":
        return count
    prompts = [leaf.shape[1] for path, leaf in stacked.items() if path.endswith(PROMPT)]
    text = batch.tokens.shape[-2] // row_parts * batch.tokens.shape[-1]
    positions = text + sum(prompts)
    # The fewest groups that fit, then the members divided evenly among them.
    groups = -(-count // max(1, ROWS_ON_CPU // positions))
    return -(-count // groups)


def stack_members(members: Sequence[Parameters]) -> Parameters:
    """Stacks the members' leaves on a leading axis `K`, padding prompts with zeros."""

    def stacked(leaves: list[Array]) -> Array:
        longest = max(leaf.shape[0] for leaf in leaves) if leaves[0].ndim else 0
        return jnp.stack([_padded(leaf, longest) for leaf in leaves])

    return {path: stacked([m[path] for m in members]) for path in members[0]}


def _padded(leaf: Array, length: int) -> Array:
    if not leaf.ndim or leaf.shape[0] == length:
        return leaf
    return jnp.pad(leaf, [(0, length - leaf.shape[0]), *[(0, 0)] * (leaf.ndim - 1)])


def _crop(gradient: Array, leaf: Array) -> Array:
    """Removes the padding of a member's prompt gradient: `[longest, D] -> [P, D]`."""
    return gradient[: leaf.shape[0]] if leaf.ndim else gradient


def prompt_counts(members: Sequence[Mapping[str, Any]]) -> dict[str, Int[Array, "K"]]:
    """Returns the members' real prompt lengths, by path of the parameter with them.

    Empty if all prompts have the same length, because none is then padded.
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
    **choices: Any,
) -> CompiledStep:
    """Compiles `sweep_step`, given its keywords; the step donates its `states`."""
    step = functools.partial(sweep_step, graph=graph, optimizers=optimizers, **choices)
    return CompiledStep(step)
