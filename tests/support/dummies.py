"""Small models with random parameters, and batches of handwritten rows."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import SupportsIndex, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters, describe, merge, split
from prompt_tuning.core.rotary_scaling import QueryScaling
from prompt_tuning.core.t5_config import t5_config
from prompt_tuning.decoding.row_encoding import pad_rows
from prompt_tuning.models.build import build_model
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.projection_adapters import AdapterSpec
from prompt_tuning.prompts.prompt_module import PromptModule
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.settings.prompting import Prompting

V = 31
P = 3
PROMPT_PATHS = {"decoder_only": "decoder/prompt", "encoder_decoder": "encoder/prompt"}

LLAMA = ModelConfig(
    family="llama",
    architecture="decoder_only",
    vocabulary_size=V,
    width=16,
    feed_forward_width=24,
    layers=2,
    heads=4,
    key_value_heads=2,
    head_width=4,
    norm="rms",
    positions="rotary",
    maximum_positions=64,
    activation="silu",
    gated=True,
    tied_head=False,
)
GPT2 = dataclasses.replace(
    LLAMA,
    family="gpt2",
    key_value_heads=4,
    norm="layer",
    positions="learned",
    activation="gelu_tanh",
    gated=False,
    biases="all",
    tied_head=True,
)
LFM2 = dataclasses.replace(
    LLAMA,
    family="lfm2",
    layers=5,
    query_key_norm="head",
    recurrence="short_convolution",
    recurrent_layers=(0, 1, 3),
    convolution_width=3,
)
QWEN3_5 = dataclasses.replace(
    LLAMA,
    family="qwen3_5_text",
    layers=3,
    norm="rms_plus_one",
    query_key_norm="head",
    gated_attention=True,
    recurrence="gated_delta",
    recurrent_layers=(0, 1),
    convolution_width=3,
    recurrent_heads=4,
    recurrent_key_heads=2,
    recurrent_width=3,
    recurrent_key_width=4,
)
GRANITE4 = dataclasses.replace(
    LLAMA,
    family="granitemoehybrid",
    layers=3,
    positions="none",
    recurrence="mamba2",
    recurrent_layers=(0, 2),
    convolution_width=3,
    recurrent_heads=4,
    recurrent_key_heads=2,
    recurrent_width=3,
    recurrent_key_width=5,
)
FALCON_H1 = dataclasses.replace(
    GRANITE4,
    family="falcon_h1",
    recurrent_layers=(0, 1, 2),
    recurrence_beside_attention=True,
    projection_multipliers=(("self_attention/key", 0.7), ("mamba2/value", 1.5)),
)
MAMBA2 = dataclasses.replace(
    GRANITE4, family="mamba2", recurrent_layers=(0, 1, 2), feed_forward_width=0
)
JAMBA = dataclasses.replace(
    GRANITE4,
    family="jamba",
    recurrence="mamba",
    **{"recurrent_heads": 6, "recurrent_key_heads": 1, "recurrent_width": 1},
    **{"recurrent_key_width": 4, "step_rank": 2},
)
MINIMAX = dataclasses.replace(
    LLAMA,
    family="minimax",
    layers=3,
    **{"norm_placement": "after_sum", "embedding_norm": True},
    **{"skip_multiplier": 2.0, "recurrence": "lightning", "recurrent_layers": (0, 2)},
    **{"recurrent_heads": 4, "recurrent_key_heads": 4},
    **{"recurrent_width": 4, "recurrent_key_width": 4},
    **{"experts": 4, "experts_per_token": 2, "feed_forward_width": 8},
)
DEEPSEEK = dataclasses.replace(
    LLAMA,
    family="deepseek_v3",
    key_value_heads=4,
    head_width=6,
    rotary_width=2,
    rotary_interleaved=True,
    **{"value_width": 3, "key_value_rank": 5, "query_rank": 6},
    **{"experts": 4, "experts_per_token": 2, "routing": "sigmoid"},
    **{"feed_forward_width": 8, "dense_layers": (0,), "dense_width": 24},
    **{"shared_expert_width": 8, "shared_expert_gated": False},
)
LLAMA4 = dataclasses.replace(
    LLAMA,
    family="llama4_text",
    layers=3,
    rotary_interleaved=True,
    query_key_norm="rotated",
    query_scaling=QueryScaling(slope=0.5, positions=3, first=1, unrotated=True),
    unrotated_layers=(1,),
    **{"window": 4, "windowed_layers": (0, 2), "chunked": True},
    **{"experts": 4, "experts_per_token": 1, "routing": "sigmoid_inputs"},
    **{"shared_expert_width": 8, "shared_expert_gated": False},
)
GEMMA4 = dataclasses.replace(
    LLAMA,
    family="gemma4_text",
    layers=6,
    query_key_norm="head",
    **{"window": 4, "windowed_layers": (0, 2, 4), "window_rotary_base": 100.0},
    **{"head_width": 12, "windowed_head_width": 8, "full_key_value_heads": 1},
    **{"keys_as_values": True, "value_norm": True, "layer_factors": True},
    **{"sharing_layers": 2, "layer_input_width": 8},
    **{"dense_layers": (4, 5), "dense_width": 20},
)
T5_ORIGINAL, T5_GATED = (
    t5_config(
        width=16,
        feed_forward_width=24,
        layers=2,
        heads=4,
        head_width=3,
        vocabulary_size=V,
        relative_buckets=8,
        relative_maximum_distance=12,
        version=version,
    )
    for version in ("1.0", "1.1")
)
FAMILIES = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "t5_original": T5_ORIGINAL,
    "t5_gated": T5_GATED,
}


def with_dropout(config: ModelConfig, rate: float = 0.3) -> ModelConfig:
    """Returns the config with dropout during training."""
    return dataclasses.replace(config, dropout_rate=rate)


class LetterTokenizer:
    """Maps `a` to token 0, `b` to 1, and so on; spaces are dropped."""

    vocabulary_size = 26
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id = 0
    begin_ids: tuple[int, ...] = ()

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") for letter in text if letter != " "]

    def encode_continuation(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        return "".join(self.token(int(id)) for id in ids)

    def token(self, id: int) -> str:
        return chr(id + ord("a"))


def prompted(
    config: ModelConfig,
    *,
    length: int = P,
    prompting: Prompting | None = None,
    adapters: Sequence[AdapterSpec] = (),
) -> tuple[nnx.GraphDef, Parameters]:
    """Returns a model with a prompt; its values depend only on the parameter paths."""
    describe_once = _prompted.__wrapped__ if adapters else _prompted
    return _with_drawn(*describe_once(config, length, prompting, tuple(adapters)))


@functools.cache
def _prompted(
    config: ModelConfig,
    length: int,
    prompting: Prompting | None,
    adapters: tuple[AdapterSpec, ...],
) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
    vocabulary = Vocabulary(np.zeros((config.vocabulary_size, config.width), "f4"))

    def build(key):
        prompt = SoftPrompt(key, vocabulary, length=length)
        return build_model(key, config, prompt, prompting, adapters=adapters)

    return abstract(build)


def with_prompt(
    config: ModelConfig, prompt: PromptModule, prompting: Prompting | None = None
) -> tuple[nnx.GraphDef, Parameters]:
    """Returns the same model and values with a prompt that has its own values."""
    graph, parameters = with_numbers(
        lambda key: build_model(key, config, prompt, prompting)
    )
    prompt_values = {
        f"{PROMPT_PATHS[config.architecture]}/{p}": x
        for p, x in split(prompt)[1].items()
    }
    return graph, parameters | prompt_values


def unprompted(config: ModelConfig) -> tuple[nnx.GraphDef, Parameters]:
    """Returns the same model and values without a prompt."""
    return _with_drawn(*_unprompted(config))


@functools.cache
def _unprompted(
    config: ModelConfig,
) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
    return abstract(lambda key: build_model(key, config))


def abstract(
    build: Callable[[jax.Array], nnx.Module],
) -> tuple[nnx.GraphDef, dict[str, jax.ShapeDtypeStruct]]:
    """Returns the graph, and the shape and type of every parameter, uncomputed."""
    return describe(lambda key: split(build(key)), jax.random.key(0))


def with_numbers(
    build: Callable[[jax.Array], nnx.Module],
) -> tuple[nnx.GraphDef, Parameters]:
    """Returns a model whose values depend only on the parameter paths."""
    return _with_drawn(*abstract(build))


def _with_drawn(
    graph: nnx.GraphDef, shapes: dict[str, jax.ShapeDtypeStruct]
) -> tuple[nnx.GraphDef, Parameters]:
    return graph, {path: _drawn(path, leaf) for path, leaf in shapes.items()}


def _drawn(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns random values, also for norms and biases, so that all have an effect."""
    random = np.random.default_rng(zlib.crc32(path.encode()))
    numbers = random.standard_normal(leaf.shape)
    if path.endswith("/scale"):
        numbers = 1 + 0.2 * numbers
    elif path.endswith("/bias") or "relative_position_bias" in path:
        numbers *= 0.2
    elif path.endswith("/kernel"):
        numbers *= (leaf.shape[-1] if path == "head/kernel" else leaf.shape[-2]) ** -0.5
    return jnp.asarray(numbers, leaf.dtype)


def make_batch(
    config: ModelConfig, rows: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Batch:
    """Builds a batch of (prompt, completion) pairs; completions have loss weight 1."""
    given = [list(row[0]) for row in rows]
    completions = [list(row[1]) for row in rows]
    count = max(map(len, completions))
    weights, lengths = pad_rows([[1] * len(row) for row in completions], 0, count)
    positions = np.arange(count) * (weights > 0)
    if config.architecture == "encoder_decoder":
        tokens, read = pad_rows(given, 0, max(map(len, given)))
        targets, _ = pad_rows(completions, 0, count)
        prefix_lengths = np.zeros_like(read)
    else:
        whole = [a + b for a, b in zip(given, completions, strict=True)]
        tokens, read = pad_rows(whole, 0, max(map(len, whole)))
        targets = tokens
        prefix_lengths = read - lengths
        positions = (positions + prefix_lengths[:, None]) * (weights > 0)
    return Batch(
        tokens=tokens,
        lengths=read,
        targets=targets,
        loss_positions=positions.astype(np.int32),
        loss_weights=weights.astype(np.float32),
        prefix_lengths=prefix_lengths,
    )


def random_rows(
    sizes: Sequence[tuple[int, int]], seed: int = 0, vocabulary_size: int = V
) -> list[tuple[list[int], list[int]]]:
    """Returns random (prompt, completion) pairs without special tokens."""
    random = np.random.default_rng(seed)

    def draw(size):
        return random.integers(3, vocabulary_size, size).tolist()

    return [(draw(given), draw(completion)) for given, completion in sizes]


@functools.partial(jax.jit, static_argnames="graph")
def logits(parameters, batch, *, graph):
    """Returns the logits at the loss positions from one pass over the rows."""
    model = cast(LanguageModel, merge(graph, parameters))
    return model.logits(model.hidden(batch))


@functools.partial(jax.jit, static_argnames="graph")
def logits_by_step(parameters, tokens, lengths, completions, *, graph):
    """Returns the logits of every completion token, decoded one at a time."""
    model = cast(LanguageModel, merge(graph, parameters))

    def read(carry, token):
        hidden, cache = carry
        return model.decode(token, cache), hidden

    start = model.prefill(tokens, lengths, completions.shape[1])
    _, hidden = jax.lax.scan(read, start, completions.T)
    return model.logits(hidden.swapaxes(0, 1))
