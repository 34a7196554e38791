"""What it costs a prompt to see itself alone, on the bundled encoder-decoder.

    python -m scripts.bench.isolation_cost

Tunes the same prompts twice, by `runs/skills_t5`: seeing the text in the encoder, and
isolated from it (`Prompting.visibility`), which lets the prompt run once for the batch.
Prints exact matches on unseen words, of each seed.
"""

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from prompt_tuning.cli.main import set_up_process
from scripts.quickstart import tune_and_measure

WAYS = {
    "seeing the text": (),
    "isolated": ("Prompting.visibility = ('prompt->prompt',)",),
}


def main() -> None:
    """Tunes, measures, prints."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--skills", nargs="+", default=["tail", "reverse upper"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    set_up_process()
    console = Console()
    table = Table("skill", *WAYS, title="exact match of seeds, T5")
    for skill in arguments.skills:
        found = [
            [
                tune_and_measure(console, "t5", skill, seed, arguments.runs, overrides)[
                    "tuned_prompt"
                ]
                for seed in arguments.seeds
            ]
            for overrides in WAYS.values()
        ]
        shown = ["  ".join(f"{share:.1%}" for share in way) for way in found]
        table.add_row(skill, *shown)
    console.print(table)


if __name__ == "__main__":
    main()
