"""Scores by the harness of models of a server, and of models in this process."""

import json
import shutil
import string

import numpy as np
import pytest
import tokenizers
import tokenizers.decoders
import tokenizers.models

import prompt_tuning as pt
from prompt_tuning.server.server_limits import ServerSettings
from tests.support.running_server import KEY, RunningServer
from tests.support.shared_data import FIXTURES

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra eval")
pytest.importorskip("prompt_tuning.lm_eval", reason="registers the model")
pytest.importorskip("uvicorn", reason="needs the extra serve")
pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = "apple bread chair dance eagle flame grape house island jungle kettle lemon"
LABELS = {"one": ["a", "e"], "two": ["ab", "gh ij", "e"]}
FOLDER = FIXTURES / "peft" / "llama_gqa_untied"
KINDS = ("prompt_tuning", "prefix_tuning", "lora")


def pairs(labels) -> list[tuple[str, str]]:
    """Words, each with one of the labels."""
    words = WORDS.split()
    return [(f"{word}=", labels[i % len(labels)]) for i, word in enumerate(words)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model of 64 tokens, with a tokenizer of single characters."""
    folder = tmp_path_factory.mktemp("models") / "base"
    shutil.copytree(FOLDER / "base", folder)
    characters = "<>" + string.ascii_lowercase + "= "
    vocabulary = {character: i for i, character in enumerate(characters)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<eos>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Tasks of local files: two of choices, whole texts, and generated ones."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = {f"choose_{name}": pairs(labels) for name, labels in LABELS.items()}
    rows |= {"whole": pairs(LABELS["two"]), "generate": pairs(LABELS["two"])}
    configs = []
    for name, data in rows.items():
        lines = [json.dumps({"prompt": x, "label": y}) for x, y in data]
        file = folder / f"{name}.jsonl"
        file.write_text("\n".join(lines))
        config = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}},
            "test_split": "test",
            "doc_to_text": "{{prompt}}",
            "doc_to_target": "{{label}}",
            "target_delimiter": "",
        }
        if name == "whole":
            config |= {
                "output_type": "loglikelihood_rolling",
                "doc_to_text": "",
                "doc_to_target": "{{prompt}}{{label}}",
                "metric_list": [{"metric": "bits_per_byte"}],
            }
        elif name == "generate":
            config |= {
                "output_type": "generate_until",
                "generation_kwargs": {"until": ["h"], "max_gen_toks": 6},
                "metric_list": [{"metric": "exact_match"}],
            }
        else:
            config |= {
                "output_type": "multiple_choice",
                "doc_to_choice": LABELS[name.partition("_")[2]],
                "metric_list": [{"metric": "acc"}],
            }
        configs.append(config)
    return configs


@pytest.fixture(scope="module")
def server(base):
    texts = pt.load(base).texts
    texts.open_engine(slots=4, length=64)
    for kind in KINDS:
        texts.load(kind, FOLDER / kind)
    running = RunningServer(texts, ServerSettings(queue_length=64, samples=8))
    yield running
    running.stop()


def run(model, arguments, tasks) -> tuple[dict, dict]:
    """Returns the accuracies of tasks, and the results of their requests."""
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[dict(task) for task in tasks],
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = {
        name: [each["resps"] for each in sorted(rows, key=lambda x: x["doc_id"])]
        for name, rows in results["samples"].items()
    }
    metrics = results["results"]
    accuracies = {x: metrics[x].get("acc,none") for x in metrics}
    return accuracies, samples


@pytest.mark.parametrize("name", ["base", *KINDS])
def test_the_harness_scores_models_of_the_server_and_of_the_process_alike(
    name, server, base, tasks, monkeypatch, tmp_path
):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    address = {
        "model": name,
        "base_url": f"http://127.0.0.1:{server.port}/v1/completions",
        "auth_token": KEY,
        "max_length": 40,
        "add_bos_token": True,
    }
    answers = [
        run("local-completions", {**address, "num_concurrent": count}, tasks)
        for count in (1, 4)
    ]
    assert answers[0] == answers[1]
    adapter = None if name == "base" else str(FOLDER / name)
    inside = {"model": str(base), "adapter": adapter, "max_length": 39}
    accuracies, samples = run("prompt_tuning", inside, tasks)
    assert accuracies == answers[0][0]
    assert samples["generate"] == answers[0][1]["generate"]
    for task in ("choose_one", "choose_two", "whole"):
        ours = np.array(samples[task], float)
        theirs = np.array(answers[0][1][task], float)
        # Engines of unlike sizes may differ in the last bit.
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-5, err_msg=task)
    model = pt.load(base) if adapter is None else pt.load_tuned(adapter, base)
    for kind, labels in LABELS.items():
        metrics = model.evaluate(pairs(labels), labels=labels, add_eos=False)
        assert metrics["label_accuracy"] == accuracies[f"choose_{kind}"]
