"""Key/value prefixes for models in which some layers have a state instead of keys."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.number_ranges import AxisLength
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.prefix import KeyValuePrefix, PrefixInitializer
from prompt_tuning.prompts.prompt_module import ExportedPrompt, StoredForm

KIND = "STATE_PREFIX"
STATE = "/prompt/state"
"""End of the path of the states."""


class StatePrefix(KeyValuePrefix):
    """A prefix for models with recurrent layers, which get a trained initial state.

    Layers with attention read `P` trained keys and values, as with `KeyValuePrefix`.
    Recurrent layers (Mamba, gated delta rule, short convolution) begin every text with
    a trained state, as if they had read those positions: the window of their
    convolution, and the memory of each head. This costs them no time. Use it for hybrid
    models such as Qwen 3.5, Granite 4, Nemotron-H or LFM2, and `KeyValuePrefix` for all
    others. PEFT has no such prompt.

    Args:
      length: number of positions `P`, at least 1.
      initializer: where keys and values start; `normal()` if None. States start at 0,
        as in the model without a prompt.

    Attributes:
      prompt: keys and values of the layers with attention, `[L, 2, P, G, K]`.
      state: initial state of each of the `M` recurrent layers, `[M, S]`, float32: the
        window `[W, C]`, then the memory `[H, K, V]` if the layer has one.

    Raises:
      InputError: if no layer is recurrent, or for the reasons of `KeyValuePrefix`.

    Examples:
      >>> model.attach(pt.StatePrefix(length=5))
      Traceback (most recent call last):
      ...
      prompt_tuning.core.errors.InputError: StatePrefix trains the initial state of ...
    """

    form = StoredForm(KIND, {"prompt": "L 2 P G K", "state": "M S"})

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: AxisLength,
        initializer: PrefixInitializer | None = None,
    ):
        stack = vocabulary.stack_for(type(self).__name__)
        if stack.states is None:
            raise InputError(
                "StatePrefix trains the initial state of recurrent layers, and this "
                "model has none: use KeyValuePrefix"
            )
        layers = stack.layers - stack.states.others
        with_keys = dataclasses.replace(vocabulary, stack=stack._replace(layers=layers))
        super().__init__(key, with_keys, length=length, initializer=initializer)
        if with_keys.prefix_starts:
            raise InputError(
                "StatePrefix cannot start from a text: use normal() as its initializer"
            )
        self.sizes = stack.states
        shape = self.sizes.layers, self.sizes.size
        self.state = nnx.Param(jnp.zeros(shape), axes=("prompt_layers", "prompt_state"))

    def initial_state(
        self,
    ) -> tuple[Float[Array, "M W C"], Float[Array, "M H K V"] | None]:
        """Returns the windows of convolutions, and the memories or None."""
        sizes, state = self.sizes, self.state[...]
        window, memory = jnp.split(state, [int(np.prod(sizes.window))], axis=1)
        window = window.reshape(len(state), *sizes.window)
        if sizes.memory is None:
            return window, None
        return window, memory.reshape(len(state), *sizes.memory)

    def export(self) -> ExportedPrompt:
        """Exports keys, values and states."""
        arrays = {"prompt": self(), "state": self.state[...]}
        return ExportedPrompt(KIND, {name: np.asarray(x) for name, x in arrays.items()})
