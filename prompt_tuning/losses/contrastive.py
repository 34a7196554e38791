"""Contrastive loss of matching texts, with negatives from the batch."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from prompt_tuning.core.batch import Batch
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.model_choices import Pooling
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.number_ranges import PositiveNumber
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.losses.objective import LossSums, Objective, sum_losses
from prompt_tuning.losses.output_head import AnyHead
from prompt_tuning.sharding import collectives


@dataclasses.dataclass(frozen=True)
class Contrastive(Objective):
    """InfoNCE of texts (van den Oord et al. 2018, equation 4).

    Use it to tune embeddings, i.e. the vectors from `Model.embed`. Each record has a
    `query`, a `positive` text and perhaps `negatives`. With the cosine `s` of two
    vectors, the loss of a query is `-log softmax(s / temperature)` of its positive
    among the positives and negatives of all records of the batch (Henderson et al.
    2017, section 4.4), so larger batches are harder. Micro-batches of `accumulate` do
    not share candidates. `accuracy` is the share of queries with the positive as the
    nearest candidate.

    Attributes:
      temperature: divisor of the cosines.
      pooling: states that make a text's vector: the mean over its tokens, the last or
        the first; as in `Model.embed`.

    Raises:
      InputError: if a setting is out of range.

    Examples:
      >>> rows = [{"query": p, "positive": c} for p, c in pairs]
      >>> tuned = pt.tune(
      ...     model,
      ...     pt.LoRA(rank=2),
      ...     rows,
      ...     objective=pt.Contrastive(temperature=0.05),
      ...     steps=2,
      ...     progress=False,
      ... )
      >>> tuned.embed(["abc"]).shape
      (1, 128)
    """

    temperature: PositiveNumber = 0.05
    pooling: Pooling = "mean"

    def __post_init__(self):
        check_fields(self)

    @property
    def embeds(self) -> Pooling:
        """States that make a text's vector."""
        return self.pooling

    def check_model(self, config: ModelConfig) -> None:
        """Checks that a model can embed texts.

        Raises:
          InputError: if it has an encoder and a decoder, or a class head.
        """
        if config.architecture != "decoder_only" or config.labels:
            raise InputError(
                "Run.objective is a Contrastive, which compares vectors of texts: use "
                "a model of a single stack, without a head of classes"
            )

    def sums(
        self,
        hidden: Float[Array, "R m D"],
        head: AnyHead,
        batch: Batch,
        parameters: Parameters | None = None,
    ) -> LossSums:
        """Computes the sums of a batch over its queries; see `Objective`.

        Of the `R = E * C` rows, `C` consecutive ones are the texts of an example. An
        example that only fills the batch has weight 0 and is not a candidate.
        """
        del head, parameters
        weights = jnp.asarray(batch.example_weights)  # [E]
        texts = unit_vectors(hidden, batch.loss_weights)
        texts = texts.reshape(len(weights), -1, texts.shape[-1])  # [E, C, D]
        candidates = collectives.gather_batch(texts[:, 1:])
        count = candidates.shape[1]  # candidates of each example
        present = jnp.repeat(collectives.gather_batch(weights) > 0, count)
        products = texts[:, 0] @ candidates.reshape(-1, texts.shape[-1]).T
        # Of minus infinities alone, in a micro-batch of filling, the loss would be nan.
        lowest = jnp.finfo(products.dtype).min
        scores = jnp.where(present, products / float(self.temperature), lowest)
        first = collectives.row_range(len(weights)).first
        positive_places = (first + jnp.arange(len(weights))) * count
        right = jnp.take_along_axis(scores, positive_places[:, None], axis=1)[:, 0]
        # A filling example's own score is the lowest, and its loss has no weight.
        right = jnp.where(weights > 0, right, 0)
        losses = jax.nn.logsumexp(scores, axis=1) - right
        return sum_losses(losses, weights, weights, right >= scores.max(1))

    def divisor(self, batch: Batch) -> Float[Array, ""]:
        """Computes the total weight of the examples of a whole batch."""
        return jnp.sum(jnp.asarray(batch.example_weights))


def mean_vectors(
    hidden: Float[Array, "R m D"], weights: Float[Array, "R m"]
) -> Float[Array, "R D"]:
    """Computes the weighted mean of the states of each row, in float32."""
    wide = hidden.astype(jnp.float32)
    total = jnp.sum(wide * weights[..., None], axis=1)
    # Filling rows have no weight.
    return total / jnp.maximum(jnp.sum(weights, axis=1), 1)[:, None]


def unit_vectors(
    hidden: Float[Array, "R m D"], weights: Float[Array, "R m"]
) -> Float[Array, "R D"]:
    """Computes `mean_vectors` of length 1."""
    means = mean_vectors(hidden, weights)
    square = jnp.sum(means * means, axis=1, keepdims=True)
    return means * jax.lax.rsqrt(jnp.maximum(square, 1e-24))
