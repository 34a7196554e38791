"""Resume a run from its checkpoints, also with some settings changed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from prompt_tuning import processes
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.checkpoints.run_store.orbax_arrays import StoredArray
from prompt_tuning.core.typed_json import JsonObject
from prompt_tuning.training.progress import Reporter
from prompt_tuning.training.recorder import Recorder
from prompt_tuning.training.run_directory import replace_config
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.trainer import Trainer

MAXIMUM_WORD = 2**32 - 1
"""Maximum value of a word of a random key."""


def resume(
    trainer: Trainer, store: CheckpointStore, say: Callable[[str], None]
) -> TrainState:
    """Returns the state of the newest complete checkpoint, else the initial state."""
    newest = processes.run_on_first(lambda: store.latest_valid(on_damage=say))
    if newest is None:
        return trainer.start
    say(resumed_message(newest, trainer.run.steps))
    return state_at(trainer, store, newest)


def resumed_message(step: int, steps: int) -> str:
    """Message of a run that resumes from a checkpoint."""
    if step < steps:
        return f"resuming from step {step}"
    return f"all {step} steps are already done"


def state_at(trainer: Trainer, store: CheckpointStore, step: int) -> TrainState:
    """Reads the state of a checkpoint.

    Raises:
      InputError: if it is damaged, or belongs to another run.
    """
    start = trainer.start
    placement = trainer.model.placement
    if placement is not None:
        start = placement.abstract_tree(start)
    trained, optimizer_state, extra = store.load(
        step, start.optimizer_state, trained_template=start.trained
    )
    state = TrainState(
        trained=trained,
        optimizer_state=optimizer_state,
        step=np.asarray(step, np.int32),
        key=read_key(extra, trainer.start.key),
    )
    if placement is not None:
        return placement.put_tree(state)
    return jax.tree.map(_put_like, state, start)


def read_key(extra: dict[str, Any], like: jax.Array) -> jax.Array:
    """Reads a random key of the same kind as `like`.

    Raises:
      InputError: if the checkpoint has no such key.
    """
    stored = JsonObject("the state of the checkpoint", extra)
    words = stored.integers("key", maximum=MAXIMUM_WORD)
    expected = jax.eval_shape(jax.random.key_data, like).size
    if len(words) != expected:
        stored.refuse("key", f"{expected} numbers")
    return jax.random.wrap_key_data(jnp.asarray(words, jnp.uint32))


def _put_like(leaf: Any, like: Any) -> jax.Array | np.ndarray:
    """Puts a stored leaf where another one is: in host memory or on the device."""
    if isinstance(like, np.ndarray):
        return np.array(leaf)
    return jnp.asarray(np.asarray(leaf) if isinstance(leaf, StoredArray) else leaf)


def adopt_changes(recorder: Recorder, reporter: Reporter) -> None:
    """Applies changed settings of a run to its directory, which the caller holds.

    If the evaluation or the metric changed, all checkpoints are measured again, so that
    the best one is chosen among comparable values; early stopping counts from there.
    The config is replaced last: after a kill, the same command repeats the rest.
    """
    member = recorder.member
    trainer, changes = member.trainer, member.changes
    measures = trainer.evaluator is not None
    if changes.measurement and measures:
        recorder.forget_measurements()
    if (changes.measurement or changes.selection) and measures:
        steps = processes.run_on_first(lambda: member.store.intact(reporter.say))
        if steps:
            reporter.say(
                "the evaluation or its metric has changed: measuring the checkpoints "
                "again "
                "(prompt-tuning evaluate --run measures without changing the run)"
            )
        for step in steps:
            state = state_at(trainer, member.store, step)
            reporter.evaluated(step, recorder.measure_again(step, state))
    processes.run_on_first(lambda: replace_config(recorder.directory, member.config))
