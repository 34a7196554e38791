"""A run's model with what the run trained, or with an adapter from elsewhere."""

from collections.abc import Mapping
from pathlib import Path

import jax

from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER, steps_in
from prompt_tuning.checkpoints.run_store.checkpoint_selection import best_or_latest
from prompt_tuning.checkpoints.run_store.orbax_arrays import Leaf
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.pretrained.source import open_checkpoint
from prompt_tuning.pretrained.tuning import rebuild_tuning
from prompt_tuning.processes.group import run_on_first
from prompt_tuning.training.run_directory import check_model
from prompt_tuning.training.state import fingerprint
from prompt_tuning.training.transfer import check_shape, read_source


def load_tuned(
    run: Run, prompt_file: Path | None = None
) -> tuple[PromptedModel, Parameters]:
    """Loads a run's model for evaluation or generation.

    A run that has checkpoints of prompts or adapters is measured without any of what it
    trained where its prompts are None and its adapters empty. One that trained
    parameters of the model itself has those in any case.

    Args:
      run: with neither prompts nor adapters, the model alone, or what `prompt_file`
        says is put into it.
      prompt_file: what stands in place of all that the run trained: another run's
        directory, a checkpoint, a PEFT folder, or a prompt's file.

    Returns:
      the model, and its parameters with those of the run's best checkpoint (its newest
      where none was measured).

    Raises:
      InputError: if there is no checkpoint, or what it holds does not fit the model.
    """
    if prompt_file is not None:
        return _load_other(run, prompt_file)
    model = open_pretrained(
        run.model, run.tuning, key=jax.random.key(run.seed), mesh=run.mesh
    )
    trained, parameters = _own(run, model), model.read_parameters()
    if trained:
        everything = model.weight_storage.with_streamed(parameters)
        frozen = {p: leaf for p, leaf in everything.items() if p not in trained}
        check_model(Path(run.directory), fingerprint(frozen, model.placement))
    return model, parameters | model.put(trained)


def load_trained(run: Run, model: PromptedModel) -> Parameters:
    """Loads the trained parameters of a run's best checkpoint onto its devices.

    Raises:
      InputError: if there is no checkpoint, or it does not fit the model.
    """
    return model.put(_own(run, model))


def _own(run: Run, model: PromptedModel) -> dict[str, Leaf]:
    """What the run trained; nothing where the model alone is asked for."""
    bare = not any(map(_is_beside, model.plan.abstract))
    if bare and not (run.directory and steps_in(Path(run.directory) / FOLDER)):
        return {}
    source = read_source(best_checkpoint(run), model.config)
    if bare and any(map(_is_beside, source.leaves)):
        return {}
    _check_leaves(run.directory, source.leaves, model)
    source.check_scalings(run.tuning.loras(model.plan.abstract))
    return dict(source.leaves)


def _load_other(run: Run, path: Path) -> tuple[PromptedModel, Parameters]:
    """The run's model with what a file or folder holds, and nothing else trained."""
    tuning = run.tuning
    config = open_checkpoint(run.model)[0]
    source = read_source(path, config)
    if tuning.is_empty and any(map(_is_beside, source.leaves)):
        tuning = rebuild_tuning(source.adapter, config, run.prompting)
    model = open_pretrained(
        run.model, tuning, key=jax.random.key(run.seed), mesh=run.mesh
    )
    abstract = model.plan.abstract
    source = source.with_model_path(abstract)
    _check_leaves(str(path), source.leaves, model)
    missing = [p for p in abstract if _is_beside(p) and p not in source.leaves]
    if missing:
        raise InputError(
            f"{path} holds {', '.join(source.leaves)} and nothing for "
            f"{', '.join(missing)}, which would be untrained; leave out of the config "
            "what is not in there, or name a checkpoint that has all of it"
        )
    source.check_scalings(tuning.loras(abstract))
    return model, model.read_parameters() | model.put(source.leaves)


def _check_leaves(
    origin: str, leaves: Mapping[str, Leaf], model: PromptedModel
) -> None:
    """Refuses leaves that the model has no place for.

    Raises:
      InputError: with the first of them.
    """
    abstract = model.plan.abstract
    for path, leaf in leaves.items():
        if path in abstract:
            check_shape(origin, path, leaf, abstract[path])
            continue
        beside = [known for known in abstract if _is_beside(known)]
        raise InputError(
            f"{origin} holds {path} of shape {leaf.shape}, but the model has no such "
            f"parameter; beside the frozen ones it has {', '.join(beside) or 'none'}. "
            "Was it tuned on another model? Else set Run.prompt, Run.decoder_prompt "
            "and Run.adapters to what is in there, or for the model alone, or for what "
            "--prompt names alone, to None, None and ()"
        )


def _is_beside(path: str) -> bool:
    """Whether a parameter was put into the frozen model, and is not the model's own."""
    return "/prompt/" in path or "/adapters/" in path


def best_checkpoint(run: Run) -> Path:
    """The directory of the run's best checkpoint, its newest where none was measured.

    Raises:
      InputError: if there is none, or all are damaged.
    """
    folder = Path(run.directory) / FOLDER
    return folder / run_on_first(lambda: best_or_latest(folder).name)
