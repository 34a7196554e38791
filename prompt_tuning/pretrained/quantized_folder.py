"""Writes a Hugging Face folder with quantized weights, tensor by tensor."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from prompt_tuning.adapters.merge import COPIED
from prompt_tuning.checkpoints.formats.safetensors import (
    INDEX,
    Entry,
    open_safetensors,
    write_safetensors,
)
from prompt_tuning.checkpoints.published_kernel import KERNEL, keeps_inputs
from prompt_tuning.checkpoints.quantized.layouts import Layout, Rounding
from prompt_tuning.checkpoints.quantized.methods import (
    METHOD,
    SETTINGS,
    quantization_of,
)
from prompt_tuning.checkpoints.stored_tensors import StoredTensor
from prompt_tuning.core import atomic_files
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.file_names import check_links
from prompt_tuning.core.quantization.stores import EXPERT_KERNELS
from prompt_tuning.core.typed_json import JsonObject, read_object
from prompt_tuning.families.hf_folder import find_recipes, read_config

WEIGHT = ".weight"
CONFIG = "config.json"
ROUTING = ("/router/", "/shared_gate/")
"""Part of the paths of small projections on which the choice of experts depends."""
KEPT = {family: ".wo." for family in ("t5", "mt5", "umt5")}
"""Part of the names that transformers keeps in float32, since float16 overflows."""


@dataclasses.dataclass(frozen=True)
class QuantizedFolder:
    """A folder to write.

    `quantized` names the tensors to quantize, in order, and `experts` those of experts
    that stay as they are.
    """

    base: Path
    settings: JsonObject
    stored: Mapping[str, StoredTensor]
    quantized: tuple[str, ...]
    experts: tuple[str, ...]
    layout: Layout

    @classmethod
    def open(cls, base: Path, layout: Layout) -> "QuantizedFolder":
        """Opens a model to quantize its projections.

        Raises:
          InputError: if it is quantized already, or has no projections to quantize.
        """
        if not (base / CONFIG).is_file():
            raise InputError(
                f"{base} has no {CONFIG}; expected a Hugging Face folder of a model"
            )
        check_links(base, *COPIED)
        settings, published = read_object(base / CONFIG), quantization_of(base)
        if published is not None:
            published.refuse(
                METHOD,
                "weights that are not quantized, since they would be rounded twice",
            )
        config, stored = read_config(base), open_safetensors(base)
        kept = KEPT.get(config.family or "")
        recipes = find_recipes(config, stored)
        experts = {
            name
            for path, recipe in recipes.items()
            if path.endswith(EXPERT_KERNELS)
            for name in recipe.sources
        }
        # Experts that share a tensor have no layout in which others read them.
        kernels = (KERNEL, *EXPERT_KERNELS) if layout.experts else (KERNEL,)
        names = {
            name
            for path, recipe in recipes.items()
            if path.endswith(kernels) and keeps_inputs(recipe)
            if not any(part in path for part in ROUTING)
            for name in recipe.sources
            if kept is None or kept not in name
        }
        quantized = tuple(name for name in stored if name in names)
        if not quantized:
            raise InputError(
                f"{base}: the {config.family} family stores no projections as "
                "[out, in], as linear layers that other programs quantize"
            )
        unquantized = tuple(name for name in stored if name in experts - names)
        return cls(base, settings, stored, quantized, unquantized, layout)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors that are read."""
        return sum(tensor.bytes for tensor in self.stored.values())

    @property
    def written_bytes(self) -> int:
        """Bytes of all tensors that are written."""
        roundings = {name: Rounding() for name in self.quantized}
        listed = (self._entries(name, roundings) for name in self.stored)
        return sum(entry.bytes for entries in listed for entry in entries)

    def write(
        self, folder: Path, on_written: Callable[[int], None]
    ) -> dict[str, Rounding]:
        """Writes the folder in a single step.

        Args:
          folder: the folder, which must not exist.
          on_written: gets the number of bytes of each part after it was written.

        Returns the rounding errors of each quantized tensor, by name.

        Raises:
          InputError: if the folder exists or cannot be written, or a weight cannot be
            quantized.
          StorageError: if the disk is full.
        """
        roundings = {name: Rounding() for name in self.quantized}
        entries = {name: self._entries(name, roundings) for name in self.stored}

        def write(directory: Path) -> None:
            copied = {path for name in COPIED for path in self.base.glob(name)}
            for path in copied:
                if path.is_file() and path.name != CONFIG:
                    shutil.copyfile(path, directory / path.name)
            by_file: dict[str, list[str]] = {}
            for name, tensor in self.stored.items():
                by_file.setdefault(Path(tensor.source).name, []).append(name)
            for file, names in by_file.items():
                listed = [entry for name in names for entry in entries[name]]
                write_safetensors(directory / file, listed, on_written)
            self._write_settings(directory)
            if (self.base / INDEX).is_file():
                _write_index(directory / INDEX, by_file, entries)

        atomic_files.write_folder(folder, write)
        return roundings

    def _entries(self, name: str, roundings: Mapping[str, Rounding]) -> list[Entry]:
        tensor = self.stored[name]
        if name in roundings:
            return self.layout.entries(name, tensor, roundings[name])
        return [Entry(name, tensor.dtype, tensor.shape, lambda: [tensor.read()])]

    def _write_settings(self, directory: Path) -> None:
        unquantized = {
            name.removesuffix(WEIGHT)
            for name, tensor in self.stored.items()
            if len(tensor.shape) == 2 and name.endswith(WEIGHT)
        } - {name.removesuffix(WEIGHT) for name in self.quantized}
        # A head that is tied has no tensor, but is a linear layer too.
        skipped = sorted({*unquantized, "lm_head"})
        dtype = self.stored[self.quantized[0]].dtype.name
        content = dict(self.settings.values)
        content[SETTINGS] = self.layout.settings(skipped, dtype)
        (directory / CONFIG).write_text(json.dumps(content, indent=2) + "\n")


def _write_index(
    file: Path,
    by_file: Mapping[str, Collection[str]],
    entries: Mapping[str, list[Entry]],
) -> None:
    places = {
        entry.name: name
        for name, tensors in by_file.items()
        for tensor in tensors
        for entry in entries[tensor]
    }
    total = sum(entry.bytes for listed in entries.values() for entry in listed)
    content = {"metadata": {"total_size": total}, "weight_map": places}
    file.write_text(json.dumps(content, indent=2) + "\n")
