"""The command `prompt-tuning convert`: what was tuned, in another form."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from prompt_tuning.adapters import adapter_files
from prompt_tuning.adapters.adapter import ADDED_DEEP, DEEP, IA3, LORA, Adapter
from prompt_tuning.adapters.merge import write_merged
from prompt_tuning.adapters.peft.conversion import to_peft
from prompt_tuning.adapters.peft.folder import find_folder, write_folder
from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER
from prompt_tuning.cli.run_options import run_in
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import merge
from prompt_tuning.families.hf_config import read_config
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained.source import Pretrained
from prompt_tuning.prompts.prompting import Prompting
from prompt_tuning.sweep.sweep_summary import best_member
from prompt_tuning.training.run_directory import CONFIG_FILE
from prompt_tuning.tuned.export_adapters import adapters_of, as_peft_has_it
from prompt_tuning.tuned.load_tuned import load_tuned

SUFFIXES = {".npy": "npy", ".safetensors": "safetensors"}


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What is to be converted.

    Attributes:
      adapters: one of each method.
      config: the model's; None where it is not known.
      base: the model's folder or name; None where it is not known.
      model: of a run, with what it trained.
      prompting: how a run's prompt stands among the text.
    """

    adapters: Sequence[Adapter]
    config: ModelConfig | None
    base: str | None
    model: LanguageModel | None = None
    prompting: Prompting | None = None


def convert(options: argparse.Namespace) -> int:
    """Reads an adapter in one form and writes it in another."""
    source, target = Path(options.source), Path(options.target)
    if not source.exists():
        raise InputError(f"{source} does not exist; expected an adapter or a run")
    form = "merged" if options.merge else options.to or _form(source, target)
    opened = _open(source, options)
    if not opened.adapters:
        raise InputError(
            f"{source} has neither prompt nor adapters: it trained weights of the "
            "model itself, which have no form but its own checkpoints; name it in "
            "Run.start_from, or take them from these"
        )
    chosen = [x for x in opened.adapters if not options.only or x.kind in options.only]
    if form == "merged":
        _merge(target, chosen, opened, options)
    else:
        adapter = _one(chosen, source)
        _write(form, target, adapter, opened, options)
    return 0


def _form(source: Path, target: Path) -> str:
    """What is written where nothing says it: ours of PEFT's, and PEFT's of ours."""
    if target.suffix in SUFFIXES:
        return SUFFIXES[target.suffix]
    is_peft = _run_of(source) is None and find_folder(source) is not None
    return "checkpoint" if is_peft else "peft"


def _open(source: Path, options: argparse.Namespace) -> Tuned:
    directory = _run_of(source)
    if directory is not None:
        return _open_run(directory, source, options)
    if options.bindings:
        raise InputError(
            f"{source} is no run's, so no config uses {options.bindings}; name the "
            "model by --base_model"
        )
    config, base = None, options.base_model
    if base is not None and (Pretrained(checkpoint=base).path / "config.json").exists():
        base = str(Pretrained(checkpoint=base).path)
        config = read_config(base)
    adapter = adapter_files.read_adapter(source, config)
    return Tuned(adapters=[adapter], config=config, base=base)


def _run_of(source: Path) -> Path | None:
    """The run that a directory, or a checkpoint in it, belongs to; None for no run."""
    if not source.is_dir():
        return None
    directory = best_member(source) or source
    for above in (source, source.parent):
        if above.name == FOLDER:
            directory = above.parent
    return directory if (directory / CONFIG_FILE).is_file() else None


def _open_run(directory: Path, source: Path, options: argparse.Namespace) -> Tuned:
    """A run's model with what it trained, or with one of its checkpoints."""
    # One process reads all of it, whatever mesh the run was trained on.
    run = dataclasses.replace(run_in(directory, options.bindings), mesh=None)
    described, parameters = load_tuned(run)
    if (source / checkpoint_files.STATE_FILE).is_file():
        state = checkpoint_files.verify(source)
        trained = checkpoint_files.read_trained(source, state)
        parameters |= {path: jnp.asarray(leaf) for path, leaf in trained.items()}
    everything: Any = described.weight_storage.abstract_streamed() | parameters
    model = merge(described.graph, everything)
    assert isinstance(model, LanguageModel)
    adapters = adapters_of(model)
    if any(adapter.kind in (DEEP, ADDED_DEEP) for adapter in adapters):
        described.weight_storage.reject_streamed(
            "a deep prompt is converted by all weights"
        )
    folder = run.model.path
    base = str(folder) if (folder / "config.json").is_file() else None
    return Tuned(
        adapters=adapters,
        config=described.config,
        base=options.base_model or base,
        model=model,
        prompting=described.prompting,
    )


def _one(adapters: Sequence[Adapter], source: Path) -> Adapter:
    """The only one.

    Raises:
      InputError: if there is none, or several.
    """
    if len(adapters) == 1:
        return adapters[0]
    kinds = ", ".join(adapter.kind for adapter in adapters) or "none"
    raise InputError(
        f"{source} has adapters of these kinds: {kinds}; one is written at a time: "
        "choose by --only"
    )


def _merge(
    target: Path,
    adapters: Sequence[Adapter],
    opened: Tuned,
    options: argparse.Namespace,
) -> None:
    """Writes the frozen model with LoRA and IA3 in its weights."""
    others = [x.kind for x in adapters if x.kind not in (LORA, IA3)]
    if others or not adapters:
        raise InputError(
            f"--merge puts LORA and IA3 into the model's weights, and {others} is "
            "neither: it would be lost. Choose by --only LORA or --only IA3, and "
            "write the rest apart"
        )
    if opened.config is None or opened.base is None:
        raise InputError(
            "--merge needs the frozen model as a Hugging Face folder: --base_model PATH"
        )
    base = Pretrained(checkpoint=opened.base).path
    write_merged(target, base, adapters, force=options.force)
    kinds = " and ".join(adapter.kind for adapter in adapters)
    print(f"{target}: the model of {base} with {kinds} in its weights")


def _write(
    form: str,
    target: Path,
    adapter: Adapter,
    opened: Tuned,
    options: argparse.Namespace,
) -> None:
    """Writes one adapter in a form, and says what it wrote."""
    arrays = adapter.parameters
    if form == "peft":
        adapter = as_peft_has_it(adapter, opened.model, opened.prompting)
        folder = to_peft(
            adapter,
            opened.config,
            base_model=opened.base,
            task_type=options.task_type,
        )
        write_folder(target, folder, force=options.force)
        arrays = folder.tensors
    elif form == "checkpoint":
        adapter_files.write_checkpoint(target, adapter, options.source)
    elif form == "t5x":
        adapter_files.write_t5x(target, adapter, force=options.force)
    else:
        _check_suffix(form, target)
        adapter_files.write_array(target, adapter, force=options.force)
    print(f"{target}: {adapter.kind}")
    for name, array in arrays.items():
        print(f"  {name} {list(array.shape)}")
    if adapter.kind in (DEEP, ADDED_DEEP):
        print("  (one prompt for each block; PEFT and servers have no such method)")


def _check_suffix(form: str, target: Path) -> None:
    """Refuses a name by which nobody could tell what is in the file."""
    wanted = {found: suffix for suffix, found in SUFFIXES.items()}[form]
    if target.suffix != wanted:
        raise InputError(f"--to {form} writes a file named *{wanted}, found {target}")
