"""Kinds of input that describe a frozen model: Hugging Face folders and T5X files."""

import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file, save_file

from prompt_tuning.checkpoints.formats.t5x_checkpoint import open_t5x
from prompt_tuning.checkpoints.formats.zarr import open_zarr
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.data.text.chat_templates import chat_template_of, has_chat_template
from prompt_tuning.data.text.tokenizers import has_tokenizer, load_tokenizer
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.settings.pretrained import Pretrained
from scripts.random_model import write_random_model
from tests.checkpoints.formats.test_zarr import floats, write_zarr
from tests.fuzz.fuzz_kind import Kind, copy_files
from tests.fuzz.mutations import mutate_bytes, mutate_json
from tests.support.dummies import LLAMA
from tests.support.t5x_fixtures import MSGPACK

FAMILIES = Path(__file__).parents[1] / "fixtures/families"
GGUF = FAMILIES.parent / "gguf"
JSON_FILES = ("config.json", "generation_config.json")  # an encoder has the first


def write_model(config: ModelConfig, folder: Path) -> None:
    """Writes a Hugging Face folder with random weights."""
    write_random_model(folder, config)


def write_split_model(folder: Path) -> None:
    """Writes a Hugging Face folder whose weights are in two files with an index."""
    write_random_model(folder, LLAMA)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in files.items():
        save_file({name: tensors[name] for name in members}, folder / file)
    index = {name: file for file, members in files.items() for name in members}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )


def read_model(path: Path) -> None:
    """Opens a model as every command does, and reads all parameters."""
    source = Pretrained(checkpoint=str(path))
    open_pretrained(source, key=jax.random.key(0)).plan.restore()


def mutate_header(rng, data: bytes) -> bytes:
    """Damages the JSON header of a safetensors file and keeps its length correct."""
    length = int.from_bytes(data[:8], "little")
    header = mutate_json(rng, data[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def read_gguf_model(name: str, folder: Path) -> None:
    """Opens a GGUF file as every command does, and reads all of it."""
    file = folder / f"{name}.gguf"
    read_model(file)
    if not has_tokenizer(file):
        return
    tokenizer = load_tokenizer(file)
    tokenizer.encode("Once upon a time")
    if has_chat_template(tokenizer):
        chat_template_of(tokenizer)


def copy_gguf(name: str, folder: Path) -> None:
    """Copies a GGUF file."""
    shutil.copy(GGUF / f"{name}.gguf", folder)


def mutate_start(rng, data: bytes) -> bytes:
    """Damages the metadata and the table of a GGUF file."""
    return mutate_bytes(rng, data[:2048]) + data[2048:]


def write_msgpack(folder: Path) -> None:
    """Copies a T5X checkpoint in MessagePack."""
    shutil.copy(MSGPACK, folder / "checkpoint")


def read_t5x(folder: Path) -> None:
    """Reads every array of a T5X checkpoint."""
    for tensor in open_t5x(folder).values():
        tensor.read()


def write_chunks(folder: Path, **metadata: object) -> None:
    """Writes a zarr array of two chunks."""
    folder.rmdir()
    data = floats(1, 2, 3)
    if metadata:
        import gzip

        data = gzip.compress(data)
    write_zarr(folder, {"0": data, "1": data}, **metadata)


def read_zarr(folder: Path) -> np.ndarray:
    """Reads a zarr array."""
    return open_zarr(folder).read()


GZIP = {"id": "gzip", "level": 1}
KINDS = [
    *(
        Kind(
            f"{family.name}-config",
            functools.partial(copy_files, family / "base"),
            {
                name: mutate_json
                for name in JSON_FILES
                if (family / "base" / name).is_file()
            },
            read_model,
        )
        for family in sorted(FAMILIES.iterdir())
    ),
    *(
        Kind(
            f"gguf-{kind}",
            functools.partial(copy_gguf, name),
            {"*.gguf": mutate},
            functools.partial(read_gguf_model, name),
        )
        for kind, name, mutate in (
            ("pieces", "pieces", mutate_bytes),
            ("bytes", "bytes", mutate_bytes),
            ("llama", "llama", mutate_start),
            ("fields", "pieces", mutate_start),
        )
    ),
    Kind(
        "safetensors-bytes",
        functools.partial(write_model, LLAMA),
        {"model.safetensors": mutate_bytes},
        read_model,
    ),
    Kind(
        "safetensors-header",
        functools.partial(write_model, LLAMA),
        {"model.safetensors": mutate_header},
        read_model,
    ),
    Kind(
        "safetensors-index",
        write_split_model,
        {"*.index.json": mutate_json, "*.safetensors": mutate_header},
        read_model,
    ),
    Kind(
        "zarr", write_chunks, {".zarray": mutate_json, "[01]": mutate_bytes}, read_zarr
    ),
    Kind(
        "zarr-gzip",
        functools.partial(write_chunks, compressor=GZIP),
        {".zarray": mutate_json, "[01]": mutate_bytes},
        read_zarr,
    ),
    Kind("t5x", write_msgpack, {"checkpoint": mutate_bytes}, read_t5x),
]
