"""Compile a run's programs in a thread while its first steps run.

The plan of batches gives all shapes in advance, and the compiler does not need Python.
Later shapes are thus compiled while earlier ones train, one program after another, in
the order of their first use.
"""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from prompt_tuning import processes
from prompt_tuning.core.compilation import abstract
from prompt_tuning.data.batching.batches import read_first_batches
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import CompiledStep
from prompt_tuning.training.trainer import Trainer


@contextlib.contextmanager
def compiling_ahead(trainer: Trainer, state: TrainState, stop: int) -> Iterator[None]:
    """Compiles what the steps up to `stop` and the evaluation need.

    Multiple processes, meshes, streamed weights and rollouts compile each program when
    needed instead. On exit, waits for the program being compiled.
    """
    step, done = trainer.step, int(state.step)
    if (
        done >= stop
        or not isinstance(step, CompiledStep)
        or trainer.run.rollouts is not None
        or trainer.model.placement is not None
        or processes.count() > 1
    ):
        yield
        return
    # While grain is imported, it replaces `__import__` for all threads, which would
    # break imports by the compiler at that moment.
    import grain  # noqa: F401

    executor = ThreadPoolExecutor(1, "compiling")
    try:
        batches = read_first_batches(
            trainer.examples,
            trainer.batch_plan,
            done,
            stop,
            pad_id=trainer.model.config.pad_id,
        )
        state, frozen = abstract((state, trainer.inputs))
        for batch in batches:
            step.compile_ahead(executor, state, frozen, batch)
        if trainer.evaluator is not None:
            trainer.evaluator.compile_ahead(executor, state.trained | frozen)
        yield
    finally:
        executor.shutdown(cancel_futures=True)
