"""Writes Hugging Face folders of models with random weights."""

from pathlib import Path

import jax
import numpy as np

from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import split
from prompt_tuning.families.hf_folder import write_folder
from prompt_tuning.models.build import build_model


def write_random_model(folder: Path, config: ModelConfig) -> None:
    """Writes a model with weights from its own initializers."""
    _, parameters = split(build_model(jax.random.key(0), config))
    arrays = {path: np.asarray(leaf) for path, leaf in parameters.items()}
    write_folder(folder, config, arrays)
