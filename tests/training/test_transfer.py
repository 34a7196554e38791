"""A run that starts from another run, from PEFT's folder, or from a file."""

import dataclasses
import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file

from prompt_tuning.adapters.adapter import Adapter
from prompt_tuning.adapters.peft.folder import write_folder
from prompt_tuning.adapters.peft.peft_conversion import to_peft
from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_files import named_leaves
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.cli.main import split_bindings
from prompt_tuning.config.gin_files import read_run
from prompt_tuning.config.run import Run
from prompt_tuning.core import learning_rates, parameter_groups
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameter_groups import ParameterGroup
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.pretrained.frozen_fingerprint import fingerprint
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.prompts.wrapped import DroppedPrompt
from prompt_tuning.training.loop import train
from prompt_tuning.training.opening import open_run
from prompt_tuning.training.progress import LineReporter
from prompt_tuning.training.trainer import Trainer
from tests.support.adapters import random_adapter
from tests.support.small_runs import LENGTH

PROMPT = "decoder/prompt/prompt"
QUERY = "decoder/layers/self_attention/query"
A, B = f"{QUERY}/adapters/lora/a", f"{QUERY}/adapters/lora/b"
SCHEDULE = learning_rates.warmup_linear_decay(0.1, 20)
PROMPTS = ParameterGroup([r".*/prompt/.*"], parameter_groups.adamw(SCHEDULE))
LORAS = ParameterGroup([r".*/lora/.*"], parameter_groups.adamw(0.01))
QUERIES = LoRA(regexes=[QUERY], rank=2, alpha=4.0)
MakeRun = Callable[..., Run]


@pytest.fixture(scope="module")
def make(files) -> MakeRun:
    """Runs of six steps, by default of only a prompt."""

    def make_run(directory: Path, model: Path | None = None, **choices) -> Run:
        plain, bindings = split_bindings(files.arguments(directory, model))
        run = read_run([plain[0].partition("=")[2]], bindings)
        return dataclasses.replace(run, **({"groups": [PROMPTS]} | choices))

    return make_run


def trained(run: Run) -> Trainer:
    """A finished run."""
    trainer = open_run(run)
    console = Console(quiet=True)
    train(trainer, make_reporter=lambda done: LineReporter(console, run.steps))
    return trainer


@pytest.fixture(scope="module")
def prompt_run(make, tmp_path_factory) -> Path:
    """The directory of a run that trained a prompt."""
    directory = tmp_path_factory.mktemp("module") / "first"
    trained(make(directory))
    return directory


@pytest.fixture(scope="module")
def continued_run(make, prompt_run, tmp_path_factory) -> Path:
    """The directory of a run that continued from it with an added LoRA."""
    directory = tmp_path_factory.mktemp("module") / "second"
    trained(make(directory, **continuation_options(prompt_run)))
    return directory


def continuation_options(prompt_run: Path) -> dict:
    """Returns the options of a run of prompt and LoRA that starts from another."""
    return {
        "start_from": str(prompt_run),
        "adapters": (QUERIES,),
        "groups": [LORAS, PROMPTS],
    }


def trained_leaves(directory: Path, step: int = 6) -> dict[str, np.ndarray]:
    """Reads the trained leaves of a run's checkpoint."""
    checkpoint = directory / FOLDER / f"checkpoint_{step}"
    state = checkpoint_files.verify(checkpoint)
    return checkpoint_files.read_trained(checkpoint, state)


def moments(directory: Path) -> dict[str, np.ndarray]:
    optimizer_leaves = checkpoint_files.read_optimizer_leaves(
        directory / FOLDER / "checkpoint_6"
    )
    return {name: np.asarray(leaf) for name, leaf in optimizer_leaves.items()}


def state_of(trainer: Trainer) -> dict[str, np.ndarray]:
    state = named_leaves(trainer.start.optimizer_state)
    return {name: np.asarray(leaf) for name, leaf in state.items()}


def leaf_ending_with(state: dict[str, np.ndarray], text: str) -> np.ndarray:
    """Returns the only leaf of an optimizer's state whose path has this ending."""
    (leaf,) = (leaf for name, leaf in state.items() if name.endswith(text))
    return leaf


def peft(folder: Path, files, kind: str = "LORA") -> tuple[Path, Adapter]:
    """A PEFT folder for the small decoder, and its content."""
    config = read_config(files.decoder)
    adapter = random_adapter(config, kind, QUERY)
    write_folder(folder, to_peft(adapter, config))
    return folder, adapter


@pytest.mark.slow
def test_a_lora_is_added_to_a_prompt_of_another_run(make, prompt_run, tmp_path):
    trainer = open_run(make(tmp_path / "run", **continuation_options(prompt_run)))
    start, actual, source = trainer.start, state_of(trainer), moments(prompt_run)
    np.testing.assert_array_equal(
        start.trained[PROMPT], trained_leaves(prompt_run)[PROMPT]
    )
    assert not start.trained[B].any() and start.trained[A].any()
    for name in ("mu", "nu"):
        before = leaf_ending_with(source, f".{name}[{PROMPT!r}]")
        assert before.any()
        np.testing.assert_array_equal(
            leaf_ending_with(actual, f".{name}[{PROMPT!r}]"), before
        )
        assert not leaf_ending_with(actual, f".{name}[{A!r}]").any()
    # The averages' step counts continue; the run's step count does not.
    counts = {name: int(x) for name, x in actual.items() if name.endswith(".count")}
    assert sorted(counts.values()) == [0, 0, 6]
    assert int(start.step) == 0


def test_the_table_states_the_outcome_of_each_member(make, prompt_run, tmp_path):
    lines = (
        open_run(make(tmp_path / "run", **continuation_options(prompt_run)))
        .report()
        .splitlines()
    )
    start = lines.index(f"start_from {prompt_run / FOLDER / 'checkpoint_6'}")
    table = [re.split(r" {2,}", line.strip()) for line in lines[start + 1 :][:4]]
    assert table == [
        ["trained", "starts", "optimizer state"],
        [f"{A} (1, 16, 2)", "fresh", "fresh"],
        [f"{B} (1, 2, 16)", "fresh", "fresh"],
        [f"{PROMPT} ({LENGTH}, 16)", "from it", "kept"],
    ]
    assert "ignored, in the source but not trained here:" not in lines


@pytest.mark.slow
def test_untrained_source_parameters_are_listed(make, continued_run, tmp_path):
    run = make(tmp_path / "run", start_from=str(continued_run))
    lines = open_run(run).report().splitlines()
    ignored = lines.index("ignored, in the source but not trained here:")
    assert lines[ignored + 1 : ignored + 3] == [
        f"  {A} (1, 16, 2): not in this model",
        f"  {B} (1, 2, 16): not in this model",
    ]
    choices = {
        "start_from": str(continued_run),
        "adapters": (QUERIES,),
        "groups": [LORAS],
    }
    trainer = open_run(make(tmp_path / "run", prompt=None, **choices))
    assert f"{PROMPT} ({LENGTH}, 16): not in this model" in trainer.report()
    np.testing.assert_array_equal(
        trainer.start.trained[B], trained_leaves(continued_run)[B]
    )


@pytest.mark.slow
def test_the_same_groups_with_a_rate_below_rounding_keep_every_number(
    make, continued_run, tmp_path
):
    still = ParameterGroup([".*/(prompt|lora)/.*"], parameter_groups.adamw(1e-30))
    run = make(
        tmp_path / "run",
        **(continuation_options(continued_run) | {"groups": [still]}),
        keep_best=None,
    )
    trained(run)
    actual, expected = trained_leaves(tmp_path / "run"), trained_leaves(continued_run)
    assert actual.keys() == expected.keys() == {PROMPT, A, B}
    for path, leaf in actual.items():
        np.testing.assert_array_equal(leaf, expected[path])
    for name in ("mu", "nu"):
        suffix = f".{name}[{PROMPT!r}]"
        after, before = (
            leaf_ending_with(moments(tmp_path / "run"), suffix),
            moments(continued_run),
        )
        assert not np.array_equal(after, leaf_ending_with(before, suffix))


def test_a_run_may_start_from_parameters_of_another_run(make, prompt_run, tmp_path):
    run = make(tmp_path / "run", start_from=str(prompt_run), keep_optimizer_state=False)
    trainer = open_run(run)
    np.testing.assert_array_equal(
        trainer.start.trained[PROMPT], trained_leaves(prompt_run)[PROMPT]
    )
    assert not any(leaf.any() for leaf in state_of(trainer).values())


@pytest.mark.parametrize("of", ["checkpoint", "file", "peft", "no_extension"])
def test_other_formats_of_a_prompt(of, make, prompt_run, files, tmp_path):
    vectors = trained_leaves(prompt_run, 3)[PROMPT]
    source = tmp_path / "source"
    if of == "checkpoint":
        source = prompt_run / FOLDER / "checkpoint_3"
    elif of == "peft":
        _, adapter = peft(source, files, "PROMPT_TUNING")
        vectors = adapter.parameters[PROMPT]
    else:
        source = tmp_path / ("prompt.npy" if of == "file" else "prompt")
        with source.open("wb") as file:
            np.save(file, vectors)
    prompt = functools.partial(SoftPrompt, length=len(vectors))
    trainer = open_run(make(tmp_path / "run", prompt=prompt, start_from=str(source)))
    np.testing.assert_array_equal(trainer.start.trained[PROMPT], vectors)
    is_kept = any(leaf.any() for leaf in state_of(trainer).values())
    assert is_kept == (of == "checkpoint")


def test_a_file_initializes_the_only_prompt_of_any_stack(make, prompt_run, tmp_path):
    np.save(tmp_path / "prompt.npy", trained_leaves(prompt_run)[PROMPT])
    inner = functools.partial(SoftPrompt, length=LENGTH)
    prompt = functools.partial(DroppedPrompt, inner=inner, rate=0.1)
    run = make(tmp_path / "run", prompt=prompt)
    source = str(tmp_path / "prompt.npy")
    start = open_run(dataclasses.replace(run, start_from=source)).start.trained
    (path,) = start
    assert path != PROMPT
    np.testing.assert_array_equal(start[path], trained_leaves(prompt_run)[PROMPT])


def test_a_resumed_run_does_not_need_its_source(make, prompt_run, tmp_path):
    source = shutil.copytree(prompt_run, tmp_path / "source")
    run = make(tmp_path / "run", start_from=str(source))
    trained(run)
    shutil.rmtree(source)
    again = open_run(run)
    assert f"start_from {source}: ignored, the run resumes" in again.report()
    before = trained_leaves(tmp_path / "run")[PROMPT]
    train(again, make_reporter=lambda done: LineReporter(Console(quiet=True), 6))
    np.testing.assert_array_equal(trained_leaves(tmp_path / "run")[PROMPT], before)
    with pytest.raises(InputError, match="does not exist"):
        open_run(dataclasses.replace(run, directory=str(tmp_path / "other")))


def test_no_common_parameters(make, prompt_run, tmp_path):
    choices = continuation_options(prompt_run) | {"groups": [LORAS], "prompt": None}
    run = make(tmp_path / "run", **choices)
    with pytest.raises(InputError) as refused:
        open_run(run)
    message = str(refused.value)
    assert "contains no parameter that this run trains" in message
    assert f"{PROMPT} ({LENGTH}, 16)" in message and f"{A} (1, 16, 2)" in message


def test_another_prompt_length(make, prompt_run, tmp_path):
    prompt = functools.partial(SoftPrompt, length=5)
    with pytest.raises(InputError, match=r"\(4, 16\).*has shape \(5, 16\)"):
        open_run(make(tmp_path / "run", prompt=prompt, start_from=str(prompt_run)))


def test_a_lora_with_another_scaling_states_what_to_set(
    make, files, continued_run, tmp_path
):
    folder, adapter = peft(tmp_path / "peft", files)
    assert adapter.scalings[QUERY] == 0.5
    spec = LoRA(regexes=[QUERY], rank=3, alpha=16.0)
    run = make(
        tmp_path / "run",
        start_from=str(folder),
        prompt=None,
        adapters=(spec,),
        groups=[LORAS],
    )
    with pytest.raises(InputError, match=r"by 0\.5.*set LoRA\.alpha = 1\.5 "):
        open_run(run)
    right = dataclasses.replace(spec, alpha=1.5)
    start = open_run(dataclasses.replace(run, adapters=(right,))).start.trained
    for path in (A, B):
        np.testing.assert_array_equal(start[path], adapter.parameters[path])
    # A run's checkpoints contain their own scaling too: alpha 4 and rank 2.
    other = dataclasses.replace(QUERIES, alpha=6.0)
    with pytest.raises(InputError, match=r"by 2, and.*by 3.*set LoRA\.alpha = 4 "):
        open_run(
            make(
                tmp_path / "run",
                **(continuation_options(continued_run) | {"adapters": (other,)}),
            )
        )


def test_another_frozen_model_gives_a_warning(make, prompt_run, files, tmp_path):
    model = shutil.copytree(files.decoder, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, model / "model.safetensors")
    run = make(tmp_path / "run", model, start_from=str(prompt_run))
    with pytest.warns(UserWarning, match="trained on another frozen model") as warned:
        trainer = open_run(run)
    assert fingerprint(trainer.frozen) in str(warned[0].message)
    np.testing.assert_array_equal(
        trainer.start.trained[PROMPT], trained_leaves(prompt_run)[PROMPT]
    )


def test_a_run_without_a_directory_is_refused(make):
    with pytest.raises(InputError, match="the run has no directory"):
        open_run(dataclasses.replace(make(Path("nowhere")), directory=""))
