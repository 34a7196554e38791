"""Sample answers with the parameters of a step."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import numpy as np

from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.status_line import status
from prompt_tuning.decoding.batch_decoding import draw_batch
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.detokenizer import Detokenizer
from prompt_tuning.decoding.request import (
    Completion,
    Request,
    content_number,
    separate_equal,
)
from prompt_tuning.decoding.request_checks import row_ends, slots_for, text_before
from prompt_tuning.decoding.row_checks import check_generates
from prompt_tuning.decoding.row_encoding import LENGTH_MULTIPLE, pad_rows
from prompt_tuning.decoding.row_progress import first_choices
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.decoding.token_choice import NO_TOKEN
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.settings.rollout_settings import Rollouts
from prompt_tuning.training.rollouts.prompt_table import RolloutPrompt, RolloutPrompts

POLICY = "policy"
"""The engine's name for the adapter in training."""


@dataclasses.dataclass(frozen=True)
class SampledAnswer:
    """A sampled answer.

    Attributes:
      ids: its tokens, including its end token.
      logprobs: log-probability of each token when sampled, in nats.
      text: its text, without its end.
      truncated: whether it reached the maximum length without an end.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    truncated: bool


@runtime_checkable
class Draws(Protocol):
    """Samples answers to requests with equal settings; only their ends may differ."""

    def __call__(
        self,
        requests: Sequence[Request],
        model: PromptedModel,
        parameters: Parameters,
        *,
        renewed: bool,
    ) -> list[list[SampledAnswer]]:
        """Returns the answers to each request.

        `parameters` are all parameters of the model; `renewed` tells whether they
        changed since the last call.
        """
        ...


class EngineDraws:
    """Samples with a decoding engine that stays open; see `DecodingEngine`."""

    def __init__(
        self, model: PromptedModel, parameters: Parameters, slots: int, length: int
    ):
        self._engine = DecodingEngine(
            model, parameters, slots=slots, length=length, tempered=True
        )

    def __call__(
        self,
        requests: Sequence[Request],
        model: PromptedModel,
        parameters: Parameters,
        *,
        renewed: bool,
    ) -> list[list[SampledAnswer]]:
        """Returns the answers to each request; see `Draws`."""
        if renewed:
            self._engine.add_adapter(POLICY, model, parameters)
        return [
            [
                _sampled(completion)
                for completion in sorted(handle.completions, key=lambda x: x.sample)
            ]
            for handle in self._engine.run(requests)
        ]


class MeshDraws:
    """Samples on a mesh; each device samples its rows of a batch.

    Rows have the same keys as in the engine, so they get the same tokens, up to
    rounding.

    Args:
      model: a model to sample from.
      rows: number of rows sampled together, rounded up to what the mesh divides.
      longest: number of tokens of the longest prompt.
    """

    def __init__(self, model: PromptedModel, rows: int, longest: int):
        check_generates(model)
        parts = model.interface.rows.parts
        self._count = -(-rows // parts) * parts
        self._length = -(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE

    def __call__(
        self,
        requests: Sequence[Request],
        model: PromptedModel,
        parameters: Parameters,
        *,
        renewed: bool,
    ) -> list[list[SampledAnswer]]:
        """Returns the answers to each request; see `Draws`."""
        del renewed
        group = requests[0].sampling.n
        rows = [(x, x.first_sample + n) for x in requests for n in range(group)]
        answers = []
        for start in range(0, len(rows), self._count):
            part = rows[start : start + self._count]
            answers += self._draw(part, model, parameters)
        starts = range(0, len(answers), group)
        return [answers[start : start + group] for start in starts]

    def _draw(
        self,
        rows: Sequence[tuple[Request, int]],
        model: PromptedModel,
        parameters: Parameters,
    ) -> list[SampledAnswer]:
        """Samples the answers of rows, each a request and a sample number."""
        filled = [*rows, *[rows[0]] * (self._count - len(rows))]
        requests, samples = zip(*filled, strict=True)
        rows_of_ids = [list(request.ids or ()) for request in requests]
        tokens, lengths = pad_rows(rows_of_ids, model.config.pad_id, self._length)
        ends = [row_ends(request.sampling, model) for request in requests]
        sampling, most = requests[0].sampling, max(ends, key=len)
        contents = list(map(content_number, rows_of_ids))
        choices = first_choices(sampling, most, samples, contents)
        own_ends = np.full(np.shape(choices.ends), NO_TOKEN, np.int32)
        for row, own in zip(own_ends, ends, strict=True):
            row[: len(own)] = own
        drawn = draw_batch(
            parameters,
            tokens,
            lengths,
            choices._replace(ends=own_ends),
            graph=model.graph,
            new_tokens=sampling.new_tokens,
            pad_id=model.config.pad_id,
            layout=model.layout,
        )
        ids, logprobs = (array.tolist() for array in jax.device_get(drawn))
        # Drop the rows that fill the batch.
        parts = zip(rows, ends, ids, logprobs, strict=False)
        return [_cut(model, request, *part) for (request, _), *part in parts]


def _cut(
    model: PromptedModel,
    request: Request,
    ends: Sequence[int],
    ids: Sequence[int],
    logprobs: Sequence[float],
) -> SampledAnswer:
    """Cuts sampled tokens at the first end token."""
    assert request.ids is not None
    preceding = text_before(request, request.ids, model)
    text = Detokenizer(model.needed_tokenizer(), preceding, request.sampling.stop)
    count, ended = 0, False
    while count < len(ids) and not ended:
        ended = ids[count] in ends or text.add(ids[count]).stopped
        count += 1
    text.finish()
    return SampledAnswer(
        tuple(ids[:count]), tuple(logprobs[:count]), text.text, not ended
    )


def open_draws(
    model: PromptedModel, parameters: Parameters, prompts: RolloutPrompts, batch: int
) -> Draws:
    """Opens the sampler for runs over one frozen model.

    Args:
      model: the model with the longest of their prompts.
      parameters: all its parameters.
      prompts: all prompts.
      batch: number of prompts per batch.

    Raises:
      InputError: if the model's weights are streamed.
    """
    settings = prompts.rollouts
    longest = max(len(prompt.ids) for prompt in prompts.prompts)
    slots = slots_for(batch * settings.group, settings.slots)
    if model.layout is not None:
        return MeshDraws(model, slots, longest)
    room = longest + settings.new_tokens + model.prompt_length
    length = -(-room // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    return EngineDraws(model, parameters, slots, length)


class AnswerSampler:
    """Answers prompts with the model in training.

    Args:
      model: the model with its prompts and adapters.
      draws: the sampler.
      settings: how answers are sampled.
      seed: seed of the run.
    """

    def __init__(
        self, model: PromptedModel, draws: Draws, settings: Rollouts, seed: int
    ):
        self._model, self._draw = model, draws
        self._settings, self._seed = settings, seed
        self._compiled = False

    def __call__(
        self,
        prompts: Sequence[RolloutPrompt],
        parameters: Parameters,
        number: int,
        sampling: int = 0,
    ) -> list[list[SampledAnswer]]:
        """Samples a group of answers to each prompt.

        Args:
          prompts: the prompts.
          parameters: all parameters of the model.
          number: number of the rollout; with the seed, it determines the random keys.
          sampling: number of the sampling within the rollout; after the first one the
            parameters are unchanged.
        """
        draws = [self._seed, number, *([sampling] if sampling else [])]
        (seed,) = np.random.SeedSequence(draws).generate_state(1)
        settings = self._settings
        requests = [
            Request(
                ids=prompt.ids,
                adapter=POLICY,
                sampling=Sampling(
                    temperature=settings.temperature,
                    new_tokens=settings.new_tokens,
                    stop=tuple(settings.stop),
                    ends=prompt.ends,
                    n=settings.group,
                    seed=int(seed) % 2**31,
                    logprobs=0,
                ),
            )
            for prompt in prompts
        ]
        with status(None if self._compiled else "compiling the sampler"):
            answers = self._draw(
                separate_equal(requests), self._model, parameters, renewed=not sampling
            )
        self._compiled = True
        return answers


def _sampled(completion: Completion) -> SampledAnswer:
    ends = () if completion.end_logprob is None else (completion.end_logprob,)
    tokens = (*(completion.logprobs or ()), *ends)
    return SampledAnswer(
        tuple(each.token for each in tokens),
        tuple(each.logprob for each in tokens),
        completion.text,
        completion.reason == "length",
    )
