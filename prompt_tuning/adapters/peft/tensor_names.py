"""Names of an adapter's tensors, as PEFT and other programs write them.

`save_pretrained` leaves out the adapter's name. A state dict saved without it contains
the name: `lora_A.default.weight`, `lora_magnitude_vector.default.weight`,
`ia3_l.default`, or, for prompt vectors, `prompt_encoder.default.embedding.weight`. A
state dict of a wrapped model also contains the wrappers' names.
"""

import re
from collections.abc import Mapping

import numpy as np

from prompt_tuning.adapters.peft.shape_checks import (
    COLUMNS,
    EMBEDDINGS,
    MODEL_PREFIX,
    ROWS,
)
from prompt_tuning.core.errors import InputError, shown

_NAMED = re.compile(
    r"(.*\.(?:lora_[AB](?=\.[^.]+\.(?:weight|bias)$)"
    r"|(?:lora_embedding_[AB]|lora_magnitude_vector|ia3_l|trainable_tokens_delta)(?=\.[^.]+$)))"
    r"\.([^.]+)(\..+)?"
)
# PEFT leaves the last part out of its files.
_MAGNITUDE = re.compile(r"(.*\.lora_magnitude_vector(?:\.[^.]+)?)\.weight")
_NAMED_PROMPT = re.compile(
    r"prompt_encoder\.([^.]+)\.(embedding\.weight|prefix_task_cols|prefix_task_rows)"
)
# Wrapper modules of torch.compile, FSDP and activation checkpointing.
_WRAPPERS = re.compile(
    r"(?:^module\.)|(?:^|(?<=\.))"
    r"(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
# State dicts of the inner model have no prefix; adapters trained within another one
# have two.
_OF_PROJECTION = re.compile(
    r"\.lora_[AB]\.(?:.+\.)?weight$|\.(?:lora_magnitude_vector|ia3_l)(?:\.[^.]+)?$"
)
_PROMPTS = {"embedding.weight": EMBEDDINGS, COLUMNS: COLUMNS, ROWS: ROWS}


def without_adapter_name(
    tensors: Mapping[str, np.ndarray], source: str
) -> dict[str, np.ndarray]:
    """Returns an adapter's tensors by the names in PEFT's files.

    Raises:
      InputError: if the file has tensors of more than one adapter.
    """
    tensors = {_plain_name(name): tensor for name, tensor in tensors.items()}
    prompts = [_NAMED_PROMPT.fullmatch(name) for name in tensors]
    if tensors and all(prompts):
        found = {m[0]: (m[1], _PROMPTS[m[2]]) for m in prompts if m}
    else:
        matches = [_NAMED.fullmatch(name) for name in tensors]
        found = {m[0]: (m[2], m[1] + (m[3] or "")) for m in matches if m}
    adapters = sorted({adapter for adapter, _ in found.values()})
    names = [found[name][1] if name in found else name for name in tensors]
    if len(adapters) > 1 or len(set(names)) < len(names):
        raise InputError(
            f"{source} has the tensors of several adapters "
            f"({shown(adapters)[1:-1]}), expected those of one: save each in a folder "
            "of its own with PEFT's save_pretrained"
        )
    return dict(zip(names, tensors.values(), strict=True))


def _plain_name(name: str) -> str:
    """Returns a tensor's name with PEFT's prefix and without wrappers' names."""
    name = _WRAPPERS.sub("", name)
    magnitude = _MAGNITUDE.fullmatch(name)
    name = name if magnitude is None else magnitude[1]
    if _OF_PROJECTION.search(name) is None:
        return name
    while name.startswith(MODEL_PREFIX):
        name = name.removeprefix(MODEL_PREFIX)
    return MODEL_PREFIX + name
