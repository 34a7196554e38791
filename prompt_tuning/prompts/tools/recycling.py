"""Takes a prompt from one model to another through the words that both know.

The three methods of Lester et al. 2022 ("Reducing Retraining by Recycling
Parameter-Efficient Prompts"). Each looks at the embeddings of shared tokens, row `i` of
the source's and of the target's table being those of one token.
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
"""Told the number of an epoch that is done, and its mean squared error."""


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
    """Finds the tokens whose text is the same in both vocabularies.

    Special tokens and bytes are left out. Ids count from the commonest token in most
    vocabularies; the very first are short and say little, so some are skipped.

    Args:
      source: of the model that the prompt comes from.
      target: of the model that it goes to.
      skip_first: shared tokens to skip; fewer (warned) if there are not enough.
      words: shared tokens to use after them; fewer (warned) if there are not enough.

    Raises:
      InputError: if a vocabulary has no tokenizer, or too few tokens are shared.
    """
    if skip_first < 0 or words < 1:
        raise InputError(
            f"skip_first is {skip_first} and words {words}, expected at least 0 and 1"
        )
    theirs = _ids_by_text(target, "target")
    ours = _ids_by_text(source, "source")
    shared = [(place, theirs[text]) for text, place in ours.items() if text in theirs]
    if not shared:
        raise InputError(
            "the two tokenizers have no token in common, so nothing says how one "
            "model's embeddings correspond to the other's"
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
    """Ids by the token's text, with one mark for a space; the lowest id of each."""
    tokenizer = vocabulary.tokenizer
    if tokenizer is None:
        raise InputError(
            f"the {which} model has no tokenizer, which says what its tokens are; name "
            "a checkpoint's folder with a tokenizer in it"
        )
    found: dict[str, int] = {}
    for place in range(min(tokenizer.vocabulary_size, len(vocabulary.embeddings))):
        text = _plain(tokenizer, place)
        if text is not None:
            found.setdefault(text, place)
    return found


def _plain(tokenizer: Tokenizer, place: int) -> str | None:
    """The text of a token; None for one that stands for no text of its own."""
    piece = tokenizer.token(place)
    special = place in (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id)
    if special or (piece.startswith("<") and piece.endswith(">") and len(piece) > 2):
        return None
    for mark in SPACE_MARKS:
        piece = piece.replace(mark, " ")
    return piece or None


def _rows(vocabulary: Vocabulary, ids: Int[np.ndarray, "n"]) -> np.ndarray:
    return np.asarray(vocabulary.rows(ids))


def check_width(prompt: Float[np.ndarray, "P _"], source: Vocabulary) -> None:
    """Refuses a prompt that is not the source model's.

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

    With fewer tokens than the source is wide, what of the prompt lies outside of their
    span is lost (warned).
    """
    kernel, _, rank, _ = np.linalg.lstsq(
        source.astype(np.float64), target.astype(np.float64)
    )
    if rank < source.shape[1]:
        warnings.warn(
            f"the {len(source)} shared tokens span {rank} of the source's "
            f"{source.shape[1]} dimensions; what of the prompt lies outside is lost",
            stacklevel=2,
        )
    return (prompt.astype(np.float64) @ kernel).astype(np.float32)


def linear_combination(
    prompt: Float[np.ndarray, "P D"],
    source: Float[np.ndarray, "n D"],
    target: Float[np.ndarray, "n E"],
) -> Float[np.ndarray, "P E"]:
    """Writes each vector as a combination of tokens, and takes it to the target's.

    The combination is that of least squares, the smallest where several are.
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
    """Applies a network that was taught to map source to target embeddings.

    One hidden layer of `4 E` and ReLU, squared error, Adam.

    Args:
      prompt: of the source model.
      source: embeddings of shared tokens there.
      target: and in the target model.
      seed: of the network's start and of the order of tokens.
      epochs: how often each token is seen.
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
    """One pass over the tokens, in an order of its own; gives the mean loss too."""
    count = len(pairs[0])
    size = min(BATCH_SIZE, count)
    # The few tokens beyond the last full batch have their turn in another epoch.
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
