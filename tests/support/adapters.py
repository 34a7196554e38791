"""Models with an adapter of any kind, and PEFT's models with the same adapter."""

import contextlib
import functools
import warnings
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from prompt_tuning.adapters.adapter import Adapter
from prompt_tuning.adapters.peft.modules import projections
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.layer_kinds import key_layers
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import merge
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.source import open_checkpoint
from prompt_tuning.pretrained.tuning import rebuild_tuning
from prompt_tuning.settings.pretrained import Pretrained

P = 5


@contextlib.contextmanager
def unheard_warnings() -> Iterator[None]:
    """Ignores warnings, as those of other libraries must not fail a test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def peft_logits(jobs: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns PEFT's logits for each job; see `tests/support/peft_logits.py`."""
    with unheard_warnings():
        from tests.support.peft_logits import logits

        return {name: logits(**job) for name, job in jobs.items()}


def train_by_peft(jobs: Mapping[str, Any]) -> None:
    """Runs jobs by PEFT; see `tests/support/peft_training.py`."""
    with unheard_warnings():
        from tests.support.peft_training import train

        for job in jobs.values():
            train(**job)


def _numbers(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random values, small enough that a softmax does not amplify rounding."""
    random = np.random.default_rng(zlib.crc32(path.encode()))
    values = random.standard_normal(shape).astype(np.float32)
    return (
        1 + 0.5 * values if "ia3" in path else values * (0.2 if "lora" in path else 0.5)
    )


def random_adapter(config: ModelConfig, kind: str, part: str = "") -> Adapter:
    """Creates an adapter for every projection with `part` in its path, or a prompt."""
    first = "encoder" if config.encoder_layers else "decoder"
    cache = (config.key_value_heads, config.head_width)
    shapes: dict = {
        "PROMPT_TUNING": {f"{first}/prompt/prompt": (P, config.width)},
        "PREFIX_TUNING": {"decoder/prompt/prompt": (key_layers(config), 2, P, *cache)},
        "MULTITASK_PROMPT_TUNING": {
            f"{stack}/prompt/{leaf}": shape
            for stack in {first, "decoder"}
            for leaf, shape in {
                "shared": (P, config.width),
                "columns": (3, P, 2),
                "rows": (3, 2, config.width),
            }.items()
        },
    }
    scalings = {}
    for path, one in projections(config).items():
        if part not in path:
            continue
        layers, ends = len(one.modules), (one.size_in, one.size_out)
        scale = (layers, ends[0] if one.scales_input else ends[1])
        shapes.setdefault("IA3", {})[f"{path}/adapters/ia3/scale"] = scale
        rank = 2 if "mlp" in path else 3
        lora = {"a": (layers, ends[0], rank), "b": (layers, rank, ends[1])}
        for leaf, shape in lora.items():
            shapes.setdefault("LORA", {})[f"{path}/adapters/lora/{leaf}"] = shape
        scalings[path] = 0.5 if "query" in path else 1.5
    return Adapter(
        kind=kind,
        parameters={
            path: _numbers(path, shape) for path, shape in shapes[kind].items()
        },
        scalings=scalings if kind == "LORA" else {},
    )


def restored(base: Path, adapter: Adapter | None):
    """Returns the graph and parameters of a folder's model with an adapter."""
    source = Pretrained(checkpoint=str(base))
    tuning = rebuild_tuning(adapter, open_checkpoint(source)[0]) if adapter else None
    model = open_pretrained(source, tuning, key=jax.random.key(0))
    adapter_values = {
        p: jnp.asarray(x) for p, x in (adapter.parameters if adapter else {}).items()
    }
    assert adapter_values.keys() == model.plan.fresh.keys()
    return model.graph, model.read_parameters() | adapter_values


def batch_of(tokens: Mapping[str, np.ndarray], task_ids=None) -> Batch:
    """Converts PEFT's inputs to a batch with a loss position for every token.

    For a decoder-only model the positions are 1 to T, and T is one past the end.
    """
    lengths = tokens["attention_mask"].sum(1)
    given = targets = tokens["input_ids"]
    positions = np.arange(given.shape[1]) + 1
    if "labels" in tokens:
        targets = np.maximum(tokens["labels"], 0)
        positions = np.arange(targets.shape[1])
    positions = np.tile(positions, (len(given), 1))
    batch = Batch(
        tokens=given,
        lengths=lengths,
        targets=targets,
        loss_positions=positions,
        loss_weights=np.ones(positions.shape, "f4"),
        prefix_lengths=np.zeros_like(lengths) if "labels" in tokens else lengths,
        prompt_ids=None if task_ids is None else np.asarray(task_ids),
    )
    return jax.tree.map(lambda x: jnp.asarray(x.astype(x.dtype.kind + "4")), batch)


@functools.partial(jax.jit, static_argnames="graph")
def our_logits(parameters, batch, *, graph):
    """Returns the logits at a batch's loss positions."""
    model = cast(LanguageModel, merge(graph, parameters))
    return model.logits(model.hidden(batch))


def assert_same_logits(ours, theirs, tokens) -> None:
    """Compares logits except at padding; PEFT also returns the prompt's."""
    theirs = theirs[:, -ours.shape[1] :]
    real = np.ones(ours.shape[:2], bool)
    if "labels" not in tokens:
        real = tokens["attention_mask"].astype(bool)
    np.testing.assert_allclose(np.asarray(ours)[real], theirs[real], atol=1e-4)
