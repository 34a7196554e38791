"""A run's model with what the run trained, or with a prompt from elsewhere."""

from pathlib import Path

import jax
import jax.numpy as jnp

from prompt_tuning.checkpoints import checkpoint_files
from prompt_tuning.checkpoints.prompt_files import read_prompt
from prompt_tuning.checkpoints.store import FOLDER, best_or_latest
from prompt_tuning.errors import InputError
from prompt_tuning.models.parameters import Parameters
from prompt_tuning.pretrained import PromptedModel, open_pretrained
from prompt_tuning.run import Run
from prompt_tuning.training.run_directory import check_model
from prompt_tuning.training.state import fingerprint


def load_tuned(
    run: Run, prompt_file: Path | None = None
) -> tuple[PromptedModel, Parameters]:
    """Loads a run's model for evaluation or generation.

    Args:
      run: with `prompt` None the model alone is loaded.
      prompt_file: a prompt in place of what the run trained.

    Returns:
      the model, and its parameters with those of the run's best checkpoint (its newest
      where none was measured).

    Raises:
      InputError: if there is no checkpoint, or what it holds does not fit the model.
    """
    key = jax.random.key(run.seed)
    model = open_pretrained(
        run.model, prompt=run.prompt, prompting=run.prompting, key=key
    )
    trained, parameters = {}, model.read_parameters()
    if prompt_file is not None:
        trained = {_prompt_path(model): read_prompt(prompt_file)}
    elif run.prompt is not None and _prompt_paths(model):
        checkpoint = best_checkpoint(run)
        state = checkpoint_files.verify(checkpoint)
        trained = checkpoint_files.read_trained(checkpoint, state)
        frozen = {p: leaf for p, leaf in parameters.items() if p not in trained}
        check_model(Path(run.directory), fingerprint(frozen))
    for path, leaf in trained.items():
        known = model.plan.abstract.get(path)
        if known is None or known.shape != leaf.shape:
            found = "no such parameter" if known is None else f"shape {known.shape}"
            raise InputError(
                f"{prompt_file or run.directory} holds {path} of shape {leaf.shape}, "
                f"but the model has {found}; was it tuned on another model, or with "
                "another prompt length?"
            )
    tuned = {path: jnp.asarray(leaf) for path, leaf in trained.items()}
    return model, parameters | tuned


def best_checkpoint(run: Run) -> Path:
    """The directory of the run's best checkpoint, its newest where none was measured.

    Raises:
      InputError: if there is none, or all are damaged.
    """
    return best_or_latest(Path(run.directory) / FOLDER)


def _prompt_paths(model: PromptedModel) -> list[str]:
    """Prompts that are parameters; a constant one has none, and no checkpoint."""
    return [path for path in model.plan.abstract if "/prompt/" in path]


def _prompt_path(model: PromptedModel) -> str:
    paths = _prompt_paths(model)
    if len(paths) != 1:
        raise InputError(
            f"the model has the prompt parameters {paths}; a prompt file is for a "
            "model with exactly one"
        )
    return paths[0]
