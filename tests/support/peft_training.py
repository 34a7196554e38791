"""Trains adapters with transformers and PEFT in a separate process.

    python tests/support/peft_training.py JOBS.json

Jobs are `{name: {base, folder, tokens, steps, learning_rate, size, **LoraConfig}}`.
`size` resizes the vocabulary, and `tokens` is an .npz of the model's inputs and
`targets`, which every logit predicts. Writes the adapter before and after training to
`folder/start` and `folder/end`, and the losses and the last logits to `folder/end.npz`.
"""

# The imports are only in the `bench` extra.
# pyright: reportMissingImports=false

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import peft
import torch
import transformers


def main() -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for job in json.loads(Path(sys.argv[1]).read_text()).values():
        train(**job)


def train(base, folder, tokens, steps, learning_rate, size=None, **settings) -> None:
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


if __name__ == "__main__":
    main()
