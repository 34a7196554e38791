"""The models that a server offers: the frozen one, and one per adapter."""

import asyncio
import functools
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.file_names import MAXIMUM_PATH
from prompt_tuning.data.text.template_renderer import ChatRecord
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.server.chat_syntax import ChatSyntax, find_syntax
from prompt_tuning.server.engine_thread import EngineThread
from prompt_tuning.server.fair_workers import FairWorkers
from prompt_tuning.server.server_limits import (
    MAXIMUM_ADAPTERS,
    WAITING_TEXTS,
    RequestError,
)
from prompt_tuning.server.tool_choice import ToolChoice
from prompt_tuning.texts.loaded_adapter import LoadedAdapter
from prompt_tuning.texts.texts import Texts

SHORTEST_LIMIT, LONGEST_LIMIT = 32, 128
"""Bounds on the number of characters that a position may stand for.

The longest token of a vocabulary may be a long run of spaces, and a run of unknown
characters may be one token.
"""
PART = 2**14
"""Number of characters that are encoded in one turn of a client."""


class ServedModels:
    """Model names, and how their texts are encoded.

    Attributes:
      texts: the model and its adapters.
      name: name of the frozen model.
      limit: number of positions of a slot, which limits the length of texts.
      loading: directory from which adapters may be loaded, or None.
    """

    def __init__(
        self, texts: Texts, name: str, limit: int, loading: Path | None = None
    ):
        self.texts, self.name, self.limit = texts, name, limit
        self.loading = None if loading is None else loading.resolve()
        # Encode texts one by one, separately from steps and connections.
        self._encoding = FairWorkers("encoding", 1, WAITING_TEXTS)
        self._conversations = FairWorkers("the chat template", 1, WAITING_TEXTS)
        self._files = FairWorkers("reading adapters", 1, 1)
        self._loads = asyncio.Lock()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
          InputError: if it has none.
        """
        return self.texts.tokenizer

    @property
    def names(self) -> tuple[str, ...]:
        """All model names, the frozen model's first."""
        return tuple(self.entries())

    @property
    def busy(self) -> bool:
        """Whether texts are being encoded or files read."""
        workers = (self._encoding, self._conversations, self._files)
        return any(each.busy for each in workers)

    def adapter(self, name: str | None) -> str | None:
        """Returns the adapter of a model name; None for the frozen model.

        Raises:
          RequestError: if no model has the name.
        """
        if name is None or name == self.name:
            return None
        if name not in self.texts.adapters:
            raise RequestError(
                f"no model is named {shown(name)}; there are: {', '.join(self.names)}",
                404,
            )
        return name

    def entries(self) -> dict[str, LoadedAdapter]:
        """Returns the models by name, the frozen one first.

        Safe while the engine's thread adds and removes adapters.
        """
        adapters = self.texts.adapters.copy()
        return {self.name if key is None else key: adapters[key] for key in adapters}

    def check_name(self, name: str) -> None:
        """Checks the name of a new adapter.

        Raises:
          InputError: if it is the frozen model's, or too long.
        """
        if not name or len(name) > 200 or not name.isprintable():
            raise InputError(
                f"an adapter is named {shown(name)}, expected 1 to 200 printable "
                "characters"
            )
        if name == self.name:
            raise InputError(f"{name} is the name of the frozen model: choose another")

    async def load(self, thread: EngineThread, name: str, path: str) -> None:
        """Loads an adapter from the allowed directory.

        Raises:
          InputError: if it cannot be read or belongs to another model.
          RequestError: if loading is off, or the path is outside the directory.
        """
        folder = self._below(path)
        self.check_name(name)
        async with self._loads:
            if name in self.names:
                raise InputError(f"adapter {name} is loaded already: unload it first")
            if len(self.names) > MAXIMUM_ADAPTERS:
                raise InputError(f"{MAXIMUM_ADAPTERS} adapters are loaded: unload one")
            # Reading files does not delay the rows that generate.
            reading = functools.partial(self.texts.read, name, folder)
            adapter = await self._files.run(None, reading)
            await thread.call(lambda _: self.texts.add(adapter))

    async def unload(self, thread: EngineThread, name: str) -> None:
        """Removes an adapter.

        Raises:
          InputError: if a row uses it.
          RequestError: if loading is off, or no adapter has the name.
        """
        self._allowed()
        if self.adapter(name) is None:
            raise InputError(f"{name} is the frozen model, which stays loaded")
        await thread.call(lambda _: self.texts.unload(name))

    def _allowed(self) -> Path:
        if self.loading is None:
            raise RequestError(
                "adapters cannot be loaded or unloaded while this server runs: start "
                "it with --allow_loading DIRECTORY",
                403,
                "permission_error",
            )
        return self.loading

    def _below(self, path: str) -> Path:
        """Returns a path inside the allowed directory."""
        allowed = self._allowed()
        try:
            size = len(path.encode())
            if "\0" in path or size > MAXIMUM_PATH:
                raise InputError(
                    f"lora_path has {size:,} bytes or a zero byte, expected a path of "
                    f"at most {MAXIMUM_PATH:,} bytes"
                )
            folder = (allowed / path).resolve()
            folder.exists()
        except (OSError, RuntimeError, UnicodeEncodeError) as problem:
            raise InputError(
                f"lora_path {shown(path)} cannot be followed: {shown(str(problem))}"
            ) from problem
        if not folder.is_relative_to(allowed):
            raise RequestError(
                f"{shown(path)} is not below the directory of --allow_loading",
                403,
                "permission_error",
            )
        return folder

    # Texts

    async def encode_texts(
        self, texts: Sequence[str], adapter: str | None, client: Hashable
    ) -> list[list[int]]:
        """Encodes texts as in the training of an adapter; clients take turns.

        Raises:
          InputError: if a text is too long, or cannot be encoded.
          BusyError: if too many texts wait.
        """
        for text in texts:
            self._check_length("the prompt", len(text))
        encoding = self.texts.find(adapter).encoding
        encoded: list[list[int]] = []
        for part in _parts(texts):

            def encode(part: Sequence[str] = part) -> list[list[int]]:
                return [encoding.encode(text) for text in part]

            encoded += await self._encoding.run(client, encode)
        return encoded

    async def encode_plain(self, text: str, client: Hashable) -> list[int]:
        """Encodes a text as it is, without special tokens or templates.

        Arguments and errors are as in `encode_texts`.
        """
        self._check_length("the prompt", len(text))
        return await self._encoding.run(client, lambda: self.tokenizer.encode(text))

    async def encode_chat(
        self,
        conversation: ChatRecord,
        adapter: str | None,
        client: Hashable,
        choice: ToolChoice | None = None,
    ) -> "EncodedChat":
        """Encodes a conversation, with the tools that its answer may call.

        Other arguments and errors are as in `encode_texts`.
        """
        # A template may print all fields of a message.
        messages, tools = conversation.messages, conversation.tools
        variables = conversation.variables
        size = sum(len(str(x)) for message in messages for x in message.values())
        size += sum(len(str(x)) for x in (tools, variables) if x is not None)
        self._check_length("the conversation", size)
        encoding = self.texts.find(adapter).encoding

        def encode() -> EncodedChat:
            chat = encoding.chat
            ids = chat(conversation, "messages")
            template = chat.source(tools=tools is not None)
            syntax = find_syntax(template, self.tokenizer, ids, choice)
            return EncodedChat(ids, tuple(chat.turn_ends()), syntax)

        return await self._conversations.run(client, encode)

    def _check_length(self, what: str, size: int) -> None:
        limit = self.limit * self._longest_token
        if size > limit:
            raise InputError(
                f"{what} has {size:,} characters, expected at most {limit:,}: a slot "
                f"has {self.limit:,} positions"
            )

    @functools.cached_property
    def _longest_token(self) -> int:
        """Number of characters that a position may stand for."""
        ids = range(self.tokenizer.vocabulary_size)
        longest = max(len(self.tokenizer.token(id)) for id in ids)
        return min(max(longest, SHORTEST_LIMIT), LONGEST_LIMIT)


class EncodedChat(NamedTuple):
    """A conversation as a model reads it."""

    ids: list[int]
    ends: tuple[int, ...]
    syntax: ChatSyntax


def _parts(texts: Sequence[str]) -> Iterator[list[str]]:
    """Groups texts into lists that take a limited time to encode."""
    part: list[str] = []
    for text in texts:
        if part and sum(map(len, part)) + len(text) > PART:
            yield part
            part = []
        part.append(text)
    if part:
        yield part
