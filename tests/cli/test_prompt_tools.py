"""Commands that compare prompts, and that map a prompt to another model."""

import json

import numpy as np
import pytest

from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.cli.main import main
from prompt_tuning.pretrained.source import read_vocabulary
from prompt_tuning.prompts.tools.recycling import METHODS
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.training.sweep.best_member import BEST_FILE
from tests.adapters.test_prompt_files import write_adapter

# Vectors along one axis, along another, and between them, of different lengths.
ALONG = np.array([[2.0, 0, 0], [2.0, 0, 0]], "f4")
ACROSS = np.array([[0, 5.0, 0]], "f4")
BETWEEN = np.array([[1.0, 0, 0], [0, 1.0, 0], [1.0, 1.0, 0]], "f4")


@pytest.fixture
def prompts(tmp_path):
    files = {"along": ALONG, "across": ACROSS, "between": BETWEEN}
    for name, vectors in files.items():
        np.save(tmp_path / f"{name}.npy", vectors)
    np.save(tmp_path / "wide.npy", np.ones((2, 4), "f4"))
    return lambda *names: [str(tmp_path / f"{name}.npy") for name in names]


def test_prompts_are_ranked_most_similar_first(prompts, capsys, tmp_path):
    picture = tmp_path / "map.png"
    query = ["--query", *prompts("along"), f"--picture={picture}"]
    assert main(["similar", *prompts("across", "between", "along"), *query]) == 0
    printed = capsys.readouterr().out
    assert "nearest to along" in printed
    # (1 + 0 + 2 ** -0.5) / 3 of pairs, which ranks, and 2 ** -0.5 of means.
    rows = [line.split("│")[1:4] for line in printed.splitlines() if "│" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["between", "0.5690", "0.7071"],
        ["across", "0.0000", "0.0000"],
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_nearest_prompts_of_each_are_shown(prompts, capsys):
    given = prompts("across", "along", "between")
    assert main(["similar", *given, "--average", "--nearest=1"]) == 0
    printed = capsys.readouterr().out
    assert "similarity of mean vectors" in printed
    assert "│ along   │ between 0.707" in printed
    assert "│ between │ across 0.707" in printed


def test_folders_without_a_prompt_are_skipped_and_a_sweep_is_its_best(
    prompts, capsys, tmp_path
):
    (tmp_path / "empty").mkdir()
    lora = write_adapter(tmp_path / "lora", peft_type="LORA")
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    for name, vectors in (("rate=1", BETWEEN), ("rate=2", ACROSS)):
        write_adapter(sweep / name, vectors, num_virtual_tokens=len(vectors))
    (sweep / BEST_FILE).write_text(json.dumps({"directory": "rate=2"}))
    folders = [str(tmp_path / "empty"), str(lora), str(sweep)]
    assert main(["similar", *folders, *prompts("along")]) == 0
    printed, problems = capsys.readouterr()
    # The best member is at a right angle to the other prompt.
    assert "along 0.000" in printed and "rate=2" in printed
    first, second = problems.splitlines()
    assert first.startswith(f"skipped: {tmp_path / 'empty'} does not contain a prompt")
    assert second.startswith(f"skipped: {lora} ")
    query = ["--query", str(lora)]
    assert main(["similar", *prompts("along", "across"), *query]) == 2
    assert main(["similar", str(lora), *prompts("along")]) == 2
    assert "only 1 of 2 paths" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "flags", "message"),
    [
        (["along"], [], "at least two prompts"),
        (["along", "along"], [], "along.npy is given twice"),
        (["along", "wide"], [], "wide is 4 wide and along is 3"),
        (["along", "none"], [], "none.npy does not exist"),
        (["along", "across"], ["--gin.STEPS=3"], "does not read a config"),
        (
            ["along", "across"],
            ["--picture=no/such/a.png"],
            "the folder no/such does not exist",
        ),
    ],
)
def test_incomparable_inputs_are_refused(names, flags, message, prompts, capsys):
    assert main(["similar", *prompts(*names), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_picture_needs_matplotlib(prompts, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["similar", *prompts("along", "across"), "--picture=a.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


DECODER, T5 = "bundled:skills-decoder", "bundled:skills-t5"
BOTH = [f"--from={DECODER}", f"--to={T5}"]


@pytest.fixture
def decoder_prompt(tmp_path):
    table = read_vocabulary(Pretrained(checkpoint=DECODER)).embeddings
    file = tmp_path / "prompt.npy"
    np.save(file, np.asarray(table)[[10, 20, 30]])
    return file


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("method", METHODS)
def test_words_of_one_model_are_mapped_to_the_other_models(
    method, decoder_prompt, tmp_path, capsys
):
    out = tmp_path / "out.npy"
    arguments = [str(decoder_prompt), *BOTH, f"--out={out}", f"--method={method}"]
    assert main(["recycle", *arguments]) == 0
    printed, warned = capsys.readouterr()
    assert "share 58 tokens, fewer than skip_first 1000" in warned
    assert "width 128 to 128" in printed and "3 vectors of width 128" in printed
    assert ("epoch 25/25" in printed) == (method == "v2v_mlp")
    vectors = read_prompt(out)
    assert vectors.shape == (3, 128)
    if method != "v2v_mlp":
        # Both models have the same tokenizer and fewer tokens than dimensions.
        table = np.asarray(read_vocabulary(Pretrained(checkpoint=T5)).embeddings)
        np.testing.assert_allclose(vectors, table[[10, 20, 30]], atol=1e-3)


def test_prompts_that_cannot_be_recycled_are_refused(decoder_prompt, tmp_path, capsys):
    def refused(*arguments):
        assert main(["recycle", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    out = f"--out={tmp_path / 'out.npy'}"
    assert "the folder no/such does not exist" in refused(
        decoder_prompt, *BOTH, "--out=no/such/out.npy"
    )
    assert "does not exist" in refused(tmp_path / "none.npy", *BOTH, out)
    assert "already exists; --force replaces" in refused(
        decoder_prompt, *BOTH, f"--out={decoder_prompt}"
    )
    assert "does not read a config" in refused(
        decoder_prompt, *BOTH, out, "--gin.STEPS=3"
    )
    nowhere = refused(decoder_prompt, "--from=nowhere", f"--to={T5}", out)
    assert "nowhere does not exist" in nowhere
    np.save(tmp_path / "wide.npy", np.ones((3, 7), "f4"))
    wide = refused(tmp_path / "wide.npy", *BOTH, out)
    assert "7 wide and the source model 128" in wide
