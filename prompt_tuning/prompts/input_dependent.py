"""Prompts that a small network computes from each example's input tokens."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.number_ranges import AxisLength, PoolSize
from prompt_tuning.core.parameters import fan_in, named_key
from prompt_tuning.prompts import prompt_module
from prompt_tuning.prompts.initializers import Initializer, Vocabulary
from prompt_tuning.prompts.prompt_module import InputDependentPrompt, StoredForm

INSTANCE = "INSTANCE_PROMPT"
POOL = "PROMPT_POOL"
PROMPT_AXES = ("prompt", "prompt_embed")


class InstancePrompt(InputDependentPrompt):
    """Trained vectors plus a small network's output for the example's own text.

    The network `up(relu(down(mean)))` reads the mean embedding of the input tokens and
    has one narrow hidden layer (Wu et al. 2022, "IDPG", section 3.2). Its output is
    initially zero, so the prompt starts as a soft prompt. Prefer it where inputs need
    to be treated differently. It runs once per example instead of once per batch, which
    costs time, and no PEFT form can store it.

    Args:
      length: number of vectors `P`, at least 1.
      hidden_width: width `W` of the hidden layer, at least 1.
      initializer: where the shared vectors start; uniform on `[0, 0.5)` if None.

    Attributes:
      prompt: vectors that all examples share, `[P, D]`, float32.
      down: `[D, W]`, float32.
      down_bias: `[W]`, float32.
      up: `[W, P, D]`, float32.

    Raises:
      InputError: if the length or the hidden width is below 1, or the initializer
        fails.

    Examples:
      >>> prompt = pt.InstancePrompt(length=5, hidden_width=4)
      >>> trained, _ = model.attach(prompt).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/prompt/down (128, 4)
      decoder/prompt/down_bias (4,)
      decoder/prompt/prompt (5, 128)
      decoder/prompt/up (4, 5, 128)
    """

    form = StoredForm(
        INSTANCE,
        {"prompt": "P D", "down": "D W", "down_bias": "W", "up": "W P D"},
        {"length": "P", "hidden_width": "W"},
    )

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: AxisLength,
        hidden_width: AxisLength = 16,
        initializer: Initializer | None = None,
    ):
        if hidden_width < 1:
            raise InputError(f"hidden_width is {hidden_width}, expected at least 1")
        initial = prompt_module.initial_vectors(key, vocabulary, length, initializer)
        width = vocabulary.width
        down = fan_in(width)(named_key(key, "down"), (width, hidden_width), jnp.float32)
        up = jnp.zeros((hidden_width, length, width))
        self.prompt = nnx.Param(initial, axes=PROMPT_AXES)
        self.down = nnx.Param(down, axes=("prompt_embed", "prompt_hidden"))
        self.down_bias = nnx.Param(jnp.zeros(hidden_width), axes=("prompt_hidden",))
        self.up = nnx.Param(up, axes=("prompt_hidden", *PROMPT_AXES))

    @property
    def length(self) -> int:
        """Number of vectors `P`."""
        return self.prompt.shape[0]

    def for_text(
        self,
        tokens: Int[Array, "B T"],
        embedded: Float[Array, "B T D"],
        given: Bool[Array, "B T"],
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B P D"]:
        """Returns the vectors of each example; see `InputDependentPrompt`."""
        del tokens, key
        mean = unit_mean(embedded, given)
        hidden = jax.nn.relu(mean @ self.down[...] + self.down_bias[...])  # [B, W]
        return self.prompt[...] + jnp.einsum("bw,wpd->bpd", hidden, self.up[...])


class PromptPool(InputDependentPrompt):
    """A mixture of `K` prompts, weighted by how well the text matches their keys.

    Each prompt has a trained key. L2P (Wang et al. 2022, "Learning to Prompt for
    Continual Learning", section 4.1) picks the prompts with the nearest keys; here the
    weights are a softmax over all keys, so no second loss is needed to train them (Asai
    et al. 2022, "ATTEMPT", section 3.2). Prefer it to a multi-task prompt if nobody can
    name the task of an example.

    Args:
      length: number of vectors `P` of each prompt, at least 1.
      size: number of prompts `K`, at least 2.
      initializer: where each prompt starts; uniform on `[0, 0.5)` if None.

    Attributes:
      prompts: `[K, P, D]`, float32.
      keys: `[K, D]`, float32.

    Raises:
      InputError: if the length is below 1, the size below 2, or the initializer fails.

    Examples:
      >>> trained, _ = model.attach(pt.PromptPool(length=5, size=3)).partition()
      >>> for path, array in trained.items():
      ...     print(path, array.shape)
      decoder/prompt/keys (3, 128)
      decoder/prompt/prompts (3, 5, 128)
    """

    form = StoredForm(
        POOL, {"prompts": "K P D", "keys": "K D"}, {"length": "P", "size": "K"}
    )

    def __init__(
        self,
        key: Key[Array, ""],
        vocabulary: Vocabulary,
        *,
        length: AxisLength,
        size: PoolSize = 4,
        initializer: Initializer | None = None,
    ):
        if size < 2:
            raise InputError(f"size of the prompt pool is {size}, expected at least 2")
        prompts = [
            prompt_module.initial_vectors(member, vocabulary, length, initializer)
            for member in jax.random.split(named_key(key, "prompts"), size)
        ]
        keys = jax.random.normal(named_key(key, "keys"), (size, vocabulary.width))
        self.prompts = nnx.Param(jnp.stack(prompts), axes=("prompt_pool", *PROMPT_AXES))
        self.keys = nnx.Param(keys, axes=("prompt_pool", "prompt_embed"))

    @property
    def length(self) -> int:
        """Number of vectors `P` of each prompt."""
        return self.prompts.shape[1]

    def for_text(
        self,
        tokens: Int[Array, "B T"],
        embedded: Float[Array, "B T D"],
        given: Bool[Array, "B T"],
        key: Key[Array, ""] | None = None,
    ) -> Float[Array, "B P D"]:
        """Returns the vectors of each example; see `InputDependentPrompt`."""
        del tokens, key
        weights = self.weights(embedded, given)
        return jnp.einsum("bk,kpd->bpd", weights, self.prompts[...])

    def weights(
        self, embedded: Float[Array, "B T D"], given: Bool[Array, "B T"]
    ) -> Float[Array, "B K"]:
        """Returns the weight of each prompt in each example's vectors."""
        scores = unit_mean(embedded, given) @ self.keys[...].T
        return jax.nn.softmax(scores, axis=-1)


def unit_mean(
    embedded: Float[Array, "B T D"], given: Bool[Array, "B T"]
) -> Float[Array, "B D"]:
    """Returns the direction of the mean embedding of the input tokens, in float32.

    Its length is 1, whatever the scale of the model's embeddings, or 0 without tokens.
    """
    mask = given[..., None]
    total = jnp.where(mask, embedded.astype(jnp.float32), 0).sum(1)  # [B, D]
    square = jnp.square(total).sum(-1, keepdims=True)
    return jnp.where(square > 0, total * jax.lax.rsqrt(jnp.maximum(square, 1e-30)), 0)
