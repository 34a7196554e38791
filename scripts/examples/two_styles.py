"""Teaches which of two styles is preferred; see `first_prompt` for the basics.

It differs from `first_prompt` in its second run. The first one learns to answer a word
without its first letter, and one in four in capitals, so both styles are known. Then
capitals are preferred (DPO): the second run starts from the first one, which is also
the reference that it is pulled towards.

    python -m scripts.examples.two_styles
"""

import tempfile

import prompt_tuning as pt
from scripts.examples.rewards_alone import draw_words


def share_of_capitals(tuned: pt.TunedModel) -> float:
    """Returns the share of other words that are answered in capitals."""
    prompts = [f"{word}=" for word in draw_words(100, seed=1)]
    answers = [str(answer) for answer in tuned.generate(prompts, new_tokens=10)]
    print(answers[:3])
    return sum(answer.isupper() for answer in answers) / len(answers)


def main(seed: int = 0, steps: int = 60) -> None:
    """Tunes a prompt for both styles, then for the preferred one."""
    model, prompt = pt.load("bundled:skills-decoder"), pt.SoftPrompt(length=8)
    words = draw_words(300, seed=0)
    mixed = [
        (f"{word}=", word[1:] if number % 4 else word.upper())
        for number, word in enumerate(words)
    ]
    preferred = [
        {"prompt": f"{word}=", "chosen": word.upper(), "rejected": word[1:]}
        for word in words
    ]
    with tempfile.TemporaryDirectory() as folder:
        first = pt.tune(
            model,
            prompt,
            mixed,
            optimizer=pt.adafactor(0.3),
            steps=steps,
            batch_size=16,
            seed=seed,
            directory=f"{folder}/first",
        )
        print("capitals before:", share_of_capitals(first))
        tuned = pt.tune(
            model,
            prompt,
            preferred,
            objective=pt.DPO(beta=0.1, reference=f"{folder}/first"),
            start_from=f"{folder}/first",
            optimizer=pt.adafactor(0.1),
            steps=steps,
            batch_size=16,
            seed=seed,
        )
        print("capitals after:", share_of_capitals(tuned))


if __name__ == "__main__":
    main()
