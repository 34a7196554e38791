"""Models of the Hugging Face hub, from a server here and from a prepared cache."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prompt_tuning import SoftPrompt, load, tune
from prompt_tuning.cli.main import main
from prompt_tuning.core.errors import InputError
from prompt_tuning.pretrained import hub
from prompt_tuning.pretrained.checkpoint_path import find_checkpoint
from prompt_tuning.pretrained.hub_name import HubName, parse_hub_name
from tests.support.hub_server import COMMIT, EARLIER, TOKEN, serve
from tests.support.small_runs import DECODER, write_model

NAME = "organization/model"
UNNEEDED = ("README.md", "pytorch_model.bin", "training_args.bin")

library = pytest.importorskip("huggingface_hub", reason="needs the extra hub")


@pytest.fixture
def folder(tmp_path):
    folder = write_model(tmp_path / "stored", DECODER)
    for name in UNNEEDED:
        (folder / name).write_text("not needed")
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the hub, which cannot be reached."""
    import huggingface_hub.constants as constants

    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.find_folder.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def server(folder, cache, monkeypatch):
    with serve(folder) as server:
        connect(server, monkeypatch)
        yield server


def connect(server, monkeypatch):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    template = f"{server.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def lay_out(cache, folder, *, revision="main", commit=COMMIT, without=()):
    """Writes a model to the cache as `huggingface_hub` does: links to blobs."""
    root = cache / "models--organization--model"
    snapshot = root / "snapshots" / commit
    for path in (snapshot, root / "refs", root / "blobs"):
        path.mkdir(parents=True, exist_ok=True)
    (root / "refs" / revision).write_text(commit)
    for number, file in enumerate(sorted(folder.iterdir())):
        if file.name not in without:
            shutil.copy(file, root / "blobs" / str(number))
            (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    return snapshot


def test_names_and_revisions():
    assert parse_hub_name("Qwen/Qwen3-0.6B") == HubName("Qwen/Qwen3-0.6B")
    assert parse_hub_name("a/b@refs/pr/1") == HubName("a/b", "refs/pr/1")
    assert str(parse_hub_name("a/b@v1.0")) == "a/b@v1.0"
    tricks = (
        *("a", "a/b/c", "/a/b", "../b", "a/..", "a/b@../c", "a/b@c/../d", "./b"),
        *("a/b@", "a/b@.git", "a/b@/c", "a/b\n", "-a/b", "a\\b/c", "a/b" * 200, "ä/b"),
    )
    assert [name for name in tricks if parse_hub_name(name) is not None] == []


def test_a_model_is_downloaded_once_without_what_is_not_read(folder, server):
    path = find_checkpoint(NAME)
    assert path.name == COMMIT
    names = {file.name for file in folder.iterdir()}
    assert {file.name for file in path.iterdir()} == names - {*UNNEEDED}
    assert not {*server.fetched} & {*UNNEEDED}
    server.requests.clear()
    hub.find_folder.cache_clear()
    assert find_checkpoint(NAME) == path
    assert server.requests == []
    ours, theirs = load(NAME), load(folder)
    assert ours.generate("ab=", new_tokens=3) == theirs.generate("ab=", new_tokens=3)


def test_only_the_shards_of_the_index_are_downloaded(folder, server):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, shards = sorted(tensors), ("model-1-of-2.safetensors", "b.safetensors")
    for shard, part in zip(shards, (names[::2], names[1::2]), strict=True):
        save_file({name: tensors[name] for name in part}, folder / shard)
    weight_map = {name: shards[number % 2] for number, name in enumerate(names)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    save_file({"copy": np.zeros(1)}, folder / "consolidated.safetensors")
    assert load(NAME).config.width == DECODER.width
    assert {*shards} <= {*server.fetched}
    assert "consolidated.safetensors" not in server.fetched
    # An interrupted download is continued.
    (find_checkpoint(NAME) / shards[1]).unlink()
    hub.find_folder.cache_clear()
    assert (find_checkpoint(NAME) / shards[1]).is_file()


def test_a_revision_is_resolved_and_recorded(server, tmp_path):
    assert find_checkpoint(f"{NAME}@v1").name == EARLIER
    tune(
        f"{NAME}@v1",
        SoftPrompt(length=2),
        [("ab=", "b")],
        steps=1,
        directory=tmp_path / "run",
        progress=False,
    )
    record = json.loads((tmp_path / "run/run.json").read_text())
    assert record["model_revision"] == EARLIER
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "peft")]) == 0
    settings = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == NAME
    assert settings["revision"] == "v1"
    with pytest.raises(InputError, match=f"{NAME} has no revision absent"):
        find_checkpoint(f"{NAME}@absent")


def test_a_private_model_needs_the_token(folder, cache, monkeypatch):
    with serve(folder, private=True) as server:
        connect(server, monkeypatch)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setenv("HF_TOKEN_PATH", "/nowhere")
        with pytest.raises(InputError, match="if it is private, log in by `hf auth"):
            find_checkpoint(NAME)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        assert find_checkpoint(NAME).name == COMMIT


def test_unsupported_models_are_refused_before_their_weights_are_downloaded(
    folder, server
):
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"model_type": "mamba3"}))
    with pytest.raises(InputError, match="'mamba3', expected one of"):
        find_checkpoint(NAME)
    assert "model.safetensors" not in server.fetched


def test_a_model_of_pickles_is_refused_with_what_to_do(folder, server):
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no \*\.safetensors.*pickle"):
        find_checkpoint(NAME)


def test_a_repository_of_gguf_files_is_refused_with_what_to_do(folder, server):
    (folder / "config.json").unlink()
    (folder / "model-Q8_0.gguf").write_text("not fetched")
    message = f"`hf download {NAME} model-Q8_0.gguf`, and give its path"
    with pytest.raises(InputError, match=message):
        find_checkpoint(NAME)


def test_a_cache_laid_out_by_hand_is_read_without_a_network(folder, cache):
    snapshot = lay_out(cache, folder)
    assert find_checkpoint(NAME) == snapshot
    assert find_checkpoint(f"{NAME}@{COMMIT}") == snapshot
    assert load(f"{NAME}@{COMMIT}").config.width == DECODER.width
    with pytest.raises(InputError, match="offline mode is enabled"):
        find_checkpoint(f"{NAME}@v1")


def test_a_cache_without_weights_is_incomplete(folder, cache):
    lay_out(cache, folder, without=["model.safetensors"])
    with pytest.raises(InputError, match=f"hf download {NAME} --local-dir model"):
        find_checkpoint(NAME)


def test_a_folder_of_the_same_name_is_the_folder(folder, cache):
    lay_out(cache, folder)
    shutil.copytree(folder, NAME)
    assert find_checkpoint(NAME) == Path(NAME)


@pytest.mark.parametrize("offline", [True, False])
def test_without_a_network_one_line_tells_what_to_do(
    offline, cache, monkeypatch, capsys
):
    import huggingface_hub.constants as constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert main(["generate", "--model", NAME, "a"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert f"`hf download {NAME} --local-dir model`" in line


def test_without_the_extra_one_line_tells_what_to_do(cache, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub.constants", None)
    assert main(["generate", "--model", NAME, "a"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "pip install 'prompt-tuning[hub]'" in line
