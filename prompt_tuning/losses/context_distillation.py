"""Distillation of a text into a prompt: the teacher is the frozen model reading it.

`training.distillation` builds the teacher itself.
"""

import dataclasses
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses import objective
from prompt_tuning.losses.cross_entropy import TokenLoss, distillation_loss
from prompt_tuning.losses.logit_losses import FORWARD, Divergence, TopTargets
from prompt_tuning.losses.output_head import AnyHead
from prompt_tuning.settings.distillation_settings import (
    DistillationSettings,
    DivergenceKind,
    TargetKind,
)

EXACT, TOP, HIDDEN = get_args(TargetKind)
TEACHER_HIDDEN = "teacher_hidden"
TOP_COLUMNS = TOP_IDS, TOP_LOGPROBS = "teacher_ids", "teacher_logprobs"
"""Columns of stored predictions of a teacher."""


class StoredTargets(NamedTuple):
    """How a teacher's predictions are stored; see `ContextDistillation`.

    Attributes:
      kind: "hidden" or "top".
      mass: see there.
      top: see there.
    """

    kind: TargetKind
    mass: float
    top: int


@dataclasses.dataclass(frozen=True)
class ContextDistillation(DistillationSettings, objective.ObjectiveConfig):
    """Teaches a prompt to replace a long text; the teacher is the model reading it.

    The loss at a position is a divergence over the whole vocabulary, in nats. Use it to
    replace an instruction or a handful of examples, which every request would repeat,
    by a few vectors. Positions and weights come from the data. Both models read its
    tokens, so its completions need not be right.

    Attributes:
      context: text that the teacher reads before each row, after the row's BOS. Set
        this or `context_key`.
      context_key: jsonl key or HDF5 data set `[rows]` with the text that the teacher
        reads before each example, or with its index in `contexts`. Rows with the same
        text share its keys and values.
      contexts: the texts that `context_key` numbers, from 0: a list, or a jsonl file
        with a `text`, or its token `ids`, per line. None if the column has texts.
      cache_bytes: maximum size of the keys and values of all `contexts`, which are then
        computed once for the run; if they are larger, each step computes those of its
        rows.
      divergence: "forward" for `KL(teacher || student)`: the student covers all that
        the teacher finds likely; "reverse" for `KL(student || teacher)`: it avoids what
        the teacher finds unlikely; "jsd" for the generalized Jensen-Shannon divergence,
        a mixture of both (Agarwal et al. 2024, equation 1).
      beta: weight of the teacher in the mixture of "jsd": near 0 it resembles the
        forward divergence, near 1 the reverse one. None for 0.5.
      targets: "exact" runs the teacher in each step. The other two run it once for
        every record, before the first step, and store its predictions in the run
        directory (`teacher.npz`): "hidden" its last hidden states, in the model's
        dtype, from which each step computes the teacher's exact distributions; "top"
        its likeliest tokens at each position, which take less room. Evaluations always
        run the teacher.
      mass: total probability of the tokens that "top" keeps at a position. The rest
        count as one outcome.
      top: maximum number of tokens that "top" keeps at a position.

    Raises:
      InputError: if the context is empty, or too long for the model together with a
        row, rows have contexts and are packed, or `beta` is given for another
        divergence.

    Examples:
      >>> loss = pt.ContextDistillation(context="upper: ")
      >>> prompt = pt.SoftPrompt(length=5)
      >>> tuned = pt.tune(
      ...     model, prompt, pairs, objective=loss, steps=2, progress=False
      ... )
    """

    def __post_init__(self):
        check_fields(self)
        name = type(self).__name__
        if not self.context and self.context_key is None:
            raise InputError(
                f"{name}.context is empty: give the text that the prompt is to stand "
                "for, or the context_key of each example's own"
            )
        if self.context and self.context_key is not None:
            raise InputError(
                f"{name}.context is one text for all examples, and context_key names "
                "each one's own: give one of them"
            )
        if self.contexts is not None and self.context_key is None:
            raise InputError(
                f"{name}.contexts is a table, but no context_key names the column of "
                "each example's number in it: give both"
            )
        if self.beta is not None and self.divergence != "jsd":
            raise InputError(
                f"{name}.beta is {self.beta}, which only the divergence 'jsd' reads, "
                f"and {name}.divergence is {self.divergence!r}: leave beta out, or set "
                "divergence to 'jsd'"
            )

    def prepare(self, open_teacher: objective.OpenTeacher) -> "Distillation":
        """Builds the teacher that reads the context; see `ObjectiveConfig`."""
        beta = 0.5 if self.beta is None else float(self.beta)
        divergence = Divergence(self.divergence, beta)
        context = self.context
        if self.context_key is not None:
            context = objective.OwnContexts(self.cache_bytes)
        stored = None
        if self.targets != EXACT:
            stored = StoredTargets(self.targets, float(self.mass), self.top)
        return Distillation(open_teacher(context), divergence, stored)

    def check_packing(self) -> None:
        """Refuses packed rows if examples have different contexts.

        Raises:
          InputError: tells what to set.
        """
        if self.context_key is not None:
            raise InputError(
                "DataSource.packing is True, but each example has a context of its own "
                f"({type(self).__name__}.context_key): set packing to False"
            )


@dataclasses.dataclass(frozen=True)
class OnPolicyDistillation(ContextDistillation):
    """`ContextDistillation` on answers that the trained model writes itself.

    In each step the model answers the prompts of a batch (`Run.rollouts`, without
    rewards). At each token of an answer it learns to predict what the frozen model
    predicts after the context and the same tokens (Agarwal et al. 2024, "On-policy
    distillation of language models", with its own outputs alone). So it learns from its
    own mistakes, and the data needs no completions. The sampling temperature only
    selects the answers: the divergence is at temperature 1.

    The attributes are the same as in `ContextDistillation`, except:

    Attributes:
      divergence: "reverse" by default.
      targets: "exact", as answers are new in each step.

    Raises:
      InputError: as `ContextDistillation`, and if the teacher's targets are to be
        stored.

    Examples:
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     [{"prompt": "apple="}, {"prompt": "bread="}],
      ...     objective=pt.OnPolicyDistillation(context="upper: "),
      ...     rollouts=pt.Rollouts(group=1, new_tokens=8),
      ...     steps=2,
      ...     batch_size=2,
      ...     progress=False,
      ... )
    """

    divergence: DivergenceKind = "reverse"

    def __post_init__(self):
        super().__post_init__()
        if self.targets != EXACT:
            raise InputError(
                f"OnPolicyDistillation.targets is {self.targets!r}, but its answers "
                "are new in each step, so nothing can be stored: set it to 'exact'"
            )

    @property
    def samples_answers(self) -> bool:
        """True: rows are answers that the trained model samples."""
        return True


@dataclasses.dataclass(frozen=True)
class Distillation(objective.HeldOutObjective):
    """Divergence from a teacher's predictions; see `ContextDistillation`.

    Attributes:
      teacher: frozen model that shares the student's frozen parameters.
      divergence: how both are compared.
      stored: how the teacher's predictions are stored before the first step; None if
        the teacher runs in each step.
    """

    meaning = "divergence from the frozen model that reads the context"

    teacher: objective.TeacherModel
    divergence: Divergence = FORWARD
    stored: StoredTargets | None = None

    def context(self, parameters: Parameters) -> Parameters:
        """Reads the teacher's text, if the teacher runs in each step."""
        return {} if self.stored else self.teacher.read_context(parameters)

    def sums(
        self,
        hidden: Float[Array, "B m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> objective.LossSums:
        """Computes the sums of a batch; see `Objective`.

        Raises:
          ValueError: if the parameters are not given.
        """
        losses = self.token_losses(hidden, head, batch, parameters)
        return objective.token_sums(losses, batch.loss_weights, batch)

    def token_losses(
        self,
        hidden: Float[Array, "B m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> TokenLoss:
        """Computes the divergence at each learned token; see `HeldOutObjective`.

        Held-out batches have no stored predictions.

        Raises:
          ValueError: if the teacher has to run, and the parameters are not given.
        """
        columns = batch.columns
        if TEACHER_HIDDEN in columns:
            teacher = jnp.asarray(columns[TEACHER_HIDDEN])
        elif TOP_IDS in columns:
            teacher = TopTargets(*(jnp.asarray(columns[x]) for x in TOP_COLUMNS))
        elif parameters is None:
            raise ValueError("a teacher runs on the model's parameters: pass them")
        else:
            with jax.named_scope("teacher"):
                teacher = self.teacher.hidden(parameters, batch)
        targets = objective.learned_targets(batch)
        return distillation_loss(hidden, head, targets, teacher, self.divergence)
