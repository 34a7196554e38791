"""Tunes a soft prompt and LoRA together; see `first_prompt` for the basics.

It differs from `first_prompt` in the list of methods. Each method has its own optimizer
and learning rate. LoRA without a prompt can be merged into the model's weights.

    python -m scripts.examples.lora_with_prompt
"""

import tempfile
from pathlib import Path

import prompt_tuning as pt
from scripts.examples.first_prompt import WORDS


def main() -> None:
    """Tunes both, then LoRA alone, and merges it."""
    pairs = [(f"{word}=", word[1:]) for word in WORDS]
    model = pt.load("bundled:skills-decoder")
    both = pt.tune(
        model,
        [pt.SoftPrompt(length=5), pt.LoRA(rank=4)],
        data=pairs,
        steps=30,
        batch_size=16,
    )
    for path, array in both.trained.items():
        print(path, array.shape)

    lora = pt.tune(model, pt.LoRA(rank=4), data=pairs, steps=30, batch_size=16)
    with tempfile.TemporaryDirectory() as folder:
        merged = pt.load(lora.save(Path(folder) / "merged", form="merged"))
        # The merged model has no adapter and generates the same text.
        assert merged.generate("garden=") == lora.generate("garden=")
        print(merged)


if __name__ == "__main__":
    main()
