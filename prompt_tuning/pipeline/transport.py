"""How stages send each other arrays: into a mailbox on the receiver's devices."""

import threading
from typing import Any, Protocol

import jax

from prompt_tuning.pipeline.stage_devices import PER_DEVICE, StageDevices

Tree = Any
Message = tuple[str, int]
"""The kind of array that is sent, and the number of the micro-batch."""


class StoppedError(Exception):
    """Another stage failed, so what this one waits for will never arrive."""


class Sender(Protocol):
    """Sends arrays to one stage."""

    def send(self, name: Message, arrays: Tree) -> None:
        """Sends arrays without waiting for them.

        The receiver asks for them by `name`. Each device of the sender has its own
        array.
        """


class Mailbox:
    """Arrays that were sent to one stage and not read yet."""

    def __init__(self, devices: StageDevices):
        """Creates an empty mailbox; arrays move to `devices` when they are sent."""
        self._sharding = devices.sharding(PER_DEVICE)
        self._changed = threading.Condition()
        self._messages: dict[Any, Tree] = {}
        self._stopped = False

    def send(self, name: Message, arrays: Tree) -> None:
        """Moves arrays to the stage's devices; see `Sender`."""
        moved = jax.device_put(arrays, self._sharding)
        with self._changed:
            self._messages[name] = moved
            self._changed.notify_all()

    def receive(self, name: Message) -> Tree:
        """Waits for arrays with a name and returns them.

        Raises:
          StoppedError: if they will not arrive.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or name in self._messages)
            if name not in self._messages:
                raise StoppedError
            return self._messages.pop(name)

    def stop(self) -> None:
        """Ends all waiting, because a stage failed."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
