"""The files of an output: sequences, metadata, metrics, checksums and pictures."""

import dataclasses
import hashlib
import importlib.util
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from prompt_tuning.data.preparation.encoding_worker import columns
from prompt_tuning.data.preparation.input_files import InputFile
from prompt_tuning.data.preparation.packing_progress import Finished
from prompt_tuning.data.preparation.preparation_reporter import PreparationReporter
from prompt_tuning.data.preparation.preparation_settings import Preparation
from prompt_tuning.data.preparation.record_index import Found
from prompt_tuning.data.preparation.record_order import DEV, SPLIT_NAMES, TEST, TRAIN
from prompt_tuning.data.preparation.sequence_logs import write_hdf5
from prompt_tuning.data.preparation.split_writer import TEXTS, file_names
from prompt_tuning.data.preparation.tokenizer_files import (
    MODEL_CONFIG,
    open_tokenizer,
    save_tokenizer,
)

METADATA = "metadata.yaml"
METRICS = "metrics.json"
CHECKSUMS = "checksums.sha256"
CATEGORIES = "category_to_id.json"
SKIPPED = "skipped.jsonl"
TOKENIZER = "tokenizer"
PICTURE = "pictures.png"
_NAMES = (METADATA, METRICS, CHECKSUMS, CATEGORIES, SKIPPED, TOKENIZER, PICTURE, TEXTS)


def is_ours(name: str) -> bool:
    """Whether an output holds a file of this name."""
    if name in _NAMES:
        return True
    return name.endswith(".hdf5") and name.partition("_")[0] in SPLIT_NAMES


def skipped_line(problem: str) -> bytes:
    """A record that was passed over, as a line of JSON."""
    text = json.dumps({"problem": problem}, ensure_ascii=False)
    # Half of a surrogate pair, which UTF-8 has not, becomes JSON's escape of it.
    return text.encode(errors="backslashreplace") + b"\n"


@dataclasses.dataclass(frozen=True)
class Contents:
    """What an output says.

    Attributes:
      preparation: what was asked for.
      files: the inputs.
      found: the checksum of each, and of those that were passed over, why.
      finished: the splits.
    """

    preparation: Preparation
    files: Sequence[InputFile]
    found: Found
    finished: Sequence[Finished]

    @property
    def steps(self) -> int:
        """How many files of sequences there are, and one for the rest."""
        return 1 + sum(len(split.rows) for split in self.finished)


def write_output(
    contents: Contents, scratch: Path, folder: Path, reporter: PreparationReporter
) -> None:
    """Writes every file into an empty folder.

    Args:
      contents: what they say.
      scratch: where the logs of the sequences are.
      folder: the empty folder.
      reporter: is told of each file, and if there is no picture.
    """
    preparation = contents.preparation
    for split in contents.finished:
        names = file_names(preparation, split.split)
        for name, rows in zip(names, split.rows, strict=True):
            write_hdf5(
                scratch / f"{name}.log",
                folder / name,
                columns(preparation),
                rows,
                preparation.length,
            )
            reporter.advance(1)
        if split.split == TEST:
            shutil.copyfile(scratch / TEXTS, folder / TEXTS)
    if preparation.skip_malformed:
        _write_skipped(contents.found.problems, scratch / SKIPPED, folder / SKIPPED)
    if preparation.record.categories:
        ids = {name: i for i, name in enumerate(preparation.record.categories)}
        _write_json(folder / CATEGORIES, ids)
    save_tokenizer(preparation.tokenizer, folder / TOKENIZER)
    _write_json(folder / METRICS, _metrics(contents))
    metadata = yaml.safe_dump(_metadata(contents), sort_keys=False, allow_unicode=True)
    (folder / METADATA).write_text(metadata, encoding="utf-8")
    _draw(contents, folder / PICTURE, reporter)
    (folder / CHECKSUMS).write_text(_checksums(folder), encoding="utf-8")
    reporter.advance(1)


def _write_skipped(problems: Sequence[str], log: Path, target: Path) -> None:
    """Lists the files that were passed over, then the records."""
    with target.open("wb") as file, log.open("rb") as records:
        file.writelines(map(skipped_line, problems))
        shutil.copyfileobj(records, file)


def _metrics(contents: Contents) -> dict[str, Any]:
    """What each split counted; files passed over are of none, so of the first."""
    metrics = {
        SPLIT_NAMES[split.split]: split.metrics.summary() for split in contents.finished
    }
    skipped = len(contents.found.problems)
    for counted in metrics.values():
        counted["malformed_files"], skipped = skipped, 0
    return metrics


def _metadata(contents: Contents) -> dict[str, Any]:
    """What a trainer needs to know, under generative_data_prep's names, and the rest.

    Neither a time, nor what the output does not depend on: the same preparation gives
    the same bytes.
    """
    preparation = contents.preparation
    tokenizer = open_tokenizer(preparation.tokenizer)
    rows = {split.split: split.rows for split in contents.finished}
    settings = dataclasses.asdict(preparation)
    for name in ("inputs", "output", "tokenizer"):
        settings.pop(name)
    settings["record"]["categories"] = len(preparation.record.categories)
    return {
        "max_seq_length": preparation.length,
        "token_type_ids": True,
        "vocab_size": tokenizer.vocabulary_size,
        "tokenizer_model_type": _model_type(preparation),
        "number_of_training_files": len(rows.get(TRAIN, ())),
        "number_of_dev_files": len(rows.get(DEV, ())),
        "number_of_test_files": len(rows.get(TEST, ())),
        "max_batch_size_train": min(rows.get(TRAIN, [0])),
        "max_batch_size_dev": min(rows.get(DEV, [0])),
        "data_sets": list(columns(preparation)),
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
        "inputs": [
            {"file": file.path.name, "sha256": digest}
            for file, digest in zip(contents.files, contents.found.digests, strict=True)
        ],
        "settings": json.loads(json.dumps(settings)),
    }


def _model_type(preparation: Preparation) -> str:
    """What the tokenizer's folder says of its model, or the name of its kind."""
    path = Path(preparation.tokenizer.path)
    config = (path if path.is_dir() else path.parent) / MODEL_CONFIG
    if config.is_file():
        try:
            found = json.loads(config.read_text(encoding="utf-8")).get("model_type")
        except (ValueError, AttributeError):
            found = None
        if isinstance(found, str):
            return found
    return type(open_tokenizer(preparation.tokenizer)).__name__


def _draw(contents: Contents, file: Path, reporter: PreparationReporter) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        reporter.say(
            f"no {file.name}: it needs matplotlib, pip install 'prompt-tuning[plots]'"
        )
        return
    from prompt_tuning.data.preparation.preparation_plot import draw

    draw({SPLIT_NAMES[s.split]: s.metrics for s in contents.finished}, file)


def _checksums(folder: Path) -> str:
    """Of every file, as `sha256sum --check` reads them."""
    lines = []
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{digest}  {path.relative_to(folder)}\n")
    return "".join(lines)


def _write_json(file: Path, content: Any) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    file.write_text(text, encoding="utf-8")
