"""A run on a GGUF file, from the command line."""

import shutil
from pathlib import Path

import pytest

from prompt_tuning.adapters.merge import write_merged
from prompt_tuning.cli.main import main
from prompt_tuning.core.errors import InputError

FILE = Path(__file__).parents[1] / "fixtures/gguf/pieces.gguf"


@pytest.mark.slow
def test_a_gguf_file_is_a_model_with_a_tokenizer_and_a_template(tmp_path):
    shutil.copy(FILE, tmp_path)
    chat = ["generate", "--model", str(tmp_path), "--chat", "Hi", "--new_tokens=2"]
    assert main(chat) == 0


@pytest.mark.exhaustive
def test_a_run_trains_on_a_gguf_file(tmp_path, capsys):
    run, data = str(tmp_path / "run"), tmp_path / "train.jsonl"
    data.write_text('{"prompt": "Once upon a", "completion": " time"}\n' * 4)
    arguments = ["--model", str(FILE), "--train", str(data), "--method", "lora"]
    arguments += ["--steps", "1", "--batch_size", "2", "--out", run]
    assert main(["train", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "as published: int8" in printed
    assert f"checkpoint {FILE}" in printed
    assert main(["generate", "--run", run, "Once upon", "--new_tokens=2"]) == 0


def test_adapters_are_not_merged_into_a_gguf_file(tmp_path):
    with pytest.raises(InputError, match="is a GGUF file, expected a Hugging Face"):
        write_merged(tmp_path / "merged", FILE, [])


def test_a_folder_with_several_gguf_files_is_refused(tmp_path, capsys):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(FILE, tmp_path / name)
    assert main(["generate", "--model", str(tmp_path), "Hi"]) == 2
    assert "has 2 GGUF files, expected one: give the path" in capsys.readouterr().err
