"""`prompt-tuning convert`, from arguments to files and output."""

import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from prompt_tuning.adapters.peft.folder import read_folder
from prompt_tuning.adapters.peft.peft_conversion import from_peft
from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.cli.main import main
from prompt_tuning.config import gin_files
from prompt_tuning.config.config_values import CONFIG_FILE
from prompt_tuning.core.errors import InputError
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.pretrained.checkpoint_path import find_checkpoint
from prompt_tuning.tuned.adapter_conversion import default_form
from prompt_tuning.tuned.load_tuned import load_tuned
from tests.support.adapters import batch_of, our_logits, restored
from tests.support.shared_data import FIXTURES
from tests.support.small_runs import LENGTH, tune

PEFT = FIXTURES / "peft"
ADAPTERS = [
    "--gin.Run.adapters=[@LoRA(), @IA3()]",
    "--gin.LoRA.regexes=['.*/(query|value)', '.*/mlp/down']",
    "--gin.LoRA.rank=2",
    "--gin.ParameterGroup.regexes=['.*/adapters/.*']",
    "--gin.Run.prompt=None",
]
REPARAMETERISED = ["--gin.Run.prompt=@MLPPrompt", "--gin.MLPPrompt.inner=@SoftPrompt"]


@pytest.fixture(scope="module")
def run(files, tmp_path_factory) -> Path:
    """A finished run of a decoder, with checkpoints after 3 and 6 steps."""
    directory = tmp_path_factory.mktemp("module") / "run"
    assert tune(files, directory) == 0
    return directory


def train(files, directory, *bindings, **macros) -> Path:
    assert main(["train", *files.arguments(directory, **macros), *bindings]) == 0
    return directory


@pytest.fixture(scope="module")
def adapted(files, tmp_path_factory) -> Path:
    """A run with LoRA and IA3, two projections of which have both."""
    return train(files, tmp_path_factory.mktemp("module") / "adapted", *ADAPTERS)


def converted(capsys, *arguments) -> str:
    """Returns the output of the command."""
    capsys.readouterr()
    code = main(["convert", *map(str, arguments)])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def refused(capsys, *arguments) -> str:
    """Returns the message with which the command fails."""
    capsys.readouterr()
    assert main(["convert", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def test_help_names_the_base_model(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["convert", "--help"])
    assert "--base_model" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_becomes_a_peft_folder(run, files, tmp_path, capsys):
    target = tmp_path / "peft"
    printed = converted(capsys, run, target)
    assert f"{target}: PROMPT_TUNING" in printed
    assert f"prompt_embeddings [{LENGTH}, 16]" in printed
    folder = read_folder(target)
    assert folder.settings["base_model_name_or_path"] == str(files.decoder)
    assert folder.settings["task_type"] == "CAUSAL_LM"
    np.testing.assert_array_equal(folder.tensors["prompt_embeddings"], read_prompt(run))
    assert f"PeftModel.from_pretrained(model, {str(target)!r})" in printed
    assert "already; --force" in refused(capsys, run, target)
    converted(capsys, run, target, "--force", "--base_model", "some/name")
    assert read_folder(target).settings["base_model_name_or_path"] == "some/name"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prompt.npy", "prompt.safetensors"])
def test_the_suffix_chooses_the_form(name, run, tmp_path, capsys):
    printed = converted(capsys, run, tmp_path / name)
    np.testing.assert_array_equal(read_prompt(tmp_path / name), read_prompt(run))
    command = printed.partition("next: prompt-tuning ")[2]
    assert main([*shlex.split(command), "--new_tokens", "1"]) == 0


@pytest.mark.parametrize("name", ["adapter.gguf", "adapter.bin", "adapter.pt"])
def test_a_folder_is_not_named_like_a_file_of_another_format(name, tmp_path):
    with pytest.raises(InputError, match=f"{name} would be a file .*: name a folder"):
        default_form(tmp_path, tmp_path / name)


def test_t5x_names(run, tmp_path, capsys):
    converted(capsys, run, tmp_path / "t5x", "--to", "t5x")
    file = tmp_path / "t5x" / "decoder.prompt.prompt.prompt"
    np.testing.assert_array_equal(read_prompt(file), read_prompt(run))


@pytest.mark.slow
def test_a_t5x_checkpoint_is_opened_by_the_printed_command(files, tmp_path, capsys):
    options = ["--train", files.train, "--steps=1", "--batch_size=32"]
    options += ["--prompt_length=2", "--gin.DataSource.buckets=1", "--out"]
    options = [str(word) for word in options]
    run, model = tmp_path / "run", tmp_path / "model"
    assert main(["train", "--model", str(files.t5), *options, str(run)]) == 0
    printed = converted(capsys, run, model, "--to", "t5x_model")
    words = shlex.split(printed.partition("next: prompt-tuning ")[2])
    again = [*words, *options, str(tmp_path / "again")]
    assert main([*again, "--dry_run"]) == 0
    assert "29 of 30 stored" in capsys.readouterr().out
    # The same description in a file, and everything else by options.
    lines = [x.removeprefix("--gin.").replace("=", " = ") for x in words if "gin" in x]
    config = tmp_path / "model.gin"
    config.write_text("\n".join(["include 'models/t5_1_1.gin'", *lines]))
    given = ["train", f"--gin_file={config}", "--model", str(model)]
    assert main([*given, *options, str(tmp_path / "again")]) == 2
    assert "set --tokenizer" in capsys.readouterr().err
    given += ["--tokenizer", str(files.t5)]
    assert main([*given, *options, str(tmp_path / "again")]) == 0
    # A prompt of that run is used by the command that is printed for it.
    printed = converted(capsys, tmp_path / "again", tmp_path / "prompt.npy")
    command = shlex.split(printed.partition("next: prompt-tuning ")[2])
    assert main([*command, "--new_tokens", "1"]) == 0


def test_a_decoder_has_no_names_in_t5x(run, tmp_path, capsys):
    message = refused(capsys, run, tmp_path / "t5x", "--to", "t5x_model")
    assert "T5X checkpoints contain encoder-decoders" in message
    assert not (tmp_path / "t5x").exists()


def test_a_single_checkpoint_of_a_run(run, tmp_path, capsys):
    wanted = run / FOLDER / "checkpoint_3"
    converted(capsys, wanted, tmp_path / "prompt.npy")
    vectors = read_prompt(tmp_path / "prompt.npy")
    np.testing.assert_array_equal(vectors, read_prompt(wanted))
    assert not np.array_equal(vectors, read_prompt(run / FOLDER / "checkpoint_6"))


@pytest.mark.exhaustive
def test_a_reparameterized_prompt_is_written_as_vectors(files, tmp_path, capsys):
    run = train(files, tmp_path / "run", *REPARAMETERISED)
    trained = list((run / FOLDER / "checkpoint_6").glob("*.npy"))
    assert len(trained) > 1
    converted(capsys, run, tmp_path / "prompt.npy")
    prompt = read_prompt(tmp_path / "prompt.npy")
    assert prompt.shape == (LENGTH, 16)
    described, parameters = load_tuned(gin_files.read_run([str(run / CONFIG_FILE)], []))
    inner = parameters["decoder/prompt/inner/prompt"]
    assert described.prompt_length == LENGTH and not np.array_equal(prompt, inner)


def test_a_round_trip_keeps_the_values(run, tmp_path, capsys, files):
    converted(capsys, run, tmp_path / "peft")
    base = ("--base_model", files.decoder)
    printed = converted(capsys, tmp_path / "peft", tmp_path / "ours", *base)
    assert "decoder/prompt/prompt" in printed
    assert (tmp_path / "ours" / FOLDER / "checkpoint_0" / "state.json").is_file()
    np.testing.assert_array_equal(read_prompt(tmp_path / "ours"), read_prompt(run))
    converted(capsys, tmp_path / "ours", tmp_path / "again", *base)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        first, second = (tmp_path / x / name for x in ("peft", "again"))
        assert first.read_bytes() == second.read_bytes()


def test_a_prompt_file_needs_no_model(run, tmp_path, capsys):
    converted(capsys, run, tmp_path / "prompt.npy")
    converted(capsys, tmp_path / "prompt.npy", tmp_path / "a")
    assert read_folder(tmp_path / "a").settings["num_layers"] is None
    seq2seq = ("--task_type", "SEQ_2_SEQ_LM")
    converted(capsys, tmp_path / "prompt.npy", tmp_path / "b", *seq2seq)
    assert read_folder(tmp_path / "b").settings["task_type"] == "SEQ_2_SEQ_LM"


def test_a_bundled_model_can_be_named(tmp_path, capsys):
    np.save(tmp_path / "prompt.npy", np.zeros((4, 128), np.float32))
    bundled = ("--base_model", "bundled:skills-decoder")
    converted(capsys, tmp_path / "prompt.npy", tmp_path / "peft", *bundled)
    settings = read_folder(tmp_path / "peft").settings
    assert Path(settings["base_model_name_or_path"]).is_dir()
    assert settings["num_layers"] is not None


@pytest.mark.exhaustive
def test_one_of_several_methods_is_chosen(adapted, tmp_path, capsys):
    problem = refused(capsys, adapted, tmp_path / "peft")
    assert "these kinds: IA3, LORA; one can be written" in problem
    config = read_config(
        find_checkpoint(
            gin_files.read_run([str(adapted / CONFIG_FILE)], []).model.checkpoint
        )
    )
    for kind, count in (("LORA", 6), ("IA3", 3)):
        converted(capsys, adapted, tmp_path / kind, "--only", kind)
        folder = read_folder(tmp_path / kind)
        adapter = from_peft(folder, config, "here")
        assert adapter.kind == kind and len(adapter.parameters) == count
        # 16 / 2, the default alpha.
        assert all(scaling == 8.0 for scaling in adapter.scalings.values())


@pytest.mark.slow
def test_adapters_are_merged_into_the_weights(adapted, files, tmp_path, capsys):
    printed = converted(capsys, adapted, tmp_path / "merged", "--merge")
    assert "IA3 and LORA in its weights" in printed
    run = gin_files.read_run([str(adapted / CONFIG_FILE)], [])
    described, parameters = load_tuned(run)
    tokens = np.random.default_rng(0).integers(4, 30, (2, 9))
    batch = batch_of({"input_ids": tokens, "attention_mask": np.ones_like(tokens)})
    expected = our_logits(parameters, batch, graph=described.graph)
    graph, merged = restored(tmp_path / "merged", None)
    actual = our_logits(merged, batch, graph=graph)
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    graph, base = restored(files.decoder, None)
    assert np.abs(our_logits(base, batch, graph=graph) - expected).max() > 0.01
    tokenizer = "tokenizer.json"
    assert (tmp_path / "merged" / tokenizer).read_bytes() == (
        files.decoder / tokenizer
    ).read_bytes()


def test_a_prompt_is_not_merged(run, tmp_path, capsys):
    problem = refused(capsys, run, tmp_path / "merged", "--merge")
    assert "['PROMPT_TUNING'] cannot be merged and would be lost" in problem
    assert not (tmp_path / "merged").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["llama_gqa_untied/lora", "gpt2_tied/ia3", "t5v11_untied_gated/mpt"]
)
def test_peft_folders_survive_a_round_trip(case, tmp_path, capsys):
    folder, base = PEFT / case, (PEFT / case).parent / "base"
    converted(capsys, folder, tmp_path / "ours", "--base_model", base)
    state = tmp_path / "ours" / FOLDER / "checkpoint_0" / "state.json"
    assert json.loads(state.read_text())["extra"]["source"] == str(folder)
    converted(capsys, tmp_path / "ours", tmp_path / "peft", "--base_model", base)
    name = "adapter_model.safetensors"
    assert (tmp_path / "peft" / name).read_bytes() == (folder / name).read_bytes()
    if not case.endswith("mpt"):
        converted(capsys, folder, tmp_path / "m", "--merge", "--base_model", base)
        merged, frozen = (
            load_file(x / "model.safetensors") for x in (tmp_path / "m", base)
        )
        changed = {n for n in frozen if not np.array_equal(merged[n], frozen[n])}
        assert merged.keys() == frozen.keys() and changed


@pytest.mark.slow
def test_inputs_that_cannot_be_converted_are_refused(run, files, tmp_path, capsys):
    target = tmp_path / "target"
    assert "does not exist" in refused(capsys, tmp_path / "none", target)
    assert "does not contain an adapter" in refused(capsys, tmp_path, target)
    assert "a file named *.npy" in refused(capsys, run, target, "--to", "npy")
    assert "these kinds: none" in refused(capsys, run, target, "--only", "LORA")
    unknown = refused(capsys, run, target, "--only", "lora")
    assert "'lora' is not a kind of adapter, expected one of PROMPT_TUNING" in unknown
    np.save(tmp_path / "prompt.npy", np.zeros((4, 16), np.float32))
    plain = tmp_path / "prompt.npy"
    bound = refused(capsys, plain, target, "--gin.STEPS=3")
    assert "no config uses ['STEPS = 3']" in bound
    np.save(tmp_path / "prefix.npy", np.zeros((1, 2, 4, 1, 8), np.float32))
    assert "set the model that it is for" in refused(
        capsys, tmp_path / "prefix.npy", target
    )
    assert "needs the frozen model" in refused(
        capsys, _lora(tmp_path / "lora"), target, "--merge"
    )
    assert not target.exists()
    unknown = ["convert", str(plain), str(target), "--frobnicate"]
    with pytest.raises(SystemExit, match="2"):
        main(unknown)


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ((5, 2, 3, 4, 32), "(4, 2, 3, 4, 32)"),
        ((4, 2, 3, 2, 32), "(4, 2, 3, 4, 32)"),
        ((3, 64), "(3, 128)"),
        ((5, 3, 128), "(4, 3, 128)"),
    ],
)
@pytest.mark.parametrize("form", ["safetensors", "checkpoint"])
def test_a_prompt_of_another_model_is_refused_before_it_is_written(
    form, shape, sizes, tmp_path, capsys
):
    """The bundled decoder has 4 layers of 4 heads of width 32."""
    np.save(tmp_path / "prompt.npy", np.zeros(shape, np.float32))
    target = tmp_path / "out.safetensors"
    arguments = [tmp_path / "prompt.npy", target, "--to", form]
    model = ["--base_model", "bundled:skills-decoder"]
    found = refused(capsys, *arguments, *model)
    assert f"of shape {shape}, but the model has shape {sizes}" in found
    assert not target.exists()
    converted(capsys, *arguments)


def _lora(folder: Path) -> Path:
    """Writes a checkpoint with a LoRA that does not belong to a run."""
    path = "decoder/layers/mlp/up/adapters/lora"
    trained = {f"{path}/{leaf}": np.zeros((1, 2, 2), np.float32) for leaf in ("a", "b")}
    CheckpointStore(folder).save(0, trained, (), {})
    return folder


@pytest.mark.slow
def test_a_prompt_at_a_position_unlike_pefts_is_refused(files, tmp_path, capsys):
    run = train(files, tmp_path / "run", Prompting__placement="suffix")
    problem = refused(capsys, run, tmp_path / "peft")
    assert "PEFT puts every prompt before the text" in problem
    converted(capsys, run, tmp_path / "prompt.npy")
