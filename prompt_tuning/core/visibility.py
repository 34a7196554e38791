"""The positions that prompt vectors attend to, where attention is bidirectional."""

import dataclasses
from collections.abc import Iterable

from prompt_tuning.core.errors import InputError, shown

ALWAYS = ("input->input", "input->prompt")
PROMPT_TO_PROMPT = "prompt->prompt"
PROMPT_TO_PROMPT_CAUSAL = "prompt->prompt;causal"
PROMPT_TO_INPUT = "prompt->input"
VISIBLE = (*ALWAYS, PROMPT_TO_PROMPT, PROMPT_TO_PROMPT_CAUSAL, PROMPT_TO_INPUT)


@dataclasses.dataclass(frozen=True)
class Visibility:
    """What prompt vectors attend to, where prompt and text attend in both directions.

    Text attends to text and to every prompt vector.

    Attributes:
      prompt: whether a vector attends to the other vectors of its prompt; it always
        attends to itself.
      causal: whether it attends only to the vectors before it; ignored unless `prompt`.
      input: whether it attends to text.
    """

    prompt: bool = True
    causal: bool = False
    input: bool = True

    @classmethod
    def from_names(cls, names: Iterable[str]) -> "Visibility":
        """Parses the names that google-research/prompt-tuning uses.

        If both "prompt->prompt" and "prompt->prompt;causal" are given, the causal one
        wins.

        Raises:
          InputError: if a name is unknown.
        """
        names = set(names)
        if unknown := sorted(names - set(VISIBLE)):
            raise InputError(
                f"visibility names {shown(unknown[0])}, expected some of "
                f"{', '.join(map(repr, VISIBLE))}"
            )
        causal = PROMPT_TO_PROMPT_CAUSAL in names
        prompt = causal or PROMPT_TO_PROMPT in names
        return cls(prompt, causal, PROMPT_TO_INPUT in names)
