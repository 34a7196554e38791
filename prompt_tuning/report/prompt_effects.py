"""Effects of each prompt vector: its share of attention, and the cost without it."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from prompt_tuning.core import intermediates
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.intermediates import ATTENTION_WEIGHTS
from prompt_tuning.core.layer_kinds import ATTENTIONS, SHARING, mixers
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.data.batching.batches import read_batch
from prompt_tuning.data.batching.plan_batches import plan_batches
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.evaluation.batch_scores import score_batch
from prompt_tuning.losses.objective import target_losses
from prompt_tuning.models import attention_choice, scoring
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.row_info import RowInfo
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.prompts import prompt_module
from prompt_tuning.prompts.prefix import KeyValuePrefix
from prompt_tuning.prompts.soft import StackedPrompts
from prompt_tuning.settings.data_source import DataSource

ROWS = 1024
"""Maximum number of rows to compute for the cost of all removals."""
FEWEST, MOST = 8, 64
"""Bounds on the number of measured examples."""
DEAD_SHARE, DEAD_COST = 0.002, 0.001
"""Share of attention and cost in nats per token below which a vector is dead."""


@dataclasses.dataclass(frozen=True)
class PromptEffects:
    """The effects of a prompt's vectors on held-out examples.

    Attributes:
      stack: stack with the prompt, "encoder" or "decoder".
      examples: number of examples.
      shares: share of attention on each vector in each block, averaged over heads and
        text tokens, `[L, P]`.
      costs: increase of the cross-entropy without each vector, in nats per token,
        `[P]`; None if this prompt cannot lose one.
    """

    stack: str
    examples: int
    shares: Float[np.ndarray, "L P"]
    costs: Float[np.ndarray, "P"] | None

    @property
    def total_share(self) -> float:
        """Share of attention on the whole prompt, averaged over blocks."""
        return float(self.shares.sum(axis=1).mean())

    @property
    def dead(self) -> list[int]:
        """Indices of the vectors that get no attention and cost nothing to remove."""
        unread = self.shares.max(axis=0) <= DEAD_SHARE
        if self.costs is not None:
            unread &= np.abs(self.costs) <= DEAD_COST
        return np.flatnonzero(unread).tolist()


def measure_effects(
    model: PromptedModel, parameters: Parameters, examples: Examples, data: DataSource
) -> PromptEffects | str:
    """Measures the effect of each vector of a model's prompt.

    At most `MOST` examples are read. Returns the effects, or the reason why there are
    none.
    """
    if model.layout is not None or model.weight_storage.by_layer:
        return "not measured on several devices, or with weights that are streamed"
    if attention_choice.choose_attention(model.config).kernel is not None:
        return "not measured, because a fused kernel keeps no weights of attention"
    prompts = scoring.merge_model(model.graph, parameters).prompts()
    if not prompts:
        return "no prompt was trained"
    stack, prompt = next(iter(prompts.items()))
    if prompt.count > 1:
        return "not measured, because there are several prompts"
    if stack == "decoder" and model.config.architecture == "encoder_decoder":
        return "not measured, because the decoder reads an encoder's output as well"
    attentions = {*ATTENTIONS, *SHARING.values()}
    if not all(attentions.intersection(x) for x in mixers(model.config)):
        return "not measured, because some layers have no attention"
    count = min(max(ROWS // prompt.length, FEWEST), MOST, len(examples))
    batches = _read_batches(model, examples, data, count)
    share = functools.partial(attention_shares, stack)
    texts = [score_batch(share, model, parameters, batch) for batch in batches]
    sums = np.sum([np.asarray(x.sums).sum(0) for x in texts], axis=0)
    shares = sums / sum(float(x.tokens.sum()) for x in texts)
    if not _can_lose_vectors(prompt):
        return PromptEffects(stack, count, shares, None)
    run = functools.partial(nats_without, stack)
    without = [score_batch(run, model, parameters, batch) for batch in batches]
    rises = np.sum([np.asarray(x).sum(0) for x in without], axis=0)
    rises = rises - sum(float(x.nats.sum()) for x in texts)
    costs = rises / sum(float(batch.loss_weights.sum()) for batch in batches)
    return PromptEffects(stack, count, shares, costs)


def _read_batches(
    model: PromptedModel, examples: Examples, data: DataSource, count: int
) -> list[Batch]:
    """Reads evenly spaced batches with at least `count` examples, one per row."""
    size = min(count, 16)
    data = dataclasses.replace(data, packing=False, batch_size=size, batch_tokens=None)
    plan = plan_batches(data, model.interface, examples, shuffle=False)
    needed = min(-(-count // size), plan.batches_per_epoch)
    numbers = np.linspace(0, plan.batches_per_epoch - 1, needed).astype(int).tolist()
    pad_id = model.config.pad_id
    return [read_batch(examples, plan, number, pad_id=pad_id) for number in numbers]


def _can_lose_vectors(prompt: prompt_module.PromptModule) -> bool:
    """Whether a prompt is still valid without one of its vectors."""
    if prompt.length < 2 or isinstance(prompt, prompt_module.InputDependentPrompt):
        return False
    return prompt.attachment is not prompt_module.Attachment.EVERY_BLOCK


class TextShares(NamedTuple):
    """Attention of each row's text tokens, and the row's loss.

    Attributes:
      sums: attention on each vector in each block, summed over the tokens.
      tokens: number of tokens.
      nats: sum of the weighted losses.
    """

    sums: Float[Array, "B L P"]
    tokens: Float[Array, "B"]
    nats: Float[Array, "B"]


def attention_shares(
    stack: str, graph: nnx.GraphDef, parameters: Parameters, batch: Batch
) -> TextShares:
    """Sums the attention of each text's tokens on each prompt vector.

    `stack` has the prompt; the batch has one example per row.
    """
    model = scoring.merge_model(graph, parameters)
    blocks = getattr(model, stack)
    paths = [f"{stack}/layers/{n}/{ATTENTION_WEIGHTS}" for n in range(blocks.count)]
    with intermediates.capture(paths) as arrays:
        nats = _nats(model, batch)
    weights = jnp.stack([arrays[path] for path in paths], axis=1)  # [B, L, Q, keys]
    rows = RowInfo.from_inputs(batch, model.config.vocabulary_size)
    length, prompt = batch.tokens.shape[1], blocks.prompt
    if isinstance(prompt, KeyValuePrefix) or blocks.shared:
        text = rows.segments(length) > 0  # [B, Q]
        on_prompt = weights[..., : prompt.length]  # [B, L, Q, P]
    else:
        layout = blocks.layout(rows, length)
        text = (layout.segments > 0) & ~layout.is_prompt  # [B, Q]
        source = jnp.where(layout.is_prompt, layout.source, prompt.length)
        vectors = jax.nn.one_hot(source, prompt.length)  # [B, keys, P]
        on_prompt = jnp.einsum("blqs,bsp->blqp", weights, vectors)
    if batch.real_rows is not None:
        text &= batch.real_rows[:, None] > 0
    sums = jnp.einsum("blqp,bq->blp", on_prompt, text.astype(jnp.float32))
    return TextShares(sums, text.sum(1).astype(jnp.float32), nats)


def _nats(model: LanguageModel, batch: Batch) -> Float[Array, "B"]:
    losses = target_losses(model.hidden(batch), model.output_head(), batch)
    return jnp.sum(losses.nll * batch.loss_weights, axis=1)


def nats_without(
    stack: str, graph: nnx.GraphDef, parameters: Parameters, batch: Batch
) -> Float[Array, "B P"]:
    """Sums the weighted losses of each row without each vector of its prompt.

    What follows a removed vector moves up by one position. `stack` has the prompt; the
    batch has one example per row.
    """
    prompt = getattr(scoring.merge_model(graph, parameters), stack).prompt
    values, count = prompt(), prompt.length
    axis = 2 if isinstance(prompt, KeyValuePrefix) else values.ndim - 2

    def nats(kept: Int[Array, "_"]) -> Float[Array, "B"]:
        model = scoring.merge_model(graph, parameters)
        part = jnp.take(values, kept, axis=axis)
        getattr(model, stack).prompt = (
            _KeptPositions(part)
            if isinstance(prompt, KeyValuePrefix)
            else StackedPrompts(part.reshape(1, *part.shape[-2:]))
        )
        return _nats(model, batch)

    # All numbers but one; the first row lacks the first one: [P, P - 1].
    numbers = np.array(list(itertools.combinations(range(count), count - 1)))[::-1]
    return jax.lax.map(nats, jnp.asarray(numbers)).T


class _KeptPositions(KeyValuePrefix):
    """A prefix of given keys and values."""

    def __init__(self, values: Float[Array, "L 2 P G K"]):
        self.prompt = nnx.Param(values)
