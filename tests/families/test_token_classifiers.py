"""Published token classifiers and PEFT's adapters score as in transformers."""

import jax
import numpy as np
import pytest

from prompt_tuning.adapters.peft.folder import read_folder, write_folder
from prompt_tuning.adapters.peft.peft_conversion import from_peft, to_peft
from prompt_tuning.core.batch import Batch
from prompt_tuning.evaluation.batch_scores import score_batches
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.models.scoring import tag_nll
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.tuning import rebuild_tuning
from prompt_tuning.settings.pretrained import Pretrained
from tests.families.test_sequence_classifiers import (
    COMMON,
    ENCODED,
    ENCODER_DECODERS,
    ENCODERS,
    FAMILIES,
    LABELS,
    OF_ENCODERS,
    OF_PEFT,
    ROWS,
    run_transformers,
    softmax,
)

pytestmark = pytest.mark.torch
T5 = ENCODER_DECODERS["t5"]
T5S = {"t5": T5, "mt5": T5, "umt5": T5}
READERS = ENCODERS | T5S
BASES = FAMILIES | READERS
# The base, the method, and modules that PEFT saves besides the head.
ADAPTED = {
    **{f"qwen3 {kind}": ("qwen3", kind, OF_PEFT[kind]) for kind in OF_PEFT},
    **{
        f"roberta {kind}": ("roberta", kind, OF_ENCODERS[kind])
        for kind in [*OF_ENCODERS][:4]
    },
    "t5 LORA": ("t5", "LORA", {"r": 2, "target_modules": ["q", "v", "wo"]}),
    "t5 PROMPT_TUNING": ("t5", "PROMPT_TUNING", OF_PEFT["PROMPT_TUNING"]),
    "t5 IA3": (
        *("t5", "IA3"),
        {"target_modules": ["k", "v", "wo"], "feedforward_modules": ["wo"]},
    ),
    "modernbert head": (
        *("modernbert", "LORA"),
        {**OF_ENCODERS["LORA Wo"], "modules_to_save": ["classifier", "head"]},
    ),
}


def rows_of(base):
    return ENCODED if base in READERS else ROWS


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    folder, jobs = tmp_path_factory.mktemp("published"), {}
    for name, settings in BASES.items():
        end = {"eos_token_id": 2} if name in READERS else {}
        given = {"settings": COMMON | end | settings, "model_type": name}
        jobs[name] = {"folder": folder / name, "rows": rows_of(name), **given}
    for name, (base, kind, settings) in ADAPTED.items():
        adapter = {"peft_type": kind, "task_type": "TOKEN_CLS", **settings}
        jobs[name] = {"folder": folder / base, "rows": rows_of(base)}
        jobs[name] |= {"adapter": adapter, "save": folder / f"{name} saved"}
    jobs = {name: job | {"tokens": True} for name, job in jobs.items()}
    return folder, run_transformers(jobs)


def nats(base, rows, adapter=None):
    """Returns ours, `[n, T, C]`, all rows in one batch."""
    source = Pretrained(checkpoint=str(base))
    tuning = None if adapter is None else rebuild_tuning(adapter, read_config(base))
    model = open_pretrained(source, tuning, key=jax.random.key(0))
    parameters = model.read_parameters()
    parameters |= model.put({} if adapter is None else adapter.parameters)
    assert model.config.labels == LABELS
    lengths = np.array([len(row) for row in rows], np.int32)
    shape = len(rows), max(lengths)
    tokens = np.array([[*row, *[0] * (shape[1] - len(row))] for row in rows], np.int32)
    positions = np.tile(np.arange(shape[1], dtype=np.int32), (len(rows), 1))
    weights = np.ones(shape, np.float32)
    batch = Batch(tokens, lengths, tokens, positions, weights, lengths)
    ((_, found),) = score_batches(tag_nll, model, parameters, [batch])
    return np.asarray(found)


def assert_same(ours, logits, tolerance):
    """Compares differences of logits, which a softmax leaves as they are."""
    expected = logits - logits.mean(-1, keepdims=True)
    real = ~np.isnan(logits)
    assert np.ptp(softmax(expected[:, 0]), axis=0).max() > 0.01
    found = ours.mean(-1, keepdims=True) - ours
    np.testing.assert_allclose(found[real], expected[real], atol=tolerance)


@pytest.mark.parametrize("base", BASES)
def test_published_heads_score_tokens_as_in_transformers(base, theirs):
    folder, logits = theirs
    ours = nats(folder / base, rows_of(base))
    assert_same(ours, logits[base], 1e-4)


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_score_tokens_as_in_peft_both_ways(name, theirs, tmp_path):
    folder, logits = theirs
    base, rows = folder / ADAPTED[name][0], rows_of(ADAPTED[name][0])
    config = read_config(base)
    adapter = from_peft(read_folder(folder / f"{name} saved"), config, name)
    assert_same(nats(base, rows, adapter), logits[name], 1e-4)
    random = np.random.default_rng(0)
    for path, array in adapter.parameters.items():
        noise = random.normal(0, 0.1, array.shape).astype("f4")
        adapter.parameters[path] = array + noise
    written = to_peft(adapter, config)
    assert written.settings["task_type"] == "TOKEN_CLS"
    write_folder(tmp_path / "ours", written)
    job = {"folder": base, "rows": rows, "adapter": tmp_path / "ours", "tokens": True}
    back = run_transformers({name: job})[name]
    assert_same(nats(base, rows, adapter), back, 1e-4)
