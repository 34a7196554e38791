"""Settings in `config.json`, with errors that name the file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_sizes import MAXIMUM_LAYERS, MAXIMUM_SIZE
from prompt_tuning.core.typed_json import REQUIRED, JsonObject, read_object

SMALLEST, LARGEST = 1e-30, 1e30
"""Bounds of positive numbers, which float32 can represent."""

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
"""Our names of the activations in transformers."""

ModelFields = dict[str, Any]
"""Fields of `ModelConfig`, by name."""

MAXIMUM_CONFIG = 2**24
"""Maximum size of `config.json` in bytes."""


class HuggingFaceSettings(JsonObject):
    """The settings in a `config.json`.

    A missing or null setting has transformers' default.
    """

    def size(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns the size of an axis."""
        return self.integer(name, default, minimum=1, maximum=MAXIMUM_SIZE)

    def layers(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns a number of layers."""
        return self.integer(name, default, minimum=1, maximum=MAXIMUM_LAYERS)

    def positive(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns a positive number."""
        return self.number(name, default, minimum=SMALLEST, maximum=LARGEST)

    def require(self, name: str, default: Any, reason: str) -> None:
        """Checks that a setting has its default value.

        Raises:
          InputError: gives the reason, if it does not.
        """
        if self.value(name, default) != default:
            self.refuse(name, f"{default!r}: {reason}")

    def choose(self, name: str, accepted: tuple[str, ...]) -> None:
        """Checks that a setting is absent or one of some texts."""
        if name in self and self.value(name) not in accepted:
            self.refuse(name, " or ".join(map(repr, accepted)))

    def part(
        self, name: str, defaults: Mapping[str, Any] | None = None
    ) -> "HuggingFaceSettings":
        """Returns the settings for a part of the model, with some defaults."""
        part = self.nested(name)
        return type(self)(part.source, part.values).with_defaults(defaults or {})

    def with_defaults(self, defaults: Mapping[str, Any]) -> "HuggingFaceSettings":
        """Returns the settings with some defaults."""
        values = dict(defaults)
        for key, value in self.values.items():
            # A null without a default may mean something else than a missing setting.
            if value is not None or key not in values:
                values[key] = value
        return type(self)(self.source, values)

    def activation(self, name: str) -> str:
        """Returns our name of an activation."""
        if name not in ACTIVATIONS:
            raise InputError(
                f"{self.source} has the activation {shown(name)}, expected one of "
                f"{', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[name]

    def head_width(self, width: int, heads: int) -> int:
        """Returns the width of each head, if heads divide the model's width.

        Raises:
          InputError: if they do not divide it evenly.
        """
        if width % heads:
            raise InputError(
                f"{self.source} has a width of {width:,}, which is not a multiple of "
                f"its {heads:,} heads"
            )
        return width // heads


def activation_setting(activation: str) -> str:
    """Returns transformers' name of one of our activations."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == activation)


def read_settings(file: Path) -> HuggingFaceSettings:
    """Reads a `config.json`.

    Raises:
      InputError: if the file is missing or is not a JSON object.
    """
    if not file.exists():
        raise InputError(
            f"{file} is missing; expected the folder of a Hugging Face model"
        )
    settings = read_object(file, maximum_bytes=MAXIMUM_CONFIG).values
    return HuggingFaceSettings(str(file), settings)
