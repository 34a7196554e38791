"""Load a run's model with its trained parameters, or with another adapter."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER, steps_in
from prompt_tuning.checkpoints.run_store.checkpoint_selection import (
    best_or_latest,
    best_step,
)
from prompt_tuning.checkpoints.run_store.orbax_arrays import Leaf
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.decoding.prompt_prefixes import is_added
from prompt_tuning.pretrained.frozen_fingerprint import fingerprint
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.pretrained.source import open_checkpoint
from prompt_tuning.pretrained.tuning import Tuning, rebuild_tuning
from prompt_tuning.pretrained.weight_storage import HOST
from prompt_tuning.processes.group import run_on_first
from prompt_tuning.training.run_directory import check_model
from prompt_tuning.training.transfer import check_shape, read_source
from prompt_tuning.tuned.adapter_texts import check_same_tokenizer


def load_tuned(
    run: Run, prompt_file: Path | None = None, reuse: Parameters | None = None
) -> tuple[PromptedModel, Parameters]:
    """Loads a run's model for evaluation or generation.

    If `run` has no prompts or adapters, but its checkpoints do, the frozen model is
    loaded without them. Trained parameters of the model itself are always loaded.

    Args:
      run: the run. Without prompts and adapters it is the model alone, or the model
        with the content of `prompt_file`.
      prompt_file: replaces everything that the run trained: another run's directory, a
        checkpoint, a PEFT folder, or a prompt file.
      reuse: parameters of the same frozen model, if already read.

    Returns:
      the model, and its parameters updated from the run's best checkpoint (the newest
      if none was measured).

    Raises:
      InputError: if the run has no checkpoint, or its content does not fit the model.
    """
    if prompt_file is not None:
        return _load_other(run, prompt_file, reuse)
    model = open_with(run, run.tuning)
    trained = _read_trained(run, model)
    if run.model.trained_weights == HOST:
        storage = model.weight_storage.with_trained(trained, model.plan)
        model = dataclasses.replace(model, weight_storage=storage)
    parameters = model.read_parameters(reuse, trained)
    if trained:
        everything = model.weight_storage.with_streamed(parameters)
        frozen = {p: leaf for p, leaf in everything.items() if p not in trained}
        check_model(Path(run.directory), fingerprint(frozen, model.placement))
    return model, parameters | model.put(trained)


def open_with(run: Run, tuning: Tuning) -> PromptedModel:
    """Opens a run's frozen model with other prompts and adapters."""
    key = jax.random.key(run.seed)
    return open_pretrained(run.model, tuning, key=key, mesh=run.inference_mesh)


def load_trained(run: Run, model: PromptedModel) -> Parameters:
    """Loads the trained parameters of a run's best checkpoint onto its devices.

    Raises:
      InputError: if there is no checkpoint, or it does not fit the model.
    """
    return model.put(_read_trained(run, model))


def _read_trained(run: Run, model: PromptedModel) -> dict[str, Leaf]:
    """Reads the run's trained parameters; none if only the model is requested."""
    bare = not any(map(is_added, model.plan.abstract))
    if bare and not (run.directory and steps_in(Path(run.directory) / FOLDER)):
        return {}
    checkpoint = best_checkpoint(run)
    source = read_source(checkpoint, model.config)
    if bare and any(map(is_added, source.leaves)):
        return {}
    _check_leaves(str(checkpoint), source.leaves, model)
    source.check_scalings(model.loras)
    return dict(source.leaves)


def _load_other(
    run: Run, path: Path, reuse: Parameters | None
) -> tuple[PromptedModel, Parameters]:
    """Loads the run's model with only the content of a file or folder."""
    tuning = run.tuning
    config = open_checkpoint(run.model)[0]
    source = read_source(path, config, run.model)
    if tuning.is_empty and any(map(is_added, source.leaves)):
        tuning = rebuild_tuning(source.adapter, config, run.prompting)
    model = open_with(run, tuning)
    check_same_tokenizer(path, model.tokenizer)
    abstract = model.plan.abstract
    source = source.with_model_path(abstract)
    _check_leaves(str(path), source.leaves, model)
    missing = [p for p in abstract if is_added(p) and p not in source.leaves]
    if missing:
        raise InputError(
            f"{path} contains {', '.join(source.leaves)} and nothing for "
            f"{', '.join(missing)}, which would be untrained; leave these out of the "
            "config, or name a checkpoint that contains all of them"
        )
    source.check_scalings(model.loras)
    parameters = model.read_parameters(reuse, source.leaves)
    return model, parameters | model.put(source.leaves)


def _check_leaves(
    origin: str, leaves: Mapping[str, Leaf], model: PromptedModel
) -> None:
    """Checks that the model has a parameter for each leaf."""
    abstract = model.plan.abstract
    for path, leaf in leaves.items():
        if path in abstract:
            check_shape(origin, path, leaf, abstract[path])
            continue
        added = [other for other in abstract if is_added(other)]
        raise InputError(
            f"{origin} contains {path} of shape {leaf.shape}, but the model has no "
            "such parameter; in addition to the frozen ones it has "
            f"{', '.join(added) or 'none'}. Was it tuned on another model? If not, set "
            "Run.prompt, Run.decoder_prompt and Run.adapters to match it, or to None, "
            "None and () for the frozen model alone or with another adapter's file"
        )


def best_checkpoint(run: Run) -> Path:
    """Returns the run's best checkpoint, or the newest if none was measured.

    Raises:
      InputError: if the run has no checkpoint, or all are damaged.
    """
    folder = Path(run.directory) / FOLDER
    return folder / run_on_first(lambda: best_or_latest(folder).name)


def where_trained(run: Run, trained: Mapping[str, Any]) -> str:
    """Returns a line with the checkpoint that evaluation and generation use."""
    folder = Path(run.directory) / FOLDER
    # The digests of large files are not compared with the files again.
    step = best_step(folder, run.best_by, lambda _: None, checkpoint_files.read_state)
    step = max(steps_in(folder)) if step is None else step
    count = sum(leaf.size for leaf in trained.values())
    stored = sum(leaf.nbytes for leaf in trained.values())
    what = "adapter" if all(map(is_added, trained)) else "trained parameters"
    return (
        f"{what}: {folder / f'checkpoint_{step}'} ({count:,} parameters, "
        f"{readable_size(stored)})"
    )


def readable_size(size: int) -> str:
    """Returns a number of bytes with its unit."""
    value, units = float(size), ("bytes", "kB", "MB", "GB", "TB")
    for unit in units:
        if value < 1000 or unit == units[-1]:
            break
        value /= 1000
    return f"{value:.3g} {unit}"
