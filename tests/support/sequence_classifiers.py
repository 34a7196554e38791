"""Makes and runs classifiers of transformers and PEFT, by nothing of prompt_tuning."""

# The imports are only in the `bench` extra.
# pyright: reportMissingImports=false

import inspect

import peft
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

transformers.logging.set_verbosity_error()


def logits(
    folder, rows, settings=None, model_type="", adapter=None, save=None, tokens=False
):
    """Returns logits of each row, read alone, and of all rows in a padded batch.

    With `tokens` they are those of each token, `[n, T, C]`, nan after the end of a row.

    Args:
      folder: folder of the model, which is made first if there are `settings`.
      rows: token IDs; padded on the right in the batch.
      settings: fields of the model's config.
      model_type: family of the model that is made.
      adapter: folder to read, or with `save` settings of an adapter.
      save: folder of an adapter with random numbers that is made.
      tokens: whether the model classifies tokens.
    """
    torch.manual_seed(0)
    kinds = AutoModelForSequenceClassification, AutoModelForTokenClassification
    auto = kinds[tokens]
    if settings is not None:
        config = AutoConfig.for_model(model_type, **settings)
        made = auto.from_config(config)
        for parameter in made.parameters():
            if parameter.ndim > 1 or (tokens and len(parameter) == made.num_labels):
                parameter.data.normal_(0, 0.2)
        made.save_pretrained(folder)
    model = auto.from_pretrained(folder, attn_implementation="eager").eval()
    model.forward = with_old_name(model.forward)
    if save is not None:
        model = peft.get_peft_model(model, peft.get_peft_config(adapter)).eval()
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(0, 0.3)
        model.save_pretrained(save)
    elif adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter).eval()
    model = model.double()
    pad = model.config.pad_token_id
    longest = max(map(len, rows))
    padded = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(x) + [0] * (longest - len(x)) for x in rows])
    with torch.no_grad():
        alone = [model(input_ids=torch.tensor([row])).logits[0] for row in rows]
        batch = model(input_ids=padded, attention_mask=mask).logits
    if tokens:  # a prompt's positions stand before those of the row
        alone = [
            ended(x[-len(row) :], longest) for x, row in zip(alone, rows, strict=True)
        ]
        batch = batch[:, -longest:]
    return torch.stack(alone).numpy(), batch.numpy()


def ended(array, length):
    more = torch.full((length - len(array), array.shape[1]), torch.nan)
    return torch.cat([array, more])


def with_old_name(forward):
    """Returns a model's function with the name of an argument that PEFT 0.21 needs.

    Transformers 5.24 renamed `past_key_values`, so PEFT refuses prefixes without it.
    """

    def renamed(past_key_values=None, **inputs):
        cache = {} if past_key_values is None else {"cache": past_key_values}
        return forward(**cache, **inputs)

    names = inspect.signature(forward).parameters
    # Encoders pass what they do not name on to the base model.
    return renamed if {"cache", "kwargs"} & names.keys() else forward
