"""Computes logits with transformers and PEFT in a separate process.

    python tests/peft_logits.py JOBS.json OUT.npz

Jobs are `{name: {base, adapter, tokens, task_ids, double, size}}`; `tokens` is an .npz
of `input_ids`, `attention_mask` and, for an encoder-decoder, `labels`; double precision
removes the rounding error of this side, and `size` resizes the vocabulary before the
adapter is read. Needs torch, transformers and peft,
but nothing from prompt_tuning.
"""

# The imports are only in the `bench` extra.
# pyright: reportMissingImports=false

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import peft
import torch
import transformers


def main() -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    outputs: dict[str, Any] = {name: logits(**job) for name, job in jobs.items()}
    np.savez(sys.argv[2], **outputs)


def model_class(base) -> Any:
    """Returns the class that loads a model with its head, e.g. of an encoder."""
    config = transformers.AutoConfig.from_pretrained(base)
    if type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING:
        return transformers.AutoModelForMaskedLM
    known = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if known and not hasattr(config, "vision_config"):
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForImageTextToText


def logits(
    base, tokens, adapter=None, task_ids=None, double=False, size=None
) -> np.ndarray:
    given = {name: torch.tensor(x) for name, x in np.load(tokens).items()}
    family = (
        transformers.AutoModelForSeq2SeqLM if "labels" in given else model_class(base)
    )
    # Other implementations leave out the soft caps of Gemma 2.
    model = family.from_pretrained(base, attn_implementation="eager").eval()
    if model.config.model_type == "llama4":
        # Transformers 5.24 cannot run it on text alone.
        model = model.language_model
    if size is not None:
        model.resize_token_embeddings(size, mean_resizing=False)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    if double:
        model = model.double()
    if task_ids is not None:
        given["task_ids"] = torch.tensor(task_ids)
    with torch.no_grad():
        return model(**given).logits.numpy().astype(np.float32)


if __name__ == "__main__":
    main()
