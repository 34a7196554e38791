"""`tune` with the method "auto"."""

import json

import pytest

import prompt_tuning as pt
from prompt_tuning.api import automatic
from prompt_tuning.training.sweep import candidates

PAIRS = [("ab=", "AB"), ("cd=", "CD"), ("ef=", "EF"), ("gh=", "GH")]


@pytest.mark.slow
def test_the_best_candidate_is_trained_and_chosen_once(files, tmp_path, monkeypatch):
    for module in (automatic, candidates):
        monkeypatch.setattr(module, "METHODS", ("soft", "prefix"))
    # Of these rates, only the last moves what is trained.
    monkeypatch.setattr(candidates, "FACTORS", (1e-9, 3))
    given = {"steps": 30, "batch_size": 4, "progress": False, "evaluation": PAIRS}
    given["directory"] = tmp_path / "run"
    tuned = pt.tune(str(files.decoder), "auto", PAIRS, **given)
    folder = tmp_path / "run" / "candidates"
    values = {}
    for method in candidates.METHODS:
        content = json.loads((folder / method / "sweep.json").read_text())
        for member in content["members"].values():
            assert member["steps"] == 20
            rate = float(member["varies"]["learning_rate"])
            values[method, rate] = member["best"]["value"]
    best = min(values, key=lambda key: values[key])
    choice = json.loads((folder / "choice.json").read_text())
    assert (choice["method"], choice["learning_rate"]) == best
    assert tuned.result is not None and tuned.result.step == 30
    again = pt.tune(str(files.decoder), "auto", PAIRS, **given)
    assert again.trained.keys() == tuned.trained.keys()
    (folder / "choice.json").write_text(json.dumps(choice | {"method": "x"}))
    with pytest.raises(pt.InputError, match="expected one of soft"):
        pt.tune(str(files.decoder), "auto", PAIRS, **given)


def test_a_choice_for_other_arguments_is_refused(files, tmp_path):
    folder = tmp_path / "run" / "candidates"
    folder.mkdir(parents=True)
    given = {"data": "", "evaluation": "", "model": "", "epochs": "None"}
    choice = {"method": "soft", "learning_rate": 0.3, "given": given | {"seed": "1"}}
    (folder / "choice.json").write_text(json.dumps(choice))
    with pytest.raises(pt.InputError, match=r"for other settings: .*seed.* differs"):
        pt.tune(
            str(files.decoder),
            "auto",
            PAIRS,
            evaluation=PAIRS,
            directory=tmp_path / "run",
        )


REFUSED = {
    "no held-out data": ({}, "give evaluation="),
    "a rate": ({"evaluation": PAIRS, "learning_rate": 0.1}, "contradicts the method"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_leaves_nothing_to_compare_is_refused(name, files, tmp_path):
    given, message = REFUSED[name]
    folder = tmp_path / "run"
    with pytest.raises(pt.InputError, match=message):
        pt.tune(str(files.decoder), "auto", PAIRS, directory=folder, **given)
    assert not folder.exists()


def test_a_budget_is_for_the_automatic_method(files):
    with pytest.raises(pt.InputError, match="budget is for the method 'auto'"):
        pt.tune(str(files.decoder), pt.LoRA(), PAIRS, budget=3)
    with pytest.raises(pt.InputError, match="budget is -1, expected"):
        pt.tune(str(files.decoder), "auto", PAIRS, budget=-1)
