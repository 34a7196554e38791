"""A model and adapters of it, of which each text chooses one."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from prompt_tuning.core.activity import activity
from prompt_tuning.core.adapter_names import OWN, shown_name
from prompt_tuning.core.errors import InputError, did_you_mean, shown
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.decoding.adapter_table import bare_graph, frozen_parameters
from prompt_tuning.decoding.beam_search import BeamSearch, search_beams
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.prompt_prefixes import adapted_digest, prompt_prefixes
from prompt_tuning.decoding.request import Completion, Request
from prompt_tuning.decoding.request_checks import slot_length
from prompt_tuning.decoding.request_stream import run_in_order
from prompt_tuning.decoding.resident_adapters import without_adapters
from prompt_tuning.decoding.row_checks import row_room
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.text_model import TextModel
from prompt_tuning.tuned.adapter_texts import AdapterTexts


class TextAdapters:
    """A model, the adapters of its texts, and an engine as long as its rows.

    Args:
      model: the model.
      paths: path of each adapter by name; see `TextModel.load_adapter`.

    Attributes:
      model: the model.
      names: what a text chooses from: `base`, `trained` if there is something, and the
        names of the adapters.

    Raises:
      InputError: if an adapter cannot be read or belongs to another model.
    """

    def __init__(self, model: TextModel, paths: Mapping[str, Path] | None = None):
        self.model, self._paths = model, dict(paths or {})
        prompted, parameters = model.prompted, model.parameters
        graph = bare_graph(prompted.config)
        bare = without_adapters(prompted, graph)
        frozen = frozen_parameters(parameters)
        self._read: dict[str | None, tuple[PromptedModel, Parameters]] = {
            None: (bare, frozen)
        }
        # A constant prompt has no parameter.
        if prompted.graph != graph:
            self._read[OWN] = (prompted, parameters)
        for name, path in self._paths.items():
            try:
                self._read[name] = model.read_adapter(path)
            except InputError as problem:
                raise InputError(f"adapter {name}: {problem}") from problem
        self.names = tuple(map(shown_name, self._read))
        self._texts = {
            name: model.read_texts(path, self._read[name][0])
            for name, path in self._paths.items()
        }
        self._engine: DecodingEngine | None = None

    def find(self, name: str | None) -> str | None:
        """Returns the engine's name of an adapter; `trained` for None, if there is one.

        Raises:
          InputError: if there is none of this name.
        """
        if name is None:
            return OWN if OWN in self._read else None
        if name not in self.names:
            raise InputError(
                f"no adapter is named {shown(name)}{did_you_mean(name, self.names)}"
            )
        return list(self._read)[self.names.index(name)]

    def prompted(self, adapter: str | None) -> PromptedModel:
        """Returns the model with an adapter, by the engine's name."""
        return self._read[adapter][0]

    def texts(self, adapter: str | None) -> AdapterTexts:
        """Returns how texts for an adapter are encoded, by the engine's name."""
        return self._texts.get(adapter or "") or self.model.texts()

    def digests(self) -> dict[str, str]:
        """Returns a digest of everything that determines results, by name."""
        return {
            name: adapted_digest(*read).tobytes().hex()
            for name, read in zip(self.names, self._read.values(), strict=True)
        }

    def room_for(self, adapter: str | None, given: int, new: int) -> int:
        """Returns the number of positions of a slot that a row takes.

        Args:
          adapter: the engine's name of its adapter.
          given: number of its tokens.
          new: maximum number of new tokens.
        """
        return row_room(self.prompted(adapter), given, new)

    def engine(self, slots: int, room: int) -> DecodingEngine:
        """Returns an engine with slots of at least some length, opened when needed.

        Args:
          slots: number of rows that are continued together.
          room: minimum number of positions of each; see `room_for`.
        """
        engine = self._engine
        if engine is not None and engine.count == slots and engine.limit >= room:
            return engine
        length = slot_length(room)
        with activity("opening the engine"):
            engine = self.model.engine(slots=slots, length=length)
            for name, path in self._paths.items():
                read = self._read[name]
                engine.add_adapter(name, *read, prompt_prefixes(*read, path))
        self._engine = engine
        return engine

    def complete(
        self, requests: Iterable[Request], slots: int, room: int
    ) -> Iterator[list[Completion]]:
        """Yields the completions of each request, in order; see `run_in_order`.

        Args:
          requests: the requests, with ids and the engine's names of adapters.
          slots: number of rows that are continued together.
          room: maximum of `room_for` of all requests.
        """
        return run_in_order(self.engine(slots, room), requests)

    def search(
        self, requests: Iterable[Request], settings: BeamSearch
    ) -> Iterator[list[Completion]]:
        """Yields the most probable continuations of each request, best first.

        Args:
          requests: as in `complete`; of their sampling only the maximum number of new
            tokens and the further ends are used.
          settings: the other settings of the search.
        """
        for request in requests:
            sampling = request.sampling
            own = dataclasses.replace(
                settings, new_tokens=sampling.new_tokens, ends=sampling.ends
            )
            numbers = None if request.prompt_id is None else [request.prompt_id]
            read = self._read[request.adapter]
            yield search_beams(*read, [request.ids or ()], own, numbers)[0]
