"""Where a prompt stands, what it sees and how it is computed."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.visibility import Visibility

Position = Literal["prefix", "after_bos", "suffix", "suffix_after_eos", "template"]


@dataclasses.dataclass(frozen=True)
class Prompting:
    """Where a prompt stands in the row, what it sees, and how it is computed.

    The defaults suit most runs: the prompt comes before the text, and is computed once
    for the whole batch wherever that gives the same numbers.

    Attributes:
      placement: position in the row: "prefix", "after_bos", "suffix" (before the EOS of
        an encoder's row), "suffix_after_eos", or "template" if the data sets it
        (`DataSource.template`).
      prefix_attention: whether, in a decoder-only model, the prompt and the row's given
        tokens attend to each other in both directions, as in a prefix language model.
      visibility: what the prompt sees where attention is bidirectional (encoders,
        `prefix_attention`): any of "prompt->prompt", "prompt->prompt;causal" and
        "prompt->input"; None for the whole row. Text always sees the prompt.
      execution: "shared" computes the prompt once per batch, which requires that it
        comes first and sees no text; "joined" computes it in each row; "auto" shares
        wherever possible.
      beyond_window: whether layers with a sliding window keep the prompt or prefix in
        sight of every token. If False, it leaves the window like any token, as in PEFT.

    Raises:
      InputError: if a value is unknown, or settings contradict each other or the model.

    Examples:
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     pairs,
      ...     prompting=pt.Prompting(placement="after_bos"),
      ...     steps=2,
      ...     progress=False,
      ... )
      >>> tuned.run.prompting.placement
      'after_bos'
    """

    placement: Position = "prefix"
    prefix_attention: bool = False
    visibility: Sequence[str] | None = None
    execution: Literal["auto", "shared", "joined"] = "auto"
    beyond_window: bool = False

    def __post_init__(self):
        check_fields(self)
        if self.visibility is not None:
            # A hashable tuple, so that equal settings give equal model structures.
            object.__setattr__(self, "visibility", tuple(self.visibility))
            Visibility.from_names(self.visibility)

    @property
    def sees(self) -> Visibility:
        """The prompt's visibility where attention is bidirectional."""
        if self.visibility is None:
            return Visibility()
        return Visibility.from_names(self.visibility)

    def shared(self, *, causal: bool) -> bool:
        """Whether the prompt is computed once per batch.

        Args:
          causal: whether the stack is a decoder's.

        Raises:
          InputError: if execution is "shared" but that would change the results.
        """
        sees_text = self.sees.input and (self.prefix_attention or not causal)
        possible = self.placement == "prefix" and not sees_text
        if self.execution == "shared" and not possible:
            raise InputError(
                "execution is 'shared', but the prompt sees text or does not come "
                "first here; use 'auto' or 'joined'"
            )
        shared = possible and self.execution != "joined"
        if self.beyond_window and not shared:
            raise InputError(
                "beyond_window needs a prompt that comes first, sees no text and is "
                "not 'joined'; leave it out"
            )
        return shared

    def joined_by_row(self, reason: str) -> "Prompting":
        """Returns the settings for a prompt that must be inserted into each row.

        Args:
          reason: the reason, for the message.

        Raises:
          InputError: if execution is "shared".
        """
        if self.execution == "shared":
            raise InputError(
                f"execution is 'shared', but {reason}; use 'auto' or 'joined'"
            )
        return dataclasses.replace(self, execution="joined")

    def check_windows(self, windowed_layers: Sequence[int]) -> None:
        """Checks that `beyond_window` is set only for models with windows.

        Raises:
          InputError: if no layer has a window.
        """
        if self.beyond_window and not windowed_layers:
            raise InputError(
                "beyond_window is set, but no layer of this model has a window; leave "
                "it out"
            )

    def check(self, config: ModelConfig) -> None:
        """Checks that a model supports the settings.

        Raises:
          InputError: naming the setting to leave out.
        """
        encodes = config.bidirectional or config.architecture == "encoder_decoder"
        if encodes and self.prefix_attention:
            raise InputError(
                "prefix_attention is for decoder-only models: an encoder's tokens see "
                "each other anyway"
            )
        bidirectional = encodes or self.prefix_attention
        if self.visibility is not None and not bidirectional:
            raise InputError(
                "visibility is for encoders and for prefix_attention: in a causal "
                "decoder a prompt only sees what precedes it"
            )
