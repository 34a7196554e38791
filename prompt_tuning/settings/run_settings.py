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
    """The settings of a run that are numbers and texts; `Run` has the objects too.

    Attributes:
      directory: directory for the checkpoints, log and config of the run; empty for a
        run that is not trained.
      start_from: run directory (its best checkpoint), checkpoint, PEFT folder or prompt
        file whose values replace initial values where paths and shapes agree. A run
        that continues from its own checkpoint ignores it.
      keep_optimizer_state: whether the optimizer's averages are taken over from
        `start_from` too. Schedules start again in any case, because each run counts its
        own steps.
      steps: optimizer steps of the whole run.
      accumulate: micro-batches of `data.batch_size` rows per step.
      evaluate_every: steps between evaluations; 0 for only one at the end.
      save_every: steps between checkpoints; 0 for checkpoints only at evaluations and
        at the end.
      log_every: steps between lines of the log.
      loggers: programs that get the lines of the log too, some of "tensorboard",
        "wandb" and "trackio"; None for TensorBoard where tensorboardX is installed.
      keep_last: number of newest checkpoints to keep.
      keep_prompts: number of newest steps that keep their prompts when their checkpoint
        is deleted, or "all". They are in the folder `kept_prompts` of the run.
      save_paths: expressions that match whole paths of further parameters that are
        kept: trained ones with the prompts, and frozen ones, which do not change, once
        in the folder `kept_prompts/frozen`.
      keep_best: metric of the evaluation, alone or with "min" or "max". The checkpoint
        with its best value is also kept, and is the one that evaluation and generation
        use. "auto" is `label_accuracy` if the evaluation has labels, `entity_f1` if a
        head's labels are tags of entities, and `loss` otherwise; None selects no
        checkpoint.
      checkpoint_form: "numpy" gathers each trained leaf to a file that process 0
        writes; "orbax" lets each process write its own shards while training continues;
        "auto" chooses orbax if trained parameters and optimizer state take 256 MiB
        (`checkpoint_files.LARGE`) or more. All readers of checkpoints read both.
      early_stopping: consecutive evaluations without an improvement after which the run
        stops; 0 to take all steps.
      early_stopping_metric: metric that has to improve, in the forms of `keep_best`;
        None for that of `keep_best`.
      seed: seed of the prompt's initial values, the order of rows, and dropout.
      data_seed: seed of the order of rows; `seed` if None. Members of a sweep with the
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
