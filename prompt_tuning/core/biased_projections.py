"""Projections of a block that have a bias, for each choice of `ModelConfig.biases`."""

QKV, MLP = ("query", "key", "value"), ("gate", "up", "down")
BIASED: dict[str, tuple[str, ...]] = {
    "none": (),
    "qkv": QKV,
    "attention": (*QKV, "out"),
    "latent": ("query_down", "key_value_down", "out"),
    "mlp": MLP,
    "out_mlp": ("out", *MLP),
    "all": (*QKV, "out", *MLP),
}
