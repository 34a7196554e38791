"""Profile three steps of a run, for TensorBoard or Perfetto."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

PROFILED_STEPS = 3
WARM_UP = 2
"""Number of steps before the profile; they compile."""


class StepProfile:
    """Traces consecutive steps, and names each in the trace.

    Without a folder it traces nothing, and names cost nothing.
    """

    def __init__(self, folder: Path | None, done: int, last: int):
        self._folder = folder
        self._first = max(done, min(done + WARM_UP, last - PROFILED_STEPS))
        self._end = min(self._first + PROFILED_STEPS, last)
        self._tracing = False

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Names the step after `number` steps; the first one starts the trace."""
        if self._folder is not None and number == self._first:
            jax.profiler.start_trace(self._folder)
            self._tracing = True
        with jax.profiler.StepTraceAnnotation("train", step_num=number + 1):
            yield

    def finish_step(self, number: int, outputs: Any) -> None:
        """Ends the trace after the last profiled step, once its `outputs` are computed.

        `number` steps are completed.
        """
        if self._tracing and number >= self._end:
            jax.block_until_ready(outputs)
            self.close()

    def close(self) -> None:
        """Ends the trace, if one has begun."""
        if self._tracing:
            self._tracing = False
            jax.profiler.stop_trace()
