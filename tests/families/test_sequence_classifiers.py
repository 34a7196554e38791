"""Published sequence classifiers and PEFT's adapters score as in transformers."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from prompt_tuning.adapters.adapter import CLASSES_PATH
from prompt_tuning.adapters.peft.folder import read_folder, write_folder
from prompt_tuning.adapters.peft.peft_conversion import from_peft, to_peft
from prompt_tuning.evaluation.ranking import class_nats
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.source import Pretrained
from prompt_tuning.pretrained.tuning import rebuild_tuning

PAD, LABELS = 3, ("bad", "fair", "good")
# Padding within a text is read; at its end, the token before it is scored.
ROWS = [[5, 9, 11, 4, 8], [7, 12], [6, 10, 5, PAD, 9], [4, 4, 7], [8, 6, PAD, PAD]]
COMMON = {
    "vocab_size": 32,
    "pad_token_id": PAD,
    "id2label": dict(enumerate(LABELS)),
    "label2id": {label: number for number, label in enumerate(LABELS)},
}
USUAL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
GROUPED = {**USUAL, "num_key_value_heads": 2}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 24}
FAMILIES = {
    "llama": GROUPED,
    "mistral": GROUPED,
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 8},
    "gemma": {**GROUPED, "head_dim": 8},
    "gemma2": {**GROUPED, "head_dim": 8, "query_pre_attn_scalar": 8},
    "gpt2": GPT2,
    "gpt_neox": {**USUAL, "num_attention_heads": 2},
    "phi": USUAL,
}
OF_PEFT = {
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "PREFIX_TUNING": {"num_virtual_tokens": 3},
    "LORA": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
    "IA3": {"target_modules": ["k_proj", "v_proj"], "feedforward_modules": []},
}


def run_transformers(folder, jobs):
    """Returns the logits of `tests/support/sequence_classifiers.py` for each job."""
    (folder / "jobs.json").write_text(json.dumps(jobs, default=str))
    script = Path(__file__).parents[1] / "support" / "sequence_classifiers.py"
    given = [folder / "jobs.json", folder / "logits.npz"]
    command = [sys.executable, "-W", "ignore", str(script), *map(str, given)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return dict(np.load(folder / "logits.npz"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    jobs = {
        name: {
            "folder": folder / name,
            "rows": ROWS,
            "settings": COMMON | settings,
            "model_type": name,
        }
        for name, settings in FAMILIES.items()
    }
    for kind, settings in OF_PEFT.items():
        adapter = {"peft_type": kind, "task_type": "SEQ_CLS", **settings}
        save = folder / f"{kind} saved"
        base = {"folder": folder / "llama", "rows": ROWS}
        jobs[kind] = {**base, "adapter": adapter, "save": save}
    return folder, run_transformers(folder, jobs)


def probabilities(base, rows, adapter=None):
    """Returns ours, `[n, C]`, all rows in one batch."""
    source = Pretrained(checkpoint=str(base))
    tuning = None if adapter is None else rebuild_tuning(adapter, read_config(base))
    model = open_pretrained(source, tuning, key=jax.random.key(0))
    parameters = model.read_parameters()
    parameters |= model.put({} if adapter is None else adapter.parameters)
    assert model.config.labels == LABELS
    return np.exp(-class_nats(model, parameters, rows, batch_size=len(rows)))


def assert_same_where_padding_counts_alike(kind, ours, logits):
    """Compares all rows; with prompt vectors transformers scores padding at the end."""
    count = len(ROWS) - (kind == "PROMPT_TUNING")
    np.testing.assert_allclose(ours[:count], softmax(logits)[:count], atol=1e-5)


def softmax(logits):
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
def test_published_heads_score_as_in_transformers(family, theirs):
    folder, logits = theirs
    expected = softmax(logits[f"{family} padded"])
    assert np.ptp(expected, axis=0).max() > 0.05
    ours = probabilities(folder / family, ROWS)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("kind", OF_PEFT)
def test_adapters_of_peft_score_as_there(kind, theirs):
    folder, logits = theirs
    config = read_config(folder / "llama")
    adapter = from_peft(read_folder(folder / f"{kind} saved"), config, kind)
    ours = probabilities(folder / "llama", ROWS, adapter)
    assert_same_where_padding_counts_alike(kind, ours, logits[kind])


@pytest.mark.torch
def test_our_adapters_score_in_peft_as_here(theirs, tmp_path):
    folder, random = theirs[0], np.random.default_rng(0)
    config, jobs, ours = read_config(folder / "llama"), {}, {}
    for kind in OF_PEFT:
        adapter = from_peft(read_folder(folder / f"{kind} saved"), config, kind)
        adapter.parameters[CLASSES_PATH] = random.standard_normal((3, 16)).astype("f4")
        write_folder(tmp_path / kind, to_peft(adapter, config))
        given = {"folder": folder / "llama", "rows": ROWS}
        jobs[kind] = {**given, "adapter": tmp_path / kind}
        ours[kind] = probabilities(folder / "llama", ROWS, adapter)
    logits = run_transformers(tmp_path, jobs)
    for kind, each in ours.items():
        assert_same_where_padding_counts_alike(kind, each, logits[kind])
