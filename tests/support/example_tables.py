"""Examples loaded for a model that is described by its properties alone."""

import dataclasses
from typing import Any

from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.settings.data_source import DataSource

MODEL_FIELDS = {field.name for field in dataclasses.fields(ModelInterface)}


def load_for(
    files: Any, architecture: Any = "decoder_only", *, context_ids=(), **choices: Any
) -> Examples:
    """Loads files; `choices` are fields of `ModelInterface` and of `DataSource`.

    The vocabulary has 70 tokens unless `choices` set it.
    """
    several = files if isinstance(files, list) else [files]
    model = {name: choices.pop(name) for name in MODEL_FIELDS & set(choices)}
    model = {"architecture": architecture, "vocabulary_size": 70} | model
    source = DataSource(files=[str(file) for file in several], **choices)
    return load_examples(source, ModelInterface(**model), context_ids=context_ids)
