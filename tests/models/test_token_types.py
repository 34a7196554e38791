"""Pairs of texts have the token types that tokenizers give them."""

# transformers and torch are only in the `bench` extra.
# pyright: reportMissingImports=false

import jax.numpy as jnp
import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.models.input_layers import second_types
from tests.support.encoder_folders import write_bert


@pytest.mark.torch
def test_a_pair_has_the_states_of_transformers(tmp_path):
    import torch
    from transformers import AutoModel, PreTrainedTokenizerFast

    folder = write_bert(tmp_path / "bert")
    file = str(folder / "tokenizer.json")
    pair = PreTrainedTokenizerFast(tokenizer_file=file)(
        "abc", "fghi", return_token_type_ids=True
    )
    assert pair["token_type_ids"] == [0] * 5 + [1] * 5
    model = AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        given = {name: torch.tensor([x]) for name, x in pair.items()}
        states = model(**given).last_hidden_state[0].mean(0).numpy()
    (ours,) = pt.load(str(folder)).embed("abc[SEP]fghi", normalize=False)
    np.testing.assert_allclose(ours, states, atol=1e-5)
    (one,) = pt.load(str(folder)).embed("abcfghi", normalize=False)
    assert np.abs(one - states).max() > 0.01


def test_each_example_of_a_packed_row_begins_with_the_first_type():
    tokens = jnp.array([[4, 3, 5, 3, 6, 3, 7, 7, 3]])
    segments = jnp.array([[1, 1, 1, 1, 2, 2, 2, 2, 2]])
    marks = second_types(tokens, segments, 3)
    np.testing.assert_array_equal(marks, [[0, 0, 1, 1, 0, 0, 1, 1, 1]])
