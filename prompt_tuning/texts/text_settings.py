"""Settings of a command or a call that continues texts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import NonnegativeInteger, PositiveInteger
from prompt_tuning.decoding.beam_search import BeamSearch
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.settings.rollout_settings import NEW_TOKENS

ANSWER_TOKENS = 256
"""Default maximum number of new tokens in a conversation, if there is room."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextSettings:
    """How texts are continued.

    Attributes:
      sampling: how tokens are chosen; `new_tokens` below takes precedence over its own.
      beams: settings of beam search, or None to sample.
      new_tokens: maximum number of new tokens; None for `default_new_tokens`.
      chat: whether a text is a user's message, rendered with the chat template.
      system: system message before it, or None.
      chat_template_kwargs: variables for the chat template, or None.
      adapter: name of the adapter; see `Texts.find`.
      prompt_id: number of the prompt, if the adapter has more than one.
      slots: number of rows that run together.
    """

    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    beams: BeamSearch | None = None
    new_tokens: PositiveInteger | None = None
    chat: bool = False
    system: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    adapter: str | None = None
    prompt_id: NonnegativeInteger | None = None
    slots: PositiveInteger = 32

    def __post_init__(self):
        check_fields(self, prefix="")

    @property
    def results(self) -> int:
        """Number of completions per text."""
        return self.sampling.n if self.beams is None else self.beams.returned


def default_new_tokens(room: int | None, chat: bool) -> int:
    """Returns the default maximum number of new tokens.

    Args:
      room: number of positions of the model or of a slot; None for no limit.
      chat: whether the text is an answer, which may take half of the positions.
    """
    if not chat:
        return NEW_TOKENS
    return ANSWER_TOKENS if room is None else min(ANSWER_TOKENS, max(room // 2, 1))
