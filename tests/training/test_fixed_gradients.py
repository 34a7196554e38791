"""Output gradients that a config names: files for intermediate arrays of the model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prompt_tuning.cli.main import main
from prompt_tuning.config.gin_files import read_run
from prompt_tuning.core import intermediates, parameter_groups
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import merge
from prompt_tuning.losses.fixed_gradients import OutputGradients
from prompt_tuning.losses.token_objective import TokenObjective
from prompt_tuning.pretrained.weight_storage import WeightStorage
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.streaming.layered_weights import LayeredWeight
from prompt_tuning.training.gradients import gradients
from prompt_tuning.training.run_plan import plan_run
from prompt_tuning.training.streamed_step import StreamedGradient
from tests.support import dummies, meshes
from tests.support.exhaustive import sample
from tests.support.small_runs import DECODER, clean_process, files, logged

__all__ = ["clean_process", "files"]

HIDDEN, ATTENTION = "decoder/layers/1/hidden", "decoder/layers/0/self_attention"
RANDOM = np.random.default_rng(0)


def no_teacher(context=None, *, run=None):
    pytest.fail(f"opened a teacher: {context}, {run}")


def objective_of(folder, width, paths=(HIDDEN, ATTENTION), **choices):
    """Returns an objective with random gradients, and the gradients."""
    given = {path: RANDOM.standard_normal(width).astype("f4") for path in paths}
    files = {}
    for number, (path, array) in enumerate(given.items()):
        files[path] = str(folder / f"{number}.npy")
        np.save(files[path], array)
    config = OutputGradients(files=files, objective=TokenObjective(**choices))
    return config.prepare(no_teacher), given


def by_hand(graph, trained, frozen, batch, given):
    """The loss, its gradient, and the part of it that `jax.vjp` pulls back."""
    divisor = np.sum(batch.loss_weights)
    # Rows end with their last learned token.
    ends = np.max((batch.loss_positions + 1) * (batch.loss_weights != 0), axis=1)
    real = np.arange(batch.tokens.shape[1]) < ends[:, None]
    seeds = {
        path: jnp.asarray(real[..., None] * array / divisor)
        for path, array in given.items()
    }

    def arrays(trained):
        with intermediates.capture(list(given)) as captured:
            merge(graph, trained | frozen).hidden(batch)  # pyright: ignore
        return captured

    @jax.jit
    def compute(trained):
        own, sums = gradients(graph, trained, frozen, batch, None)
        outputs, pull_back = jax.vjp(arrays, trained)
        (pulled,) = pull_back(seeds)
        added = sum(jnp.vdot(seeds[path], outputs[path]) for path in given)
        total = jax.tree.map(jnp.add, own, pulled)
        return sums.loss / divisor + added, total, pulled

    return compute(trained)


def prepared():
    config = dataclasses.replace(dummies.LLAMA, layers=2)
    graph, parameters = dummies.prompted(config)
    trained, frozen = parameter_groups.partition(
        parameters, {"decoder/prompt/prompt": 0}
    )
    batch = dummies.make_batch(config, dummies.random_rows(meshes.ROWS))
    return config, graph, trained, frozen, jax.tree.map(jnp.asarray, batch)


@pytest.mark.parametrize(
    "place", sample(1, ["device", "mesh", "streamed", "streamed on a mesh"])
)
def test_gradients_of_files_are_pulled_back_with_those_of_the_loss(tmp_path, place):
    config, graph, trained, frozen, batch = prepared()
    objective, given = objective_of(tmp_path, config.width)
    loss, expected, pulled = by_hand(graph, trained, frozen, batch, given)
    placement = None
    if "mesh" in place:
        layout = meshes.layout_of(MeshShape(data=1, fsdp=2), config)
        placement = meshes.placed(layout, graph, trained | frozen)
        trained, frozen = map(placement.put_tree, (trained, frozen))
        batch = placement.put_batch(batch)
    if "streamed" in place:
        blocks = {
            path: LayeredWeight.from_array(path, np.asarray(frozen.pop(path)))
            for path in [p for p in frozen if "/layers/" in p]
        }
        storage = WeightStorage(blocks)
        if placement is not None:
            storage = storage.on_mesh(placement)
        streamed = StreamedGradient(
            graph, storage.streamed, objective=objective, placement=placement
        )
        actual, sums = streamed(trained, frozen, batch, None)
    else:
        layout = None if placement is None else placement.layout
        compute = functools.partial(
            gradients, graph, objective=objective, layout=layout
        )
        actual, sums = jax.jit(compute)(trained, frozen, batch, None)
    np.testing.assert_allclose(sums.loss / sums.weight, loss, rtol=1e-5)
    for path, leaf in expected.items():
        assert np.abs(pulled[path]).max() > 1e-2
        np.testing.assert_allclose(actual[path], leaf, atol=1e-5)


def test_without_a_divisor_the_gradient_is_the_files(tmp_path):
    config, _, _, _, batch = prepared()
    objective, given = objective_of(tmp_path, config.width, [HIDDEN], normalizer=None)
    assert objective.divisor(batch) == 1

    def loss(array):
        return objective.intermediate_loss({HIDDEN: array}, batch)

    shape = (*batch.tokens.shape, config.width)
    gradient = jax.grad(loss)(jnp.ones(shape))
    assert np.unique(gradient.reshape(-1, config.width), axis=0).shape[0] == 2
    np.testing.assert_array_equal(gradient[0, 0], given[HIDDEN])


def bound(files, folder, path, array, *more):
    np.save(folder / "direction.npy", array)
    given = f"{{'{path}': '{folder / 'direction.npy'}'}}"
    return [
        *files.arguments(folder / "run", **{"Run.steps": 2}),
        "--gin.Run.objective=@OutputGradients()",
        f"--gin.OutputGradients.files={given}",
        *more,
    ]


def test_a_config_names_the_array_and_the_file(files, tmp_path):
    direction = np.ones(DECODER.width, np.float32)
    arguments = bound(files, tmp_path, "decoder/layers/0/mlp", direction)
    bindings = [
        option.removeprefix("--gin.").replace("=", " = ", 1) for option in arguments[1:]
    ]
    plan = plan_run(read_run(["runs/first_prompt.gin"], bindings))
    objective = plan.objective(plan.examples())
    assert objective.intermediates == ("decoder/layers/0/mlp",)


@pytest.mark.exhaustive
def test_a_run_finds_its_file_from_another_directory(files, tmp_path, monkeypatch):
    direction = np.ones(DECODER.width, np.float32)
    arguments = bound(files, tmp_path, "decoder/layers/0/mlp", direction)
    relative = [option.replace(f"'{tmp_path}/dir", "'dir") for option in arguments]
    assert relative != arguments
    monkeypatch.chdir(tmp_path)
    assert main(["train", *relative]) == 0
    monkeypatch.chdir("/")
    run = tmp_path / "run"
    assert main(["evaluate", "--run", str(run)]) == 0
    losses = [line["loss"] for line in logged(run) if "loss" in line]
    usual = files.arguments(tmp_path / "usual", **{"Run.steps": 2})
    assert main(["train", *usual]) == 0
    assert losses[0] != logged(tmp_path / "usual")[0]["loss"]


@pytest.mark.parametrize(
    ("path", "array", "message"),
    [
        ("decoder/hidden", np.ones(16), "expected paths such as decoder/layers/0"),
        ("decoder/layers/7/mlp", np.ones(16), "2 blocks in the decoder"),
        ("encoder/layers/0/mlp", np.ones(16), "the model does not have"),
        ("decoder/layers/0/cross_attention", np.ones(16), "no cross-attention"),
        (HIDDEN, np.ones(3), r"has shape \(3,\), expected \(16,\), or"),
        (HIDDEN, np.arange(16), "contains int64 or numbers"),
        (HIDDEN, np.full(16, np.nan), "are not finite"),
    ],
)
def test_files_that_do_not_fit_the_model_are_refused(tmp_path, path, array, message):
    config = dataclasses.replace(dummies.LLAMA, layers=2)
    np.save(tmp_path / "direction.npy", array)
    with pytest.raises(InputError, match=message):
        OutputGradients(files={path: str(tmp_path / "direction.npy")}).check_model(
            config
        )


@pytest.mark.parametrize(
    ("path", "more", "message"),
    [
        ("decoder/layers/7/mlp", (), "1 blocks in the decoder"),
        (HIDDEN, ("--gin.DataSource.packing=True",), "set packing = False"),
        (
            HIDDEN,
            ("--gin.Run.mesh=@MeshShape()", "--gin.MeshShape.stage=2"),
            "set stage to 1, or choose another objective",
        ),
    ],
)
def test_runs_that_cannot_use_them_are_refused(
    files, tmp_path, capsys, path, more, message
):
    array = np.ones(DECODER.width, np.float32)
    assert main(["train", *bound(files, tmp_path, path, array, *more)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_positions_of_a_file_are_those_of_the_rows(tmp_path):
    config, _, _, _, batch = prepared()
    np.save(tmp_path / "two.npy", np.ones((2, config.width), np.float32))
    given = OutputGradients(files={HIDDEN: str(tmp_path / "two.npy")})
    objective = given.prepare(no_teacher)
    array = jnp.ones((*batch.tokens.shape, config.width))
    with pytest.raises(InputError, match="has 2 positions, but a batch has rows of"):
        objective.intermediate_loss({HIDDEN: array}, batch)
    with pytest.raises(InputError, match="files is empty, expected a dict such as"):
        OutputGradients(files={})
