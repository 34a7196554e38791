"""The process that compiles and runs a chat template.

A template is a program from a foreign file. Only `serve` compiles and runs it: its
process has little memory, ends itself when a rendering takes too long, and exchanges
plain values with its parent. Each frame is a length and a marshaled value.
"""

import contextlib
import marshal
import resource
import signal
import struct
import sys
from typing import IO, Any

from prompt_tuning.data.text.learned_answers import TemplateProblem
from prompt_tuning.data.text.template_renderer import (
    MAXIMUM_MEMORY,
    ChatRecord,
    TemplateRenderer,
    limit_time,
    reason,
)

_LENGTH = struct.Struct("<Q")


def write_frame(stream: IO[bytes], value: Any) -> None:
    """Writes a value of plain types."""
    content = marshal.dumps(value)
    stream.write(_LENGTH.pack(len(content)))
    stream.write(content)


def read_frame(stream: IO[bytes]) -> Any:
    """Reads a value; EOFError if the other process has ended."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError("the other process has ended")
    (size,) = _LENGTH.unpack(header)
    content = stream.read(size)
    if len(content) < size:
        raise EOFError("the other process has ended")
    return marshal.loads(content)


def serve() -> None:
    """Compiles a template, then renders lists of conversations until the input ends.

    The first frame has the arguments of `TemplateRenderer`; the answer is whether the
    template uses the date, or what is wrong with it. Then each frame names a method of
    `TemplateRenderer`, with a list of conversations and the method's arguments. The
    answer for a conversation is a tuple with the method's result, or else its problem.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # macOS has no such limit, and a lower one may be set already.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MAXIMUM_MEMORY, MAXIMUM_MEMORY))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    arguments = read_frame(requests)
    import jinja2.sandbox  # noqa: F401  # is no part of compiling

    limit_time()
    try:
        renderer = TemplateRenderer(*arguments)
        answer = renderer.uses_date
    # Python's compiler raises SyntaxError, RecursionError and others for templates that
    # jinja2 accepts.
    except Exception as error:
        write_frame(answers, reason(error))
        answers.flush()
        return
    write_frame(answers, answer)
    answers.flush()
    while True:
        signal.setitimer(signal.ITIMER_PROF, 0)
        name, records, *arguments = read_frame(requests)
        method = getattr(renderer, name)
        for fields in records:
            try:
                result = method(ChatRecord(*fields), *arguments)
                # The frames have plain values, no classes.
                plain = tuple(result) if isinstance(result, tuple) else result
                write_frame(answers, (plain,))
            except TemplateProblem as problem:
                write_frame(answers, str(problem))
            except MemoryError as error:
                write_frame(answers, renderer.rejection(reason(error)))
            answers.flush()
