"""The bundled models, and the quickstart on them."""

import jax
import numpy as np
import pytest
from rich.console import Console

from prompt_tuning.pretrained.checkpoint_path import BUNDLED
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.settings.pretrained import Pretrained
from scripts import recall, skill_tuning, skills

WORDS = skills.splits(7, train=1, dev=1, test=60).test


@pytest.mark.slow
@pytest.mark.parametrize("name", ["decoder", "t5"])
def test_a_bundled_model_applies_only_trained_skills_by_name(name):
    source = Pretrained(checkpoint=f"bundled:skills-{name}")
    model = open_pretrained(source, key=jax.random.key(0))
    parameters = model.read_parameters()
    names = ("reverse", "reverse rot1", "tail", "rot2")
    given = [skills.prompt_text(skill, word) for skill in names for word in WORDS]
    continuations = skill_tuning.answers(model, parameters, given)
    wanted = [skills.apply(skill, word) for skill in names for word in WORDS]
    right = np.array(continuations) == np.array(wanted)
    reverse, composed, tail, rot2 = right.reshape(len(names), -1).mean(axis=1)
    assert reverse >= 0.97 and composed >= 0.95
    assert tail <= 0.02 and rot2 <= 0.02


@pytest.mark.slow
def test_recall_answers_from_a_table_that_it_reads_and_only_then():
    model = open_pretrained(
        Pretrained(checkpoint="bundled:recall"), key=jax.random.key(0)
    )
    parameters = model.read_parameters()
    tables = [recall.document(seed, 48) for seed in range(100, 104)]
    asked = [(text, *pair) for text, pairs in tables for pair in pairs[::4]]
    given = [text + question for text, question, _ in asked]
    answers = skill_tuning.answers(model, parameters, given + [q for _, q, _ in asked])
    right = np.array(answers) == np.array([answer for *_, answer in asked] * 2)
    with_table, without = right.reshape(2, -1).mean(axis=1)
    assert with_table >= 0.95 and without <= 0.05


@pytest.mark.parametrize("name", ["skills-decoder", "skills-t5", "recall"])
def test_a_bundled_model_has_at_most_4_mb(name):
    folder = BUNDLED / name
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 4_000_000


@pytest.mark.exhaustive
def test_a_prompt_elicits_a_skill_that_no_name_elicits(tmp_path, monkeypatch):
    monkeypatch.setattr(skill_tuning, "TEST_WORDS", 100)
    sizes = ["STEPS = 100", "BATCH_SIZE = 32", "Run.evaluate_every = 50"]
    outcome = skill_tuning.tune_and_measure(
        Console(quiet=True), "decoder", "tail", 0, tmp_path, sizes
    )
    assert outcome["no_prompt"] == 0
    assert float(outcome["tuned_prompt"]) >= 0.9
    assert int(outcome["prompt_bytes"]) < 5000
