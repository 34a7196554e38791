"""Makes T5X checkpoints of a tiny random T5, with the losses of transformers.

    python -m scripts.make_t5x_fixtures

It writes the same weights to `tests/fixtures/t5x` twice, under T5X's names:

    msgpack/checkpoint_0            all arrays in the file, as Flax serializes them
    zarr/checkpoint_3/              matrices in zarr arrays, as tensorstore writes them
    losses.json                     inputs, targets and their negative log likelihoods

The names and transposes are those of `convert_t5x_checkpoint_to_flax.py` in
transformers; the layout of the folders is that of `t5x/checkpoints.py`. Needs the
`bench` extra (torch, transformers), and nothing of this package.
"""

# Some imports are only in the `bench` extra.
# pyright: reportMissingImports=false

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore
import torch
import transformers
from flax import serialization

from scripts.make_peft_fixtures import random_model

FOLDER = Path(__file__).parents[1] / "tests/fixtures/t5x"
# The last of several chunks of the vocabulary is ragged.
CONFIG: dict[str, Any] = {
    "vocab_size": 100,
    "d_model": 8,
    "d_ff": 16,
    "d_kv": 3,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,  # which does not scale the decoder's outputs
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
CHUNK = 48
INPUTS = [3, 7, 11, 2, 9, 1]
TARGETS = [5, 8, 2, 1]
ATTENTION = {"query": "q", "key": "k", "value": "v", "out": "o"}


def main() -> None:
    """Makes both checkpoints."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    model = random_model(transformers.T5Config(**CONFIG), tied=False)
    target = nested(t5x_arrays({k: x.numpy() for k, x in model.state_dict().items()}))
    shutil.rmtree(FOLDER, ignore_errors=True)
    (FOLDER / "msgpack").mkdir(parents=True)
    write(FOLDER / "msgpack/checkpoint_0", target, 0)
    folder = FOLDER / "zarr/checkpoint_3"
    folder.mkdir(parents=True)
    write(folder / "checkpoint", with_zarr(folder, target, "target"), 3)
    with torch.no_grad():
        labels = torch.tensor([TARGETS])
        logits = model(input_ids=torch.tensor([INPUTS]), labels=labels).logits[0]
    losses = torch.nn.functional.cross_entropy(logits, labels[0], reduction="none")
    facts = {"inputs": INPUTS, "targets": TARGETS, "losses": losses.tolist()}
    (FOLDER / "losses.json").write_text(json.dumps(facts) + "\n")


def t5x_arrays(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns T5X's arrays by name."""
    arrays = {
        "token_embedder/embedding": weights["shared.weight"],
        "decoder/logits_dense/kernel": weights["lm_head.weight"].T,
    }
    for stack in ("encoder", "decoder"):
        norm = weights[f"{stack}.final_layer_norm.weight"]
        arrays[f"{stack}/{stack}_norm/scale"] = norm
        first = f"{stack}.block.0.layer.0.SelfAttention"
        bias = weights[f"{first}.relative_attention_bias.weight"]
        arrays[f"{stack}/relpos_bias/rel_embedding"] = bias.T
        for layer in range(CONFIG["num_layers"]):
            block = f"{stack}.block.{layer}.layer"
            for name, array in layer_arrays(weights, block, stack == "decoder").items():
                arrays[f"{stack}/layers_{layer}/{name}"] = array
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def layer_arrays(weights, block: str, decoder: bool) -> dict[str, np.ndarray]:
    """Returns the arrays of one layer."""
    parts = [("attention", "pre_attention_layer_norm", "SelfAttention")]
    if decoder:
        cross = ("encoder_decoder_attention", "pre_cross_attention_layer_norm")
        parts = [
            ("self_attention", "pre_self_attention_layer_norm", "SelfAttention"),
            (*cross, "EncDecAttention"),
        ]
    arrays = {}
    for index, (name, norm, theirs) in enumerate(parts):
        for ours, letter in ATTENTION.items():
            kernel = weights[f"{block}.{index}.{theirs}.{letter}.weight"]
            arrays[f"{name}/{ours}/kernel"] = kernel.T
        arrays[f"{norm}/scale"] = weights[f"{block}.{index}.layer_norm.weight"]
    last = f"{block}.{len(parts)}"
    for name in ("wi_0", "wi_1", "wo"):
        kernel = weights[f"{last}.DenseReluDense.{name}.weight"]
        arrays[f"mlp/{name}/kernel"] = kernel.T
    arrays["pre_mlp_layer_norm/scale"] = weights[f"{last}.layer_norm.weight"]
    return arrays


def nested(arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Returns a tree of the names."""
    tree: dict[str, Any] = {}
    for name, array in arrays.items():
        *folders, leaf = name.split("/")
        at = tree
        for folder in folders:
            at = at.setdefault(folder, {})
        at[leaf] = array
    return tree


def with_zarr(folder: Path, tree: dict[str, Any], path: str) -> dict[str, Any]:
    """Writes kernels and embeddings to zarr; returns the tree with their specs."""
    result = {}
    for name, value in tree.items():
        here = f"{path}.{name}"
        if isinstance(value, dict):
            value = with_zarr(folder, value, here)
        elif name in ("kernel", "embedding"):
            value = write_zarr(folder, here, value)
        result[name] = value
    return result


def write_zarr(folder: Path, name: str, array: np.ndarray) -> dict[str, Any]:
    """Writes a zarr array; returns its spec in T5X's form."""
    metadata = {
        "shape": list(array.shape),
        "chunks": [min(CHUNK, size) for size in array.shape],
        "dtype": "<f4",
        "compressor": {"id": "gzip", "level": 1},
    }
    store = {"driver": "file", "path": f"{folder / name}/"}
    spec = {"driver": "zarr", "kvstore": store, "metadata": metadata, "create": True}
    tensorstore.open(spec).result().write(array).result()
    kvstore = {"driver": "gfile", "path": name}
    return {"driver": "zarr", "kvstore": kvstore, "metadata": metadata}


def write(file: Path, target: dict[str, Any], step: int) -> None:
    """Writes the file of a checkpoint."""
    state = {"step": np.int32(step), "param_states": {}}
    tree = {"version": 3, "optimizer": {"state": state, "target": target}}
    file.write_bytes(serialization.msgpack_serialize(tree))


if __name__ == "__main__":
    main()
