"""The command `prompt-tuning prepare`, run with arguments as a user types them."""

import json
import subprocess
import sys

import h5py
import pytest

from prompt_tuning.cli.main import main
from prompt_tuning.data.preparation import worker_pool
from tests.support.prepared_files import columns, pairs, write_jsonl
from tests.support.small_tokenizer import CHAT, EOS, write_tokenizer


@pytest.fixture
def files(tmp_path):
    write_tokenizer(tmp_path / "tokenizer", chat_template=CHAT)
    write_jsonl(tmp_path / "pairs.jsonl", *pairs(30))
    return tmp_path


def prepare(files, *options, source="pairs.jsonl", output="out"):
    return main(
        [
            *("prepare", str(files / source), "--output", str(files / output)),
            *("--tokenizer", str(files / "tokenizer"), "--workers", "1"),
            *options,
        ]
    )


def test_a_folder_of_files_is_written_and_its_metrics_printed(files, capsys):
    options = ("--length", "64", "--dev", "0.1", "--train_files", "2", "--shuffle")
    assert prepare(files, *options) == 0
    output = capsys.readouterr().out
    assert "records used" in output and f"the files are in {files / 'out'}" in output
    assert {path.name for path in (files / "out").iterdir()} == {
        *("train_1_of_2.hdf5", "train_2_of_2.hdf5", "dev_1_of_1.hdf5", "tokenizer"),
        *("metadata.yaml", "metrics.json", "checksums.sha256", "pictures.png"),
    }
    with h5py.File(files / "out/train_1_of_2.hdf5") as file:
        shapes = {name: actual.shape[1] for name, actual in file.items()}
    assert shapes == {"input_ids": 64, "token_type_ids": 64}


def test_problems_are_one_line_and_exit_code_2(files, capsys):
    write_jsonl(files / "bad.jsonl", *pairs(2), "{")
    assert prepare(files, source="bad.jsonl") == 2
    printed = capsys.readouterr().err
    assert (
        printed.startswith("prompt-tuning prepare: ")
        and "line 3 is not valid JSON" in printed
    )
    assert not (files / "out").exists()
    assert prepare(files, "--on_malformed", "skip", source="bad.jsonl") == 0
    assert prepare(files, "--gin.STEPS=3", output="other") == 2


def test_custom_keys_special_tokens_and_categories(files):
    lines = ({"q": "a", "a": ["b"], "kind": "x", "w": 2}, {"q": "c", "a": "d", "w": 1})
    write_jsonl(files / "own.jsonl", lines[0], lines[1] | {"kind": "y"})
    (files / "names.txt").write_text("y\nx\n")
    (files / "special.json").write_text(json.dumps({"pad_token": EOS}))
    options = ("--prompt_key", "q", "--completion_key", "a", "--length", "10")
    options += ("--categories", str(files / "names.txt"), "--category_key", "kind")
    options += ("--special_tokens", str(files / "special.json"), "--weight_key", "w")
    assert prepare(files, *options, source="own.jsonl") == 0
    arrays = columns(files / "out/train_1_of_1.hdf5")
    assert arrays["category_ids"].tolist() == [[1] * 4 + [0] * 4 + [-1] * 2]
    assert arrays["loss_weights"][0, :8].tolist() == [2.0] * 4 + [1.0] * 4
    assert arrays["input_ids"][0, -1] == arrays["input_ids"][0, 7]


def test_chats_are_rendered(files):
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    write_jsonl(files / "chat.jsonl", {"messages": talk})
    assert prepare(files, "--chat", "--length", "64", source="chat.jsonl") == 0
    types = columns(files / "out/train_1_of_1.hdf5")["token_type_ids"][0].tolist()
    given = len("<|user|>\nhi\n<|assistant|>\n") + 1
    assert types[: given + 4] == [0] * given + [1] * 3 + [3]


def test_the_requested_special_tokens_reach_the_template(files):
    template = files / "own.jinja"
    template.write_text(
        "{% for m in messages %}"
        "{{ bos_token }}{{ m.content }}{{ eos_token }}"
        "{% endfor %}"
    )
    roles = {"bos_token": "<|begin|>", "eos_token": "<|done|>"}
    options = ("--special_tokens", json.dumps(roles), "--packing")
    options += ("single::drop", "--length", "128")
    assert prepare(files, *options, "--chat_template", str(template)) == 0
    arrays = columns(files / "out/train_1_of_1.hdf5")["input_ids"].ravel().tolist()
    # 30 pairs of two messages; the new tokens follow a vocabulary of 262.
    assert (arrays.count(262), arrays.count(263)) == (60, 60)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--special_tokens", "{"), "is neither a file nor JSON"),
        (("--special_tokens", '{"pad_token": 3}'), "expected a nonempty string"),
        (("--special_tokens", '{"mask": "x"}'), "names 'mask', expected bos_token"),
        (("--dev", "0.5", "--test", "0.5"), "add up to 1, expected less than 1"),
        (("--dev", "2.5"), "expected a ratio from 0 to below 1"),
        (("--categories", "none.txt"), "there is no such file"),
        (("--chat_template", "none.jinja"), "chat template none.jinja is not a file"),
        (("--chat_date", "2026-07-26"), "no chat template is used"),
        (("--chat", "--chat_date", "today"), "chat_date is 'today', expected a date"),
        (("--special_tokens", '{"eos_token": ["a", "b"]}'), "to another token"),
        (("--prompt_template", "{soft:3} {a}"), "has soft prompts"),
        (("--prompt_template", "{a"), "--prompt_template, character 1"),
        (("--chat", "--prompt_prefix", "x"), "itself adds the text around"),
    ],
)
def test_options_without_effect_are_refused(files, capsys, option, message):
    assert prepare(files, *option) == 2
    assert message in capsys.readouterr().err
    assert not [path for path in files.iterdir() if "out" in path.name]


def test_a_lost_worker_is_named(files, capsys, monkeypatch):
    def lost(*_):
        raise worker_pool.WorkerLostError("a worker process was killed")

    monkeypatch.setattr(worker_pool, "run_tasks", lost)
    assert prepare(files) == 1
    assert "a worker process was killed" in capsys.readouterr().err
    monkeypatch.undo()
    assert prepare(files) == 0


def test_help_imports_nothing_heavy():
    heavy = "jax numpy h5py tokenizers rich jinja2 yaml"
    program = (
        "import sys; from prompt_tuning.cli.main import build_parser; build_parser(); "
        f"print([name for name in '{heavy}'.split() if name in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_preparing_does_not_import_jax(files):
    program = (
        "import sys; from prompt_tuning.cli.main import main; "
        f"code = main({_arguments(files)!r}); print(code, 'jax' in sys.modules)"
    )
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "0 False"


def _arguments(files):
    return [
        *("prepare", str(files / "pairs.jsonl"), "--output", str(files / "out")),
        *("--tokenizer", str(files / "tokenizer"), "--workers", "1"),
    ]
