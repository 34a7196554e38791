"""The task of the bundled model `recall`: answers from a table that it has read.

A table has one fact in each line, such as `modu=vepi`; keys and values are two
syllables, drawn at random, so no fact can be known without the table. Behind the table
the model answers `modu?` by `vepi`, and repeats the lines themselves. A token is a
syllable or a sign. This module does not import JAX.
"""

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SIGNS = ("=", "?", "\n")
SYLLABLES = tuple(c + v for c in "bdfgklmnprstvz" for v in "aeiou")
VOCABULARY = (PAD, EOS, UNKNOWN, *SIGNS, *SYLLABLES)
PAD_ID, EOS_ID, _, IS_ID, ASK_ID, LINE_ID, FIRST_SYLLABLE = range(7)
FACT = 6
"""Number of tokens of a line of a table, and of a question with its answer."""

Facts = np.ndarray
"""Syllables of keys and values, int32 `[..., n, 4]`, as tokens."""


def random_facts(rng: np.random.Generator, rows: int, count: int) -> Facts:
    """Draws tables of distinct keys and distinct values, `[rows, count, 4]`."""
    number = len(SYLLABLES)
    drawn = np.empty((rows, count, 2, 2), np.int32)
    for row in drawn:
        for side in (0, 1):
            words = rng.choice(number**2, count, replace=False)
            row[:, side] = np.stack(np.divmod(words, number), -1)
    return drawn.reshape(rows, count, 4) + FIRST_SYLLABLE


def alike_facts(rng: np.random.Generator, rows: int, count: int) -> Facts:
    """Draws tables in which each key shares both of its syllables with others.

    A model that sees only `random_facts` learns to match the last syllable alone.
    """
    facts, side = random_facts(rng, rows, count), int(np.ceil(np.sqrt(2 * count)))
    for row in facts:
        first, last = (rng.choice(len(SYLLABLES), side, replace=False) for _ in "ab")
        keys = rng.choice(side**2, count, replace=False)
        row[:, 0] = first[keys // side] + FIRST_SYLLABLE
        row[:, 1] = last[keys % side] + FIRST_SYLLABLE
    return facts


def with_signs(facts: Facts, middle: int, end: int) -> np.ndarray:
    """Puts signs into facts: tokens `[..., n * 6]` of lines or of questions."""
    signs = [np.full(facts.shape[:-1], token, np.int32) for token in (middle, end)]
    parts = [*np.moveaxis(facts[..., :2], -1, 0), signs[0]]
    parts += [*np.moveaxis(facts[..., 2:], -1, 0), signs[1]]
    return np.stack(parts, -1).reshape(*facts.shape[:-2], -1)


def lines(facts: Facts) -> np.ndarray:
    """Returns the tokens of tables: `modu=vepi`, a line for each fact."""
    return with_signs(facts, IS_ID, LINE_ID)


def questions(facts: Facts) -> np.ndarray:
    """Returns the tokens of questions with their answers: `modu?vepi` and EOS."""
    return with_signs(facts, ASK_ID, EOS_ID)


def decode(tokens: np.ndarray) -> str:
    """Returns the text of tokens."""
    return "".join(VOCABULARY[token] for token in tokens)


def document(seed: int, count: int) -> tuple[str, list[tuple[str, str]]]:
    """Draws a table that no model has seen.

    Args:
      seed: seed of the table.
      count: number of facts.

    Returns:
      The text of the table, and its questions with their answers.
    """
    (facts,) = random_facts(np.random.default_rng([seed, 1]), 1, count)
    asked = [(decode(fact[:2]) + "?", decode(fact[2:])) for fact in facts]
    return decode(lines(facts)), asked


def save_tokenizer(folder: Path) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` into a model folder."""
    ids = {token: index for index, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    pattern = Regex("|".join(["[=?\n]", "[bdfgklmnprstvz][aeiou]", r"[\s\S]"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = [AddedToken(x, special=True, normalized=False) for x in (PAD, EOS)]
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
