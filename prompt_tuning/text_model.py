"""The part of the Python interface that generates text."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from prompt_tuning.config.config_values import CONFIG_FILE
from prompt_tuning.config.gin_files import read_run_directory
from prompt_tuning.config.run import Run
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.decoding.beam_search import BeamSearch, search_beams
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.own_adapter import add_own_adapter, own_adapter
from prompt_tuning.decoding.request import Completion, Request, separate_equal
from prompt_tuning.decoding.request_stream import stream_request
from prompt_tuning.decoding.row_encoding import encode_given
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.generation.generator import Generator
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.tuned.adapter_texts import (
    AdapterTexts,
    check_same_tokenizer,
    read_adapter_texts,
)
from prompt_tuning.tuned.load_tuned import load_tuned


class TextModel:
    """A model that continues texts.

    Attributes:
      run: configuration that data and texts are read by.
      prompted: the opened model: structure, restore plan, prompts.
      loaded: all its parameters by path; None until they are read.
    """

    def __init__(
        self, run: Run, prompted: PromptedModel, parameters: Parameters | None = None
    ):
        self.run, self.prompted, self.loaded = run, prompted, parameters
        self._engine: DecodingEngine | None = None
        self._texts: dict[str, AdapterTexts] = {}

    @property
    def parameters(self) -> Parameters:
        """All parameters by path, such as `decoder/layers/mlp/up/kernel`; read once."""
        if self.loaded is None:
            self.loaded = self.prompted.read_parameters()
        return self.loaded

    def generate(
        self,
        texts: str | Sequence[str],
        *,
        new_tokens: int = 64,
        temperature: float | int = 0.0,
        top_k: int | None = None,
        top_p: float | int | None = None,
        seed: int = 0,
        batch_size: int = 32,
        prompt_ids: Sequence[int] | None = None,
        stream: Callable[[str], Any] | None = None,
        adapters: Sequence[str | None] | None = None,
        sampling: Sampling | BeamSearch | None = None,
    ) -> Any:
        """Continues texts.

        With `adapters` or `sampling` the results are `Completion` objects: text, ids,
        log-probabilities and why each ended.

        Args:
          texts: one text, or a list of them.
          new_tokens: maximum number of tokens to generate.
          temperature: sampling temperature; 0 is greedy.
          top_k: number of most probable tokens to draw from; None for all.
          top_p: probability of the most probable tokens to draw from; None for all.
          seed: seed of sampling. A text draws the same alone and among others; equal
            texts draw differently.
          batch_size: number of texts that are continued together.
          prompt_ids: prompt of each text, for a model with several.
          stream: called with each piece of the continuation of a single text.
          adapters: name of a loaded adapter for each text, None for the model as it is;
            see `load_adapter`.
          sampling: all settings of sampling, or of beam search; the single settings
            above are left out then.

        Returns:
          the continuation of one text, or a list of continuations; with several
            samples or beams a list for each text.

        Raises:
          InputError: if a text cannot be continued.
        """
        single = isinstance(texts, str)
        complete = adapters is not None or sampling is not None
        if sampling is None:
            sampling = Sampling(
                new_tokens=new_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
            )
        if complete or isinstance(sampling, BeamSearch):
            completions = self._complete(
                [texts] if single else list(texts), adapters, prompt_ids, sampling
            )
            return completions[0] if single else completions
        template = self.run.source.token_template(self.prompted.interface)
        inputs = [texts] if single else texts
        rows = [encode_given(self.prompted, text, template) for text in inputs]
        generator = Generator(self.prompted, self.parameters, sampling, batch_size)
        if stream is not None:
            return generator.stream_to(stream, rows, prompt_ids)
        continuations = [
            each.text for each in generator.continue_rows(rows, prompt_ids)
        ]
        return continuations[0] if single else continuations

    def stream(
        self,
        text: str,
        *,
        adapter: str | None = None,
        prompt_id: int | None = None,
        sampling: Sampling | None = None,
    ) -> Iterator[str]:
        """Yields the continuation of a text, piece by piece.

        Args:
          text: the text.
          adapter: name of a loaded adapter; None for the model as it is.
          prompt_id: prompt of the text, for an adapter with several.
          sampling: how tokens are chosen; greedy if None.
        """
        engine = self.engine()
        request = self._request(text, adapter, prompt_id, sampling or Sampling())
        if request.sampling.n > 1:
            raise InputError("stream yields one continuation: leave out n")
        for piece in stream_request(engine, request):
            if piece.text:
                yield piece.text

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Loads an adapter that texts then choose by name.

        Args:
          name: name of the adapter.
          path: run directory, checkpoint, PEFT folder, or prompt file.

        Raises:
          InputError: if it cannot be read, or belongs to another model.
        """
        engine = self.engine()
        engine.load_adapter(name, path)
        model = engine.find_adapter(name).model
        self._texts[name] = self.read_texts(Path(path), model)

    def read_texts(self, path: Path, model: PromptedModel) -> AdapterTexts:
        """Returns how texts for an adapter are encoded.

        Args:
          path: see `read_adapter`.
          model: the frozen model with the adapter.
        """
        return read_adapter_texts(path, model, self.run.source)

    def texts(self, adapter: str | None = None) -> AdapterTexts:
        """Returns how texts for a loaded adapter are encoded; None for the model."""
        own = AdapterTexts(self.prompted, self.run.source)
        return own if adapter is None else self._texts.get(adapter, own)

    def unload_adapter(self, name: str) -> None:
        """Removes a loaded adapter."""
        self.engine().unload_adapter(name)
        self._texts.pop(name, None)

    def engine(self, **sizes: Any) -> DecodingEngine:
        """Returns the model's decoding engine, which is opened when first used.

        Args:
          sizes: `slots`, `length`, `chunk` and `page` of a new engine, which replaces
            the one before; none for the one in use.
        """
        if self._engine is None or sizes:
            room = self.prompted.maximum_length
            if room is not None:
                sizes.setdefault("length", min(room, 1024))
            self._engine = DecodingEngine(
                self.prompted, self.parameters, read_adapter=self.read_adapter, **sizes
            )
            add_own_adapter(self._engine, self.parameters)
        return self._engine

    def read_adapter(self, path: Path) -> tuple[PromptedModel, Parameters]:
        """Reads an adapter of this model's frozen model.

        Args:
          path: run directory, checkpoint, PEFT folder, or prompt file.

        Returns:
          the frozen model with the adapter, and all its parameters.

        Raises:
          InputError: if it cannot be read, belongs to another model, or has another
            tokenizer.
        """
        if (path / CONFIG_FILE).is_file():
            check_same_tokenizer(path, self.prompted.tokenizer)
            run = dataclasses.replace(
                read_run_directory(path), model=self.run.model, mesh=None
            )
            return load_tuned(run, reuse=self.parameters)
        bare = dataclasses.replace(
            self.run, prompt=None, decoder_prompt=None, adapters=(), directory=""
        )
        return load_tuned(bare, path, reuse=self.parameters)

    def _request(
        self,
        text: str,
        adapter: str | None,
        prompt_id: int | None,
        sampling: Sampling,
    ) -> Request:
        """Returns the request of a text, encoded as in training."""
        texts = self.texts(adapter)
        return Request(
            ids=encode_given(texts.model, text, texts.template),
            adapter=own_adapter(self.engine()) if adapter is None else adapter,
            prompt_id=prompt_id,
            sampling=sampling,
        )

    def _complete(
        self,
        texts: Sequence[str],
        adapters: Sequence[str | None] | None,
        prompt_ids: Sequence[int] | None,
        sampling: Sampling | BeamSearch,
    ) -> list[Completion] | list[list[Completion]]:
        """Continues texts by the engine; equal ones draw differently."""
        if isinstance(sampling, BeamSearch):
            return self._search(texts, adapters, prompt_ids, sampling)
        names = [None] * len(texts) if adapters is None else list(adapters)
        prompts = [None] * len(texts) if prompt_ids is None else list(prompt_ids)
        for name, values in (("adapters", names), ("prompt_ids", prompts)):
            if len(values) != len(texts):
                raise InputError(
                    f"there are {len(values)} {name}, expected {len(texts)}, one for "
                    "each text"
                )
        handles = self.engine().run(
            separate_equal(
                [
                    self._request(text, name, prompt, sampling)
                    for text, name, prompt in zip(texts, names, prompts, strict=True)
                ]
            )
        )
        several = [
            sorted(handle.completions, key=lambda x: x.sample) for handle in handles
        ]
        if sampling.n > 1:
            return several
        return [completions[0] for completions in several]

    def _search(
        self,
        texts: Sequence[str],
        adapters: Sequence[str | None] | None,
        prompt_ids: Sequence[int] | None,
        settings: BeamSearch,
    ) -> list[Completion] | list[list[Completion]]:
        """Continues texts by beam search, with the model as it is."""
        if adapters is not None:
            raise InputError(
                "beam search runs the model as it is: leave out adapters, and load the "
                "adapter with load_tuned"
            )
        template = self.run.source.token_template(self.prompted.interface)
        rows = [encode_given(self.prompted, text, template) for text in texts]
        several = search_beams(
            self.prompted, self.parameters, rows, settings, prompt_ids
        )
        return several if settings.returned > 1 else [best for (best,) in several]
