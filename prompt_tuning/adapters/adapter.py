"""Trained parameters, independent of the frozen model and of file formats."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

PROMPT = "PROMPT_TUNING"
PREFIX = "PREFIX_TUNING"
MULTITASK = "MULTITASK_PROMPT_TUNING"
LORA = "LORA"
IA3 = "IA3"
TOKENS = "TRAINABLE_TOKENS"
CLASSES = "CLASS_HEAD"
"""The kind of a class head by itself; PEFT has it only together with an adapter."""
PEFT_KINDS = (PROMPT, PREFIX, MULTITASK, LORA, IA3, TOKENS)
"""Kinds that are methods of PEFT, by PEFT's names."""

CARTRIDGE = "CARTRIDGE"
"""PEFT's type for a prefix with frozen first positions."""
PREFIX_PATH = "decoder/prompt/prompt"
"""Path of a decoder's key/value prefix."""
ROWS_PATH, HEAD_PATH = (
    "token_embedder/adapters/tokens/rows",
    "token_embedder/adapters/tokens/head",
)
"""Paths of trained token rows of the embedding table and of a separate head."""

CLASSES_FOLDER = "head/adapters/classes/"
"""Path prefix of a trained class head, which any adapter may include."""
CLASSES_PATH = f"{CLASSES_FOLDER}kernel"
"""Path of the class head's rows, `[C, D]`."""

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """The tokens of trained rows.

    Attributes:
      rows: id of each row of the embedding table.
      head: id of each row of a separate output head.
    """

    rows: tuple[int, ...] = ()
    head: tuple[int, ...] = ()


NO_TOKENS = TokenIds()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """One adapter, independent of its file format.

    Attributes:
      kind: method of the adapter, by PEFT's name; the prompt classes name the kinds
        that PEFT lacks, and give the arrays of those (`StoredForm`).
      parameters: float32 arrays by our paths:

        - PROMPT_TUNING: `{encoder|decoder}/prompt/prompt` `[P, D]`.
        - MULTITASK_PROMPT_TUNING: `{encoder|decoder}/prompt/{shared, columns, rows}`,
          `[P, D]`, `[N, P, r]`, `[N, r, D]`; prompt `n` is
          `shared * (columns[n] @ rows[n])`.
        - PREFIX_TUNING: `decoder/prompt/prompt` `[L, 2, P, G, K]`, keys then values;
          keys are stored as in the cache (rotated).
        - LORA: `<projection>/adapters/lora/{a, b}`, `[L, in, r]`, `[L, r, out]`.
        - IA3: `<projection>/adapters/ia3/scale`, `[L, out]`, of `mlp/down` `[L, in]`.
        - TRAINABLE_TOKENS: `token_embedder/adapters/tokens/{rows, head}`, `[n, D]`;
          also beside those of a LORA.
        - CLASS_HEAD: `head/adapters/classes/kernel`, `[C, D]`; also beside any other.
          Of encoders also `bias`, `[C]`, and perhaps `dense`, `dense_bias` and
          `dense_norm`, `[D, D]`, `[D]` and `[D]` (see `prompts.class_rows.ClassRows`).
      scalings: factor of `x @ a @ b`, by the path of each projection with a LoRA.
      settings: settings of the PEFT adapter that it was read from, including unknown
        ones; of any other, those that its arrays do not show, where not the defaults.
      tokens: tokens of the trained rows of tokens.
      unused: rows of `prompt_embeddings`, or entries of its prefix, that PEFT stores
        and never reads, in PEFT's layout; None if there are none.
    """

    kind: str
    parameters: Arrays
    scalings: Mapping[str, float] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unused: np.ndarray | None = None
    tokens: TokenIds = NO_TOKENS


def factorize(vectors: Float[np.ndarray, "N P D"]) -> Arrays:
    """Factorizes prompts, one per task, without rounding.

    Prompt `n` is `shared * (columns[n] @ rows[n])`. `shared` is one, the rank is the
    largest possible, and either `columns` or `rows` is the identity matrix while the
    other holds the prompts bit for bit.

    Returns:
      `shared`, `columns` and `rows`, with shapes `[P, D]`, `[N, P, r]`, `[N, r, D]`.
    """
    count, length, width = vectors.shape
    identity = np.eye(min(length, width), dtype=np.float32)
    identity = np.broadcast_to(identity, (count, *identity.shape))
    columns, rows = (identity, vectors) if length <= width else (vectors, identity)
    shared = np.ones((length, width), np.float32)
    return {"shared": shared, "columns": columns, "rows": rows}


def factorized_adapter(prompts: Mapping[str, Float[np.ndarray, "N P D"]]) -> Adapter:
    """Returns a multi-task adapter.

    Args:
      prompts: one prompt per task, by stack ("encoder", "decoder").
    """
    parameters = {
        f"{stack}/prompt/{leaf}": array
        for stack, vectors in prompts.items()
        for leaf, array in factorize(vectors).items()
    }
    return Adapter(kind=MULTITASK, parameters=parameters)
