"""The process that renders with a chat template, as its parent uses it."""

import contextlib
import signal
import subprocess
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.limited_process import python_command
from prompt_tuning.data.text.template_renderer import (
    MAXIMUM_MEMORY,
    MAXIMUM_SECONDS,
    ChatRecord,
)
from prompt_tuning.data.text.template_server import read_frame, write_frame

MAXIMUM_STOPPED = 3
"""Number of conversations with which a template may exceed its time before it is given
up altogether.
"""

_STATEMENTS = """
from prompt_tuning.data.text.template_server import serve
try:
    serve()
except EOFError:
    pass
"""


class TemplateProcess:
    """Renders conversations in another process, which is started again if it ends.

    For the arguments see `TemplateRenderer`. InputError if the template is not jinja2,
    or compiling it exceeds the limits.

    Attributes:
      uses_date: whether the rendered text depends on the current date.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        origin: str,
        date: str | None,
        tool_source: str | None = None,
    ):
        self._arguments = source, dict(special_tokens), origin, date, tool_source
        self._origin = origin
        self._stopped = 0
        self._start()

    def render(
        self, method: str, conversations: Sequence[ChatRecord], *arguments: Any
    ) -> Iterator[tuple[Any] | str]:
        """Yields a tuple with each rendered conversation, or why it is not rendered.

        `method` is one of `TemplateRenderer`, and takes the `arguments`, of plain
        types. InputError if the template exceeds its time again and again.
        """
        start = 0
        while start < len(conversations):
            # The frames have plain values, no classes.
            records = [tuple(record) for record in conversations[start:]]
            self._send((method, records, *arguments))
            try:
                while start < len(conversations):
                    answer = read_frame(self._output)
                    start += 1
                    yield answer
            except EOFError:
                start += 1
                yield self._restart()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            python_command(_STATEMENTS),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        weakref.finalize(self, _stop, self._process)
        self._send(self._arguments)
        try:
            answer = read_frame(self._output)
        except EOFError:
            answer = self._reason_of_end()
        if isinstance(answer, str):
            raise InputError(
                f"the chat template of {self._origin} is not jinja2: {answer}"
            )
        self.uses_date: bool = answer

    def _restart(self) -> str:
        self._stopped += 1
        problem = f"the chat template of {self._origin} {self._reason_of_end()}"
        if self._stopped >= MAXIMUM_STOPPED:
            raise InputError(f"{problem}, with {self._stopped} conversations")
        self._start()
        return problem

    def _reason_of_end(self) -> str:
        code = self._process.wait()
        _stop(self._process)
        if code == -signal.SIGPROF:
            return f"computes for more than {MAXIMUM_SECONDS:g} seconds"
        return f"needs more than {MAXIMUM_MEMORY:,} bytes of memory (exit code {code})"

    def _send(self, value: object) -> None:
        stream = self._process.stdin
        assert stream is not None
        # If the process has ended, reading its answer fails.
        with contextlib.suppress(BrokenPipeError):
            write_frame(stream, value)
            stream.flush()

    @property
    def _output(self) -> IO[bytes]:
        assert self._process.stdout is not None
        return self._process.stdout


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            # A part of a frame may not be written yet.
            with contextlib.suppress(BrokenPipeError):
                stream.close()
