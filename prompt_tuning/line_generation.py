"""Continues the lines of a jsonl file, and writes a line of results for each.

A line has `prompt`, a text, or `messages`, a conversation for the chat template; and if
it differs from the others `adapter`, `prompt_id` and `seed`. A result has the number of
its line, the input, the fields of `TextRequests.fields`, and as `record` all other
fields of its line.
"""

import dataclasses
import hashlib
import json
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from prompt_tuning import __version__
from prompt_tuning.core.errors import InputError
from prompt_tuning.core.resumable_lines import resumable_lines
from prompt_tuning.core.typed_json import JsonObject, as_object, parse_json
from prompt_tuning.data.rows.jsonl import JsonLine, parse_lines
from prompt_tuning.data.text.conversations import (
    MESSAGES_KEY,
    has_prompt_messages,
    read_chat_messages,
    without_answer,
)
from prompt_tuning.data.text.record_fields import WEIGHTS, refuse_unread
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.request_checks import slot_length
from prompt_tuning.decoding.row_draws import repetitions
from prompt_tuning.text_requests import TextRequests
from prompt_tuning.tuned.input_encoding import PROMPT_KEY

ADAPTER_KEY, PROMPT_ID_KEY, SEED_KEY = "adapter", "prompt_id", "seed"
LINE, INPUT, RECORD = "line", "input", "record"

Advance = Callable[[int], None]
"""Called with a number of lines that are finished."""


@dataclasses.dataclass(frozen=True)
class _Row:
    """A line as a request.

    Attributes:
      line: the line.
      input: its text, or its messages.
      record: its other fields.
      request: the request.
    """

    line: JsonLine
    input: Any
    record: dict[str, Any]
    request: Request


class LineGeneration:
    """Continues the lines of one file.

    Args:
      requests: makes the requests.
      file: the file.

    Attributes:
      count: number of lines that are not empty.

    Raises:
      InputError: for the first line that cannot be continued.
    """

    def __init__(self, requests: TextRequests, file: Path):
        self._requests, self._file = requests, file
        if not file.is_file():
            found = "is not a file" if file.exists() else "does not exist"
            raise InputError(f"{file} {found}, expected a jsonl file")
        self._content = self._digest()
        # All lines are encoded twice, so that none is refused after others were
        # computed, and the memory grows by some bytes for each line only.
        encoded, self.count = hashlib.sha256(), 0
        hashes = array("q")
        for row in self._rows():
            request = row.request
            names = (request.adapter, request.prompt_id, request.sampling.seed)
            encoded.update(repr((request.ids, names)).encode())
            # A line with a seed draws as if no other line were equal.
            alone = SEED_KEY in row.line.content
            hashes.append(hash((row.line.number,) if alone else request.row))
            self.count += 1
        self._encoded = encoded.hexdigest()
        self._repetitions = repetitions(hashes)
        if not self.count:
            raise InputError(f"{file} has no line, expected at least one")

    def write(self, output: Path, advance: Advance, *, force: bool = False) -> int:
        """Writes the results of all lines into a file, or continues an earlier command.

        Args:
          output: the file; see `resumable_lines`.
          advance: called with the number of lines that are finished now, and were not.
          force: whether to start anew and replace an existing file.

        Returns:
          the number of lines that an earlier command had finished.

        Raises:
          InputError: if the earlier results belong to other settings.
        """
        earlier = _EarlierResults()
        with resumable_lines(output, self._settings(), earlier, force=force) as writer:
            done = self.count if writer.complete else writer.done
            advance(done)
            if not writer.complete:
                for result in self.results(done, earlier.number):
                    writer.write(result)
                    advance(1)
                self._check_unchanged()
        return done

    def results(self, start: int = 0, last: int = 0) -> Iterator[str]:
        """Yields the result of each line as JSON, in order.

        Args:
          start: number of lines whose results are known.
          last: number of the last of them in the file, for a check.

        Raises:
          InputError: if it is another.
        """
        waiting: deque[_Row] = deque()

        def read() -> Iterator[Request]:
            count = self._requests.settings.sampling.n
            for number, row in enumerate(self._rows(start, last), start):
                waiting.append(row)
                first = int(self._repetitions[number]) * count
                yield dataclasses.replace(row.request, first_sample=first)

        for completions in self._requests.complete(read()):
            row = waiting.popleft()
            result = {LINE: row.line.number, INPUT: row.input}
            result |= self._requests.fields(completions)
            yield as_json(result | ({RECORD: row.record} if row.record else {}))

    def _rows(self, start: int = 0, last: int = 0) -> Iterator[_Row]:
        """Yields the lines from one on; arguments and errors as in `results`."""
        with self._file.open("rb") as stream:
            for number, line in enumerate(parse_lines(stream, self._file)):
                if number == start - 1 and line.number != last:
                    raise InputError(
                        f"the earlier results end with line {last} of {self._file}, "
                        f"expected {line.number}: start anew with --force"
                    )
                if number >= start:
                    with line.locating_errors():
                        yield self._row(line)

    def _row(self, line: JsonLine) -> _Row:
        """Returns a line as a request.

        Raises:
          InputError: if a field has a wrong type, or the line cannot be continued.
        """
        requests, fields = self._requests, JsonObject(line.location, line.content)
        chat, used = False, (PROMPT_KEY,)
        adapter = fields.text(ADAPTER_KEY, None)
        key = PROMPT_KEY if has_prompt_messages(line.content, PROMPT_KEY) else ""
        if MESSAGES_KEY in line.content:
            if PROMPT_KEY in line.content:
                raise InputError(
                    "found prompt and messages, expected one of them: leave out one"
                )
            key = MESSAGES_KEY
        if key:
            chat, used = True, (key,)
            given, ids = self._read_messages(line, key, adapter)
        elif PROMPT_KEY not in line.content and (
            (template := requests.template(adapter)) is not None
        ):
            used = template.template.keys
            texts = {key: line.text(key, "DataSource.template") for key in used}
            given = "".join(template.template.render(texts))
            ids = requests.encode_keys(texts, template)
        else:
            refuse_unread(line.content, line.location, WEIGHTS)
            given = fields.text(PROMPT_KEY)
            ids = requests.encode(given, adapter)
        request = requests.request(
            ids,
            chat=chat or None,
            adapter=adapter,
            prompt_id=fields.integer(PROMPT_ID_KEY, None),
            seed=fields.integer(SEED_KEY, None),
        )
        record = {name: x for name, x in line.content.items() if name not in used}
        return _Row(line, given, record, request)

    def _read_messages(
        self, line: JsonLine, key: str, adapter: str | None
    ) -> tuple[Any, list[int]]:
        """Returns the messages of a line, and their ids without a known answer."""
        record = read_chat_messages(line.content, key, line.location, list(WEIGHTS))
        if self._requests.settings.system is not None:
            raise InputError(
                "--system is for texts, and the line has messages: put the system "
                "message among them"
            )
        record = without_answer(record)
        if not record.messages:
            raise InputError("the only message is an answer, expected one to answer")
        ids = self._requests.encode_chat(record, line.location, adapter)
        return list(record.messages), ids

    def _settings(self) -> dict[str, Any]:
        """Returns everything that determines the results, by names for messages."""
        requests = self._requests
        settings = dataclasses.asdict(requests.settings)
        sampling, beams = settings.pop("sampling"), settings.pop("beams") or {}
        settings["batch_size"] = settings.pop("slots")  # as the option is named
        return {
            "prompt_tuning": __version__,
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "input": self._content,
            "encoded input": self._encoded,
            "slot length": slot_length(requests.room),
            **{
                f"weights of {name}": digest
                for name, digest in requests.adapters.digests().items()
            },
            **sampling,
            **{f"beam search {name}": value for name, value in beams.items()},
            **settings,
        }

    def _digest(self) -> str:
        """Returns the SHA-256 of the file."""
        with self._file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def _check_unchanged(self) -> None:
        """Checks that the file is the one whose lines were checked.

        Raises:
          InputError: if it is not.
        """
        if self._digest() != self._content:
            raise InputError(
                f"{self._file} changed while it was read, so that the results are "
                "those of no file: start anew with --force"
            )


class _EarlierResults:
    """Accepts lines that `LineGeneration` may have written.

    Attributes:
      number: number of the last line of the input that has a result; 0 for none.
    """

    def __init__(self):
        self.number = 0

    def __call__(self, line: bytes) -> bool:
        """Returns whether a line is a result, of a line after those before."""
        try:
            number = as_object(parse_json(line, "line"), "line").integer(LINE)
        except InputError:
            return False
        if number <= self.number:
            return False
        self.number = number
        return True


def as_json(content: dict[str, Any]) -> str:
    """Returns JSON of any text; half of a surrogate pair, which is none, is escaped."""
    text = json.dumps(content, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(content)
    return text
