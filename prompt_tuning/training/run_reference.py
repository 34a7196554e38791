"""A reference that another run trained over the same frozen model."""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float

from prompt_tuning.config.config_values import CONFIG_FILE
from prompt_tuning.config.gin_files import keeping_config, read_run_directory
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import CONTEXT, Parameters, describe, split
from prompt_tuning.models.scoring import merge_model
from prompt_tuning.pretrained.frozen_fingerprint import fingerprint
from prompt_tuning.pretrained.prompted_model import PromptedModel, build_tuned
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.placement import TEMPLATE
from prompt_tuning.settings.prompting import Prompting
from prompt_tuning.sharding.array_placement import Placement
from prompt_tuning.training.run_directory import recorded_model
from prompt_tuning.training.transfer import check_shape, read_source


@dataclasses.dataclass(frozen=True, eq=False)
class RunReference:
    """The frozen model with what another run trained.

    It shares the frozen parameters with the paths `frozen` with the student.
    """

    directory: Path
    model: PromptedModel
    trained: Mapping[str, np.ndarray]
    frozen: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Digest of the run's trained parameters."""
        return fingerprint(self.trained, samples=sys.maxsize)

    def check_model(self, frozen_model: str) -> None:
        """Checks that the run has the frozen model with this fingerprint.

        Raises:
          InputError: if it has another one.
        """
        recorded = recorded_model(self.directory)
        if recorded != frozen_model:
            raise InputError(
                f"the reference {self.directory} is a run of another frozen model, or "
                f"of this one in another type: its fingerprint is {recorded}, and this "
                f"model's {frozen_model}; expected a run of this model"
            )

    def parameters(self, student: Parameters) -> Parameters:
        """Returns all parameters of the reference, given a student's."""
        return self._frozen(student) | self.model.put(self.trained)

    def hidden(self, student: Parameters, batch: Batch) -> Float[Array, "B m D"]:
        """Returns the states that predict the learned tokens, without a gradient."""
        trained = {path: student[CONTEXT + path] for path in self.trained}
        model = merge_model(self.model.graph, self._frozen(student) | trained)
        return jax.lax.stop_gradient(model.hidden(batch))

    def read_context(self, student: Parameters) -> Parameters:
        """Returns the run's trained parameters in the form that `hidden` reads."""
        del student
        put = self.model.put(self.trained)
        return {CONTEXT + path: leaf for path, leaf in put.items()}

    def _frozen(self, student: Parameters) -> Parameters:
        # Weights that are streamed are not among the student's parameters.
        return {path: student[path] for path in self.frozen if path in student}


def open_run_reference(
    directory: Path, model: PromptedModel, longest: int
) -> RunReference:
    """Opens another run as the reference of a model in training.

    Its best checkpoint is read. `longest` is the number of inputs of the longest
    example.

    Raises:
      InputError: if there is no run, or it does not fit the model or its rows.
    """
    if not (directory / CONFIG_FILE).is_file():
        raise InputError(
            f"the reference is {str(directory)!r}, which is not a run (it has no "
            f"{CONFIG_FILE}), expected the directory of a run, 'in_step', "
            "'precomputed' or 'none'"
        )
    source = read_source(directory, model.config)
    trained = {path: np.asarray(leaf) for path, leaf in source.leaves.items()}
    with keeping_config():
        opened, abstract = _build(read_run_directory(directory).tuning, model)
    _check_rows(directory, opened, model, longest)
    for path, leaf in trained.items():
        expected = abstract.get(path)
        if path in model.plan.restored or expected is None:
            raise InputError(
                f"the reference {directory} trained {path}, expected a run that "
                "trained a prompt or adapters alone"
            )
        check_shape(f"the reference {source.origin}", path, leaf, expected)
    frozen = tuple(path for path in abstract if path not in trained)
    missing = [path for path in frozen if path not in model.plan.restored]
    if missing:
        raise InputError(
            f"the reference {directory} has nothing for {missing[0]}, which its config "
            "names: expected the directory of a run as it was trained"
        )
    return RunReference(directory, opened, trained, frozen)


def _build(
    tuning: Tuning, model: PromptedModel
) -> tuple[PromptedModel, Mapping[str, jax.ShapeDtypeStruct]]:
    """Builds and describes a model with a run's prompts and adapters."""
    # Initial values are not used.
    table = np.zeros((model.config.vocabulary_size, model.config.width), np.float32)
    vocabulary, key = Vocabulary(table, model.tokenizer), jax.random.key(0)
    prompts = tuning.start(key, vocabulary, model.config)
    graph, abstract = describe(
        lambda key: split(build_tuned(key, model.config, prompts, tuning)), key
    )
    placement = model.placement
    if placement is not None:
        placement = Placement.create(placement.layout, graph, abstract)
        placement = placement.with_pinned(model.weight_storage.pinned)
    opened = dataclasses.replace(
        model,
        graph=graph,
        prompts=prompts,
        prompting=tuning.prompting or Prompting(),
        placement=placement,
    )
    return opened, abstract


def _check_rows(
    directory: Path, opened: PromptedModel, model: PromptedModel, longest: int
) -> None:
    """Checks that a reference can read the rows of the model in training."""
    problem, room = None, opened.maximum_length
    if opened.prompting.placement == TEMPLATE:
        problem = "puts vectors among the tokens of a template"
    elif opened.prompt_count not in (1, model.prompt_count):
        problem = f"has {opened.prompt_count} prompts, one for each task"
    elif room is not None and longest > room:
        problem = f"has room for {room} tokens, and the longest row has {longest}"
    if problem is not None:
        raise InputError(
            f"the reference {directory} {problem}, so it cannot read the rows of this "
            "run: choose another reference"
        )
