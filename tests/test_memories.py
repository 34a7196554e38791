"""Texts that become prefixes, by the command and from Python."""

import contextlib
import dataclasses
import io
import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import prompt_tuning as pt
from prompt_tuning.api import memory_composition
from prompt_tuning.api.memories import check_folder
from prompt_tuning.api.memory_budget import fit_budget
from prompt_tuning.api.memory_composition import load_memories, write_start
from prompt_tuning.cli.main import main
from prompt_tuning.config.run import DataSource
from prompt_tuning.core.errors import InputError
from prompt_tuning.losses.context_distillation import ContextDistillation
from prompt_tuning.settings.evaluation_settings import Evaluation
from prompt_tuning.texts.memory_comparison import (
    document,
    measure_memory,
    memory_drift,
)
from prompt_tuning.texts.study_files import StudyFiles
from prompt_tuning.texts.study_update import OldStudy
from prompt_tuning.texts.text_study import TextStudy
from scripts import recall
from tests.support import small_runs
from tests.support.refusals import refuses

MODEL, RECALL = "bundled:skills-decoder", "bundled:recall"
TEXT = "upper: apple=APPLE upper: chair=CHAIR reverse: flame=emalf reverse: dog=god"
PREFIX = "decoder/prompt/prompt"
LEARNING: dict[str, Any] = {"passage": 6, "rows": 192, "batch_size": 32}
LEARNING |= {"held_out": 16, "steps": 100, "progress": False}


def test_a_share_of_reasoning_reaches_the_study(tmp_path, capsys):
    (tmp_path / "facts.txt").write_text(TEXT)
    command = ["remember", str(tmp_path / "facts.txt"), "--model", MODEL]
    command += ["--slots", "4", "--out", str(tmp_path / "run"), "--reasoning", "0.5"]
    assert main(command) == 2
    printed = " ".join(capsys.readouterr().err.split())
    assert "reasoning is 0.5, but the model has no chat template" in printed


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A model of 64 positions with random weights."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    return small_runs.write_model(folder, small_runs.DECODER)


@pytest.fixture(scope="module")
def memories(tmp_path_factory):
    """Memories of twelve facts after two steps, and the command that made them."""
    folder = tmp_path_factory.mktemp("memories")
    document, output = folder / "facts.txt", folder / "memories"
    document.write_text(recall.document(7, 12)[0])
    (output / "study").mkdir(parents=True)
    # As if the first of them was killed once the budget was fitted.
    budget = {"seconds": 30, "rows": 32, "steps": 2}
    (output / "study" / "budget.json").write_text(json.dumps(budget))
    command = ["remember", str(document), "--model", RECALL, "--out", str(output)]
    command += ["--held_out", "16", "--batch_size", "16", "--passage", "6"]
    command += ["--start", "first", "--budget", "1m", "--slots", "8", "12"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main(command) == 0
    assert "whole text" in printed.getvalue()
    return command, document, output


@pytest.mark.slow
def test_memories_of_several_sizes_share_the_rows_that_a_budget_chose(memories):
    output = memories[2]
    for slots in (8, 12):
        run = output / f"slots_{slots}"
        assert (run / "numpy_checkpoints" / "checkpoint_2").exists()
        assert pt.load_tuned(run).trained[PREFIX].shape[2] == slots
        assert not (run / "study").exists()
    assert (output / "memories.png").stat().st_size


def test_a_memory_with_more_slots_than_tokens_writes_nothing(tmp_path, capsys):
    (tmp_path / "text.txt").write_text(TEXT)
    command = ["remember", str(tmp_path / "text.txt"), "--model", MODEL]
    command += ["--slots", "8", "999", "--budget", "1m", "--out"]
    assert main([*command, str(tmp_path / "memories")]) == 2
    assert "memory of 999 slots" in capsys.readouterr().err
    assert not (tmp_path / "memories").exists()


@pytest.mark.slow
def test_a_document_becomes_a_run_and_a_cartridge(memories, capsys):
    text, _ = recall.document(7, 12)
    command, document, output = memories
    folder = output / "slots_12"
    measured = json.loads((folder / "memory.json").read_text())
    assert abs(measured["whole text"]["divergence"]) < 1e-4
    settings = json.loads((folder / "peft" / "adapter_config.json").read_text())
    assert (settings["peft_type"], settings["num_frozen_tokens"]) == ("CARTRIDGE", 1)
    # The prefix starts as its first tokens act, and the first slot stays.
    trained = pt.load_tuned(folder).trained[PREFIX]
    prefix = pt.KeyValuePrefix(length=12, initializer=pt.from_text(text))
    first = pt.load(RECALL).attach(prefix).partition()[0][PREFIX]
    np.testing.assert_array_equal(trained[:, :, 0], first[:, :, 0])
    assert (trained != first).any()
    # Other rows or documents are refused.
    assert main([*command[:-5], "--slots", "12", "--rows", "33"]) == 2
    assert "rows is 33 and was 32" in capsys.readouterr().err
    document.write_text(text + "bagu=fugo\n")
    assert main(command) == 2
    document.write_text(text)


@pytest.mark.slow
def test_what_questions_follow_decides_the_answers(memories, tmp_path):
    _, questions = recall.document(7, 12)
    exact = _exact(pt.load_tuned(memories[2] / "slots_12"), questions, tmp_path)
    assert exact["whole text"] == (1, 72, 1) and exact["nothing"] == (0, 0, 0)
    # The first tokens are two facts of twelve.
    assert exact["first tokens"] == (pytest.approx(1 / 6), 12, 6)
    assert exact["memory"][1:] == (12, 6)
    # Two lines are retrieved, of which one has the answer unless keys are alike.
    assert exact["retrieved"][0] > 0.8 and exact["retrieved"][1] == 12


def _exact(memory, questions, folder):
    """Returns exact matches, positions and compression of each context."""
    lines = [json.dumps({"prompt": q, "completion": a}) + "\n" for q, a in questions]
    (folder / "questions.jsonl").write_text("".join(lines))
    data = DataSource(files=[str(folder / "questions.jsonl")])
    evaluation = Evaluation(data=data, exact_match=True)
    return {
        name: (values["exact_match"], values["positions"], values["compression"])
        for name, values in measure_memory(memory.run, evaluation).items()
    }


@pytest.fixture(scope="module")
def cartridge(tmp_path_factory):
    """The folder of a memory that has learned twelve facts."""
    output = tmp_path_factory.mktemp("cartridge")
    settings = LEARNING | {"start": "first", "directory": output}
    pt.remember(RECALL, recall.document(7, 12)[0], slots=12, **settings)
    return output


@pytest.mark.exhaustive
def test_a_memory_learns_its_text(cartridge, tmp_path):
    measured = json.loads((cartridge / "memory.json").read_text())
    divergence = {name: x.get("divergence", 0.0) for name, x in measured.items()}
    assert divergence["memory"] < 0.6 * divergence["first tokens"]
    _, questions = recall.document(7, 12)
    exact = _exact(pt.load_tuned(cartridge), questions, tmp_path)
    assert exact["memory"][0] > exact["first tokens"][0]


def test_only_a_memory_is_compared_with_its_document(tiny, tmp_path, capsys):
    run = pt.tune(
        tiny,
        pt.SoftPrompt(length=2),
        [("a=", "b")] * 4,
        steps=1,
        objective=pt.ContextDistillation(context=TEXT[:38]),
        directory=tmp_path / "run",
        evaluation=[("a=", "b")],
        progress=False,
    )
    evaluate = ["evaluate", "--run", run.run.directory, "--memory"]
    assert main(evaluate) == 2
    assert "so it has no memory to measure" in capsys.readouterr().err
    assert main([*evaluate, "--baseline"]) == 2
    assert "leave out --prompt, --baseline" in capsys.readouterr().err
    rows = pt.tune(
        tiny,
        pt.KeyValuePrefix(length=2),
        [{"prompt": "a=", "completion": "b", "text": TEXT[:38]}] * 4,
        steps=1,
        objective=pt.ContextDistillation(context_key="text"),
        directory=tmp_path / "rows",
        evaluation=[{"prompt": "a=", "completion": "b", "text": TEXT[:38]}],
        progress=False,
    )
    assert main(["evaluate", "--run", rows.run.directory, "--memory"]) == 2
    assert "so there is no document to compare" in capsys.readouterr().err
    with pytest.raises(InputError, match="a run that is not a memory of a text"):
        check_folder(tmp_path / "run", tmp_path / "run" / "study")
    loaded = load_memories([run.run.directory] * 2)
    tables = [x.parameters["token_embedder/embedding"] for x in loaded]
    assert tables[0] is tables[1]
    # A soft prompt is stored under the path of a prefix.
    with pytest.raises(InputError, match=r"memory 0 is not a .* \(2, 16\)"):
        pt.compose([run, run])


@pytest.mark.slow
def test_the_chunk_of_each_row_takes_the_place_of_a_text_that_is_too_long(tmp_path):
    text, _ = recall.document(5, 8)
    tables = tmp_path / "tables.jsonl"
    tables.write_text("".join(json.dumps({"text": x}) + "\n" for x in ("n", text)))
    rows = [
        {"prompt": f"{line[:4]}?", "completion": line[5:], "table": 1}
        for line in text.splitlines()
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # A memory as long as the text is compared with the text and with nothing alone.
    prefix = pt.KeyValuePrefix(length=48, initializer=pt.from_text(text))
    model = pt.load(RECALL).attach(prefix)
    weaker = {PREFIX: 0.7 * model.partition()[0][PREFIX]}
    expected, measured = (
        measure_memory(
            dataclasses.replace(model.run, objective=objective),
            Evaluation(data=DataSource(files=[str(file)])),
            loaded=(model.prompted, {**model.parameters, **weaker}),
        )
        for objective in (
            ContextDistillation(context=text),
            ContextDistillation(context_key="table", contexts=str(tables)),
        )
    )
    assert expected["memory"]["divergence"] > 0.01
    for name, other in (("whole text", "its chunk"), ("memory", "memory")):
        for metric in ("divergence", "cross_entropy", "exact_match"):
            difference = expected[name][metric] - measured[other][metric]
            assert abs(difference) < 1e-4, (name, metric)
    # Each quarter of the table has two of the eight answers.
    quarters = [measured["memory"][f"part_{number}"] for number in range(1, 5)]
    assert abs(np.mean(quarters) - measured["memory"]["divergence"]) < 1e-4
    assert measured["memory"]["speed"] > 0


def test_the_document_of_contexts_has_no_chat_template(tmp_path):
    contexts = tmp_path / "contexts.jsonl"
    tokenizer = pt.load(RECALL).prompted.needed_tokenizer()
    template = tokenizer.encode("bagu?")
    lines = [
        {"text": "moga=sade\n", "ids": [*template, *tokenizer.encode("moga=sade\n")]},
        {"ids": tokenizer.encode("gipi=lini\n")},
    ]
    contexts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for given in (str(contexts), ["moga=sade\n", "gipi=lini\n"]):
        objective = ContextDistillation(context_key="chunk", contexts=given)
        assert document(objective, tokenizer) == "moga=sade\ngipi=lini\n"


def test_a_model_without_a_memory_does_not_drift():
    model = pt.load(RECALL)
    assert abs(memory_drift(model.prompted, model.parameters) or 0.0) < 1e-6
    # This tokenizer does not know the characters of the text.
    skills = pt.load(MODEL)
    assert memory_drift(skills.prompted, skills.parameters) is None


def test_a_budget_fits_rows_and_steps_into_what_is_left(tmp_path, monkeypatch):
    study = TextStudy(rows=1, held_out=10)
    calls = []
    now = 0.0
    clock = types.SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr("prompt_tuning.api.memory_budget.time", clock)

    class Plan:
        def write_rows(self, folder, study):
            nonlocal now
            now += 0.064  # 1 ms for each of the rows
            return StudyFiles(folder, None, folder)

        def train(self, files, steps, *, callbacks, **settings):
            nonlocal now
            calls.append(steps)
            for step in range(steps):
                now += 0.008
                callbacks[0](step, {})
            return types.SimpleNamespace(result=types.SimpleNamespace(finished=True))

    plan = Plan()
    fitted = fit_budget(tmp_path, 2.0, study, plan, 8)
    # 2 * 0.9 s less two probes of 64 ms, 6 steps of 8 ms and 10 rows to measure on
    # are left, and a row takes 1 + 8 * 8 / 8 ms.
    assert fitted == (179, 179)
    assert fit_budget(tmp_path, 2.0, study, plan, 8) == fitted
    assert len(calls) == 1
    with pytest.raises(InputError, match="of a budget of 2 seconds for each memory"):
        fit_budget(tmp_path, 3.0, study, plan, 8)
    (tmp_path / "budget.json").write_text('{"seconds": 2, "rows": 9}')
    with pytest.raises(InputError, match="has no 'steps'"):
        fit_budget(tmp_path, 2.0, study, plan, 8)
    (tmp_path / "budget.json").rename(tmp_path / "study.json")
    with pytest.raises(InputError, match="has rows that no budget chose"):
        fit_budget(tmp_path, 2.0, study, plan, 8)
    with pytest.raises(InputError, match="a memory takes at least"):
        fit_budget(tmp_path / "other", 0.25, study, plan, 8)

    class StoppedPlan(Plan):
        def train(self, files, steps, *, callbacks, **settings):
            return types.SimpleNamespace(result=types.SimpleNamespace(finished=False))

    with pytest.raises(KeyboardInterrupt):
        fit_budget(tmp_path / "stopped", 2.0, study, StoppedPlan(), 8)
    assert not (tmp_path / "stopped").exists()
    with pytest.raises(InputError, match="leave out rows and steps, or the budget"):
        pt.remember(MODEL, TEXT, slots=8, steps=5, budget=60)


@pytest.fixture(scope="module")
def chunked(tiny, tmp_path_factory):
    """A memory of a text that is longer than its model, and settings of another."""
    settings: dict[str, Any] = {"passage": 8, "progress": False, "rows": 16}
    settings |= {"held_out": 4, "steps": 2, "batch_size": 8}
    folder = tmp_path_factory.mktemp("chunked") / "run"
    return pt.remember(tiny, TEXT, slots=8, directory=folder, **settings), settings


@pytest.mark.slow
def test_a_text_that_is_longer_than_the_model_is_read_in_chunks(chunked):
    memory, _ = chunked
    folder = Path(memory.run.directory)
    chunks = (folder / "study" / "chunks.jsonl").read_text().splitlines()
    half = memory.config.maximum_positions // 2
    assert all(len(json.loads(line)["ids"]) <= half for line in chunks)
    objective = memory.run.objective
    assert isinstance(objective, ContextDistillation)
    assert objective.context_key == "chunk"
    measured = json.loads((folder / "memory.json").read_text())
    assert list(measured)[-1] == "its chunk"


@pytest.mark.slow
def test_an_update_leaves_the_rows_of_the_old_memory_alone(chunked, tiny):
    memory, settings = chunked
    old, changed = Path(memory.run.directory), TEXT.replace("dog=god", "cat=tac")
    content = (old / "study" / "rows.jsonl").read_bytes()
    settings = settings | {"directory": old, "start_from": old}
    with pytest.raises(InputError, match="give another directory"):
        pt.remember(tiny, changed, **settings)
    assert (old / "study" / "rows.jsonl").read_bytes() == content
    assert not (old / "study" / "changed").exists()


def _changed(text, value):
    """Replaces the value of the fifth fact."""
    lines = text.splitlines(keepends=True)
    return text.replace(lines[4], lines[4][:5] + value + "\n")


@pytest.mark.slow
def test_an_update_writes_rows_about_what_is_new(memories, tmp_path):
    changed = _changed(recall.document(7, 12)[0], "nana")
    settings: dict[str, Any] = {"held_out": 16, "passage": 6, "batch_size": 64}
    settings |= {"rows": 96, "start_from": memories[2] / "slots_8", "progress": False}
    new = tmp_path / "new"
    after = pt.remember(RECALL, changed, directory=new, **settings)
    # The new rows are about the changed line and those beside it.
    study = new / "study"
    assert len((study / "changed" / "rows.jsonl").read_text().splitlines()) < 56
    # Rows of passages that the text does not have any more are gone.
    rows = [json.loads(x) for x in (study / "rows.jsonl").read_text().splitlines()]
    passages = [x["prompt"] + x["completion"] for x in rows if x["kind"] == "passage"]
    assert passages and all(x in changed for x in passages)
    measured = json.loads((new / "update.json").read_text())
    assert measured["after"]["loss"] < measured["before"]["loss"] + 0.05
    assert all(0 <= x["exact_match"] <= 1 for x in measured.values())
    # The same call finds everything done, and the next one starts from this memory.
    content = (study / "train.hdf5").read_bytes()
    again = pt.remember(RECALL, changed, directory=new, **settings)
    assert (study / "train.hdf5").read_bytes() == content
    np.testing.assert_array_equal(again.trained[PREFIX], after.trained[PREFIX])
    settings["start_from"] = new
    with pytest.raises(InputError, match="the text has nothing new"):
        pt.remember(RECALL, changed, **settings)
    with pytest.raises(InputError, match="has 8 slots"):
        pt.remember(RECALL, changed, slots=12, **settings)


@pytest.mark.exhaustive
@pytest.mark.parametrize("chunk", [36, None])
def test_a_memory_learns_what_is_new_and_keeps_the_rest(tmp_path, chunk):
    text, questions = recall.document(7, 12)
    changed = _changed(text, "nana")
    settings: dict[str, Any] = {"held_out": 32, "chunk": chunk, "progress": False}
    settings |= {"passage": 6, "batch_size": 16, "rows": 256}
    old = tmp_path / "old"
    before = pt.remember(RECALL, text, slots=24, directory=old, steps=200, **settings)
    new = tmp_path / "new"
    after = pt.remember(RECALL, changed, directory=new, start_from=old, **settings)
    asked, old_value = questions[4]
    answers = [str(x.generate(asked, new_tokens=2)[0]) for x in (before, after)]
    assert answers == [old_value, "nana"]
    measured = json.loads((new / "update.json").read_text())
    assert measured["after"]["loss"] < measured["before"]["loss"] + 0.05


@pytest.mark.slow
def test_memories_that_are_trained_together_are_parts_of_one_run(memories, tmp_path):
    folders = [memories[2] / f"slots_{slots}" for slots in (8, 12)]
    directory = tmp_path / "both"
    together = {"steps": 2, "directory": directory, "progress": False}
    apart, both = pt.compose(folders), pt.compose(folders, **together)
    assert (both.trained[PREFIX] != apart.trained[PREFIX]).any()
    parts = [directory / "parts" / str(number) for number in (0, 1)]
    alone = [pt.load_tuned(part, base=RECALL) for part in parts]
    assert [x.trained[PREFIX].shape[2] for x in alone] == [8, 12]
    measured = json.loads((directory / "memory.json").read_text())
    assert measured["memory"]["positions"] == 20 and "its chunk" in measured
    # The rows of each memory have their own text.
    rows = (directory / "study" / "rows.jsonl").read_text().splitlines()
    assert [json.loads(x)["chunk"] for x in rows].count(1) == len(rows) / 2
    # The parts are what the whole consists of, and the command finds all done.
    whole = pt.compose(alone).trained[PREFIX]
    np.testing.assert_allclose(whole, both.trained[PREFIX], atol=1e-5)
    arguments = [*map(str, folders), "--steps", "2", "--out", str(directory)]
    assert main(["compose", *arguments]) == 0
    again = pt.load_tuned(directory)
    np.testing.assert_array_equal(again.trained[PREFIX], both.trained[PREFIX])
    with pytest.raises(InputError, match="whose rows could be learned again"):
        pt.compose(alone, steps=1)
    with pytest.raises(InputError, match="give their number of steps"):
        pt.compose(folders, directory=tmp_path / "other")


@pytest.mark.exhaustive
def test_memories_that_are_trained_together_answer_behind_each_other(
    cartridge, tmp_path
):
    tables = [recall.document(seed, 12) for seed in (7, 4)]
    folders = [cartridge, tmp_path / "other"]
    pt.remember(RECALL, tables[1][0], slots=12, directory=folders[1], **LEARNING)
    together = {"steps": 60, "directory": tmp_path / "both", "progress": False}
    apart, both = pt.compose(folders), pt.compose(folders, **together)
    parts = [tmp_path / "both" / "parts" / str(number) for number in (0, 1)]
    alone = [pt.load_tuned(part, base=RECALL) for part in parts]
    for number, (_, asked) in enumerate(tables):
        rows = [{"prompt": q, "completion": a, "chunk": number} for q, a in asked]
        exact = [
            model.evaluate(rows, exact_match=True)["exact_match"]
            for model in (apart, both, alone[number])
        ]
        assert exact[1] > max(exact[0], 0.8) and exact[2] > 0.5


@pytest.mark.slow
def test_the_memory_of_the_right_table_is_retrieved_for_a_question():
    model, tables = pt.load(RECALL), [recall.document(seed, 8) for seed in range(3)]
    starts = [pt.from_text(text) for text, _ in tables]
    memories = [
        model.attach(pt.KeyValuePrefix(length=48, initializer=start))
        for start in starts
    ]
    for number, (_, asked) in enumerate(tables):
        assert pt.retrieve(memories, asked[0][0]) == [number]
        assert pt.retrieve(memories, asked[-1][0], count=2)[0] == number
    assert pt.retrieve(memories[:1] * 3, tables[0][1][0][0], count=3) == [0, 1, 2]


@pytest.mark.slow
def test_memories_that_cannot_be_trained_together_leave_nothing(tmp_path, monkeypatch):
    prefix = pt.KeyValuePrefix(length=4, initializer=pt.from_text(TEXT))
    memories = [pt.tune(MODEL, prefix, [("a", "b")], steps=1, progress=False)] * 2
    chunks = [{"text": "a" * 9999, "input_ids": [5] * 9999}]
    rows = [{"given_ids": [5], "learned_ids": [6], "chunk": 0, "kind": "qa"}] * 64
    study = OldStudy(None, chunks, rows, [], {"text": "a"})
    monkeypatch.setattr(memory_composition, "study_of", lambda memory: study)
    for folder in (tmp_path / "new", tmp_path):
        with pytest.raises(InputError, match="positions"):
            pt.compose(memories, steps=1, directory=folder, progress=False)
        assert not [*tmp_path.iterdir()]
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "rows.jsonl").write_text("known")
    with pytest.raises(InputError, match="positions"):
        pt.compose(memories, steps=1, directory=tmp_path, progress=False)
    assert (tmp_path / "study").exists()


def test_memories_that_are_trained_together_stay_those_of_the_first_call(tmp_path):
    start, prefix = tmp_path / "apart.npy", np.ones((1, 2, 3, 1, 2), "f4")
    write_start(start, prefix)
    content = start.read_bytes()
    write_start(start, prefix + 1e-5)
    for other in (prefix + 0.1, prefix[:, :, :2]):
        with pytest.raises(InputError, match="or they were trained further since"):
            write_start(start, other)
    assert start.read_bytes() == content


def test_memories_of_different_models_are_not_compared(tmp_path):
    models = [pt.load(name) for name in (RECALL, MODEL)]
    with pytest.raises(InputError, match="memory 1 belongs to bundled:skills-decoder"):
        pt.retrieve(models, "moga?")
    with pytest.raises(InputError, match="expected at least one"):
        pt.retrieve([], "moga?")
    with refuses("got 2 memories, 0 of them trained"):
        pt.compose(models[:1] * 2)  # pyright: ignore
    with pytest.raises(InputError, match="memories is 'm0', expected a list"):
        pt.retrieve("m0", "moga?")
    with refuses("question is 3"):
        pt.retrieve(models, 3)  # pyright: ignore
    with pytest.raises(InputError, match="missing does not exist; expected a run"):
        pt.compose([tmp_path / "missing"] * 2)


def test_an_update_has_one_number_of_slots(tmp_path, capsys):
    document = tmp_path / "text"
    document.write_text(TEXT)
    command = ["remember", str(document), "--model", MODEL, "--out", str(tmp_path)]
    assert main([*command, "--from", str(tmp_path), "--slots", "4", "8"]) == 2
    assert "--slots has 2 numbers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "text", "settings", "message"),
    [
        (MODEL, "upper: apple=", {"slots": 16}, "has 13 tokens, expected at least 15"),
        (MODEL, TEXT * 9999, {"slots": 16}, "bytes, expected at most 419,430"),
        (MODEL, TEXT, {"slots": 8, "chunk": 3}, "expected at least 8"),
        ("bundled:skills-t5", TEXT, {"slots": 8}, "of a decoder-only model"),
        (MODEL, TEXT, {"slots": 8, "held_out": 0}, "held_out is 0"),
        (MODEL, TEXT, {"start": "first", "start_from": "old"}, "leave out start"),
    ],
)
def test_a_text_that_cannot_be_remembered_is_refused(
    tmp_path, model, text, settings, message
):
    with pytest.raises(InputError, match=message):
        pt.remember(model, text, directory=tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_have_the_prefix_writes_no_rows(tmp_path):
    model = pt.load(MODEL, weights="streamed")
    with pytest.raises(InputError, match="on one device that holds all its weights"):
        pt.remember(model, TEXT, slots=8, directory=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_directory_of_another_run_gets_no_rows(tmp_path):
    (tmp_path / "config.gin").touch()
    with pytest.raises(InputError, match="has a run that is not a memory"):
        pt.remember(MODEL, TEXT, slots=8, directory=tmp_path)
    assert not (tmp_path / "study").exists()
