"""PEFT's side of the GPU benchmark: the same shapes, in bfloat16, with torch.compile.

    python -m scripts.bench.gpu_peft llama_soft

Prints a line of JSON after the steps without `torch.compile`, and another after those
with it, because compilation may not end in time.
"""

# These imports are in the `bench` extra only.
# pyright: reportMissingImports=false

import argparse
import json
import sys
from typing import Any

import peft
import torch
import transformers

from scripts.bench.gpu_shapes import (
    DecodingCase,
    GpuCase,
    Shape,
    decoding_case,
    find_cases,
)
from scripts.bench.gpu_timing import time_rows, time_steps
from scripts.bench.workers import versions
from scripts.peft_versions import report_versions

DECODE = "decode"
"""Name of the case that continues rows."""


def main() -> int:
    """Measures one case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    report_versions()
    if not torch.cuda.is_available() and not options.smoke:
        print("torch finds no GPU", file=sys.stderr)
        return 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.case == DECODE:
        print(json.dumps(measure_decoding(decoding_case(options.smoke), device)))
        return 0
    case = find_cases(options.smoke)[options.case]
    step = PeftStep(case, device)
    print(json.dumps(step.measure("sdpa")), flush=True)
    if not options.smoke:
        step.model = torch.compile(step.model)
        print(json.dumps(step.measure("sdpa, torch.compile")), flush=True)
    return 0


class PeftStep:
    """A model that PEFT tunes, its optimizer, and a batch."""

    def __init__(self, case: GpuCase, device: str):
        self.case, self.device = case, device
        base = random_model(case.shape, device)
        self.model: Any = peft.get_peft_model(base, settings(case)).to(device)
        self.model.train()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3)
        self.batch = batch(case, device)

    def __call__(self) -> float:
        """Runs one step; returns the loss."""
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.model(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def measure(self, attention: str) -> dict[str, Any]:
        """Runs steps; returns their median and the peak memory."""
        cuda = self.device == "cuda"
        return {
            **time_steps(self.case, self),
            "attention": attention,
            "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
            **versions(torch, transformers, peft),
        }


def measure_decoding(case: DecodingCase, device: str) -> dict[str, Any]:
    """Measures how fast `generate` continues rows behind one soft prompt."""
    prompt = peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=case.prompt
    )
    base = random_model(case.shape, device)
    model: Any = peft.get_peft_model(base, prompt).to(device).eval()
    results = {}
    for rows in case.rows:
        shape = (rows, case.length)
        tokens = torch.randint(3, case.shape.vocabulary, shape, device=device)

        def generate(tokens=tokens) -> None:
            with torch.no_grad(), torch.autocast(device, torch.bfloat16):
                ids = model.generate(
                    input_ids=tokens,
                    attention_mask=torch.ones_like(tokens),
                    max_new_tokens=case.new_tokens,
                    min_new_tokens=case.new_tokens,
                    do_sample=False,
                    use_cache=True,
                    pad_token_id=0,
                )
            ids.cpu()

        results[str(rows)] = time_rows(case, rows, generate)
    cuda = device == "cuda"
    return {
        "title": case.title,
        "weights": "PEFT, bfloat16",
        "rows": results,
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        **versions(torch, transformers, peft),
    }


def random_model(shape: Shape, device: str) -> Any:
    """Returns the frozen model on the device, with random weights in bfloat16."""
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        base = base_model(shape)
        torch.set_default_dtype(torch.float32)
    return base


def base_model(shape: Shape) -> Any:
    """Returns the frozen model with random weights."""
    if shape.family == "llama":
        config: Any = transformers.LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            intermediate_size=shape.feed_forward,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.groups,
            head_dim=shape.head_width,
            max_position_embeddings=8192,
            use_cache=False,
        )
        return transformers.LlamaForCausalLM(config)
    if shape.family == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=shape.vocabulary,
            n_embd=shape.width,
            n_inner=shape.feed_forward,
            n_layer=shape.layers,
            n_head=shape.heads,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
        )
        return transformers.GPT2LMHeadModel(config)
    config = transformers.T5Config(
        vocab_size=shape.vocabulary,
        d_model=shape.width,
        d_ff=shape.feed_forward,
        d_kv=shape.head_width,
        num_layers=shape.layers,
        num_heads=shape.heads,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def settings(case: GpuCase) -> Any:
    """Returns PEFT's settings of a case."""
    t5 = case.shape.family == "t5"
    task = "SEQ_2_SEQ_LM" if t5 else "CAUSAL_LM"
    if case.method == "lora":
        modules = ["q_proj", "v_proj"]
        return peft.LoraConfig(task_type=task, r=case.size, target_modules=modules)
    if case.method == "prefix":
        return peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=case.size)
    return peft.PromptTuningConfig(
        task_type=task, num_virtual_tokens=case.size, num_transformer_submodules=1
    )


def batch(case: GpuCase, device: str) -> dict[str, Any]:
    """Returns random rows, of which the last tokens carry loss."""
    shape = (case.rows, case.length)
    tokens = torch.randint(3, case.shape.vocabulary, shape, device=device)
    labels = tokens.clone()
    labels[:, : case.length - case.learned] = -100
    if case.shape.family == "t5":
        labels = tokens[:, : case.learned].clone()
    mask = torch.ones_like(tokens)
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


if __name__ == "__main__":
    sys.exit(main())
