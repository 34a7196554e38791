"""The part of the Python interface that continues texts."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.decoding.beam_search import BeamSearch
from prompt_tuning.decoding.request import Completion, separate_equal
from prompt_tuning.decoding.request_checks import slots_for
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.texts import continuation_scores
from prompt_tuning.texts.continuation_scores import ContinuationScore, Part
from prompt_tuning.texts.python_inputs import read_inputs
from prompt_tuning.texts.text_settings import TextSettings
from prompt_tuning.texts.texts import Texts


class TextModel:
    """A model that continues texts.

    Attributes:
      run: configuration of how data and texts are read.
      prompted: the opened model: structure, restore plan, prompts.
      loaded: all parameters by path; None until they are read.
    """

    def __init__(
        self, run: Run, prompted: PromptedModel, parameters: Parameters | None = None
    ):
        self.run, self.prompted, self.loaded = run, prompted, parameters
        self._texts: Texts | None = None

    @property
    def parameters(self) -> Parameters:
        """All parameters by path, e.g. `decoder/layers/mlp/up/kernel`, read once."""
        if self.loaded is None:
            self.loaded = self.prompted.read_parameters()
        return self.loaded

    @property
    def texts(self) -> Texts:
        """The model and its loaded adapters, as they read and continue texts."""
        if self._texts is None:
            self._texts = Texts(self.run, self.prompted, self.parameters)
        return self._texts

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Loads an adapter, which texts can then choose by name; see `generate`.

        Args:
          name: name of the adapter; replaces a loaded one of this name.
          path: run directory, checkpoint, PEFT folder, or prompt file.

        Raises:
          InputError: if the adapter cannot be read or belongs to another model.

        Examples:
          >>> model.load_adapter("tail", tuned.save("prompt.npy"))
          >>> completions = model.generate("abc=", adapters=["tail"], new_tokens=4)
          >>> model.unload_adapter("tail")
        """
        self.texts.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Removes a loaded adapter."""
        self.texts.unload(name)

    def generate(
        self,
        texts: str | Iterable[Any],
        *,
        new_tokens: int | None = None,
        temperature: float | int = 0.0,
        top_k: int | None = None,
        top_p: float | int | None = None,
        seed: int = 0,
        sampling: Sampling | BeamSearch | None = None,
        adapters: Sequence[str | None] | None = None,
        prompt_ids: Sequence[int] | None = None,
        chat: bool = False,
        system: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        batch_size: int = 32,
    ) -> list[Completion]:
        """Continues texts; each result prints as its text.

        A text is sampled the same way alone and in a list; equal texts in a list are
        sampled differently.

        Args:
          texts: one text or conversation, or a list of them. A conversation is a list
            of chat messages, which the chat template renders. Token ids, and mappings
            of the keys of the data's template, may stand for texts in a list.
          new_tokens: maximum number of new tokens; None for 64, or 256 with `chat`.
          temperature: sampling temperature; 0 is greedy.
          top_k: number of most probable tokens to sample from; None for all.
          top_p: share of the probability mass to sample from; None for all of it.
          seed: seed of sampling.
          sampling: settings of sampling or beam search, instead of the arguments above.
          adapters: each text's adapter by its name in `load_adapter`, or "base" for the
            model alone; None for the model as it is.
          prompt_ids: prompt of each text, if the model has more than one.
          chat: whether each text is a user's message, rendered with the chat template.
          system: system message before each of them.
          chat_template_kwargs: variables for the chat template, e.g.
            {"enable_thinking": False}.
          batch_size: number of texts that run together.

        Returns:
          The completions in the order of the texts. With more than one per text (`n`,
          `returned`), those of the first text come first.

        Raises:
          InputError: if a text cannot be continued.

        Examples:
          >>> model.generate(["upper: abc=", "reverse: abc="], new_tokens=8)
          ['ABC', 'cba']
        """
        inputs = read_inputs(texts, system)
        if sampling is None:
            sampling = Sampling(
                temperature=temperature, top_k=top_k, top_p=top_p, seed=seed
            )
        elif new_tokens is None:
            new_tokens = sampling.new_tokens
        beams = sampling if isinstance(sampling, BeamSearch) else None
        settings = TextSettings(
            sampling=Sampling() if isinstance(sampling, BeamSearch) else sampling,
            beams=beams,
            new_tokens=new_tokens,
            chat=chat,
            system=system,
            chat_template_kwargs=chat_template_kwargs,
            slots=slots_for(len(inputs), batch_size),
        )
        names = _for_each("adapters", adapters, len(inputs))
        prompts = _for_each("prompt_ids", prompt_ids, len(inputs))
        requests = [
            self.texts.request(
                text, dataclasses.replace(settings, adapter=name, prompt_id=prompt)
            )
            for text, name, prompt in zip(inputs, names, prompts, strict=True)
        ]
        several = self.texts.complete(separate_equal(requests), settings)
        return [completion for each in several for completion in each]

    def stream(
        self,
        text: str | Sequence[Any],
        *,
        adapter: str | None = None,
        prompt_id: int | None = None,
        sampling: Sampling | None = None,
        chat: bool = False,
        system: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[str]:
        """Yields the continuation of a text, piece by piece.

        Args:
          text: the text, or a conversation; see `generate`.
          adapter: name of its adapter; see `generate`.
          prompt_id: prompt of the text, if the adapter has more than one.
          sampling: how tokens are chosen; None for greedy.
          chat: whether the text is a user's message, rendered with the chat template.
          system: system message before it.
          chat_template_kwargs: variables for the chat template, e.g.
            {"enable_thinking": False}.

        Examples:
          >>> "".join(model.stream("upper: abc="))
          'ABC'
        """
        if sampling is not None and sampling.n > 1:
            raise InputError("stream yields one continuation: leave out n")
        settings = TextSettings(
            sampling=sampling or Sampling(),
            new_tokens=None if sampling is None else sampling.new_tokens,
            chat=chat,
            system=system,
            chat_template_kwargs=chat_template_kwargs,
            adapter=adapter,
            prompt_id=prompt_id,
        )
        (given,) = read_inputs([text], system)
        yield from self.texts.stream(self.texts.request(given, settings))

    def loglikelihood(
        self,
        pairs: Sequence[tuple[Part, Part]],
        *,
        adapter: str | None = None,
        prompt_id: int | None = None,
        batch_size: int = 32,
    ) -> list[ContinuationScore]:
        """Computes the log-probability of continuations, each given its context.

        A common beginning of contexts is read once. A score does not depend on the
        other pairs.

        Args:
          pairs: contexts and continuations, each a text or token ids. Texts are encoded
            like an example's prompt and completion.
          adapter: name of the adapter; see `generate`.
          prompt_id: prompt of all pairs, if the adapter has more than one.
          batch_size: number of pairs that are scored together.

        Returns:
          `ContinuationScore(logprob, greedy)` of each pair: the log-probability of the
          continuation in nats, and whether greedy decoding would generate it.

        Raises:
          InputError: if a continuation has no token, or a pair is too long.

        Examples:
          >>> pairs = [("upper: abc=", "ABC"), ("upper: abc=", "cba")]
          >>> [score.greedy for score in model.loglikelihood(pairs)]
          [True, False]
        """
        arguments = (pairs, adapter, prompt_id, batch_size)
        return continuation_scores.score_continuations(self.texts, *arguments)


def _for_each(name: str, values: Sequence[Any] | None, count: int) -> Sequence[Any]:
    """Checks that there is a value for each text; None gives None to each."""
    if values is None:
        return [None] * count
    if len(values) != count:
        raise InputError(
            f"there are {len(values)} {name}, expected {count}, one for each text"
        )
    return values
