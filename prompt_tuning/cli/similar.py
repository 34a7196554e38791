"""The command `prompt-tuning similar`: from prompt files to a table and a picture."""

import argparse
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.core.errors import InputError
from prompt_tuning.prompts.tools.similarity import (
    average_similarity,
    check_widths,
    nearest,
    pairwise_similarity,
    short_names,
)

MEASURES = {
    "average": (average_similarity, "similarity of mean vectors"),
    "pairwise": (pairwise_similarity, "mean similarity of vector pairs"),
}
WIDE = 200


def similar(options: argparse.Namespace) -> int:
    """Prints which prompts are alike, and draws it if asked."""
    if options.picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise InputError(
            "--picture needs matplotlib: pip install 'prompt-tuning[plots]'"
        )
    paths = _paths(options)
    names = short_names(paths)
    prompts = [read_prompt(path) for path in paths]
    check_widths(names, prompts)
    found = {name: measure(prompts) for name, (measure, _) in MEASURES.items()}
    by = "average" if options.average else "pairwise"
    table = (
        _of_each(names, found[by], by, options.nearest)
        if options.query is None
        else _of_query(names, found, by)
    )
    console = Console()
    # A file or a pipe has no width, and a table is not to be cut for it.
    (console if console.is_terminal else Console(width=WIDE)).print(table)
    if options.picture is not None:
        from prompt_tuning.prompts.tools.similarity_plot import plot_similarities

        file = Path(options.picture)
        if not file.parent.is_dir():
            raise InputError(f"--picture {file}: there is no folder {file.parent}")
        order = list(range(len(names)))
        if options.query is not None:
            order = [0, *(other for other, _ in nearest(found[by], 0))]
        plot_similarities(
            [names[place] for place in order],
            found[by][np.ix_(order, order)],
            f"Prompts: {MEASURES[by][1]}",
            file,
        )
        console.print(f"picture: {file}", markup=False, highlight=False)
    return 0


def _paths(options: argparse.Namespace) -> list[Path]:
    """What is compared, the query first.

    Raises:
      InputError: if that is fewer than two prompts.
    """
    if options.bindings:
        raise InputError(f"similar reads no config, so nothing uses {options.bindings}")
    if options.nearest < 1:
        raise InputError(f"--nearest is {options.nearest}, expected at least 1")
    paths = [Path(path) for path in options.prompts]
    if options.query is not None:
        query = Path(options.query)
        others = [path for path in paths if path.resolve() != query.resolve()]
        paths = [query, *others]
    if len(paths) < 2:
        raise InputError("there is nothing to compare: name at least two prompts")
    return paths


def _of_each(
    names: Sequence[str], found: Float[np.ndarray, "k k"], by: str, count: int
) -> Table:
    """For each prompt the others, nearest first."""
    table = Table("prompt", f"nearest ({MEASURES[by][1]})")
    for index, name in enumerate(names):
        near = nearest(found, index)[:count]
        shown = "  ".join(
            f"{escape(names[other])} {value:.3f}" for other, value in near
        )
        table.add_row(escape(name), shown)
    return table


def _of_query(
    names: Sequence[str], found: dict[str, Float[np.ndarray, "k k"]], by: str
) -> Table:
    """The prompts, those nearest to the first one before the others."""
    columns = [by, *(name for name in MEASURES if name != by)]
    table = Table("prompt", title=f"nearest to {escape(names[0])}")
    for name in columns:
        table.add_column(MEASURES[name][1], justify="right")
    for other, _ in nearest(found[by], 0):
        row = [f"{found[name][0, other]:.4f}" for name in columns]
        table.add_row(escape(names[other]), *row)
    return table
