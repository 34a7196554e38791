"""Measures the decoding engine: adapters by row, shared texts, rows that join.

    python -m scripts.bench.decoding [MEASURE ...] [--scale N]

Both sides of each measure take turns in one process, and the ratios are medians; each
side of `continuous` runs once. The model is a random Llama of 8 layers, width 512;
`speculation` continues texts by the bundled model, and `stores` is for a random model
of the shape of GPT-2 small. `--scale` divides the numbers of
rows and requests, to try a measure.
"""

import argparse
import dataclasses
import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import prompt_tuning as pt
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.quantization.stores import PARAMETER_DTYPES
from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.prompt_prefixes import prompt_prefixes, write_prefixes
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.pretrained.prompted_model import PromptedModel, open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.low_rank_adapters import LoRA
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.settings.pretrained import Pretrained
from scripts.bench.llama import write_llama
from scripts.bench.machine import processor
from scripts.skills import prompt_text, words

VOCABULARY = 4096
PROMPT = 100
CONTEXT = 1024

Opened = tuple[PromptedModel, Parameters]
OpenModel = Callable[..., Opened]


def main() -> None:
    """Prints the requested measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measures", nargs="*", choices=[*MEASURES, []])
    parser.add_argument("--scale", type=int, default=1, help="divides the sizes (1)")
    options = parser.parse_args()
    print(f"{processor()}, jax {jax.__version__}", flush=True)
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
        for name in options.measures or MEASURES:
            start = time.perf_counter()
            print(f"{name}: {MEASURES[name](open_model, options.scale)}")
            print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)


def _open(source: Pretrained, tuning: Tuning | None = None) -> Opened:
    model = open_pretrained(source, tuning, key=jax.random.key(0))
    return model, model.read_parameters()


def _random_rows(count: int, length: int) -> list[list[int]]:
    random = np.random.default_rng(length)
    return random.integers(0, VOCABULARY, (count, length)).tolist()


def _endless(new_tokens: int, **fields) -> Request:
    sampling = Sampling(new_tokens=new_tokens, ignores_end=True)
    return Request(sampling=sampling, **fields)


def _start(engine: DecodingEngine, requests: Sequence[Request]) -> None:
    """Submits rows and steps until all of them generate."""
    handles = [engine.submit(request) for request in requests]
    started: set[int] = set()
    while len(started) < len(handles):
        started |= {piece.handle.number for piece in engine.step()}
    engine.step()
    unfinished = sum(not handle.finished for handle in handles)
    assert unfinished == len(handles), f"only {unfinished} rows remain"


@dataclasses.dataclass(frozen=True)
class Turns:
    """Steps of several engines in turns.

    Attributes:
      turns: number of turns.
      steps: number of steps of each engine in a turn.
      clock: measures the time.
    """

    turns: int
    steps: int
    clock: Callable[[], float] = time.perf_counter

    def seconds(self, engines: Sequence[DecodingEngine]) -> np.ndarray:
        """Returns the mean seconds of a step, `[turn, engine]`."""
        return np.array(
            [[self._turn(engine) for engine in engines] for _ in range(self.turns)]
        )

    def _turn(self, engine: DecodingEngine) -> float:
        start = self.clock()
        pieces = [engine.step() for _ in range(self.steps)]
        # A step returns before its last program has run.
        jax.block_until_ready(jax.live_arrays())
        seconds = self.clock() - start
        assert all(len(each) == engine.metrics().active for each in pieces)
        return seconds / self.steps


def _milliseconds(seconds: np.ndarray) -> str:
    return ", ".join(f"{x:.1f}" for x in 1000 * np.median(seconds, axis=0)) + " ms"


def _redraw(parameters: Parameters, seed: int) -> Parameters:
    """Returns the parameters with other random numbers in prompts and adapters."""
    random = np.random.default_rng(seed)
    return {
        path: jnp.asarray(random.normal(0, 0.02, leaf.shape), leaf.dtype)
        if "/prompt/" in path or "/adapters/" in path
        else leaf
        for path, leaf in parameters.items()
    }


def adapters(open_model: OpenModel, scale: int) -> str:
    """Steps of 32 rows of 8 adapters against the model's own at the same positions."""
    count = max(32 // scale, 8)
    rows, long = _random_rows(count, 20), _random_rows(count, 20 + PROMPT)
    base, lora = (
        DecodingEngine(*open_model(), slots=count, length=192, chunk=64)
        for _ in range(2)
    )
    soft = DecodingEngine(*open_model(), slots=count, length=96, chunk=32)
    prompt = Tuning(prompt=functools.partial(SoftPrompt, length=PROMPT))
    every = Tuning(adapters=(LoRA(regexes=("decoder/.*",), rank=8),))
    for engine, tuning in ((soft, prompt), (lora, every)):
        model, parameters = open_model(tuning)
        for i in range(8):
            engine.add_adapter(str(i), model, _redraw(parameters, i))
    _start(base, [_endless(72, ids=row) for row in long])
    for engine, texts in ((soft, rows), (lora, long)):
        requests = [
            _endless(72, ids=row, adapter=str(i % 8)) for i, row in enumerate(texts)
        ]
        _start(engine, requests)
    seconds = Turns(9, 4).seconds([base, soft, lora])
    of_soft, of_lora = np.median(seconds[:, 1:] / seconds[:, :1], axis=0)
    return (
        f"{count} rows, steps of {_milliseconds(seconds)}: soft prompts {of_soft:.2f}x "
        f"the model's step, LoRA {of_lora:.2f}x"
    )


def shared(open_model: OpenModel, scale: int) -> str:
    """64 rows over one context against 64 rows that each hold it."""
    model, parameters = open_model()
    count, text, new = 64 // scale, 16, 16
    rows, (context,) = _random_rows(count, text), _random_rows(1, CONTEXT)
    once = DecodingEngine(model, parameters, slots=count, length=text + new, chunk=text)
    whole = CONTEXT + text + new
    each = DecodingEngine(model, parameters, slots=count, length=whole, chunk=whole)
    _start(once, [_endless(new, ids=row, shared_ids=context) for row in rows])
    _start(each, [_endless(new, ids=[*context, *row]) for row in rows])
    seconds = Turns(6, 2).seconds([once, each])
    faster = np.median(seconds[:, 1] / seconds[:, 0])
    sizes = [engine.metrics().key_value_bytes for engine in (once, each)]
    megabytes = " and ".join(f"{size / 2**20:.0f}" for size in sizes)
    return (
        f"{count} rows, steps of {_milliseconds(seconds)}: {faster:.2f}x the tokens/s; "
        f"{megabytes} MiB of keys and values, 1/{sizes[1] / sizes[0]:.1f}"
    )


def continuous(open_model: OpenModel, scale: int) -> str:
    """Requests of 8 to 256 new tokens against fixed batches of the same width."""
    engine = DecodingEngine(*open_model(), slots=16, length=288, chunk=32)
    random, count = np.random.default_rng(0), 256 // scale
    requests = [
        _endless(int(new), ids=row)
        for row, new in zip(
            _random_rows(count, 16), random.integers(8, 257, count), strict=True
        )
    ]
    engine.compile()
    start = time.perf_counter()
    # All of them at once, because no others join the last rows of a run.
    engine.run(requests)
    middle = time.perf_counter()
    for batch in range(0, count, 16):
        engine.run(requests[batch : batch + 16])
    end = time.perf_counter()
    tokens = sum(request.sampling.new_tokens for request in requests)
    joined, fixed = tokens / (middle - start), tokens / (end - middle)
    return (
        f"{count} requests, {joined:,.0f} and {fixed:,.0f} tokens/s: "
        f"{joined / fixed:.2f}x"
    )


def speculation(open_model: OpenModel, scale: int) -> str:
    """Steps with and without guesses, where texts repeat their context.

    The bundled model copies a word of each text, one token a letter.
    """
    del open_model
    model = pt.load("bundled:skills-decoder")
    tokenizer = model.prompted.needed_tokenizer()
    chosen = words(np.random.default_rng(0), 256 // scale, held_out=True)
    rows = [tokenizer.encode(prompt_text("copy", word)) for word in chosen]
    opened = model.prompted, model.parameters
    (plain, ids), (guessing, same) = (_count_steps(opened, rows, k) for k in (0, 7))
    assert ids == same, "guesses changed the tokens"
    return (
        f"{len(rows)} words copied in {plain:,} and {guessing:,} steps: "
        f"{plain / guessing:.2f}x fewer, same ids"
    )


def _count_steps(
    opened: Opened, rows: Sequence[Sequence[int]], guesses: int
) -> tuple[int, list[tuple[int, ...]]]:
    """Continues rows; returns the number of steps and the new ids."""
    engine = DecodingEngine(*opened, slots=8, length=32, chunk=32, guesses=guesses)
    sampling = Sampling(new_tokens=12)
    handles = [engine.submit(Request(ids=row, sampling=sampling)) for row in rows]
    steps = 0
    while not engine.idle:
        engine.step()
        steps += 1
    return steps, [handle.completions[0].ids for handle in handles]


def loading(open_model: OpenModel, scale: int) -> str:
    """Keys and values of a prompt: computed when loaded, or read from their file."""
    prompt = Tuning(prompt=functools.partial(SoftPrompt, length=PROMPT // scale))
    model, parameters = open_model(prompt)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        start = time.perf_counter()
        prompt_prefixes(model, parameters)
        first = time.perf_counter() - start
        write_prefixes(path, model, parameters)
        seconds = []
        for _ in range(5):
            turn = []
            for place in (None, path):
                start = time.perf_counter()
                jax.block_until_ready(prompt_prefixes(model, parameters, place))
                turn.append(time.perf_counter() - start)
            seconds.append(turn)
    return (
        f"{first:.2f} s with compilation; computed and read, then: "
        f"{_milliseconds(np.array(seconds))}"
    )


def stores(open_model: OpenModel, scale: int) -> str:
    """Steps of one row of GPT-2 small, with its weights in several types."""
    del open_model
    with tempfile.TemporaryDirectory() as folder:
        write_llama(
            Path(folder),
            family="gpt2",
            vocabulary_size=50257,
            width=768,
            feed_forward_width=3072,
            layers=12,
            heads=12,
            key_value_heads=12,
            head_width=64,
            maximum_positions=1024,
            norm="layer",
            positions="learned",
            activation="gelu_tanh",
            gated=False,
            biases="all",
            tied_head=True,
        )
        engines, sizes = [], []
        for dtype in PARAMETER_DTYPES:
            source = Pretrained(checkpoint=folder, parameter_dtype=dtype)
            model, parameters = _open(source)
            sizes.append(sum(leaf.nbytes for leaf in parameters.values()) / 1e6)
            engines.append(
                DecodingEngine(model, parameters, slots=1, length=512, chunk=64)
            )
    # Other programs on the machine would take most of the time on a clock.
    turns = Turns(max(9 // scale, 1), 20, time.process_time)
    (row,) = _random_rows(1, 64)
    for engine in engines:
        _start(engine, [_endless(440, ids=row)])
    times = 1000 * np.median(turns.seconds(engines), axis=0)
    listed = zip(PARAMETER_DTYPES, times, sizes, strict=True)
    return "time of one core for a token: " + "; ".join(
        f"{dtype} {each:.0f} ms, {size:.0f} MB" for dtype, each, size in listed
    )


MEASURES: dict[str, Callable[[OpenModel, int], str]] = {
    "adapters": adapters,
    "shared": shared,
    "continuous": continuous,
    "speculation": speculation,
    "loading": loading,
    "stores": stores,
}

if __name__ == "__main__":
    main()
