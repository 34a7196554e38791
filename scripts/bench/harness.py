"""Compares `prompt_tuning` with `hf`, the model class of lm-evaluation-harness itself.

    python -m scripts.bench.harness [--requests 256] [--turns 5] [--layers 8]

Both score and continue the same texts in one process, in turns: a random Llama of width
512 with a LoRA of rank 8 that PEFT wrote. `choices` are four short continuations of
each context, `texts` each have a context of their own, and `generate` continues texts
by 16 tokens. Both must have the same results. Requires lm-eval, torch, transformers and
peft.
"""

# These imports are in the extras `bench` and `eval` only.
# pyright: reportMissingImports=false

import argparse
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import lm_eval
import numpy as np
import peft
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from prompt_tuning.lm_eval import HarnessModel
from scripts.bench.cases import LLAMA_CONFIG
from scripts.bench.machine import processor
from scripts.bench.workers import THREADS
from scripts.peft_versions import report_versions

BATCH, CONTEXT, CHOICES, NEW, RANK = 32, 100, 4, 16, 8
AGREEMENT = 1e-3
"""Largest difference of log-probabilities, in nats."""


def main() -> None:
    """Prints the requests per second of both classes, and the median ratios."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    report_versions()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(THREADS)
    print(f"{processor()}, torch {torch.__version__}, lm-eval {lm_eval.__version__}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_models(folder, options.layers)
        base, adapter = str(folder / "base"), str(folder / "adapter")
        theirs = HFLM(
            base, peft=adapter, device="cpu", batch_size=BATCH, dtype="float32"
        )
        ours = HarnessModel(model=base, adapter=adapter, batch_size=BATCH)
        for kind, requests in tasks(options.requests).items():
            compare(kind, requests, ours, theirs, options.turns)


def write_models(folder: Path, layers: int) -> None:
    """Writes a random model with a tokenizer of words, and a random LoRA."""
    torch.manual_seed(0)
    config = LLAMA_CONFIG | {"num_hidden_layers": layers}
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    base.save_pretrained(folder / "base")
    # As many as the model has: `hf` cuts its embeddings to the tokenizer's size.
    words = {word(i): i for i in range(config["vocab_size"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, word(0)))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=word(config["bos_token_id"]),
        eos_token=word(config["eos_token_id"]),
        pad_token=word(0),
    ).save_pretrained(folder / "base")
    lora = peft.LoraConfig(
        r=RANK, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    peft.get_peft_model(base, lora).save_pretrained(folder / "adapter")


def word(number: int) -> str:
    """Returns the text of a token."""
    return f"<{number}>"


def tasks(count: int) -> dict[str, list[Instance]]:
    """Returns the requests of each kind."""
    choose = random.Random(0)

    def text(size: int) -> str:
        numbers = choose.choices(range(3, LLAMA_CONFIG["vocab_size"]), k=size)
        return "".join(f" {word(number)}" for number in numbers)

    contexts = [text(CONTEXT) for _ in range(count)]
    until = {"until": [word(2)], "max_gen_toks": NEW, "do_sample": False}
    pairs = {
        "choices": [(contexts[i // CHOICES], text(4 + i % 9)) for i in range(count)],
        "texts": [(each, text(4)) for each in contexts],
    }
    requests = {
        kind: [Instance("loglikelihood", {}, pair, 0) for pair in each]
        for kind, each in pairs.items()
    }
    given = [(each, until) for each in contexts[: count // CHOICES]]
    requests["generate"] = [Instance("generate_until", {}, each, 0) for each in given]
    return requests


def compare(
    kind: str,
    requests: Sequence[Instance],
    ours: HarnessModel,
    theirs: HFLM,
    turns: int,
) -> None:
    """Answers requests in turns by both, and prints a line."""
    seconds = []
    for _ in range(turns + 1):
        start = time.perf_counter()
        answers = answer(ours, requests)
        middle = time.perf_counter()
        expected = answer(theirs, requests)
        end = time.perf_counter()
        check(answers, expected)
        seconds.append((middle - start, end - middle))
    each = np.array(seconds[1:])  # The first turn compiles.
    rates = len(requests) / np.median(each, axis=0)
    ratio = np.median(each[:, 1] / each[:, 0])
    print(
        f"{kind}: {rates[0]:.1f} and {rates[1]:.1f} requests/s, {ratio:.2f}x; the "
        f"first turn took {seconds[0][0]:.1f} s",
        flush=True,
    )


def answer(model: Any, requests: Sequence[Instance]) -> list[Any]:
    """Returns the answers of a model to requests of one kind."""
    method = getattr(model, requests[0].request_type)
    return method(list(requests), disable_tqdm=True)


def check(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    """Checks that both models give the same answers.

    Raises:
      ValueError: if they do not.
    """
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, str):
            # `hf` decodes new tokens alone, without the space before a first word.
            same = mine.strip() == other.strip()
        else:
            same = abs(mine[0] - other[0]) < AGREEMENT and mine[1] == other[1]
        if not same:
            raise ValueError(f"the answers {mine} and {other} differ")


if __name__ == "__main__":
    main()
