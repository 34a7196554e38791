"""Deep prompts: separate vectors for the prompt's positions in every block.

The first block's vectors are part of the input like a soft prompt, and run in the same
way: as a shared stream if the prompt comes first and sees no text, else joined to the
text. In each later block the vectors meet the output of the previous block.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.number_ranges import AxisLength
from prompt_tuning.prompts.initializers import Initializer, Vocabulary
from prompt_tuning.prompts.prompt_module import (
    Attachment,
    ExportedPrompt,
    InputPrompt,
    StoredForm,
    initial_vectors,
)

DEEP = "DEEP_PROMPT"
ADDED_DEEP = "ADDED_DEEP_PROMPT"

# Not the axis "layers" of parameters that each block owns: the vectors of all blocks
# enter the stack from outside.
DEEP_AXES = ("prompt_layers", "prompt", "prompt_embed")


class DeepPrompt(InputPrompt):
    """Separate vectors in every block, at the positions of the prompt (P-tuning v2).

    In each block they replace the previous block's output (Liu et al. 2022, section
    3.2; `PromptEncoderLayer` of google-research/prompt-tuning with `replace_prompt`).
    Prefer it to `SoftPrompt` on small models: it has `L` times the parameters at the
    same cost per step. `KeyValuePrefix` is its cheaper relative.

    Args:
      length: number of vectors `P` in each block, at least 1.
      initializer: where the vectors start, with the same values in every block; uniform
        on `[0, 0.5)` if None.

    Attributes:
      prompt: `[L, P, D]`, float32.

    Raises:
      InputError: if the length is below 1, or the initializer fails.

    Examples:
      >>> trained, _ = model.attach(pt.DeepPrompt(length=5)).partition()
      >>> trained["decoder/prompt/prompt"].shape
      (4, 5, 128)
    """

    attachment = Attachment.EVERY_BLOCK
    form = StoredForm(DEEP, {"prompt": "L P D"})

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: AxisLength,
        initializer: Initializer | None = None,
    ):
        first = initial_vectors(key, vocabulary, length, initializer)
        layers = vocabulary.stack_for(type(self).__name__).layers
        self._declare(first, layers)

    def _declare(self, first: Float[Array, "P D"], layers: int) -> None:
        """Declares the parameters, which start at the same vectors in every block."""
        initial = jnp.broadcast_to(first, (layers, *first.shape))
        self.prompt = nnx.Param(initial, axes=DEEP_AXES)

    @property
    def length(self) -> int:
        """Number of vectors `P` in each block."""
        return self.prompt.shape[-2]

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "P D"]:
        """Returns the first block's vectors."""
        del key
        return self.block_values()[0]

    def block_values(self) -> Float[Array, "L P D"]:
        """The vectors of all blocks."""
        return self.prompt[...]

    def enter_block(
        self, hidden: Float[Array, "*lead D"], values: Float[Array, "*lead D"]
    ) -> Float[Array, "*lead D"]:
        """Replaces the previous block's output."""
        del hidden
        return values

    def export(self) -> ExportedPrompt:
        """Exports the vectors of all blocks."""
        return ExportedPrompt(DEEP, {"prompt": np.asarray(self.block_values())})


class AddedDeepPrompt(DeepPrompt):
    """A soft prompt, plus vectors added to its hidden states in later blocks.

    `PromptEncoderLayer` of google-research/prompt-tuning with `add_prompt`. The added
    vectors start at zero, and the soft prompt has the same path as on its own, so a
    tuned `SoftPrompt` is a good start: `tune(..., start_from="runs/soft")`.

    Args:
      length: number of vectors `P`, at least 1.
      initializer: where the soft prompt starts; uniform on `[0, 0.5)` if None.

    Attributes:
      prompt: vectors of the first block, `[P, D]`, float32.
      added: vectors of the other blocks, `[L - 1, P, D]`, float32; initially zero.

    Raises:
      InputError: if the length is below 1, or the initializer fails.

    Examples:
      >>> trained, _ = model.attach(pt.AddedDeepPrompt(length=5)).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/prompt/added (3, 5, 128)
      decoder/prompt/prompt (5, 128)
    """

    form = StoredForm(ADDED_DEEP, {"prompt": "P D", "added": "later P D"})

    def _declare(self, first: Float[Array, "P D"], layers: int) -> None:
        self.prompt = nnx.Param(first, axes=("prompt", "prompt_embed"))
        self.added = nnx.Param(jnp.zeros((layers - 1, *first.shape)), axes=DEEP_AXES)

    def block_values(self) -> Float[Array, "L P D"]:
        """The vectors of all blocks."""
        return jnp.concatenate([self.prompt[None], self.added[...]])

    def enter_block(
        self, hidden: Float[Array, "*lead D"], values: Float[Array, "*lead D"]
    ) -> Float[Array, "*lead D"]:
        """Adds the vectors to the previous block's output."""
        return hidden + values

    def export(self) -> ExportedPrompt:
        """Exports both parameters."""
        added = np.asarray(self.added[...])
        return ExportedPrompt(
            ADDED_DEEP, {"prompt": np.asarray(self()), "added": added}
        )
