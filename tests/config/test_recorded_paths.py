"""The config of a run finds its files from any directory, and after a move."""

import shutil
from pathlib import Path

import pytest

from prompt_tuning.config.config_values import CONFIG_FILE
from prompt_tuning.config.gin_files import read_run, read_run_directory
from prompt_tuning.config.operative_config import operative_config
from prompt_tuning.config.recorded_paths import RecordedPaths
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.losses.context_distillation import ContextDistillation
from prompt_tuning.training.run_directory import check_owner, claim

RUN = "runs/a"
FILES = ("model", "train.jsonl", "dev.jsonl", "start.npy")


def bindings(directory: str = RUN) -> list[str]:
    values = {
        "MODEL": "data/model",
        "TRAIN_FILES": "data/train.jsonl",
        "EVALUATION_FILES": ["data/dev.jsonl"],
        "Run.start_from": "data/start.npy",
        "RUN_DIRECTORY": directory,
    }
    return [f"{name} = {value!r}" for name, value in values.items()]


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with data and a run, which is also the working directory."""
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    for name in FILES:
        (folder / "data" / name).touch()
    monkeypatch.chdir(folder)
    read_run(["runs/first_prompt.gin"], bindings())
    claim(Path(RUN), operative_config(), "the model", {})
    return folder


def paths(run: Run) -> list[str | None]:
    assert run.data is not None and run.evaluation is not None
    files = [*run.evaluation.data.files]
    return [run.model.checkpoint, str(run.data.files), *files, run.start_from]


def expected(folder: Path) -> list[str]:
    return [str(folder / "data" / name) for name in FILES]


def test_paths_are_found_from_another_directory(project, tmp_path, monkeypatch):
    # Other files with the same names must not be taken.
    other = tmp_path / "other"
    shutil.copytree(project / "data", other / "data")
    monkeypatch.chdir(other)
    assert paths(read_run_directory(project / RUN)) == expected(project)
    # Values of the command line start at the working directory.
    run = read_run_directory(project / RUN, ["TRAIN_FILES = 'data/train.jsonl'"])
    assert paths(run)[1] == "data/train.jsonl"
    # The config itself continues the run where it is.
    same = read_run([str(project / RUN / CONFIG_FILE)], [])
    assert Path(same.directory) == project / RUN
    changes = check_owner(project / RUN, operative_config(), "the model")
    assert changes is not None and not changes.any_allowed


@pytest.mark.parametrize("loss", ["own_context", "on_policy"])
def test_a_table_of_contexts_is_found_from_another_directory(
    project, monkeypatch, loss
):
    (project / "data" / "contexts.jsonl").touch()
    name = "ContextDistillation" if loss == "own_context" else "OnPolicyDistillation"
    given = [
        *bindings("runs/contexts"),
        f"Run.objective = @{name}()",
        f"{name}.context_key = 'task'",
        f"{name}.contexts = 'data/contexts.jsonl'",
    ]
    if loss == "on_policy":
        given.append("Run.rollouts = @Rollouts()")
    read_run(["runs/first_prompt.gin"], given)
    claim(Path("runs/contexts"), operative_config(), "the model", {})
    monkeypatch.chdir(project.parent)
    objective = read_run_directory(project / "runs/contexts").objective
    assert isinstance(objective, ContextDistillation)
    assert objective.contexts == str(project / "data" / "contexts.jsonl")


def test_paths_stay_as_they_are_in_the_same_directory(project):
    relative = [f"data/{name}" for name in FILES]
    assert paths(read_run_directory(Path(RUN))) == relative
    assert paths(read_run_directory((project / RUN).absolute())) == relative


def test_a_value_without_a_scope_overrides_those_of_all_scopes(project):
    given = ["DataSource.batch_size = 4", "train/DataSource.buckets = 2"]
    run = read_run_directory(Path(RUN), [*given, "DataSource.buckets = 3"])
    assert run.data is not None and run.evaluation is not None
    held_out = run.evaluation.data
    assert (run.data.batch_size, held_out.batch_size) == (4, 4)
    assert (run.data.buckets, held_out.buckets) == (2, 3)


@pytest.mark.parametrize("header", [True, False])
def test_a_project_may_be_moved(project, tmp_path, monkeypatch, header):
    if not header:
        # As an earlier version wrote it.
        file = project / RUN / CONFIG_FILE
        file.write_text(file.read_text().partition("\n")[2])
    monkeypatch.chdir(tmp_path)
    moved = project.rename(tmp_path / "moved")
    assert paths(read_run_directory(moved / RUN)) == expected(moved)


def test_a_run_may_be_moved_without_its_data(project, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    moved = (project / RUN).rename(tmp_path / "elsewhere")
    assert paths(read_run_directory(moved)) == expected(project)


def test_data_in_a_run_directory_move_with_it(tmp_path):
    before, now = tmp_path / "before", tmp_path / "now"
    (now / "data").mkdir(parents=True)
    (now / "data/train.jsonl").touch()
    for origin in (tmp_path, None):
        recorded = RecordedPaths(now, before, origin)
        found = recorded.locate(str(before / "data/train.jsonl"))
        assert found == str(now / "data/train.jsonl")
    assert recorded.locate("bundled:skills-decoder") == "bundled:skills-decoder"


def test_other_data_belong_to_another_run(project, tmp_path, monkeypatch):
    (tmp_path / "train.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    config = str(project / RUN / CONFIG_FILE)
    read_run([config], ["TRAIN_FILES = 'train.jsonl'"])
    with pytest.raises(InputError, match=r"'data/train\.jsonl', now 'train"):
        check_owner(project / RUN, operative_config(), "the model")
