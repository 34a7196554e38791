"""Kinds of input of other programs: fields, tokens, padding, compressed files."""

import functools
import gzip
import json
import random
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.fuzz.adapter_kinds import read, write_peft
from tests.fuzz.command_kinds import argument_names
from tests.fuzz.data_kinds import (
    MESSAGES,
    prepare,
    read_data,
    read_hdf5,
    read_tokenizer,
    write_data,
    write_table,
)
from tests.fuzz.fuzz_kind import (
    Kind,
    file_and_folder_names,
    file_names_and,
    run_command,
)
from tests.fuzz.model_kinds import mutate_header
from tests.fuzz.mutations import mutate_bytes, mutate_json, mutate_text
from tests.support.small_runs import UPPER, write_pairs
from tests.support.tokenizer_folders import COMBINATIONS, write_folder

PLAIN = {"type": "function", "function": {"name": "add", "parameters": {"a": 1}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
FIELDS = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 0},
        {"role": "tool", "content": "3", "name": "add", "tool_call_id": "1"},
        {"role": "assistant", "content": "Hi", "train": True, "extra": None},
    ],
    "tools": [PLAIN],
    "chat_template_kwargs": {"enable_thinking": False},
    "id": 7,
}
TRL = {"prompt": MESSAGES[:2], "completion": MESSAGES[2:], "source": "x"}
HISTORY = {
    "instruction": "Add.",
    "input": "1 2",
    "output": "3",
    "system": "Be brief.",
    "history": [["Hello", "Hi"]],
}
COLUMNS = {"prompt": ["a", "b", "c"], "completion": ["A", "B", "C"]}
EMPTY = 'prompt;completion\na;A\nb;\n"";C\n"c;d";D\n'
RECORDS: tuple[tuple[str, str, Any], ...] = (
    ("fields.jsonl", json.dumps(FIELDS), mutate_json),
    ("trl.jsonl", json.dumps(TRL), mutate_json),
    ("history.jsonl", json.dumps(HISTORY), mutate_json),
    ("columns.json", json.dumps(COLUMNS), mutate_json),
    ("empty.csv", EMPTY, mutate_text),
)
TRAINING = [
    *("train", "--dry_run", "--model", "bundled:skills-decoder", "--train", "rows"),
    *("--eval", "rows"),
    *("--learning_rate", "0.3", "--steps", "2", "--batch_size", "2", "--seed", "1"),
    *("--prompt_length", "2", "--prompt_loss_weight", "0", "--out", "run"),
    *("--eval_every", "1", "--save_every", "1", "--accumulate", "1"),
]


def write_left_padding(folder: Path) -> None:
    """Writes rows of tokens with padding before, between and after their examples."""
    ids = np.array([[0, 0, 5, 6, 7, 2], [0, 5, 6, 2, 0, 0], [5, 2, 0, 0, 7, 2]])
    types = np.array([[2, 2, 0, 1, 1, 3], [2, 0, 1, 3, 2, 2], [1, 3, 2, 2, 1, 3]])
    with h5py.File(folder / "rows.hdf5", "w") as file:
        file["input_ids"], file["token_type_ids"] = ids, types


def mutate_types(rng: random.Random, data: bytes) -> bytes:
    """Replaces the type of a token, wherever the file has the types of these rows."""
    types = np.array([[2, 2, 0, 1, 1, 3], [2, 0, 1, 3, 2, 2], [1, 3, 2, 2, 1, 3]])
    content, start = bytearray(data), data.find(types.tobytes())
    if start < 0 or rng.random() < 0.2:
        return mutate_bytes(rng, data)
    value = rng.choice((0, 1, 2, 3, 4, -1, 2**31))
    at = start + 8 * rng.randrange(types.size)
    content[at : at + 8] = value.to_bytes(8, "little", signed=True)
    return bytes(content)


def write_spread_tokenizer(combination: str, folder: Path) -> None:
    """Writes a tokenizer whose tokens are spread over several files."""
    folder.rmdir()
    write_folder(folder, combination)


def write_compressed(folder: Path) -> None:
    """Writes compressed records, and a tokenizer with a chat template."""
    write_data("rows.jsonl", json.dumps({"messages": MESSAGES}), folder)
    data = (folder / "rows.jsonl").read_bytes()
    (folder / "rows.jsonl").unlink()
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress((data + b"\n") * 3))


def mutate_compressed(rng: random.Random, data: bytes) -> bytes:
    """Damages the compressed bytes, or the text within them."""
    if rng.random() < 0.5:
        return mutate_bytes(rng, data)
    try:
        return gzip.compress(mutate_text(rng, gzip.decompress(data)))
    except (OSError, EOFError, ValueError, zlib.error):  # damaged before
        return mutate_bytes(rng, data)


def write_named_lora(folder: Path) -> None:
    """Writes LoRA whose tensors have the adapter's name in theirs."""
    write_peft("LORA", folder)
    file = folder / "adapter_model.safetensors"
    tensors = load_file(file)
    named = {n.replace(".weight", ".default.weight"): x for n, x in tensors.items()}
    save_file(named, file)


def write_training(folder: Path) -> None:
    """Writes the arguments of a training, and its rows."""
    (folder / "arguments.json").write_text(json.dumps(TRAINING))
    write_pairs(folder / "rows.jsonl", UPPER[:4])


def mutate_number(rng: random.Random, data: bytes) -> bytes:
    """Replaces the value of one numeric option."""
    arguments = json.loads(data)
    spots = [n for n, x in enumerate(arguments) if x.replace(".", "").isdecimal()]
    values = ("-1", "0", "-0.5", "1.5", "nan", "inf", "-inf", "9" * 24, "1e-400", "x")
    if spots:
        arguments[rng.choice(spots)] = rng.choice(values)
    return json.dumps(arguments).encode()


def read_training(folder: Path) -> None:
    """Checks the options of a training, which is not begun."""
    arguments = json.loads((folder / "arguments.json").read_bytes())
    files = {"rows": folder / "rows.jsonl", "run": folder / "run"}
    run_command(*(files.get(argument, argument) for argument in arguments))


KINDS = [
    *(
        Kind(
            f"{name.replace('.', '-')}-rows",
            functools.partial(write_data, name, text),
            {name: mutation},
            functools.partial(read_data, name, weight_key=None),
        )
        for name, text, mutation in RECORDS
    ),
    Kind(
        "prepare-fields",
        functools.partial(write_data, "fields.jsonl", json.dumps(FIELDS)),
        {"fields.jsonl": mutate_json},
        functools.partial(prepare, "fields.jsonl", ("--chat",)),
    ),
    Kind(
        "prepare-empty",
        functools.partial(write_table, "empty.csv", EMPTY),
        {"empty.csv": mutate_text},
        functools.partial(prepare, "empty.csv", ()),
    ),
    Kind("hdf5-padding", write_left_padding, {"rows.hdf5": mutate_types}, read_hdf5),
    *(
        Kind(
            f"tokens-{combination.replace(', ', '-').replace(' ', '-')}",
            functools.partial(write_spread_tokenizer, combination),
            {"*.json": mutate_json},
            read_tokenizer,
        )
        for combination in COMBINATIONS[::4]
    ),
    Kind(
        "compressed-rows",
        write_compressed,
        {"rows.jsonl.gz": mutate_compressed},
        functools.partial(read_data, "rows.jsonl.gz", weight_key=None),
    ),
    Kind(
        "template-file",
        functools.partial(write_data, "messages.jsonl", json.dumps(FIELDS)),
        {"tokenizer/tokenizer_config.json": mutate_json},
        functools.partial(read_data, "messages.jsonl", weight_key=None),
        names=functools.partial(file_names_and, "Pretrained.eos_id"),
    ),
    Kind(
        "peft-lora-named",
        write_named_lora,
        {"adapter_model.safetensors": mutate_header},
        read,
        names=file_and_folder_names,
    ),
    Kind(
        "training-numbers",
        write_training,
        {"arguments.json": mutate_number},
        read_training,
        replaceable=False,
        names=argument_names,
    ),
]
