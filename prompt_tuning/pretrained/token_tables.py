"""Opens the rows of single tokens that a run trains, and adds its new tokens."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from prompt_tuning.checkpoints.stored_table import StoredTable
from prompt_tuning.checkpoints.stored_tensors import Recipe, StoredTensor
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.data.text.extended_tokenizer import find_token, with_tokens
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.prompts.token_rows import TokenRows
from prompt_tuning.settings.trained_tokens import TrainedTokens

EMBEDDING, HEAD = "token_embedder/embedding", "head/kernel"
BLOCK = 2**14
"""Rows of a table that are averaged at once."""


class OpenedTokens(NamedTuple):
    """A model's config and tokenizer with the tokens that a run trains."""

    config: ModelConfig
    tokenizer: Tokenizer | None
    rows: TokenRows


def open_tokens(
    spec: TrainedTokens,
    config: ModelConfig,
    tokenizer: Tokenizer | None,
    recipes: Mapping[str, Recipe],
    stored: Mapping[str, StoredTensor],
) -> OpenedTokens:
    """Finds or adds the tokens, and reads the rows that they start from.

    Raises:
      InputError: if a token cannot be added, or the model's tables cannot have separate
        rows.
    """
    _check_model(config)
    new = _new_texts(spec, tokenizer)
    if new:
        assert tokenizer is not None
        tokenizer = with_tokens(tokenizer, new)
    ids = _find_ids("tokens", spec.tokens, tokenizer)
    rows_of_table = config.vocabulary_size
    added = [id for id, token in zip(ids, spec.tokens, strict=True) if token in new]
    added += [id for id in ids if id >= rows_of_table and id not in added]
    size = max(rows_of_table, *(id + 1 for id in ids))
    _check_beyond(ids, rows_of_table, size)
    head = _head_ids(spec, tokenizer, config, ids, added)
    rows = _initial_rows(EMBEDDING, ids, added, config, recipes, stored)
    head_rows = None
    if head:
        head_rows = _initial_rows(HEAD, head, added, config, recipes, stored)
    grown = dataclasses.replace(
        config, vocabulary_size=size, new_tokens=size - rows_of_table
    )
    return OpenedTokens(
        grown, tokenizer, TokenRows(rows, tuple(ids), head_rows, tuple(head))
    )


def check_one_device(weights: str, mesh: bool) -> None:
    """Checks that rows of single tokens can be trained where a model's weights are."""
    if mesh or weights == "streamed":
        found = "Run.mesh is set" if mesh else "Pretrained.weights is 'streamed'"
        raise InputError(
            f"{found}, but TrainedTokens needs the tables whole on one device: leave "
            "one of them out"
        )


def _check_model(config: ModelConfig) -> None:
    if config.architecture != "decoder_only":
        raise InputError(
            "TrainedTokens trains rows of decoder-only models, and this is an "
            "encoder-decoder; leave it out"
        )
    if config.head_bias:
        raise InputError(
            "TrainedTokens is not supported by models with a bias of each logit, which "
            "new tokens would lack; leave it out"
        )


def _new_texts(spec: TrainedTokens, tokenizer: Tokenizer | None) -> list[str]:
    """Returns the texts that are not tokens of the tokenizer yet."""
    texts = [token for token in spec.tokens if isinstance(token, str)]
    if texts and tokenizer is None:
        raise InputError(
            f"TrainedTokens.tokens has {shown(texts[0])}, but the model has no "
            "tokenizer: give Pretrained.tokenizer, or ids"
        )
    return [x for x in texts if tokenizer and find_token(tokenizer, x) is None]


def _find_ids(
    name: str, tokens: Sequence[str | int], tokenizer: Tokenizer | None
) -> list[int]:
    ids: list[int] = []
    for token in tokens:
        id = token
        if isinstance(token, str):
            id = None if tokenizer is None else find_token(tokenizer, token)
        if not isinstance(id, int) or id < 0:
            raise InputError(
                f"TrainedTokens.{name} has {shown(token)}, expected a text of "
                "TrainedTokens.tokens, of one token, or an id"
            )
        if id in ids:
            raise InputError(
                f"TrainedTokens.{name} names token {id} twice, the second time as "
                f"{shown(token)}: leave one of them out"
            )
        ids.append(id)
    return ids


def _check_beyond(ids: Sequence[int], rows: int, size: int) -> None:
    """Checks that all tokens beyond the table have a trained row."""
    missing = next((id for id in range(rows, size) if id not in ids), None)
    if missing is not None:
        raise InputError(
            f"TrainedTokens.tokens has id {size - 1}, but the model's table has {rows} "
            f"rows and token {missing} behind them is not trained: name all tokens "
            f"from {rows} on"
        )


def _head_ids(
    spec: TrainedTokens,
    tokenizer: Tokenizer | None,
    config: ModelConfig,
    ids: Sequence[int],
    added: Sequence[int],
) -> list[int]:
    """Returns the tokens with a row in an untied head."""
    if config.tied_head:
        if spec.head is not None:
            raise InputError(
                "TrainedTokens.head is set, but the head of this model is its "
                "embedding table, and has all rows of TrainedTokens.tokens: leave it "
                "out"
            )
        return []
    if spec.head is None:
        return list(added)
    head = _find_ids("head", spec.head, tokenizer)
    rows = config.vocabulary_size
    bare = [id for id in ids if id >= rows and id not in head]
    unpaired = [id for id in head if id >= rows and id not in ids]
    if bare or unpaired:
        raise InputError(
            f"the new token {[*bare, *unpaired][0]} is in only one of "
            "TrainedTokens.tokens and TrainedTokens.head: the model's embedding "
            "table and its head have no row of it, so name it in both"
        )
    return head


def _initial_rows(
    path: str,
    ids: Sequence[int],
    added: Sequence[int],
    config: ModelConfig,
    recipes: Mapping[str, Recipe],
    stored: Mapping[str, StoredTensor],
) -> Float[jnp.ndarray, "n D"]:
    """Returns a table's rows for tokens, and its mean for new ones."""
    table = StoredTable(
        path, (config.vocabulary_size, config.width), recipes[path], stored
    )
    rows = np.empty((len(ids), config.width), np.float32)
    known = [i for i, id in enumerate(ids) if id not in added]
    rows[known] = table[np.array([ids[i] for i in known], int)]
    if len(known) < len(ids):
        rows[[i for i in range(len(ids)) if i not in known]] = _mean(table)
    return jnp.asarray(rows)


def _mean(table: StoredTable) -> Float[np.ndarray, "D"]:
    blocks = range(0, len(table), BLOCK)
    sums = [table[start : start + BLOCK].sum(0, dtype=np.float64) for start in blocks]
    return (np.sum(sums, axis=0) / len(table)).astype(np.float32)
