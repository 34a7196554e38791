"""Kinds of input on the command line: options, bindings, and config files."""

import functools
import json
from pathlib import Path

from prompt_tuning.config.gin_files import read_run
from tests.fuzz.data_kinds import TOKENIZER, write_hdf5
from tests.fuzz.fuzz_kind import Kind, file_names, run_command
from tests.fuzz.mutations import mutate_text
from tests.support.small_tokenizer import write_tokenizer

CONFIG = """\
# A prompt.
include 'runs/first_prompt.gin'
MODEL = 'bundled:skills-decoder'
TRAIN_FILES = ['train.jsonl']
EVALUATION_FILES = 'held_out.jsonl'
RUN_DIRECTORY = 'run'
PROMPT_LENGTH = 4
SoftPrompt.initializer = @uniform()
train/DataSource.maximum_examples = 7
"""
BINDINGS = {
    "MODEL": "'bundled:skills-decoder'",
    "TRAIN_FILES": "('a.jsonl', 'b.jsonl')",
    "EVALUATION_FILES": "'held_out.jsonl'",
    "RUN_DIRECTORY": "'run'",
    "PROMPT_LENGTH": "4",
    "Run.steps": "20",
    "Run.seed": "3",
    "Run.mesh": "@MeshShape()",
    "MeshShape.data": "1",
    "Pretrained.assignment_map": "((r'.*/prompt/.*', None),)",
    "adafactor.learning_rate": "0.3",
    "DataSource.batch_size": "8",
}
SHOW = ["show", "--rows", "0", "--tokenizer", str(TOKENIZER), "FILE"]
TOKEN_TYPES = ["token-types", "--lengths", "3", "--replace", "FILE"]
PREPARE = [
    *("prepare", "--output", "prepared", "--tokenizer", "tokenizer"),
    *("--length", "32", "--packing", "greedy::drop", "--dev", "1", "--seed", "3"),
    *("--train_files", "1", "--workers", "1", "lines.txt"),
]
SHOWN = 20
CONFIGS = ["configs", "runs/first_prompt.gin"]


def write_config(folder: Path) -> None:
    """Writes a config."""
    (folder / "config.gin").write_text(CONFIG)


def read_config(folder: Path) -> None:
    """Reads the run of a config."""
    read_run([str(folder / "config.gin")], [])


def write_bindings(folder: Path) -> None:
    """Writes bindings of the command line."""
    (folder / "bindings.json").write_text(json.dumps(BINDINGS))


def read_bindings(folder: Path) -> None:
    """Reads the run of a shipped config with bindings."""
    bindings = json.loads((folder / "bindings.json").read_bytes())
    read_run(["runs/first_prompt.gin"], [f"{k} = {v}" for k, v in bindings.items()])


def mutate_values(rng, data: bytes) -> bytes:
    """Damages the text of one binding, or its name."""
    bindings = json.loads(data)
    name = rng.choice(list(bindings))
    if rng.random() < 0.1:
        damaged = mutate_text(rng, name.encode()).decode(errors="replace")
        bindings[damaged] = bindings.pop(name)
    else:
        damaged = mutate_text(rng, bindings[name].encode())
        bindings[name] = damaged.decode(errors="replace")
    return json.dumps(bindings).encode()


def binding_names(folder: Path) -> set[str]:
    """Returns the names of the bindings, and of the settings that macros are for."""
    bindings = json.loads((folder / "bindings.json").read_bytes())
    settings = {"--gin.", "Pretrained.checkpoint", "Run.directory"}
    return {name[:SHOWN] for name in bindings if name} | settings


def argument_names(folder: Path) -> set[str]:
    """Returns the arguments, as far as messages show long ones, and the files."""
    arguments = json.loads((folder / "arguments.json").read_bytes())
    given = {argument[:SHOWN] or "''" for argument in arguments[1:]}
    return given | file_names(folder)


def write_arguments(arguments: list[str], folder: Path) -> None:
    """Writes the arguments of a command, and the files that they name."""
    (folder / "arguments.json").write_text(json.dumps(arguments))
    (folder / "lines.txt").write_text("upper\nlower\n")
    write_tokenizer(folder / "tokenizer")
    write_hdf5(folder)


def read_arguments(folder: Path) -> None:
    """Runs a command."""
    arguments = json.loads((folder / "arguments.json").read_bytes())
    files = {"FILE": folder / "rows.hdf5"}
    files |= {name: folder / name for name in ("lines.txt", "prepared", "tokenizer")}
    run_command(*(files.get(argument, argument) for argument in arguments))


def mutate_argument(rng, data: bytes) -> bytes:
    """Damages one argument; the command and its options stay."""
    arguments = json.loads(data)
    if len(arguments) == 1:
        return data
    spot = rng.randrange(1, len(arguments))
    damaged = mutate_text(rng, arguments[spot].encode()).decode(errors="replace")
    if rng.random() < 0.1:
        del arguments[spot]
    # Arguments cannot hold a zero byte, and what is written stays in the folder.
    elif not damaged.startswith("/"):
        arguments[spot] = damaged.replace("\0", "0").replace("..", "")
    return json.dumps(arguments).encode()


def _command(name: str, arguments: list[str]) -> Kind:
    return Kind(
        name,
        functools.partial(write_arguments, arguments),
        {"arguments.json": mutate_argument},
        read_arguments,
        replaceable=False,
        names=argument_names,
    )


KINDS = [
    Kind("gin-file", write_config, {"config.gin": mutate_text}, read_config),
    Kind(
        "gin-bindings",
        write_bindings,
        {"bindings.json": mutate_values},
        read_bindings,
        replaceable=False,
        names=binding_names,
    ),
    _command("show-options", SHOW),
    _command("token-types-options", TOKEN_TYPES),
    _command("prepare-options", PREPARE),
    _command("configs-options", CONFIGS),
]
