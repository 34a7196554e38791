"""Measures memory and time of a step with each rematerialization policy.

    python -m scripts.bench.remat            # all cases
    python -m scripts.bench.remat decoder    # or some

The models have 24 blocks with random weights. Memory is the compiler's count without
the step's arguments. Time is the median of steps that the policies run in turn, so that
all see the same load of the machine. Fails if "nothing" needs more than 0.2 times the
memory of "none", or more than 1.6 times its time.
"""

import argparse
import dataclasses
import statistics
import sys
import time
from typing import Any, cast

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from prompt_tuning.core import parameter_groups
from prompt_tuning.core.batch import Batch
from prompt_tuning.core.model_config import ModelConfig
from prompt_tuning.core.parameters import split
from prompt_tuning.core.rematerialization import Rematerialization
from prompt_tuning.core.t5_config import t5_config
from prompt_tuning.models.build import build_model
from prompt_tuning.prompts.initializers import Vocabulary
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.training.state import TrainState
from prompt_tuning.training.step import compile_step

LAYERS, WIDTH, VOCABULARY = 24, 256, 1000
ROWS, LENGTH, LEARNED, PROMPT = 8, 128, 32, 20
REPEATS = 7
MOST_MEMORY, MOST_TIME = 0.2, 1.6

DECODER = ModelConfig(
    family="llama",
    architecture="decoder_only",
    vocabulary_size=VOCABULARY,
    width=WIDTH,
    feed_forward_width=704,
    layers=LAYERS,
    heads=8,
    key_value_heads=8,
    head_width=32,
    norm="rms",
    positions="rotary",
    activation="silu",
    gated=True,
    tied_head=True,
)
T5 = t5_config(
    vocabulary_size=VOCABULARY,
    width=WIDTH,
    feed_forward_width=704,
    layers=LAYERS,
    heads=8,
    head_width=32,
)
CASES = {"decoder": DECODER, "t5": T5}
POLICIES = {
    "none": Rematerialization(),
    "dots": Rematerialization(policy="dots"),
    "attention": Rematerialization(policy="attention"),
    "nothing": Rematerialization(policy="nothing"),
    "nothing, without 2 + 2": Rematerialization(
        policy="nothing", skip_first=2, skip_last=2
    ),
    "none, offload": Rematerialization(offload=True),
    "nothing, offload": Rematerialization(policy="nothing", offload=True),
}


def make_batch(config: ModelConfig) -> Batch:
    """Builds rows of random tokens, of which the last are learned."""
    random = np.random.default_rng(0)
    tokens = random.integers(3, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    read = np.full(ROWS, LENGTH, np.int32)
    targets, first = tokens, LENGTH - LEARNED
    if config.architecture == "encoder_decoder":
        targets, first = tokens[:, :LEARNED], 0
    positions = np.tile(np.arange(first, first + LEARNED, dtype=np.int32), (ROWS, 1))
    return Batch(
        tokens=tokens,
        lengths=read,
        targets=targets,
        loss_positions=positions,
        loss_weights=np.ones((ROWS, LEARNED), np.float32),
        prefix_lengths=np.full(ROWS, first, np.int32),
    )


class Trial:
    """One policy's step, compiled.

    Attributes:
      activations: bytes of memory without the step's arguments.
      seconds: time of each step.
    """

    def __init__(self, config: ModelConfig, how: Rematerialization):
        config = dataclasses.replace(config, rematerialization=how)
        vocabulary = Vocabulary(np.zeros((VOCABULARY, WIDTH), np.float32))

        def build(key: jax.Array) -> Any:
            prompt = SoftPrompt(key, vocabulary, length=PROMPT)
            return split(build_model(key, config, prompt))

        graph, parameters = build(jax.random.key(0))
        groups = [
            parameter_groups.ParameterGroup(
                (r".*/prompt/.*",), parameter_groups.adafactor(0.3)
            )
        ]
        labels = parameter_groups.label(parameters, groups)
        trained, self._frozen = parameter_groups.partition(parameters, labels)
        optimizer = parameter_groups.group_optimizer(groups, labels)
        self._state = TrainState.create(trained, optimizer, jax.random.key(1))
        self._batch = make_batch(config)
        self._step = compile_step(graph, optimizer, dropout=False)
        compiled = self._step.lower(self._state, self._frozen, self._batch).compile()
        memory = cast(Any, compiled.memory_analysis())
        self.activations: int = memory.temp_size_in_bytes
        self.seconds: list[float] = []

    def take_step(self) -> None:
        """Runs a step and records its time."""
        begun = time.perf_counter()
        self._state, metrics = self._step(self._state, self._frozen, self._batch)
        jax.block_until_ready((self._state, metrics))
        self.seconds.append(time.perf_counter() - begun)


def measure(name: str, console: Console) -> bool:
    """Prints the table of a case; returns whether it is within the limits."""
    trials = {policy: Trial(CASES[name], how) for policy, how in POLICIES.items()}
    for _ in range(1 + REPEATS):
        for trial in trials.values():
            trial.take_step()
    reference = trials["none"].activations
    alone = statistics.median(trials["none"].seconds[1:])
    table = Table("policy", title=f"{name}, {LAYERS} blocks")
    for column in ("activations", "of none", "step", "of none"):
        table.add_column(column, justify="right")
    shares = {}
    for policy, trial in trials.items():
        taken = statistics.median(trial.seconds[1:])
        shares[policy] = (trial.activations / reference, taken / alone)
        table.add_row(
            policy,
            f"{trial.activations / 1e6:,.1f} MB",
            f"{shares[policy][0]:.3f}",
            f"{1000 * taken:,.0f} ms",
            f"{shares[policy][1]:.2f}",
        )
    console.print(table)
    memory, duration = shares["nothing"]
    return memory <= MOST_MEMORY and duration <= MOST_TIME


def main() -> int:
    """Runs the requested cases; returns 1 if one exceeds its limits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    cases = parser.parse_args().cases or list(CASES)
    unknown = sorted(set(cases) - set(CASES))
    if unknown:
        parser.error(f"no case {unknown[0]!r}; there are {', '.join(CASES)}")
    console = Console()
    met = [measure(name, console) for name in cases]
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
