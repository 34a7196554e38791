"""Measures the decoding engine: adapters by row, shared texts, rows that join.

    python -m scripts.bench.decoding [adapters] [shared] [continuous]

Both sides of each measure take turns in one process; the ratios are medians. The model
is a random Llama of 8 layers, width 512.
"""

import argparse
import dataclasses
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from prompt_tuning.core.parameters import Parameters
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.pretrained.source import Pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.projection_adapters import LoRA
from prompt_tuning.prompts.soft import SoftPrompt
from scripts.bench.llama import write_llama

VOCABULARY = 4096
PROMPT = 100
CONTEXT = 1024
TURNS, STEPS = 5, 4

Opened = tuple[PromptedModel, Parameters]


def main() -> None:
    """Prints the requested measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measures", nargs="*", choices=[*MEASURES, []])
    chosen = parser.parse_args().measures or list(MEASURES)
    with tempfile.TemporaryDirectory() as folder:
        write_llama(
            Path(folder),
            vocabulary_size=VOCABULARY,
            width=512,
            feed_forward_width=1376,
            layers=8,
            heads=8,
            key_value_heads=8,
            head_width=64,
            maximum_positions=4096,
        )
        open_model = functools.partial(_open, Pretrained(checkpoint=folder))
        for name in chosen:
            print(f"{name}: {MEASURES[name](open_model)}", flush=True)


def _open(source: Pretrained, tuning: Tuning | None = None) -> Opened:
    model = open_pretrained(source, tuning, key=jax.random.key(0))
    return model, model.read_parameters()


def _random_rows(count: int, length: int) -> list[list[int]]:
    random = np.random.default_rng(length)
    return random.integers(0, VOCABULARY, (count, length)).tolist()


def _start(engine: DecodingEngine, requests: Sequence[Request]) -> None:
    """Submits rows and steps until all of them generate."""
    handles = [engine.submit(request) for request in requests]
    started: set[int] = set()
    while len(started) < len(handles):
        started |= {piece.handle.number for piece in engine.step()}
    engine.step()


def _seconds_of_steps(engine: DecodingEngine) -> float:
    start = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    return (time.perf_counter() - start) / STEPS


def _ratios(engines: Sequence[DecodingEngine]) -> list[float]:
    """Returns the median ratio of each engine's step to the first one's."""
    turns = [[_seconds_of_steps(engine) for engine in engines] for _ in range(TURNS)]
    return [
        statistics.median(turn[i] / turn[0] for turn in turns)
        for i in range(1, len(engines))
    ]


def _endless(**fields) -> Request:
    tokens = 4 + (TURNS + 4) * STEPS
    return Request(sampling=Sampling(new_tokens=tokens, ignores_end=True), **fields)


def adapters(open_model: Callable[..., Opened]) -> str:
    """Steps of 32 rows of 8 adapters against the model's own at the same positions."""
    rows, long = _random_rows(32, 20), _random_rows(32, 20 + PROMPT)
    base, lora = (
        DecodingEngine(*open_model(), slots=32, length=192, chunk=32) for _ in range(2)
    )
    soft = DecodingEngine(*open_model(), slots=32, length=96, chunk=32)
    prompt = Tuning(prompt=functools.partial(SoftPrompt, length=PROMPT))
    every = Tuning(adapters=(LoRA(regexes=("decoder/.*",), rank=8),))
    for i in range(8):
        soft.add_adapter(str(i), *open_model(prompt))
        lora.add_adapter(str(i), *open_model(every))
    _start(base, [_endless(ids=row) for row in long])
    for engine, texts in ((soft, rows), (lora, long)):
        requests = [
            _endless(ids=row, adapter=str(i % 8)) for i, row in enumerate(texts)
        ]
        _start(engine, requests)
    of_soft, of_lora = _ratios([base, soft, lora])
    return f"soft prompts {of_soft:.2f}x the base model's step, LoRA {of_lora:.2f}x"


def shared(open_model: Callable[..., Opened]) -> str:
    """64 rows over one context against 64 rows that each hold it."""
    model, parameters = open_model()
    rows, (context,) = _random_rows(64, 16), _random_rows(1, CONTEXT)
    once = DecodingEngine(model, parameters, slots=64, length=128, chunk=32)
    each = DecodingEngine(model, parameters, slots=64, length=CONTEXT + 128, chunk=128)
    _start(once, [_endless(ids=row, shared_ids=context) for row in rows])
    _start(each, [_endless(ids=[*context, *row]) for row in rows])
    (ratio,) = _ratios([once, each])
    return f"{ratio:.2f}x the tokens/s, 1/{len(rows)} of the context's keys and values"


def continuous(open_model: Callable[..., Opened]) -> str:
    """Requests of 8 to 256 new tokens against fixed batches of the same width."""
    engine = DecodingEngine(*open_model(), slots=16, length=288, chunk=32)
    random = np.random.default_rng(0)
    requests = [
        dataclasses.replace(
            _endless(ids=row),
            sampling=Sampling(new_tokens=int(count), ignores_end=True),
        )
        for row, count in zip(
            _random_rows(64, 16), random.integers(8, 257, 64), strict=True
        )
    ]
    engine.compile()
    start = time.perf_counter()
    engine.run(requests)
    joined = time.perf_counter() - start
    start = time.perf_counter()
    for first in range(0, len(requests), 16):
        engine.run(requests[first : first + 16])
    return f"{(time.perf_counter() - start) / joined:.2f}x the tokens/s"


MEASURES = {"adapters": adapters, "shared": shared, "continuous": continuous}

if __name__ == "__main__":
    main()
