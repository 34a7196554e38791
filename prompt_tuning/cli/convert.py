"""`prompt-tuning convert`: exports what a run trained, or imports a PEFT adapter."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from prompt_tuning.cli.diff import find_arrays
from prompt_tuning.cli.shared_options import add_imports_option, refuse_bindings
from prompt_tuning.core.errors import InputError

if TYPE_CHECKING:
    from prompt_tuning.tuned.adapter_conversion import ConversionSource

HELP = "convert a tuned prompt or adapter to another form, or from PEFT"
USES_JAX = True
WRITTEN = "peft", "checkpoint", "npy", "safetensors", "int8", "t5x", "t5x_model"
PROMPT_KV = "prompt_kv"
"""Target that stands for a file next to the source."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="a run directory (its best checkpoint), a checkpoint, a PEFT folder, or a "
        "file with a single array",
    )
    parser.add_argument(
        "target",
        type=Path,
        metavar="TARGET",
        help="what to write; prompt_kv stores a prompt's keys and values next to "
        "SOURCE, where serve and chat find them",
    )
    parser.add_argument(
        "--to",
        choices=WRITTEN,
        help="the form to write: npy and safetensors hold a single array, int8 a "
        "key/value prefix (*.safetensors), t5x a folder of prompts with the names of "
        "google-research/prompt-tuning, t5x_model a whole T5X checkpoint of a run's "
        "model and prompts (default: by TARGET's suffix, else a checkpoint to start "
        "runs from if SOURCE is a PEFT folder, and a PEFT folder if it is not)",
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="write the frozen model, as a Hugging Face folder, with LoRA and IA3 "
        "merged into its weights",
    )
    parser.add_argument(
        "--base_model",
        metavar="PATH",
        help="the frozen model of a SOURCE that is not a run: a Hugging Face folder or "
        "bundled:NAME; also recorded in a PEFT folder",
    )
    parser.add_argument(
        "--task_type",
        choices=("CAUSAL_LM", "SEQ_2_SEQ_LM"),
        help="task type recorded in a PEFT folder (default: by the model)",
    )
    parser.add_argument(
        "--only",
        action="append",
        metavar="KIND",
        help="kind to write if a run has several, e.g. LORA; may be repeated",
    )
    parser.add_argument(
        "--variable",
        metavar="NAME",
        help="write this array of any checkpoint that `diff` reads as a .npy file, and "
        "nothing else; bfloat16 becomes float32",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="replace a target that this command wrote before",
    )
    add_imports_option(parser)


def run(options: argparse.Namespace) -> int:
    """Reads an adapter in one form and writes it in another."""
    if options.variable is not None:
        return _extract(options)
    if options.target == Path(PROMPT_KV) and options.to is None:
        return _store_prompt_kv(options)
    from prompt_tuning.tuned.adapter_conversion import (
        default_form,
        open_source,
        write_adapters,
    )

    source = open_source(
        options.source,
        options.base_model,
        options.bindings,
        allow_imports=options.allow_gin_imports,
    )
    form = "merged" if options.merge else options.to
    form = form or default_form(options.source, options.target)
    lines = write_adapters(
        source,
        options.target,
        form,
        only=options.only or (),
        task_type=options.task_type,
        force=options.force,
    )
    print("\n".join(lines))
    print(f"next: {_how_to_load(options.target, form, source)}")
    return 0


def _store_prompt_kv(options: argparse.Namespace) -> int:
    """Stores the keys and values of a prompt next to it."""
    from prompt_tuning.tuned.prompt_kv import store_prompt_kv

    unused = ("merge", "only", "task_type")
    contradicting = [f"--{name}" for name in unused if getattr(options, name)]
    if contradicting:
        raise InputError(
            f"{PROMPT_KV} has no use for {' '.join(contradicting)}: leave it out"
        )
    line = store_prompt_kv(
        options.source,
        options.base_model,
        options.bindings,
        allow_imports=options.allow_gin_imports,
        force=options.force,
    )
    print(line)
    source = shlex.quote(str(options.source))
    print(f"next: prompt-tuning serve --model MODEL --adapter NAME={source}")
    return 0


def _extract(options: argparse.Namespace) -> int:
    from prompt_tuning.adapters.stored_arrays import read_array
    from prompt_tuning.core.atomic_files import check_replaceable, write_file
    from prompt_tuning.core.numpy_files import numpy_bytes

    refuse_bindings(options)
    unused = ("merge", "only", "base_model", "task_type")
    contradicting = [f"--{name}" for name in unused if getattr(options, name)]
    if options.to not in (None, "npy") or contradicting:
        raise InputError(
            f"--variable writes a .npy file; remove {' '.join(contradicting) or '--to'}"
        )
    if options.target.suffix != ".npy":
        raise InputError(f"{options.target} has another suffix than .npy")
    check_replaceable(options.target, force=options.force)
    array = read_array(find_arrays(str(options.source)), options.variable)
    write_file(options.target, numpy_bytes(array), force=options.force)
    print(f"{options.target}: {array.dtype.name}{list(array.shape)}")
    return 0


def _how_to_load(target: Path, form: str, source: "ConversionSource") -> str:
    """Returns a command that uses the result."""
    path, model = shlex.quote(str(target)), shlex.quote(source.base or "MODEL")
    checkpoint = str(target) if form == "t5x_model" else source.described
    if source.config is not None and checkpoint is not None:
        from prompt_tuning.families.t5x import config_bindings

        words = [str(checkpoint), "--tokenizer", str(source.tokenizer)]
        words += [f"--gin.{binding}" for binding in config_bindings(source.config)]
        model = shlex.join(words)
    if form == "merged" and _is_encoder(source):
        return f"in Python, prompt_tuning.load({str(target)!r}).embed(TEXT)"
    command = "predict" if _classifies(source) else "generate"
    if form == "merged":
        return f"prompt-tuning {command} --model {path} TEXT"
    if form == "t5x_model":
        return f"prompt-tuning train --train FILE --model {model}"
    if form == "checkpoint":
        return f"prompt-tuning train --model {model} --train FILE --start_from {path}"
    file = f"{path}/FILE" if form == "t5x" else path
    here = f"prompt-tuning {command} --model {model} --prompt {file} TEXT"
    peft = f"; with PEFT, PeftModel.from_pretrained(model, {str(target)!r})"
    return here + peft if form == "peft" else here


def _classifies(source: "ConversionSource") -> bool:
    """Whether the adapters or their model have a class head."""
    from prompt_tuning.adapters.adapter import CLASSES_PATH

    stored = any(CLASSES_PATH in adapter.parameters for adapter in source.adapters)
    return stored or bool(source.config and source.config.labels)


def _is_encoder(source: "ConversionSource") -> bool:
    config = source.config
    return config is not None and config.bidirectional and not config.labels
