"""Commands that use prompts or adapters of other runs: --prompt and Run.start_from."""

import functools
from pathlib import Path

import numpy as np
import pytest

from prompt_tuning.adapters.peft.folder import write_folder
from prompt_tuning.adapters.peft.peft_conversion import to_peft
from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.cli.main import main
from prompt_tuning.config.run import Run
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.tuned.load_tuned import load_tuned
from tests.support.adapters import (
    assert_same_logits,
    batch_of,
    our_logits,
    random_adapter,
)
from tests.support.shared_data import FIXTURES
from tests.support.small_runs import LENGTH, logged, tune

PEFT = FIXTURES / "peft"
LORA = [
    "--gin.Run.adapters=[@LoRA()]",
    "--gin.LoRA.regexes=['.*/(query|value)']",
    "--gin.LoRA.rank=2",
]
LORA_ALONE = [
    *LORA,
    "--gin.Run.prompt=None",
    "--gin.ParameterGroup.regexes=['.*/adapters/.*']",
]
BESIDE = [*LORA, "--gin.ParameterGroup.regexes=['.*/(prompt|adapters)/.*']"]
RESIDUAL = [
    "--gin.Run.prompt=@ResidualPrompt",
    "--gin.ResidualPrompt.inner=@SoftPrompt",
    "--gin.ResidualPrompt.hidden_width=3",
]
FULL = [
    "--gin.Run.prompt=None",
    "--gin.ParameterGroup.regexes=['decoder/layers/mlp/.*']",
]
ASKED = ("--new_tokens=9", "hello=", "ab=")


@pytest.fixture(scope="module")
def run_named(files, tmp_path_factory):
    """Returns the directory of a run, which is trained on first use."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def of(name: str, *bindings: str) -> Path:
        directory = folder / name
        assert main(["train", *files.arguments(directory), *bindings]) == 0
        return directory

    return of


@pytest.fixture(scope="module")
def run(run_named) -> Path:
    """A run with a prompt."""
    return run_named("prompt")


def output(capsys, *arguments) -> str:
    capsys.readouterr()
    code = main(list(map(str, arguments)))
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def refused(capsys, *arguments) -> str:
    capsys.readouterr()
    assert main(list(map(str, arguments))) == 2
    return capsys.readouterr().err


def evaluated(capsys, *arguments) -> list[str]:
    lines = output(capsys, "evaluate", *arguments).splitlines()
    return [line for line in lines if line.startswith("│")]


def model_arguments(files) -> tuple[str, ...]:
    """Returns arguments that name a model but not a run."""
    return ("--gin_file=models/checkpoint.gin", f"--gin.MODEL={str(files.decoder)!r}")


@pytest.mark.exhaustive
@pytest.mark.parametrize("bindings", [[], LORA_ALONE], ids=["prompt", "lora"])
def test_an_exported_model_and_peft_folder_generate_the_runs_texts(
    bindings, run_named, files, tmp_path, capsys
):
    directory = run_named("lora", *bindings) if bindings else run_named("prompt")
    output(capsys, "convert", directory, tmp_path / "peft")
    given = ("generate", *model_arguments(files), "--prompt", tmp_path / "peft", *ASKED)
    printed = output(capsys, "generate", "--run", directory, *ASKED)
    assert output(capsys, *given) == printed
    assert output(capsys, "generate", *model_arguments(files), *ASKED) != printed


@pytest.mark.slow
@pytest.mark.parametrize("form", ["file", "deep", "run", "checkpoint"])
def test_plain_vectors_precede_the_text(form, run, files, tmp_path, capsys):
    """With a single block, a deep prompt is a soft prompt."""
    prompt = {"run": run, "checkpoint": run / FOLDER / "checkpoint_6"}.get(form)
    if prompt is None:
        prompt = tmp_path / "prompt.npy"
        np.save(prompt, read_prompt(run)[None] if form == "deep" else read_prompt(run))
    given = ("generate", *model_arguments(files), "--prompt", prompt, *ASKED)
    assert output(capsys, *given) == output(capsys, "generate", "--run", run, *ASKED)


@pytest.mark.slow
def test_a_lora_of_a_run_directory_has_its_scaling(run_named, files, capsys):
    """The checkpoint has alpha 16 and rank 2, which are not the defaults."""
    directory = run_named("lora", *LORA_ALONE)
    given = ("generate", *model_arguments(files), "--prompt", directory, *ASKED)
    printed = output(capsys, "generate", "--run", directory, *ASKED)
    assert output(capsys, *given) == printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "llama_gqa_untied/prompt_tuning",
        "llama_gqa_untied/prefix_tuning",
        "llama_gqa_untied/lora",
        "gpt2_tied/mpt",
        "gpt2_tied/ia3",
        "t5v11_untied_gated/p_tuning",
    ],
)
def test_every_kind_of_peft_folder_has_pefts_logits(case):
    folder = PEFT / case
    reference = np.load(folder.parent / "ref.npz")
    names = ["input_ids", "attention_mask"]
    names += ["labels"] if case.startswith("t5") else []
    tokens = {name: reference[name] for name in names}
    base = Pretrained(checkpoint=str(folder.parent / "base"))
    model, parameters = load_tuned(Run(model=base), folder)
    tasks = [0, 1, 2] if folder.name == "mpt" else None
    logits = our_logits(parameters, batch_of(tokens, tasks), graph=model.graph)
    assert_same_logits(logits, reference[f"{folder.name}.logits"], tokens)


@pytest.mark.exhaustive
def test_a_checkpoint_of_several_leaves_replaces_another(run_named, capsys):
    one = run_named("residual", *RESIDUAL)
    other = run_named("residual_again", *RESIDUAL, "--gin.Run.seed=5")
    there = evaluated(capsys, "--run", one)
    assert there != evaluated(capsys, "--run", other)
    assert evaluated(capsys, "--run", other, "--prompt", one) == there


@pytest.mark.exhaustive
def test_trained_weights_of_the_model_are_measured(run_named, files, capsys):
    directory = run_named("full", *FULL)
    (measured,) = (x for x in logged(directory) if "evaluation/loss" in x)
    loss = next(row for row in evaluated(capsys, "--run", directory) if "loss" in row)
    assert f"{measured['evaluation/loss']:.4f}" in loss
    elsewhere = evaluated(
        capsys, f"--gin_file={directory / 'config.gin'}", "--gin.Run.directory='none'"
    )
    assert loss not in elsewhere
    given = ("generate", *model_arguments(files), "--prompt", directory, *ASKED)
    printed = output(capsys, "generate", "--run", directory, *ASKED)
    assert output(capsys, *given) == printed


def test_the_frozen_model_of_a_run_of_adapters(run_named, run, capsys):
    directory = run_named("lora", *LORA_ALONE)
    alone = evaluated(capsys, "--run", directory, "--gin.Run.adapters=()")
    assert alone == evaluated(capsys, "--run", run, "--gin.Run.prompt=None")
    assert alone != evaluated(capsys, "--run", directory)


@pytest.mark.exhaustive
def test_only_all_trained_parameters_are_measured(run_named, capsys):
    directory = run_named("beside", *BESIDE)
    message = refused(capsys, "evaluate", "--run", directory, "--gin.Run.adapters=()")
    assert "lora/a of shape (1, 16, 2), but the model has no such parameter" in message
    assert "in addition to the frozen ones it has decoder/prompt/prompt" in message


@pytest.mark.slow
def test_a_file_without_a_trained_array(run_named, run, capsys):
    directory = run_named("beside", *BESIDE)
    message = refused(capsys, "generate", "--run", directory, "--prompt", run, *ASKED)
    assert (
        "contains decoder/prompt/prompt and nothing for decoder/layers/self" in message
    )


def test_an_adapter_that_does_not_fit_the_run(run_named, run, files, tmp_path, capsys):
    config = read_config(files.decoder)
    adapter = to_peft(random_adapter(config, "IA3"), config)
    write_folder(tmp_path / "peft", adapter)
    given = ("generate", "--run", run, "--prompt", tmp_path / "peft", *ASKED)
    assert "but the model has no such parameter" in refused(capsys, *given)
    output(capsys, *given, "--gin.Run.prompt=None")


def test_a_lora_with_another_scaling(run_named, files, tmp_path, capsys):
    directory = run_named("lora", *LORA_ALONE)
    output(capsys, "convert", directory, tmp_path / "peft")
    given = ("--prompt", tmp_path / "peft", "--gin.LoRA.alpha=4.0", *ASKED)
    message = refused(capsys, "generate", "--run", directory, *given)
    assert (
        "by 8, and this model by 2 (rank 2, alpha 4): set LoRA.alpha = 16 " in message
    )


def test_a_lora_run_is_not_evaluated_with_another_scaling(run_named, capsys):
    directory = run_named("lora", *LORA_ALONE)
    message = refused(capsys, "evaluate", "--run", directory, "--gin.LoRA.alpha=64.0")
    assert "and this model by 32 (rank 2, alpha 64): set LoRA.alpha = 16" in message


@pytest.mark.slow
def test_training_starts_from_a_run_and_reports_it(run, files, tmp_path, capsys):
    start = [f"--gin.Run.start_from={str(run)!r}", "--gin.Run.steps=1", *BESIDE]
    printed = output(capsys, "train", *files.arguments(tmp_path / "run"), *start)
    assert f"start_from {run / FOLDER / 'checkpoint_6'}" in printed
    assert f"decoder/prompt/prompt ({LENGTH}, 16)" in printed
    assert "fresh, with a step count of 6" in printed
    config = (tmp_path / "run" / "config.gin").read_text().replace("\\\n    ", "")
    assert f"Run.start_from = {str(run)!r}" in config
    again = output(capsys, "train", f"--gin_file={tmp_path / 'run' / 'config.gin'}")
    assert f"start_from {run}: ignored" in again
    assert "all 1 steps are already done" in again


@pytest.mark.exhaustive
def test_every_member_of_a_sweep_starts_from_it(run, files, tmp_path, capsys):
    still = "--gin.ParameterGroup.optimizer=@adamw()", "--gin.adamw.learning_rate=1e-30"
    start = f"--gin.Run.start_from={str(run)!r}"
    arguments = [x for x in files.arguments(tmp_path / "sweep") if "adafactor" not in x]
    given = (*arguments, *still, start, "--gin.Run.steps=1", "--vary=Run.seed=1,2")
    assert f"start_from {run / FOLDER}" in output(capsys, "sweep", *given)
    for member in ("Run.seed=1", "Run.seed=2"):
        (directory,) = (tmp_path / "sweep").glob(f"*{member.partition('.')[2]}*")
        np.testing.assert_array_equal(read_prompt(directory), read_prompt(run))


@pytest.mark.parametrize(
    ("start", "choices", "expected"),
    [
        ("nowhere", {}, "nowhere does not exist"),
        (None, {"PROMPT_LENGTH": 5}, "(4, 16), but the model has shape (5, 16)"),
    ],
)
def test_an_unusable_start(start, choices, expected, run, files, tmp_path, capsys):
    start = str(run) if start is None else start
    choices = choices | {"Run__start_from": start}
    assert tune(files, tmp_path / "run", **choices) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_inspect_shows_the_vectors_of_a_file(run, files, tmp_path, capsys):
    config = read_config(files.decoder)
    shown = {}
    for kind in ("MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "LORA"):
        folder = tmp_path / kind
        write_folder(folder, to_peft(random_adapter(config, kind), config))
        given = ("inspect", *model_arguments(files), "--prompt", folder)
        if kind.startswith("MULTI"):
            shown = output(capsys, *given)
        else:
            shown = refused(capsys, *given)
        expected = {
            "M": "decoder/prompt, task 2",
            "P": "keys and values",
            "L": "no pro",
        }
        assert expected[kind[0]] in shown
