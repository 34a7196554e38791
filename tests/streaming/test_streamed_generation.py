"""Texts are continued while the weights are streamed."""

import dataclasses

import numpy as np
import pytest

from prompt_tuning.decoding.batch_decoding import (
    continue_batch,
    continue_batch_streamed,
)
from prompt_tuning.decoding.row_encoding import pad_rows
from prompt_tuning.decoding.row_progress import first_choices
from prompt_tuning.decoding.sampling_settings import Sampling
from tests.streaming.test_streamed_step import Layers, divided
from tests.support import dummies
from tests.support.exhaustive import sample

NEW = 4
ALIKE = dataclasses.replace(dummies.DEEPSEEK, dense_layers=(), dense_width=0)


@pytest.mark.parametrize("family", sample(1, ["llama", "t5_gated", "gpt2", "deepseek"]))
def test_streamed_tokens_equal_the_usual_ones_with_one_pass_for_each(family):
    families = dummies.FAMILIES | {"deepseek": ALIKE}
    config = dataclasses.replace(families[family], layers=3)
    graph, parameters = dummies.prompted(config)
    _, _, blocks, rest = divided(parameters, [])
    rows = [row for row, _ in dummies.random_rows([(4, 3), (1, 5), (6, 1)])]
    tokens, lengths = pad_rows(rows, config.pad_id, 6)
    given = (tokens, lengths, first_choices(Sampling(), (), range(len(rows))))
    settings = {
        "graph": graph,
        "new_tokens": NEW,
        "pad_id": config.pad_id,
    }
    expected = continue_batch(parameters, *given, **settings)
    layers = Layers(blocks)
    actual = continue_batch_streamed(rest | layers.weights, *given, **settings)
    np.testing.assert_array_equal(actual, expected)
    assert len({tuple(row) for row in actual.tolist()}) > 1
    # All rows share a pass; an encoder runs once, before the first token.
    for path, index in set(layers.reads):
        passes = 1 if path.startswith("encoder/") else NEW
        assert layers.reads.count((path, index)) <= passes
    assert len(layers.reads) >= NEW * 3
