"""Context distillation: a prompt learns to stand for a text that it takes the place of.

The teacher is the frozen model that reads a text, the context, before each row; the
student is the same frozen model that has the trained prompt in its place. At each
learned position the student is to say what the teacher says (Askell et al. 2021,
section 2.3; Snell et al. 2022).
"""

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from prompt_tuning.data.batches import Batch
from prompt_tuning.errors import InputError
from prompt_tuning.losses.cross_entropy import distillation_loss
from prompt_tuning.losses.objective import Sums, learned_targets, token_sums
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.parameters import Parameters, merge
from prompt_tuning.parallel import parts
from prompt_tuning.settings import check_fields

EMBEDDING = "token_embedder/embedding"


@dataclasses.dataclass(frozen=True)
class ContextDistillation:
    """Descends from what the frozen model says to what it says behind a text.

    The loss of a position is `KL(teacher || student)` over the whole vocabulary, in
    nats. Positions and weights are the data's, whose tokens both read.

    Attributes:
      context: the text that the teacher reads before each row, behind the row's BOS.
    """

    context: str

    def __post_init__(self):
        check_fields(self)
        if not self.context:
            raise InputError(
                "ContextDistillation.context is empty: give the text that the prompt "
                "is to stand for"
            )


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A frozen model that reads some tokens before each row.

    Attributes:
      graph: its structure, with a prompt as long as the tokens.
      paths: of the frozen parameters that it shares with the student.
      prompt: path of its prompt.
      tokens: that its prompt is made of.
    """

    graph: nnx.GraphDef
    paths: tuple[str, ...]
    prompt: str
    tokens: tuple[int, ...]

    def parameters(self, student: Parameters) -> Parameters:
        """The teacher's own parameters: frozen ones of the student, and its tokens'."""
        own = {path: student[path] for path in self.paths}
        rows = parts.table_rows(student[EMBEDDING], jnp.asarray(self.tokens))
        return own | {self.prompt: rows.astype(jnp.float32)}

    def hidden(self, student: Parameters, batch: Batch) -> Float[Array, "B m D"]:
        """What predicts the targets at `batch.loss_positions`; no gradient goes there.

        Args:
          student: all parameters of the model that is taught.
          batch: without an accumulation axis.
        """
        model = cast(LanguageModel, merge(self.graph, self.parameters(student)))
        # A row may choose among the student's prompts; here there is one context.
        hidden = model.hidden(dataclasses.replace(batch, prompt_ids=None))
        return jax.lax.stop_gradient(hidden)


@dataclasses.dataclass(frozen=True)
class Distillation:
    """An objective: say what a teacher says; see `ContextDistillation`.

    Attributes:
      teacher: shares the student's frozen parameters.
    """

    teacher: Teacher

    def sums(
        self,
        hidden: Float[Array, "B m D"],
        head: Float[Array, "V D"],
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> Sums:
        """What a batch adds up to; see `Objective`.

        Raises:
          ValueError: if the parameters are not given.
        """
        if parameters is None:
            raise ValueError("a teacher runs on the model's parameters: pass them")
        with jax.named_scope("teacher"):
            said = self.teacher.hidden(parameters, batch)
        outcome = distillation_loss(hidden, head, learned_targets(batch), said)
        return token_sums(outcome, batch.loss_weights, batch)

    def divisor(self, batch: Batch) -> Float[Array, ""]:
        """The sum of the weights."""
        return jnp.sum(batch.loss_weights)
