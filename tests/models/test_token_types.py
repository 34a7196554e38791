"""Pairs of texts have the token types that tokenizers give them."""

# transformers and torch are only in the `bench` extra.
# pyright: reportMissingImports=false

import json

import jax.numpy as jnp
import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.cli.main import main
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


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing", "ignore:Could not")
def test_a_prompt_of_peft_has_the_first_type(tmp_path, capsys):
    import peft
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        PreTrainedTokenizerFast,
    )

    folder = write_bert(tmp_path / "bert")
    settings = peft.PromptTuningConfig(
        task_type="SEQ_CLS",
        num_virtual_tokens=3,
        modules_to_save=["classifier", "score", "pooler"],
    )
    base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2)
    model = peft.get_peft_model(base, settings).eval()
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0, 0.5)
    model.save_pretrained(tmp_path / "prompt")
    read = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    types = {"return_token_type_ids": True, "return_tensors": "pt"}
    with torch.no_grad():
        logits = model(**read("abc", "fghi", **types)).logits
    given = ["--model", str(folder), "--prompt", str(tmp_path / "prompt")]
    assert main(["predict", "abc[SEP]fghi", *given]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["probabilities"]
    expected = torch.softmax(logits, -1)[0].tolist()
    assert list(found.values()) == pytest.approx(expected, abs=1e-5)


def test_each_example_of_a_packed_row_begins_with_the_first_type():
    tokens = jnp.array([[4, 3, 5, 3, 6, 3, 7, 7, 3]])
    segments = jnp.array([[1, 1, 1, 1, 2, 2, 2, 2, 2]])
    marks = second_types(tokens, segments, 3)
    np.testing.assert_array_equal(marks, [[0, 0, 1, 1, 0, 0, 1, 1, 1]])
