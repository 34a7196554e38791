"""Compares greedy generation with PEFT's: GPT-2 small with 100 prompt vectors.

    python -m scripts.bench.peft_generation [--turns 5] [--layers 12] [--width 768]

Both sides continue the same 8 rows of 64 tokens by 32, with the same random weights, in
turns in one process. Our ids must be equal to those of PEFT's steps without a cache; if
its timed `generate`, which has one, gives other ids, as with transformers 5.24, this is
printed. Requires torch, transformers and peft.
"""

# These imports are in the `bench` extra only.
# pyright: reportMissingImports=false

import argparse
import os
import tempfile
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import numpy as np
import torch
import transformers

from prompt_tuning.decoding.decoding_engine import DecodingEngine
from prompt_tuning.decoding.request import Request
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.pretrained.prompted_model import open_pretrained
from prompt_tuning.pretrained.tuning import Tuning
from prompt_tuning.prompts.soft import SoftPrompt
from prompt_tuning.settings.pretrained import Pretrained
from scripts.bench.machine import processor
from scripts.bench.peft_step import with_prompt
from scripts.bench.workers import THREADS
from scripts.peft_versions import report_versions

ROWS, TEXT, NEW, PROMPT = 8, 64, 32, 100


def main() -> None:
    """Prints the seconds of both sides, and the median of the ratios."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    options = parser.parse_args()
    report_versions()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_layer=options.layers, n_embd=options.width, n_head=options.width // 64
    )
    base = transformers.GPT2LMHeadModel(config).eval()
    random = np.random.default_rng(0)
    rows = random.integers(0, 50_000, (ROWS, TEXT))
    vectors = random.normal(0, 0.5, (PROMPT, options.width)).astype(np.float32)
    with tempfile.TemporaryDirectory() as folder:
        base.save_pretrained(folder)
        engine = open_engine(Path(folder), vectors)
    theirs = with_prompt(base, vectors, seq2seq=False).eval()
    expected = peft_steps(theirs, rows)
    turns, agree = [], True
    for _ in range(options.turns + 1):
        start = time.perf_counter()
        ids = generate(engine, rows)
        middle = time.perf_counter()
        agree = peft_generate(theirs, rows) == expected and agree
        end = time.perf_counter()
        assert ids == expected, "the ids differ"
        turns.append((middle - start, end - middle))
    seconds = np.array(turns[1:])  # The first turn compiles.
    ours, peft = np.median(seconds, axis=0)
    ratio = np.median(seconds[:, 1] / seconds[:, 0])
    print(
        f"{processor()}, torch {torch.__version__}, jax {jax.__version__}\n"
        f"{ROWS} rows, {PROMPT} vectors, {TEXT} tokens read and {NEW} made: "
        f"{ROWS * NEW / ours:,.0f} and {ROWS * NEW / peft:,.0f} tokens/s, "
        f"{ratio:.2f}x PEFT's; same ids as PEFT's steps without a cache"
    )
    if not agree:
        version = transformers.__version__
        print(f"PEFT's generate gives other ids with transformers {version}")


def open_engine(folder: Path, vectors: np.ndarray) -> DecodingEngine:
    """Opens an engine of the model with the prompt as its adapter."""
    source, key = Pretrained(checkpoint=str(folder)), jax.random.key(0)
    bare = open_pretrained(source, key=key)
    tuning = Tuning(
        prompt=lambda *args, **fields: SoftPrompt(*args, length=PROMPT, **fields)
    )
    model = open_pretrained(source, tuning, key=key)
    parameters = model.read_parameters()
    parameters |= {"decoder/prompt/prompt": jax.numpy.asarray(vectors)}
    engine = DecodingEngine(
        bare,
        parameters,
        slots=ROWS,
        length=TEXT + NEW,
        chunk=TEXT,
        page=PROMPT,
        together=ROWS,  # PEFT reads all texts of a batch at once, too
    )
    engine.add_adapter("prompt", model, parameters)
    return engine


def generate(engine: DecodingEngine, rows: np.ndarray) -> list[list[int]]:
    """Continues rows by the engine."""
    sampling = Sampling(new_tokens=NEW, ignores_end=True)
    requests = [
        Request(ids=row.tolist(), adapter="prompt", sampling=sampling) for row in rows
    ]
    return [list(handle.completions[0].ids) for handle in engine.run(requests)]


def peft_generate(model: torch.nn.Module, rows: np.ndarray) -> list[list[int]]:
    """Continues rows by PEFT."""
    ids = torch.from_numpy(rows)
    with torch.no_grad():
        made = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )
    return made[:, -NEW:].tolist()


def peft_steps(model: torch.nn.Module, rows: np.ndarray) -> list[list[int]]:
    """Continues rows by PEFT without a cache."""
    ids = torch.from_numpy(rows)
    with torch.no_grad():
        for _ in range(NEW):
            mask = torch.ones_like(ids)
            made = model(input_ids=ids, attention_mask=mask, use_cache=False)
            last = made.logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, last], dim=1)
    return ids[:, -NEW:].tolist()


if __name__ == "__main__":
    main()
