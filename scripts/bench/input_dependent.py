"""Compares prompts that depend on the text with one prompt for all texts.

    python -m scripts.bench.input_dependent

The data set mixes two skills. Lowercase words are to be reversed, and in uppercase
words the vowels become stars; nothing else marks the skill. Prompts of equal length are
tuned on the bundled decoder with the same data, steps and optimizer. Prints the exact
match on unseen words, by seed.
"""

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

import prompt_tuning as pt
from prompt_tuning.cli.main import set_up_process
from prompt_tuning.config.argument_types import Method
from scripts import skills
from scripts.skill_tuning import LONGEST_COMPLETION, exact_match, words

LENGTH = 4
METHODS = {
    "shared": pt.SoftPrompt,
    "InstancePrompt": pt.InstancePrompt,
    "PromptPool": pt.PromptPool,
}


def main() -> None:
    """Tunes the prompts, measures them and prints the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    set_up_process()
    model = pt.load("bundled:skills-decoder")
    table = Table("seed", *METHODS, title=f"exact match, {LENGTH} vectors")
    for seed in arguments.seeds:
        shares = [
            tune_and_measure(model, method(length=LENGTH), seed, arguments.steps)
            for method in METHODS.values()
        ]
        table.add_row(str(seed), *(f"{share:.1%}" for share in shares))
    Console().print(table)


def tune_and_measure(model: pt.Model, method: Method, seed: int, steps: int) -> float:
    """Tunes a prompt and returns its exact match on unseen words."""
    split = words(seed)
    tuned = pt.tune(
        model, method, pairs(split.train), steps=steps, batch_size=64, seed=seed
    )
    prompts, expected = zip(*pairs(split.test), strict=True)
    completions = tuned.generate(list(prompts), new_tokens=LONGEST_COMPLETION)
    answers = [completion.text for completion in completions]
    return exact_match(answers, expected)


def pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    """Returns a text and its completion for each word, every other one in uppercase."""
    rows = []
    for i, word in enumerate(words):
        skill, word = ("star", word.upper()) if i % 2 else ("reverse", word.lower())
        rows.append((skills.prompt_text(None, word), skills.apply(skill, word)))
    return rows


if __name__ == "__main__":
    main()
