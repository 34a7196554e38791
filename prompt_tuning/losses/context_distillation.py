"""Distillation of a text into a prompt: the frozen model that reads it is the teacher.

The teacher itself is built in `training.distillation`.
"""

import dataclasses

import jax
from jaxtyping import Array, Float

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses.cross_entropy import TokenLoss, distillation_loss
from prompt_tuning.losses.objective import (
    HeldOutObjective,
    LossSums,
    ObjectiveConfig,
    OpenTeacher,
    TeacherModel,
    learned_targets,
    token_sums,
)
from prompt_tuning.losses.output_head import AnyHead


@dataclasses.dataclass(frozen=True)
class ContextDistillation(ObjectiveConfig):
    """Teaches a prompt to stand for a long text: the teacher is the same model, reading
    it.

    The loss of a position is `KL(teacher || student)` over the whole vocabulary, in
    nats. Use it to replace an instruction or a handful of examples that every request
    would repeat by a few vectors. Positions and weights come from the data, whose
    tokens both models read, so its completions need not be right.

    Attributes:
      context: text that the teacher reads before each row, after the row's BOS.

    Raises:
      InputError: if the context is empty, or too long for the model together with a
        row.

    Examples:
      >>> loss = pt.ContextDistillation(context="upper: ")
      >>> prompt = pt.SoftPrompt(length=5)
      >>> tuned = pt.tune(
      ...     model, prompt, pairs, objective=loss, steps=2, progress=False
      ... )
    """

    context: str

    def __post_init__(self):
        check_fields(self)
        if not self.context:
            raise InputError(
                "ContextDistillation.context is empty: give the text that the prompt "
                "is to stand for"
            )

    def prepare(self, open_teacher: OpenTeacher) -> "Distillation":
        """Builds the teacher that reads the context; see `ObjectiveConfig`."""
        return Distillation(open_teacher(self.context))


@dataclasses.dataclass(frozen=True)
class Distillation(HeldOutObjective):
    """Divergence from a teacher's predictions; see `ContextDistillation`.

    Attributes:
      teacher: frozen model that shares the student's frozen parameters.
    """

    meaning = "divergence from the frozen model that reads the context"

    teacher: TeacherModel

    def context(self, parameters: Parameters) -> Parameters:
        """Reads the teacher's text, which is the same in each step."""
        return self.teacher.read_context(parameters)

    def sums(
        self,
        hidden: Float[Array, "B m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> LossSums:
        """Computes the sums of a batch; see `Objective`.

        Raises:
          ValueError: if the parameters are not given.
        """
        losses = self.token_losses(hidden, head, batch, parameters)
        return token_sums(losses, batch.loss_weights, batch)

    def token_losses(
        self,
        hidden: Float[Array, "B m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> TokenLoss:
        """Computes the divergence at each learned token; see `HeldOutObjective`.

        Raises:
          ValueError: if the parameters are not given.
        """
        if parameters is None:
            raise ValueError("a teacher runs on the model's parameters: pass them")
        with jax.named_scope("teacher"):
            teacher_hidden = self.teacher.hidden(parameters, batch)
        targets = learned_targets(batch)
        return distillation_loss(hidden, head, targets, teacher_hidden)
