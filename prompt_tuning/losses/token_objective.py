"""Cross-entropy of the target tokens, the usual objective."""

import dataclasses

from jaxtyping import Array, Float

from prompt_tuning.core import number_ranges
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses import objective
from prompt_tuning.losses.normalizers import (
    NORMALIZERS,
    TOTAL_TARGETS,
    Normalizer,
    constant_normalizer,
)
from prompt_tuning.losses.objective import LossSums, Objective
from prompt_tuning.losses.output_head import AnyHead


@dataclasses.dataclass(frozen=True)
class TokenObjective(Objective):
    """Cross-entropy of the target tokens: what `tune` minimizes unless told otherwise.

    The losses are summed with the loss weights of the data (by default 1 for completion
    tokens and 0 for prompt tokens) and divided by `normalizer`.

    Attributes:
      z_loss: weight of `log(Z)**2`, which keeps the logits' normalizer near 1.
      label_smoothing: share of the target spread over the vocabulary, from 0 to below
        1.
      normalizer: divisor of the weighted sum, by its T5X name: "num_real_target_tokens"
        (the sum of the weights), "num_total_target_tokens" (all targets, padding
        included, except in rows that only fill a batch), "average_per_sequence" (the
        mean of each sequence, averaged; in packed rows each example is a sequence), a
        number, or None for the plain sum.
      soft_cap: bound on the absolute value of each logit, or None. It applies to this
        loss only: evaluation and generation use the model's own logits.

    Raises:
      InputError: if a number is out of range, or there is no such normalizer.

    Examples:
      >>> loss = pt.TokenObjective(label_smoothing=0.1)
      >>> prompt = pt.SoftPrompt(length=5)
      >>> tuned = pt.tune(
      ...     model, prompt, pairs, objective=loss, steps=2, progress=False
      ... )
    """

    z_loss: number_ranges.NonnegativeNumber = 0.0
    label_smoothing: number_ranges.ShareBelowOne = 0.0
    normalizer: str | number_ranges.PositiveNumber | None = "num_real_target_tokens"
    soft_cap: number_ranges.PositiveNumber | None = None

    def __post_init__(self):
        check_fields(self)
        chosen = self.normalizer
        if isinstance(chosen, str) and chosen not in NORMALIZERS:
            raise InputError(
                f"TokenObjective.normalizer is {shown(chosen)}, expected one of "
                f"{', '.join(NORMALIZERS)}, a number above 0, or None for the sum"
            )

    @property
    def counts_padding(self) -> bool:
        """Whether the normalizer counts padding among the targets."""
        return self.normalizer == TOTAL_TARGETS

    @property
    def _normalizer(self) -> Normalizer:
        if isinstance(self.normalizer, str):
            return NORMALIZERS[self.normalizer]
        return constant_normalizer(
            1.0 if self.normalizer is None else float(self.normalizer)
        )

    def sums(
        self,
        hidden: Float[Array, "B m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> LossSums:
        """Computes the sums of a batch; see `Objective`."""
        del parameters
        cap = None if self.soft_cap is None else float(self.soft_cap)
        losses = objective.target_losses(
            hidden, head, batch, float(self.z_loss), float(self.label_smoothing), cap
        )
        return objective.token_sums(losses, self._normalizer.weights(batch), batch)

    def divisor(self, batch: Batch) -> Float[Array, ""] | float:
        """Computes the normalizer's divisor."""
        return self._normalizer.divisor(batch)


NATS_PER_WEIGHT = TokenObjective()
"""Cross-entropy averaged by weight: the default, and the loss of evaluations."""
