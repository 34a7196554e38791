"""Teaches a function by rewards alone; see `first_prompt` for the basics.

It differs from `first_prompt` in what is known of an answer: no right one is given,
only how many of its letters are right. The model answers each prompt eight times, and
answers with more right letters than others become more likely (GRPO).

    python -m scripts.examples.rewards_alone
"""

import numpy as np

import prompt_tuning as pt

LETTERS = list("abcdefghijklmnopqrstuvwxyz")


def draw_words(count: int, seed: int) -> list[str]:
    """Returns random words of three to seven letters."""
    random = np.random.default_rng(seed)
    lengths = random.integers(3, 8, count)
    return ["".join(random.choice(LETTERS, length)) for length in lengths]


def right_letters(prompt: str, completion: str, row: dict) -> float:
    """Returns the share of letters that are the prompt's in upper case."""
    del row
    right = prompt.removesuffix("=").upper()
    same = sum(a == b for a, b in zip(right, completion, strict=False))
    return same / max(len(right), len(completion))


def main(steps: int = 150, seed: int = 0) -> None:
    """Tunes a prompt by rewards, and measures it on other words."""
    model = pt.load("bundled:skills-decoder")
    tuned = pt.reinforce(
        model,
        pt.SoftPrompt(length=8),
        [f"{word}=" for word in draw_words(300, seed=0)],
        rewards=[right_letters],
        new_tokens=10,
        optimizer=pt.adamw(0.02),
        steps=steps,
        batch_size=8,
        seed=seed,
    )
    words = draw_words(100, seed=1)
    prompts = [f"{word}=" for word in words]
    answers = [str(answer) for answer in tuned.generate(prompts, new_tokens=10)]
    pairs = list(zip(prompts, answers, strict=True))
    print(pairs[:3])
    print("mean reward:", np.mean([right_letters(*pair, {}) for pair in pairs]))


if __name__ == "__main__":
    main()
