"""A model's training loss as stages: what each computes and which parameters it has."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from jax.extend.core import ClosedJaxpr, Var

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import (
    ParameterAxes,
    Parameters,
    logical_axes,
    merge,
    optional_key,
)
from prompt_tuning.core.setting_hints import how_to_set
from prompt_tuning.losses.objective import Objective
from prompt_tuning.models.scoring import loss_sums, merge_model
from prompt_tuning.pipeline.stages import StagedProgram, StageFunction, stage_blocks

Tree = Any


def block_counts(graph: nnx.GraphDef, parameters: Mapping[str, Any]) -> dict[str, int]:
    """Returns the number of blocks of each stack, in the order in which stacks run.

    `parameters` are all of the model's, or their shapes.
    """
    axes = logical_axes(merge(graph, parameters))
    counts = {
        _stack(path): parameters[path].shape[0]
        for path in sorted(parameters)
        if _is_in_block(path, axes)
    }
    order = ("encoder", "decoder")
    return {name: counts[name] for name in order if name in counts}


def _stack(path: str) -> str:
    return path.split("/layers/")[0]


def _is_in_block(path: str, axes: Mapping[str, ParameterAxes]) -> bool:
    return "/layers/" in path and axes[path].names[:1] == ("layers",)


@dataclasses.dataclass(frozen=True)
class StagePart:
    """One stage's part of a micro-batch, or of the prefix, as a function.

    Attributes:
      function: what the stage computes.
      parameters: path of each parameter that it reads, by input.
      prefix: index of each leaf of the prefix that it reads, by input.
      others: index of each other argument that it reads, by input.
    """

    function: StageFunction
    parameters: Mapping[Var, str]
    prefix: Mapping[Var, int]
    others: Mapping[Var, int]

    def __call__(self, weights: Parameters, inputs: Tree, others: Tree) -> Tree:
        """Runs the stage.

        Args:
          weights: trained parameters.
          inputs: `carried`, from the previous stage, and `prefix`, leaves by index.
          others: the frozen parameters, and all leaves of the other arguments.

        Returns:
          `carried`, for the next stage, and `outputs` of the program by index.
        """
        frozen, leaves = others
        parameters = weights | frozen
        values = {var: parameters[path] for var, path in self.parameters.items()}
        values |= {var: inputs["prefix"][i] for var, i in self.prefix.items()}
        values |= {var: leaves[i] for var, i in self.others.items()}
        carried, outputs = self.function(values, inputs["carried"])
        return {"carried": carried, "outputs": outputs}


class StagedModel:
    """A model's loss, divided into stages, for one shape of micro-batch.

    Attributes:
      micro_batch: what each stage computes for a micro-batch; the last one's outputs
        are the leaves of `LossSums`.
      prefix: what each stage computes for a prompt shared by all rows, or None.
      blocks: the blocks of each stage.
      sliced: the stack of each parameter of which stages have only their blocks'
        slices.
    """

    micro_batch: tuple[StagePart, ...]
    prefix: tuple[StagePart, ...] | None

    def __init__(
        self,
        graph: nnx.GraphDef,
        objective: Objective,
        parameters: Mapping[str, Any],
        others: tuple[Any, Any, Any],
        layers: Sequence[int],
    ):
        """Traces the model and divides it; nothing is compiled.

        Args:
          graph: the model's structure.
          objective: the training objective.
          parameters: all parameters of one device, or their shapes.
          others: a micro-batch without accumulation axis, the dropout key, and the
            index of the micro-batch; the last two may be None.
          layers: number of blocks of each stage.

        Raises:
          InputError: if the model cannot be divided.
        """
        self._axes = logical_axes(merge(graph, parameters))
        self._counts = block_counts(graph, parameters)
        self.blocks = stage_blocks(self._counts, layers)
        self._key = others[1]

        def run_prefix(parameters: Parameters, key: Any) -> Any:
            return merge_model(graph, parameters).prefix(optional_key(key, "prefix"))

        def run_rows(parameters: Parameters, prefix: Any, others: Any) -> Any:
            batch, key, index = others
            if key is not None and index is not None:
                key = jax.random.fold_in(key, index)
            return loss_sums(graph, parameters, batch, key, objective, prefix)

        prefix = jax.eval_shape(run_prefix, parameters, self._key)
        rows = _trace(run_rows, parameters, prefix, others)
        traces = [(rows, len(jax.tree.leaves(prefix)))]
        if prefix is not None:
            traces.append((_trace(run_prefix, parameters, self._key), 0))
        paths = sorted(parameters)
        programs = [self._divide(closed, paths, set()) for closed, _ in traces]
        # Sliced in one program and read whole in another: every stage has all of it.
        whole = {
            path
            for (closed, _), program in zip(traces, programs, strict=True)
            for var, path in zip(closed.jaxpr.invars, paths, strict=False)
            if var not in program.sliced and _reads(closed, var)
        }
        programs = [self._divide(closed, paths, whole) for closed, _ in traces]
        self.sliced = {
            path: program.sliced[var]
            for (closed, _), program in zip(traces, programs, strict=True)
            for var, path in zip(closed.jaxpr.invars, paths, strict=False)
            if var in program.sliced
        }
        parts = [
            _parts(program, paths, count)
            for program, (_, count) in zip(programs, traces, strict=True)
        ]
        self.micro_batch = parts[0]
        self.prefix = parts[1] if prefix is not None else None
        self._check_prefix()

    def _divide(
        self, closed: ClosedJaxpr, paths: Sequence[str], whole: set[str]
    ) -> StagedProgram:
        named = list(zip(closed.jaxpr.invars, paths, strict=False))
        stacks = {var: _stack(p) for var, p in named if _is_in_block(p, self._axes)}
        unsliced = [var for var, path in named if path in whole]
        return StagedProgram(closed, stacks, unsliced, self.blocks, self._counts)

    def _check_prefix(self) -> None:
        """Checks that each stage computes what it reads of the prefix.

        Raises:
          InputError: if it reads something else.
        """
        for stage, part in enumerate(self.micro_batch):
            computed = self.prefix[stage].function.outputs if self.prefix else {}
            missing = set(part.prefix.values()) - computed.keys()
            if missing:
                raise InputError(
                    f"stage {stage} of the pipeline reads a part of the prompt that "
                    "another stage computes; use "
                    f"{how_to_set('Prompting.execution', 'joined')}"
                )

    def paths(self, stage: int) -> list[str]:
        """Returns the parameters that a stage reads."""
        parts = [self.micro_batch[stage]]
        if self.prefix is not None:
            parts.append(self.prefix[stage])
        return sorted({path for part in parts for path in part.parameters.values()})

    def rows_of(self, stage: int, path: str) -> slice:
        """Returns the part of a parameter's first dimension that a stage has."""
        if path not in self.sliced:
            return slice(None)
        blocks = self.blocks[stage][self.sliced[path]]
        return slice(blocks.start, blocks.stop)


def _trace(function: Callable[..., Any], *arguments: Any) -> ClosedJaxpr:
    return jax.make_jaxpr(function)(*arguments)


def _reads(closed: ClosedJaxpr, var: Var) -> bool:
    return any(var in equation.invars for equation in closed.jaxpr.eqns)


def _parts(
    program: StagedProgram, paths: Sequence[str], prefix: int
) -> tuple[StagePart, ...]:
    """Names the inputs of each stage: parameters, then the prefix, then the rest."""
    parts = []
    for function in program.stages:
        order = {var: i for i, var in enumerate(function.closed.jaxpr.invars)}
        named: tuple[dict, dict, dict] = ({}, {}, {})
        for var in function.inputs:
            i, start = order[var], len(paths)
            if i < start:
                named[0][var] = paths[i]
            elif i < start + prefix:
                named[1][var] = i - start
            else:
                named[2][var] = i - start - prefix
        parts.append(StagePart(function, *named))
    return tuple(parts)
