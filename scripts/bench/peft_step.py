"""PEFT's side of the benchmark: a process that runs one training step per request.

    python -m scripts.bench.peft_step make FOLDER    # writes a random model
    python -m scripts.bench.peft_step adapt FOLDER   # writes a random LoRA of it
    python -m scripts.bench.peft_step serve FOLDER   # answers `workers` questions

Requires torch, transformers and peft; does not import prompt_tuning.
"""

# These imports are in the `bench` extra only.
# pyright: reportMissingImports=false

import functools
import json
import os
import sys
import time
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import peft
import torch
import transformers

from scripts.bench.cases import Case
from scripts.bench.workers import THREADS, Answer, peak_memory, serve, versions
from scripts.peft_versions import report_versions

HEAD_SCALE = 0.05


def main() -> None:
    """Writes a model or a LoRA, or answers questions."""
    action, folder = sys.argv[1], Path(sys.argv[2])
    report_versions()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(THREADS)
    if action == "make":
        make_model(folder)
        return
    if action == "adapt":
        make_lora(folder)
        return
    step = PeftStep(folder)
    serve(
        {
            "start": functools.partial(versions, torch, transformers, peft),
            "step": step,
            "memory": peak_memory,
        }
    )


def make_model(folder: Path) -> None:
    """Writes a random model with the config in `model.json`."""
    described = json.loads((folder / "model.json").read_text())
    family = described["family"]
    seq2seq = family == "t5"
    auto = (
        transformers.AutoModelForSeq2SeqLM
        if seq2seq
        else transformers.AutoModelForCausalLM
    )
    torch.manual_seed(0)
    model = auto.from_config(
        transformers.AutoConfig.for_model(family, **described["config"])
    )
    if seq2seq:
        # A new T5 ties its head in spite of the config; T5 1.1 has an untied head.
        shape = model.shared.weight.shape
        model.lm_head.weight = torch.nn.Parameter(HEAD_SCALE * torch.randn(shape))
    model.save_pretrained(folder / "model")


def make_lora(folder: Path) -> None:
    """Writes a LoRA of the case's rank, with PEFT's initial values."""
    case = Case(**json.loads((folder / "case.json").read_text()))
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=case.rank, target_modules="all-linear"
    )
    peft.get_peft_model(base, config).save_pretrained(folder / "lora")


class PeftStep:
    """The model with a prompt or a LoRA, its optimizer, and the batch.

    Attributes:
      model: the model in training mode; only what was added is trained.
      optimizer: AdamW for the trained parameters.
      batch: arguments of the model.
    """

    def __init__(self, folder: Path):
        case = Case(**json.loads((folder / "case.json").read_text()))
        rows = np.load(folder / "rows.npz")
        tokens = torch.from_numpy(rows["tokens"])
        self.batch = {
            "attention_mask": torch.ones_like(tokens),
            "labels": torch.from_numpy(rows["labels"]),
        }
        seq2seq = case.family == "t5"
        if not seq2seq:
            self.batch["use_cache"] = False
        auto = (
            transformers.AutoModelForSeq2SeqLM
            if seq2seq
            else transformers.AutoModelForCausalLM
        )
        base = auto.from_pretrained(folder / "model", dtype=torch.float32)
        embedded = []
        if case.prompt:
            prompt = np.load(folder / "prompt.npy")
            self.model = with_prompt(base, prompt, seq2seq=seq2seq)
            self.batch["input_ids"] = tokens
        elif case.rank:
            self.model = peft.PeftModel.from_pretrained(
                base, folder / "lora", is_trainable=True
            )
            self.batch["input_ids"] = tokens
        else:
            self.model = base.requires_grad_(False)
            inputs = base.get_input_embeddings()(tokens).detach()
            embedded = [inputs.requires_grad_(True)]
            self.batch["inputs_embeds"] = embedded[0]
        self.model.train()
        trained = embedded or [x for x in self.model.parameters() if x.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)

    def __call__(self) -> Answer:
        """Runs one step, timed from the forward pass to the optimizer's update."""
        started = time.perf_counter()
        loss = self.model(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "loss": loss.item()}


def with_prompt(base, prompt: np.ndarray, *, seq2seq: bool) -> torch.nn.Module:
    """Returns a PEFT model with a prompt (before the encoder in T5)."""
    config = peft.PromptTuningConfig(
        task_type="SEQ_2_SEQ_LM" if seq2seq else "CAUSAL_LM",
        num_virtual_tokens=len(prompt),
        # By default PEFT adds a second prompt before T5's decoder.
        num_transformer_submodules=1,
        prompt_tuning_init="RANDOM",
    )
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        embedding = model.prompt_encoder["default"].embedding
        embedding.weight.copy_(torch.from_numpy(prompt))
    return model


if __name__ == "__main__":
    main()
