"""Computes logits with transformers and PEFT, by nothing from prompt_tuning."""

# The imports are only in the `bench` extra.
# pyright: reportMissingImports=false

from typing import Any

import numpy as np
import peft
import torch
import transformers

transformers.logging.set_verbosity_error()


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
    """Returns the logits of a folder's model with an adapter.

    Args:
      base: folder of the model.
      tokens: .npz of `input_ids`, `attention_mask` and, for an encoder-decoder,
        `labels`.
      adapter: folder of the adapter.
      task_ids: task of each row.
      double: removes the rounding error of this side by double precision.
      size: size of the vocabulary before the adapter is read, if it changes.
    """
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
