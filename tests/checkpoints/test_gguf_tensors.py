"""Tensors of GGUF files have the numbers that the package `gguf` computes.

`scripts/make_gguf_fixtures.py` wrote the blocks and their numbers.
"""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from prompt_tuning.checkpoints.quantized.gguf_tensors import DEQUANTIZERS, open_tensors
from prompt_tuning.core.gguf_files import read_gguf
from tests.support.gguf_files import write_gguf

BLOCKS = dict(np.load(Path(__file__).parents[1] / "fixtures/gguf/blocks.npz"))


@pytest.mark.parametrize("kind", DEQUANTIZERS)
def test_blocks_have_the_numbers_of_gguf_to_the_bit(kind):
    ours = DEQUANTIZERS[kind](BLOCKS[f"{kind}.blocks"])
    expected = BLOCKS[f"{kind}.numbers"]
    np.testing.assert_array_equal(ours.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    "block",
    [
        np.s_[0:2, 0:64],
        np.s_[1:2, 5:40],
        np.s_[0:1, 63:64],
        np.s_[0:2, 32:32],
        np.s_[1:1, 0:64],
    ],
)
def test_a_block_of_a_tensor_is_a_part_of_it(tmp_path, block):
    packed, numbers = BLOCKS["Q8_0.blocks"], BLOCKS["Q8_0.numbers"].reshape(2, 64)
    floats = np.arange(128, dtype=ml_dtypes.bfloat16).reshape(2, 64)
    tensors = {"q": ((2, 64), "Q8_0", packed), "b": ((2, 64), "BF16", floats)}
    stored = open_tensors(read_gguf(write_gguf(tmp_path / "x.gguf", {}, tensors)))
    np.testing.assert_array_equal(stored["q"].read(block), numbers[block])
    np.testing.assert_array_equal(stored["b"].read(block), floats[block])
