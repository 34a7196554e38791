"""Embedding vectors of texts, from a model's hidden states."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.decoding.request_checks import slot_length
from prompt_tuning.decoding.row_checks import check_prompt_ids, check_rows
from prompt_tuning.decoding.row_encoding import pad_rows
from prompt_tuning.evaluation.batch_scores import score_batch
from prompt_tuning.models.scoring import pooled_states
from prompt_tuning.pretrained.prompted_model import PromptedModel

Pooling = Literal["mean", "last", "first"]


def embed_ids(
    model: PromptedModel,
    parameters: Parameters,
    ids: Sequence[int],
    pooling: Pooling = "mean",
    prompt_id: int | None = None,
) -> Float[np.ndarray, "D"]:
    """Returns the vector of one text from the states after the last layer and its norm.

    The text runs alone, padded to one of few lengths, so its vector does not depend on
    other texts. `pooling` is "mean" over the states of the tokens, "last" for the state
    that predicts the next token, or "first" (for encoders trained so).

    Raises:
      InputError: if the model is an encoder-decoder or has a class head, or the text is
        too long.
    """
    if model.config.architecture != "decoder_only":
        raise InputError(
            "embeddings need a decoder-only model: this one has an encoder"
        )
    if model.config.labels:
        raise InputError(
            f"the model's head scores the classes {shown(list(model.config.labels))}: "
            "embed texts by a model without such a head"
        )
    if model.config.bidirectional:
        ids = model.interface.scored_row(ids)  # with EOS
    if not ids:
        raise InputError("a text without a token has no embedding: leave it out")
    check_rows(model, [ids], 1)
    check_prompt_ids(model, None if prompt_id is None else [prompt_id], 1)
    count = len(ids)
    # The state after a token is the one that predicts the next.
    length = slot_length(count + 1)
    tokens, lengths = pad_rows([ids], model.config.pad_id, length)
    positions = np.arange(1, length + 1, dtype=np.int32)[None]
    last = {"mean": count, "last": count, "first": 1}[pooling]
    weights = positions <= count if pooling == "mean" else positions == last
    batch = Batch(
        tokens=tokens,
        lengths=lengths,
        targets=tokens,
        loss_positions=np.minimum(positions, count),
        loss_weights=weights.astype(np.float32),
        prefix_lengths=lengths,
        prompt_ids=None if prompt_id is None else np.array([prompt_id], np.int32),
    )
    states = score_batch(pooled_states, model, parameters, batch)
    return np.asarray(states, np.float32)[0]
