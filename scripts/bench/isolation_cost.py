"""Measures what isolating a prompt costs on the bundled encoder-decoder.

    python -m scripts.bench.isolation_cost

Tunes the same prompts twice with `runs/skills_t5`: attending to the text in the
encoder, and only to themselves (`Prompting.visibility`), so that a prompt is computed
once for the batch. Prints each seed's exact match on unseen words.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from prompt_tuning.cli.main import set_up_process
from scripts.skill_tuning import tune_and_measure

WAYS = {
    "attends to the text": (),
    "isolated": ("Prompting.visibility = ('prompt->prompt',)",),
}


def main() -> None:
    """Tunes the prompts, measures them and prints the results."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--skills", nargs="+", default=["tail", "reverse upper"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    set_up_process()
    console = Console()
    table = Table("skill", *WAYS, title="exact match of each seed, T5")
    for skill in arguments.skills:
        matches = [
            [
                tune_and_measure(console, "t5", skill, seed, arguments.runs, overrides)[
                    "tuned_prompt"
                ]
                for seed in arguments.seeds
            ]
            for overrides in WAYS.values()
        ]
        shown = ["  ".join(f"{share:.1%}" for share in way) for way in matches]
        table.add_row(skill, *shown)
    console.print(table)


if __name__ == "__main__":
    main()
