"""Group relative policy optimization: learning from rewards of the model's answers."""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from prompt_tuning.core import number_ranges
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses import objective
from prompt_tuning.losses.cross_entropy import TokenLoss
from prompt_tuning.losses.normalizers import sequence_weights
from prompt_tuning.losses.output_head import AnyHead, tempered
from prompt_tuning.settings.data_source import ADVANTAGES

SAMPLER_LOGPROBS = "sampler_logprobs"
"""The column of each token's log-probability under the model that drew it, in nats."""


@dataclasses.dataclass(frozen=True)
class GRPO(objective.ObjectiveConfig):
    """Policy optimization on sampled answers (Shao et al. 2024, equation 3).

    Use it with `Run.rollouts`, which samples answers, has them judged and computes
    their advantages `A`. With `r` a token's probability over the probability that it
    was sampled with, the loss of a token is

        -min(r A, clip(r, 1 - clip, 1 + clip_above) A) + beta (exp(d) - d - 1)

    where `d` is the log-probability under the frozen model minus that under the trained
    one, so the second term estimates the divergence from the frozen model (Schulman
    2020, "Approximating KL divergence", k3; k1 is `-d`). The frozen model runs only if
    `beta` is not 0.

    Attributes:
      clip: how far a ratio may fall below 1 where that lowers the loss.
      clip_above: how far it may rise above 1; None for the same as `clip`.
      beta: strength of the pull towards the frozen model.
      divergence: estimate of the divergence, "k3" or "k1". The value of k1 is noisier.
        Its gradient is that of `d^2 / 2`, which on average is the gradient of the
        divergence (Tang and Munos 2025, "On a few pitfalls in KL divergence gradient
        estimation for RL").
      ratio: "token", or "sequence" for the geometric mean of the ratios of an answer's
        tokens (GSPO, Zheng et al. 2025, equation 7).
      average: "token" divides the sum over all tokens by their number (DAPO, Yu et al.
        2025, equation 8); "sequence" averages the means of the answers (GRPO);
        "constant" divides by the number of answers times the maximum length (Dr. GRPO,
        Liu et al. 2025, section 3.2).
      reference: directory of another run of the same model; in the divergence the
        frozen model then has its prompts and adapters. None for the frozen model alone.

    Raises:
      InputError: if a number is out of range, or `reference` is given without `beta`.

    Examples:
      >>> def shout(prompt: str, completion: str, row: dict) -> float:
      ...     return float(completion.isupper())
      >>> tuned = pt.reinforce(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     ["apple=", "bread="],
      ...     rewards=[shout],
      ...     objective=pt.GRPO(beta=0.01),
      ...     new_tokens=8,
      ...     steps=2,
      ...     batch_size=2,
      ...     progress=False,
      ... )
    """

    columns: ClassVar[tuple[str, ...]] = (ADVANTAGES, SAMPLER_LOGPROBS)

    clip: number_ranges.ShareBelowOne = 0.2
    clip_above: number_ranges.NonnegativeNumber | None = None
    beta: number_ranges.NonnegativeNumber = 0.0
    divergence: Literal["k3", "k1"] = "k3"
    ratio: Literal["token", "sequence"] = "token"
    average: Literal["token", "sequence", "constant"] = "token"
    reference: str | None = None

    def __post_init__(self):
        check_fields(self)
        if self.reference is not None and not self.beta:
            raise InputError(
                f"GRPO.reference is {shown(self.reference)}, which nothing reads, as "
                "GRPO.beta is 0: set beta, e.g. to 0.04, or leave reference out"
            )

    @property
    def samples_answers(self) -> bool:
        """True: rows are answers that the trained model samples."""
        return True

    @property
    def learns_rewards(self) -> bool:
        """True: answers with a higher reward than the rest become more likely."""
        return True

    def prepare(self, open_teacher: objective.OpenTeacher) -> "GroupPolicy":
        """Opens the frozen model as the reference, if the loss reads it."""
        reference = open_teacher(run=self.reference) if self.beta else None
        return GroupPolicy(self, reference)


@dataclasses.dataclass(frozen=True)
class GroupPolicy(objective.Objective):
    """`GRPO` with its reference, for samples that were drawn in a certain way.

    Attributes:
      settings: the settings.
      reference: the frozen model, alone or with another run's adapters; None if `beta`
        is 0.
      temperature: sampling temperature. Probabilities come from logits divided by it.
      longest: maximum number of tokens of an answer.
    """

    columns: ClassVar[tuple[str, ...]] = GRPO.columns

    settings: GRPO
    reference: objective.TeacherModel | None = None
    temperature: number_ranges.PositiveNumber = 1.0
    longest: number_ranges.PositiveInteger = 1

    def drawn(
        self,
        temperature: number_ranges.PositiveNumber,
        longest: number_ranges.PositiveInteger,
    ) -> "GroupPolicy":
        """Returns the objective for answers that are drawn in another way."""
        return dataclasses.replace(self, temperature=temperature, longest=longest)

    def context(self, parameters: Parameters) -> Parameters:
        """Returns what the reference has and the trained model lacks."""
        return {} if self.reference is None else self.reference.read_context(parameters)

    @property
    def measured(self) -> tuple[str, ...]:
        """Share of clipped tokens, and the divergence if it is part of the loss."""
        return ("clipped_share", *(["kl"] if self.reference is not None else []))

    def sums(
        self,
        hidden: Float[Array, "B m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> objective.MeasuredSums:
        """Computes the sums of a batch; see `Objective`.

        Raises:
          ValueError: if there is a reference and the parameters are not given.
        """
        losses = self._token_losses(hidden, head, batch)
        reference = None
        if self.reference is not None:
            if parameters is None:
                raise ValueError("a reference runs on the model's parameters")
            with jax.named_scope("reference"):
                states = self.reference.hidden(parameters, batch)
                reference = -self._token_losses(states, head, batch).nll
        mask = jnp.asarray(batch.loss_weights)
        values, measured = self.policy_losses(
            -losses.nll,
            jnp.asarray(batch.columns[SAMPLER_LOGPROBS]),
            jnp.asarray(batch.columns[ADVANTAGES]),
            mask,
            reference,
        )
        factors = mask
        if self.settings.average == "sequence":
            factors = sequence_weights(batch)
        return objective.MeasuredSums(
            jnp.sum(factors * values),
            jnp.sum(mask),
            jnp.sum(mask * losses.correct),
            {name: jnp.sum(mask * value) for name, value in measured.items()},
        )

    def _token_losses(self, hidden: Array, head: AnyHead, batch: Batch) -> TokenLoss:
        """Computes each token's loss at the sampling temperature."""
        if self.temperature == 1:
            return objective.target_losses(hidden, head, batch)
        scale = float(self.temperature)
        return objective.target_losses(hidden / scale, tempered(head, scale), batch)

    def policy_losses(
        self,
        logprobs: Float[Array, "B m"],
        sampler: Float[Array, "B m"],
        advantages: Float[Array, "B m"],
        mask: Float[Array, "B m"],
        reference: Float[Array, "B m"] | None = None,
    ) -> tuple[Float[Array, "B m"], dict[str, Float[Array, "B m"]]]:
        """Computes the loss of each token.

        Args:
          logprobs: log-probabilities under the trained model, in nats.
          sampler: log-probabilities under the model that drew the tokens.
          advantages: advantage of each token's answer.
          mask: 1 where a token is learned, else 0.
          reference: log-probabilities under the frozen model; None if `beta` is 0.

        Returns:
          the losses, and the values of `measured`.
        """
        settings = self.settings
        log_ratios = jnp.where(mask > 0, logprobs - sampler, 0)
        if settings.ratio == "sequence":
            count = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True), 1)
            mean = jnp.sum(log_ratios * mask, axis=-1, keepdims=True) / count
            log_ratios = jnp.broadcast_to(mean, mask.shape)
        ratios = jnp.exp(log_ratios)
        above = settings.clip if settings.clip_above is None else settings.clip_above
        clipped = jnp.clip(ratios, 1 - settings.clip, 1 + above)
        gains = jnp.minimum(ratios * advantages, clipped * advantages)
        losses = -gains
        measured = {"clipped_share": (gains < ratios * advantages).astype(jnp.float32)}
        if reference is not None:
            # In padding the difference of unread log-probabilities may be large.
            lead = jnp.where(mask > 0, jax.lax.stop_gradient(reference) - logprobs, 0)
            if settings.divergence == "k1":
                # Gradients of -d are 0 on average, those of d^2 / 2 the divergence's.
                pull = lead * lead / 2
                measured["kl"] = pull + jax.lax.stop_gradient(-lead - pull)
            else:
                measured["kl"] = jnp.exp(lead) - lead - 1
            losses = losses + float(settings.beta) * measured["kl"]
        return losses, measured

    def divisor(self, batch: Batch) -> Float[Array, ""] | float:
        """Computes the divisor of a whole batch; see `GRPO.average`."""
        if self.settings.average == "token":
            return jnp.maximum(jnp.sum(batch.loss_weights), 1)
        answers = jnp.maximum(jnp.sum(batch.real_rows), 1)
        constant = self.settings.average == "constant"
        return answers * float(self.longest if constant else 1)
