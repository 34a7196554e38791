"""Open a run, or runs that step together, stage by stage up to the first step."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key

from prompt_tuning import processes
from prompt_tuning.checkpoints.run_store.checkpoint_names import holds_checkpoints
from prompt_tuning.config.run import Run
from prompt_tuning.core import parameter_groups
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters, describe, split
from prompt_tuning.core.status_line import status
from prompt_tuning.data.batching.batch_plan import BatchPlan
from prompt_tuning.data.batching.batches import read_batch
from prompt_tuning.data.examples.example_groups import ExampleGroups
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.evaluation.evaluator import Evaluator
from prompt_tuning.losses.context_distillation import Distillation
from prompt_tuning.losses.objective import Objective
from prompt_tuning.losses.preference import StoredReference
from prompt_tuning.pipeline.pipeline_plan import PipelinePlan
from prompt_tuning.pretrained.prompted_model import PromptedModel, build_tuned
from prompt_tuning.pretrained.tuning import PromptPair
from prompt_tuning.prompts.soft import PaddedPrompt
from prompt_tuning.training import member_checks
from prompt_tuning.training.activation_starts import start_from_activations
from prompt_tuning.training.pipelined_step import pipelined_finish, pipelined_gradients
from prompt_tuning.training.run_plan import RunPlan, plan_run
from prompt_tuning.training.run_reference import RunReference
from prompt_tuning.training.staged_sweep import check_stages, staged_sweep_step
from prompt_tuning.training.step import Step, compile_step, join_step
from prompt_tuning.training.stored_reference import (
    REFERENCE_FILE,
    with_stored_reference,
)
from prompt_tuning.training.stored_targets import TARGETS_FILE, with_stored_targets
from prompt_tuning.training.streamed_step import streamed_step
from prompt_tuning.training.sweep_step import compile_sweep_step, prompt_counts
from prompt_tuning.training.trainer import AnyStep, Trainer
from prompt_tuning.training.transfer import Transfer


def open_run(run: Run, reuse: Mapping[str, Array] | None = None) -> Trainer:
    """Opens and checks everything that a run needs, then reads the frozen model.

    `tune` is `open_run` followed by `train`. Use both if you need the opened model,
    data and compiled step in between.

    Args:
      run: configuration of the run.
      reuse: parameters of the frozen model, if already read.

    Returns:
      a `Trainer`: run, model, frozen parameters, first state, step and data.

    Raises:
      InputError: if a setting or file cannot be used; nothing has been written then.

    Examples:
      >>> trainer = pt.open_run(run, reuse=model.parameters)  # a `Run`
      >>> list(trainer.start.trained), trainer.run.steps
      (['decoder/prompt/prompt'], 2)
    """
    (trainer,) = open_members({run.directory: plan_run(run)}, reuse=reuse)
    return trainer


def open_members(
    plans: Mapping[str, RunPlan],
    *,
    at_once: int | None = None,
    reuse: Mapping[str, Array] | None = None,
) -> tuple[Trainer, ...]:
    """Opens runs that step together over one copy of the frozen model.

    `at_once` members compute their gradients together; None for the device's default.
    `reuse` has parameters of the frozen model that are already read.

    Raises:
      InputError: if a setting or file cannot be used, or members differ in what they
        must share; nothing has been written then.
    """
    members = list(plans.values())
    if len(members) > 1:
        member_checks.check_members(plans)
    # Data, and everything computed from it.
    with status("reading the data"):
        longest = max(members, key=lambda member: member.model.prompt_length)
        examples = longest.examples()
        if len(members) > 1:
            member_checks.check_same_rows(examples, longest, members)
        objective = longest.objective(examples)
        # All batches are planned for the longest prompt, which leaves the least room.
        batch_plans = [
            longest.batch_plan(examples, seed=member.run.order_seed)
            for member in members
        ]
        evaluators = _open_evaluators(members)
    # Runs with checkpoints resume from them and need no other starting point. If any
    # member has none yet, all of them start from the beginning.
    directories = [member.run.directory for member in members]
    resumes = processes.run_on_first(lambda: all(map(holds_checkpoints, directories)))
    transfers = [None if resumes else member.transfer() for member in members]
    stages = longest.pipeline_plan(batch_plans[members.index(longest)])
    step = _open_step(members, longest, objective, batch_plans, stages, at_once)
    # Read the frozen model only now.
    parameters = members[0].model.read_parameters(reuse)
    _, frozen = parameter_groups.partition(parameters, members[0].labels)
    context = _context(longest.model, objective, parameters)
    trainers = []
    member_parts = zip(members, batch_plans, transfers, strict=True)
    for member, batch_plan, transfer in member_parts:
        full = parameters
        if member is not members[0]:
            full = member.model.complete(parameters | member.model.initialize())
        if member.model.activation_loras and not resumes:
            full = _with_activation_starts(member, full, examples, batch_plan, transfer)
        trainers.append(
            Trainer(
                run=member.run,
                model=member.model,
                frozen=frozen,
                start=member.start(full, transfer),
                step=step,
                examples=examples,
                batch_plan=batch_plan,
                evaluator=evaluators.get(member.model.graph),
                transfer=transfer,
                stages=stages,
                context=context,
            )
        )
    return tuple(_with_stored_columns(trainers, objective, parameters))


def _with_activation_starts(
    member: RunPlan,
    parameters: Parameters,
    examples: Examples | ExampleGroups,
    batch_plan: BatchPlan,
    transfer: Transfer | None,
) -> Parameters:
    """Adds the parameters that start from the activations of the first batches."""
    known = () if transfer is None else transfer.initial_values
    pad_id = member.model.config.pad_id
    read_one = functools.partial(read_batch, examples, batch_plan, pad_id=pad_id)
    arguments = member.run.tuning, member.model, parameters, read_one
    return parameters | start_from_activations(*arguments, known=known)


def _with_stored_columns(
    trainers: Sequence[Trainer], objective: Objective, parameters: Parameters
) -> Sequence[Trainer]:
    """Checks a reference, and adds the stored predictions of it or of a teacher."""
    reference, trainer = getattr(objective, "reference", None), trainers[0]
    model = reference.model if isinstance(reference, StoredReference) else reference
    if isinstance(model, RunReference):
        model.check_model(trainer.fingerprint)
    teaches = isinstance(objective, Distillation) and objective.stored is not None
    if not (teaches or isinstance(reference, StoredReference)):
        return trainers
    if len(trainers) > 1:
        setting = "targets to 'exact'" if teaches else "reference to 'in_step'"
        raise InputError(
            "the members of a sweep share no run directory to store a precomputed "
            f"reference or teacher in: set {setting}"
        )
    read, folder = trainer.examples, Path(trainer.run.directory)
    common = trainer.model, trainer.run.source, parameters
    if teaches:
        assert isinstance(objective, Distillation) and isinstance(read, Examples)
        file = folder / TARGETS_FILE
        examples = with_stored_targets(
            objective, read, *common, file, trainer.fingerprint
        )
    else:
        assert isinstance(reference, StoredReference)
        assert isinstance(read, ExampleGroups)  # its objectives judge answers
        file = folder / REFERENCE_FILE
        examples = with_stored_reference(
            reference.model, read, *common, file, trainer.fingerprint
        )
    return [dataclasses.replace(trainer, examples=examples)]


def _context(
    model: PromptedModel, objective: Objective, parameters: Parameters
) -> Parameters:
    """Computes values that no step changes, if one device holds all weights."""
    if model.placement is not None or model.weight_storage.by_layer:
        return {}
    return objective.context(parameters)


def _open_evaluators(members: Sequence[RunPlan]) -> dict[nnx.GraphDef, Evaluator]:
    """Opens one evaluator per prompt length, which reads the held-out files once."""
    evaluators = {}
    for member in members:
        if member.model.graph not in evaluators:
            evaluator = member.evaluator()
            if evaluator is not None:
                evaluators[member.model.graph] = evaluator
    if len(members) > 1:
        member_checks.check_same_held_out(evaluators.values(), members)
    return evaluators


def _open_step(
    members: Sequence[RunPlan],
    longest: RunPlan,
    objective: Objective,
    batch_plans: Sequence[BatchPlan],
    stages: PipelinePlan | None,
    at_once: int | None,
) -> AnyStep:
    if len(members) == 1:
        return _open_single_step(longest, objective, batch_plans[0], stages)
    longest.model.weight_storage.reject_streamed("a sweep steps many members at once")
    own_batches = member_checks.reads_own_batches(members)
    if stages is not None:
        check_stages(longest.run, stages, at_once)
        return staged_sweep_step(members, objective, stages, own_batches=own_batches)
    return compile_sweep_step(
        _joint_graph(members, longest),
        [member.optimizer for member in members],
        own_batches=own_batches,
        dropout=longest.model.drops,
        objective=objective,
        at_once=at_once,
        placements=[p for m in members if (p := m.model.placement) is not None],
    )


def _open_single_step(
    plan: RunPlan,
    objective: Objective,
    batch_plan: BatchPlan,
    stages: PipelinePlan | None,
) -> Step:
    """Builds the step of a run; it is compiled per batch shape."""
    model, storage = plan.model, plan.model.weight_storage
    if stages is not None:
        return join_step(
            pipelined_gradients(plan, objective, stages),
            pipelined_finish(plan, objective),
            dropout=model.drops,
        )
    common: dict[str, Any] = {
        "dropout": model.drops,
        "objective": objective,
        "placement": model.placement,
    }
    if not storage.by_layer:
        # The lengths of sampled answers are not known in advance.
        sampled = plan.run.rollouts is not None
        shapes = None if sampled else len(batch_plan.shapes())
        return compile_step(model.graph, plan.optimizer, shapes=shapes, **common)
    on_device = [path for path in plan.labels if path not in storage.trained]
    return streamed_step(
        model.graph,
        plan.optimizer_of(on_device),
        storage.streamed,
        host=plan.host_optimizer(),
        reader=storage.reader(),
        checkpoint_activation=plan.run.model.checkpoint_activation,
        **common,
    )


def _joint_graph(members: Sequence[RunPlan], longest: RunPlan) -> nnx.GraphDef:
    """Returns the structure that fits all members, with the longest prompt."""
    model = longest.model
    trained = [
        {path: member.model.plan.abstract[path] for path in member.labels}
        for member in members
    ]
    if not prompt_counts(trained):
        return model.graph

    def build(key: Key[Array, ""]) -> tuple[nnx.GraphDef, Parameters]:
        vectors = jnp.zeros((model.prompt_length, model.config.width))
        padded = PaddedPrompt(vectors, model.prompt_length)
        prompts = model.prompts
        modules = PromptPair(padded, tokens=prompts.tokens, classes=prompts.classes)
        return split(build_tuned(key, model.config, modules, longest.run.tuning))

    return describe(build, jax.random.key(0))[0]
