"""Texts that many rows start with: read once and stored as pages."""

from collections import OrderedDict
from collections.abc import Hashable

import numpy as np
from flax import nnx

from prompt_tuning.core.parameters import Parameters
from prompt_tuning.decoding.adapter_table import PromptPages
from prompt_tuning.decoding.slots import RowStates, read_page

MAXIMUM_TEXTS = 8
"""Number of most recent shared texts that stay in memory."""

TextKey = tuple[str | None, int | None, tuple[int, ...]]
"""Adapter, prompt number and token ids of a text."""


class SharedTexts:
    """The most recently used shared texts."""

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
        parameters: Parameters,
        graph: nnx.GraphDef,
        entry: int,
        pad_id: int,
        active_from: int | None = None,
    ) -> PromptPages:
        """Returns the pages of a prompt and the text after it, which is read if new."""
        if key in self._texts:
            self._texts.move_to_end(key)
            return self._texts[key]
        ids = key[2]
        pages, visible, state = list(prompt.pages), list(prompt.visible), prompt.state
        for start in range(0, len(ids), self._page):
            part = ids[start : start + self._page]
            tokens = np.full((1, self._page), pad_id, np.int32)
            tokens[0, : len(part)] = part
            row = RowStates(
                np.zeros(1, np.int32),
                np.array([prompt.length + start], np.int32),
                np.array([True]),
                np.array([entry], np.int32),
                np.array([visible], np.int32).reshape(1, -1),
                None if active_from is None else np.array([active_from], np.int32),
            )
            page, state = read_page(
                parameters,
                tokens,
                np.array([len(part)], np.int32),
                row,
                tuple(pages),
                state,
                graph=graph,
            )
            pages.append(page)
            visible.append(len(part))
        length = prompt.length + len(ids)
        self._texts[key] = PromptPages(tuple(pages), tuple(visible), length, state)
        if len(self._texts) > MAXIMUM_TEXTS:
            self._texts.popitem(last=False)
        return self._texts[key]
