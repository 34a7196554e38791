"""Prefixes that reproduce the attention output of a text, in closed form.

Zweiger et al. (2026, "Attention Matching", arXiv 2602.16284) choose keys of a text by
the attention that they get from reference queries, and compute values by least squares.
Our reference queries come from windows of the text, read again after it. Blocks are
fitted in order, each with the fitted ones before it.
"""

import functools
from collections.abc import Collection
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from prompt_tuning.adapters.adapter import PREFIX_PATH
from prompt_tuning.core import intermediates
from prompt_tuning.core.compilation import WeightedJit
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters, describe, merge, split
from prompt_tuning.models import input_layers, rotary
from prompt_tuning.models.attention import KeyValues, groups_first
from prompt_tuning.models.block import Block
from prompt_tuning.models.build import build_model
from prompt_tuning.models.decoder_only import DecoderOnly
from prompt_tuning.models.norms import normalize
from prompt_tuning.models.rotary import RotaryAngles
from prompt_tuning.models.row_info import RowInfo
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.prefix import KeyValuePrefix
from prompt_tuning.prompts.stack_shape import PrefixStart, StackShape

WINDOW = 64
"""Maximum number of tokens of each window of the text that is read again."""
SHORTEST_WINDOW = 8
"""Minimum number of positions that a text leaves to a window, or its own length."""
RIDGE = 1e-4
"""Weight of the distance from the text's own values, in mean squares of attention."""


class _ReadWindows(NamedTuple):
    """What each block computes for the windows, `[L, ...]`, in float32.

    Attributes:
      queries: `[L, G, R, h, Q, K]`, after any rotation.
      keys: `[L, G, R, Q, K]`.
      values: `[L, G, R, Q, K]`.
    """

    queries: Array
    keys: Array
    values: Array


def check_matching(start: PrefixStart, config: ModelConfig, *, on_mesh: bool) -> None:
    """Checks that the closed form supports a model's attention."""
    part = text_parts(start, config)[0]
    length, reason = len(part.tokens) + _window(part, config), None
    if config.positions not in ("rotary", "learned"):
        reason = f"the model has positions of the kind {config.positions!r}"
    elif config.attention_soft_cap is not None:
        reason = "the model bounds its attention scores by attention_soft_cap"
    elif config.query_scaling is not None:
        reason = "the model scales its queries by their position"
    elif config.query_key_norm in ("head_after", "rotated"):
        reason = "the model normalizes rotated queries"
    elif config.windowed_head_width:
        reason = "heads of the model have other sizes in layers with a window"
    elif config.attention_sinks:
        reason = "the model has attention sinks of its own"
    elif config.windowed_layers and length > (config.window or 0):
        reason = f"the model has windows of {config.window} positions"
    elif on_mesh:
        reason = "the model is sharded over a mesh"
    if reason is not None:
        raise InputError(
            f"from_attention_matching() reads {length} tokens on one device with "
            f"plain attention, but {reason}: start the prefix by from_text() or "
            "from_chunks() (remember --start first or chunks)"
        )


def text_parts(start: PrefixStart, config: ModelConfig) -> list[PrefixStart]:
    """Divides a text into parts that the model can read together with a window.

    The parts are equally long, so the last tokens of one may be the first of the next.
    """
    limit, length = config.maximum_positions, len(start.tokens)
    if limit is None or limit - length >= min(SHORTEST_WINDOW, length):
        return [start]
    begin, text = start.tokens[: start.begin], start.tokens[start.begin :]
    size = max(limit // 2 - start.begin, 1)
    firsts = np.linspace(0, len(text) - size, -(-len(text) // size)).astype(int)
    return [start._replace(tokens=(*begin, *text[x : x + size])) for x in firsts]


def _window(start: PrefixStart, config: ModelConfig) -> int:
    """Returns the number of tokens in a window; below 1 if there is no room."""
    length = len(start.tokens)
    window = min(WINDOW, max(length // 2, 1))
    limit = config.maximum_positions
    return window if limit is None else min(window, limit - length)


def match_attention(
    parameters: Parameters,
    text: Float[Array, "L 2 T G K"],
    start: PrefixStart,
    slots: int,
    config: ModelConfig,
) -> Float[Array, "L 2 P G K"]:
    """Computes a prefix that reproduces the attention output of a text.

    The prefix has `P = slots` slots; `start` has the text's tokens and the number of
    windows to read again.
    """
    ids, width = np.array(start.tokens), _window(start, config)
    firsts = np.linspace(0, len(ids) - width, start.windows).astype(int)
    rows = jnp.array(ids[firsts[:, None] + np.arange(width)])  # [R, Q]
    whole = _reader(config, text.shape[2])(parameters, text, rows)
    read_windows, choose = (
        _reader(config, slots),
        jax.jit(_choose_slots, static_argnums=(2, 3)),
    )
    chosen = jnp.stack(
        [
            choose(keys_values, of_block, config.score_scale, slots)
            for keys_values, of_block in zip(text, _blocks(whole), strict=True)
        ]
    )  # [L, 2, P, G, K]
    prefix = move_prefix(chosen, slots - text.shape[2], config)
    fit = jax.jit(_moments, static_argnums=4)
    for block, of_text in enumerate(_blocks(whole)):
        behind = _blocks(read_windows(parameters, prefix, rows))[block]
        moments = fit(text[block], of_text, prefix[block], behind, config.score_scale)
        squares, products = map(np.asarray, moments)
        values = _solve(squares, products, np.asarray(prefix[block, 1]))
        prefix = prefix.at[block, 1].set(values)
    return prefix


def _blocks(windows: _ReadWindows) -> list[_ReadWindows]:
    return [_ReadWindows(*parts) for parts in zip(*windows, strict=True)]


@functools.lru_cache(maxsize=4)  # parts of a text share the programs
def _reader(config: ModelConfig, length: int) -> "_WindowReader":
    """Returns a function of parameters, a prefix and rows."""
    stack = StackShape(config.layers, config.key_value_heads, config.head_width)
    table = np.zeros((config.vocabulary_size, config.width), np.float32)

    def build(key: Array) -> tuple[nnx.GraphDef, Parameters]:
        prefix = KeyValuePrefix(key, Vocabulary(table, stack=stack), length=length)
        return split(build_model(key, config, prefix))

    return _WindowReader(*describe(build, jax.random.key(0)))


class _WindowReader:
    """Reads rows after a prefix, compiled once."""

    def __init__(self, graph: nnx.GraphDef, abstract: Collection[str]):
        self._paths = [path for path in abstract if path != PREFIX_PATH]
        self._run = WeightedJit(
            lambda frozen, prefix, rows: _read_rows(
                cast(DecoderOnly, merge(graph, frozen | {PREFIX_PATH: prefix})), rows
            )
        )

    def __call__(
        self, parameters: Parameters, prefix: Array, rows: Array
    ) -> _ReadWindows:
        return self._run({p: parameters[p] for p in self._paths}, prefix, rows)


class _QueryLayers(nnx.Module):
    """The parts of all blocks that compute queries; other parts may differ by block."""

    def __init__(self, blocks: Block):
        assert blocks.self_attention is not None  # a prefix needs it in every block
        self.norm, self.attention = blocks.self_attention_norm, blocks.self_attention


def _read_rows(model: DecoderOnly, tokens: Int[Array, "R Q"]) -> _ReadWindows:
    config, decoder = model.config, model.decoder
    lengths = jnp.full(len(tokens), tokens.shape[1])
    rows = RowInfo(lengths, lengths, None, None, tokens - config.vocabulary_size)
    stream = decoder.text_stream(model.token_embedder(tokens, config.dtype), rows)
    layers = model.position_embedder, model.embedding_norm
    stream = input_layers.embed_inputs(stream, config, *layers, None)
    paths = [f"decoder/layers/{block}/hidden" for block in range(config.layers - 1)]
    past = decoder.prefix_contexts(rows)
    with intermediates.capture(paths) as captured:
        _, (kept,) = decoder.run([stream], past=past, keep=True)
    row_keys = kept.key_values
    assert isinstance(row_keys, KeyValues)
    # The input of each block: [L, R, Q, D].
    inputs = jnp.stack([stream.hidden, *(captured[path] for path in paths)])
    graph, parameters = split(_QueryLayers(decoder.layers))
    shape = stream.hidden.shape[:2]
    positions = jnp.broadcast_to(stream.positions, shape).ravel()
    angles = _angles(positions, config)

    def queries(of_block: tuple) -> Float[Array, "G R h Q K"]:
        parameters, hidden, angles = of_block
        layers = cast(_QueryLayers, merge(graph, parameters))
        flat = hidden.reshape(-1, config.width)
        query = layers.attention.queries(normalize(layers.norm, flat))  # [R * Q, H, K]
        if angles is not None:
            interleaved = config.rotary_interleaved
            query = rotary.rotate(query, angles, interleaved=interleaved)
        by_row = query.reshape(*shape, *query.shape[1:]).astype(jnp.float32)
        return groups_first(by_row, config.key_value_heads)

    keys, values = (x.astype(jnp.float32) for x in row_keys)
    return _ReadWindows(
        jax.lax.map(queries, (parameters, inputs, angles)), keys, values
    )


def _angles(positions: Int[Array, "n"], config: ModelConfig) -> RotaryAngles | None:
    """Returns the rotary cosines and sines of each block, `[L, n, 1, K / 2]`."""
    if config.positions != "rotary":
        return None
    tables = np.array(rotary.rotary_table_indices(config))

    def by_block(part: Array) -> Array:
        of_block = part[tables] if tables.any() else part[None]
        return jnp.broadcast_to(of_block, (config.layers, *of_block.shape[1:]))

    angles = rotary.rotary_angles(positions, config)
    return RotaryAngles(by_block(angles.cosine), by_block(angles.sine))


def move_prefix(
    prefix: Float[Array, "L 2 P G K"], distance: int, config: ModelConfig
) -> Float[Array, "L 2 P G K"]:
    """Rotates a prefix's keys to keep their distance to text that moves.

    The text moves by `distance` positions. Unrotated keys stay as they are.

    Raises:
      InputError: if the layers of the prefix do not all have the same rotation.
    """
    if config.positions != "rotary":
        return prefix
    if config.windowed_head_width or len(prefix) != config.layers:
        raise InputError(
            "a prefix cannot be moved behind another in this model, whose layers have "
            "keys of different kinds: give one prefix"
        )
    angles = _angles(jnp.full(prefix.shape[2], distance), config)
    assert angles is not None
    # A magnitude of the angles is in the keys already.
    size = jnp.sqrt(angles.cosine**2 + angles.sine**2)
    turned = RotaryAngles(angles.cosine / size, angles.sine / size)
    rotated = jax.vmap(
        lambda keys, angles: rotary.rotate(
            keys, angles, interleaved=config.rotary_interleaved
        )
    )(prefix[:, 0], turned)
    return prefix.at[:, 0].set(rotated)


def _attention(
    prefix: Float[Array, "2 S G K"], windows: _ReadWindows, scale: float
) -> tuple[Float[Array, "G R h Q S"], Float[Array, "G R h Q Q"]]:
    """Returns the attention weights on a prefix, and on the rows' own tokens."""
    exact = jax.lax.Precision.HIGHEST
    earlier = jnp.einsum(
        "grhqk,sgk->grhqs", windows.queries, prefix[0], precision=exact
    )
    own_scores = jnp.einsum(
        "grhqk,grsk->grhqs", windows.queries, windows.keys, precision=exact
    )
    length = own_scores.shape[-1]
    own_scores = jnp.where(jnp.tri(length, dtype=bool), own_scores * scale, -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([earlier * scale, own_scores], -1), -1)
    return weights[..., :-length], weights[..., -length:]


def _choose_slots(
    text: Float[Array, "2 T G K"], windows: _ReadWindows, scale: float, slots: int
) -> Float[Array, "2 P G K"]:
    """Chooses the keys of each head that get most attention, in their order."""
    weights, _ = _attention(text, windows, scale)
    mass = jnp.mean(weights**2, axis=(1, 2, 3))  # [G, T]
    chosen = jnp.sort(jax.lax.top_k(mass, slots)[1], axis=-1)  # [G, P]
    return jnp.take_along_axis(text, chosen.T[None, :, :, None], axis=1)


def _moments(
    text: Float[Array, "2 T G K"],
    of_text: _ReadWindows,
    prefix: Float[Array, "2 P G K"],
    behind: _ReadWindows,
    scale: float,
) -> tuple[Float[Array, "G P P"], Float[Array, "G P K"]]:
    """Returns the mean products for the least squares of the prefix's values."""
    to_text, to_rows = _attention(text, of_text, scale)
    wanted = jnp.einsum("grhqs,sgk->grhqk", to_text, text[1])
    wanted += jnp.einsum("grhqs,grsk->grhqk", to_rows, of_text.values)
    weights, to_rows = _attention(prefix, behind, scale)
    wanted -= jnp.einsum("grhqs,grsk->grhqk", to_rows, behind.values)
    count, exact = weights[0, ..., 0].size, jax.lax.Precision.HIGHEST
    squares = jnp.einsum("grhqp,grhqs->gps", weights, weights, precision=exact)
    products = jnp.einsum("grhqp,grhqk->gpk", weights, wanted, precision=exact)
    return squares / count, products / count


def _solve(
    squares: Float[np.ndarray, "G P P"],
    products: Float[np.ndarray, "G P K"],
    values: Float[np.ndarray, "P G K"],
) -> Float[np.ndarray, "P G K"]:
    """Solves for values, staying near the text's where attention says nothing."""
    slots = len(values)
    ridge = RIDGE / slots
    solved = np.linalg.solve(
        squares.astype(np.float64) + ridge * np.eye(slots),
        products + ridge * values.swapaxes(0, 1),
    )  # [G, P, K]
    return solved.swapaxes(0, 1).astype(np.float32)
