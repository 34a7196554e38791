"""Finds Hugging Face hub models in the local cache, or downloads them.

`huggingface_hub` manages the cache, tokens and `HF_ENDPOINT`; it is in the extra `hub`.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from prompt_tuning.core import status_line
from prompt_tuning.core.errors import InputError, shortened
from prompt_tuning.core.gguf_files import SUFFIX
from prompt_tuning.core.typed_json import read_object
from prompt_tuning.data.text.tokenizers import has_tokenizer
from prompt_tuning.families.hf_folder import read_config
from prompt_tuning.pretrained.hub_name import HubName

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
SETTINGS = (
    *("generation_config.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja"),
)
TOKENIZER, BYTE_LEVEL = "tokenizer.json", ("vocab.json", "merges.txt")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@functools.cache
def find_folder(name: HubName) -> Path:
    """Returns the folder of a model in the cache, after downloading what it lacks.

    A cached revision is not looked up again.

    Raises:
      InputError: if the model is not in the cache and cannot be downloaded, or belongs
        to an unsupported family.
    """
    cached = find_cached(name)
    if cached is not None and has_tokenizer(cached):
        return cached
    try:
        with _reporting_errors(name):
            return _download(name)
    except InputError:
        if cached is None:
            raise
        return cached  # a model without a tokenizer, and no network


def find_cached(name: HubName) -> Path | None:
    """Returns the folder of a model if the cache has its config and all weights.

    Raises:
      InputError: if `huggingface_hub` is not installed.
    """
    hub = _library(name)
    with _reporting_errors(name):
        config = hub.try_to_load_from_cache(
            name.repository, CONFIG, revision=name.revision
        )
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder is not None and _has_weights(folder) else None


def check_available(name: HubName) -> None:
    """Checks, without a connection, that a model is cached or may be downloaded."""
    if find_cached(name) is None and _library(name).constants.is_offline_mode():
        raise InputError(_unreachable(name, "HF_HUB_OFFLINE is set"))


def _library(name: HubName) -> Any:
    try:
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError as error:
        raise InputError(
            f"{name} is neither a folder here nor can it be fetched from the Hugging "
            "Face hub: install the extra by pip install 'prompt-tuning[hub]', or give "
            "the model's folder"
        ) from error
    return huggingface_hub


def _has_weights(folder: Path) -> bool:
    if (folder / WEIGHTS).is_file():
        return True
    if (folder / INDEX).is_file():
        return all((folder / file).is_file() for file in _indexed(folder / INDEX))
    return any(folder.glob("*.safetensors"))


def _indexed(index: Path) -> set[str]:
    """Returns the names of the files in an index, except for those in folders."""
    values = read_object(index).nested("weight_map").values.values()
    return {file for file in values if isinstance(file, str) and _is_plain(file)}


def _is_plain(file: str) -> bool:
    return not set("/\\") & set(file) and not file.startswith(".")


def _download(name: HubName) -> Path:
    """Downloads the files that we read, the weights last."""
    hub = _library(name)
    info = hub.HfApi().model_info(name.repository, revision=name.revision)
    commit = info.sha
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise InputError(f"the hub names no commit of {name}")
    files = {file.rfilename for file in info.siblings or ()}
    files = {file for file in files if _is_plain(file)}
    if CONFIG not in files:
        raise InputError(
            f"{name} has no config.json; expected a model of transformers"
            f"{_advice(name, files)}"
        )

    def fetch(file: str) -> Path:
        return Path(hub.hf_hub_download(name.repository, file, revision=commit))

    status_line.clear_status()  # the library shows its own progress bars
    folder = fetch(CONFIG).parent
    for file in _small_files(files):
        fetch(file)
    # Before gigabytes of weights are downloaded.
    read_config(folder, tied_head=True)
    for file in _weight_files(name, files, fetch):
        fetch(file)
    if name.revision != commit:
        # The cache records what the branch or tag stands for only with its name.
        hub.hf_hub_download(name.repository, CONFIG, revision=name.revision)
    return folder


def _advice(name: HubName, files: Collection[str]) -> str:
    """Returns what to do with a repository of GGUF files; empty for any other."""
    found = sorted(file for file in files if file.endswith(SUFFIX))
    if not found:
        return ""
    return (
        f". It has GGUF files ({shortened(', '.join(found))}): download one by "
        f"`hf download {name.repository} {found[0]}`, and give its path"
    )


def _small_files(files: Collection[str]) -> list[str]:
    """Returns the files of settings and of the tokenizer."""
    models = sorted(file for file in files if file.endswith(".model"))
    needed = (TOKENIZER,) if TOKENIZER in files else (*models, *BYTE_LEVEL)
    return [file for file in (*SETTINGS, *needed) if file in files]


def _weight_files(
    name: HubName, files: Collection[str], fetch: Callable[[str], Path]
) -> list[str]:
    """Returns the files of weights that `open_safetensors` reads, and their index."""
    if WEIGHTS in files:
        return [WEIGHTS]
    if INDEX in files:
        return sorted(_indexed(fetch(INDEX)) & set(files))
    weights = sorted(file for file in files if file.endswith(".safetensors"))
    if not weights:
        listed = ", ".join(sorted(files)[:10])
        raise InputError(
            f"{name} has no *.safetensors, only {shortened(listed)}; a *.bin is a "
            "pickle, which can run code, and is not read: if you trust it, convert "
            "it with transformers by AutoModelForCausalLM.from_pretrained("
            f"{name.repository!r}).save_pretrained(FOLDER) and give the folder"
        )
    return weights


@contextlib.contextmanager
def _reporting_errors(name: HubName) -> Iterator[None]:
    """Reports errors of the hub and the network within the block in one line."""
    errors = _library(name).errors
    try:
        yield
    except errors.GatedRepoError as error:
        raise InputError(
            f"{name} is a gated model: accept its terms on the hub's page of "
            f"{name.repository}, and log in by `hf auth login` (or set HF_TOKEN)"
        ) from error
    except errors.RevisionNotFoundError as error:
        reason = f"{name.repository} has no revision {name.revision}"
        raise InputError(reason) from error
    except errors.RepositoryNotFoundError as error:
        raise InputError(
            f"{name} is neither a folder here nor a model of the Hugging Face hub; if "
            "it is private, log in by `hf auth login` (or set HF_TOKEN)"
        ) from error
    except errors.HFValidationError as error:
        raise InputError(f"{name} is not a name of the hub: {_first(error)}") from error
    except (errors.HTTPError, OSError) as error:
        raise InputError(_unreachable(name, _first(error))) from error


def _first(error: Exception) -> str:
    return shortened((str(error) or type(error).__name__).splitlines()[0])


def _unreachable(name: HubName, reason: str) -> str:
    return (
        f"{name} does not exist here, the Hugging Face cache lacks it, and the hub "
        f"cannot be reached ({reason}); where there is a network, download it by "
        f"`{name.download_command}`, and give the folder"
    )
