"""Commands with tokens that a run adds to the model's."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.cli.main import main
from prompt_tuning.data.text.tokenizers import load_tokenizer
from scripts import skills
from tests.support.small_runs import write_pairs

ROWS, SIZE = "token_embedder/adapters/tokens/rows", len(skills.VOCABULARY)


def arguments(files, folder, *more):
    pairs = [(f"<up>{word}=", f"{word.upper()}<end>") for word in ("ab", "cd", "ef")]
    train = write_pairs(folder / "pairs.jsonl", pairs)
    return [
        *("train", "--model", str(files.decoder), "--train", str(train)),
        *("--eval", str(train), "--out", str(folder / "run"), "--batch_size", "3"),
        *("--add_tokens", "<up>", "<end>", "a", "--exact_match", *more),
    ]


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    given = arguments(files, folder, "--method", "lora", "--rank", "2")
    assert main([*given, "--steps", "3"]) == 0
    assert main([*given, "--steps", "6"]) == 0  # continues
    return folder / "run"


@pytest.mark.slow
def test_only_the_rows_and_the_adapter_are_stored(run, files):
    stored = {x.name for x in (run / FOLDER / "checkpoint_6").iterdir()}
    arrays = {name for name in stored if "rows" in name or "embedding" in name}
    (rows,) = {name for name in arrays if "optimizer" not in name}
    assert rows.startswith("token_embedder.adapters.tokens.rows")
    tuned, frozen = pt.load_tuned(str(run)), pt.load(str(files.decoder))
    for path, array in frozen.parameters.items():
        np.testing.assert_array_equal(tuned.parameters[path], array)
    values = np.asarray(tuned.parameters[ROWS])
    table = np.asarray(frozen.parameters["token_embedder/embedding"])
    starts = [table.mean(0), table.mean(0), table[skills.encode("a")[0]]]
    assert (np.abs(values - starts).max(1) > 1e-3).all()


def has_added_tokens(run):
    tokenizer = load_tokenizer(run / "tokenizer.json")
    return tokenizer.encode("<up>a<end>") == [SIZE, *skills.encode("a"), SIZE + 1]


def test_the_run_has_the_tokenizer_with_them(run):
    assert has_added_tokens(run)


def test_a_sweeps_members_have_the_tokenizer_with_them(files, tmp_path):
    _, *given = arguments(files, tmp_path, "--method", "lora", "--rank", "2")
    assert main(["sweep", *given, "--steps", "1", "--vary", "seed=1,2"]) == 0
    for member in ("seed=1", "seed=2"):
        assert has_added_tokens(tmp_path / "run" / member)


@pytest.mark.slow
def test_commands_read_and_write_them(run, capsys):
    assert main(["evaluate", "--run", str(run)]) == 0
    assert "exact_match" in capsys.readouterr().out
    assert main(["generate", "--run", str(run), "--new_tokens", "3", "<up>ab="]) == 0
    tuned = pt.load_tuned(str(run))
    (completion,) = tuned.generate(["<up>ab="], new_tokens=3)
    assert str(completion) in capsys.readouterr().out


def test_pefts_folder_of_a_run_is_read_without_the_run(run, files, tmp_path, capsys):
    folder = tmp_path / "peft"
    assert main(["convert", str(run), str(folder)]) == 0
    settings = json.loads((folder / "adapter_config.json").read_text())
    known = skills.encode("a")[0]
    assert settings["trainable_token_indices"] == [SIZE, SIZE + 1, known]
    (expected,) = pt.load_tuned(str(run)).generate(["<up>ab="], new_tokens=3)
    capsys.readouterr()
    tokenizer = ("--tokenizer", str(run / "tokenizer.json"))
    given = ("generate", "--model", str(files.decoder), *tokenizer)
    given = (*given, "--prompt", str(folder), "--new_tokens", "3", "<up>ab=")
    assert main(list(given)) == 0
    assert capsys.readouterr().out.strip() == f"<up>ab={expected}"


def test_forms_that_name_no_tokens_are_refused(run, tmp_path, capsys):
    target = str(tmp_path / "checkpoint")
    given = ["convert", str(run), target, "--to", "checkpoint"]
    assert main([*given, "--only", "TRAINABLE_TOKENS"]) != 0
    assert "would not record the tokens" in capsys.readouterr().err
    assert not Path(target).exists()


def test_losses_that_need_the_frozen_model_are_refused(files, tmp_path, capsys):
    loss = ("--loss", "context_distillation", "--context", "ab")
    assert main(arguments(files, tmp_path, *loss)) != 0
    assert "leave TrainedTokens out" in capsys.readouterr().err


def test_a_run_starts_from_rows_of_the_same_tokens_only(run, files, tmp_path, capsys):
    given = arguments(files, tmp_path, "--method", "lora", "--rank", "2")
    given += ["--steps", "1", "--start_from", str(run)]
    assert main(given) == 0
    assert re.search(r"tokens/rows \(3, 16\) +from it", capsys.readouterr().out)
    other = [x if x != "a" else "b" for x in given]
    other[other.index("--out") + 1] = str(tmp_path / "other")
    assert main(other) != 0
    assert "rows of other tokens" in capsys.readouterr().err
