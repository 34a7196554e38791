"""The settings of a run, as a plain dataclass that gin or Python code fills in."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.metric_directions import metric_and_direction
from prompt_tuning.core.model_choices import UNRANKED
from prompt_tuning.core.parameter_groups import ParameterGroup
from prompt_tuning.losses.foreign_objective import LossFunctions, foreign_objective
from prompt_tuning.losses.objective import ObjectiveConfig
from prompt_tuning.pipeline.pipeline_plan import check_pipeline
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.projection_adapters import AdapterSpec
from prompt_tuning.prompts.prompt_module import PromptFactory
from prompt_tuning.settings.class_head import ClassHead
from prompt_tuning.settings.data_source import DataSource
from prompt_tuning.settings.evaluation_settings import Evaluation
from prompt_tuning.settings.mesh_shape import MeshShape
from prompt_tuning.settings.pipeline import Pipeline
from prompt_tuning.settings.pretrained import Pretrained
from prompt_tuning.settings.prompting import Prompting
from prompt_tuning.settings.rollout_settings import Rollouts
from prompt_tuning.settings.run_settings import RunSettings
from prompt_tuning.settings.trained_tokens import TrainedTokens

if TYPE_CHECKING:
    GivenObjective = ObjectiveConfig
else:
    # A run replaces other objects by a `ForeignObjective` when it is created.
    GivenObjective = ObjectiveConfig | LossFunctions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(RunSettings):
    """All settings of a run: a frozen model, a prompt, data, and how to train.

    `tune` makes one from its arguments, and gin configs make one from files. If you
    make one yourself, e.g. for `open_run`, its fields take objects, so settings need
    `.build()`. The numbers and texts among its fields are those of `RunSettings`.

    Attributes:
      model: the frozen model.
      prompt: factory of the prompt module, which is in the encoder if there is one;
        None for no prompt.
      prompting: position and visibility of the prompt; a prefix if None.
      decoder_prompt: factory of the prompt in the decoder of an encoder-decoder.
      decoder_prompting: position and visibility of the decoder's prompt.
      adapters: adapters of projections, the tokens whose rows are trained, and the
        class head.
      mesh: number of devices along each axis of the mesh; None for a single device.
      pipeline: how the stages of the mesh share a step, if it has several; `Pipeline()`
        if None.
      groups: parameter groups that are trained, with their optimizers.
      data: training files; None for a run that is only evaluated.
      objective: training objective, or any object with the methods `sums` and `divisor`
        of one; the mean cross-entropy of the tokens if None.
      rollouts: how answers are sampled and judged, with an objective that learns from
        them; None to learn the answers of the data.
      evaluation: measurements during and after training; None for no evaluation.
      tuning: the prompts and adapters, set from the fields above.
      source: the settings for reading data, which generation uses too: those of
        `data`, else of the evaluation, else the defaults.
      order_seed: seed of the order of rows: `data_seed`, or `seed` without one.
      inference_mesh: the mesh without stages, for everything that does not train.

    Examples:
      >>> run = pt.Run(
      ...     directory="run",
      ...     model=model.run.model,
      ...     prompt=pt.SoftPrompt(length=5).build(),
      ...     groups=[pt.ParameterGroup([".*/prompt/.*"], pt.adafactor()).build()],
      ...     data=pt.DataSource(files="train.jsonl").build(),
      ...     steps=2,
      ... )
      >>> run.model.checkpoint
      'bundled:skills-decoder'
    """

    model: Pretrained
    prompt: PromptFactory | None = None
    prompting: Prompting | None = None
    decoder_prompt: PromptFactory | None = None
    decoder_prompting: Prompting | None = None
    adapters: Sequence[AdapterSpec | TrainedTokens | ClassHead] = ()
    mesh: MeshShape | None = None
    pipeline: Pipeline | None = None
    groups: Sequence[ParameterGroup] = ()
    data: DataSource | None = None
    objective: GivenObjective | None = None
    rollouts: Rollouts | None = None
    evaluation: Evaluation | None = None

    # Set when the run is created, from the fields above.
    tuning: Tuning = dataclasses.field(init=False, repr=False, compare=False)
    source: DataSource = dataclasses.field(init=False, repr=False, compare=False)
    order_seed: int = dataclasses.field(init=False, repr=False, compare=False)
    inference_mesh: MeshShape | None = dataclasses.field(
        init=False, repr=False, compare=False
    )

    @property
    def best_by(self) -> tuple[str, str] | None:
        """The metric that selects the best checkpoint, with "min" or "max"."""
        head, tags = self.tuning.class_head, None
        if self.evaluation is not None and head is not None:
            tags = head.labels if head.problem == "tokens" else None
        return metric_and_direction(self.keep_best, self._labels, tags=tags or ())

    @property
    def stops_by(self) -> tuple[str, str] | None:
        """The metric of early stopping, with "min" or "max"."""
        given = self.early_stopping_metric
        return self.best_by if given is None else metric_and_direction(given)

    @property
    def _labels(self) -> Sequence[str] | None:
        if self.evaluation is None:
            return None
        head = self.tuning.class_head
        if head is not None and head.problem in UNRANKED:
            return None
        return self.evaluation.labels or (None if head is None else head.labels)

    def __post_init__(self):
        check_fields(self)
        if not isinstance(self.groups, Sequence):
            raise InputError("Run.groups is not a list; write [@ParameterGroup()]")
        if self.groups:
            for adapter in self.adapters:
                adapter.check_trained()
        self._derive()
        self._check_objective()
        self._check_rollouts()
        self._check_pipeline()
        metric_and_direction(self.keep_best)
        metric_and_direction(
            self.early_stopping_metric, setting="Run.early_stopping_metric"
        )
        if self.early_stopping:
            self._check_early_stopping()

    def _derive(self) -> None:
        if self.data is not None:
            source = self.data
        elif self.evaluation is not None:
            source = self.evaluation.data
        else:
            source = DataSource(files=())
        derived = {
            "tuning": Tuning(
                prompt=self.prompt,
                prompting=self.prompting,
                decoder_prompt=self.decoder_prompt,
                decoder_prompting=self.decoder_prompting,
                adapters=self.adapters,
            ),
            "source": source,
            "order_seed": self.seed if self.data_seed is None else self.data_seed,
            "inference_mesh": None if self.mesh is None else self.mesh.without_stages,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _check_objective(self) -> None:
        """Checks the type of the objective, and that it can read packed rows."""
        objective = self.objective
        if objective is None:
            return
        if not isinstance(objective, ObjectiveConfig):
            objective = foreign_objective(objective)
            object.__setattr__(self, "objective", objective)
        if self.data is not None and self.data.packing:
            objective.check_packing()

    def _check_rollouts(self) -> None:
        """Checks that answers are sampled exactly if the objective learns from them."""
        objective = self.objective
        if not isinstance(objective, ObjectiveConfig) or not objective.samples_answers:
            objective = None
        name = type(objective).__name__
        if self.rollouts is None:
            if objective is not None and self.data is not None:
                how = (
                    " with Rollouts.rewards (--reward NAME; in Python "
                    "reinforce(..., rewards=[...]))"
                    if objective.learns_rewards
                    else " (in Python tune(..., rollouts=Rollouts()))"
                )
                raise InputError(
                    f"Run.objective is a {name}, which learns from sampled answers, "
                    f"and Run.rollouts is None: set it to @Rollouts(){how}"
                )
            return
        if objective is None:
            raise InputError(
                "Run.rollouts is set, but Run.objective does not learn from sampled "
                "answers: set it to @GRPO() (--loss grpo) or @OnPolicyDistillation() "
                "(--loss on_policy_distillation), or Run.rollouts to None"
            )
        self.rollouts.check_rewards(name, learned=objective.learns_rewards)
        if self.stages > 1 or self.model.weights != "device":
            raise InputError(
                "Run.rollouts samples on devices that hold the weights of all layers: "
                "set MeshShape.stage to 1 and Pretrained.weights to 'device'"
            )
        updates = self.rollouts.updates
        for name in ("steps", "save_every", "evaluate_every"):
            if getattr(self, name) % updates:
                raise InputError(
                    f"Run.{name} is {getattr(self, name)}, expected a multiple of "
                    f"Rollouts.updates, which is {updates}: checkpoints are between "
                    "rollouts"
                )

    @property
    def stages(self) -> int:
        """Number of stages of the pipeline; 1 without one."""
        return 1 if self.mesh is None else self.mesh.stage

    def _check_pipeline(self) -> None:
        """Checks the settings of a pipeline against the number of stages."""
        if self.stages == 1:
            if self.pipeline is None:
                return
            raise InputError(
                "Run.pipeline is set, but the mesh has one stage: set Run.mesh = "
                "@MeshShape() and MeshShape.stage to the number of stages, or "
                "Run.pipeline to None"
            )
        if self.model.weights != "device":
            raise InputError(
                f"Pretrained.weights is {shown(self.model.weights)} and "
                "MeshShape.stage is "
                f"{self.stages}: the stages of a pipeline hold their weights; set "
                "weights to 'device', or stage to 1"
            )
        if self.objective is not None and self.objective.intermediates:
            raise InputError(
                f"Run.objective is {type(self.objective).__name__}, which reads "
                f"{self.objective.intermediates[0]}, and MeshShape.stage is "
                f"{self.stages}: the stages of a pipeline compute the loss from the "
                "last block alone; set stage to 1, or choose another objective"
            )
        pipeline = self.pipeline or Pipeline()
        object.__setattr__(self, "pipeline", pipeline)
        check_pipeline(pipeline, self.stages, self.accumulate)

    def _check_early_stopping(self) -> None:
        """Refuses early stopping without evaluations during training."""
        needed = {}
        if self.early_stopping_metric is None:
            needed = {"keep_best": "a metric"}
        needed |= {"evaluation": "held-out data", "evaluate_every": "a number of steps"}
        for name, expected in needed.items():
            if not getattr(self, name):
                raise InputError(
                    f"Run.early_stopping is {self.early_stopping} and Run.{name} is "
                    f"{getattr(self, name)}: set it to {expected}, which "
                    "early stopping needs, or set early_stopping to 0"
                )
