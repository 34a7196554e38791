"""Measures a decoding step of latent attention with compressed keys, and with all.

    python -m scripts.bench.latent [--rows N] [--length N] [--turns N]

Two layers with the attention of DeepSeek V3 (16 heads of 192, a rank of 512) hold rows
of random tokens. Both forms of keys and values take turns in one process.
"""

import argparse
import time

import jax
import numpy as np

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import split
from prompt_tuning.decoding.slot_state import RowStates, Slots
from prompt_tuning.decoding.slots import read_tokens
from prompt_tuning.models.build import build_model
from scripts.bench.machine import processor

LAYERS, CHUNK = 2, 64


def latent_config(positions: int) -> ModelConfig:
    """Returns the config of the model, with room for some positions."""
    return ModelConfig(
        family="deepseek_v3",
        architecture="decoder_only",
        **{"vocabulary_size": 1024, "width": 1024, "layers": LAYERS},
        **{"heads": 16, "key_value_heads": 16, "head_width": 192, "rotary_width": 64},
        **{"value_width": 128, "key_value_rank": 512, "query_rank": 384},
        **{"feed_forward_width": 2048, "activation": "silu", "gated": True},
        **{"norm": "rms", "positions": "rotary", "rotary_interleaved": True},
        **{"maximum_positions": positions, "tied_head": False},
    )


def main() -> None:
    """Prints the memory and the median time of both forms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048, help="of slots")
    parser.add_argument("--turns", type=int, default=15)
    options = parser.parse_args()
    config = latent_config(options.length)
    graph, parameters = split(build_model(jax.random.key(0), config))
    forms = {"all heads": False, "compressed": True}
    slots = {
        form: Slots.create(
            config, options.rows, options.length, CHUNK, compressed=compressed
        )
        for form, compressed in forms.items()
    }
    zeros = np.zeros(options.rows, np.int32)
    none = np.zeros((options.rows, 0), np.int32)
    rows = RowStates(zeros + options.length - CHUNK, zeros, zeros == 0, zeros, none)

    def step(form: str) -> float:
        start, count = time.perf_counter(), len(slots[form].own)
        slots[form] = read_tokens(
            parameters, slots[form], zeros, rows, (), graph=graph, sections=count
        )
        jax.block_until_ready(slots[form])
        return time.perf_counter() - start

    for form in forms:  # compiles
        step(form)
    seconds = np.array([[step(form) for form in forms] for _ in range(options.turns)])
    print(f"{processor()}, jax {jax.__version__}, {options.rows} rows")
    for form, median in zip(forms, np.median(seconds, axis=0), strict=True):
        size = slots[form].key_value_bytes / 2**20
        print(f"{form}: {1000 * median:.1f} ms a step, {size:.1f} MiB")
    ratio = np.median(seconds[:, 0] / seconds[:, 1])
    print(f"compressed keys and values are {ratio:.2f}x as fast")


if __name__ == "__main__":
    main()
