"""An engine's adapters, stacked into tables so that rows can use different ones."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import Parameters, describe, merge, split
from prompt_tuning.decoding.projection_tables import (
    ROW_BIAS,
    bias_tables,
    projection_tables,
)
from prompt_tuning.decoding.prompt_prefixes import (
    PromptPrefixes,
    is_added,
    prompt_prefixes,
)
from prompt_tuning.decoding.row_adapters import RowTokenRows
from prompt_tuning.decoding.slot_state import Page
from prompt_tuning.models.attention import KeyValues
from prompt_tuning.models.build import adaptable, biased_layers, build_model
from prompt_tuning.models.language_model import LanguageModel
from prompt_tuning.models.prompted import PromptDecoder
from prompt_tuning.models.recurrent_state import RecurrentState
from prompt_tuning.pretrained.prompted_model import PromptedModel
from prompt_tuning.prompts.low_rank import LowRank
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.prompts.placement import TEMPLATE
from prompt_tuning.prompts.projection_adapters import InputScale, OutputScale
from prompt_tuning.prompts.token_rows import NAME, TokenRows
from prompt_tuning.prompts.trained_bias import TrainedBias


class PromptPages(NamedTuple):
    """Pages of the keys and values that precede a row, in order.

    `visible` counts the valid keys of each page, and `length` the positions that they
    take. `state` is that of the recurrent layers after them; None without such layers
    or without pages.
    """

    pages: tuple[Page, ...] = ()
    visible: tuple[int, ...] = ()
    length: int = 0
    state: RecurrentState | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class ResidentAdapter:
    """A loaded adapter.

    Attributes:
      name: name that requests use.
      model: the model with the adapter, which reads whole rows.
      parameters: its parameters; the frozen ones are the engine's arrays.
      prompts: pages of each prompt; a single entry without pages if it has no prompt.
      whole: whether rows must be read whole, by `model`.
      joined: number of prompt vectors that are stored among a row's own keys.
      encoded: number of prompt vectors in an encoder's output.
      invocation: tokens that invoke the adapter; empty if it is always active.
      keeps_before: whether keys before the invocation are the frozen model's, which
        holds if the adapter is only LoRA.
    """

    name: str
    model: PromptedModel
    parameters: Parameters
    prompts: tuple[PromptPages, ...]
    whole: bool
    joined: int
    encoded: int
    invocation: tuple[int, ...] = ()
    keeps_before: bool = False

    @property
    def has_entry(self) -> bool:
        """Whether it has LoRA, IA3 or biases in the decoder, or rows of tokens."""
        return bool(self.decoder_adapters) or self.token_rows is not None

    @property
    def token_rows(self) -> TokenRows | None:
        """Its trained token rows, if any."""
        model = cast(LanguageModel, merge(self.model.graph, self.parameters))
        rows = model.token_embedder.adapters.get(NAME)
        return rows if isinstance(rows, TokenRows) else None

    @property
    def decoder_adapters(self) -> Parameters:
        """Parameters of its adapters in the decoder's layers and the head."""
        others = ("encoder", "token_embedder/")
        return {
            path: leaf
            for path, leaf in self.parameters.items()
            if "/adapters/" in path and not path.startswith(others)
        }


def frozen_parameters(parameters: Parameters) -> Parameters:
    """Returns the parameters that belong neither to a prompt nor to an adapter."""
    return {path: leaf for path, leaf in parameters.items() if not is_added(path)}


def make_resident(
    name: str,
    model: PromptedModel,
    parameters: Parameters,
    page: int,
    prefixes: Sequence[PromptPrefixes] | None = None,
) -> ResidentAdapter:
    """Prepares an adapter for rows that choose it.

    Computes `prefixes`, i.e. what precedes a row for each prompt, if they are None.
    Pages have `page` keys.
    """
    merged = cast(LanguageModel, merge(model.graph, parameters))
    decoder = getattr(merged, "decoder", None)
    joins = isinstance(decoder, PromptDecoder) and not decoder.shared
    decodes_alone = model.config.architecture == "decoder_only"
    whole = not decodes_alone or joins or model.prompting.prefix_attention
    if prefixes is None:
        prefixes = prompt_prefixes(model, parameters)
    prompts = tuple(_pages_of(each, page) for each in prefixes)
    joined = decoder.prompt.length if joins else 0  # type: ignore[union-attr]
    adds = model.prompts.at_input and model.prompting.placement != TEMPLATE
    encoded = 0 if decodes_alone or not adds else model.prompt_length
    keeps = all(f"/{LoRA.name}/" in path for path in parameters if is_added(path))
    fields = (name, model, parameters, prompts, whole, joined, encoded)
    return ResidentAdapter(*fields, merged.invocation, keeps)


def check_projections(name: str, model: PromptedModel, parameters: Parameters) -> None:
    """Checks that a table can hold each of the model's projection adapters."""
    merged = cast(LanguageModel, merge(model.graph, parameters))
    for path, dense in adaptable(merged):
        for adapter in dense.adapters.values():
            if not isinstance(
                adapter, LowRank | OutputScale | InputScale | TrainedBias
            ):
                raise InputError(
                    f"adapter {name}: {path} has a {type(adapter).__name__}, and the "
                    "engine serves LoRA and IA3; merge it into the weights"
                )


def _pages_of(prompt: PromptPrefixes, page: int) -> PromptPages:
    """Splits the keys and values of one prompt into pages."""
    pages, visible = [], []
    for prefix in prompt.prefixes:
        for part, count in split_pages(prefix.key_values, prefix.count, page):
            pages.append(Page.create(part, prefix.start + page * len(pages)))
            visible.append(count)
    return PromptPages(tuple(pages), tuple(visible), prompt.length, prompt.state)


def split_pages(
    key_values: KeyValues, count: int, page: int
) -> list[tuple[KeyValues, int]]:
    """Splits keys and values `[L, G, 1, P, K]` into pages with their numbers of keys.

    The first `count` ones are valid; the last page is padded with zeros.
    """
    pages = []
    for first in range(0, count, page):
        size = min(page, count - first)
        padding = [(0, 0)] * 3 + [(0, page - size), (0, 0)]
        parts = (part[:, :, :, first : first + size] for part in key_values)
        pages.append((KeyValues(*(jnp.pad(x, padding) for x in parts)), size))
    return pages


class AdapterTable(NamedTuple):
    """The model with the tables of all projection adapters.

    `entries` has the entry of each adapter; entry 0 changes nothing.
    """

    graph: nnx.GraphDef
    tables: Parameters
    entries: Mapping[str, int]


def stack_adapters(
    config: ModelConfig, adapters: Sequence[ResidentAdapter]
) -> AdapterTable:
    """Stacks all projection adapters into tables."""
    chosen = [adapter for adapter in adapters if adapter.has_entry]
    count = 1
    while count < len(chosen) + 1:
        count *= 2
    entries = {adapter.name: i for i, adapter in enumerate(chosen, start=1)}
    merged = {
        entries[adapter.name]: cast(
            LanguageModel, merge(adapter.model.graph, adapter.parameters)
        )
        for adapter in chosen
    }
    models = {entry: dict(adaptable(model)) for entry, model in merged.items()}
    paths = next(iter(models.values()), {})
    modules = {
        path: projection_tables(
            {entry: found[path] for entry, found in models.items()}, count
        )
        for path in paths
        if path.startswith("decoder/")
    }
    for path, table in bias_tables(merged, count).items():
        modules.setdefault(path, {})[ROW_BIAS] = table

    rows = {entries[each.name]: each.token_rows for each in chosen}
    tokens = _token_tables({n: x for n, x in rows.items() if x}, count, config)

    def build(key: Key[Array, ""]) -> tuple[nnx.GraphDef, Parameters]:
        model = build_model(key, config)
        if tokens is not None:
            model.token_embedder.adapters[NAME] = tokens
        layers = dict(adaptable(model)) | dict(biased_layers(model))
        for path, by_name in modules.items():
            for name, module in by_name.items():
                layers[path].adapters[name] = module
        return split(model)

    tables = {
        f"{path}/adapters/{name}/{leaf}": array
        for path, by_name in modules.items()
        for name, module in by_name.items()
        for leaf, array in split(module)[1].items()
    }
    if tokens is not None:
        place = f"token_embedder/adapters/{NAME}"
        tables |= {f"{place}/{leaf}": x for leaf, x in split(tokens)[1].items()}
    return AdapterTable(describe(build, jax.random.key(0))[0], tables, entries)


def _token_tables(
    rows: Mapping[int, TokenRows], count: int, config: ModelConfig
) -> RowTokenRows | None:
    """Returns the tables of token rows; None if no adapter has any.

    An engine with new tokens always needs the tables, so that other rows never generate
    these tokens.
    """
    if not rows and not config.new_tokens:
        return None
    token_rows = {n: (x.ids, x.rows[...]) for n, x in rows.items()}
    tables = _padded_rows(token_rows, count, config.width)
    if config.tied_head:
        return RowTokenRows(*tables)
    heads = {n: (x.head_ids, x.head[...]) for n, x in rows.items() if x.head}
    return RowTokenRows(*tables, *_padded_rows(heads, count, config.width))


def _padded_rows(
    rows: Mapping[int, tuple[tuple[int, ...], Float[Array, "n D"]]],
    count: int,
    width: int,
) -> tuple[Int[Array, "N n"], Float[Array, "N n D"]]:
    """Stacks ids and rows by entry, padded to the largest number of them."""
    size = max([1, *(len(ids) for ids, _ in rows.values())])
    ids = np.full((count, size), -1, np.int32)
    table = np.zeros((count, size, width), np.float32)
    for entry, (own_ids, values) in rows.items():
        ids[entry, : len(own_ids)] = own_ids
        table[entry, : len(own_ids)] = np.asarray(values)
    return jnp.asarray(ids), jnp.asarray(table)
