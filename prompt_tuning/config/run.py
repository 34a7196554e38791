"""All that one run is made of, as plain dataclasses; gin only fills them in."""

import dataclasses
from collections.abc import Sequence

from prompt_tuning import losses
from prompt_tuning.checkpoints.run_store.checkpoint_files import AUTO, FORMS
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.parameter_groups import ParameterGroup
from prompt_tuning.data.data_source import DataSource
from prompt_tuning.evaluation.evaluation_settings import Evaluation
from prompt_tuning.losses.objective import ObjectiveConfig
from prompt_tuning.pretrained.source import Pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.projection_adapters import AdapterSpec
from prompt_tuning.prompts.prompt_module import PromptFactory
from prompt_tuning.prompts.prompt_settings import Prompting
from prompt_tuning.sharding.mesh import MeshShape

CONFIG_FILE = "config.gin"
"""The config in a run directory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A frozen model, a prompt, data, and how long to train.

    Attributes:
      directory: where the run keeps its prompt, its log and its config; empty for one
        that keeps nothing, which cannot train.
      model: the frozen model.
      prompt: makes the prompt module, in the encoder if there is one; None for none.
      prompting: how the prompt stands among the text; as a prefix if None.
      decoder_prompt: makes the prompt in the decoder of an encoder-decoder.
      decoder_prompting: how that stands among the targets.
      adapters: which projections are adapted, and how.
      mesh: how many devices stand along each axis of the mesh; None for one device.
      groups: which parameters are trained, and by which optimisers.
      start_from: what trained parameters start from where paths and shapes agree:
        another run's directory (its best checkpoint), a checkpoint, a PEFT adapter's
        folder, or a prompt's file. A run that goes on from a checkpoint of its own has
        no use for it.
      keep_optimizer_state: whether what the optimiser of that run has averaged goes on
        too. Schedules begin again all the same: a run counts its own steps.
      data: training files; None for a run that only evaluates.
      objective: what training descends; the mean of the tokens' cross-entropy if None.
      evaluation: what is measured during and after training, or None.
      steps: optimiser steps of the whole run.
      accumulate: micro-batches of `data.batch_size` rows that make one step.
      evaluate_every: steps between evaluations; 0 for the end alone.
      save_every: steps between checkpoints; 0 for evaluations and the end alone.
      log_every: steps between lines of the log.
      keep_last: newest checkpoints that are kept.
      keep_best: metric of the evaluation and "min" or "max"; its best checkpoint is
        kept too, and is the one that evaluation and generation use.
      checkpoint_form: "numpy", a file for each trained leaf, which each device puts
        together and process 0 writes; "orbax", of which each process writes its own
        parts while training goes on; "auto", orbax where trained and optimiser leaves
        take 256 MiB (`checkpoint_files.LARGE`) or more. Whatever reads checkpoints
        reads both.
      early_stopping: evaluations in a row that do not better the metric of `keep_best`
        after which the run stops; 0 for a run that takes all of its steps.
      seed: of the prompt's start, the order of rows, and dropout.
      data_seed: of the order of rows; `seed` if None. Members of a sweep that share
        it share each batch.
    """

    directory: str = ""
    model: Pretrained
    prompt: PromptFactory | None = None
    prompting: Prompting | None = None
    decoder_prompt: PromptFactory | None = None
    decoder_prompting: Prompting | None = None
    adapters: Sequence[AdapterSpec] = ()
    mesh: MeshShape | None = None
    groups: Sequence[ParameterGroup] = ()
    start_from: str | None = None
    keep_optimizer_state: bool = True
    data: DataSource | None = None
    objective: ObjectiveConfig | None = None
    evaluation: Evaluation | None = None
    steps: int = 1000
    accumulate: int = 1
    evaluate_every: int = 0
    save_every: int = 100
    log_every: int = 10
    keep_last: int = 2
    keep_best: tuple[str, str] | None = ("loss", "min")
    checkpoint_form: str = AUTO
    early_stopping: int = 0
    seed: int = 0
    data_seed: int | None = None

    @property
    def tuning(self) -> Tuning:
        """What is put into the frozen model to be trained."""
        return Tuning(
            prompt=self.prompt,
            prompting=self.prompting,
            decoder_prompt=self.decoder_prompt,
            decoder_prompting=self.decoder_prompting,
            adapters=self.adapters,
        )

    @property
    def source(self) -> DataSource:
        """How data is read: to train on, else to measure; by defaults if there is none.

        What is generated from is read alike.
        """
        if self.data is not None:
            return self.data
        return DataSource(files=()) if self.evaluation is None else self.evaluation.data

    @property
    def order_seed(self) -> int:
        """The seed of the order of rows."""
        return self.seed if self.data_seed is None else self.data_seed

    def __post_init__(self):
        check_fields(self)
        for name, least in (
            ("steps", 1),
            ("accumulate", 1),
            ("evaluate_every", 0),
            ("save_every", 0),
            ("log_every", 1),
            ("keep_last", 1),
            ("early_stopping", 0),
        ):
            found = getattr(self, name)
            if found < least:
                raise InputError(f"Run.{name} is {found}, expected at least {least}")
        if self.checkpoint_form not in FORMS:
            raise InputError(
                f"Run.checkpoint_form is {self.checkpoint_form!r}, expected one of "
                f"{', '.join(map(repr, FORMS))}"
            )
        if not isinstance(self.groups, Sequence):
            raise InputError("Run.groups is no list; write [@ParameterGroup()]")
        self._check_objective()
        best = self.keep_best
        if best is not None and (len(best) != 2 or best[1] not in ("min", "max")):
            raise InputError(
                f"Run.keep_best is {best}, expected a metric and 'min' or 'max'"
            )
        if self.early_stopping:
            self._check_early_stopping()

    def _check_objective(self) -> None:
        """Checks the type of the objective, and that it can read packed rows.

        Raises:
          InputError: with what to set.
        """
        objective = self.objective
        if objective is None:
            return
        if not isinstance(objective, ObjectiveConfig):
            raise InputError(
                f"Run.objective is {objective!r}, a {type(objective).__name__}; "
                f"expected {' or '.join(f'@{name}()' for name in losses.FACTORIES)} or "
                "None"
            )
        if self.data is not None and self.data.packing:
            objective.check_packing()

    def _check_early_stopping(self) -> None:
        """Refuses to stop by what is not measured on the way.

        Raises:
          InputError: with what is missing.
        """
        needed = {"keep_best": "a metric and 'min' or 'max'"}
        needed |= {"evaluation": "held-out data", "evaluate_every": "a number of steps"}
        for name, what in needed.items():
            if not getattr(self, name):
                raise InputError(
                    f"Run.early_stopping is {self.early_stopping} and Run.{name} is "
                    f"{getattr(self, name)}: set it to {what}, so that there is "
                    "something to stop by, or early_stopping to 0"
                )
