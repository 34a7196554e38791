"""Trains adapters with transformers and PEFT, by nothing from prompt_tuning."""

# The imports are only in the `bench` extra.
# pyright: reportMissingImports=false

import numpy as np
import peft
import torch
import transformers

transformers.logging.set_verbosity_error()


def train(base, folder, tokens, steps, learning_rate, size=None, **settings) -> None:
    """Trains an adapter with the settings of a `LoraConfig`.

    Writes the adapter before and after training to `folder/start` and `folder/end`, and
    the losses and the last logits to `folder/end.npz`.

    Args:
      base: folder of the model.
      folder: folder of the results.
      tokens: .npz of the model's inputs and `targets`, which every logit predicts.
      steps: number of steps.
      learning_rate: rate of the steps.
      size: size of the vocabulary, if it changes.
      settings: fields of `LoraConfig`.
    """
    given = {name: torch.tensor(x) for name, x in np.load(tokens).items()}
    targets = given.pop("targets")
    family = (
        transformers.AutoModelForSeq2SeqLM
        if "labels" in given
        else transformers.AutoModelForCausalLM
    )
    torch.manual_seed(0)
    # The default implementation of experts has no double precision.
    model = family.from_pretrained(
        base, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    if size is not None:
        model.resize_token_embeddings(size)
    model = peft.get_peft_model(model, peft.LoraConfig(**settings)).eval()
    model.save_pretrained(f"{folder}/start")
    # Double precision removes the rounding error of this side.
    model = model.double()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=learning_rate, momentum=0.9)
    losses = []
    for _ in range(steps):
        logits = model(**given).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.ravel())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        logits = model(**given).logits.numpy()
    model.float().save_pretrained(f"{folder}/end")
    np.savez(f"{folder}/end.npz", losses=losses, logits=logits)
