"""`prompt-tuning quantize`: writes a model folder with quantized weights."""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_tuning.cli.option_types import numeric
from prompt_tuning.cli.shared_options import refuse_bindings
from prompt_tuning.core.number_ranges import PositiveInteger
from prompt_tuning.core.progress_display import progress_bar
from prompt_tuning.core.quantization.stores import NF4, STORES

if TYPE_CHECKING:
    from prompt_tuning.checkpoints.quantized.layouts import Rounding

HELP = "write a model with its weights in four or eight bits"
USES_JAX = False
DESCRIPTION = (
    "Write a Hugging Face folder whose projections are quantized: NF4 in the layout of "
    "bitsandbytes, int4 and int8 in that of compressed-tensors. transformers, vLLM and "
    "others read it, and so do all commands here, without rounding again. Experts with "
    "tensors of their own are quantized to int4 and int8, but not to NF4, for which "
    "transformers 5 has no layout. Prints how "
    "much rounding changes each weight: the norm of the change, divided by the norm of "
    "the weight. Tensors are read and written one after the other."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "model", metavar="MODEL", help="Hugging Face folder, or a model of the hub"
    )
    parser.add_argument(
        "folder", type=Path, metavar="FOLDER", help="the folder to write"
    )
    parser.add_argument(
        "--store",
        choices=sorted(STORES, key=lambda name: name != NF4),
        default=NF4,
        help="how weights are stored",
    )
    parser.add_argument(
        "--group",
        type=numeric(PositiveInteger),
        metavar="N",
        help="number of inputs that share a scale (default: 64 for nf4, 128 for int4, "
        "all for int8)",
    )
    parser.add_argument(
        "--double_quantization",
        action="store_true",
        help="store the scales of nf4 in eight bits too: 0.52 instead of 0.56 bytes a "
        "weight in the folder; the changes that are printed leave this rounding out",
    )


def run(options: argparse.Namespace) -> int:
    """Writes the folder, and prints how much its weights change."""
    from rich.console import Console

    from prompt_tuning.checkpoints.quantized.layouts import make_layout
    from prompt_tuning.cli.byte_sizes import format_size
    from prompt_tuning.cli.console import print_lines
    from prompt_tuning.core.atomic_files import check_writable
    from prompt_tuning.pretrained.checkpoint_path import find_checkpoint
    from prompt_tuning.pretrained.quantized_folder import QuantizedFolder

    refuse_bindings(options)
    check_writable(options.folder)
    layout = make_layout(
        options.store, options.group, nested=options.double_quantization
    )
    opened = QuantizedFolder.open(find_checkpoint(options.model), layout)
    with progress_bar("quantizing", opened.written_bytes, in_bytes=True) as advance:
        roundings = opened.write(options.folder, advance)
    console = Console()
    print_lines(console, *change_table(roundings))
    if opened.experts:
        kept = sum(opened.stored[name].bytes for name in opened.experts)
        print_lines(console, f"{format_size(kept)} of experts stay as they are")
    old_size = format_size(opened.bytes)
    new_size = format_size(opened.written_bytes)
    print_lines(console, f"{options.folder}: {new_size} instead of {old_size}")
    return 0


def change_table(roundings: "Mapping[str, Rounding]") -> list[str]:
    """Lists the relative change of each weight: layers by row, modules by column."""
    rows: dict[str, dict[str, Rounding]] = {}
    for name, rounding in roundings.items():
        layer, module = _place(name)
        row = rows.setdefault(layer, {})
        # All experts of a layer are one module.
        row[module] = rounding.joined([rounding, *filter(None, [row.get(module)])])
    modules = list(dict.fromkeys(module for row in rows.values() for module in row))
    first = max(len(layer) for layer in (*rows, "all"))
    every = {
        module: [row[module] for row in rows.values() if module in row]
        for module in modules
    }

    def line(name: str, cells: Mapping[str, str]) -> str:
        padded = (
            cells.get(module, "").rjust(max(len(module), 6)) for module in modules
        )
        return "  ".join([name.ljust(first), *padded])

    lines = ["relative change of the weights, by layer:"]
    lines.append(line("", {module: module for module in modules}))
    lines += [
        line(layer, {module: f"{x.relative:.2%}" for module, x in row.items()})
        for layer, row in rows.items()
    ]
    total = {module: type(group[0]).joined(group) for module, group in every.items()}
    lines.append(line("all", {m: f"{x.relative:.2%}" for m, x in total.items()}))
    return lines


def _place(name: str) -> tuple[str, str]:
    """Returns a tensor's layer, and its module's name within the layer."""
    found = re.search(r"^(.*?\.\d+)\.(.+)\.weight$", name)
    if found is None:
        return "", name
    layer = re.sub(
        r"^(model|transformer|gpt_neox)\.|layers?\.|block\.|h\.", "", found[1]
    )
    experts = "experts." * bool(re.search(r"\bexperts\.\d+\.", found[2]))
    return layer, experts + found[2].split(".")[-1]
