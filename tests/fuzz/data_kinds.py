"""Kinds of input with rows, records, tokenizers and templates."""

import functools
import gzip
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path

import h5py
import numpy as np

from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.model_interface import ModelInterface
from prompt_tuning.data.text.tokenizers import load_tokenizer
from prompt_tuning.pretrained.checkpoint_path import BUNDLED
from prompt_tuning.settings.data_source import DataSource
from tests.fuzz.fuzz_kind import Kind, copy_files, file_names_and, run_command
from tests.fuzz.mutations import mutate_bytes, mutate_json, mutate_text
from tests.support.prepared_files import pairs, write_jsonl
from tests.support.shared_data import FIXTURES
from tests.support.small_runs import UPPER, write_pairs, write_rows
from tests.support.small_tokenizer import CHAT, write_tokenizer

TOKENIZER = BUNDLED / "skills-decoder"
BYTE_LEVEL = FIXTURES / "tokenizers/byte_level"
SENTENCEPIECE = FIXTURES / "tokenizers/bpe"
CSV = 'prompt,completion\n"a, b",c\n"line\nbreak",d\ne,f\n'
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
]


def copy_tokenizer(source: Path, names: Sequence[str], folder: Path) -> None:
    """Copies some files of a tokenizer's folder."""
    copy_files(source, folder, names)


def write_small_tokenizer(folder: Path) -> None:
    """Writes a byte-level tokenizer with a chat template and all its side files."""
    folder.rmdir()
    write_tokenizer(folder, chat_template=CHAT, add_bos_token=False)
    (folder / "special_tokens_map.json").write_text('{"bos_token": "t"}')


def read_tokenizer(folder: Path) -> None:
    """Loads a tokenizer, and encodes and decodes a text."""
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("the thé \U0001f600 <|end|> a\n b")
    tokenizer.decode(ids)
    tokenizer.encode_continuation(" the end")
    if ids:
        tokenizer.token(ids[0])


def _load(files: str) -> None:
    source = DataSource(files=files)
    model = ModelInterface(
        architecture="decoder_only",
        vocabulary_size=61,
        tokenizer=load_tokenizer(TOKENIZER),
        maximum_length=64,
    )
    examples = load_examples(source, model)
    for number in range(min(3, len(examples))):
        examples[number]


def write_hdf5(folder: Path) -> None:
    """Writes rows of tokens with types and loss weights."""
    write_rows(folder / "rows.hdf5", UPPER[:6])
    with h5py.File(folder / "rows.hdf5", "a") as file:
        types = np.asarray(file["token_type_ids"])
        file["loss_weights"] = (types == 1).astype(np.float32)


def write_compressed_hdf5(folder: Path) -> None:
    """Writes compressed rows in chunks, as `prepare` does."""
    write_rows(folder / "plain.hdf5", UPPER[:6])
    with (
        h5py.File(folder / "plain.hdf5") as plain,
        h5py.File(folder / "rows.hdf5", "w", libver="earliest") as file,
    ):
        for name, data in plain.items():
            file.create_dataset(name, data=data[:], chunks=(2, 8), compression="gzip")
    (folder / "plain.hdf5").unlink()


def read_hdf5(folder: Path) -> None:
    """Loads the examples of an HDF5 file."""
    _load(str(folder / "rows.hdf5"))


def show(name: str, folder: Path) -> None:
    """Prints rows."""
    run_command("show", "--tokenizer", TOKENIZER, folder / name)


def add_token_types(folder: Path) -> None:
    """Replaces the token types of a file by those of an array."""
    file = folder / "rows.hdf5"
    run_command("token-types", "--replace", "--array", folder / "types.npy", file)


def write_typed_hdf5(folder: Path) -> None:
    """Writes rows, and an array of new token types."""
    write_hdf5(folder)
    np.save(folder / "types.npy", np.ones((6, 24), np.int32))


def write_texts_hdf5(folder: Path) -> None:
    """Writes rows, an array of new token types, and texts of variable length."""
    write_typed_hdf5(folder)
    with h5py.File(folder / "rows.hdf5", "a") as file:
        file["texts"] = ["a", "bb" * 9, "ccc"] * 2
        file.attrs["made_by"] = "hand" * 9


def write_lines(folder: Path) -> None:
    """Writes rows as jsonl."""
    write_pairs(folder / "rows.jsonl", UPPER[:6])


def read_lines(folder: Path) -> None:
    """Loads the examples of a jsonl file."""
    _load(str(folder / "rows.jsonl"))


def write_data(name: str, text: str, folder: Path) -> None:
    """Writes a file of text, and a tokenizer with a chat template."""
    write_tokenizer(folder / "tokenizer", chat_template=CHAT)
    content = text.encode()
    if name.endswith(".gz"):
        content = gzip.compress(content, mtime=0)
    (folder / name).write_bytes(content)


def write_parquet(folder: Path) -> None:
    """Writes conversations as parquet."""
    arrow = importlib.import_module("pyarrow")
    parquet = importlib.import_module("pyarrow.parquet")
    rows = [{"messages": MESSAGES, "weight": 1.0}] * 3
    parquet.write_table(arrow.Table.from_pylist(rows), folder / "rows.parquet")
    write_tokenizer(folder / "tokenizer", chat_template=CHAT)


def read_data(name: str, folder: Path, *, weight_key: str | None = "weight") -> None:
    """Loads the examples of a file of text, cut to a maximum length."""
    source = DataSource(
        files=str(folder / name), on_too_long="truncate", example_weight_key=weight_key
    )
    model = ModelInterface(
        architecture="decoder_only",
        vocabulary_size=262,
        tokenizer=load_tokenizer(folder / "tokenizer"),
        maximum_length=24,
    )
    examples = load_examples(source, model)
    for number in range(min(3, len(examples))):
        examples[number]


def write_table(name: str, text: str, folder: Path) -> None:
    """Writes a file of records, and a tokenizer."""
    write_tokenizer(folder / "tokenizer")
    (folder / name).write_text(text)


def write_records(folder: Path) -> None:
    """Writes records as jsonl, and a tokenizer."""
    write_tokenizer(folder / "tokenizer")
    write_jsonl(folder / "records.jsonl", *pairs(4))


def prepare(records: str, options: Sequence[str], folder: Path) -> None:
    """Prepares the records of a folder with its tokenizer."""
    run_command(
        *("prepare", "--output", folder / "prepared", "--length", 32, "--workers", 1),
        *("--tokenizer", folder / "tokenizer", folder / records),
        *(option.replace("FOLDER", str(folder)) for option in options),
    )


def _prepare(*options: str, records: str = "records.jsonl"):
    return functools.partial(prepare, records, options)


def write_chat(folder: Path) -> None:
    """Writes a conversation, a chat template, and a tokenizer."""
    write_jsonl(folder / "records.jsonl", {"messages": MESSAGES})
    write_tokenizer(folder / "tokenizer", chat_template=CHAT)
    (folder / "template.jinja").write_text(CHAT)


def write_special_tokens(folder: Path) -> None:
    """Writes records, and the special tokens of roles."""
    write_records(folder)
    (folder / "roles.json").write_text(
        json.dumps(
            {"pad_token": "<pad>", "additional_special_tokens": ["<|user|>", "<|end|>"]}
        )
    )


def write_prepared(folder: Path) -> None:
    """Writes records, and a complete preparation to be replaced."""
    write_records(folder)
    prepare("records.jsonl", (), folder)


PAIRS = 'prompt,completion,weight\n"a, b",c,1\n"line\nbreak",d,0.5\ne,f,2\n'
TALK = {
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "Hi", "weight": 1},
    ],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "chat_template_kwargs": {"style": "brief"},
    "weight": 1.5,
}
TRL = {"prompt": MESSAGES[:2], "completion": MESSAGES[2:], "weight": 1}
SHAREGPT = {
    "system": "Be brief.",
    "conversations": [
        {"from": "human", "value": "Hello"},
        {"from": "gpt", "value": "Hi"},
    ],
    "weight": 1,
}
ALPACA = {
    "instruction": "Add.",
    "input": "1 2",
    "output": "3",
    "system": "Be brief.",
    "history": [["Add.", "0"]],
    "weight": 1,
}
INDEXED = ",prompt,completion,weight\n0,a,b,1\n1,c,d,2\n"
COLUMNS = {"prompt": ["a", "c"], "completion": ["b", 1], "weight": [1, 2.5]}
DATA = (
    ("pairs.csv", PAIRS, mutate_text),
    ("pairs.tsv", PAIRS.replace(",", "\t"), mutate_text),
    ("semicolons.csv", PAIRS.replace(",", ";"), mutate_text),
    ("index.csv", INDEXED, mutate_text),
    ("columns.json", json.dumps(COLUMNS), mutate_json),
    ("messages.jsonl.gz", json.dumps(TALK), mutate_bytes),
    ("pairs.csv.gz", PAIRS, mutate_bytes),
    ("list.json", json.dumps([TALK] * 2), mutate_json),
    ("messages.jsonl", json.dumps(TALK), mutate_json),
    ("sharegpt.jsonl", json.dumps(SHAREGPT), mutate_json),
    ("trl.jsonl", json.dumps(TRL), mutate_json),
    ("alpaca.jsonl", json.dumps(ALPACA), mutate_text),
)
TEMPLATE_OPTIONS = ("--chat", "--chat_template", "FOLDER/template.jinja")
KINDS = [
    Kind(
        "tokenizer-json",
        write_small_tokenizer,
        {"tokenizer.json": mutate_json},
        read_tokenizer,
    ),
    Kind(
        "tokenizer-settings",
        write_small_tokenizer,
        {"tokenizer_config.json": mutate_json, "special_tokens_map.json": mutate_json},
        read_tokenizer,
    ),
    Kind("hdf5-rows", write_hdf5, {"rows.hdf5": mutate_bytes}, read_hdf5),
    Kind("hdf5-chunks", write_compressed_hdf5, {"rows.hdf5": mutate_bytes}, read_hdf5),
    Kind(
        "hdf5-show",
        write_compressed_hdf5,
        {"rows.hdf5": mutate_bytes},
        functools.partial(show, "rows.hdf5"),
    ),
    Kind(
        "token-types",
        write_typed_hdf5,
        {"types.npy": mutate_bytes, "rows.hdf5": mutate_bytes},
        add_token_types,
    ),
    Kind(
        "token-types-texts",
        write_texts_hdf5,
        {"rows.hdf5": mutate_bytes},
        add_token_types,
    ),
    Kind("jsonl-rows", write_lines, {"rows.jsonl": mutate_text}, read_lines),
    Kind(
        "jsonl-show",
        write_lines,
        {"rows.jsonl": mutate_text},
        functools.partial(show, "rows.jsonl"),
    ),
    *(
        Kind(
            f"{name.replace('.', '-')}-rows",
            functools.partial(write_data, name, text),
            {name: mutation},
            functools.partial(read_data, name),
        )
        for name, text, mutation in DATA
    ),
    Kind("prepare-jsonl", write_records, {"records.jsonl": mutate_text}, _prepare()),
    Kind(
        "prepare-csv",
        functools.partial(write_table, "records.csv", CSV),
        {"records.csv": mutate_text},
        _prepare(records="records.csv"),
    ),
    Kind(
        "prepare-gz",
        functools.partial(write_data, "records.csv.gz", CSV),
        {"records.csv.gz": mutate_bytes},
        _prepare(records="records.csv.gz"),
    ),
    Kind(
        "prepare-tsv",
        functools.partial(write_table, "records.tsv", CSV.replace(",", "\t")),
        {"records.tsv": mutate_text},
        _prepare(records="records.tsv"),
    ),
    Kind(
        "prepare-txt",
        functools.partial(write_table, "records.txt", "a line\nanother\n"),
        {"records.txt": mutate_text},
        _prepare(records="records.txt"),
    ),
    Kind(
        "prepare-chat", write_chat, {"records.jsonl": mutate_json}, _prepare("--chat")
    ),
    Kind(
        "chat-template",
        write_chat,
        {"template.jinja": mutate_text},
        _prepare(*TEMPLATE_OPTIONS),
    ),
    Kind(
        "special-tokens",
        write_special_tokens,
        {"roles.json": mutate_json},
        _prepare("--special_tokens", "FOLDER/roles.json"),
        names=functools.partial(file_names_and, "--special_tokens"),
    ),
    Kind(
        "prepared-folder",
        write_prepared,
        {"prepared/*": mutate_text},
        _prepare("--force"),
    ),
]
if importlib.util.find_spec("pyarrow") is not None:
    KINDS.append(
        Kind(
            "parquet-rows",
            write_parquet,
            {"rows.parquet": mutate_bytes},
            functools.partial(read_data, "rows.parquet"),
        )
    )
KINDS += [
    Kind(
        "tokenizer-merges",
        functools.partial(copy_tokenizer, BYTE_LEVEL, ("vocab.json", "merges.txt")),
        {"vocab.json": mutate_text, "merges.txt": mutate_text},
        read_tokenizer,
    ),
    Kind(
        "sentencepiece",
        functools.partial(copy_tokenizer, SENTENCEPIECE, ("tokenizer.model",)),
        {"tokenizer.model": mutate_bytes},
        read_tokenizer,
    ),
]
