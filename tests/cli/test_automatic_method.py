"""`train --method auto`: short sweeps of methods, then the run of the winner."""

import json

import pytest

from prompt_tuning.cli import automatic_method
from prompt_tuning.cli.main import main
from prompt_tuning.training.sweep import candidates
from tests.support.small_runs import write_pairs

PAIRS = [("ab=", "AB"), ("cd=", "CD"), ("ef=", "EF"), ("gh=", "GH")]


@pytest.fixture
def words(files, tmp_path) -> list[str]:
    """A command that chooses a method."""
    data = write_pairs(tmp_path / "data.jsonl", PAIRS)
    model = ["--model", str(files.decoder), "--train", str(data), "--eval", str(data)]
    run = ["--out", str(tmp_path / "run"), "--steps", "30", "--batch_size", "4"]
    return ["train", "--method", "auto", *model, *run, "--log_every", "1"]


@pytest.mark.slow
def test_the_best_candidate_is_trained_and_chosen_once(
    words, tmp_path, capsys, monkeypatch
):
    for module in (automatic_method, candidates):
        monkeypatch.setattr(module, "METHODS", ("soft", "ia3"))
    # Of these rates, only the last moves what is trained.
    monkeypatch.setattr(candidates, "FACTORS", (1e-9, 3))
    assert main(words) == 0
    printed = capsys.readouterr().out
    folder = tmp_path / "run" / "candidates"
    values = {}
    for method in ("soft", "ia3"):
        content = json.loads((folder / method / "sweep.json").read_text())
        for name, member in content["members"].items():
            assert member["steps"] == 20
            values[method, member["varies"]["learning_rate"]] = member["best"]["value"]
            assert f"{member['best']['value']:.4f}" in printed, name
    method, rate = min(values, key=lambda key: values[key])
    config = (tmp_path / "run" / "config.gin").read_text()
    assert f"LEARNING_RATE = {float(rate)}" in config
    assert ("@IA3()" in config) == (method == "ia3")
    # A second command goes on with the choice.
    assert main([*words[:-1], "2"]) == 2
    assert "for other settings: log_every differs" in capsys.readouterr().err
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert (
        "candidate soft" not in printed and "all 30 steps are already done" in printed
    )
    file = folder / "choice.json"
    choice = json.loads(file.read_text())
    for name, wrong in {"given": [], "method": "x", "learning_rate": "x"}.items():
        file.write_text(json.dumps(choice | {name: wrong}))
        assert main(words) == 2
        assert f"{name} = {wrong!r}, expected" in capsys.readouterr().err


@pytest.mark.slow
def test_the_budget_ends_the_search(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(automatic_method, "METHODS", ("soft", "prefix"))
    monkeypatch.setattr(candidates, "FACTORS", (1, 3))
    assert main([*words, "--budget", "0.001s"]) == 0
    assert not (tmp_path / "run" / "candidates" / "prefix").exists()
    (row, *_) = [x for x in capsys.readouterr().out.splitlines() if "│ *" in x]
    method, steps = row.split("│")[2].strip(), row.split("│")[4].strip()
    assert method == "soft" and int(steps) < 20


@pytest.mark.parametrize(
    "more, shown",
    [
        (["--rank", "4"], "--rank contradicts --method auto"),
        (["--learning_rate", "0.1"], "--learning_rate contradicts --method auto"),
        (["--print_config"], "--method auto has not chosen yet"),
        (["--method", "soft", "--budget", "5m"], "--budget has no effect"),
    ],
)
def test_what_auto_refuses(more, shown, words, capsys):
    try:
        code = main([*words, *more])
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert shown in " ".join(capsys.readouterr().err.split())


def test_candidates_are_compared_by_held_out_data(words, capsys):
    at = words.index("--eval")
    assert main([*words[:at], *words[at + 2 :]]) == 2
    assert "give --eval FILE" in capsys.readouterr().err
