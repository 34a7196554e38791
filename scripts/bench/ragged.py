"""Real text of ragged length: our batches against random ones padded to their longest.

    python -m scripts.bench.ragged MODEL TEXT [TOKENIZER]   # answers `workers`

The same model and the same step; only the batches differ. Both ways without padding
that the library has are measured: buckets by token budget, and packing.
"""

import dataclasses
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from prompt_tuning.config.run import DataSource
from prompt_tuning.data.batching.batch_plan import FILLING, PlannedBatch
from prompt_tuning.data.batching.batches import build_batch
from prompt_tuning.data.batching.buckets import round_up
from prompt_tuning.data.batching.plan_batches import plan_batches
from prompt_tuning.data.examples.example_loading import load_examples
from prompt_tuning.data.examples.example_table import Examples
from prompt_tuning.data.text.tokenizers import load_tokenizer
from scripts.bench.cases import LLAMA
from scripts.bench.llama import open_prompted, write_llama
from scripts.bench.ours import prepare
from scripts.bench.workers import Answer, serve

ROWS = 16
RANDOM_MODEL = "llama"
SMALL_PROMPT = 20


def main() -> None:
    """Serves."""
    model, text, *tokenizer = sys.argv[1:]
    ragged = Ragged(model, text, tokenizer[0] if tokenizer else None)
    serve({"measure": ragged.measure})


class Ragged:
    """One model, one text, and the ways to make batches of it.

    Attributes:
      model: with a prompt.
      prepared: what trains it.
      examples: the text's.
    """

    def __init__(self, model: str, text: str, tokenizer: str | None):
        """Opens the model and the text.

        Args:
          model: a folder, or "llama" for a random one of the Llama case.
          text: a jsonl file with questions.
          tokenizer: a folder; the model's if None.
        """
        with tempfile.TemporaryDirectory() as folder:
            prompt = SMALL_PROMPT
            if model == RANDOM_MODEL:
                assert tokenizer is not None
                model, prompt = folder, LLAMA.prompt
                write_llama(Path(folder), load_tokenizer(tokenizer).vocabulary_size)
            self.model = open_prompted(Path(model), prompt, tokenizer)
            parameters = self.model.read_parameters()
        self.prepared = prepare(self.model.graph, parameters)
        self._source = DataSource(
            files=text,
            prompt_key=None,
            completion_key="question",
            add_eos=False,
            on_too_long="skip",
        )
        self.examples = load_examples(self._source, self.model.interface)

    def measure(self, rounds: int) -> Answer:
        """Times one batch of each way in turn; programs are compiled before.

        Our batches have as many tokens as the random ones, padding included.

        Returns:
          by way: `tokens_per_second` of real tokens; of a whole epoch the
          `real_share` of all tokens, the `batches` and the `programs` to compile.
        """
        padded = random_batches(self.examples)
        sizes = [batch.rows.size * batch.input_length for batch in padded]
        source = dataclasses.replace(self._source, batch_tokens=int(np.mean(sizes)))
        sources = {
            "buckets": source,
            "packing": dataclasses.replace(source, packing=True),
        }
        ways = {"random": Way(self, padded)}
        for name, source in sources.items():
            plan = plan_batches(
                source, self.model.interface, self.examples, shuffle=True
            )
            ways[name] = Way(self, list(plan.one_pass()))
        for way in ways.values():
            way.compile(rounds)
        for turn in range(rounds):
            for way in ways.values():
                way.step(turn)
        return {name: way.answer() for name, way in ways.items()}


class Way:
    """One way to make batches: its order, and what its steps took."""

    def __init__(self, ragged: Ragged, order: Sequence[PlannedBatch]):
        self._examples = ragged.examples
        self._pad_id = ragged.model.config.pad_id
        self._order = order
        self._frozen, self._state = ragged.prepared.frozen, ragged.prepared.start()
        self._step = ragged.prepared.compile_step()
        self._seconds: list[float] = []
        self._tokens: list[int] = []

    def compile(self, rounds: int) -> None:
        """Runs every shape of the first batches once."""
        shapes = {shape_of(planned): planned for planned in self._order[:rounds]}
        for planned in shapes.values():
            self._run(planned)

    def step(self, turn: int) -> None:
        """Times a batch; after the last comes the first again."""
        planned = self._order[turn % len(self._order)]
        self._seconds.append(self._run(planned))
        self._tokens.append(real_tokens(self._examples, planned))

    def _run(self, planned: PlannedBatch) -> float:
        batch = build_batch(self._examples, planned, self._pad_id)
        started = time.perf_counter()
        self._state, metrics = self._step(self._state, self._frozen, batch)
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - started

    def answer(self) -> Answer:
        """What was measured, and what an epoch would be."""
        real = sum(real_tokens(self._examples, planned) for planned in self._order)
        room = sum(len(planned.rows) * planned.input_length for planned in self._order)
        return {
            "tokens_per_second": sum(self._tokens) / sum(self._seconds),
            "real_share": real / room,
            "batches": len(self._order),
            "programs": len({shape_of(planned) for planned in self._order}),
        }


def shape_of(planned: PlannedBatch) -> tuple[int, ...]:
    """What a step is compiled for."""
    shape = planned.input_length, planned.target_length, planned.positions
    return (len(planned.rows), *shape)


def real_tokens(examples: Examples, planned: PlannedBatch) -> int:
    """Tokens of a batch, padding not counted."""
    rows = planned.rows[planned.rows != FILLING]
    return int(examples.input_lengths[rows].sum())


def random_batches(examples: Examples) -> list[PlannedBatch]:
    """Random rows by sixteen, padded to the longest of them, rounded up to eight.

    The rows that do not fill a batch at the end are left out.
    """
    order = np.random.default_rng(0).permutation(len(examples))
    groups = order[: len(order) // ROWS * ROWS].reshape(-1, ROWS)
    planned = []
    for rows in groups:
        length = round_up(int(examples.input_lengths[rows].max()))
        positions = round_up(int(examples.weight_counts[rows].max()))
        positions = min(positions, length)
        planned.append(PlannedBatch(rows, length, length, positions))
    return planned


if __name__ == "__main__":
    main()
