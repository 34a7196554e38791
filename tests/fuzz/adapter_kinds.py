"""Kinds of input with trained prompts and adapters, in every format that is read."""

import functools
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from prompt_tuning.adapters.peft.folder import write_folder
from prompt_tuning.adapters.peft.peft_conversion import to_peft
from prompt_tuning.adapters.prompt_files import read_prompt
from prompt_tuning.prompts.adapter_files import read_adapter, write_checkpoint
from tests.fuzz.fuzz_kind import Kind, file_and_folder_names
from tests.fuzz.model_kinds import mutate_header
from tests.fuzz.mutations import mutate_bytes, mutate_json
from tests.support.adapters import random_adapter
from tests.support.dummies import LLAMA

PROMPT = np.ones((4, 16), np.float32)
PEFT_KINDS = {
    "peft-prompt": "PROMPT_TUNING",
    "peft-prefix": "PREFIX_TUNING",
    "peft-multitask": "MULTITASK_PROMPT_TUNING",
    "peft-lora": "LORA",
    "peft-ia3": "IA3",
}


def write_peft(kind: str, folder: Path) -> None:
    """Writes a PEFT folder."""
    write_folder(folder, to_peft(random_adapter(LLAMA, kind), LLAMA), force=True)


def write_adapter_checkpoint(folder: Path) -> None:
    """Writes a checkpoint with an adapter, without a run."""
    folder.rmdir()
    write_checkpoint(folder, random_adapter(LLAMA, "LORA"), "somewhere")


def read(folder: Path) -> None:
    """Reads an adapter for a small Llama."""
    read_adapter(folder, LLAMA)


def write_array(name: str, folder: Path) -> None:
    """Writes a prompt as an array in a file."""
    if name.endswith(".npy"):
        np.save(folder / name, PROMPT)
    else:
        save_file({"prompt_embeddings": PROMPT}, folder / name)


def read_array(name: str, folder: Path) -> None:
    """Reads the prompt in a file, as an adapter and alone."""
    read_prompt(folder / name)
    read_adapter(folder / name, LLAMA)


SETTINGS = {
    "adapter_config.json": mutate_json,
    "adapter_model.safetensors": mutate_header,
}
KINDS = [
    *(
        Kind(
            name,
            functools.partial(write_peft, kind),
            SETTINGS,
            read,
            names=file_and_folder_names,
        )
        for name, kind in PEFT_KINDS.items()
    ),
    Kind(
        "checkpoint-state",
        write_adapter_checkpoint,
        {"numpy_checkpoints/*/state.json": mutate_json},
        read,
    ),
    Kind(
        "checkpoint-arrays",
        write_adapter_checkpoint,
        {"numpy_checkpoints/*/*.npy": mutate_bytes},
        read,
    ),
    Kind(
        "prompt-npy",
        functools.partial(write_array, "prompt.npy"),
        {"prompt.npy": mutate_bytes},
        functools.partial(read_array, "prompt.npy"),
    ),
    Kind(
        "prompt-safetensors",
        functools.partial(write_array, "prompt.safetensors"),
        {"prompt.safetensors": mutate_header},
        functools.partial(read_array, "prompt.safetensors"),
    ),
]
