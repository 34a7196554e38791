"""Tables of the results of `measure_memory`."""

from collections.abc import Callable

from rich.table import Table

from prompt_tuning.texts.memory_comparison import (
    INT8,
    MEMORY,
    PART_NAMES,
    PARTS,
    Measured,
)

NOTES = {INT8: "of the memory in int8", "drift": "in unrelated text"}
"""Additional divergences of a memory, with their descriptions."""


def _memory_table(measured: Measured, title: str) -> Table:
    shown = [name for name in COLUMNS if name in measured[MEMORY]]
    if "exact_match" in shown:
        shown = [name for name in shown if name not in ("divergence", "cross_entropy")]
    table = Table(title=title)
    table.add_column("behind", no_wrap=True)
    for name in shown:
        table.add_column(COLUMNS[name][0], justify="right")
    for name, values in measured.items():
        cells = (
            COLUMNS[column][1](values[column]) if column in values else "-"
            for column in shown
        )
        table.add_row(name, *cells)
    return table


def memory_tables(measured: Measured, title: str = "held-out rows") -> list[Table]:
    """Tabulates results of `measure_memory`, with rows by quarter of the text."""
    tables = [_memory_table(measured, title)]
    if any(name in measured[MEMORY] for name in PART_NAMES):
        tables.append(_part_table(measured))
    tables[-1].caption = "\n".join(
        f"KL {where}: {measured[MEMORY][name]:.4f} nats per token"
        for name, where in NOTES.items()
        if name in measured[MEMORY]
    )
    return tables


def _part_table(measured: Measured) -> Table:
    table = Table(title="KL of rows by quarter of the text")
    table.add_column("behind", no_wrap=True)
    for number in range(PARTS):
        table.add_column(str(number + 1), justify="right")
    for behind, values in measured.items():
        if any(name in values for name in PART_NAMES):
            cells = (f"{values[x]:.4f}" if x in values else "-" for x in PART_NAMES)
            table.add_row(behind, *cells)
    return table


COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "positions": ("positions", "{:.0f}".format),
    "bytes": ("size", lambda size: f"{size / 1000:,.1f} kB" if size else "0"),
    "compression": ("ratio", lambda value: f"{value:.1f}x" if value else "-"),
    "exact_match": ("exact", "{:.1%}".format),
    "f1": ("F1", "{:.1%}".format),
    "divergence": ("KL", "{:.4f}".format),
    "cross_entropy": ("cross entropy", "{:.4f}".format),
    "closed": ("closed", "{:.1%}".format),
    "speed": ("tokens/s", "{:,.0f}".format),
}
"""Column headings, and how values are formatted."""
