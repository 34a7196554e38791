"""A run on a GGUF file, from the command line."""

import shutil
from pathlib import Path

import pytest

from prompt_tuning.adapters.merge import write_merged
from prompt_tuning.cli.main import main
from prompt_tuning.core.errors import InputError

FILE = Path(__file__).parents[1] / "fixtures/gguf/pieces.gguf"


def test_a_gguf_file_is_a_model_with_a_tokenizer_and_a_template(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    shutil.copy(FILE, tmp_path / "model")
    run, data = str(tmp_path / "run"), tmp_path / "train.jsonl"
    data.write_text('{"prompt": "Once upon a", "completion": " time"}\n' * 4)
    arguments = ["--model", str(tmp_path / "model"), "--train", str(data)]
    arguments += ["--steps", "1", "--batch_size", "2"]
    assert main(["train", *arguments, "--out", run]) == 0
    printed = capsys.readouterr().out
    assert "as published: int8" in printed
    assert f"checkpoint {tmp_path / 'model/pieces.gguf'}" in printed
    chat = ["generate", "--run", run, "--chat", "Hi", "--new_tokens=2"]
    assert main(chat) == 0


def test_adapters_are_not_merged_into_a_gguf_file(tmp_path):
    with pytest.raises(InputError, match="is a GGUF file, expected a Hugging Face"):
        write_merged(tmp_path / "merged", FILE, [])


def test_a_folder_with_several_gguf_files_is_refused(tmp_path, capsys):
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(FILE, tmp_path / name)
    assert main(["generate", "--model", str(tmp_path), "Hi"]) == 2
    assert "has 2 GGUF files, expected one: give the path" in capsys.readouterr().err
