"""Published sequence classifiers and PEFT's adapters score as in transformers."""

import jax
import numpy as np
import pytest

from prompt_tuning.adapters.adapter import CLASSES_PATH
from prompt_tuning.adapters.peft.folder import read_folder, write_folder
from prompt_tuning.adapters.peft.peft_conversion import from_peft, to_peft
from prompt_tuning.evaluation.ranking import class_nats
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.tuning import rebuild_tuning
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.texts.text_embeddings import embed_ids
from tests.support.adapters import unheard_warnings

# torch and transformers are only in the `bench` extra.
# pyright: reportMissingImports=false

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
ENCODERS = {
    "bert": USUAL,
    "roberta": {**USUAL, "max_position_embeddings": 40},
    "xlm-roberta": {**USUAL, "max_position_embeddings": 40, "hidden_act": "relu"},
    "deberta-v2": {
        **{**USUAL, "relative_attention": True, "share_att_key": True},
        **{"position_biased_input": False, "pos_att_type": ["c2p", "p2c"]},
        **{"norm_rel_ebd": "layer_norm", "position_buckets": 4},
        "max_position_embeddings": 6,
    },
    "distilbert": {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4},
    "electra": {**USUAL, "embedding_size": 16},
    "modernbert": {**USUAL, "local_attention": 4, "classifier_pooling": "mean"},
}
ENCODER_DECODERS = {
    "bart": {
        **{"d_model": 16, "encoder_layers": 2, "decoder_layers": 2},
        **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
        **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 24},
        "max_position_embeddings": 32,
    },
    "t5": {
        **{"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4},
        "decoder_start_token_id": 0,
    },
}
ENCODED = [[4, 9, 11, 5, 8, 20, 2], [7, 12, 2], [6, 10, 5, 9, 2]]
# Rows of encoders end with EOS.
OF_ENCODERS = {
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "PREFIX_TUNING": {"num_virtual_tokens": 3},
    "LORA": {"r": 2, "target_modules": ["query", "value"]},
    "IA3": {"target_modules": ["key", "value"], "feedforward_modules": []},
    "LORA Wo": {"r": 2, "target_modules": ["Wo"]},
}
WITH_ADAPTERS = {
    # The head of RoBERTa has a dense layer; that of BERT is its pooler.
    **{f"roberta {kind}": ("roberta", kind, None) for kind in [*OF_ENCODERS][:4]},
    "deberta-v2 LORA": ("deberta-v2", "LORA", ["classifier", "pooler"]),
    "bert PROMPT_TUNING": ("bert", "PROMPT_TUNING", None),
    "bert pooler": ("bert", "LORA", ["classifier", "pooler"]),
    "modernbert head": ("modernbert", "LORA Wo", ["classifier", "head"]),
    **{f"{x} LORA": (x, "LORA", ["classification_head"]) for x in ENCODER_DECODERS},
}
PROJECTIONS = {"bart": ["q_proj", "v_proj"], "t5": ["q", "v"]}
PROJECTIONS["deberta-v2"] = ["query_proj", "value_proj"]
OF_PEFT = {
    "PROMPT_TUNING": {"num_virtual_tokens": 3},
    "PREFIX_TUNING": {"num_virtual_tokens": 3},
    "LORA": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
    "IA3": {"target_modules": ["k_proj", "v_proj"], "feedforward_modules": []},
}


def run_transformers(jobs):
    """Returns the logits of `tests/support/sequence_classifiers.py` for each job.

    With " padded" after the job's name, those of all rows in one batch.
    """
    found = {}
    with unheard_warnings():
        from tests.support.sequence_classifiers import logits

        for name, job in jobs.items():
            found[name], found[f"{name} padded"] = logits(**job)
    return found


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
    } | {
        name: {
            "folder": folder / name,
            "rows": ENCODED,
            "settings": COMMON | {"eos_token_id": 2} | settings,
            "model_type": name,
        }
        for name, settings in (ENCODERS | ENCODER_DECODERS).items()
    }
    for kind, settings in OF_PEFT.items():
        adapter = {"peft_type": kind, "task_type": "SEQ_CLS", **settings}
        save = folder / f"{kind} saved"
        base = {"folder": folder / "llama", "rows": ROWS}
        jobs[kind] = {**base, "adapter": adapter, "save": save}
    for name, (base, kind, saved) in WITH_ADAPTERS.items():
        adapter = {"peft_type": kind.split()[0], "task_type": "SEQ_CLS"}
        adapter |= OF_ENCODERS[kind]
        adapter |= {"modules_to_save": saved} if saved else {}
        if base in PROJECTIONS:
            adapter["target_modules"] = PROJECTIONS[base]
        save = folder / f"{name} saved"
        of_base = {"folder": folder / base, "rows": ENCODED}
        jobs[name] = {**of_base, "adapter": adapter, "save": save}
    return folder, run_transformers(jobs)


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
    logits = run_transformers(jobs)
    for kind, each in ours.items():
        assert_same_where_padding_counts_alike(kind, each, logits[kind])


@pytest.mark.torch
@pytest.mark.parametrize("family", ENCODERS | ENCODER_DECODERS)
def test_encoders_score_as_in_transformers(family, theirs):
    folder, logits = theirs
    # Padded rows of ModernBERT that are shorter than its windows are not numbers there.
    expected = softmax(logits[family])
    assert np.ptp(expected, axis=0).max() > 0.02
    ours = probabilities(folder / family, ENCODED)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.torch
@pytest.mark.parametrize("name", WITH_ADAPTERS)
def test_adapters_of_encoders_score_as_in_peft_both_ways(name, theirs, tmp_path):
    folder, logits = theirs
    base = folder / WITH_ADAPTERS[name][0]
    config = read_config(base)
    adapter = from_peft(read_folder(folder / f"{name} saved"), config, name)
    ours = probabilities(base, ENCODED, adapter)
    np.testing.assert_allclose(ours, softmax(logits[name]), atol=1e-5)
    random = np.random.default_rng(0)
    for path, array in adapter.parameters.items():
        noise = random.normal(0, 0.1, array.shape).astype("f4")
        adapter.parameters[path] = array + noise
    write_folder(tmp_path / "ours", to_peft(adapter, config))
    job = {"folder": base, "rows": ENCODED, "adapter": tmp_path / "ours"}
    back = softmax(run_transformers({name: job})[name])
    assert np.abs(back - ours).max() > 1e-3
    np.testing.assert_allclose(probabilities(base, ENCODED, adapter), back, atol=1e-5)


@pytest.mark.torch
def test_texts_are_embedded_by_the_states_of_transformers(theirs):
    import torch
    from transformers import AutoModel, AutoModelForMaskedLM

    base, ids = theirs[0] / "masked", ENCODED[0]
    config = AutoModel.from_pretrained(theirs[0] / "bert").config
    AutoModelForMaskedLM.from_config(config).save_pretrained(base)
    model = open_pretrained(Pretrained(checkpoint=str(base)), key=jax.random.key(0))
    parameters = model.read_parameters()
    with torch.no_grad():
        states = AutoModel.from_pretrained(base).eval()(torch.tensor([ids]))[0][0]
    mean = embed_ids(model, parameters, ids, "mean")
    np.testing.assert_allclose(mean, states.mean(0).numpy(), atol=1e-5)
    first = embed_ids(model, parameters, ids, "first")
    np.testing.assert_allclose(first, states[0].numpy(), atol=1e-5)
