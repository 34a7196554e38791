"""Vectors of texts, from the states of a model with an adapter."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.decoding.request_checks import slot_length
from prompt_tuning.decoding.row_checks import check_prompt_ids, check_rows
from prompt_tuning.decoding.row_encoding import pad_rows
from prompt_tuning.evaluation.batch_scores import score_batch
from prompt_tuning.models.scoring import pooled_states
from prompt_tuning.texts.loaded_adapter import LoadedAdapter

Pooling = Literal["mean", "last"]


def embed_ids(
    adapter: LoadedAdapter,
    ids: Sequence[int],
    pooling: Pooling = "mean",
    prompt_id: int | None = None,
) -> Float[np.ndarray, "D"]:
    """Returns the vector of one text: its states after the last layer and its norm.

    The text runs alone, padded to one of few lengths: its vector does not depend on
    other texts.

    Args:
      adapter: the adapter that reads the text.
      ids: its tokens.
      pooling: the mean of the states after each token, or the last of them, which
        predicts the next token.
      prompt_id: number of the prompt, for an adapter with several.

    Raises:
      InputError: if the model is an encoder-decoder, or the text does not fit.
    """
    model = adapter.model
    if model.config.architecture != "decoder_only":
        raise InputError(
            "embeddings need a decoder-only model: this one has an encoder"
        )
    if not ids:
        raise InputError("a text without a token has no embedding: leave it out")
    check_rows(model, [ids], 1)
    check_prompt_ids(model, None if prompt_id is None else [prompt_id], 1)
    count = len(ids)
    # The state after a token is the one that predicts the next.
    length = slot_length(count + 1)
    tokens, lengths = pad_rows([ids], model.config.pad_id, length)
    positions = np.arange(1, length + 1, dtype=np.int32)[None]
    weights = positions == count if pooling == "last" else positions <= count
    batch = Batch(
        tokens=tokens,
        lengths=lengths,
        targets=tokens,
        loss_positions=np.minimum(positions, count),
        loss_weights=weights.astype(np.float32),
        prefix_lengths=lengths,
        prompt_ids=None if prompt_id is None else np.array([prompt_id], np.int32),
    )
    states = score_batch(pooled_states, model, adapter.parameters, batch)
    return np.asarray(states, np.float32)[0]
