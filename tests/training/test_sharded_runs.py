"""Full tuning with checkpoints in Orbax's format: the same run on any mesh."""

import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.cli.main import main, split_bindings
from prompt_tuning.config.gin_files import read_run
from prompt_tuning.core.errors import NotFiniteError
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.training import loop
from prompt_tuning.training.continuation import state_at
from prompt_tuning.training.opening import open_run
from prompt_tuning.training.progress import LineReporter
from prompt_tuning.training.run_directory import open_store
from prompt_tuning.tuned.load_tuned import load_tuned
from tests.support.small_runs import DECODER, logged, write_model

FULL = [
    "--gin.ParameterGroup.regexes=['.*']",
    "--gin.ParameterGroup.optimizer=@adamw()",
    "--gin.adamw.learning_rate=0.003",
    "--gin.Run.prompt=None",
]
ALL = MeshShape(data=1, fsdp=2, tensor=4)
ROWS = MeshShape(data=2, fsdp=4)


@pytest.fixture(scope="module")
def arguments(files, tmp_path_factory):
    """Arguments of full tuning of a model whose heads can be sharded by four."""
    config = dataclasses.replace(DECODER, heads=4, key_value_heads=2, head_width=4)
    model = write_model(tmp_path_factory.mktemp("model"), config)

    def given(directory: Path, form: str, **choices) -> list[str]:
        choices = {"Run__checkpoint_form": form, "Run__steps": 4} | choices
        choices = {"Run__save_every": 2} | choices
        return [*files.arguments(directory, model, **choices), *FULL]

    return given


@pytest.fixture(scope="module")
def runs_in_both_formats(arguments, tmp_path_factory) -> dict[str, Path]:
    """The same run on one device, in both formats."""
    folder = tmp_path_factory.mktemp("forms")
    for form in ("numpy", "orbax"):
        assert main(["train", *arguments(folder / form, form)]) == 0
    return {form: folder / form for form in ("numpy", "orbax")}


def read(arguments: list[str], mesh: MeshShape | None = None):
    plain, bindings = split_bindings(arguments)
    run = read_run([plain[0].partition("=")[2]], bindings)
    return dataclasses.replace(run, mesh=mesh)


def train(trainer: loop.Trainer) -> loop.TrainingResult:
    steps = trainer.run.steps
    return loop.train(
        trainer,
        make_reporter=lambda done: LineReporter(Console(quiet=True), steps),
    )


def losses(directory: Path) -> list[float]:
    return [line["loss"] for line in logged(directory) if "loss" in line]


@pytest.mark.exhaustive
def test_both_formats_have_the_same_bits(runs_in_both_formats, arguments):
    results = []
    for form, directory in runs_in_both_formats.items():
        checkpoint = directory / FOLDER / "checkpoint_4"
        assert (checkpoint / "arrays").is_dir() == (form == "orbax")
        state = checkpoint_files.verify(checkpoint)
        leaves = checkpoint_files.read_trained(checkpoint, state)
        _, tuned = load_tuned(read(arguments(directory, form)))
        moments = checkpoint_files.read_optimizer_leaves(checkpoint)
        trees = (leaves, tuned, {name: np.asarray(x) for name, x in moments.items()})
        results.append((trees, state["metrics"], state["extra"]))
    (one, *others), (other, *rest) = results
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert others == rest
    assert losses(runs_in_both_formats["numpy"]) == losses(
        runs_in_both_formats["orbax"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--merge"]])
def test_model_weights_have_no_adapter_format(
    runs_in_both_formats, tmp_path, capsys, more
):
    target = str(tmp_path / "target")
    assert main(["convert", str(runs_in_both_formats["orbax"]), target, *more]) == 2
    assert "trained weights of the model itself" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_starts_from_either_form(runs_in_both_formats, arguments, tmp_path):
    results = []
    for form, directory in runs_in_both_formats.items():
        choices = {"Run__start_from": str(directory), "Run__steps": 1}
        run = read(arguments(tmp_path / form, form, **choices))
        start = open_run(run).start
        results.append((start.trained, start.optimizer_state))
    jax.tree.map(np.testing.assert_array_equal, *results)
    # The optimizer's averages are carried over too.
    counts = [x for x in jax.tree.leaves(results[1][1]) if x.ndim == 0]
    assert 4 in [int(count) for count in counts]


@pytest.mark.exhaustive
def test_a_run_continues_on_other_meshes(arguments, tmp_path, monkeypatch):
    first = read(arguments(tmp_path / "all", "orbax"), ALL)
    trainer = open_run(first)
    with monkeypatch.context() as patched:
        # No parameter is gathered, neither for checks nor for saving.
        patched.setattr(Placement, "replicate", None)
        outcome = train(trainer)
    placement = trainer.model.placement
    assert placement is not None
    end = placement.replicate(outcome.trained)
    shutil.rmtree(tmp_path / "all" / FOLDER / "checkpoint_4")
    checkpoint = tmp_path / "all" / FOLDER / "checkpoint_2"
    saved = checkpoint_files.read_trained(
        checkpoint, checkpoint_files.verify(checkpoint)
    )
    for name, mesh in (("one", None), ("rows", ROWS)):
        directory = tmp_path / name
        shutil.copytree(tmp_path / "all", directory)
        trainer = open_run(
            dataclasses.replace(first, directory=str(directory), mesh=mesh)
        )
        state = state_at(trainer, open_store(trainer.run), 2)
        where, parameters = trainer.model.placement, state.trained
        if where is not None:
            assert (
                parameters["token_embedder/embedding"].sharding
                == (where.shardings["token_embedder/embedding"])
            )
            parameters = where.replicate(parameters)
        jax.tree.map(np.testing.assert_array_equal, parameters, saved)
        if mesh is None:
            trained = train(trainer).trained
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), trained, end
            )
            np.testing.assert_allclose(
                losses(directory), losses(tmp_path / "all"), rtol=1e-5
            )


def test_numbers_that_are_not_finite_are_not_saved(arguments, tmp_path, monkeypatch):
    trainer = open_run(read(arguments(tmp_path / "run", "orbax")))

    def breaking(*arguments):
        state, metrics = trainer.step(*arguments)
        if int(state.step) == 3:
            trained = {
                path: x.at[..., 0].set(jnp.nan) for path, x in state.trained.items()
            }
            state = dataclasses.replace(state, trained=trained)
            metrics = {"loss": jnp.float32(1)}
        return state, metrics

    monkeypatch.setattr(loop, "save_due", lambda run, done: done in (2, 3))
    with pytest.raises(NotFiniteError, match="step 2 is kept as the last good one"):
        train(dataclasses.replace(trainer, step=breaking))
    assert open_store(trainer.run).steps() == [2]
