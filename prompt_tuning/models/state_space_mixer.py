"""Base class of the mixers that compute the rule in `state_space`."""

from collections.abc import Mapping, Sequence

from jaxtyping import Array, Float

from prompt_tuning.models.memory_mixer import MemoryMixer
from prompt_tuning.models.state_space import (
    StateInputs,
    chunked_states,
    recurrent_states,
)


class StateSpaceMixer(MemoryMixer):
    """A mixer whose `factors` are a decay and a step for each head."""

    recurrent, chunked = staticmethod(recurrent_states), staticmethod(chunked_states)

    def inputs(
        self,
        mixed: Mapping[str, Float[Array, "n _ _"]],
        factors: Sequence[Float[Array, "n H"]],
    ) -> StateInputs:
        """Returns the inputs of the rule."""
        decay, step = factors
        return StateInputs(**mixed, decay=decay, step=step)
