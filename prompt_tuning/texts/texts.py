"""A model that reads texts and conversations, and continues them."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jax

from prompt_tuning.config.config_values import CONFIG_FILE
from prompt_tuning.config.gin_files import read_run_directory
from prompt_tuning.config.run import Run
from prompt_tuning.core.adapter_names import BASE, OWN, TRAINED
from prompt_tuning.core.errors import InputError, did_you_mean, shown
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.status_line import status
from prompt_tuning.data.chat_encoder import first_turn
from prompt_tuning.data.text.conversations import answers_of
from prompt_tuning.data.text.template_renderer import ChatRecord
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.decoding.adapter_table import frozen_parameters
from prompt_tuning.decoding.beam_search import search_beams
from prompt_tuning.decoding.continue_rows import runs_in_slots
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.prompt_prefixes import prompt_prefixes
from prompt_tuning.decoding.request import Completion, Request
from prompt_tuning.decoding.request_checks import slot_length
from prompt_tuning.decoding.resident_adapters import without_adapters
from prompt_tuning.decoding.row_checks import (
    check_generates,
    check_prompt_ids,
    check_rows,
)
from prompt_tuning.models.build import frozen_graph
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.pretrained.text_encoding import TextEncoding
from prompt_tuning.texts.continue_requests import continue_requests, stream_text
from prompt_tuning.texts.loaded_adapter import LoadedAdapter
from prompt_tuning.texts.text_settings import TextSettings, default_new_tokens
from prompt_tuning.tuned.adapter_texts import check_same_tokenizer, text_encoding_of
from prompt_tuning.tuned.load_tuned import load_tuned

Given = str | ChatRecord | Mapping[str, str] | Sequence[int]
"""What to continue: a text, a conversation, the texts of a template's keys, or ids."""


class Texts:
    """A base model plus named adapters; each text picks one.

    Every adapter reads texts the way it was trained to, with the template or chat
    template in its run or folder. With `embeds`, encoders are accepted, too, which can
    only embed texts.

    Attributes:
      adapters: adapters by the engine's names: None for the model alone, `OWN` for what
        its run trained, if anything, and the loaded ones.
      room: number of slot positions of the longest request so far.
    """

    def __init__(
        self,
        run: Run,
        model: PromptedModel,
        parameters: Parameters,
        day: str | None = None,
        embeds: bool = False,
    ):
        self.embeds = embeds
        self._check(model)
        self.run, self.model, self.parameters, self.day = run, model, parameters, day
        self.room = 0
        self._engine: DecodingEngine | None = None
        self._fixed = False
        encoding = TextEncoding(model, run.source, day=day)
        graph, _ = frozen_graph(model.config.without_new_tokens)
        self.adapters: dict[str | None, LoadedAdapter] = {
            None: LoadedAdapter(None, encoding, frozen_parameters(parameters))
        }
        # A constant prompt has no parameter.
        if model.graph != graph:
            # A template may have vectors of the prompt that is left out.
            bare = TextEncoding(
                without_adapters(model, graph),
                dataclasses.replace(run.source, template=None),
                day=day,
            )
            self.adapters[None] = dataclasses.replace(
                self.adapters[None], encoding=bare
            )
            self.adapters[OWN] = LoadedAdapter(OWN, encoding, parameters)

    def _check(self, model: PromptedModel) -> None:
        """Checks that a model generates texts, or embeds them if that is enough."""
        if model.config.labels or not self.embeds:
            check_generates(model)

    @classmethod
    def of_frozen_model(cls, run: Run, *, embeds: bool = False) -> "Texts":
        """Opens the frozen model of a run, without anything the run trained.

        `embeds` accepts encoders, which can only embed texts.
        """
        data = dataclasses.replace(run.source, template=None)
        bare = dataclasses.replace(
            run,
            data=data,
            prompt=None,
            decoder_prompt=None,
            adapters=(),
            directory="",
            mesh=None,
        )
        key = jax.random.key(run.seed)
        model = open_pretrained(run.model, bare.tuning, key=key)
        return cls(bare, model, model.read_parameters(), embeds=embeds)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
          InputError: if the model has none.
        """
        return self.model.needed_tokenizer()

    @property
    def names(self) -> tuple[str, ...]:
        """Names that a text can choose from, e.g. `base`, `trained` and `french`."""
        return tuple(each.name for each in self.adapters.values())

    # Adapters

    def find(self, name: str | None = None) -> LoadedAdapter:
        """Returns an adapter by the name that a text uses.

        Args:
          name: `base` for the model alone, `trained` for what its run trained, or the
            name of a loaded adapter; None for `trained` if it exists, else `base`.

        Raises:
          InputError: if no adapter has the name.
        """
        if name is None:
            return self.adapters[OWN if OWN in self.adapters else None]
        key = name
        if name not in self.adapters:
            key = {BASE: None, TRAINED: OWN}.get(name, name)
        if key not in self.adapters:
            raise InputError(
                f"no adapter is named {shown(name)}{did_you_mean(name, self.names)}"
            )
        return self.adapters[key]

    def load(self, name: str, path: str | Path) -> LoadedAdapter:
        """Loads an adapter, which texts can then choose by name.

        It replaces a loaded adapter of this name.
        """
        adapter = self.read(name, Path(path))
        self.add(adapter)
        return adapter

    def read(self, name: str, path: Path) -> LoadedAdapter:
        """Reads an adapter without adding it; may run in another thread.

        Arguments and errors are as in `load`.
        """
        if not runs_in_slots(self.model):
            raise InputError(
                f"adapter {name} cannot be loaded next to the model: rows with "
                "different adapters need one device that holds all weights "
                "(Run.mesh = None, Pretrained.weights = 'device'); load_tuned, or "
                "--prompt, gives the adapter to all rows"
            )
        try:
            model, parameters = self._read_model(path)
            self._check(model)
            encoding = text_encoding_of(path, model, self.run.source)
            encoding = dataclasses.replace(encoding, day=self.day)
            prefixes = prompt_prefixes(model, parameters, path)
        except InputError as problem:
            raise InputError(f"adapter {name}: {problem}") from problem
        return LoadedAdapter(name, encoding, parameters, path, prefixes)

    def add(self, adapter: LoadedAdapter) -> None:
        """Adds an adapter that was read, also to the open engine.

        Raises:
          InputError: if it belongs to another model, or a row uses the adapter that it
            replaces.
        """
        if self._engine is not None:
            _add(self._engine, adapter)
        self.adapters[adapter.key] = adapter

    def unload(self, name: str) -> None:
        """Removes an adapter.

        Raises:
          InputError: if no adapter has the name, or a row uses it.
        """
        adapter = self.find(name)
        if adapter.path is None:
            raise InputError(f"{adapter.name} is the model itself, which stays loaded")
        if self._engine is not None:
            self._engine.unload_adapter(name)
        del self.adapters[adapter.key]

    def _read_model(self, path: Path) -> tuple[PromptedModel, Parameters]:
        """Reads the model with an adapter; it shares the frozen parameters."""
        if (path / CONFIG_FILE).is_file():
            check_same_tokenizer(path, self.model.tokenizer)
            run = read_run_directory(path)
            run = dataclasses.replace(run, model=self.run.model, mesh=None)
            return load_tuned(run, reuse=self.parameters)
        bare = dataclasses.replace(
            self.run, prompt=None, decoder_prompt=None, adapters=(), directory=""
        )
        return load_tuned(bare, path, reuse=self.parameters)

    # Requests

    def request(
        self,
        given: Given,
        settings: TextSettings | None = None,
        location: str = "the conversation",
    ) -> Request:
        """Checks an input, and returns the request that continues it.

        Args:
          given: a text, a conversation that ends with a user's turn, the texts of a
            template's keys, or token ids.
          settings: how it is continued.
          location: source of a conversation, for messages.
        """
        settings = settings or TextSettings()
        adapter = self.find(settings.adapter)
        chat = isinstance(given, ChatRecord) or (
            settings.chat and isinstance(given, str)
        )
        ids = self._encode(given, adapter.encoding, settings, location)
        new_tokens = settings.new_tokens
        if new_tokens is None:
            new_tokens = default_new_tokens(self.model.maximum_length, chat)
        number = settings.prompt_id
        check_rows(adapter.model, [ids], new_tokens)
        check_prompt_ids(adapter.model, None if number is None else [number], 1)
        self.room = max(self.room, adapter.room_for(len(ids), new_tokens))
        ends = ()
        if chat and not settings.sampling.ignores_end:
            ends = adapter.encoding.chat.turn_ends()
        sampling = dataclasses.replace(
            settings.sampling,
            new_tokens=new_tokens,
            ends=(*settings.sampling.ends, *ends),
        )
        return Request(
            ids=ids, adapter=adapter.key, prompt_id=number, sampling=sampling
        )

    def _encode(
        self,
        given: Given,
        encoding: TextEncoding,
        settings: TextSettings,
        location: str,
    ) -> list[int]:
        if isinstance(given, str) and settings.chat:
            given = answers_of(first_turn(given, settings.system))
            location = "the message"
        if isinstance(given, ChatRecord):
            chosen = settings.chat_template_kwargs or {}
            both = {**chosen, **(given.variables or {})}
            given = given._replace(variables=both, chosen=tuple(chosen))
            return encoding.chat(given, location)
        if isinstance(given, str):
            return encoding.encode(given)
        if isinstance(given, Mapping):
            if encoding.template is None:
                raise InputError(
                    f"an input has the keys {shown(sorted(given))}, which only a "
                    "template of the data joins (DataSource.template), and there is "
                    "none: give a text"
                )
            return encoding.encode_keys(given)
        return list(given)

    # Results

    def complete(
        self, requests: Iterable[Request], settings: TextSettings | None = None
    ) -> Iterator[list[Completion]]:
        """Yields the completions of each request, in order.

        Args:
          requests: results of `request`. Make all of them first, or know their lengths.
          settings: the number of slots, and beam search if any.
        """
        settings = settings or TextSettings()
        if settings.beams is not None:
            return self._search(requests, settings)
        slots = settings.slots
        engine = functools.partial(self.engine, slots)
        return continue_requests(requests, self.find(), engine, slots)

    def stream(self, request: Request) -> Iterator[str]:
        """Yields the text that continues a request, piece by piece."""
        return stream_text(request, self.find(), lambda: self.engine(1))

    def _search(
        self, requests: Iterable[Request], settings: TextSettings
    ) -> Iterator[list[Completion]]:
        """Yields each request's most probable continuations, best first."""
        assert settings.beams is not None
        for request in requests:
            sampling = request.sampling
            beams = dataclasses.replace(
                settings.beams, new_tokens=sampling.new_tokens, ends=sampling.ends
            )
            numbers = None if request.prompt_id is None else [request.prompt_id]
            adapter = self.adapters[request.adapter]
            model, parameters = adapter.model, adapter.parameters
            row = request.ids or ()
            yield search_beams(model, parameters, [row], beams, numbers)[0]

    def engine(self, slots: int) -> DecodingEngine:
        """Returns the open engine if it has enough slots, else a new one.

        After `open_engine`, `slots` has no effect.
        """
        engine = self._engine
        if engine is not None and (
            self._fixed or (engine.count == slots and engine.limit >= self.room)
        ):
            return engine
        with status("opening the engine"):
            return self._open(slots, slot_length(self.room))

    def open_engine(self, slots: int, length: int, kept: int = 0) -> DecodingEngine:
        """Opens an engine for all requests; it is never replaced.

        `kept` slots are reserved for short rows.
        """
        self._fixed = True
        return self._open(slots, length, kept)

    def _open(self, slots: int, length: int, kept: int = 0) -> DecodingEngine:
        engine = DecodingEngine(
            self.model, self.parameters, slots=slots, length=length, kept=kept
        )
        for adapter in self.adapters.values():
            if adapter.key is not None:
                _add(engine, adapter)
        self._engine = engine
        return engine


def _add(engine: DecodingEngine, adapter: LoadedAdapter) -> None:
    assert adapter.key is not None
    engine.add_adapter(adapter.key, adapter.model, adapter.parameters, adapter.prefixes)
