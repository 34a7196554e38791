"""Who sees whom: pure functions, True where a query may attend to a key.

Every mask broadcasts to `[B, 1, Q, K]`. Rows are padded on the right, so a causal
decoder needs no padding mask: no real token stands after padding.
"""

import dataclasses
from collections.abc import Iterable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from prompt_tuning.core.errors import InputError

Count = int | Int[Array, ""]
"""How many vectors a prompt has; an array where several prompts are padded to one."""

ALWAYS = ("input->input", "input->prompt")
PROMPT_TO_PROMPT = "prompt->prompt"
PROMPT_TO_PROMPT_CAUSAL = "prompt->prompt;causal"
PROMPT_TO_INPUT = "prompt->input"
VISIBLE = (*ALWAYS, PROMPT_TO_PROMPT, PROMPT_TO_PROMPT_CAUSAL, PROMPT_TO_INPUT)


@dataclasses.dataclass(frozen=True)
class Visibility:
    """What prompt vectors see, where text and prompt may see each other both ways.

    Text sees itself and every prompt vector.

    Attributes:
      causal: whether a vector sees only those before it; of no effect unless `prompt`.
      prompt: whether it sees other vectors of its prompt at all; itself it always sees.
      input: whether it sees text.
    """

    prompt: bool = True
    causal: bool = False
    input: bool = True

    @classmethod
    def from_names(cls, names: Iterable[str]) -> "Visibility":
        """From the names that google-research/prompt-tuning gives to what is seen.

        Of "prompt->prompt" and "prompt->prompt;causal" together the causal one holds.

        Raises:
          InputError: if a name is unknown.
        """
        names = set(names)
        if unknown := sorted(names - set(VISIBLE)):
            raise InputError(
                f"visibility names {unknown[0]!r}, expected some of "
                f"{', '.join(map(repr, VISIBLE))}"
            )
        causal = PROMPT_TO_PROMPT_CAUSAL in names
        prompt = causal or PROMPT_TO_PROMPT in names
        return cls(prompt, causal, PROMPT_TO_INPUT in names)


def real_tokens(lengths: Int[Array, "B"], length: int) -> Bool[Array, "B T"]:
    """Marks the first `lengths[b]` of `length` places of each row."""
    return jnp.arange(length) < lengths[:, None]


def encoder_mask(lengths: Int[Array, "B"], length: int) -> Bool[Array, "B 1 1 K"]:
    """All real tokens of a row see each other.

    Args:
      lengths: real tokens of each row; with a prompt, its vectors are counted.
      length: keys in a row, padding included.
    """
    return real_tokens(lengths, length)[:, None, None, :]


def decoder_causal_mask(length: int) -> Bool[Array, "1 1 Q K"]:
    """Each position sees itself and what stands before it."""
    return jnp.tri(length, dtype=bool)[None, None]


def decoder_packed_mask(segment_ids: Int[Array, "B T"]) -> Bool[Array, "B 1 T T"]:
    """Causal, and each example of a packed row sees itself alone; padding, padding.

    Args:
      segment_ids: number of each token's example.
    """
    same = segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return decoder_causal_mask(segment_ids.shape[1]) & same


def segment_mask(
    queries: Int[Array, "B Q"], keys: Int[Array, "B K"]
) -> Bool[Array, "B 1 Q K"]:
    """Each example of a packed row sees itself alone.

    Args:
      queries: number of each position's example, 0 for padding.
      keys: the same, of what is looked at.
    """
    same = queries[:, None, :, None] == keys[:, None, None, :]
    return same & (keys > 0)[:, None, None, :]


def region_mask(
    is_prompt: Bool[Array, "#B S"], sees: Visibility
) -> Bool[Array, "#B 1 S S"]:
    """Who sees whom where prompt and text may see each other both ways.

    Args:
      is_prompt: which positions are prompt vectors; those of one prompt are in order.
      sees: what they see.
    """
    length = is_prompt.shape[1]
    query, key = is_prompt[:, None, :, None], is_prompt[:, None, None, :]
    itself = jnp.eye(length, dtype=bool)
    among = itself
    if sees.prompt:
        among = jnp.tri(length, dtype=bool) if sees.causal else jnp.ones_like(itself)
    return ~query | jnp.where(key, among, sees.input)


def decoder_region_mask(
    region: Bool[Array, "B S"], is_prompt: Bool[Array, "B S"], sees: Visibility
) -> Bool[Array, "B 1 S S"]:
    """Causal, but within a region prompt and given tokens see each other both ways.

    With everything visible this is the third mask of Raffel et al. 2020, figure 3.

    Args:
      region: the positions of prompt vectors and given tokens.
      is_prompt: which of them are prompt vectors.
      sees: what these see.
    """
    query, key = region[:, None, :, None], region[:, None, None, :]
    inside = key & region_mask(is_prompt, sees)
    return jnp.where(query, inside, decoder_causal_mask(region.shape[1]))
