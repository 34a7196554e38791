"""Tunes a first soft prompt: five vectors in front of a frozen model.

The bundled model has learned to apply several functions to a word. The prompt learns
which one to apply: here, to drop the first letter.

    python -m scripts.examples.first_prompt
"""

import prompt_tuning as pt

# fmt: off
WORDS = [
    "apple", "bread", "chair", "dance", "eagle", "flame", "grape", "house", "island",
    "jungle", "kettle", "lemon", "mirror", "night", "ocean", "piano", "queen", "river",
    "stone", "table", "under", "violin", "water", "yellow",
]
# fmt: on


def main(directory: str | None = None) -> None:
    """Tunes, generates, evaluates and saves."""
    pairs = [(f"{word}=", word[1:]) for word in WORDS]
    train, held_out = pairs[:16], pairs[16:]

    model = pt.load("bundled:skills-decoder")
    print(model)
    tuned = pt.tune(
        model,
        pt.SoftPrompt(length=5),
        data=train,
        evaluation=held_out,
        steps=60,
        batch_size=16,
        evaluate_every=20,
        directory=directory,
    )
    print(tuned)
    print(tuned.generate(["garden=", "window="], new_tokens=8))
    print(tuned.evaluate(held_out, exact_match=True))


if __name__ == "__main__":
    main()
