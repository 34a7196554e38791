"""The expected shape of every parameter of a model, derived from its config."""

import jax
import jax.numpy as jnp

from prompt_tuning.core.model_config import ModelConfig


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    width = config.width
    shapes: dict[str, tuple[int, ...]] = {}
    shapes["token_embedder/embedding"] = (config.vocabulary_size, width)
    if config.positions == "learned":
        assert config.maximum_positions is not None
        shapes["position_embedder/embedding"] = (config.maximum_positions, width)
    if not config.tied_head:
        shapes["head/kernel"] = (config.vocabulary_size, width)
    stacks = {"decoder": config.layers}
    if config.architecture == "encoder_decoder":
        stacks["encoder"] = config.encoder_layers
    for stack, layers in stacks.items():
        cross = stack == "decoder" and "encoder" in stacks
        for name, shape in _layer_shapes(config, cross).items():
            shapes[f"{stack}/layers/{name}"] = (layers, *shape)
        for name, shape in _norm_shapes(config, "final_norm").items():
            shapes[f"{stack}/{name}"] = shape
        if config.positions == "relative":
            shapes[f"{stack}/relative_position_bias/embedding"] = (
                config.heads,
                config.relative_buckets,
            )
    return shapes


def abstract(config: ModelConfig, **more: tuple[int, ...]):
    """Returns the same as `jax.ShapeDtypeStruct`s in float32, with further paths."""
    return {
        path: jax.ShapeDtypeStruct(shape, jnp.float32)
        for path, shape in (expected_shapes(config) | more).items()
    }


def _norm_shapes(config: ModelConfig, name: str) -> dict[str, tuple[int, ...]]:
    kinds = ("scale",) if config.norm == "rms" else ("scale", "bias")
    return {f"{name}/{kind}": (config.width,) for kind in kinds}


def _layer_shapes(config: ModelConfig, cross: bool) -> dict[str, tuple[int, ...]]:
    width, forward = config.width, config.feed_forward_width
    query = config.heads * config.head_width
    key = config.key_value_heads * config.head_width
    blocks = {"self_attention", "cross_attention"} if cross else {"self_attention"}
    kernels = {"mlp/up": (width, forward), "mlp/down": (forward, width)}
    if config.gated:
        kernels["mlp/gate"] = (width, forward)
    shapes = _norm_shapes(config, "mlp_norm")
    for block in blocks:
        shapes |= _norm_shapes(config, f"{block}_norm")
        kernels[f"{block}/query"] = (width, query)
        kernels[f"{block}/key"] = (width, key)
        kernels[f"{block}/value"] = (width, key)
        kernels[f"{block}/out"] = (query, width)
    for name, shape in kernels.items():
        shapes[f"{name}/kernel"] = shape
        in_qkv = name.rpartition("/")[2] in ("query", "key", "value")
        if config.biases == "all" or (config.biases == "qkv" and in_qkv):
            shapes[f"{name}/bias"] = shape[-1:]
    return shapes
