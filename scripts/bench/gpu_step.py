"""Our side of the GPU benchmark: a model with random weights, and its training step."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from prompt_tuning.core import parameter_groups
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters, describe, split
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.core.t5_config import t5_config
from prompt_tuning.models.build import build_model
from prompt_tuning.models.host_memory import PINNED
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.prompts.prefix import KeyValuePrefix
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.prompts.stack_shape import StackShape
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import compile_step
from scripts.bench.gpu_shapes import GpuCase, Shape
from scripts.bench.gpu_timing import STEPS, time_steps

TRAINED = (r".*/(prompt|adapters)/.*",)
SCALE = 1e-3
"""Scale of random codes; their products stay finite, and the time is the same."""


def model_config(shape: Shape, **choices: Any) -> ModelConfig:
    """Returns the config of a shape, in bfloat16 unless `choices` say otherwise."""
    common: dict[str, Any] = {
        "vocabulary_size": shape.vocabulary,
        "width": shape.width,
        "feed_forward_width": shape.feed_forward,
        "layers": shape.layers,
        "heads": shape.heads,
        "head_width": shape.head_width,
    }
    choices = {"compute_dtype": "bfloat16", "parameter_dtype": "bfloat16"} | choices
    if shape.family == "t5":
        config = t5_config(**common)
        return dataclasses.replace(config, **choices)
    gpt2 = shape.family == "gpt2"
    return ModelConfig(
        **common,
        **choices,
        family=shape.family,
        architecture="decoder_only",
        key_value_heads=shape.groups,
        norm="layer" if gpt2 else "rms",
        positions="learned" if gpt2 else "rotary",
        maximum_positions=1024 if gpt2 else 8192,
        activation="gelu_tanh" if gpt2 else "silu",
        gated=not gpt2,
        biases="all" if gpt2 else "none",
        tied_head=gpt2,
    )


def build(case: GpuCase, config: ModelConfig, key: jax.Array) -> Any:
    """Builds the model with what is trained in front of it or in it."""
    stack = StackShape(config.layers, config.key_value_heads, config.head_width)
    table = np.zeros((1, config.width), np.float32)
    vocabulary = Vocabulary(cast(Any, table), None, stack)
    if case.method == "lora":
        return build_model(key, config, adapters=[LoRA(rank=case.size)])
    if case.method == "prefix":
        prefix = KeyValuePrefix(key, vocabulary, length=case.size)
        return build_model(key, config, prefix)
    prompt = SoftPrompt(key, vocabulary, length=case.size)
    return build_model(key, config, prompt)


def random_parameters(abstract: Mapping[str, Any]) -> Parameters:
    """Draws every parameter on the device; equal models get equal numbers."""
    keys = jax.random.split(jax.random.key(0, impl="rbg"), len(abstract))
    return {
        path: _drawn(key, path.rpartition("/")[2], leaf.shape, leaf.dtype)
        for key, (path, leaf) in zip(keys, sorted(abstract.items()), strict=True)
    }


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _drawn(key, name: str, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.lax.bitcast_convert_type(jax.random.bits(key, shape, "uint8"), dtype)
    if name == "kernel_codebook":
        return jnp.broadcast_to(jnp.linspace(-1, 1, shape[-1], dtype=dtype), shape)
    if name == "kernel_scale":
        return jnp.full(shape, SCALE, dtype)
    numbers = jax.random.normal(key, shape, dtype)
    if name == "scale":
        return 1 + jnp.asarray(0.1, dtype) * numbers
    fan_in = {"kernel": -2, "embedding": -1}
    deviation = shape[fan_in[name]] ** -0.5 if name in fan_in else 0.05
    return jnp.asarray(deviation, dtype) * numbers


def make_batch(case: GpuCase) -> Batch:
    """Builds rows of random tokens; all but one have padding."""
    random = np.random.default_rng(0)
    rows, length, learned = case.rows, case.length, case.learned
    tokens = random.integers(3, case.shape.vocabulary, (rows, length)).astype(np.int32)
    lengths = length - np.arange(rows, dtype=np.int32) % 4
    first = lengths - learned
    targets = tokens
    positions = first[:, None] + np.arange(learned, dtype=np.int32)
    if case.shape.family == "t5":
        targets, first = tokens[:, :learned], np.zeros_like(lengths)
        positions = np.tile(np.arange(learned, dtype=np.int32), (rows, 1))
    return Batch(
        tokens=tokens,
        lengths=lengths,
        targets=targets,
        loss_positions=positions,
        loss_weights=np.ones((rows, learned), np.float32),
        prefix_lengths=first,
    )


class GpuStep:
    """A model in a case, ready to train.

    Attributes:
      step: the compiled step.
      trained: initial values of the trained parameters.
    """

    def __init__(
        self,
        case: GpuCase,
        attention: str,
        remat: Rematerialization | None = None,
        *,
        pinned: bool = False,
        **choices: Any,
    ):
        choices |= {"attention": attention}
        choices |= {"rematerialization": remat or Rematerialization()}
        self.config = model_config(case.shape, **choices)
        make = functools.partial(build, case, self.config)
        graph, abstract = describe(lambda key: split(make(key)), jax.random.key(0))
        parameters = random_parameters(abstract)
        group = parameter_groups.ParameterGroup(
            TRAINED, parameter_groups.adamw(learning_rate=1e-3)
        )
        labels = parameter_groups.label(parameters, [group])
        self.trained, frozen = parameter_groups.partition(parameters, labels)
        self._frozen = {p: _placed(p, x, pinned) for p, x in frozen.items()}
        self._optimizer = parameter_groups.group_optimizer([group], labels)
        self._batch = make_batch(case)
        self._case, self._graph = case, graph
        self.step = compile_step(graph, self._optimizer, dropout=False)

    def start(self) -> TrainState:
        """Returns an initial state; a copy, because the step donates its state."""
        trained = jax.tree.map(jnp.copy, self.trained)
        return TrainState.create(trained, self._optimizer, jax.random.key(0))

    def __call__(self, state: TrainState) -> tuple[TrainState, float]:
        """Runs one step; returns the next state and the loss."""
        state, metrics = self.step(state, self._frozen, self._batch)
        return state, float(metrics["loss"])

    def temporary_bytes(self) -> int:
        """Bytes that the compiled step needs in addition to its arguments."""
        lowered = self.step.lower(self.start(), self._frozen, self._batch)
        return cast(Any, lowered.compile().memory_analysis()).temp_size_in_bytes

    def measure(self, most: int = STEPS) -> dict[str, Any]:
        """Runs steps, at most so many; returns their median and the peak memory."""
        state = self.start()

        def step() -> float:
            nonlocal state
            state, loss = self(state)
            return loss

        return {**time_steps(self._case, step, most), "peak_bytes": peak_bytes()}


def _placed(path: str, leaf: jax.Array, pinned: bool) -> jax.Array:
    """Moves weights of blocks to the host's pinned memory, if they belong there."""
    if not pinned or "/layers/" not in path or leaf.ndim < 3:
        return leaf
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind=PINNED)
    return jax.device_put(leaf, sharding)


def peak_bytes() -> int | None:
    """Peak bytes on the device in this process; None where it does not count them."""
    statistics_of_device = jax.devices()[0].memory_stats() or {}
    return statistics_of_device.get("peak_bytes_in_use")
