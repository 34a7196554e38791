"""An objective from a function of logits and targets."""

import dataclasses
from collections.abc import Callable

from jaxtyping import Array, Float, Int

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses import objective
from prompt_tuning.losses.output_head import AnyHead, as_output_head, head_logits
from prompt_tuning.sharding import collectives

LossFunction = Callable[[Float[Array, "B m V"], Int[Array, "B m"]], Float[Array, "B m"]]


@dataclasses.dataclass(frozen=True)
class FunctionObjective(objective.Objective):
    """Averages a function's losses over the learned tokens, by their loss weights.

    It computes the logits of all learned tokens together, `[B, m, V]` in float32; the
    built-in objectives compute them in chunks.

    Attributes:
      function: `(logits [B, m, V], targets [B, m]) -> losses [B, m]`, in JAX.
    """

    function: LossFunction

    def sums(
        self,
        hidden: Float[Array, "B m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> objective.LossSums:
        """Sums the losses of a batch; see `Objective`.

        Raises:
          ValueError: if the function's result does not have the shape `[B, m]`.
        """
        del parameters
        targets = objective.learned_targets(batch)  # [B, m]
        # [B, m, v] on each device, then [B, m, V] where the vocabulary is sharded.
        head = as_output_head(head)
        logits = head_logits(hidden, head)
        if not head.of_classes:
            logits = collectives.gather_vocabulary(logits)
        losses = self.function(logits, targets)
        if losses.shape != targets.shape:
            name = getattr(self.function, "__name__", repr(self.function))
            raise ValueError(
                f"the loss function {name} returned shape {losses.shape}, expected "
                f"{targets.shape}: one loss for each target, without a mean"
            )
        correct = logits.argmax(axis=-1) == targets
        return objective.sum_losses(
            losses, batch.loss_weights, batch.loss_weights, correct
        )
