"""An adapter with everything needed to read its texts."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from prompt_tuning.core.adapter_names import shown_name
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.decoding.prompt_prefixes import PromptPrefixes, adapted_digest
from prompt_tuning.decoding.row_checks import row_room
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.text_encoding import TextEncoding


@dataclasses.dataclass(frozen=True)
class LoadedAdapter:
    """An adapter, or the model alone, that texts choose by name.

    Attributes:
      key: the engine's name for it; None for the model alone.
      encoding: how its texts are encoded; includes the model with the adapter.
      parameters: all parameters of that model by path.
      path: where it was read from; None for the model's own adapter.
      prefixes: keys and values of each of its prompts; None to compute them.
      created: time at which it was read, in seconds since the epoch.
    """

    key: str | None
    encoding: TextEncoding
    parameters: Parameters
    path: Path | None = None
    prefixes: Sequence[PromptPrefixes] | None = None
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """The name that texts use, e.g. `base` for the model alone."""
        return shown_name(self.key)

    @property
    def model(self) -> PromptedModel:
        """The model with the adapter."""
        return self.encoding.model

    def room_for(self, given: int, new: int) -> int:
        """Returns the number of slot positions for `given` and `new` tokens."""
        return row_room(self.model, given, new)

    def digest(self) -> str:
        """Returns a digest of all weights and settings that affect its results."""
        return adapted_digest(self.model, self.parameters).tobytes().hex()
