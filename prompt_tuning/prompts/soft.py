"""Soft prompts: prompt vectors in the input, shared by all examples."""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.adapters.adapter import PROMPT
from prompt_tuning.core.number_ranges import AxisLength
from prompt_tuning.prompts.initializers import Initializer, Vocabulary
from prompt_tuning.prompts.prompt_module import (
    Constant,
    InputPrompt,
    StoredForm,
    initial_vectors,
)


class TrainedVectors(InputPrompt):
    """Base class of prompts whose vectors are one parameter.

    Attributes:
      prompt: the vectors, `[P, D]`, or those of `N` prompts, `[N, P, D]`; in float32
        whatever the model computes in.
    """

    prompt: nnx.Param

    @property
    def length(self) -> int:
        """Number of vectors `P` of a prompt, including padding."""
        return self.prompt.shape[-2]

    def __call__(
        self, key: Key[Array, ""] | None = None
    ) -> Float[Array, "P D"] | Float[Array, "N P D"]:
        """Returns the vectors, including padding."""
        del key
        return self.prompt[...]


class SoftPrompt(TrainedVectors):
    """Trained vectors in the input: prompt tuning (Lester et al. 2021, section 2).

    All examples share the `P` vectors. Start here: you train a few kilobytes, you can
    serve any number of such prompts over one model, and PEFT reads the result. Lester
    et al. find it as good as full tuning from about ten billion parameters on; on
    smaller models `DeepPrompt`, `KeyValuePrefix` or `LoRA` usually reach a lower loss.

    Args:
      length: number of vectors `P`, at least 1; 5 to 100 are common.
      initializer: where the vectors start, e.g. `from_text("Reverse the word:")`;
        uniform on `[0, 0.5)` if None. Embeddings of words usually train faster.

    Attributes:
      prompt: the vectors, `[P, D]`, in float32 whatever the model computes in.

    Raises:
      InputError: if the length is below 1, or the initializer fails.

    Examples:
      >>> prompt = pt.SoftPrompt(length=5)
      >>> tuned = pt.tune(model, prompt, pairs, steps=2, progress=False)
      >>> tuned.prompt_vectors()["decoder/prompt"].shape
      (5, 128)
    """

    form = StoredForm(PROMPT, {"prompt": "P D"})

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: AxisLength,
        initializer: Initializer | None = None,
    ):
        initial = initial_vectors(key, vocabulary, length, initializer)
        self.prompt = nnx.Param(initial, axes=("prompt", "prompt_embed"))


class PaddedPrompt(TrainedVectors):
    """Prompt vectors followed by padding, which the model masks.

    Padding gives prompts of different lengths the same shape.

    Attributes:
      prompt: `[P, D]`, float32.
      real: number of vectors without padding, int32 `[]`; never trained.
    """

    def __init__(self, vectors: Float[Array, "P D"], real: int):
        self.prompt = nnx.Param(vectors, axes=("prompt", "prompt_embed"))
        self.real = nnx.Param(jnp.array(real, jnp.int32), axes=())

    @property
    def real_length(self) -> Int[Array, ""]:
        """Number of vectors without padding."""
        return self.real[...]


class StackedPrompts(TrainedVectors):
    """`N` prompts of the same length for one frozen model, e.g. an ensemble's.

    Attributes:
      prompt: `[N, P, D]`, float32.
    """

    def __init__(self, vectors: Float[Array, "N P D"]):
        initial = vectors.astype(jnp.float32)
        self.prompt = nnx.Param(initial, axes=("tasks", "prompt", "prompt_embed"))

    @property
    def count(self) -> int:
        """Number of prompts, `N`."""
        return self.prompt.shape[0]


class InferenceOnlyPrompt(InputPrompt):
    """A constant prompt without parameters: it is neither restored nor trained.

    Use it to run a model behind existing vectors, e.g. a prompt that
    google-research/prompt-tuning released. Generation and evaluation take it; `tune`
    refuses it, as there would be nothing to train.

    Args:
      length: number of vectors `P`, at least 1.
      initializer: the vectors, e.g. `from_file("prompt.npy")`; uniform on `[0, 0.5)` if
        None.

    Raises:
      InputError: if the length is below 1, or the initializer fails.

    Examples:
      >>> prompt = pt.InferenceOnlyPrompt(length=4, initializer=pt.from_text("tail"))
      >>> attached = model.attach(prompt)
      >>> attached.prompt_vectors()["decoder/prompt"].shape
      (4, 128)
      >>> attached.partition()[0]  # nothing to train
      {}
    """

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: AxisLength,
        initializer: Initializer | None = None,
    ):
        self._constant = Constant(
            np.asarray(initial_vectors(key, vocabulary, length, initializer))
        )

    @property
    def length(self) -> int:
        """Number of vectors `P`."""
        return self._constant.array.shape[0]

    def __call__(self, key: Key[Array, ""] | None = None) -> Float[Array, "P D"]:
        """Returns the vectors."""
        del key
        return jnp.asarray(self._constant.array)
