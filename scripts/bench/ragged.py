"""Compares our batches of real text with random batches padded to the longest row.

    python -m scripts.bench.ragged MODEL TEXT [TOKENIZER]   # answers `workers`

The model and the step are the same; only the batches differ. Both of the library's ways
to reduce padding are measured: buckets with a token budget, and packing.
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
    """Answers questions until standard input ends."""
    model, text, *tokenizer = sys.argv[1:]
    ragged = Ragged(model, text, tokenizer[0] if tokenizer else None)
    serve({"measure": ragged.measure})


class Ragged:
    """One model, one text, and the ways to batch the text.

    Attributes:
      model: model with a prompt.
      prepared: the model's parameters and optimizer.
      examples: examples of the text.
    """

    def __init__(self, model: str, text: str, tokenizer: str | None):
        """Opens the model and the text.

        Args:
          model: model folder, or "llama" for a random model of the Llama case.
          text: JSONL file with questions.
          tokenizer: tokenizer folder; None for the model's tokenizer.
        """
        with tempfile.TemporaryDirectory() as folder:
            prompt = SMALL_PROMPT
            if model == RANDOM_MODEL:
                assert tokenizer is not None
                model, prompt = folder, LLAMA.prompt
                size = load_tokenizer(tokenizer).vocabulary_size
                write_llama(Path(folder), vocabulary_size=size)
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
        """Times batches of each way in turn, after compiling all programs.

        Our batches have as many tokens as the random ones, including padding.

        Returns:
          by way: real `tokens_per_second`; for a whole epoch, the fraction of real
          tokens (`real_share`), the `batches` and the `programs` to compile.
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
    """One way to batch the text, and the times of its steps."""

    def __init__(self, ragged: Ragged, order: Sequence[PlannedBatch]):
        self._examples = ragged.examples
        self._pad_id = ragged.model.config.pad_id
        self._order = order
        self._frozen, self._state = ragged.prepared.frozen, ragged.prepared.start()
        self._step = ragged.prepared.compile_step()
        self._seconds: list[float] = []
        self._tokens: list[int] = []

    def compile(self, rounds: int) -> None:
        """Runs one batch of every shape among the first batches."""
        shapes = {shape_of(planned): planned for planned in self._order[:rounds]}
        for planned in shapes.values():
            self._run(planned)

    def step(self, turn: int) -> None:
        """Times a batch; after the last it starts again from the first."""
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
        """Returns the measured rate, and the properties of an epoch."""
        real = sum(real_tokens(self._examples, planned) for planned in self._order)
        room = sum(len(planned.rows) * planned.input_length for planned in self._order)
        return {
            "tokens_per_second": sum(self._tokens) / sum(self._seconds),
            "real_share": real / room,
            "batches": len(self._order),
            "programs": len({shape_of(planned) for planned in self._order}),
        }


def shape_of(planned: PlannedBatch) -> tuple[int, ...]:
    """Returns the shape for which a step is compiled."""
    shape = planned.input_length, planned.target_length, planned.positions
    return (len(planned.rows), *shape)


def real_tokens(examples: Examples, planned: PlannedBatch) -> int:
    """Counts the tokens of a batch without padding."""
    rows = planned.rows[planned.rows != FILLING]
    return int(examples.input_lengths[rows].sum())


def random_batches(examples: Examples) -> list[PlannedBatch]:
    """Batches random rows by 16, padded to the longest row, rounded up to 8.

    The last rows, which do not fill a batch, are dropped.
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
