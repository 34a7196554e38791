"""Vectors that a request sends instead of tokens."""

import base64

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.typed_json import JsonObject


def read_embeddings(body: JsonObject) -> list[np.ndarray]:
    """Reads `prompt_embeds` (vLLM's name), one matrix or a list.

    Each is base64 of a safetensors file with one tensor `[T, D]`. vLLM's are pickled by
    torch, which could run code; they are refused.
    """
    value = body.value("prompt_embeds", None)
    if value is None:
        return []
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(x, str) for x in texts):
        body.refuse("prompt_embeds", "base64 of safetensors bytes, or a list of such")
    return [_embeddings(text) for text in texts]


def _embeddings(text: str) -> np.ndarray:
    """Decodes one matrix; the engine checks its width."""
    try:
        content = base64.b64decode(text, validate=True)
        tensors = list(load(content).values())
    except (ValueError, KeyError, SafetensorError) as problem:
        raise InputError(
            f"prompt_embeds is no base64 of safetensors bytes: {shown(str(problem))}; "
            "save one tensor by safetensors.torch.save, not torch.save"
        ) from problem
    if len(tensors) != 1:
        raise InputError(f"prompt_embeds has {len(tensors)} tensors, expected one")
    (array,) = tensors
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        raise InputError(
            f"prompt_embeds has numbers of type {array.dtype}, expected floating ones"
        )
    return array.astype(np.float32)
