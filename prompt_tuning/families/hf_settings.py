"""Settings in `config.json`, with errors that name the file."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import InputError

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
"""Our names of the activations in transformers."""


@dataclasses.dataclass(frozen=True)
class HuggingFaceSettings:
    """The settings in a `config.json`.

    Attributes:
      file: path of the file, for messages.
      raw: content of the file.
    """

    file: Path
    raw: Mapping[str, Any]

    def required(self, name: str) -> Any:
        """Returns a setting that has no default."""
        if self.raw.get(name) is None:
            raise InputError(f"{self.file} has no {name!r}, which the model needs")
        return self.raw[name]

    def optional(self, name: str, default: Any) -> Any:
        """Returns a setting, or the default that transformers uses."""
        value = self.raw.get(name)
        return default if value is None else value

    def refuse(self, name: str, default: Any, reason: str) -> None:
        """Raises `InputError` unless a setting has its default value."""
        if self.optional(name, default) != default:
            raise InputError(
                f"{self.file} has {name} = {self.raw[name]!r}, expected {default!r}: "
                f"{reason}"
            )

    def activation(self, name: str) -> str:
        """Returns our name of an activation."""
        if name not in ACTIVATIONS:
            raise InputError(
                f"{self.file} has the activation {name!r}, expected one of "
                f"{', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[name]


def activation_setting(activation: str) -> str:
    """Returns the name in transformers of one of our activations."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == activation)


def read_settings(file: Path) -> HuggingFaceSettings:
    """Reads a `config.json`.

    Raises:
      InputError: if the file is missing or is not a JSON object.
    """
    try:
        raw = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise InputError(
            f"{file} is missing; expected the folder of a Hugging Face model"
        ) from error
    except ValueError as error:
        raise InputError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{file} contains JSON that is not an object")
    return HuggingFaceSettings(file, raw)
