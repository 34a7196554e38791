"""Heads for several labels and for numbers compute what transformers and PEFT do."""

import jax
import numpy as np
import pytest

from prompt_tuning.adapters.adapter import CLASSES_PATH
from prompt_tuning.adapters.peft.folder import read_folder, write_folder
from prompt_tuning.adapters.peft.peft_conversion import from_peft, to_peft
from prompt_tuning.core.batch import Batch, value_columns
from prompt_tuning.evaluation.ranking import class_nats
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.models.scoring import token_losses
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.tuning import rebuild_tuning
from prompt_tuning.settings.pretrained import Pretrained

# torch, transformers and peft are only in the `bench` extra.
# pyright: reportMissingImports=false

ROWS = [[5, 9, 11, 4, 8], [7, 12], [6, 10, 5]]
PROBLEMS = {
    "several labels": ("multi_label_classification", 3),
    "a number": (None, 1),
    "three numbers": ("regression", 3),
}
SETTINGS = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 3,
}


@pytest.fixture(scope="module", params=PROBLEMS)
def case(request, tmp_path_factory):
    import torch
    from transformers import LlamaConfig, LlamaForSequenceClassification

    problem, count = PROBLEMS[request.param]
    torch.manual_seed(0)
    config = LlamaConfig(**SETTINGS, num_labels=count, problem_type=problem)
    model = LlamaForSequenceClassification(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.2)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return folder, model, problem, count


def opened(folder, adapter=None):
    tuning = None if adapter is None else rebuild_tuning(adapter, read_config(folder))
    source = Pretrained(checkpoint=str(folder))
    model = open_pretrained(source, tuning, key=jax.random.key(0))
    parameters = model.read_parameters()
    parameters |= model.put({} if adapter is None else adapter.parameters)
    return model, parameters


def scores(folder, adapter=None):
    model, parameters = opened(folder, adapter)
    nats = class_nats(model, parameters, ROWS, batch_size=3)
    if model.config.problem == "regression":
        return -nats
    return -np.log(np.expm1(nats))


def theirs(model):
    import torch

    with torch.no_grad():
        logits = [model(input_ids=torch.tensor([row])).logits[0] for row in ROWS]
    return torch.stack(logits).numpy()


@pytest.mark.torch
def test_scores_and_losses_are_those_of_transformers(case):
    import torch

    folder, reference, problem, count = case
    np.testing.assert_allclose(scores(folder), theirs(reference), atol=1e-4)
    values = np.random.default_rng(0).normal(size=(3, count)).astype("f4")
    if problem == "multi_label_classification":
        values = (values > 0).astype("f4")
    targets = torch.tensor(values[:, 0] if count == 1 else values)
    losses = [
        reference(input_ids=torch.tensor([row]), labels=targets[i : i + 1]).loss
        for i, row in enumerate(ROWS)
    ]
    lengths = np.array([len(row) for row in ROWS], np.int32)
    tokens = np.zeros((3, 5), np.int32)
    for number, row in enumerate(ROWS):
        tokens[number, : len(row)] = row
    batch = Batch(
        tokens=tokens,
        lengths=lengths,
        targets=np.zeros_like(tokens),
        loss_positions=lengths[:, None] - 1,
        loss_weights=np.ones((3, 1), np.float32),
        prefix_lengths=lengths,
        columns=dict(zip(value_columns(count), values.T[..., None], strict=True)),
    )
    model, parameters = opened(folder)
    ours = token_losses(model.graph, parameters, batch).nll[:, 0]
    expected = [float(loss.detach()) for loss in losses]
    np.testing.assert_allclose(ours, expected, rtol=1e-4)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapters_score_as_in_peft_both_ways(case, tmp_path):
    import peft
    from transformers import AutoModelForSequenceClassification

    folder, _, _, count = case

    def base():
        return AutoModelForSequenceClassification.from_pretrained(folder).eval()

    settings = peft.LoraConfig(task_type="SEQ_CLS", r=2, init_lora_weights=False)
    tuned = peft.get_peft_model(base(), settings).eval()
    tuned.save_pretrained(tmp_path / "theirs")
    adapter = from_peft(read_folder(tmp_path / "theirs"), read_config(folder), "x")
    np.testing.assert_allclose(scores(folder, adapter), theirs(tuned), atol=1e-4)
    changed = np.random.default_rng(0).normal(size=(count, 16)).astype("f4")
    adapter.parameters[CLASSES_PATH] = changed
    write_folder(tmp_path / "ours", to_peft(adapter, read_config(folder)))
    back = peft.PeftModel.from_pretrained(base(), tmp_path / "ours").eval()
    np.testing.assert_allclose(scores(folder, adapter), theirs(back), atol=1e-4)
