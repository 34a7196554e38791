"""Links out of the folders that are read, at every door."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from prompt_tuning.adapters.merge import write_merged
from prompt_tuning.adapters.peft.folder import find_folder, read_folder
from prompt_tuning.adapters.prompt_files import find_checkpoint, read_prompt
from prompt_tuning.checkpoints.formats.safetensors import open_safetensors
from prompt_tuning.checkpoints.formats.t5x_checkpoint import open_t5x
from prompt_tuning.checkpoints.run_store.checkpoint_files import verify
from prompt_tuning.checkpoints.run_store.checkpoint_store import CheckpointStore
from prompt_tuning.config.gin_files import read_run_directory
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.file_names import check_links
from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.prompts.adapter_files import read_adapter
from prompt_tuning.training.metrics_log import MetricsLog, read_log
from tests.support.shared_data import FIXTURES

PEFT = FIXTURES / "peft/llama_gqa_untied"


def write_run(folder):
    CheckpointStore(folder).save(
        3, {"decoder/prompt/prompt": np.ones((2, 4), "f4")}, (), {}
    )


def write_array(folder):
    folder.mkdir()
    np.save(folder / "x.npy", np.ones((2, 4), "f4"))
    (folder / "x.npy").rename(folder / "decoder.prompt.prompt.prompt")


def write_texts(folder):
    folder.mkdir()
    for name in ("config.gin", "run.json", "metrics.jsonl", "checkpoint"):
        (folder / name).write_text("")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("secret")


def of(name):
    return lambda folder: shutil.copytree(PEFT / name, folder)


CHECKPOINT = "numpy_checkpoints/checkpoint_3"


def read_saved(folder):
    verify(folder / CHECKPOINT)


def store(folder):
    return CheckpointStore(folder)


def merged(folder):
    write_merged(folder / "new", folder, [])


# The folder that a stranger gives, the entry of it that is a link, and its reader.
DOORS = {
    "weights": (of("base"), "model.safetensors", open_safetensors),
    "config": (of("base"), "config.json", read_config),
    "generation config": (of("base"), "generation_config.json", read_config),
    "adapter": (of("lora"), "adapter_model.safetensors", read_folder),
    "its settings": (of("lora"), "adapter_config.json", read_folder),
    "checkpoints": (write_run, "numpy_checkpoints", read_prompt),
    "checkpoint": (write_run, CHECKPOINT, find_checkpoint),
    "state": (write_run, f"{CHECKPOINT}/state.json", read_saved),
    "resumed run": (write_run, "numpy_checkpoints", store),
    "array": (
        write_array,
        "decoder.prompt.prompt.prompt",
        lambda x: read_adapter(x, None),
    ),
    "run's config": (write_texts, "config.gin", read_run_directory),
    "run's record": (write_texts, "run.json", read_run_directory),
    "log": (write_texts, "metrics.jsonl", lambda x: MetricsLog(x, 0)),
    "read log": (write_texts, "metrics.jsonl", lambda x: read_log(x / "metrics.jsonl")),
    "T5X": (write_texts, "checkpoint", open_t5x),
    "tokenizer": (write_texts, "tokenizer.json", load_tokenizer),
    "chat template": (write_texts, "chat_template.jinja", load_tokenizer),
    "merged copy": (of("base"), "generation_config.json", merged),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_link_out_of_a_folder_is_refused(door, tmp_path):
    write, entry, read = DOORS[door]
    write(tmp_path / "given")
    outside = tmp_path / "outside"
    (tmp_path / "given" / entry).rename(outside)
    (tmp_path / "given" / entry).symlink_to(outside)
    with pytest.raises(InputError, match=rf"{Path(entry).name}.* is a link out of"):
        read(tmp_path / "given")


def test_an_adapters_subfolder_may_not_be_a_link_out_of_its_folder(tmp_path):
    (tmp_path / "given").mkdir()
    (tmp_path / "given/style").symlink_to(PEFT / "lora")
    with pytest.raises(InputError, match="style is a link out of"):
        find_folder(tmp_path / "given")


def test_the_given_folder_may_be_a_link_and_have_links_to_its_own_files(tmp_path):
    shutil.copytree(PEFT / "lora", tmp_path / "real")
    (tmp_path / "real/adapter_model.safetensors").rename(tmp_path / "real/stored")
    (tmp_path / "real/adapter_model.safetensors").symlink_to("stored")
    (tmp_path / "given").symlink_to(tmp_path / "real")
    assert read_folder(tmp_path / "given").kind == "LORA"


def test_links_of_the_hubs_cache_are_followed_within_a_repository(tmp_path):
    repository, other = tmp_path / "models--a--b", tmp_path / "models--a--c"
    for folder in (repository, other):
        (folder / "blobs").mkdir(parents=True)
        save_file({"x": np.ones(3, "f4")}, folder / "blobs/1f")
    snapshot = repository / "snapshots/main"
    (snapshot / "nested").mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to("../../blobs/1f")
    (snapshot / "nested/model.safetensors").symlink_to("../../../blobs/1f")
    index = {"weight_map": {"x": "a.safetensors"}}
    (snapshot / "nested/index.json").write_text(json.dumps(index))
    assert open_safetensors(snapshot)["x"].shape == (3,)
    assert open_safetensors(snapshot / "nested")["x"].shape == (3,)
    for target in ("../../refs", "../../../models--a--c/blobs/1f", "/dev/zero"):
        (snapshot / "model.safetensors").unlink()
        (snapshot / "model.safetensors").symlink_to(target)
        (repository / "refs").mkdir(exist_ok=True)
        with pytest.raises(InputError, match=r"is a link out of .*main, to"):
            check_links(snapshot, "*.safetensors")
