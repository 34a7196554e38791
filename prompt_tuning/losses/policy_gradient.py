"""REINFORCE on given texts: cross-entropy times an advantage."""

import dataclasses
from typing import ClassVar

from jaxtyping import Array, Float

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses import objective
from prompt_tuning.losses.objective import LossSums, Objective
from prompt_tuning.losses.output_head import AnyHead
from prompt_tuning.settings.data_source import ADVANTAGES


@dataclasses.dataclass(frozen=True)
class PolicyGradient(Objective):
    """Cross-entropy of each token times its advantage: REINFORCE on texts in the data.

    If the model itself wrote the texts, the gradient is that of minus the expected
    advantage (Williams 1992, with a baseline in the advantage): texts that did better
    than expected become more likely, the rest less likely. The advantages come from the
    data (`DataSource.advantages_key`). Their weighted sum is divided by the sum of the
    weights.

    Raises:
      InputError: when the run is opened, if the data have no advantages.

    Examples:
      >>> rows = [{"prompt": p, "completion": c, "better": 1.0} for p, c in pairs]
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.SoftPrompt(length=5),
      ...     rows,
      ...     objective=pt.PolicyGradient(),
      ...     advantages_key="better",
      ...     steps=2,
      ...     progress=False,
      ... )
    """

    columns: ClassVar[tuple[str, ...]] = (ADVANTAGES,)

    def sums(
        self,
        hidden: Float[Array, "B m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> LossSums:
        """Computes the sums of a batch; see `Objective`."""
        del parameters
        losses = objective.target_losses(hidden, head, batch)
        return objective.token_sums(losses, advantage_weights(batch), batch)


def advantage_weights(batch: Batch) -> Float[Array, "*lead m"]:
    """Multiplies the weight of each learned position by its advantage.

    Raises:
      InputError: if the batch has no advantages.
    """
    PolicyGradient().check_columns(batch.columns)
    return batch.loss_weights * batch.columns[ADVANTAGES]
