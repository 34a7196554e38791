"""The files of an output: sequences, metadata, metrics, checksums and plots."""

import contextlib
import dataclasses
import hashlib
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import read_object
from prompt_tuning.data.preparation import encoding_worker, tokenizer_files
from prompt_tuning.data.preparation.input_files import InputFile
from prompt_tuning.data.preparation.preparation_settings import Preparation
from prompt_tuning.data.preparation.record_index import InputSummary
from prompt_tuning.data.preparation.record_order import DEV, SPLIT_NAMES, TEST, TRAIN
from prompt_tuning.data.preparation.split_writer import TEST_RECORDS, FinishedSplit

METADATA = "metadata.yaml"
METRICS = "metrics.json"
CHECKSUMS = "checksums.sha256"
CATEGORIES = "category_to_id.json"
SKIPPED = "skipped.jsonl"
TOKENIZER = "tokenizer"
PLOTS = "pictures.png"
_NAMES = (
    METADATA,
    METRICS,
    CHECKSUMS,
    CATEGORIES,
    SKIPPED,
    TOKENIZER,
    PLOTS,
    TEST_RECORDS,
)


def is_output_name(name: str) -> bool:
    """Tests whether an output may contain a file of this name."""
    if name in _NAMES:
        return True
    return name.endswith(".hdf5") and name.partition("_")[0] in SPLIT_NAMES


def append_skipped(folder: Path, problems: Sequence[str]) -> None:
    """Appends the problems of skipped files or records, each as a line of JSON."""
    with (folder / SKIPPED).open("ab") as file:
        for problem in problems:
            text = json.dumps({"problem": problem}, ensure_ascii=False)
            # UTF-8 cannot encode a lone surrogate; it is written as JSON's escape.
            file.write(text.encode(errors="backslashreplace") + b"\n")


@dataclasses.dataclass(frozen=True)
class OutputContents:
    """Everything that an output is written from."""

    preparation: Preparation
    files: Sequence[InputFile]
    summary: InputSummary
    finished: Sequence[FinishedSplit]


def write_output(
    contents: OutputContents, folder: Path, say: Callable[[str], None]
) -> None:
    """Writes everything but the sequences, which are in the folder already.

    `say` gets a remark if no plots are written.
    """
    preparation = contents.preparation
    if preparation.record.categories:
        ids = {name: i for i, name in enumerate(preparation.record.categories)}
        _write_json(folder / CATEGORIES, ids)
    tokenizer_files.save_tokenizer(preparation.tokenizer, folder / TOKENIZER)
    _write_json(folder / METRICS, _metrics(contents))
    metadata = yaml.safe_dump(_metadata(contents), sort_keys=False, allow_unicode=True)
    (folder / METADATA).write_text(metadata, encoding="utf-8")
    _write_plots(contents, folder / PLOTS, say)
    # Last, as it covers all other files.
    (folder / CHECKSUMS).write_text(_checksums(folder), encoding="utf-8")


def _metrics(contents: OutputContents) -> dict[str, Any]:
    """Returns the metrics by split; the first one counts the skipped files."""
    metrics = {
        SPLIT_NAMES[split.split]: split.metrics.summary() for split in contents.finished
    }
    skipped_files = len(contents.summary.problems)
    for summary in metrics.values():
        summary["malformed_files"], skipped_files = skipped_files, 0
    return metrics


def _metadata(contents: OutputContents) -> dict[str, Any]:
    """Returns the metadata that a trainer needs, and the settings.

    The first names are from generative_data_prep. Times and anything else that the
    output does not depend on are left out, so the same preparation gives the same
    bytes.
    """
    preparation = contents.preparation
    tokenizer = tokenizer_files.open_tokenizer(preparation.tokenizer)
    rows = {split.split: split.rows for split in contents.finished}
    settings = dataclasses.asdict(preparation)
    for name in ("inputs", "output", "tokenizer"):
        settings.pop(name)
    settings["record"]["categories"] = len(preparation.record.categories)
    digests = contents.summary.digests
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
        "data_sets": list(encoding_worker.columns(preparation)),
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
        "pad_id": tokenizer.pad_id,
        "inputs": [
            {"file": file.path.name, "sha256": digest}
            for file, digest in zip(contents.files, digests, strict=True)
        ],
        "settings": json.loads(json.dumps(settings)),
    }


def _model_type(preparation: Preparation) -> str:
    """Returns the model type of the tokenizer's folder, or the tokenizer's class."""
    path = Path(preparation.tokenizer.path)
    config = (path if path.is_dir() else path.parent) / tokenizer_files.MODEL_CONFIG
    if config.is_file():
        # A config that is not JSON is no problem of the data.
        with contextlib.suppress(InputError):
            model = read_object(config).values.get("model_type")
            if isinstance(model, str):
                return model
    return type(tokenizer_files.open_tokenizer(preparation.tokenizer)).__name__


def _write_plots(
    contents: OutputContents, file: Path, say: Callable[[str], None]
) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        say(
            f"{file.name} was not written because matplotlib is not installed: "
            "pip install matplotlib"
        )
        return
    from prompt_tuning.data.preparation.preparation_plot import plot_metrics

    plot_metrics({SPLIT_NAMES[s.split]: s.metrics for s in contents.finished}, file)


def _checksums(folder: Path) -> str:
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
