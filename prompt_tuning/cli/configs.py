"""`prompt-tuning configs`: lists the shipped configs, or prints one."""

import argparse
import itertools
import shutil
import sys
import textwrap

from prompt_tuning.cli.shared_options import refuse_bindings
from prompt_tuning.config.shipped_configs import list_configs, read_config

HELP = "list the configs that come with the package, or print one"
USES_JAX = False
NEXT_STEP = """\
Print one with: prompt-tuning configs NAME
A run needs none of them: prompt-tuning train --model PATH --train FILE --method lora
(`prompt-tuning train --help` lists the methods and settings)"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="the config to print, such as runs/first_prompt.gin; without it, all are "
        "listed",
    )


def run(options: argparse.Namespace) -> int:
    """Prints the list of configs, or one config."""
    refuse_bindings(options)
    if options.name is not None:
        print(read_config(options.name), end="")
        return 0
    sentences = list_configs()
    indent = max(map(len, sentences)) + 2
    lines = []
    for folder, names in itertools.groupby(sentences, lambda x: x.partition("/")[0]):
        lines.append(f"{folder}/")
        lines += [_wrap(f"{name:{indent}}{sentences[name]}", indent) for name in names]
        lines.append("")
    print(*lines, NEXT_STEP, sep="\n")
    return 0


def _wrap(text: str, indent: int) -> str:
    """Wraps a line at the width of the terminal, if any."""
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return textwrap.fill(text, max(width, 2 * indent), subsequent_indent=" " * indent)
