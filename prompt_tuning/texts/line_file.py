"""Continue the lines of a jsonl file, and write a line of results for each.

A line has a text as `prompt` or a conversation as `messages`, and optionally its own
`adapter`, `prompt_id` and `seed`. A result has the number of its line, the input, the
fields of `completion_fields`, and the line's other fields as `record`.
"""

import dataclasses
import hashlib
import json
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.resumable_lines import resumable_lines
from prompt_tuning.core.typed_json import JsonObject, as_object, parse_json
from prompt_tuning.core.version import __version__
from prompt_tuning.data.rows.jsonl import JsonLine, parse_lines
from prompt_tuning.data.text.conversations import (
    conversation_key,
    has_prompt_messages,
    read_chat_messages,
    without_answer,
)
from prompt_tuning.data.text.record_fields import WEIGHTS, refuse_unread
from prompt_tuning.data.text.template_renderer import ChatRecord
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.decoding.detokenizer import token_name
from prompt_tuning.decoding.request import (
    Completion,
    Request,
    TokenLogprob,
    repetitions,
)
from prompt_tuning.decoding.request_checks import slot_length
from prompt_tuning.texts.text_settings import TextSettings
from prompt_tuning.texts.texts import Given, Texts
from prompt_tuning.tuned.input_encoding import PROMPT_KEY

ADAPTER_KEY, PROMPT_ID_KEY, SEED_KEY = "adapter", "prompt_id", "seed"
LINE, INPUT, RECORD = "line", "input", "record"

Advance = Callable[[int], None]
"""Called with a number of newly finished lines."""


@dataclasses.dataclass(frozen=True)
class _Row:
    line: JsonLine
    input: Any
    record: dict[str, Any]
    request: Request


class LineFile:
    """The lines of a file, and how to continue them.

    Attributes:
      count: number of lines that are not empty.

    Raises:
      InputError: for the first line that cannot be continued.
    """

    def __init__(self, texts: Texts, settings: TextSettings, file: Path):
        self._texts, self._settings, self._file = texts, settings, file
        if not file.is_file():
            found = "is not a file" if file.exists() else "does not exist"
            raise InputError(f"{file} {found}, expected a jsonl file")
        self._content = self._digest()
        # Every line is encoded twice: first to check them all before any is computed,
        # with only a few bytes of memory per line.
        encoded, self.count = hashlib.sha256(), 0
        hashes = array("q")
        for row in self._rows():
            request = row.request
            names = (request.adapter, request.prompt_id, request.sampling.seed)
            encoded.update(repr((request.ids, names)).encode())
            # A line with its own seed is sampled as if no other line were equal.
            alone = SEED_KEY in row.line.content
            hashes.append(hash((row.line.number,) if alone else request.row))
            self.count += 1
        self._encoded = encoded.hexdigest()
        self._repetitions = repetitions(hashes)
        if not self.count:
            raise InputError(f"{file} has no line, expected at least one")

    def write(self, output: Path, advance: Advance, *, force: bool = False) -> int:
        """Writes the results of all lines to a file, or resumes an earlier command.

        Returns the number of lines that an earlier command had finished.

        Raises:
          InputError: if the earlier results were made with other settings.
        """
        earlier = _EarlierResults()
        with resumable_lines(output, self._identity(), earlier, force=force) as writer:
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
          start: number of lines to skip, because their results are known.
          last: line number of the last of these, for a check.
        """
        waiting: deque[_Row] = deque()

        def read() -> Iterator[Request]:
            count = self._settings.sampling.n
            for number, row in enumerate(self._rows(start, last), start):
                waiting.append(row)
                first = int(self._repetitions[number]) * count
                yield dataclasses.replace(row.request, first_sample=first)

        single = self._settings.results == 1
        for completions in self._texts.complete(read(), self._settings):
            row = waiting.popleft()
            result = {LINE: row.line.number, INPUT: row.input}
            result |= completion_fields(
                completions, self._texts.tokenizer, single=single
            )
            yield as_json(result | ({RECORD: row.record} if row.record else {}))

    def _rows(self, start: int = 0, last: int = 0) -> Iterator[_Row]:
        """Yields lines as requests; arguments and errors as in `results`."""
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
        fields = JsonObject(line.location, line.content)
        settings, seed = self._settings, fields.integer(SEED_KEY, None)
        sampling = settings.sampling
        settings = dataclasses.replace(
            settings,
            adapter=fields.text(ADAPTER_KEY, settings.adapter),
            prompt_id=fields.integer(PROMPT_ID_KEY, settings.prompt_id),
            sampling=(
                sampling if seed is None else dataclasses.replace(sampling, seed=seed)
            ),
        )
        given, shown, used = self._read(line, settings.adapter)
        request = self._texts.request(given, settings, line.location)
        record = {name: x for name, x in line.content.items() if name not in used}
        return _Row(line, shown, record, request)

    def _read(
        self, line: JsonLine, adapter: str | None
    ) -> tuple[Given, Any, Sequence[str]]:
        """Returns what to continue, the input to report, and the keys read."""
        content = line.content
        key = conversation_key(content)
        if key is not None and PROMPT_KEY in content:
            raise InputError(
                f"found prompt and {key}, expected one of them: leave out one"
            )
        if key is None and has_prompt_messages(content, PROMPT_KEY):
            key = PROMPT_KEY
        if key is not None:
            record = self._read_messages(line, key)
            return record, list(record.messages), (key,)
        if PROMPT_KEY not in content:
            keyed = self._texts.find(adapter).encoding.template
            if keyed is not None:
                template = keyed.template
                values = {
                    key: line.text(key, "DataSource.template") for key in template.keys
                }
                return values, "".join(template.render(values)), template.keys
        refuse_unread(content, line.location, WEIGHTS)
        text = JsonObject(line.location, content).text(PROMPT_KEY)
        return text, text, (PROMPT_KEY,)

    def _read_messages(self, line: JsonLine, key: str) -> ChatRecord:
        """Returns the messages of a line without the known answer."""
        record = read_chat_messages(line.content, key, line.location, list(WEIGHTS))
        if self._settings.system is not None:
            raise InputError(
                "--system is for texts, and the line has messages: put the system "
                "message among them"
            )
        record = without_answer(record)
        if not record.messages:
            raise InputError("the only message is an answer, expected one to answer")
        return record

    def _identity(self) -> dict[str, Any]:
        """Returns everything that determines the results, named for messages."""
        settings = dataclasses.asdict(self._settings)
        sampling, beams = settings.pop("sampling"), settings.pop("beams") or {}
        settings["batch_size"] = settings.pop("slots")  # as the option is named
        return {
            "prompt_tuning": __version__,
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
            "input": self._content,
            "encoded input": self._encoded,
            "slot length": slot_length(self._texts.room),
            **{
                f"weights of {adapter.name}": adapter.digest()
                for adapter in self._texts.adapters.values()
            },
            **sampling,
            **{f"beam search {name}": value for name, value in beams.items()},
            **settings,
            "day": self._texts.day,
        }

    def _digest(self) -> str:
        with self._file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def _check_unchanged(self) -> None:
        """Checks that the file is unchanged since its lines were checked."""
        if self._digest() != self._content:
            raise InputError(
                f"{self._file} changed while it was read, so that the results are "
                "those of no file: start anew with --force"
            )


class _EarlierResults:
    """Recognizes lines that `LineFile` may have written.

    Attributes:
      number: input line number of the last result; 0 for none.
    """

    def __init__(self):
        self.number = 0

    def __call__(self, line: bytes) -> bool:
        """Whether a line is a result for an input line after the previous ones."""
        try:
            number = as_object(parse_json(line, "line"), "line").integer(LINE)
        except InputError:
            return False
        if number <= self.number:
            return False
        self.number = number
        return True


def as_json(content: dict[str, Any]) -> str:
    """Returns JSON with half surrogate pairs, which are not valid text, escaped."""
    text = json.dumps(content, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(content)
    return text


def completion_fields(
    completions: Sequence[Completion], tokenizer: Tokenizer, *, single: bool
) -> dict[str, Any]:
    """Returns the completions of one text.

    With `single`, the fields are `output`, `finish_reason`, `input_tokens` and
    `output_tokens`; otherwise there is a list of such objects, `outputs`.
    """
    several = [_fields(each, tokenizer) for each in completions]
    if single:
        return several[0]
    input_tokens = [each.pop("input_tokens") for each in several]
    return {"input_tokens": input_tokens[0], "outputs": several}


def _fields(completion: Completion, tokenizer: Tokenizer) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "output": completion.text,
        "finish_reason": completion.reason,
        "input_tokens": completion.given_tokens,
        "output_tokens": len(completion.ids),
    }
    if completion.score is not None:
        fields["score"] = completion.score
    if completion.problem:
        fields["problem"] = completion.problem
    if completion.logprobs is not None:
        fields["logprobs"] = [_logprob(each, tokenizer) for each in completion.logprobs]
    return fields


def _logprob(one: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    top = [_entry(token, value, tokenizer) for token, value in one.top]
    return {**_entry(one.token, one.logprob, tokenizer), "top": top}


def _entry(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    return {"token": token_name(tokenizer, token), "id": token, "logprob": logprob}
