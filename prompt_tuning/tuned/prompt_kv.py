"""Store a prompt's keys and values next to it, for engines that load it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from prompt_tuning.config.config_values import CONFIG_FILE
from prompt_tuning.config.flat_config import frozen_config
from prompt_tuning.config.gin_files import read_run, read_run_directory
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.decoding.prompt_prefixes import write_prefixes
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.training.run_directory import hold_run
from prompt_tuning.tuned.load_tuned import load_tuned


def store_prompt_kv(
    path: Path,
    base_model: str | None = None,
    bindings: Sequence[str] = (),
    *,
    allow_imports: bool = False,
    force: bool = False,
) -> str:
    """Computes the keys and values of an adapter's prompts, and stores them next to it.

    `allow_imports` lets a run's config import modules, which runs their code. Returns a
    line that describes what was written.

    Raises:
      InputError: if the adapter cannot be read, or has no such prompt.
    """
    if (path / CONFIG_FILE).is_file():
        if base_model is not None:
            raise InputError(f"{path} is a run, which names its model: no --base_model")
        run = read_run_directory(path, bindings, allow_imports=allow_imports)
        with hold_run(path):
            return _store(path, *load_tuned(dataclasses.replace(run, mesh=None)), force)
    if base_model is None:
        raise InputError(f"{path} is not a run: name its model by --base_model PATH")
    files, lines = frozen_config({"model": base_model}, bindings)
    run = read_run(files, bindings, defaults=lines, allow_imports=allow_imports)
    return _store(path, *load_tuned(run, path), force)


def _store(
    path: Path, model: PromptedModel, parameters: Parameters, force: bool
) -> str:
    file, count = write_prefixes(path, model, parameters, force=force)
    layers, prompts = model.config.layers, model.prompt_count
    of = f" of {prompts} prompts" if prompts > 1 else ""
    return f"{file}: keys and values at {count} positions{of}, {layers} layers"
