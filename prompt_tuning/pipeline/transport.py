"""How stages send each other arrays: into a mailbox on the receiver's devices.

A sender in another process offers arrays under a number, and the receiver fetches them
from there, device to device, over a socket of JAX's transfer server.
"""

import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from prompt_tuning import processes
from prompt_tuning.pipeline.stage_devices import PER_DEVICE, StageDevices

Tree = Any
Message = tuple[str, int]
"""The kind of array that is sent, and the number of the micro-batch."""
KINDS = ("hidden", "gradient", "prefix", "prefix gradient")
MESSAGES = 2**20
"""More than the messages of one kind to one stage in one step."""


class StoppedError(Exception):
    """Another stage failed, so what this one waits for will never arrive."""


class Mailbox:
    """Arrays that were sent to one stage and not read yet."""

    def __init__(self, devices: StageDevices):
        """Creates an empty mailbox; arrays move to `devices` when they are sent."""
        self._sharding = devices.sharding(PER_DEVICE)
        self._changed = threading.Condition()
        self._messages: dict[Any, Tree] = {}
        self._stopped = False

    def send(self, name: Message, arrays: Tree) -> None:
        """Moves arrays to the stage's devices, without waiting for them.

        The receiver asks for them by `name`. Each device of the sender has its own
        array.
        """
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


class ProcessLinks:
    """The connections of this process to all others."""

    def __init__(self):
        """Starts the transfer server; all processes do this together."""
        # An experimental module, which only several processes need.
        from jax.experimental import transfer

        client = jax.local_devices()[0].client
        host = processes.own_address()
        address = f"[{host}]:0" if ":" in host else f"{host}:0"
        self._server = transfer.start_transfer_server(client, address, [address])
        self._addresses = processes.share(self._server.address())
        self._connections: dict[int, Any] = {}
        self._steps = 0

    def next_step(self, stages: Sequence[StageDevices]) -> "StepLinks":
        """Returns the links of the next step; all processes start the same steps."""
        self._steps += 1
        return StepLinks(self, stages, self._steps)

    def offer(self, number: int, arrays: Tree) -> None:
        """Lets another process fetch arrays."""
        self._server.await_pull(number, arrays)

    def fetch(self, process: int, number: int, shapes: Tree) -> Tree:
        """Starts to fetch the arrays offered under `number`, without waiting for them.

        `shapes` must have shardings on this process's devices.
        """
        if process not in self._connections:
            address = self._addresses[process]
            self._connections[process] = self._server.connect(address)
        return self._connections[process].pull(number, shapes)


@functools.cache
def process_links() -> ProcessLinks:
    """Returns this process's connections; the first call opens them."""
    return ProcessLinks()


class StepLinks:
    """Numbers of the messages of one step."""

    def __init__(self, links: ProcessLinks, stages: Sequence[StageDevices], step: int):
        self._links, self._stages, self._step = links, stages, step

    def _number(self, receiver: int, name: Message) -> int:
        kind, index = name
        place = self._step * len(self._stages) + receiver
        return (place * len(KINDS) + KINDS.index(kind)) * MESSAGES + index

    def offer(self, receiver: int, name: Message, arrays: Tree) -> None:
        """Lets the process of a stage fetch arrays."""
        self._links.offer(self._number(receiver, name), arrays)

    def fetch(self, sender: int, receiver: int, name: Message, shapes: Tree) -> Tree:
        """Fetches arrays that another stage sends to one of this process."""
        devices = self._stages[receiver]
        sharding = devices.sharding(PER_DEVICE)
        placed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            devices.shapes(shapes),
        )
        number = self._number(receiver, name)
        return self._links.fetch(self._stages[sender].process, number, placed)


class RemoteSender:
    """Sends arrays to a stage of another process."""

    def __init__(self, links: StepLinks, receiver: int):
        """Sends to a stage in one step."""
        self._links, self._receiver = links, receiver

    def send(self, name: Message, arrays: Tree) -> None:
        """Offers arrays to the stage's process; see `Mailbox.send`."""
        self._links.offer(self._receiver, name, arrays)


class LinkedMailbox(Mailbox):
    """The mailbox of a stage with neighbors that may be in other processes."""

    def __init__(
        self,
        stages: Sequence[StageDevices],
        stage: int,
        links: StepLinks,
        messages: Mapping[str, tuple[int, Tree]],
    ):
        """Creates an empty mailbox for one stage.

        `messages` has the sender and the shapes of each kind of message, on one device.
        """
        super().__init__(stages[stage])
        self._links, self._stage = links, stage
        self._remote = {
            kind: (sender, shapes)
            for kind, (sender, shapes) in messages.items()
            if not stages[sender].is_local
        }

    def receive(self, name: Message) -> Tree:
        """Waits for arrays with a name, or fetches them, and returns them."""
        if name[0] not in self._remote:
            return super().receive(name)
        sender, shapes = self._remote[name[0]]
        return self._links.fetch(sender, self._stage, name, shapes)


def mailboxes(
    stages: Sequence[StageDevices],
    messages: Sequence[Mapping[str, tuple[int, Tree]]],
    links: StepLinks | None,
) -> list[Any]:
    """Returns the mailboxes of all stages for one step.

    Args:
      stages: the devices of each stage.
      messages: sender and shapes of each kind of message to a stage, on one device.
      links: the links to other processes; None if this process has all stages.
    """
    if links is None:
        return [Mailbox(devices) for devices in stages]
    return [
        LinkedMailbox(stages, stage, links, messages[stage])
        if devices.is_local
        else RemoteSender(links, stage)
        for stage, devices in enumerate(stages)
    ]
