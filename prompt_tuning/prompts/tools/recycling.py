"""Maps a prompt from one model to another through tokens that both share.

The three methods are from Lester et al. 2022 ("Reducing Retraining by Recycling
Parameter-Efficient Prompts"). Each uses the embeddings of shared tokens: row `i` of the
source's table and row `i` of the target's embed the same token.
"""

import warnings
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import fan_in, named_key
from prompt_tuning.data.text.tokenizers import SPACE_MARKS, Tokenizer
from prompt_tuning.prompts.initializers import Vocabulary

SKIP_FIRST = 1000
WORDS = 4000
HIDDEN_TIMES = 4
LEARNING_RATE = 3e-4
BATCH_SIZE = 50
EPOCHS = 25

OnEpoch = Callable[[int, float], None]
"""Called with the number of a finished epoch and its mean squared error."""


class SharedTokens(NamedTuple):
    """Embeddings of the tokens that two models share, in the order of the source's ids.

    Attributes:
      source: `[n, D_source]`, float32.
      target: `[n, D_target]`, float32.
    """

    source: Float[np.ndarray, "n D"]
    target: Float[np.ndarray, "n E"]


def share_tokens(
    source: Vocabulary,
    target: Vocabulary,
    *,
    skip_first: int = SKIP_FIRST,
    words: int = WORDS,
) -> SharedTokens:
    """Finds the tokens with the same text in both vocabularies.

    Special tokens and bytes are excluded. Most vocabularies are ordered by frequency;
    the most frequent tokens are short and uninformative, so some are skipped.

    Args:
      source: vocabulary of the prompt's model.
      target: vocabulary of the new model.
      skip_first: number of shared tokens to skip; fewer, with a warning, if they run
        short.
      words: number of shared tokens to use after them; fewer, with a warning, if they
        run short.

    Raises:
      InputError: if a vocabulary has no tokenizer, or too few tokens are shared.
    """
    if skip_first < 0 or words < 1:
        raise InputError(
            f"skip_first is {skip_first} and words {words}, expected at least 0 and 1"
        )
    target_ids = _ids_by_text(target, "target")
    shared = [
        (source_id, target_ids[text])
        for text, source_id in _ids_by_text(source, "source").items()
        if text in target_ids
    ]
    if not shared:
        raise InputError(
            "the two tokenizers have no token in common, so the embeddings of the two "
            "models cannot be matched"
        )
    used, skipped = min(words, len(shared)), skip_first
    if len(shared) < skip_first + words:
        skipped = max(0, len(shared) - words)
        warnings.warn(
            f"the models share {len(shared)} tokens, fewer than skip_first "
            f"{skip_first} and words {words}; {used} are used and {skipped} skipped",
            stacklevel=2,
        )
    ids = np.array(shared[skipped : skipped + used])
    return SharedTokens(_rows(source, ids[:, 0]), _rows(target, ids[:, 1]))


def _ids_by_text(vocabulary: Vocabulary, which: str) -> dict[str, int]:
    """Returns the lowest id of each token text, with plain spaces."""
    tokenizer = vocabulary.tokenizer
    if tokenizer is None:
        raise InputError(
            f"the {which} model has no tokenizer, which defines its tokens; name a "
            "checkpoint's folder with a tokenizer in it"
        )
    ids: dict[str, int] = {}
    for token_id in range(min(tokenizer.vocabulary_size, len(vocabulary.embeddings))):
        text = _token_text(tokenizer, token_id)
        if text is not None:
            ids.setdefault(text, token_id)
    return ids


def _token_text(tokenizer: Tokenizer, token_id: int) -> str | None:
    """Returns the text of a token; None for special tokens and bytes."""
    token = tokenizer.token(token_id)
    special = token_id in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    if special or (token.startswith("<") and token.endswith(">") and len(token) > 2):
        return None
    for mark in SPACE_MARKS:
        token = token.replace(mark, " ")
    return token or None


def _rows(vocabulary: Vocabulary, ids: Int[np.ndarray, "n"]) -> np.ndarray:
    return np.asarray(vocabulary.rows(ids))


def check_width(prompt: Float[np.ndarray, "P _"], source: Vocabulary) -> None:
    """Checks that a prompt has the width of the source model.

    Raises:
      InputError: if the widths differ.
    """
    if prompt.shape[1] != source.width:
        raise InputError(
            f"the prompt is {prompt.shape[1]} wide and the source model "
            f"{source.width}: it was trained on another model"
        )


def v2v_linear(
    prompt: Float[np.ndarray, "P D"],
    source: Float[np.ndarray, "n D"],
    target: Float[np.ndarray, "n E"],
) -> Float[np.ndarray, "P E"]:
    """Applies the linear map from source to target embeddings, by least squares.

    With fewer tokens than the source's width, the prompt's component outside their span
    is lost, with a warning.
    """
    kernel, _, rank, _ = np.linalg.lstsq(
        source.astype(np.float64), target.astype(np.float64)
    )
    if rank < source.shape[1]:
        warnings.warn(
            f"the {len(source)} shared tokens span {rank} of the source's "
            f"{source.shape[1]} dimensions; the prompt's component outside is lost",
            stacklevel=2,
        )
    return (prompt.astype(np.float64) @ kernel).astype(np.float32)


def linear_combination(
    prompt: Float[np.ndarray, "P D"],
    source: Float[np.ndarray, "n D"],
    target: Float[np.ndarray, "n E"],
) -> Float[np.ndarray, "P E"]:
    """Expresses each vector as a combination of tokens, and applies it to the target.

    The combination is the least-squares solution with the smallest norm.
    """
    weights = np.linalg.lstsq(source.T.astype(np.float64), prompt.T.astype("f8"))[0]
    return (weights.T @ target).astype(np.float32)


def v2v_mlp(
    prompt: Float[np.ndarray, "P D"],
    source: Float[np.ndarray, "n D"],
    target: Float[np.ndarray, "n E"],
    *,
    seed: int = 0,
    epochs: int = EPOCHS,
    on_epoch: OnEpoch | None = None,
) -> Float[np.ndarray, "P E"]:
    """Applies a network trained to map source to target embeddings.

    The network has one hidden layer of width `4 E` with ReLU, and is trained with
    squared error and Adam.

    Args:
      prompt: prompt of the source model.
      source: embeddings of shared tokens in the source model.
      target: embeddings of shared tokens in the target model.
      seed: seed of the network's initial values and of the order of tokens.
      epochs: number of passes over the tokens.
      on_epoch: called after each epoch.
    """
    start, order = (
        named_key(jax.random.key(seed), name) for name in ("start", "order")
    )
    network = _start(start, source.shape[1], target.shape[1])
    optimizer = optax.adam(LEARNING_RATE)
    state = optimizer.init(network)
    pairs = jnp.asarray(source), jnp.asarray(target)
    run_epoch = jax.jit(_epoch, static_argnums=0, donate_argnums=(1, 2))
    for epoch in range(epochs):
        key = jax.random.fold_in(order, epoch)
        network, state, loss = run_epoch(optimizer, network, state, pairs, key)
        if on_epoch is not None:
            on_epoch(epoch + 1, float(loss))
    return np.asarray(_apply(network, jnp.asarray(prompt)))


Method = Callable[
    [Float[np.ndarray, "P D"], Float[np.ndarray, "n D"], Float[np.ndarray, "n E"]],
    Float[np.ndarray, "P E"],
]
METHODS: dict[str, Method] = {
    "v2v_linear": v2v_linear,
    "v2v_mlp": v2v_mlp,
    "linear_combination": linear_combination,
}


class _Network(NamedTuple):
    """Kernels and biases of the two layers."""

    hidden: Float[Array, "D F"]
    hidden_bias: Float[Array, "F"]
    output: Float[Array, "F E"]
    output_bias: Float[Array, "E"]


def _start(key: Key[Array, ""], size_in: int, size_out: int) -> _Network:
    size = HIDDEN_TIMES * size_out
    return _Network(
        fan_in(size_in)(named_key(key, "hidden"), (size_in, size), jnp.float32),
        jnp.zeros((size,)),
        fan_in(size)(named_key(key, "output"), (size, size_out), jnp.float32),
        jnp.zeros((size_out,)),
    )


def _apply(network: _Network, x: Float[Array, "n D"]) -> Float[Array, "n E"]:
    hidden = jax.nn.relu(x @ network.hidden + network.hidden_bias)
    return hidden @ network.output + network.output_bias


def _epoch(
    optimizer: optax.GradientTransformation,
    network: _Network,
    state: optax.OptState,
    pairs: tuple[Float[Array, "n D"], Float[Array, "n E"]],
    key: Key[Array, ""],
) -> tuple[_Network, optax.OptState, Float[Array, ""]]:
    """Runs one pass over the tokens in a new order; also returns the mean loss."""
    count = len(pairs[0])
    size = min(BATCH_SIZE, count)
    # The tokens after the last full batch are left to other epochs.
    batches = jax.random.permutation(key, count)[: count // size * size]

    def error(network: _Network, ids: Int[Array, "b"]) -> Float[Array, ""]:
        return jnp.square(_apply(network, pairs[0][ids]) - pairs[1][ids]).mean()

    def step(carried, ids):
        network, state = carried
        loss, gradient = jax.value_and_grad(error)(network, ids)
        updates, state = optimizer.update(gradient, state)
        return (cast(_Network, optax.apply_updates(network, updates)), state), loss

    (network, state), losses = jax.lax.scan(
        step, (network, state), batches.reshape(-1, size)
    )
    return network, state, losses.mean()
