"""`prompt-tuning similar`: compares prompts with each other."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_tuning.cli.option_types import numeric
from prompt_tuning.cli.shared_options import check_folder, refuse_bindings
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.number_ranges import PositiveInteger

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

HELP = "compare prompts with each other, most similar first"
USES_JAX = True

MEASURES = {
    "average": "similarity of mean vectors",
    "pairwise": "mean similarity of vector pairs",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "prompts",
        nargs="+",
        type=Path,
        metavar="PROMPT",
        help="a prompt file, run directory (of a sweep, its best member), checkpoint "
        "or PEFT folder; folders without a prompt are skipped",
    )
    parser.add_argument(
        "--query",
        type=Path,
        metavar="PROMPT",
        help="the prompt to compare the others with",
    )
    parser.add_argument(
        "--average",
        action="store_true",
        help="rank by the cosine similarity of mean vectors instead of the mean "
        "similarity of all pairs of vectors",
    )
    parser.add_argument(
        "--nearest",
        type=numeric(PositiveInteger),
        default=5,
        metavar="N",
        help="prompts shown for each, without --query",
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw a heat map as PNG"
    )


def run(options: argparse.Namespace) -> int:
    """Prints how similar the prompts are, and draws it if requested."""
    from rich.console import Console

    from prompt_tuning.cli.console import print_lines, print_table
    from prompt_tuning.prompts.tools.similarity import (
        average_similarity,
        check_widths,
        pairwise_similarity,
        short_names,
    )

    _check_options(options)
    paths, prompts = _read_prompts(_select_prompts(options), options.query)
    names = short_names(paths)
    check_widths(names, prompts)
    similarities = {
        "average": average_similarity(prompts),
        "pairwise": pairwise_similarity(prompts),
    }
    measure = "average" if options.average else "pairwise"
    console = Console()
    if options.query is None:
        matrix = similarities[measure]
        table = _table_of_all(names, matrix, measure, options.nearest)
    else:
        table = _table_of_query(names, similarities, measure)
    print_table(console, table)
    if options.picture is not None:
        _draw(options, names, similarities[measure], MEASURES[measure])
        print_lines(console, f"picture: {options.picture}")
    return 0


def _check_options(options: argparse.Namespace) -> None:
    import importlib.util

    refuse_bindings(options)
    if options.picture is None:
        return
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError("--picture needs matplotlib: pip install matplotlib")
    check_folder("--picture", options.picture)


def _select_prompts(options: argparse.Namespace) -> list[Path]:
    """Returns the prompts to compare, the query first."""
    paths = list(options.prompts)
    if options.query is not None:
        query = options.query.resolve()
        paths = [options.query, *(path for path in paths if path.resolve() != query)]
    if len(paths) < 2:
        raise InputError("there is nothing to compare: name at least two prompts")
    return paths


def _read_prompts(
    paths: Sequence[Path], query: Path | None
) -> "tuple[list[Path], list[np.ndarray]]":
    """Reads the prompts; reports folders that are skipped because they have none."""
    import sys

    from prompt_tuning.adapters.prompt_files import read_prompt
    from prompt_tuning.training.sweep.best_member import best_member

    prompts = []
    for path in paths:
        chosen = best_member(path) or path
        try:
            prompts.append((chosen, read_prompt(chosen)))
        except InputError as problem:
            if path == query or not path.is_dir():
                raise
            print(f"skipped: {problem}", file=sys.stderr)
    if len(prompts) < 2:
        raise InputError(
            f"there is nothing to compare: only {len(prompts)} of {len(paths)} paths "
            "contain a prompt"
        )
    return [path for path, _ in prompts], [prompt for _, prompt in prompts]


def _table_of_all(
    names: Sequence[str], matrix: "np.ndarray", measure: str, count: int
) -> "Table":
    """Tabulates the prompts most similar to each prompt."""
    from rich.markup import escape
    from rich.table import Table

    from prompt_tuning.prompts.tools.similarity import nearest

    table = Table("prompt", f"nearest ({MEASURES[measure]})")
    for index, name in enumerate(names):
        cells = [
            f"{escape(names[other])} {value:.3f}"
            for other, value in nearest(matrix, index)[:count]
        ]
        table.add_row(escape(name), "  ".join(cells))
    return table


def _table_of_query(
    names: Sequence[str], similarities: "dict[str, np.ndarray]", measure: str
) -> "Table":
    """Tabulates both similarities of each prompt to the first, highest first."""
    from rich.markup import escape
    from rich.table import Table

    from prompt_tuning.prompts.tools.similarity import nearest

    columns = [measure, *(name for name in MEASURES if name != measure)]
    table = Table("prompt", title=f"nearest to {escape(names[0])}")
    for name in columns:
        table.add_column(MEASURES[name], justify="right")
    for other, _ in nearest(similarities[measure], 0):
        cells = [f"{similarities[name][0, other]:.4f}" for name in columns]
        table.add_row(escape(names[other]), *cells)
    return table


def _draw(
    options: argparse.Namespace, names: Sequence[str], matrix: "np.ndarray", title: str
) -> None:
    """Draws the heat map; with a query, the most similar prompts first."""
    import numpy as np

    from prompt_tuning.prompts.tools.similarity import nearest
    from prompt_tuning.prompts.tools.similarity_plot import plot_similarities

    order = list(range(len(names)))
    if options.query is not None:
        order = [0, *(other for other, _ in nearest(matrix, 0))]
    plot_similarities(
        [names[index] for index in order],
        matrix[np.ix_(order, order)],
        f"Prompts: {title}",
        options.picture,
    )
