"""Samples answers with the decoding engine and the parameters of a step."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.status_line import status
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Completion, Request, separate_equal
from prompt_tuning.decoding.request_checks import slots_for
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.rollouts.prompt_table import RolloutPrompt, RolloutPrompts

POLICY = "policy"
"""The adapter of the engine that is trained."""
LENGTH_MULTIPLE = 16


@dataclasses.dataclass(frozen=True)
class SampledAnswer:
    """An answer.

    Attributes:
      ids: its tokens, with the one that ended it.
      logprobs: log-probability that each was drawn with, in nats.
      text: its text, without its end.
      truncated: whether it has no end, because it reached the maximum length.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    truncated: bool


class AnswerSampler:
    """Answers prompts with the model that is trained; its engine stays open.

    Args:
      model: the model with what is trained.
      parameters: all its parameters.
      prompts: all prompts.
      seed: seed of the run.
      rows: number of answers of a batch.

    Raises:
      InputError: if the model is on a mesh or its weights are streamed.
    """

    def __init__(
        self,
        model: PromptedModel,
        parameters: Parameters,
        prompts: RolloutPrompts,
        seed: int,
        rows: int,
    ):
        self._model, self._seed = model, seed
        self._settings = prompts.rollouts
        longest = max(len(prompt.ids) for prompt in prompts.prompts)
        room = longest + self._settings.new_tokens + model.prompt_length
        self._engine = DecodingEngine(
            model,
            parameters,
            slots=slots_for(rows, self._settings.slots),
            length=-(-room // LENGTH_MULTIPLE) * LENGTH_MULTIPLE,
            tempered=True,
        )
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
          number: number of the rollout, which the draws depend on, besides the seed.
          sampling: number of the sampling in the rollout; parameters are those of the
            one before.
        """
        draws = [self._seed, number]
        if sampling:
            draws.append(sampling)
        else:
            self._engine.add_adapter(POLICY, self._model, parameters)
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
            handles = self._engine.run(separate_equal(requests))
        self._compiled = True
        return [
            [
                _sampled(completion)
                for completion in sorted(handle.completions, key=lambda x: x.sample)
            ]
            for handle in handles
        ]


def _sampled(completion: Completion) -> SampledAnswer:
    ends = () if completion.end_logprob is None else (completion.end_logprob,)
    tokens = (*(completion.logprobs or ()), *ends)
    return SampledAnswer(
        tuple(each.token for each in tokens),
        tuple(each.logprob for each in tokens),
        completion.text,
        completion.reason == "length",
    )
