"""Makes tiny random models with every kind of PEFT adapter, and their logits.

    python -m scripts.make_peft_fixtures [--seed N]

For each case it writes a folder in `tests/fixtures/peft` with

    base/      a Hugging Face model with random weights
    KIND/      PEFT adapters with random weights
    ref.npz    three rows of unlike length; the logits of the base model and with each
               adapter; the tokens that greedy decoding appends to each row alone,
               in steps without a cache (see `scripts/peft_versions.py`)

`llama_tied` has no adapter, but the tokenizer of `scripts/make_text_fixtures.py`, which
runs first, and texts.json: the tokens that greedy decoding appends to BOS, and the mean
negative log likelihood of the tokens of some sentences.

Needs the `bench` extra (torch, transformers, PEFT), and nothing of this package.
"""

# The imports are only in the `bench` extra.
# pyright: reportMissingImports=false

import argparse
import copy
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import peft
import sentencepiece
import torch
import transformers

from scripts.make_fixtures import (
    auto_class,
    continued,
    randomize,
    randomize_adapter,
    rows,
)
from scripts.make_text_fixtures import BPE_PIECES
from scripts.peft_versions import report_versions

FOLDER = Path(__file__).parents[1] / "tests/fixtures/peft"
TOKENIZER = FOLDER.parent / "tokenizers/bpe"
VOCABULARY = 64
PROMPT_LENGTH = 6
LENGTHS = (10, 4, 7)
TARGET_LENGTHS = (5, 3, 4)
NEW_TOKENS = 8
TASKS = (0, 1, 2)

DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
T5: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
CASES: dict[str, dict[str, Any]] = {
    "llama_gqa_untied": DECODER
    | {"model_type": "llama", "num_hidden_layers": 3, "rms_norm_eps": 1e-5},
    "gpt2_tied": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_embd": 16,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 64,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    },
    "qwen2_bias_tied": DECODER | {"model_type": "qwen2"},
    "t5v11_untied_gated": T5
    | {"d_kv": 6, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "t5_orig_tied_relu": T5 | {"d_kv": 4, "feed_forward_proj": "relu"},
    "llama_tied": DECODER
    | {
        "model_type": "llama",
        "vocab_size": BPE_PIECES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
    },
}
PROMPTS = ("prompt_tuning", "prefix_tuning")
KINDS: dict[str, tuple[str, ...]] = {
    "llama_gqa_untied": (*PROMPTS, "p_tuning", "prefix_proj", "lora"),
    "gpt2_tied": (*PROMPTS, "p_tuning", "prefix_proj", "mpt", "lora", "ia3"),
    "qwen2_bias_tied": PROMPTS,
    "t5v11_untied_gated": (
        *("prompt_tuning", "prefix_tuning_tokendim", "p_tuning", "mpt", "lora", "ia3"),
    ),
    "t5_orig_tied_relu": PROMPTS,
    "llama_tied": (),
}
SENTENCES = (
    "Once upon a time, there was a little girl named Lily.",
    "One day, the dog found a red bird in the garden.",
    "It was a good movie.",
)


def main() -> None:
    """Makes all folders."""
    parser = argparse.ArgumentParser(description="Make PEFT adapters and their logits.")
    parser.add_argument("--seed", type=int, default=0, help="seed of all values (0)")
    seed = parser.parse_args().seed
    report_versions()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for case in CASES:
        shutil.rmtree(FOLDER / case, ignore_errors=True)
        make_case(FOLDER / case, case, seed)
        print(FOLDER / case)


def make_case(folder: Path, case: str, seed: int) -> None:
    """Writes the folder of a model and its adapters."""
    torch.manual_seed(seed)
    random = np.random.default_rng(seed)
    config = transformers.AutoConfig.for_model(**CASES[case])
    model = random_model(config, tied="untied" not in case)
    model.save_pretrained(folder / "base")
    targets = TARGET_LENGTHS if config.is_encoder_decoder else ()
    given = rows(random, VOCABULARY, LENGTHS, targets)
    results = {name: array.numpy() for name, array in given.items()}
    results |= outputs("base", model, given)
    for kind in KINDS[case]:
        base = copy.deepcopy(model)
        adapted = peft.get_peft_model(base, peft_config(kind, config)).eval()
        randomize_adapter(adapted)
        adapted.peft_config["default"].base_model_name_or_path = case
        adapted.save_pretrained(folder / kind)
        (folder / kind / "README.md").unlink()
        # The saved vectors of a projection or an encoder are its outputs.
        tasks = torch.tensor(TASKS) if kind == "mpt" else None
        results |= outputs(kind, adapted, given, tasks)
    np.savez_compressed(folder / "ref.npz", **results)
    if case == "llama_tied":
        shutil.copytree(TOKENIZER, folder / "base", dirs_exist_ok=True)
        texts = json.dumps(texts_of(model), indent=1, ensure_ascii=False)
        (folder / "texts.json").write_text(texts + "\n", "utf-8")


def random_model(config: Any, *, tied: bool) -> Any:
    """Returns a model with random weights, whose head is the embedding if tied."""
    config.tie_word_embeddings = tied  # the config of T5 always begins with true
    model = auto_class(config).from_config(config, attn_implementation="eager").eval()
    if config.is_encoder_decoder:
        for stack in (model.encoder, model.decoder):
            stack.embed_tokens.weight = model.shared.weight
    randomize(model)
    return model


def texts_of(model: Any) -> dict[str, Any]:
    """Returns generated tokens, and the nats of sentences after BOS."""
    file = TOKENIZER / "tokenizer.model"
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(file))
    nats = {}
    with torch.no_grad():
        for sentence in SENTENCES:
            ids = torch.tensor([[1, *pieces.encode(sentence)]])
            nats[sentence] = float(model(input_ids=ids, labels=ids).loss)
        begin = torch.tensor([[1]])
        mask = torch.ones_like(begin)
        generated = model.generate(
            begin, attention_mask=mask, do_sample=False, max_new_tokens=16
        )
    return {"generated": generated[0, 1:].tolist(), "nats": nats}


def peft_config(kind: str, config: Any) -> Any:
    """Returns PEFT's settings of an adapter."""
    seq2seq = config.is_encoder_decoder
    task = {"task_type": "SEQ_2_SEQ_LM" if seq2seq else "CAUSAL_LM"}
    virtual = task | {"num_virtual_tokens": PROMPT_LENGTH}
    match kind:
        case "prompt_tuning":
            return peft.PromptTuningConfig(**virtual)
        case "prefix_tuning":
            return peft.PrefixTuningConfig(**virtual)
        case "prefix_tuning_tokendim":
            # PEFT assumes d_model; its heads have another width.
            return peft.PrefixTuningConfig(
                **virtual, token_dim=config.num_heads * config.d_kv
            )
        case "prefix_proj":
            return peft.PrefixTuningConfig(
                **virtual, prefix_projection=True, encoder_hidden_size=8
            )
        case "p_tuning":
            return peft.PromptEncoderConfig(**virtual, encoder_hidden_size=8)
        case "mpt":
            return peft.MultitaskPromptTuningConfig(
                **virtual, num_tasks=len(TASKS), num_ranks=2
            )
        case "lora":
            return peft.LoraConfig(**task, r=4, lora_alpha=8)
    return peft.IA3Config(**task)


def outputs(
    kind: str,
    model: Any,
    given: dict[str, torch.Tensor],
    tasks: torch.Tensor | None = None,
) -> dict[str, np.ndarray]:
    """Returns the logits of all rows, and the tokens appended to each row alone."""
    more = {} if tasks is None else {"task_ids": tasks}
    appended = np.zeros((len(LENGTHS), NEW_TOKENS), np.int64)
    with torch.no_grad():
        logits = model(**given, **more).logits.numpy()
        for index, length in enumerate(LENGTHS):
            row = given["input_ids"][index, :length]
            alone = {name: array[index : index + 1] for name, array in more.items()}
            if alone and model.config.is_encoder_decoder:
                new = generated_without_decoder_prompt(model, row, **alone)
            else:
                new = continued(model, row, NEW_TOKENS, **alone)
            appended[index, : len(new)] = new
    return {f"{kind}.logits": logits, f"{kind}.greedy_single": appended}


def generated_without_decoder_prompt(
    model: Any, row: torch.Tensor, **more: torch.Tensor
) -> list[int]:
    """Returns the tokens that PEFT appends with a task's prompt of an encoder.

    PEFT cannot compute these steps by themselves: with a decoder's prompt, which
    `generate` leaves out, its model needs labels.
    """
    generated = model.generate(
        input_ids=row[None],
        attention_mask=torch.ones_like(row[None]),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        use_cache=False,
        **more,
    )
    return generated[0, 1:].tolist()


if __name__ == "__main__":
    main()
