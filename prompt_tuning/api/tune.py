"""`load`, `tune`, `load_tuned`: open a frozen model, tune it, reload the result.

Runs use the same configuration and run directories as the command line, so either can
continue what the other started.
"""

import contextlib
import functools
import inspect
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from prompt_tuning.api.automatic import choose
from prompt_tuning.api.model import Model
from prompt_tuning.config import argument_types
from prompt_tuning.config.config_values import CONFIG_FILE
from prompt_tuning.config.deferred_factories import Configurable, Configured
from prompt_tuning.config.gin_files import read_run_directory
from prompt_tuning.config.operative_config import operative_config
from prompt_tuning.config.python_runs import TuneRequest, remove, tune_request
from prompt_tuning.config.run import Run
from prompt_tuning.core.atomic_files import check_replaceable, write_file
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_value
from prompt_tuning.core.number_ranges import PositiveNumber
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.progress_display import shown_activity
from prompt_tuning.data.rows.python_rows import naming_rows
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.training.epochs import steps_of_epochs
from prompt_tuning.training.loop import train
from prompt_tuning.training.opening import open_run
from prompt_tuning.training.progress import Callback, python_reporter
from prompt_tuning.training.training_result import TrainingResult
from prompt_tuning.tuned import adapter_conversion
from prompt_tuning.tuned.adapter_texts import AdapterTextSettings
from prompt_tuning.tuned.load_tuned import load_trained, where_trained
from prompt_tuning.tuned.load_tuned import load_tuned as load_run

AUTO = "auto"
"""Value of `method` that lets `tune` choose one."""


class TunedModel(Model):
    """A frozen model with trained parameters, from `tune` or `load_tuned`.

    Attributes:
      result: outcome of training; None for a model that was loaded.

    Examples:
      >>> {path: array.shape for path, array in tuned.trained.items()}
      {'decoder/prompt/prompt': (5, 128)}
      >>> sorted(file.name for file in tuned.to_peft("adapter").iterdir())
      ['adapter_config.json', 'adapter_model.safetensors']
      >>> tuned.save("prompt.npy")
      PosixPath('prompt.npy')
    """

    def __init__(
        self,
        settings: Configured,
        run: Run,
        prompted: PromptedModel,
        parameters: Parameters,
        result: TrainingResult | None = None,
    ):
        super().__init__(settings, run, prompted, parameters)
        self.result, self._temporary = result, False

    def keep_until_collected(self, directory: str) -> None:
        """Deletes the temporary run directory when this object is garbage-collected."""
        self._temporary = True
        weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)

    @property
    def directory(self) -> Path | None:
        """The run directory; None for an adapter loaded from a file."""
        return Path(self.run.directory) if self.run.directory else None

    @property
    def trained(self) -> Parameters:
        """Trained parameters by path."""
        return self.partition()[0]

    def save(
        self, target: str | Path, form: str | None = None, *, force: bool = False
    ) -> Path:
        """Saves the trained parameters.

        Args:
          target: file or folder to write.
          form: "peft", "npy", "safetensors", "int8" (a key/value prefix as safetensors,
            with a scale for each head and slot), "checkpoint", "t5x", or "merged" (the
            whole model, with LoRA or IA3 folded into its weights). None chooses by the
            target's suffix; without a suffix, "peft".
          force: whether to replace an existing target.

        Raises:
          InputError: if the trained parameters cannot be stored in this form.
        """
        target = Path(target)
        source = adapter_conversion.source_of_model(
            self._name(), self.prompted, self.parameters, self.run.model.checkpoint
        )
        form = form or adapter_conversion.form_of_suffix(target) or "peft"
        adapter_conversion.write_adapters(source, target, form, force=force)
        return target

    def to_peft(self, folder: str | Path, *, force: bool = False) -> Path:
        """Saves the trained parameters as a PEFT adapter; see `save`."""
        return self.save(folder, "peft", force=force)

    def write_report(
        self,
        file: str | Path = "report.html",
        *,
        text_prompts: Sequence[str] = (),
        force: bool = False,
    ) -> Path:
        """Writes an HTML page that tells whether the run worked, and why.

        Args:
          file: the page, a single file that needs no network.
          text_prompts: instructions to compare with: each is put before the frozen
            model's input.
          force: whether to replace an existing file.

        Raises:
          InputError: if the model has no run directory, or the held-out data are gone.

        Examples:
          >>> tuned.write_report("report.html")
          PosixPath('report.html')
        """
        # Not at the top: they and jinja2 would delay every import of the interface.
        from prompt_tuning.report.measurement import measure_run
        from prompt_tuning.report.page import render_page
        from prompt_tuning.report.recorded_run import RecordedRun
        from prompt_tuning.report.run_view import ReportedRun

        if self.directory is None:
            raise InputError("an adapter from a file has no log: load a run directory")
        check_replaceable(Path(file), force=force)
        recorded = RecordedRun.read(self.directory)
        loaded = self.prompted, self.parameters
        measured = measure_run(self.run, text_prompts=text_prompts, loaded=loaded)
        run = ReportedRun(str(self.directory), recorded, measured)
        write_file(Path(file), render_page([run]), force=force)
        return Path(file)

    def _details(self) -> str:
        trained = self.trained
        count = sum(int(np.prod(leaf.shape)) for leaf in trained.values())
        parts = [f", {count:,} trained parameters in {len(trained)} arrays"]
        if self.result is not None:
            parts.append(f", step {self.result.step}")
            parts += [f", {n} {x:.4g}" for n, x in self.result.metrics.items()]
        if self.directory is not None and not self._temporary:
            parts.append(f", {self.directory}")
        return "".join(parts)


def load(
    checkpoint: str | Path, **settings: Unpack[argument_types.PretrainedFields]
) -> Model:
    """Opens a frozen model; its weights are read when first needed.

    Args:
      checkpoint: a Hugging Face folder; a T5X checkpoint; a bundled model, e.g.
        "bundled:skills-decoder"; or a model of the Hugging Face hub, e.g.
        "Qwen/Qwen3-0.6B" or "Qwen/Qwen3-0.6B@main" (extra `hub`).
      settings: other fields of `Pretrained`, e.g. `parameter_dtype="bfloat16"`.

    Raises:
      InputError: if the checkpoint cannot be read.

    Examples:
      >>> model = pt.load("bundled:skills-decoder")
      >>> model
      Model(bundled:skills-decoder: decoder_only, 4 layers, width 128, vocabulary 61)
    """
    parameters = {"checkpoint": str(checkpoint), **settings}
    return Model.open(Configurable("Pretrained")(**parameters), (), 0)


def tune(
    model: Model | str | Path,
    method: argument_types.Methods,
    data: Any,
    *,
    steps: int | None = None,
    epochs: int | float | None = None,
    learning_rate: argument_types.LearningRates | None = None,
    optimizer: argument_types.Optimizer | None = None,
    objective: argument_types.Objectives | None = None,
    evaluation: Any = None,
    directory: str | Path | None = None,
    budget: int | float | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    **settings: Unpack[argument_types.TuneFields],
) -> TunedModel:
    """Trains prompts or adapters for a frozen model.

    To resume an interrupted run, repeat the call with the same `directory`; the result
    is the same to the last bit. The command line can read and continue that directory,
    too.

    Args:
      model: result of `load`, or a checkpoint as `load` takes it.
      method: a prompt or adapter such as `SoftPrompt(length=20)`, or a list of them.
        Pass a prompt class of your own as `functools.partial(Own, length=20)`. "auto"
        tries soft prompts, prefixes and LoRA in short sweeps, at three learning rates
        each, and trains the one that does best on the held-out data.
      data: pairs `(prompt, completion)`; mappings with these keys, e.g. a
        `datasets.Dataset`; a table (a data frame, an array `[n, 2]` of pairs, or a
        mapping of columns); or paths of jsonl or HDF5 files. In a mapping of splits
        such as a `datasets.DatasetDict`, "train" is the training data and "validation"
        or "dev" the held-out data, unless `evaluation` is given.
      steps: number of optimizer steps; None for 1000, or for as many as `epochs` takes.
      epochs: passes over the data, instead of `steps`; rounded up to whole steps.
      learning_rate: a number or a schedule. A schedule without a length gets the run's.
        None for the method's recipe: Adafactor at 0.3 for prompts; AdamW at 0.001 for
        LoRA, 0.03 for IA3, 0.02 for prefixes.
      optimizer: settings such as `adamw()`, or any optax transformation.
      objective: settings such as `TokenObjective(label_smoothing=0.1)`; a function
        `(logits [B, m, V], targets [B, m]) -> losses [B, m]`; or an object with the
        methods `sums` and `divisor` of `Objective`.
      evaluation: held-out data in any form that `data` takes, or settings of
        `Evaluation`.
      directory: run directory; None for a temporary one.
      budget: seconds for all sweeps of "auto" together; 300 by default.
      callbacks: functions called with the step and its logged metrics. If one returns
        True, the run saves a checkpoint and stops.
      progress: whether to show a progress bar.
      settings: other fields of `Run` (`save_every=50`, `seed=1`, ...) and of
        `DataSource` (`batch_size=16`, `joiner=" "`, ...).

    Returns:
      the trained model; `result` has the metrics.

    Raises:
      InputError: if an argument or the data cannot be used; nothing is written then.

    Examples:
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     pairs,
      ...     steps=2,
      ...     batch_size=8,
      ...     progress=False,
      ... )
      >>> tuned.result.step
      2
    """
    if steps is not None and epochs is not None:
        raise InputError("steps and epochs both set the run's length: leave one out")
    check_value("epochs", epochs, PositiveNumber | None)
    automatic = isinstance(method, str) and method == AUTO
    if budget is not None and not automatic:
        raise InputError("budget is for the method 'auto': leave it out")
    base = model if isinstance(model, Model) else load(model)
    temporary = None
    if directory is None:
        temporary = tempfile.mkdtemp(prefix="prompt-tuning-")
    make_request = functools.partial(
        tune_request,
        base.settings,
        data=data,
        directory=Path(temporary or directory or ""),
        evaluation=evaluation,
        learning_rate=learning_rate,
        optimizer=optimizer,
        objective=objective,
        settings=settings if steps is None else {"steps": steps, **settings},
        arguments=tuple(inspect.signature(tune).parameters),
    )
    listed = list(method) if isinstance(method, list | tuple) else [method]
    try:
        if automatic:
            request = choose(base, make_request, epochs, budget, progress)
        else:
            request = make_request(listed)
        tuned = _tune(base, request, epochs, callbacks, progress)
    except BaseException:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if temporary is not None:
        tuned.keep_until_collected(temporary)
    if progress:
        print(where_trained(tuned.run, tuned.trained))
        if temporary is not None:
            print("it is removed with the result: tuned.save(FOLDER) keeps it")
    return tuned


def _tune(
    base: Model,
    request: TuneRequest,
    epochs: int | float | None,
    callbacks: Sequence[Callback],
    progress: bool,
) -> TunedModel:
    """Opens and trains a run, and deletes its data files if it cannot be opened."""
    try:
        shown = shown_activity() if progress else contextlib.nullcontext()
        with shown, naming_rows(request.arguments):
            run = request.read()
            if epochs is not None:
                request = request.with_steps(steps_of_epochs(run, epochs))
                run = request.read()
            trainer = open_run(run, reuse=base.loaded)
    except BaseException:
        remove(request.written)
        raise
    base.share(trainer.frozen)
    result = train(
        trainer,
        config=operative_config(),
        make_reporter=lambda done: python_reporter(run.steps, done, progress),
        callbacks=callbacks,
        notes=[trainer.duration()],
    )
    parameters = load_trained(run, trainer.model) | trainer.frozen
    return TunedModel(base.settings, run, trainer.model, parameters, result)


def load_tuned(path: str | Path, base: str | Path | None = None) -> TunedModel:
    """Loads a trained run, or an adapter from a file or PEFT folder.

    Args:
      path: run directory, checkpoint, PEFT folder, or prompt file.
      base: the adapter's frozen model; a run directory names its own.

    Raises:
      InputError: if the path cannot be read, or the base model is missing or does not
        match.

    Examples:
      >>> tuned.to_peft("adapter", force=True)
      PosixPath('adapter')
      >>> again = pt.load_tuned("adapter", base="bundled:skills-decoder")
      >>> list(again.trained) == list(tuned.trained)
      True
    """
    path = Path(path)
    if (path / CONFIG_FILE).is_file() and base is None:
        return _load_directory(path, ())
    if not path.exists():
        raise InputError(
            f"{path} does not exist; expected a run directory, or an adapter's file or "
            "folder"
        )
    if base is None:
        raise InputError(
            f"{path} is not a run directory (it has no {CONFIG_FILE}): name the frozen "
            "model that the adapter belongs to, load_tuned(path, base=...)"
        )
    frozen = load(base)
    run = AdapterTextSettings.read(path).used_by(frozen.run)
    model, parameters = load_run(run, path)
    return TunedModel(frozen.settings, run, model, parameters)


def load_sharing(path: str | Path, known: Sequence[Model]) -> TunedModel:
    """Loads a run like `load_tuned`; reuses a known model's frozen parameters."""
    path = Path(path)
    is_run = (path / CONFIG_FILE).is_file()
    return _load_directory(path, known) if is_run else load_tuned(path)


def _load_directory(path: Path, known: Sequence[Model]) -> TunedModel:
    run = read_run_directory(path)
    same = (model.parameters for model in known if model.run.model == run.model)
    model, parameters = load_run(run, reuse=next(same, None))
    return TunedModel(Configured("Pretrained", vars(run.model)), run, model, parameters)
