"""How long a run trains, and what it measures, logs and keeps."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from prompt_tuning.core.metric_directions import AUTO
from prompt_tuning.core.number_ranges import (
    NonnegativeInteger,
    PositiveInteger,
    RowCount,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a run that are numbers or texts; `Run` adds the objects.

    Attributes:
      directory: directory for the run's checkpoints, log and config; empty for a run
        that is not trained.
      start_from: run directory (its best checkpoint), checkpoint, PEFT folder or prompt
        file to take initial values from, where paths and shapes agree. A run that
        resumes from its own checkpoint ignores it.
      keep_optimizer_state: whether to take the optimizer's averages from `start_from`,
        too. Schedules always start anew, because each run counts its own steps.
      steps: number of optimizer steps of the whole run.
      accumulate: number of micro-batches of `data.batch_size` rows per step.
      evaluate_every: steps between evaluations; 0 for a single one at the end.
      save_every: steps between checkpoints; 0 for checkpoints only at evaluations and
        at the end.
      log_every: steps between lines of the log.
      loggers: other programs that get the log, any of "tensorboard", "wandb" and
        "trackio"; None for TensorBoard if tensorboardX is installed.
      keep_last: number of newest checkpoints to keep.
      keep_prompts: number of newest steps that keep their prompts when their checkpoint
        is deleted, or "all". They are stored in the run's folder `kept_prompts`.
      save_paths: expressions that match whole paths of additional parameters to keep:
        trained ones are stored with the prompts; frozen ones, which do not change, once
        in `kept_prompts/frozen`.
      keep_best: evaluation metric, optionally with "min" or "max". The checkpoint with
        its best value is kept and used by evaluation and generation. "auto" is
        `label_accuracy` if the evaluation has labels, `entity_f1` if a head's labels
        are entity tags, and `loss` otherwise; None selects no checkpoint.
      checkpoint_form: "numpy" gathers each trained leaf to a file that process 0
        writes; "orbax" lets each process write its own shards while training continues;
        "auto" chooses orbax if trained parameters and optimizer state take at least 256
        MiB (`checkpoint_files.LARGE`). Every reader of checkpoints reads both.
      early_stopping: number of consecutive evaluations without improvement after which
        the run stops; 0 to take all steps.
      early_stopping_metric: metric that must improve, in the forms of `keep_best`; None
        for that of `keep_best`.
      seed: seed of the prompt's initial values, the order of rows, and dropout.
      data_seed: seed of the order of rows; None for `seed`. Members of a sweep with the
        same value share each batch.
    """

    directory: str = ""
    start_from: str | None = None
    keep_optimizer_state: bool = True
    steps: PositiveInteger = 1000
    accumulate: RowCount = 1
    evaluate_every: NonnegativeInteger = 0
    save_every: NonnegativeInteger = 100
    log_every: PositiveInteger = 10
    loggers: Sequence[str] | None = None
    keep_last: PositiveInteger = 2
    keep_prompts: NonnegativeInteger | Literal["all"] = "all"
    save_paths: Sequence[str] = ()
    keep_best: tuple[str, str] | str | None = AUTO
    checkpoint_form: Literal["auto", "numpy", "orbax"] = "auto"
    early_stopping: NonnegativeInteger = 0
    early_stopping_metric: tuple[str, str] | str | None = None
    seed: NonnegativeInteger = 0
    data_seed: NonnegativeInteger | None = None
