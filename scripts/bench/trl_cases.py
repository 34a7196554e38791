"""Cases of `against_trl`: models, texts and a reward, the same for both sides."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from scripts.bench.cases import GPT2_CONFIG, LLAMA_CONFIG

RANK = 8
"""Rank of the LoRA of both sides."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrlCase:
    """A step of both sides.

    Attributes:
      family: "gpt2" or "llama".
      config: fields of transformers' config class.
      learns: "rewards" or "preferences".
      method: "lora" or "prompt".
      batch: prompts of a step.
      given: tokens of a prompt.
      new: tokens of an answer.
      group: answers to each prompt, if they are sampled.
      vectors: vectors of a soft prompt.
    """

    family: str
    config: dict[str, Any]
    learns: str
    method: str
    batch: int = 8
    given: int = 24
    new: int = 8
    group: int = 8
    vectors: int = 100


REWARDS = TrlCase(
    family="gpt2",
    config=GPT2_CONFIG,
    learns="rewards",
    method="lora",
    given=100,
    new=64,
)
PROMPT = TrlCase(
    family="llama", config=LLAMA_CONFIG, learns="preferences", method="prompt"
)
CASES = {
    "rewards": REWARDS,
    "preferences": PROMPT,
    "preferences_lora": dataclasses.replace(PROMPT, method="lora"),
}


def reduced(case: TrlCase) -> TrlCase:
    """Returns a small case, to check that both sides run."""
    small = {"vocab_size": 300}
    if case.family == "gpt2":
        small |= {"n_embd": 32, "n_layer": 2, "n_head": 2}
    else:
        small |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        small |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = case.config | small
    return dataclasses.replace(case, config=config, batch=2, group=2, new=8, vectors=4)


def write_case(case: TrlCase, folder: Path) -> None:
    """Writes the case, and the tokenizer of its model: a word for each token."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    (folder / "case.json").write_text(json.dumps(dataclasses.asdict(case)))
    (folder / "model").mkdir()
    words = {f"w{token}": token for token in range(case.config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2"}
    file = folder / "model" / "tokenizer_config.json"
    file.write_text(json.dumps(settings | {"pad_token": "w1"}))


def read_case(folder: Path) -> TrlCase:
    """Reads a case that `write_case` wrote."""
    return TrlCase(**json.loads((folder / "case.json").read_text()))


def records(case: TrlCase) -> list[dict[str, str]]:
    """Returns random prompts, with two answers each if they are compared."""
    random = np.random.default_rng(0)

    def text(count: int) -> str:
        drawn = random.integers(3, case.config["vocab_size"], count)
        return " ".join(f"w{token}" for token in drawn)

    prompts = [{"prompt": text(case.given)} for _ in range(4 * case.batch)]
    if case.learns == "rewards":
        return prompts
    return [x | {"chosen": text(case.new), "rejected": text(case.new)} for x in prompts]


def reward(completion: str) -> float:
    """Returns a reward in which random answers differ."""
    return float(sum(map(ord, completion)) % 7)
