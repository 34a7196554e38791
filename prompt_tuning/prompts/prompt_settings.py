"""How a prompt stands among the text: settings, checked before anything is built."""

import dataclasses
from collections.abc import Sequence

from jaxtyping import Array, Int

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.masks import Visibility
from prompt_tuning.prompts.placement import PLACEMENTS, TEMPLATE


@dataclasses.dataclass(frozen=True)
class Prompting:
    """How a prompt stands among the text.

    Attributes:
      placement: where in the row: "prefix", "after_bos", "suffix" (in an encoder's row
        before its EOS), "suffix_after_eos", or "template" where the data says.
      prefix_attention: in a decoder-only model, whether the prompt and the row's given
        tokens see each other both ways, as in a prefix language model.
      visibility: what the prompt sees where it and text may see each other both ways
        (encoders, `prefix_attention`): some of "prompt->prompt",
        "prompt->prompt;causal" and "prompt->input"; all of the row if None. Text sees
        the prompt in any case. A prompt that sees no text and stands first runs once
        for the batch.
      execution: "shared" or "joined"; "auto" is shared wherever that is right.
    """

    placement: str = "prefix"
    prefix_attention: bool = False
    visibility: Sequence[str] | None = None
    execution: str = "auto"

    def __post_init__(self):
        if self.placement not in (*PLACEMENTS, TEMPLATE):
            raise InputError(
                f"placement is {self.placement!r}, expected one of "
                f"{', '.join((*PLACEMENTS, TEMPLATE))}"
            )
        if self.execution not in ("auto", "shared", "joined"):
            raise InputError(
                f"execution is {self.execution!r}, expected auto, shared or joined"
            )
        if isinstance(self.visibility, str):
            raise InputError(
                f"visibility is {self.visibility!r}, expected a list of texts"
            )
        if self.visibility is not None:
            # A tuple, so that models that differ in nothing have one structure.
            object.__setattr__(self, "visibility", tuple(self.visibility))
            Visibility.from_names(self.visibility)

    @property
    def sees(self) -> Visibility:
        """What the prompt sees where the mask leaves it a choice."""
        if self.visibility is None:
            return Visibility()
        return Visibility.from_names(self.visibility)

    def shared(self, *, causal: bool) -> bool:
        """Whether the prompt runs once for the batch.

        Args:
          causal: whether the stack is a decoder's.

        Raises:
          InputError: if "shared" was asked for where it would give other numbers.
        """
        sees_text = self.sees.input and (self.prefix_attention or not causal)
        possible = self.placement == "prefix" and not sees_text
        if self.execution == "shared" and not possible:
            raise InputError(
                "execution is 'shared', but the prompt sees text or does not stand "
                "first here; use 'auto' or 'joined'"
            )
        return possible and self.execution != "joined"

    def place(
        self, lengths: Int[Array, "*lead"], ends_with_eos: bool
    ) -> Int[Array, "*lead"]:
        """How many tokens stand before the prompt of each example; see `Placement`."""
        return PLACEMENTS[self.placement](lengths, ends_with_eos)

    def check(self, architecture: str) -> None:
        """Refuses what a family of models has no choice in.

        Raises:
          InputError: with what to leave out.
        """
        if architecture == "encoder_decoder" and self.prefix_attention:
            raise InputError(
                "prefix_attention is for decoder-only models: an encoder's tokens see "
                "each other anyway"
            )
        bidirectional = architecture == "encoder_decoder" or self.prefix_attention
        if self.visibility is not None and not bidirectional:
            raise InputError(
                "visibility is for encoders and for prefix_attention: in a causal "
                "decoder a prompt sees what stands before it, and nothing else"
            )
