"""What was trained, apart from the frozen model and from any file format."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

PROMPT = "PROMPT_TUNING"
PREFIX = "PREFIX_TUNING"
MULTITASK = "MULTITASK_PROMPT_TUNING"
LORA = "LORA"
IA3 = "IA3"
DEEP = "DEEP_PROMPT"
ADDED_DEEP = "ADDED_DEEP_PROMPT"

Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """One adapter in our terms.

    Attributes:
      kind: its method, by PEFT's name; deep prompts, which PEFT lacks, by ours.
      parameters: float32 arrays by our paths:

        - PROMPT_TUNING: `{encoder|decoder}/prompt/prompt` `[P, D]`.
        - MULTITASK_PROMPT_TUNING: `{encoder|decoder}/prompt/{shared, columns, rows}`,
          `[P, D]`, `[N, P, r]`, `[N, r, D]`; prompt `n` is
          `shared * (columns[n] @ rows[n])`.
        - PREFIX_TUNING: `decoder/prompt/prompt` `[L, 2, P, G, K]`, keys then values,
          keys as they stand in the cache (rotated).
        - DEEP_PROMPT: `{encoder|decoder}/prompt/prompt` `[L, P, D]`.
        - ADDED_DEEP_PROMPT: `{encoder|decoder}/prompt/{prompt, added}`, `[P, D]` and
          `[L - 1, P, D]`.
        - LORA: `<projection>/adapters/lora/{a, b}`, `[L, in, r]`, `[L, r, out]`.
        - IA3: `<projection>/adapters/ia3/scale`, `[L, out]`, of `mlp/down` `[L, in]`.
      scalings: by the path of each projection with a LoRA, what `x @ a @ b` is
        multiplied by.
      settings: those of the PEFT adapter that it was read from, the unknown ones too;
        empty if it was not.
      unused: rows of `prompt_embeddings` or entries of its prefix that PEFT stores and
        never reads, as it stores them; None for none.
    """

    kind: str
    parameters: Arrays
    scalings: Mapping[str, float] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unused: np.ndarray | None = None
