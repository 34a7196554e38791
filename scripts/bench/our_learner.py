"""Our side of `against_trl`: a process that runs one step of a run per request."""

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import flax
import jax

import prompt_tuning as pt
from prompt_tuning.training.batch_sources import open_batches
from prompt_tuning.training.throughput import Meter
from scripts.bench.trl_cases import RANK, TrlCase, read_case, records, reward
from scripts.bench.workers import Answer, peak_memory, serve, versions


def judge(prompt: str, completion: str, row: dict) -> float:
    """Returns the reward of both sides."""
    del prompt, row
    return reward(completion)


class Learner:
    """A run that takes one step whenever it is asked for."""

    def __init__(self, case: TrlCase, folder: Path):
        directory = folder / "ours"
        directory.mkdir()
        data = folder / "data.jsonl"
        lines = (json.dumps(record) + "\n" for record in records(case))
        data.write_text("".join(lines))
        method: dict[str, Any] = {"prompt": pt.SoftPrompt(length=case.vectors).build()}
        if case.method == "lora":
            modules = ["c_attn"] if case.family == "gpt2" else ["q_proj", "v_proj"]
            method = {"adapters": [pt.LoRA(rank=RANK, at=modules).build()]}
        learning: dict[str, Any] = {"objective": pt.DPO().build()}
        if case.learns == "rewards":
            rollouts = pt.Rollouts(
                rewards=[judge],
                group=case.group,
                new_tokens=case.new,
                slots=case.batch * case.group,
            )
            learning = {"objective": pt.GRPO().build(), "rollouts": rollouts.build()}
        trained = [".*/(prompt|adapters)/.*"]
        source = pt.DataSource(files=str(data), batch_size=case.batch, buckets=1)
        self._trainer = pt.open_run(
            pt.Run(
                directory=str(directory),
                model=pt.Pretrained(checkpoint=str(folder / "model")).build(),
                groups=[pt.ParameterGroup(trained, pt.adamw(1e-3)).build()],
                data=source.build(),
                **method,
                **learning,
            )
        )
        self._batches = open_batches([self._trainer], [Meter()], 0)
        self._state, self._done = self._trainer.start, 0

    def step(self) -> Answer:
        """Takes a step."""
        began = time.perf_counter()
        batch, _ = self._batches.next([self._state], self._done)
        self._state, metrics = self._trainer.step(
            self._state, self._trainer.inputs, batch.whole
        )
        loss = float(jax.block_until_ready(metrics)["loss"])
        self._done += 1
        return {"seconds": time.perf_counter() - began, "loss": loss}


def main() -> None:
    """Answers questions until standard input ends."""
    folder = Path(sys.argv[1])
    learner = Learner(read_case(folder), folder)
    serve(
        {
            "start": functools.partial(versions, jax, flax),
            "step": learner.step,
            "memory": peak_memory,
        }
    )


if __name__ == "__main__":
    main()
