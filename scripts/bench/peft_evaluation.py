"""PEFT's side of the evaluation cases, with batches of rows of similar length.

    python -m scripts.bench.peft_evaluation FOLDER   # answers `workers` questions

Rows are scored with padding on the right and generated from with padding on the left,
in inference mode. PEFT's own `generate` numbers positions from the padding instead of
from the prompt, which changes what padded rows generate; the prompt's vectors are
therefore put between the padding and the text, and the base model continues them.
Requires torch, transformers and peft; does not import prompt_tuning.
"""

# These imports are in the `bench` extra only.
# pyright: reportMissingImports=false

import functools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import peft
import torch
import transformers

from scripts.bench.evaluation_tasks import (
    BATCH,
    EXACT_MATCH,
    LOSS,
    NEW_TOKENS,
    RANKING,
    Rows,
    Task,
    read_task,
)
from scripts.bench.peft_step import with_prompt
from scripts.bench.workers import THREADS, Answer, peak_memory, serve, versions
from scripts.peft_versions import report_versions


def main() -> None:
    """Answers questions until standard input ends."""
    report_versions()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(THREADS)
    side = PeftEvaluation(Path(sys.argv[1]))
    serve(
        {
            "start": functools.partial(versions, torch, transformers, peft),
            "continue": side.continue_given,
            "open": side.open,
            "run": side.run,
            "memory": peak_memory,
        }
    )


class PeftEvaluation:
    """A model with a prompt, in evaluation mode."""

    def __init__(self, folder: Path):
        self._folder = folder
        base = transformers.AutoModelForCausalLM.from_pretrained(
            folder / "model", dtype=torch.float32
        )
        prompt = np.load(folder / "prompt.npy")
        self._model = with_prompt(base, prompt, seq2seq=False).eval()
        self._tasks: dict[str, Task] = {}

    def open(self, name: str) -> Answer:
        """Reads the rows of a task."""
        self._tasks[name] = read_task(self._folder, name)
        return {}

    def continue_given(self, name: str) -> Answer:
        """Returns the tokens that the model generates for the rows of a task."""
        return {"generated": self._generate(self._tasks[name].given)}

    @torch.inference_mode()
    def run(self, name: str) -> Answer:
        """Evaluates a task; returns its seconds and the metric."""
        started = time.perf_counter()
        task = self._tasks[name]
        measure = {EXACT_MATCH: self._match, RANKING: self._rank, LOSS: self._loss}
        metric = measure[name](task)
        return {"seconds": time.perf_counter() - started, "metric": metric}

    def _match(self, task: Task) -> float:
        generated = self._generate(task.given)
        equal = [a == b for a, b in zip(generated, task.answers, strict=True)]
        return float(np.mean(equal))

    def _rank(self, task: Task) -> float:
        count = len(task.labels)
        nats = self._nats(
            [row for row in task.given for _ in task.labels],
            task.labels * len(task.given),
        )
        best = nats.reshape(-1, count).argmin(axis=1)
        gold = [task.labels.index(answer) for answer in task.answers]
        return float(np.mean(best == gold))

    def _loss(self, task: Task) -> float:
        nats = self._nats(task.given, task.answers)
        return float(nats.sum() / sum(map(len, task.answers)))

    def _nats(self, given: Rows, answers: Rows) -> np.ndarray:
        """Returns the summed negative log likelihood of each answer."""
        rows = [[*x, *y] for x, y in zip(given, answers, strict=True)]
        nats = np.zeros(len(rows))
        prompt = self._prompt_length
        for chosen in batches(rows):
            ids, mask = pad([rows[i] for i in chosen], left=False)
            kept = ids.shape[1] - min(len(given[i]) for i in chosen) + 1
            logits = self._model(
                input_ids=ids,
                attention_mask=mask,
                use_cache=False,
                logits_to_keep=kept,
            ).logits
            offset = prompt + ids.shape[1] - kept
            scores = logits[:, :-1].float().log_softmax(-1)
            targets = ids[:, offset + 1 - prompt :]
            picked = scores.gather(-1, targets[..., None])[..., 0]
            for row, i in enumerate(chosen):
                first = len(given[i]) - (offset + 1 - prompt)
                learned = picked[row, first : first + len(answers[i])]
                nats[i] = -learned.sum().item()
        return nats

    @torch.inference_mode()
    def _generate(self, given: Rows) -> Rows:
        """Continues rows greedily; returns the tokens before the end token."""
        base = self._model.get_base_model()
        embed = base.get_input_embeddings()
        prompt = self._model.get_prompt(1)[0]
        end = base.config.eos_token_id
        generated: dict[int, list[int]] = {}
        for chosen in batches(given):
            rows = [given[i] for i in chosen]
            ids, mask = pad(rows, left=True)
            vectors = torch.nn.functional.pad(embed(ids), (0, 0, len(prompt), 0))
            mask = torch.nn.functional.pad(mask, (len(prompt), 0))
            for row, tokens in enumerate(rows):
                first = ids.shape[1] - len(tokens)
                vectors[row, first : first + len(prompt)] = prompt
                mask[row, first:] = 1
            new = base.generate(
                inputs_embeds=vectors,
                attention_mask=mask,
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
            )
            for i, row in zip(chosen, new.tolist(), strict=True):
                generated[i] = row[: row.index(end)] if end in row else row
        return [generated[i] for i in range(len(given))]

    @property
    def _prompt_length(self) -> int:
        return self._model.peft_config["default"].num_virtual_tokens


def batches(rows: Rows) -> Iterator[list[int]]:
    """Yields the numbers of the rows of each batch, sorted by length."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    for start in range(0, len(order), BATCH):
        yield order[start : start + BATCH]


def pad(rows: Rows, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns padded tokens and the attention mask, `[B, T]`."""
    shape = (len(rows), max(map(len, rows)))
    ids, mask = (
        torch.zeros(shape, dtype=torch.long),
        torch.zeros(shape, dtype=torch.long),
    )
    for i, row in enumerate(rows):
        place = slice(shape[1] - len(row), None) if left else slice(len(row))
        ids[i, place], mask[i, place] = torch.tensor(row), 1
    return ids, mask


if __name__ == "__main__":
    main()
