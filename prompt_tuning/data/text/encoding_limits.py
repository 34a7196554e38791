"""Limits how much work a `tokenizer.json` can make its library do, and its errors.

The file may contain regular expressions that take exponential time to match, and
replacements that lengthen a text without bound. You cannot interrupt the library. But
other threads run while it encodes a batch, so a thread can be left waiting for it.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from prompt_tuning.core.errors import MAXIMUM_SHOWN, InputError
from prompt_tuning.data.text.gguf_splits import LLAMA_3, QWEN_2

Result = TypeVar("Result")

MAXIMUM_TEXT = 2**22
"""Maximum number of characters that are encoded as one text. A tokenizer needs many
seconds for millions of characters without a space.
"""

MAXIMUM_GROWTH = 2**10
"""Maximum number of characters that all replacements write for one."""

MAXIMUM_GROWN = 2**26
"""Maximum number of characters that replacements may make of a text."""

MAXIMUM_SECONDS = 10
"""Time for a short text."""

CHARACTERS_PER_SECOND = 2**16
"""Number of characters that add a second to it."""

UNLIMITED_TEXT = 2**13
"""Number of characters up to which a quick tokenizer is not timed, which would take
longer than encoding a short text."""

MAXIMUM_WORD = 1_000
"""Number of characters of a word up to which WordPiece is quick."""

QUICK_EXPRESSIONS = frozenset({LLAMA_3, QWEN_2, r"[\s\S]"})
"""Expressions that match in linear time: of Llama 3, Qwen 2, and single characters."""

MAXIMUM_FILE = 2**27
"""Maximum size in bytes of each file of a tokenizer."""

DECODING = "the tokenizer cannot decode its own ids"


@contextlib.contextmanager
def reporting_errors(problem: Callable[[], str]) -> Iterator[None]:
    """Reports errors of a tokenizer's library; `problem` says what cannot be done."""
    try:
        yield
    except InputError:
        raise
    # The libraries raise nothing narrower, and a panic of Rust code is a
    # `PanicException`, whose class derives from BaseException and cannot be imported.
    except BaseException as error:
        is_panic = type(error).__name__ == "PanicException"
        if not isinstance(error, Exception) and not is_panic:
            raise
        reason = str(error)[:MAXIMUM_SHOWN] or type(error).__name__
        raise InputError(f"{problem()}: {reason}") from error


class TooSlowError(InputError):
    """Encoding or decoding exceeds its time."""


class Costs(NamedTuple):
    """Limits of encoding a text.

    Replacements write up to `growth` characters for one. If the tokenizer `is_quick`,
    its time is known to be proportional to a text's length.
    """

    growth: int = 1
    is_quick: bool = True


QUICK = Costs()


def read_costs(settings: Mapping[str, Any], source: str) -> Costs:
    """Returns the costs of a `tokenizer.json`; growth is at most `MAXIMUM_GROWTH`."""
    parts = [settings.get(part) for part in ("normalizer", "pre_tokenizer", "decoder")]
    growths = [math.prod(map(_growth, _objects(part))) for part in parts]
    if max(growths) > MAXIMUM_GROWTH:
        raise InputError(
            f"{source}: the replacements of its normalizer or decoder write up to "
            f"{min(max(growths), 10**18):,} characters for one, expected at most "
            f"{MAXIMUM_GROWTH:,}"
        )
    expressions = {
        str(each["Regex"])
        for part in parts
        for each in _objects(part)
        if "Regex" in each
    }
    model = settings.get("model")
    word = model.get("max_input_chars_per_word") if isinstance(model, dict) else None
    is_quick = expressions <= QUICK_EXPRESSIONS and (
        word is None or (isinstance(word, int) and word <= MAXIMUM_WORD)
    )
    return Costs(growths[0], is_quick)


def check_text(text: str, growth: int = 1) -> None:
    """Refuses a text with too many characters to encode, now or after replacements."""
    limit = min(MAXIMUM_TEXT, MAXIMUM_GROWN // growth)
    if len(text) > limit:
        raise InputError(
            f"a text has {len(text):,} characters, expected at most {limit:,}: divide "
            "it into several"
        )


class LimitedCalls:
    """Calls functions of a tokenizer and waits for a limited time.

    A call that takes too long is left running, and no other follows it.
    """

    def __init__(self):
        self._problem = ""

    def __call__(self, function: Callable[[], Result], size: int) -> Result:
        """Calls a function that lets other threads run, or raises `TooSlowError`."""
        if self._problem:
            raise TooSlowError(self._problem)
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # raised where it is waited for
                future.set_exception(error)

        # A daemon does not keep the process from ending.
        threading.Thread(target=run, daemon=True).start()
        seconds = MAXIMUM_SECONDS + size // CHARACTERS_PER_SECOND
        try:
            return future.result(seconds)
        except TimeoutError:
            self._problem = (
                f"the tokenizer takes more than {seconds:,} s for {size:,} characters "
                "or ids; expected regular expressions without nested repetitions in "
                "its tokenizer.json"
            )
            raise TooSlowError(self._problem) from None


def _growth(entry: Mapping[str, Any]) -> int:
    """Returns how many characters a replacement may write for one."""
    if isinstance(entry.get("prepend"), str):
        return 1 + len(entry["prepend"])
    content, pattern = entry.get("content"), entry.get("pattern")
    if not isinstance(content, str) or not isinstance(pattern, dict):
        return 1
    replaced = pattern.get("String")
    if isinstance(replaced, str) and replaced:
        return max(1, math.ceil(len(content) / len(replaced)))
    return 1 + len(content)  # it may match between any two characters


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yields every JSON object in a value; nesting was limited when it was read."""
    if isinstance(value, dict):
        yield value
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _objects(each)
