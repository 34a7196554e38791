"""The adapters that an engine has loaded, and texts that many rows start with."""

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np
from flax import nnx

from prompt_tuning.core.adapted_rows import NEVER, first_active
from prompt_tuning.core.block_arrays import Blocks, view_blocks
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters, merge
from prompt_tuning.decoding.adapter_table import (
    AdapterTable,
    PromptPages,
    ResidentAdapter,
    check_projections,
    frozen_parameters,
    make_resident,
    stack_adapters,
)
from prompt_tuning.decoding.prompt_prefixes import PromptPrefixes
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.request_checks import check_ids
from prompt_tuning.decoding.slots import RowStates, read_page
from prompt_tuning.models.build import frozen_graph
from prompt_tuning.models.decoder_only import DecoderOnly
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.pretrained.text_encoding import encode_given
from prompt_tuning.pretrained.tuning import PromptPair
from prompt_tuning.settings.prompting import Prompting

MAXIMUM_TEXTS = 8
"""Number of most recent shared texts that stay in memory."""

TextKey = tuple[str | None, int | None, tuple[int, ...]]
"""Adapter, prompt number and token ids of a text."""


class SharedTexts:
    """The most recently used shared texts, read once and stored as pages."""

    def __init__(self, page: int):
        self._page = page
        self._texts: OrderedDict[Hashable, PromptPages] = OrderedDict()

    def forget(self, adapter: str) -> None:
        """Removes the texts that were read with an adapter."""
        for key in [key for key in self._texts if key[0] == adapter]:  # type: ignore[index]
            del self._texts[key]

    def all_pages(self) -> list[PromptPages]:
        """Returns the pages of each text, and of the prompt before it."""
        return list(self._texts.values())

    def pages(
        self,
        key: TextKey,
        prompt: PromptPages,
        resident: "ResidentAdapters",
        adapter: ResidentAdapter,
    ) -> PromptPages:
        """Returns the pages of a prompt and the text after it, which is read if new."""
        if key in self._texts:
            self._texts.move_to_end(key)
            return self._texts[key]
        ids, active_from = key[2], None
        if resident.invokes:
            active_from = np.array([NEVER if adapter.invocation else 0], np.int32)
        pages, visible, state = list(prompt.pages), list(prompt.visible), prompt.state
        for start in range(0, len(ids), self._page):
            part = ids[start : start + self._page]
            tokens = np.full((1, self._page), resident.model.config.pad_id, np.int32)
            tokens[0, : len(part)] = part
            row = RowStates(
                np.zeros(1, np.int32),
                np.array([prompt.length + start], np.int32),
                np.array([True]),
                np.array([resident.entry(adapter)], np.int32),
                np.array([visible], np.int32).reshape(1, -1),
                active_from,
            )
            page, state = read_page(
                resident.parameters,
                tokens,
                np.array([len(part)], np.int32),
                row,
                tuple(pages),
                state,
                graph=resident.graph,
            )
            pages.append(page)
            visible.append(len(part))
        length = prompt.length + len(ids)
        self._texts[key] = PromptPages(tuple(pages), tuple(visible), length, state)
        if len(self._texts) > MAXIMUM_TEXTS:
            self._texts.popitem(last=False)
        return self._texts[key]


class ResidentAdapters:
    """Loaded adapters by name, and the model with tables of all of them.

    Attributes:
      model: the model of the engine.
      page: number of keys per page.
      parameters: parameters of the model and the tables, for programs that read texts.
      step_parameters: the same for programs that read one token per row, with views of
        each block's kernels and tables.

    Args:
      model: the model of the engine.
      parameters: all its parameters by path; prompts and adapters are left out.
      page: number of keys per page.
      adapted: whether the model keeps its prompts and adapters, which then apply to all
        rows.
    """

    def __init__(
        self,
        model: PromptedModel,
        parameters: Parameters,
        page: int,
        *,
        adapted: bool = False,
    ):
        self.model, self.page, self._adapted = model, page, adapted
        self._frozen = parameters if adapted else frozen_parameters(parameters)
        self._adapters: dict[str, ResidentAdapter] = {}
        self._shared = SharedTexts(page)
        self._kernels = _block_views(self._frozen, "/kernel")
        self._stack()
        alone, _ = frozen_graph(model.config.without_new_tokens)
        bare = model if adapted else without_adapters(model, alone)
        self._bare = make_resident("", bare, self._frozen, page)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the adapters."""
        return tuple(self._adapters)

    @property
    def page_count(self) -> int:
        """Number of pages of all prompts."""
        adapters = self._adapters.values()
        return sum(len(one.pages) for each in adapters for one in each.prompts)

    @property
    def page_bytes(self) -> int:
        """Size of the pages of all prompts and shared texts; each page counts once."""
        prompts = [one for each in self._adapters.values() for one in each.prompts]
        pages = {
            id(page.keys): page
            for one in (*prompts, *self._shared.all_pages())
            for page in one.pages
        }
        return sum(page.key_value_bytes for page in pages.values())

    @property
    def graph(self) -> nnx.GraphDef:
        """Structure of the model with the tables."""
        return self._table.graph

    @property
    def compresses(self) -> bool:
        """Whether slots hold compressed keys and values; see `LatentAttention`."""
        model = merge(self.graph, self.parameters)
        return isinstance(model, DecoderOnly) and model.decoder.compresses

    @property
    def invokes(self) -> bool:
        """Whether any adapter is invoked by tokens."""
        return any(each.invocation for each in (self._bare, *self._adapters.values()))

    def entry(self, adapter: ResidentAdapter) -> int:
        """Returns an adapter's entry in the tables."""
        return self._table.entries.get(adapter.name, 0)

    def _check(self, name: str, model: PromptedModel) -> None:
        if not name:
            raise InputError("an adapter's name is empty")
        if self._adapted:
            raise InputError(
                f"adapter {name} cannot be added: the engine keeps the prompts and "
                "adapters of its model; open one without `adapted`"
            )
        ours, theirs = self.model.config, model.config
        if theirs.without_new_tokens != ours.without_new_tokens:
            raise InputError(
                f"adapter {name} belongs to another model: its config differs in "
                f"{_differences(theirs, ours)}"
            )
        if theirs.new_tokens > ours.new_tokens:
            raise InputError(
                f"adapter {name} has {theirs.new_tokens} new tokens behind the model's "
                f"vocabulary, but the model that is open has {ours.new_tokens}: open "
                "the adapter's own run instead, beside which others can be loaded"
            )

    def add(
        self,
        name: str,
        model: PromptedModel,
        parameters: Parameters,
        prefixes: Sequence[PromptPrefixes] | None = None,
    ) -> None:
        """Adds an adapter, or replaces the one of this name.

        Computes `prefixes`, i.e. what precedes a row for each prompt, if they are None.

        Raises:
          InputError: if it belongs to another model.
        """
        self._check(name, model)
        shared = {p: self._frozen.get(p, leaf) for p, leaf in parameters.items()}
        check_projections(name, model, shared)
        self._adapters[name] = make_resident(name, model, shared, self.page, prefixes)
        self._shared.forget(name)
        self._stack()

    def remove(self, name: str) -> None:
        """Removes an adapter that no row uses."""
        del self._adapters[name]
        self._shared.forget(name)
        self._stack()

    def find(self, name: str | None) -> ResidentAdapter:
        """Returns an adapter by name; None means the frozen model alone.

        Raises:
          InputError: if no adapter has the name.
        """
        if name is None:
            return self._bare
        if name not in self._adapters:
            names = ", ".join(self._adapters) or "none"
            raise InputError(f"no adapter is named {shown(name)}; loaded are: {names}")
        return self._adapters[name]

    def prompt(self, adapter: ResidentAdapter, number: int | None) -> PromptPages:
        """Returns the prompt that precedes a row, by its number.

        Raises:
          InputError: if the number is missing or unknown.
        """
        count = len(adapter.prompts)
        if count > 1 and number is None:
            raise InputError(
                f"adapter {adapter.name} has {count} prompts, and the request names "
                f"none: set prompt_id, 0 to {count - 1}"
            )
        if number is not None and not (count > 1 and 0 <= number < count):
            raise InputError(
                f"prompt_id is {number}, and adapter {adapter.name} has {count} "
                "prompts, from 0"
            )
        return adapter.prompts[number or 0]

    def with_shared(
        self, prompt: PromptPages, adapter: ResidentAdapter, request: Request
    ) -> PromptPages:
        """Returns a prompt followed by the shared text of a request.

        Raises:
          InputError: if the text cannot be shared.
        """
        if adapter.whole:
            raise InputError(
                "shared_text needs a causal model and a prompt that comes first: put "
                "it into the text"
            )
        ids = request.shared_ids
        if request.shared_text is not None:
            ids = encode_given(adapter.model, request.shared_text)
        assert ids is not None
        check_ids(ids, adapter)
        if adapter.invocation and first_active(ids, adapter.invocation) < NEVER:
            raise InputError(
                f"shared_text has the tokens that invoke adapter {adapter.name}, which "
                "acts from them on: put them into the text of each request"
            )
        key = (request.adapter, request.prompt_id, tuple(ids))
        return self._shared.pages(key, prompt, self, adapter)

    def _stack(self) -> None:
        """Rebuilds the adapter tables."""
        if self._adapted:
            self._table = AdapterTable(self.model.graph, {}, {})
        else:
            adapters = list(self._adapters.values())
            self._table = stack_adapters(self.model.config, adapters)
        self.parameters = self._frozen | self._table.tables
        tables = _block_views(self._table.tables)
        self.step_parameters = self.parameters | self._kernels | tables


def without_adapters(model: PromptedModel, graph: nnx.GraphDef) -> PromptedModel:
    """Returns the model without prompts and adapters."""
    tokenizer = model.tokenizer
    if model.prompts.tokens is not None and tokenizer is not None:
        tokenizer = model.base_tokenizer
    return dataclasses.replace(
        model,
        graph=graph,
        config=model.config.without_new_tokens,
        tokenizer=tokenizer,
        prompts=PromptPair(),
        prompting=Prompting(),
    )


def _block_views(parameters: Parameters, ending: str = "") -> dict[str, Blocks]:
    """Returns views of the decoder blocks' parameters, which take no memory."""
    return {
        path: view_blocks(leaf)
        for path, leaf in parameters.items()
        if path.startswith("decoder/layers/") and path.endswith(ending)
    }


def _differences(first: ModelConfig, second: ModelConfig) -> str:
    """Lists the fields in which two configs differ."""
    names = [field.name for field in dataclasses.fields(ModelConfig)]
    return ", ".join(
        f"{name} ({shown(getattr(first, name))} and {shown(getattr(second, name))})"
        for name in names
        if getattr(first, name) != getattr(second, name)
    )
