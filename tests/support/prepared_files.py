"""Writes files to prepare, and reads prepared ones."""

import json

import h5py
import numpy as np

from prompt_tuning.data.text.tokenizers import load_tokenizer


def write_jsonl(path, *lines):
    text = "".join(
        (line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines
    )
    path.write_text(text, encoding="utf-8")
    return path


def pairs(count):
    return [
        {"prompt": f"What is {i} and the {i}?", "completion": f"It is {2 * i}."}
        for i in range(count)
    ]


def columns(file) -> dict[str, np.ndarray]:
    with h5py.File(file) as content:
        return {name: content[name][:] for name in content}  # pyright: ignore


def texts(folder, tokenizer, file="train_1_of_1.hdf5"):
    """Returns each row as consecutive (type, text) pairs, without padding."""
    arrays = columns(folder / file)
    reader = load_tokenizer(tokenizer)
    rows = []
    for ids, types in zip(arrays["input_ids"], arrays["token_type_ids"], strict=True):
        starts = np.flatnonzero(np.diff(types, prepend=-1))
        runs = np.split(np.arange(len(ids)), starts[1:])
        rows.append(
            [
                (int(types[run[0]]), "".join(map(reader.token, ids[run].tolist())))
                for run in runs
                if types[run[0]] != 2
            ]
        )
    return [[(t, text.replace("Ġ", " ")) for t, text in row] for row in rows]


def snapshot(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
