"""A sweep: `K` prompts trained at once over one copy of a frozen model.

Each member is an ordinary run with its own directory inside the sweep's, and can be
evaluated, used and resumed like any other. Members differ only in their prompt, its
optimizer and their seeds, so that one step updates them all.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key

from prompt_tuning.checkpoints.run_store.checkpoint_names import holds_checkpoints
from prompt_tuning.config.run import Run
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.compiled_step import CompiledStep
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.parameters import Parameters, describe, split
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.losses.normalizers import TOTAL_TARGETS
from prompt_tuning.losses.objective import Objective
from prompt_tuning.pretrained.prompted_model import build_tuned
from prompt_tuning.pretrained.tuning import PromptPair
from prompt_tuning.prompts.soft import PaddedPrompt, SoftPrompt
from prompt_tuning.sweep.staged_sweep import (
    StagedSweepStep,
    check_members,
    staged_sweep_step,
)
from prompt_tuning.sweep.sweep_batches import load_shared_examples, reads_own_batches
from prompt_tuning.sweep.sweep_step import (
    PROMPT,
    compile_sweep_step,
    prompt_counts,
)
from prompt_tuning.training.run_plan import RunPlan
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import Metrics, compile_step
from prompt_tuning.training.trainer import Trainer

MAY_DIFFER = ("directory", "prompt", "groups", "seed", "data_seed")


@dataclasses.dataclass(frozen=True)
class OpenedMember:
    """A member before its model is read.

    Attributes:
      name: name of its directory.
      varies: settings that distinguish it from the others, as the user wrote them.
      opened: the opened run.
      config: the run's operative config.
    """

    name: str
    varies: Mapping[str, str]
    opened: RunPlan
    config: str = ""


@dataclasses.dataclass(frozen=True)
class SweepMember:
    """A member that is ready to step.

    Attributes:
      name: name of its directory.
      varies: settings that distinguish it from the others, as the user wrote them.
      training: its trainer, which shares the frozen parameters with the others.
      config: the run's operative config.
    """

    name: str
    varies: Mapping[str, str]
    training: Trainer
    config: str

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.training.run.directory)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Runs that are ready to step together.

    Attributes:
      directory: directory of the sweep, which contains the members' directories.
      members: the runs.
      step: step of all members.
      own_batches: whether each member reads its own batches.
    """

    directory: Path
    members: tuple[SweepMember, ...]
    step: CompiledStep | StagedSweepStep
    own_batches: bool

    @property
    def frozen(self) -> Parameters:
        """The frozen parameters, which all members share."""
        return self.members[0].training.frozen

    @property
    def run(self) -> Run:
        """The first member's run; all members share its steps, data and model."""
        return self.members[0].training.run

    def advance(
        self, states: Sequence[TrainState], batch: Batch
    ) -> tuple[Sequence[TrainState], Sequence[Metrics]]:
        """Computes one step of all members; donates `states`.

        Args:
          states: states of the members.
          batch: the shared batch, or the members' batches on a leading axis `K`.
        """
        placement = self.members[0].training.model.placement
        if placement is not None and self.run.pipeline is None:
            batch = placement.put_batch(batch)
        return self.step(states, self.frozen, batch)

    def report(self) -> str:
        """The first member's report, and a line about what the members share."""
        count = len(self.members)
        rows = f"{count} members, one copy of the frozen parameters; " + (
            "each reads its own batches, padded to the same shape (with Run.data_seed "
            "they would share batches)"
            if self.own_batches
            else "all read the same batches"
        )
        return f"{self.members[0].training.report()}\n{rows}"


def check_compatible(runs: Mapping[str, Run]) -> None:
    """Checks that runs share the settings that members of one sweep must share.

    Args:
      runs: runs by member name.

    Raises:
      InputError: with the first setting that differs.
    """
    (first_name, first), *others = runs.items()
    if first.early_stopping:
        raise InputError(
            f"Run.early_stopping is {first.early_stopping}, but members of a sweep "
            f"step together: give {how_to_set('Run.early_stopping', 0)}; the best "
            "checkpoint of each is kept anyway"
        )
    for name, run in others:
        for field in dataclasses.fields(Run):
            if field.name in MAY_DIFFER:
                continue
            path, mine, theirs = _difference(
                f"Run.{field.name}",
                getattr(first, field.name),
                getattr(run, field.name),
            )
            if path:
                raise InputError(
                    f"{path} is {shown(mine)} in member {first_name} and "
                    f"{shown(theirs)} in "
                    f"member {name}; members of one sweep share the model, the data "
                    "and the steps, and may differ only in their prompt, groups (such "
                    "as the learning rate), seed and data_seed. Start one sweep for "
                    "each value"
                )


def _difference(path: str, one: Any, other: Any) -> tuple[str, Any, Any]:
    """The innermost setting that differs; an empty path if none does."""
    if one == other:
        return "", None, None
    if dataclasses.is_dataclass(one) and type(one) is type(other):
        for field in dataclasses.fields(one):
            difference = _difference(
                f"{path}.{field.name}",
                getattr(one, field.name),
                getattr(other, field.name),
            )
            if difference[0]:
                return difference
    return path, one, other


def prepare_sweep(
    directory: Path, members: Sequence[OpenedMember], at_once: int | None = None
) -> Sweep:
    """Checks that the members can step together, then reads the frozen model once.

    Args:
      directory: directory of the sweep.
      members: the opened runs.
      at_once: members whose gradients are computed at once; None for the device's
        default.

    Raises:
      InputError: if a setting or file cannot be used, or members differ in what they
        must share.
    """
    check_compatible({member.name: member.opened.run for member in members})
    _check_trained(members)
    opened = [member.opened for member in members]
    own_batches = _own_batches(opened)
    examples = load_shared_examples(opened)
    longest = max(opened, key=lambda member: member.model.prompt_length)
    objective = longest.objective(examples)
    # All batches are planned for the longest prompt, which leaves the least room.
    plans = [
        dataclasses.replace(longest, run=m.run).batch_plan(examples) for m in opened
    ]
    stages = longest.pipeline_plan(plans[opened.index(longest)])
    if stages is not None:
        check_members(longest.run, stages, at_once)
    evaluators = _evaluators(opened)
    opened[0].model.weight_storage.reject_streamed("a sweep steps many members at once")
    parameters = opened[0].model.read_parameters()
    _, frozen = parameter_groups.partition(parameters, opened[0].labels)
    # If any member has no checkpoint yet, all of them start from the beginning.
    resumes = all(holds_checkpoints(this.run.directory) for this in opened)
    transfers = [None if resumes else this.transfer() for this in opened]
    prepared = []
    for member, plan, transfer in zip(members, plans, transfers, strict=True):
        this = member.opened
        training = Trainer(
            run=this.run,
            model=this.model,
            frozen=frozen,
            start=this.start(parameters | this.model.initialize(), transfer),
            step=_single_step(this, objective),
            examples=examples,
            batch_plan=plan,
            evaluator=evaluators.get(this.model.graph),
            transfer=transfer,
        )
        prepared.append(
            SweepMember(member.name, member.varies, training, member.config)
        )
    if stages is None:
        graph = _graph(longest, [this.training.start.trained for this in prepared])
        step = _joint_step(opened, graph, objective, own_batches, at_once)
    else:
        step = staged_sweep_step(opened, objective, stages, own_batches=own_batches)
    return Sweep(directory, tuple(prepared), step, own_batches)


def _single_step(opened: RunPlan, objective: Objective) -> CompiledStep:
    """Returns the step of a member alone, for its trainer."""
    model = opened.model
    return compile_step(
        model.graph,
        opened.optimizer,
        dropout=model.drops,
        objective=objective,
        placement=model.placement,
    )


def _joint_step(
    opened: Sequence[RunPlan],
    graph: nnx.GraphDef,
    objective: Objective,
    own_batches: bool,
    at_once: int | None,
) -> CompiledStep:
    """Returns the step of all members as one program."""
    return compile_sweep_step(
        graph,
        [member.optimizer for member in opened],
        own_batches=own_batches,
        dropout=opened[0].model.drops,
        objective=objective,
        at_once=at_once,
        placements=[p for m in opened if (p := m.model.placement) is not None],
    )


def _own_batches(opened: Sequence[RunPlan]) -> bool:
    """Whether members read their own batches.

    Raises:
      InputError: if they do, and padding them to one shape would exceed a token budget
        or change a loss that counts padding.
    """
    own = reads_own_batches(opened)
    objective = opened[0].run.objective
    counts_padding = objective is not None and objective.counts_padding
    if own and counts_padding:
        raise InputError(
            "members read their rows in different orders, padded to the same shape, "
            f"and TokenObjective.normalizer is {TOTAL_TARGETS!r}, which counts that "
            "padding, so a member's loss would depend on the others; set "
            "Run.data_seed, so that they share batches "
            f"({how_to_set('Run.data_seed', 0)}), or another normalizer"
        )
    if own and opened[0].data.batch_tokens is not None:
        raise InputError(
            "members read their rows in different orders, and DataSource."
            "batch_tokens gives them batches of different shapes, which cannot be "
            "stacked within the budget; set Run.data_seed, so that they share batches "
            f"({how_to_set('Run.data_seed', 0)}), or leave out batch_tokens"
        )
    return own


def _evaluators(opened: Sequence[RunPlan]) -> dict[nnx.GraphDef, Evaluator]:
    """One evaluator per prompt length: held-out files are read once for each."""
    evaluators = {}
    for member in opened:
        if member.model.graph not in evaluators:
            evaluator = member.evaluator()
            if evaluator is not None:
                evaluators[member.model.graph] = evaluator
    skipped = {evaluator.examples.skipped for evaluator in evaluators.values()}
    if len(skipped) > 1:
        raise InputError(
            f"prompts of these lengths leave out {sorted(skipped)} held-out rows as "
            "too long, so members would be compared on different rows; shorten rows "
            "or sweep over shorter prompts"
        )
    several = len({member.model.maximum_length for member in opened}) > 1
    if several and any(x.examples.truncated for x in evaluators.values()):
        raise InputError(
            "prompts of these lengths truncate held-out rows to different lengths, so "
            "members would be compared on different rows; shorten rows or sweep over "
            "one length"
        )
    return evaluators


def _graph(longest: RunPlan, trained: Sequence[Parameters]) -> nnx.GraphDef:
    """The structure that fits all members, with a prompt of the maximum length."""
    model = longest.model
    if not prompt_counts(trained):
        return model.graph

    def build(key: Key[Array, ""]) -> tuple[nnx.GraphDef, Parameters]:
        vectors = jnp.zeros((model.prompt_length, model.config.width))
        modules = PromptPair(PaddedPrompt(vectors, model.prompt_length))
        return split(build_tuned(key, model.config, modules, longest.run.tuning))

    return describe(build, jax.random.key(0))[0]


def _check_trained(members: Sequence[OpenedMember]) -> None:
    """Checks that the members' trained parameters can be stacked.

    Raises:
      InputError: with the first parameter that prevents it.
    """
    first = members[0]
    expected_shapes = first.opened.model.plan.abstract
    for member in members[1:]:
        model, labels = member.opened.model, member.opened.labels
        for path in labels.keys() ^ first.opened.labels.keys():
            raise InputError(
                f"{path} is trained in only one of the members {first.name} and "
                f"{member.name}; members of one sweep train the same parameters"
            )
        for path in labels:
            shape, expected = (
                model.plan.abstract[path].shape,
                expected_shapes[path].shape,
            )
            same_width = shape[1:] == expected[1:] and path.endswith(PROMPT)
            if shape != expected and not same_width:
                raise InputError(
                    f"{path} has shape {expected} in member {first.name} and {shape} "
                    f"in member {member.name}; only soft prompts may differ in shape, "
                    "and only in length"
                )
        if _kinds_differ(first.opened, member.opened):
            raise InputError(
                f"the prompts of {first.name} and {member.name} are of different "
                "kinds; sweep over one kind at a time"
            )


def _kinds_differ(one: RunPlan, other: RunPlan) -> bool:
    """Whether two members differ in structure, except for a trained prompt's length."""
    if one.model.prompt_length == other.model.prompt_length:
        return one.model.graph != other.model.graph
    trains_prompt = any(path.endswith(PROMPT) for path in one.labels)
    prompts = (one.model.prompts.prompt, other.model.prompts.prompt)
    soft = all(type(prompt) is SoftPrompt for prompt in prompts)
    soft &= one.model.prompts.decoder_prompt is None
    return not (trains_prompt and soft)
