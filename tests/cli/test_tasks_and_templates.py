"""Runs whose data selects the prompt of an example, or the position of its vectors."""

import json
import re

import pytest

from prompt_tuning.cli.main import main
from tests.support.exhaustive import sample
from tests.support.small_runs import logged

TASKS = {"upper": str.upper, "reverse": lambda word: word[::-1]}
WORDS = ["hello", "world", "apple", "grape", "melon", "peach", "berry", "lemon"]


def write_tasks(path):
    """Writes words with the answers of two tasks, which the text does not name."""
    pairs = [(name, word, f(word)) for word in WORDS for name, f in TASKS.items()]
    lines = [{"prompt": f"{w}=", "completion": c, "task": t} for t, w, c in pairs]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def bound(**macros):
    return [f"--gin.{k.replace('__', '.')}={v!r}" for k, v in macros.items()]


def output_of(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", sample(1, ["decoder", "t5"]))
def test_a_text_is_continued_by_the_prompt_of_its_task(files, tmp_path, capsys, model):
    data = write_tasks(tmp_path / "tasks.jsonl")
    run = tmp_path / "run"
    arguments = files.arguments(run, getattr(files, model), Run__steps=12)
    arguments += bound(TRAIN_FILES=str(data), EVALUATION_FILES=str(data))
    arguments += ["--gin_file=prompts/multitask_add.gin"]
    arguments += ["--gin_file=data/task_ids.gin"]
    arguments += bound(
        TASKS=2,
        PROMPT_ID_KEY="task",
        DataSource__prompt_id_names=list(TASKS),
        DataSource__packing=model == "t5",
        adafactor__learning_rate=3.0,
        Evaluation__labels=[],
    )
    output_of(capsys, "train", *arguments)
    assert logged(run)[-1]["step"] == 12
    assert re.search(r"loss\D+[\d.]+", output_of(capsys, "evaluate", "--run", run))
    generate = ["generate", "--run", run, "--new_tokens=6", "plum="]
    outputs = [output_of(capsys, *generate, f"--prompt_id={task}") for task in (0, 1)]
    assert outputs[0] != outputs[1]
    assert main([str(argument) for argument in generate]) == 2
    assert "has 2 prompts" in capsys.readouterr().err


@pytest.mark.slow
def test_a_text_is_inserted_into_the_template_of_its_run(files, tmp_path, capsys):
    run = tmp_path / "run"
    template = '{soft:2}word {prompt}{soft:"up"}'
    arguments = [*files.arguments(run), "--gin_file=data/template.gin"]
    arguments += bound(TEMPLATE=template)
    output_of(capsys, "train", *arguments)
    assert output_of(
        capsys, "generate", "--run", run, "--new_tokens=3", "a"
    ).startswith("a")
    arguments += bound(
        TEMPLATE="{soft:2}{prompt}", RUN_DIRECTORY=str(tmp_path / "other")
    )
    assert main(["train", *arguments]) == 2
    assert "2 soft vectors (2), but the prompt has 4" in capsys.readouterr().err
