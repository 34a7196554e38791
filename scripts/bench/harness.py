"""Compares the scores of lm-evaluation-harness in this process with its `hf` model's.

    python -m scripts.bench.harness [--turns 3] [--layers 12] [--width 768]

Both sides score the same questions with a LoRA of GPT-2 with random weights, on the
CPU, in turns in one process: each question has a context, and 4 candidates of 8 tokens.
The sides must agree to 1e-3. Requires lm-eval, torch, transformers and peft.
"""

# These imports are in the extras `bench` and `eval` only.
# pyright: reportMissingImports=false

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import peft
import torch
import transformers
from lm_eval.models.huggingface import HFLM

from prompt_tuning.lm_eval.harness_model import HarnessModel
from scripts.bench.machine import processor
from scripts.bench.workers import THREADS
from tests.support.small_tokenizer import write_tokenizer

CANDIDATES, ANSWER = 4, 8
CONTEXTS = (64, 320)
"""Numbers of tokens of a context: a question alone, and one after some examples."""


def main() -> None:
    """Prints the requests per second of both sides, and the median of the ratios."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--batch_size", type=int, default=8)
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    print(f"{processor()}, {THREADS} threads, batches of {options.batch_size}")
    with tempfile.TemporaryDirectory() as folder:
        base, adapter = Path(folder) / "base", Path(folder) / "lora"
        _write(base, adapter, options.layers, options.width)
        size = {"batch_size": options.batch_size}
        theirs = HFLM(pretrained=str(base), peft=str(adapter), device="cpu", **size)
        ours = HarnessModel(model=str(base), adapter=str(adapter), **size)
        for length in CONTEXTS:
            _compare(ours, theirs, length, options.questions, options.turns)


def _write(base: Path, adapter: Path, layers: int, width: int) -> None:
    """Writes GPT-2 and a LoRA with random weights."""
    write_tokenizer(base)
    config = transformers.GPT2Config(n_layer=layers, n_embd=width, n_head=width // 64)
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(base)
    settings = peft.LoraConfig(
        r=8,
        target_modules=["c_attn"],
        fan_in_fan_out=True,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    peft.get_peft_model(model, settings).save_pretrained(adapter)


def _compare(
    ours: HarnessModel, theirs: HFLM, length: int, questions: int, turns: int
) -> None:
    """Times both sides in turns; each turn has other questions."""
    random, seconds = np.random.default_rng(0), ([], [])
    for turn in range(turns + 1):  # the first one compiles
        requests = []
        for _ in range(questions):
            context = random.integers(0, 50_000, length).tolist()
            for _ in range(CANDIDATES):
                answer = random.integers(0, 50_000, ANSWER).tolist()
                requests.append((("", ""), context, answer))
        scores = []
        for side, times in zip((ours, theirs), seconds, strict=True):
            start = time.perf_counter()
            scores.append(side._loglikelihood_tokens(requests, disable_tqdm=True))
            if turn:
                times.append(time.perf_counter() - start)
        np.testing.assert_allclose(
            *([value for value, _ in each] for each in scores), atol=1e-3, rtol=1e-5
        )
    rates = [questions * CANDIDATES / statistics.median(times) for times in seconds]
    ratio = statistics.median(b / a for a, b in zip(*seconds, strict=True))
    print(
        f"contexts of {length} tokens: {rates[0]:.1f} requests/s, hf {rates[1]:.1f}; "
        f"{ratio:.2f}x"
    )


if __name__ == "__main__":
    main()
