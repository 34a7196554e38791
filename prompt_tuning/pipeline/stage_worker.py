"""Runs the operations of one stage for one step, in its thread."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from prompt_tuning.core.recomputation import PINNED
from prompt_tuning.pipeline.schedules import Kind
from prompt_tuning.pipeline.stage_programs import Program, StagePrograms
from prompt_tuning.pipeline.transport import Mailbox

Tree = Any
LossGradients = Mapping[int, Any]


@dataclasses.dataclass
class StageWork:
    """The inputs of one stage in one step, and the sums it adds to.

    Attributes:
      weights: its trained parameters.
      frozen: its frozen parameters.
      others: other arguments of each micro-batch, by index.
      prefix_others: other arguments of the prefix.
      loss_gradients: gradients at the outputs of each micro-batch; empty except on the
        last stage.
      zeros: returns the initial sums of the gradients of the trained parameters, and of
        the prefix that the stage computes.
    """

    weights: Mapping[str, Any]
    frozen: Mapping[str, Any]
    others: Sequence[Mapping[int, Any]]
    prefix_others: Mapping[int, Any]
    loss_gradients: LossGradients
    zeros: Callable[[], tuple[dict[str, Any], dict[int, Any]]]


@dataclasses.dataclass
class HeldMemory:
    """Bytes on one device that all chunks of a stage hold.

    Attributes:
      held: bytes kept for a backward pass, or held for p2.
      peak: most bytes held between operations.
    """

    held: int = 0
    peak: int = 0


class StageWorker:
    """Runs the operations of one stage, or of one of its chunks, in order.

    Its arrays are placed on the stage when the first operation runs, in the thread that
    runs it, so other stages need not wait for them.

    Attributes:
      work: what the stage reads; after the first operation.
      outputs: outputs of each micro-batch, on the last stage.
      total: sum of the gradients of the trained parameters.
      memory: what is held on one device, including the stage's other chunks.
      joined_gradient: p2 for many micro-batches; None to compute each separately.
    """

    def __init__(
        self,
        stage: int,
        programs: StagePrograms,
        prefix_programs: StagePrograms | None,
        place: Callable[[], StageWork],
        neighbors: tuple[Mailbox | None, Mailbox, Mailbox | None],
        memory: HeldMemory | None = None,
    ):
        """Sets the stage up.

        Args:
          stage: index of the stage, which traces show.
          programs: programs of a micro-batch.
          prefix_programs: programs of the prefix; None without one.
          place: places what the stage reads on its devices.
          neighbors: mailboxes of the previous, this and the next stage or chunk.
          memory: counts what the stage holds; a new one if None.
        """
        self._stage = stage
        self._programs, self._prefix_programs = programs, prefix_programs
        self._place: Callable[[], StageWork] | None = place
        self.work: StageWork
        self.total: dict[str, Any] = {}
        self._before, self._own, self._after = neighbors
        self._prefix: dict[int, Any] = {}
        self._prefix_kept: list[Any] = []
        self._prefix_total: dict[int, Any] = {}
        self._kept: dict[int, Any] = {}
        self._held: dict[int, Any] = {}
        self.outputs: dict[int, Any] = {}
        self.memory = memory or HeldMemory()
        self.joined_gradient: Program | None = None

    def run(self, kind: str, index: int) -> None:
        """Runs one operation of a micro-batch, or of the prefix."""
        if self._place is not None:
            with jax.profiler.TraceAnnotation("place", stage=self._stage):
                self.work, self._place = self._place(), None
                self.total, self._prefix_total = self.work.zeros()
        name = kind.replace("_", " ")
        with jax.profiler.TraceAnnotation(name, stage=self._stage, index=index):
            getattr(self, f"_run_{kind}")(index)
        self.memory.peak = max(self.memory.peak, self.memory.held)

    def wait(self) -> None:
        """Waits until everything is computed."""
        jax.block_until_ready((self.total, self.outputs))

    def stop(self) -> None:
        """Ends the stage's waiting, because another stage failed."""
        self._own.stop()

    def _known(self, index: int) -> tuple[Any, Any, Any, Any]:
        work = self.work
        return work.weights, work.frozen, work.others[index], self._read_prefix()

    def _read_prefix(self) -> dict[int, Any]:
        """Returns what the stage's micro-batches read of the prefix."""
        return {i: self._prefix[i] for i in self._prefix_total}

    def _carried(self, name: Any) -> Tree:
        return [] if self._before is None else self._own.receive(name)

    def _run_prefix_forward(self, index: int) -> None:
        programs, work = self._prefix_programs, self.work
        assert programs is not None
        inputs = {"carried": self._carried(("prefix", index)), "prefix": {}}
        outputs, self._prefix_kept = programs.forward(
            work.weights, work.frozen, inputs, work.prefix_others
        )
        if self._after is not None:
            self._after.send(("prefix", index), outputs["carried"])
        self._prefix = outputs["outputs"]

    def _run_forward(self, index: int) -> None:
        weights, frozen, others, prefix = self._known(index)
        carried = self._carried(("hidden", index))
        inputs = {"carried": carried, "prefix": prefix}
        outputs, kept = self._programs.forward(weights, frozen, inputs, others)
        self._keep(index, kept)
        if self._after is not None:
            self._after.send(("hidden", index), outputs["carried"])
        else:
            self.outputs[index] = outputs["outputs"]

    def _keep(self, index: int, kept: Tree) -> None:
        self._kept[index] = kept
        self.memory.held += self._size(Kind.FORWARD, kept)

    def _release(self, index: int) -> Tree:
        kept = self._kept.pop(index)
        self.memory.held -= self._size(Kind.FORWARD, kept)
        return kept

    def _postpone(self, index: int, held: tuple[Tree, Tree]) -> None:
        self._held[index] = held
        self.memory.held += self._size(Kind.INPUT_GRADIENT, held)

    def _resume(self, index: int) -> tuple[Tree, Tree]:
        held = self._held.pop(index)
        self.memory.held -= self._size(Kind.INPUT_GRADIENT, held)
        return held

    def _size(self, kind: str, arrays: Tree) -> int:
        """Returns the bytes that an operation left on each device.

        They are the same for all micro-batches.
        """
        sizes = self._programs.left_bytes
        if kind not in sizes:
            same = jax.tree.leaves(self.work.loss_gradients)
            sizes[kind] = _bytes_per_device(arrays, same)
        return sizes[kind]

    def _gradients(self, index: int, name: str = "gradient") -> Tree:
        if self._after is None:
            return {"carried": [], "outputs": self.work.loss_gradients}
        return {"carried": self._own.receive((name, index)), "outputs": {}}

    def _send_back(self, name: Any, gradients: Tree) -> None:
        if self._before is not None:
            self._before.send(name, gradients)

    def _run_input_gradient(self, index: int) -> None:
        gradients, kept = self._gradients(index), self._release(index)
        carried, self._prefix_total, handed = self._programs.input_gradient(
            *self._known(index), kept, gradients, self._prefix_total
        )
        self._send_back(("gradient", index), carried)
        self._postpone(index, (self._programs.cut.held(kept, gradients), handed))

    def _run_weight_gradient(self, index: int) -> None:
        held, handed = self._resume(index)
        if self.total:
            self.total = self._programs.weight_gradient(
                *self._known(index), held, handed, self.total
            )

    def _run_joined_gradient(self, _index: int) -> None:
        assert self.joined_gradient is not None
        work, waiting = self.work, sorted(self._held)
        held, handed = zip(*(self._resume(i) for i in waiting), strict=True)
        if self.total:
            self.total = self.joined_gradient(
                work.weights,
                work.frozen,
                [work.others[i] for i in waiting],
                self._read_prefix(),
                list(held),
                list(handed),
                self.total,
            )

    def _run_backward(self, index: int) -> None:
        gradients, kept = self._gradients(index), self._release(index)
        carried, self._prefix_total, self.total = self._programs.backward(
            *self._known(index), kept, gradients, self._prefix_total, self.total
        )
        self._send_back(("gradient", index), carried)

    def _run_prefix_backward(self, index: int) -> None:
        programs, work = self._prefix_programs, self.work
        assert programs is not None
        # A part of the prefix that no micro-batch reads has a gradient of zero.
        outputs = {
            i: self._prefix_total[i].astype(x.dtype)
            if i in self._prefix_total
            else jax.numpy.zeros_like(x)
            for i, x in self._prefix.items()
        }
        carried = []
        if self._after is not None:
            carried = self._own.receive(("prefix gradient", index))
        gradients = {"carried": carried, "outputs": outputs}
        carried, _, self.total = programs.backward(
            work.weights,
            work.frozen,
            work.prefix_others,
            {},
            self._prefix_kept,
            gradients,
            {},
            self.total,
        )
        self._prefix_kept = []
        self._send_back(("prefix gradient", index), carried)


def _bytes_per_device(tree: Tree, without: Sequence[Any]) -> int:
    """Returns the size of a tree on one device, without some and offloaded arrays."""
    left_out = set(map(id, without))
    arrays = [
        x
        for x in jax.tree.leaves(tree)
        if id(x) not in left_out and x.sharding.memory_kind != PINNED
    ]
    return sum(x.addressable_shards[0].data.nbytes for x in arrays)
