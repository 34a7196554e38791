"""Rows shown as text with token types and loss weights, with and without colors."""

import io
import json
import re
from pathlib import Path

import h5py
import numpy as np
import pytest
from rich.console import Console

from prompt_tuning.cli import show as show_command
from prompt_tuning.cli.main import main
from prompt_tuning.data.rows.hdf5_rows import Hdf5Rows
from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.data.tools.row_display import ShownRow, ShownToken, token_texts
from prompt_tuning.pretrained.checkpoint_path import BUNDLED
from tests.support.shared_data import FIXTURES
from tests.support.small_runs import write_rows

PAIRS = [("ab=", "AB"), ("c=", "C"), ("dd=", "DD")]


def shown(capsys, *arguments) -> list[str]:
    capsys.readouterr()
    assert main(["show", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.hdf5", PAIRS, length=10)


def test_marks_show_types_and_weights_without_colors(rows, files, capsys):
    lines = shown(capsys, rows, "--tokenizer", files.decoder, "--rows", 1)
    heading, text = lines[-2:]
    assert heading == (
        "row 1: 10 tokens (3 prompt, 1 completion, 5 padding, 1 separator), 2 of them "
        "learned"
    )
    assert text == (
        "[prompt x0|<bos>c=][completion|C][separator|<eos>][padding x0|<pad> ×5]"
    )


def test_weights_equal_those_of_training(rows, files, capsys):
    with h5py.File(rows, "a") as file:
        weights = np.ones((3, 10), np.float32)
        weights[0, 4] = 2.5
        file["loss_weights"] = weights
    options = ("--tokenizer", files.decoder, "--prompt_loss_weight", 0.5, "--rows", 0)
    assert shown(capsys, rows, *options)[-1].startswith(
        "[prompt x0.5|<bos>ab=][completion x2.5|A][completion|B]"
    )


def test_rows_are_selected_singly_or_by_ranges(rows, capsys):
    def numbers(*ranges):
        lines = shown(capsys, rows, *(["--rows", *ranges] if ranges else []))
        return [int(x) for line in lines for x in re.findall(r"^row (\d+)", line)]

    assert numbers() == [0, 1, 2]
    assert numbers("2", "0-1", "2") == [2, 0, 1, 2]
    assert numbers("0:2", "2:3") == [0, 1, 2]


def test_ids_are_shown_without_a_tokenizer(rows, capsys):
    first = Hdf5Rows(rows)[0].input_ids[:4].tolist()
    text = shown(capsys, rows, "--rows", 0)[-1]
    assert text.startswith(f"[prompt x0|{' '.join(map(str, first))} ]")


def test_jsonl_lines_are_shown_as_a_run_reads_them(files, tmp_path, capsys):
    file = tmp_path / "lines.jsonl"
    file.write_text("\n" + json.dumps({"q": "ab=", "a": "AB"}) + "\n")
    keys = ("--prompt_key", "q", "--completion_key", "a")
    lines = shown(capsys, file, "--tokenizer", files.decoder, *keys)
    assert lines[-2].startswith("row 0, line 2: 7 tokens")
    assert lines[-1] == "[prompt x0|<bos>ab=][completion|AB][separator|<eos>]"


def test_each_token_has_a_line_in_the_table(rows, files, capsys):
    lines = shown(capsys, rows, "--tokenizer", files.decoder, "--tokens", "--rows", 1)
    cells = [[x.strip() for x in line.split("│")[1:-1]] for line in lines]
    actual = [(row[0], *row[2:]) for row in cells if row]
    assert actual == [
        ("0", "'<bos>'", "0 prompt", "0"),
        ("1", "'c'", "0 prompt", "0"),
        ("2", "'='", "0 prompt", "0"),
        ("3", "'C'", "1 completion", "1"),
        ("4", "'<eos>'", "3 separator", "1"),
    ]


def test_colors_show_types_and_their_intensity_shows_weights():
    tokens = [
        ShownToken(0, 7, "given", 0, 0.0),
        ShownToken(1, 8, " half", 0, 0.5),
        ShownToken(2, 9, " said", 1, 1.0),
        ShownToken(3, 9, " twice", 1, 2.0),
    ]
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="truecolor", width=80
    )
    console.print(show_command.row_text(ShownRow(0, "here", tokens, True), True))
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    codes = dict(re.findall(r"\x1b\[([\d;]*)m(?: ?)(\w+)\x1b\[0m", printed))
    by_text = {text: code.split(";") for code, text in codes.items()}
    assert by_text["given"][0] == "2" and by_text["half"][0] == "3"
    assert by_text["said"][0] == "1" and by_text["twice"][:2] == ["1", "4"]
    # Neighboring tokens have two shades of one color, and each type its own color.
    assert len({tuple(code[-3:]) for code in by_text.values()}) == 4


def test_a_long_row_is_shown_at_both_ends(files, tmp_path, capsys):
    data = tmp_path / "long.csv"
    data.write_text(f"prompt,completion\n{'x' * 20_000},b\n")
    lines = shown(capsys, data, "--tokenizer", files.decoder, "--tokens")
    # BOS, the prompt, the completion and EOS.
    assert "18,003 tokens are left out" in "\n".join(lines)
    positions = [
        int(line.split()[1]) for line in lines if re.match("\u2502 +\\d", line)
    ]
    assert positions == [*range(1000), *range(19_003, 20_003)]


@pytest.mark.parametrize("name", ["byte_level", "unigram"])
def test_the_texts_of_tokens_concatenate_to_the_text(name):
    tokenizer = load_tokenizer(FIXTURES / "tokenizers" / name)
    text = "naïve 日本 cafés,  a 🙂 day" if name == "byte_level" else "two cafés, a day"
    ids = tokenizer.encode(text)
    assert "".join(token_texts(ids, tokenizer)) == tokenizer.decode(ids)
    assert tokenizer.eos_id is not None
    end = tokenizer.token(tokenizer.eos_id)
    with_end = [*ids, tokenizer.eos_id, *ids]
    assert "".join(token_texts(with_end, tokenizer)) == text + end + text


def test_inputs_that_cannot_be_shown_are_refused(rows, files, tmp_path, capsys):
    def refused(*arguments):
        assert main(["show", *map(str, arguments)]) == 2
        return " ".join(capsys.readouterr().err.split())

    assert "expected rows from 0 to 2" in refused(rows, "--rows", 3)
    assert "'x', expected a number" in refused(rows, "--rows", "x")
    assert "not found" in refused(tmp_path / "nowhere.hdf5")
    text = tmp_path / "a.jsonl"
    text.write_text("{}\n")
    assert "name a --tokenizer" in refused(text)
    message = refused(text, "--tokenizer", files.decoder)
    assert "expected 'prompt'" in message
    with h5py.File(rows, "a") as file:
        types = file["token_type_ids"]
        assert isinstance(types, h5py.Dataset)
        types[1, 1] = 7
    assert "expected 0 (prompt)" in refused(rows, "--rows", 1)


def test_the_model_of_the_other_commands_names_its_tokenizer(rows, capsys):
    by_model = shown(capsys, rows, "--model", "bundled:skills-decoder")
    assert by_model == shown(capsys, rows, "--tokenizer", BUNDLED / "skills-decoder")
    with pytest.raises(SystemExit):
        main(["show", str(rows), "--model", "bundled:nothing"])
    assert "no model 'nothing' is bundled" in capsys.readouterr().err
