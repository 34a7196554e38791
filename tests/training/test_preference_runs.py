"""Runs that learn from preferences, and the curve of TRL's own trainer."""

# TRL, PEFT and transformers are in the `bench` extra only.
# pyright: reportMissingImports=false

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import prompt_tuning as pt
from prompt_tuning.cli.main import main
from prompt_tuning.core.errors import InputError
from prompt_tuning.pretrained.text_encoding import encode_given
from prompt_tuning.training import stored_reference
from prompt_tuning.training.stored_columns import read_stored
from prompt_tuning.training.stored_reference import FORM, REFERENCE_FILE
from scripts import skills
from tests.support.small_runs import UPPER, files, logged
from tests.support.small_tokenizer import write_tokenizer

__all__ = ["files"]

RECORDS = [
    {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    for prompt, chosen, rejected in [
        ("say it", "=yes", "=no way"),
        ("ask", "=a b", "=c"),
        ("word", "=WORD", "=ord"),
        ("go on", "=more", "=less of"),
    ]
]


RATED = [
    {"prompt": record["prompt"], "completion": answer, "label": label}
    for record, (answer, label) in zip(
        RECORDS,
        [("=yes", True), ("=c", False), ("=WORD", True), ("=less of", False)],
        strict=True,
    )
]
WORDS = (
    "apple bread chair dance eagle flame grape house table uncle kettle lemon market "
    "number orange pencil queen river stone valley"
)
TARGETS = ["q_proj", "v_proj"]


def trl_losses(tmp_path: Path, kind: str, records: list[dict], **settings) -> list:
    """Trains a LoRA by TRL; returns the losses, and leaves the model and its start."""
    import datasets
    import peft
    import torch
    import transformers
    import trl

    base = write_tokenizer(tmp_path / "base")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=262,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        eos_token_id=260,
        pad_token_id=261,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(base)
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS)
    adapted = peft.get_peft_model(model, lora)
    adapted.save_pretrained(tmp_path / "start")
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(tmp_path / "trl"),
        per_device_train_batch_size=4,
        max_steps=50,
        learning_rate=1e-2,
        beta=0.5,
        lr_scheduler_type="constant",
        logging_steps=1,
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model=adapted,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(records),
        processing_class=transformers.AutoTokenizer.from_pretrained(base),
    )
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def our_losses(tmp_path: Path, objective: Any, records: list[dict]) -> list:
    pt.tune(
        str(tmp_path / "base"),
        pt.LoRA(rank=4, alpha=8.0, at=TARGETS),
        records,
        objective=objective,
        steps=50,
        batch_size=4,
        optimizer=pt.adamw(1e-2),
        start_from=str(tmp_path / "start"),
        directory=str(tmp_path / "run"),
        log_every=1,
        progress=False,
    )
    return [line["loss"] for line in logged(tmp_path / "run") if "loss" in line]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of TRL and transformers
def test_fifty_steps_of_dpo_with_a_lora_are_those_of_trl(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # All pairs are in each batch, so their order does not matter.
    expected = trl_losses(tmp_path, "DPO", RECORDS)
    losses = our_losses(tmp_path, pt.DPO(beta=0.5), RECORDS)
    assert (len(losses), losses[0] > 0.69, losses[-1] < 0.001) == (50, True, True)
    np.testing.assert_allclose(losses, expected, atol=1e-5)


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")  # of TRL and transformers
def test_fifty_steps_of_kto_with_a_lora_are_those_of_trl(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    weights: Any = {"desirable_weight": 1.3, "undesirable_weight": 0.8}
    expected = trl_losses(
        tmp_path, "KTO", RATED, **weights, train_sampling_strategy="sequential"
    )
    losses = our_losses(tmp_path, pt.KTO(beta=0.5, **weights), RATED)
    assert (len(losses), losses[0] > 0.5, losses[-1] < 0.01) == (50, True, True)
    np.testing.assert_allclose(losses, expected, atol=1e-5)


@pytest.mark.slow
def test_a_precomputed_reference_is_that_of_the_step(files, tmp_path, monkeypatch):
    records = [
        {"prompt": p, "chosen": c, "rejected": c[::-1].lower()} for p, c in UPPER[:12]
    ]

    def losses(name, objective, steps, mesh=None):
        pt.tune(
            str(files.decoder),
            pt.SoftPrompt(length=2),
            records,
            objective=objective,
            steps=steps,
            mesh=mesh,
            batch_size=4,
            directory=str(tmp_path / name),
            log_every=1,
            progress=False,
        )
        return [line["loss"] for line in logged(tmp_path / name)]

    threads, compute = [], stored_reference.compute_rows

    def recorded(*arguments):
        threads.append(threading.current_thread())
        return compute(*arguments)

    monkeypatch.setattr(stored_reference, "compute_rows", recorded)
    expected = losses("in_step", pt.DPO(beta=0.5), 6)
    objective = pt.DPO(beta=0.5, reference="precomputed")
    losses("stored", objective, 2, pt.MeshShape(data=4, tensor=2))
    # Several processes on a mesh meet there in the same order.
    assert threads == [threading.main_thread()]
    stored = (tmp_path / "stored" / REFERENCE_FILE).read_bytes()
    # A run that goes on computes nothing again.
    monkeypatch.delattr(stored_reference, "reference_logprobs")
    found = losses("stored", objective, 6)
    assert (tmp_path / "stored" / REFERENCE_FILE).read_bytes() == stored
    np.testing.assert_allclose(found, expected, atol=1e-5)
    file = tmp_path / "stored" / REFERENCE_FILE
    assert read_stored(file, "another model", FORM.names) == {}


@pytest.mark.exhaustive
def test_a_prompt_learns_which_of_two_answers_is_preferred():
    tuned = pt.tune(
        "bundled:skills-decoder",
        pt.SoftPrompt(length=5),
        preferring_tails(WORDS),
        objective=pt.DPO(),
        evaluation=preferring_tails("island jungle mirror night ocean planet"),
        steps=40,
        batch_size=20,
        optimizer=pt.adafactor(0.1),
        progress=False,
    )
    metrics = tuned.evaluate()
    assert metrics["preference_accuracy"] == 1.0
    # Without the prompt they are 0 and log 2: the reference is the model itself.
    assert metrics["preference_margin"] > 10
    assert metrics["preference_loss"] < 0.5 * np.log(2)


def preferring_tails(words: str) -> list[dict[str, str]]:
    """Records that prefer a word without its first letter to the word in capitals."""
    return [
        {"prompt": f"{word}=", "chosen": word[1:], "rejected": word.upper()}
        for word in words.split()
    ]


@pytest.mark.exhaustive
def test_a_prompt_learns_from_ratings():
    # Such large steps amplify rounding. With 20 words and 12 held-out answers, one unit
    # in the last place of the first loss decided about some of the answers.
    words = skills.words(np.random.default_rng(0), 140, held_out=False)
    rated = [
        {"prompt": x["prompt"], "completion": x[key], "label": key == "chosen"}
        for x in preferring_tails(" ".join(words))
        for key in ("chosen", "rejected")
    ]
    tuned = pt.tune(
        "bundled:skills-decoder",
        pt.SoftPrompt(length=5),
        rated[:-40],
        objective=pt.KTO(),
        evaluation=rated[-40:],
        steps=40,
        batch_size=20,
        optimizer=pt.adafactor(0.1),
        progress=False,
    )
    metrics = tuned.evaluate()
    # It is 0.93 to 1 from four seeds.
    assert metrics["preference_accuracy"] > 0.85
    # Without the prompt it is 0.5, because all ratios are 1.
    assert metrics["preference_loss"] < 0.3


@pytest.mark.parametrize(
    ("records", "problem"),
    [
        ([x | {"label": 2} for x in RATED], "rating 'label' is 2"),
        (RATED[:1], "only example"),
        ([{"prompt": "a", "completion": "b"}] * 2, "give each record 'label'"),
    ],
)
def test_ratings_that_cannot_be_used_are_named(records, problem):
    with pytest.raises(InputError, match=problem):
        pt.tune(
            "bundled:skills-decoder",
            pt.SoftPrompt(length=2),
            records,
            objective=pt.KTO(),
            progress=False,
        )


REJECTED = [answer[::-1].lower() for _, answer in UPPER]


@pytest.fixture(scope="module")
def first_run(files, tmp_path_factory) -> Path:
    """A run of two steps whose LoRA is a reference."""
    directory = tmp_path_factory.mktemp("first") / "run"
    arguments = files.arguments(directory, Run__steps=2, LEARNING_RATE=0.1)
    options = ["--gin_file=adapters/lora.gin", "--gin.LoRA.alpha=64.0"]
    assert main(["train", "--no_report", *arguments, *options]) == 0
    return directory


def preferring(files, directory: Path, **settings) -> Any:
    """Trains a prompt on a few pairs."""
    records = [
        {"prompt": p, "chosen": c, "rejected": c[::-1].lower()} for p, c in UPPER[:12]
    ]
    settings = {"method": pt.SoftPrompt(length=2), "steps": 2} | settings
    return pt.tune(
        str(settings.pop("model", files.decoder)),
        settings.pop("method"),
        records,
        evaluation=records[:4],
        batch_size=4,
        buckets=1,
        directory=str(directory),
        log_every=1,
        progress=False,
        **settings,
    )


@pytest.fixture(scope="module")
def referenced(files, first_run, tmp_path_factory) -> dict[str, Any]:
    """Models that start from a run, with it or the frozen model as the reference."""
    return {
        name: preferring(
            files,
            tmp_path_factory.mktemp(name) / "run",
            method=pt.LoRA(alpha=64.0),
            objective=pt.DPO(beta=0.5, reference=kind),
            start_from=str(first_run),
            learning_rate=1e-9,
        )
        for name, kind in {"run": str(first_run), "frozen": "in_step"}.items()
    }


@pytest.mark.slow
def test_a_run_that_starts_from_its_reference_begins_at_log_2(referenced):
    losses = {
        name: [
            logged(Path(tuned.run.directory))[0]["loss"],
            tuned.evaluate()["preference_loss"],
        ]
        for name, tuned in referenced.items()
    }
    np.testing.assert_allclose(losses["run"], np.log(2), atol=1e-5)
    assert np.abs(np.array(losses["frozen"]) - np.log(2)).min() > 1e-3


@pytest.mark.slow
def test_a_lead_is_that_of_the_answers_log_probabilities(referenced, files):
    tuned, frozen = referenced["frozen"], pt.load(str(files.decoder))
    leads = 0.0
    for sign, answers in ((1, [c for _, c in UPPER[:4]]), (-1, REJECTED[:4])):
        rows = [
            (
                encode_given(frozen.prompted, prompt),
                [*frozen.tokenizer.encode(x), frozen.config.eos_id],
            )
            for (prompt, _), x in zip(UPPER, answers, strict=False)
        ]
        found = [np.array(x.loglikelihood(rows))[:, 0] for x in (tuned, frozen)]
        leads += sign * (found[0] - found[1])
    assert np.abs(leads).min() > 0
    metrics = tuned.evaluate()
    assert metrics["preference_margin"] == pytest.approx(np.mean(leads), abs=1e-4)
    assert metrics["preference_accuracy"] == np.mean(leads > 0)


@pytest.mark.slow
def test_a_divergence_from_the_run_it_starts_from_begins_at_0(
    files, first_run, tmp_path
):
    found = {}
    for name, reference in {"run": str(first_run), "frozen": None}.items():
        pt.tune(
            str(files.decoder),
            pt.LoRA(alpha=64.0),
            str(files.train),
            objective=pt.GRPO(beta=0.1, reference=reference),
            rollouts=pt.Rollouts(rewards=["length=3"], group=4, new_tokens=8),
            start_from=str(first_run),
            directory=str(tmp_path / name),
            steps=1,
            batch_size=4,
            progress=False,
        )
        found[name] = logged(tmp_path / name)[0]["kl"]
    assert abs(found["run"]) < 1e-6 < 1e-4 < found["frozen"]


@pytest.mark.slow
def test_a_reference_run_of_another_method_is_the_same_on_a_mesh(
    files, first_run, tmp_path
):
    stored = []
    for name, mesh in {"one": None, "mesh": pt.MeshShape(data=4, tensor=2)}.items():
        objective = pt.KTO(reference=str(first_run))
        rated = [
            {"prompt": p, "completion": c, "label": len(c) > 4} for p, c in UPPER[:12]
        ]
        pt.tune(
            str(files.decoder),
            pt.SoftPrompt(length=2),
            rated,
            objective=objective,
            mesh=mesh,
            steps=1,
            batch_size=4,
            directory=str(tmp_path / name),
            progress=False,
        )
        with np.load(tmp_path / name / REFERENCE_FILE) as file:
            stored.append(file["reference_logprobs"])
    np.testing.assert_allclose(stored[0], stored[1], atol=1e-5)


def test_a_reference_run_of_another_model_is_refused(files, first_run, tmp_path):
    other = shutil.copytree(files.decoder, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights = {name: 2 * array for name, array in weights.items()}
    save_file(weights, other / "model.safetensors")
    with pytest.raises(InputError, match="is a run of another frozen model"):
        preferring(
            files,
            tmp_path / "run",
            model=other,
            objective=pt.DPO(reference=str(first_run)),
        )
    assert not (tmp_path / "run").exists()
    with pytest.raises(
        InputError, match="reference is 'elsewhere', which is not a run"
    ):
        preferring(files, tmp_path / "run", objective=pt.DPO(reference="elsewhere"))


@pytest.mark.slow
def test_the_command_keeps_its_config_with_a_reference_run(files, first_run, tmp_path):
    file = tmp_path / "pairs.jsonl"
    lines = [{"prompt": p, "chosen": c, "rejected": "no"} for p, c in UPPER[:8]]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["train", "--no_report", "--model", str(files.decoder), "--train"]
    command += [str(file), "--loss", "dpo", "--reference", str(first_run), "--out"]
    command += [str(tmp_path / "run"), "--batch_size", "4", "--prompt_length", "3"]
    assert main([*command, "--steps", "1"]) == 0
    config = (tmp_path / "run" / "config.gin").read_text()
    assert f"'{first_run}'" in config
    assert "alpha" not in config  # of the other run
    stored = (tmp_path / "run" / REFERENCE_FILE).read_bytes()
    assert main(["train", "--run", str(tmp_path / "run"), "--steps", "2"]) == 0
    assert (tmp_path / "run" / REFERENCE_FILE).read_bytes() == stored
