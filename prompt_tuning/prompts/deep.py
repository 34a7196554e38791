"""Deep prompts: vectors of their own for the prompt's positions in every block.

The first block's vectors stand among the input like a soft prompt's, and run as they
do: as a shared stream where the prompt stands first and sees no text, joined to the
text everywhere else. At each later block they meet what the block before made.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from prompt_tuning.core.errors import InputError
from prompt_tuning.prompts.initializers import Initializer, StackShape, Vocabulary
from prompt_tuning.prompts.soft import InputPrompt, initial_vectors

# Not the "layers" of what each block puts together for itself: the vectors of all
# blocks enter the stack from outside.
DEEP_AXES = ("prompt_layers", "prompt", "prompt_embed")


class DeepPrompt(InputPrompt):
    """Vectors that replace what the block before made (Liu et al. 2022, section 3.2).

    `PromptEncoderLayer` of google-research/prompt-tuning with `replace_prompt`.

    Attributes:
      prompt: `[L, P, D]`, float32.
    """

    at_every_block = True

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: int,
        initializer: Initializer | None = None,
    ):
        """Starts the vectors, those of all blocks alike.

        Args:
          key: random key of the initialiser.
          vocabulary: of the frozen model; gives the width and the blocks.
          length: vectors `P` of each block, at least 1.
          initializer: `f(key, (P, D), vocabulary)`; uniform on `[0, 0.5)` if None.

        Raises:
          InputError: if the length is below 1, or the initialiser refuses.
        """
        first = initial_vectors(key, vocabulary, length, initializer)
        layers = needed_stack(vocabulary, type(self).__name__).layers
        initial = jnp.broadcast_to(first, (layers, *first.shape))
        self.prompt = nnx.Param(initial, axes=DEEP_AXES)

    @staticmethod
    def at_block(
        hidden: Float[Array, "*lead D"], vectors: Float[Array, "*lead D"]
    ) -> Float[Array, "*lead D"]:
        """What enters a block after the first at the prompt's positions."""
        del hidden
        return vectors

    @property
    def length(self) -> int:
        """Vectors `P` of each block."""
        return self.prompt.shape[-2]

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "P D"]:
        """The first block's vectors."""
        del key
        return self.every_block()[0]

    def every_block(self) -> Float[Array, "L P D"]:
        """The vectors of all blocks."""
        return self.prompt[...]


class AddedDeepPrompt(DeepPrompt):
    """A soft prompt, and vectors that later blocks add to what became of it.

    `PromptEncoderLayer` of google-research/prompt-tuning with `add_prompt`. The soft
    prompt has the path that it has alone, so that a run may start from a tuned one.

    Attributes:
      prompt: of the first block, `[P, D]`, float32.
      added: of the others, `[L - 1, P, D]`, float32, zero at first.
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: int,
        initializer: Initializer | None = None,
    ):
        """Starts the soft prompt; arguments and errors as for `DeepPrompt`."""
        first = initial_vectors(key, vocabulary, length, initializer)
        layers = needed_stack(vocabulary, type(self).__name__).layers
        later = jnp.zeros((layers - 1, *first.shape))
        self.prompt = nnx.Param(first, axes=("prompt", "prompt_embed"))
        self.added = nnx.Param(later, axes=DEEP_AXES)

    @staticmethod
    def at_block(
        hidden: Float[Array, "*lead D"], vectors: Float[Array, "*lead D"]
    ) -> Float[Array, "*lead D"]:
        """What enters a block after the first at the prompt's positions."""
        return hidden + vectors

    def every_block(self) -> Float[Array, "L P D"]:
        """The vectors of all blocks."""
        return jnp.concatenate([self.prompt[None], self.added[...]])


def needed_stack(vocabulary: Vocabulary, name: str) -> StackShape:
    """The shape of the stack that a prompt is put into.

    Raises:
      InputError: if it is not known.
    """
    if vocabulary.stack is None:
        raise InputError(
            f"{name} has vectors for every block, but nothing says how many blocks "
            "there are; let open_pretrained make it, or give Vocabulary a StackShape"
        )
    return vocabulary.stack
