"""TRL's side of `against_trl`: a process that runs one step of a trainer per request.

Requires torch, transformers, peft and trl; does not import prompt_tuning.
"""

# These imports are in the `bench` extra only.
# pyright: reportMissingImports=false

import functools
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import datasets
import peft
import torch
import transformers
import trl

from scripts.bench.trl_cases import RANK, TrlCase, read_case, records, reward
from scripts.bench.workers import THREADS, Answer, peak_memory, serve, versions

MANY_STEPS = 10_000


class Turns(transformers.TrainerCallback):
    """Lets a trainer take one step whenever it is asked for."""

    def __init__(self):
        self._asked: queue.Queue[None] = queue.Queue()
        self._done: queue.Queue[Answer] = queue.Queue()
        self._began = 0.0

    def on_step_begin(self, args, state, control, **others):
        """Waits for the question."""
        self._asked.get()
        self._began = time.perf_counter()

    def on_step_end(self, args, state, control, **others):
        """Answers it."""
        seconds = time.perf_counter() - self._began
        self._done.put({"seconds": seconds, "loss": 0.0})

    def step(self) -> Answer:
        """Asks for a step, and waits for its end."""
        self._asked.put(None)
        return self._done.get()


def make_model(case: TrlCase) -> Any:
    """Returns a model with random weights."""
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    }[case.family]
    torch.manual_seed(0)
    return model_class(config_class(**case.config | {"eos_token_id": 2}))


def open_trainer(case: TrlCase, folder: Path, turns: Turns) -> Any:
    """Opens TRL's trainer of a case."""
    model = make_model(case)
    model.save_pretrained(folder / "model")
    adapter: Any
    if case.method == "lora":
        modules = ["c_attn"] if case.family == "gpt2" else ["q_proj", "v_proj"]
        adapter = peft.LoraConfig(r=RANK, target_modules=modules, task_type="CAUSAL_LM")
    else:
        adapter = peft.PromptTuningConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=case.vectors
        )
    common: dict[str, Any] = {
        "output_dir": str(folder / "trl"),
        "max_steps": MANY_STEPS,
        "learning_rate": 1e-3,
        "logging_steps": MANY_STEPS,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    given: dict[str, Any] = {
        "model": model,
        "train_dataset": datasets.Dataset.from_list(records(case)),
        "processing_class": transformers.AutoTokenizer.from_pretrained(
            folder / "model"
        ),
        "peft_config": adapter,
        "callbacks": [turns],
    }
    if case.learns == "preferences":
        arguments = trl.DPOConfig(per_device_train_batch_size=case.batch, **common)
        return trl.DPOTrainer(args=arguments, **given)
    arguments = trl.GRPOConfig(
        per_device_train_batch_size=case.batch * case.group,
        steps_per_generation=1,
        num_generations=case.group,
        max_completion_length=case.new,
        **common,
    )

    def judge(completions: list[str], **others: Any) -> list[float]:
        return [reward(completion) for completion in completions]

    return trl.GRPOTrainer(args=arguments, reward_funcs=[judge], **given)


def main() -> None:
    """Answers questions until standard input ends."""
    folder, turns = Path(sys.argv[1]), Turns()
    torch.set_num_threads(THREADS)
    transformers.logging.set_verbosity_error()
    trainer = open_trainer(read_case(folder), folder, turns)
    threading.Thread(target=trainer.train, daemon=True).start()
    serve(
        {
            "start": functools.partial(versions, torch, transformers, peft, trl),
            "step": turns.step,
            "memory": peak_memory,
        }
    )
    os._exit(0)  # the trainer waits for its next step


if __name__ == "__main__":
    main()
