"""Several memories become one: `compose`."""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from prompt_tuning.adapters.adapter import PREFIX_PATH
from prompt_tuning.api.model import Model
from prompt_tuning.api.tune import TunedModel, load_tuned
from prompt_tuning.config.deferred_factories import Configurable
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.pretrained.attention_matching import move_prefix
from prompt_tuning.texts.memory_comparison import key_value_prefix


def compose(memories: Sequence[TunedModel | str | Path]) -> Model:
    """Puts memories of several texts one after the other, as a single prefix.

    The keys of each are rotated on, so that they keep their distance to the row. The
    memories were not trained together, so each answers worse than alone: measure it.

    Args:
      memories: at least two runs of `remember` with the same frozen model, or their
        directories.

    Returns:
      the frozen model behind all of them; its prefix has the slots of all.

    Raises:
      InputError: if there are fewer than two, one is not a key/value prefix, or they
        belong to different models.

    Examples:
      >>> prefix = pt.KeyValuePrefix(length=4)
      >>> parts = [
      ...     pt.tune(model, prefix, pairs, steps=1, seed=i, progress=False)
      ...     for i in (0, 1)
      ... ]
      >>> both = pt.compose(parts)
      >>> both.partition()[0]["decoder/prompt/prompt"].shape
      (4, 2, 8, 4, 32)
    """
    if len(memories) < 2:
        raise InputError(f"compose has {len(memories)} memories, expected at least two")
    loaded = [x if isinstance(x, TunedModel) else load_tuned(x) for x in memories]
    first, prefixes = loaded[0], []  # each [L, 2, P, G, K]
    for number, one in enumerate(loaded):
        prefix = key_value_prefix(one.trained)
        if prefix is None or len(one.trained) > 1:
            found = {path: tuple(array.shape) for path, array in one.trained.items()}
            raise InputError(
                f"memory {number} is not a key/value prefix alone, but has "
                f"{shown(found)}: give runs of remember"
            )
        prefixes.append(prefix)
        if one.run.model != first.run.model:
            raise InputError(
                f"memory {number} belongs to {one.run.model.checkpoint}, and memory 0 "
                f"to {first.run.model.checkpoint}, or they read it with other "
                "settings: a prefix acts on its own model alone"
            )
    slots = sum(prefix.shape[2] for prefix in prefixes)
    moved = [
        move_prefix(prefix, slots - prefix.shape[2], first.config)
        for prefix in prefixes
    ]
    joined = Configurable("KeyValuePrefix")(length=slots)
    model = Model.open(first.settings, [joined])
    return model.with_parameters({PREFIX_PATH: jnp.concatenate(moved, axis=2)})
