"""Tunes prompts for string skills on a bundled frozen model, and shows what they gain.

    ./scripts/quickstart                        # upper and tail on the decoder
    ./scripts/quickstart --model t5
    ./scripts/quickstart --skills "reverse upper" rot2 --seeds 0 1 2
    ./scripts/quickstart --memory               # prefixes that stand for a text

The input `hello=` does not name a skill; only the prompt selects it. Each run gets a
new directory under `runs/`.
"""

import argparse
import json
import time
from pathlib import Path

from scripts.skills import SKILLS


def main() -> None:
    """Tunes and measures every requested skill, then prints one table."""
    arguments = parse_arguments()
    # JAX takes seconds to import, and help and mistakes do not need it.
    from rich.console import Console

    from prompt_tuning.cli.main import set_up_process
    from scripts import memory_demo, skill_tuning

    set_up_process()
    console = Console()
    started = time.monotonic()
    if arguments.memory:
        rows = [
            row
            for seed in arguments.seeds
            for row in memory_demo.remember_and_ask(console, seed, arguments.runs)
        ]
        memory_demo.show(console, rows)
    else:
        rows = [
            skill_tuning.tune_and_measure(
                console, arguments.model, skill, seed, arguments.runs
            )
            for skill in arguments.skills
            for seed in arguments.seeds
        ]
        skill_tuning.show(console, rows)
    console.print(f"{time.monotonic() - started:.0f} seconds in total")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    """Parses the command line; a mistake exits with code 2."""
    parser = argparse.ArgumentParser(
        prog="quickstart",
        description=str(__doc__).partition("\n")[0],
        epilog=f"skills: {', '.join(SKILLS)}; several in quotes, such as 'reverse "
        "upper', are applied from left to right",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model",
        choices=("decoder", "t5"),
        help="the bundled model (decoder)",
    )
    parser.add_argument(
        "--skills",
        nargs="+",
        type=skill,
        metavar="SKILL",
        help="skills to tune a prompt for (upper tail)",
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="turn a table of facts into prefixes instead, and ask about it",
    )
    parser.add_argument(
        "--seeds",
        nargs="+",
        type=int,
        default=[0],
        metavar="N",
        help="seeds; a prompt is tuned for each (0)",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs"),
        metavar="DIRECTORY",
        help="parent of the new run directories (runs)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write the results to this file"
    )
    arguments = parser.parse_args()
    if arguments.memory and (arguments.model or arguments.skills):
        parser.error(
            "--memory has a model and a table of its own: leave out --model and "
            "--skills"
        )
    arguments.model = arguments.model or "decoder"
    arguments.skills = arguments.skills or ["upper", "tail"]
    return arguments


def skill(text: str) -> str:
    """Checks the name of a skill, or several, applied from left to right.

    Raises:
      ArgumentTypeError: with the names of all skills.
    """
    unknown = [name for name in text.split() if name not in SKILLS]
    if unknown or not text.strip():
        raise argparse.ArgumentTypeError(
            f"no skill {(unknown or [text])[0]!r}; expected {', '.join(SKILLS)}"
        )
    return text


if __name__ == "__main__":
    main()
