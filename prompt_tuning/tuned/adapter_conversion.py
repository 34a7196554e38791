"""Read adapters from a run, checkpoint, PEFT folder or file, and write them again."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from prompt_tuning.adapters.adapter import CLASSES, IA3, LORA, PEFT_KINDS, Adapter
from prompt_tuning.adapters.merge import write_merged
from prompt_tuning.adapters.peft.folder import find_folder, write_folder
from prompt_tuning.adapters.peft.peft_conversion import to_peft
from prompt_tuning.adapters.peft.peft_settings import TOKEN_CLS
from prompt_tuning.checkpoints.formats.t5x_checkpoint import write_t5x_checkpoint
from prompt_tuning.checkpoints.run_store import checkpoint_files
from prompt_tuning.checkpoints.run_store.checkpoint_names import FOLDER, KEPT
from prompt_tuning.config.config_values import CONFIG_FILE
from prompt_tuning.config.gin_files import read_run_directory
from prompt_tuning.config.run import Run
from prompt_tuning.core.atomic_files import write_folder as write_new_folder
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.gguf_files import is_gguf
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters, merge, split
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.families.hf_folder import as_tagger, read_config
from prompt_tuning.families.t5x import t5x_arrays
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.pretrained import checkpoint_path
from prompt_tuning.pretrained.hub import find_cached
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.source import read_frozen
from prompt_tuning.prompts import adapter_files
from prompt_tuning.prompts.adapter_kinds import check_kinds, check_prompt_sizes
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.settings.prompting import Prompting
from prompt_tuning.training.run_directory import IDENTITY_FILE, hold_run
from prompt_tuning.training.sweep.best_member import best_member
from prompt_tuning.tuned.export_adapters import (
    convert_for_peft,
    export_adapters,
    join_classes,
    join_tokens,
    runs_model_for_peft,
)
from prompt_tuning.tuned.load_tuned import best_checkpoint, load_tuned

FORMS = "peft", "checkpoint", "npy", "safetensors", "int8", "t5x", "t5x_model", "merged"
SUFFIXES = {".npy": "npy", ".safetensors": "safetensors"}
UNWRITTEN = (".gguf", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".zip", ".json")
"""Suffixes of files that other programs read, none of which we write."""


@dataclasses.dataclass(frozen=True)
class ConversionSource:
    """Adapters to convert, and their model.

    There is one adapter per method; `base` is the folder or name of the frozen model,
    if known. Only a run has the other fields: `model` with its trained parameters,
    `prompting`, the `step` of its checkpoint, the file or folder of its `tokenizer`,
    and `described`, its T5X checkpoint if the files of that do not include a config.
    """

    origin: str
    adapters: Sequence[Adapter]
    config: ModelConfig | None
    base: str | None
    model: LanguageModel | None = None
    prompting: Prompting | None = None
    step: int = 0
    tokenizer: str | None = None
    described: str | None = None


def default_form(source: Path, target: Path) -> str:
    """Chooses the form by the target's suffix, else PEFT (a checkpoint from PEFT).

    Raises:
      InputError: see `form_of_suffix`.
    """
    form = form_of_suffix(target)
    if form is not None:
        return form
    is_peft = _find_run(source) is None and find_folder(source) is not None
    return "checkpoint" if is_peft else "peft"


def form_of_suffix(target: Path) -> str | None:
    """Returns the form that a file's suffix names; None for a folder.

    Raises:
      InputError: for the suffix of a file in a format that is not written.
    """
    if target.suffix in UNWRITTEN:
        raise InputError(
            f"{target} would be a file of a format that is not written: name a folder, "
            "for PEFT, or a file *.safetensors or *.npy; llama.cpp's "
            "convert_lora_to_gguf.py makes .gguf files from such a folder"
        )
    return SUFFIXES.get(target.suffix)


def open_source(
    path: Path,
    base_model: str | None = None,
    bindings: Sequence[str] = (),
    *,
    allow_imports: bool = False,
) -> ConversionSource:
    """Reads the adapters of a run, checkpoint, PEFT folder or file.

    `allow_imports` lets a run's config import modules, which runs their code.
    """
    if not path.exists():
        raise InputError(f"{path} does not exist; expected an adapter or a run")
    directory = _find_run(path)
    if directory is not None:
        run = read_run_directory(directory, bindings, allow_imports=allow_imports)
        source = _open_run(run, path, base_model)
    elif bindings:
        raise InputError(
            f"{path} does not belong to a run, so no config uses {bindings}; "
            "name the model by --base_model"
        )
    else:
        source = _open_adapter(path, base_model)
    if not source.adapters:
        raise InputError(
            f"{path} has neither prompt nor adapters: it trained weights of the model "
            "itself, which have no other form than its checkpoints; to continue from "
            f"them, give {how_to_set('Run.start_from', str(path))}"
        )
    return source


def _open_adapter(path: Path, base: str | None) -> ConversionSource:
    config = frozen = None
    folder = None if base is None else _present(base)
    described = folder is not None and (folder / "config.json").is_file()
    if base is not None and folder is not None and (described or is_gguf(folder)):
        base = str(folder) if checkpoint_path.hub_name_of(base) is None else base
        config = read_config(folder)
        frozen = functools.partial(read_frozen, Pretrained(checkpoint=str(folder)))
    adapter = adapter_files.read_adapter(path, config, frozen)
    if config is not None:
        check_prompt_sizes(adapter.parameters, config, str(path))
    if config is not None and adapter.settings.get("task_type") == TOKEN_CLS:
        config = as_tagger(config)
    return ConversionSource(str(path), [adapter], config, base)


def _present(base: str) -> Path | None:
    """Returns the folder of a model; None if it is recorded but not on this machine."""
    name = checkpoint_path.hub_name_of(base)
    if name is not None:
        return find_cached(name)
    here = base.startswith(checkpoint_path.BUNDLED_PREFIX) or Path(base).exists()
    return checkpoint_path.find_checkpoint(base) if here else None


def _find_run(path: Path) -> Path | None:
    """Finds the run of a directory or checkpoint; None without one."""
    if not path.is_dir():
        return None
    directory = best_member(path) or path
    for folder in (path, path.parent):
        if folder.name in (FOLDER, KEPT):
            directory = folder.parent
    return directory if (directory / CONFIG_FILE).is_file() else None


def _open_run(run: Run, path: Path, base_model: str | None) -> ConversionSource:
    """Opens a run with the parameters of its best or the given checkpoint."""
    # One process reads all parameters, on whatever mesh the run was trained.
    model, parameters = load_tuned(dataclasses.replace(run, mesh=None))
    if (path / checkpoint_files.STATE_FILE).is_file():
        state = checkpoint_files.verify(path)
        trained = checkpoint_files.read_trained(path, state)
        parameters |= {name: jnp.asarray(leaf) for name, leaf in trained.items()}
    else:
        state = checkpoint_files.read_state(best_checkpoint(run))
    checkpoint = run.model.checkpoint
    source = source_of_model(str(path), model, parameters, checkpoint, base_model)
    return dataclasses.replace(
        source,
        step=state["step"],
        tokenizer=run.model.tokenizer
        or str(checkpoint_path.find_checkpoint(checkpoint)),
        described=None if run.model.config is None else checkpoint,
    )


def source_of_model(
    origin: str,
    prompted: PromptedModel,
    parameters: Parameters,
    checkpoint: str,
    base_model: str | None = None,
) -> ConversionSource:
    """Extracts the adapters from a model.

    `base_model` is the name to write for the frozen model; None for its folder or its
    name on the Hugging Face hub.

    Raises:
      InputError: if the weights are streamed and the prompt is deep.
    """
    leaves: Any = prompted.weight_storage.abstract_streamed() | parameters
    model = merge(prompted.graph, leaves)
    assert isinstance(model, LanguageModel)
    adapters = export_adapters(model)
    if any(map(runs_model_for_peft, adapters)):
        prompted.weight_storage.reject_streamed(
            "converting a deep prompt needs all weights"
        )
    folder = checkpoint_path.find_checkpoint(checkpoint)
    base = str(folder) if (folder / "config.json").is_file() else None
    base = base if checkpoint_path.hub_name_of(checkpoint) is None else checkpoint
    return ConversionSource(
        origin=origin,
        adapters=adapters,
        config=prompted.config,
        base=base_model or base,
        model=model,
        prompting=prompted.prompting,
    )


def write_adapters(
    source: ConversionSource,
    target: Path,
    form: str,
    *,
    only: Sequence[str] = (),
    task_type: str | None = None,
    force: bool = False,
) -> list[str]:
    """Writes adapters in another form.

    `form` is one of `FORMS`. An empty `only` writes all kinds of adapters. Without
    `task_type`, it is derived from the model. Returns lines that describe what was
    written.

    Raises:
      InputError: if a kind is unknown, the adapters have no such form, or the target
        exists.
    """
    if form not in FORMS:
        raise InputError(
            f"the form is {shown(form)}, expected one of {', '.join(FORMS)}"
        )
    check_kinds(only)
    kinds = {*only, CLASSES} if only and form == "peft" else only
    adapters = [x for x in source.adapters if not kinds or x.kind in kinds]
    around = target.absolute().parents
    with hold_run(*(x for x in around if (x / IDENTITY_FILE).exists())):
        if form == "merged":
            return _merge(target, adapters, source, force)
        if form == "t5x_model":
            return _write_t5x_model(target, source)
        return _write_single(source, adapters, target, form, task_type, force)


def _write_single(
    source: ConversionSource,
    adapters: Sequence[Adapter],
    target: Path,
    form: str,
    task_type: str | None,
    force: bool,
) -> list[str]:
    """Writes a single adapter; see `write_adapters`."""
    if form == "peft":
        adapters = join_classes(join_tokens(adapters))
    adapter = _single(adapters, source.origin)
    if adapter.tokens.rows and form != "peft":
        raise InputError(
            f"--to {form} would not record the tokens whose rows were trained: write "
            "the form of PEFT (--to peft)"
        )
    arrays, kind = adapter.parameters, adapter.kind
    if form == "peft":
        adapter = convert_for_peft(adapter, source.model, source.prompting)
        name = None if source.base is None else checkpoint_path.hub_name_of(source.base)
        folder = to_peft(
            adapter,
            source.config,
            base_model=source.base if name is None else name.repository,
            task_type=task_type,
        )
        if name is not None:
            folder.settings["revision"] = name.revision
        write_folder(target, folder, force=force)
        arrays, kind = folder.tensors, folder.kind
    elif form == "checkpoint":
        adapter_files.write_checkpoint(target, adapter, source.origin)
    elif form == "t5x":
        adapter_files.write_t5x(target, adapter, force=force)
    else:
        _check_suffix(form, target)
        adapter_files.write_array(target, adapter, int8=form == "int8", force=force)
    lines = [f"{target}: {kind}"]
    lines += [f"  {name} {list(array.shape)}" for name, array in arrays.items()]
    if adapter.kind not in PEFT_KINDS:
        lines.append("  (arrays of a kind that PEFT and servers do not support)")
    return lines


def _single(adapters: Sequence[Adapter], origin: str) -> Adapter:
    """Returns the only adapter; raises an error if there are none, or more."""
    if len(adapters) == 1:
        return adapters[0]
    kinds = ", ".join(adapter.kind for adapter in adapters) or "none"
    raise InputError(
        f"{origin} has adapters of these kinds: {kinds}; one can be written at a time: "
        "choose it by --only"
    )


def _merge(
    target: Path, adapters: Sequence[Adapter], source: ConversionSource, force: bool
) -> list[str]:
    """Writes the frozen model with LoRA and IA3 merged into its weights."""
    others = [x.kind for x in adapters if x.kind not in (LORA, IA3)]
    if others or not adapters:
        raise InputError(
            f"--merge puts LORA and IA3 into the model's weights; {others} cannot be "
            "merged and would be lost. Choose by --only LORA or --only IA3, and "
            "write the others separately"
        )
    if source.config is None or source.base is None:
        raise InputError(
            "--merge needs the frozen model as a Hugging Face folder: --base_model PATH"
        )
    base = checkpoint_path.find_checkpoint(source.base)
    alone = source.config.bidirectional
    write_merged(target, base, adapters, encoder=alone, force=force)
    kinds = " and ".join(adapter.kind for adapter in adapters)
    return [f"{target}: the model of {base} with {kinds} in its weights"]


def _write_t5x_model(target: Path, source: ConversionSource) -> list[str]:
    """Writes the frozen model and its prompts as a T5X checkpoint."""
    if source.model is None or source.config is None:
        raise InputError(
            f"{source.origin} does not belong to a run: a checkpoint of T5X contains "
            "the frozen model, which only a run names"
        )
    _, parameters = split(source.model)
    streamed = [x for x in parameters.values() if isinstance(x, jax.ShapeDtypeStruct)]
    if streamed:
        raise InputError(
            "the run streams its weights, and T5X's checkpoint contains all of them: "
            f"{how_to_set('Pretrained.weights', 'device')}"
        )
    arrays = t5x_arrays(source.config, parameters)
    name = f"checkpoint_{source.step}"

    def write(folder: Path) -> None:
        (folder / name).mkdir()
        write_t5x_checkpoint(folder / name, arrays, source.step)

    write_new_folder(target, write)
    prompts = [path for path in parameters if "/prompt/" in path]
    return [f"{target / name}: the model with {', '.join(prompts) or 'no prompt'}"]


def _check_suffix(form: str, target: Path) -> None:
    """Checks that the target's suffix does not contradict the format of the file."""
    suffix = ".npy" if form == "npy" else ".safetensors"
    if target.suffix != suffix:
        raise InputError(f"--to {form} writes a file named *{suffix}, found {target}")
