"""The task of the bundled models: string skills on random words.

A line is `reverse: hello=olleh`; a composition names two skills, which are applied from
left to right: `swap rot1: hello=pfmmi`. Some skills and one composition are excluded
from pretraining. They show that a tuned prompt can elicit a function that no text names
(`tail`, `reverse upper`), but not one that the model has not learned (`rot2`). This
module does not import JAX.
"""

import dataclasses
import hashlib
import json
import string
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)

Skill = Callable[[str], str]

SHORTEST_WORD, LONGEST_WORD = 3, 8
# Percentages in English text, rounded and at least 1, so that rare letters occur too.
LETTER_WEIGHTS = dict(
    zip(
        string.ascii_lowercase,
        (8, 2, 3, 4, 12, 2, 2, 6, 7, 1, 1, 4, 2, 7, 8, 2, 1, 6, 6, 9, 3, 1, 2, 1, 2, 1),
        strict=True,
    )
)


def _rotate_alphabet(steps: int) -> Skill:
    """Returns a skill that rotates every letter by `steps` and preserves its case."""
    table = {}
    for letters in (string.ascii_lowercase, string.ascii_uppercase):
        table |= str.maketrans(letters, letters[steps:] + letters[:steps])
    return lambda word: word.translate(table)


def _swap(word: str) -> str:
    """Exchanges the first and the last letter."""
    return word if len(word) < 2 else word[-1] + word[1:-1] + word[0]


def _star(word: str) -> str:
    """Replaces every vowel by a star."""
    return "".join("*" if letter in "aeiouAEIOU" else letter for letter in word)


SKILLS: dict[str, Skill] = {
    "copy": lambda word: word,
    "reverse": lambda word: word[::-1],
    "upper": str.upper,
    "title": lambda word: word[:1].upper() + word[1:],
    "rot1": _rotate_alphabet(1),
    "rot2": _rotate_alphabet(2),
    "star": _star,
    "double": lambda word: "".join(2 * letter for letter in word),
    "first": lambda word: word[:1],
    "last": lambda word: word[-1:],
    "init": lambda word: word[:-1],
    "tail": lambda word: word[1:],
    "middle": lambda word: word[1:-1],
    "left": lambda word: word[1:] + word[:1],
    "swap": _swap,
}
KEPT_OUT_SKILLS = ("tail", "rot2")
KEPT_OUT_COMPOSITIONS = ("reverse upper",)
KEPT_OUT = KEPT_OUT_SKILLS + KEPT_OUT_COMPOSITIONS
TRAINED_SKILLS = tuple(name for name in SKILLS if name not in KEPT_OUT_SKILLS)
# None of these equals an excluded function under another name, as `upper reverse`
# (`reverse upper`), `left init` (`tail`) and `rot1 rot1` (`rot2`) would.
TRAINED_COMPOSITIONS = (
    "upper left",
    "upper init",
    "reverse rot1",
    "reverse star",
    "reverse init",
    "swap rot1",
    "left title",
    "middle double",
)
TRAINED = TRAINED_SKILLS + TRAINED_COMPOSITIONS

PAD, EOS, BOS = "<pad>", "<eos>", "<bos>"
CHARACTERS = string.ascii_lowercase + string.ascii_uppercase + " :=*12"
VOCABULARY = (PAD, EOS, BOS, *CHARACTERS)
PAD_ID, EOS_ID, BOS_ID = 0, 1, 2
_IDS = {token: index for index, token in enumerate(VOCABULARY)}


def apply(name: str, word: str) -> str:
    """Applies a skill, or the skills of a composition from left to right, to a word.

    Raises:
      KeyError: if a part of the name is not a skill.
    """
    for part in name.split():
        word = SKILLS[part](word)
    return word


def prompt_text(name: str | None, word: str) -> str:
    """Returns the text before the answer: `reverse: hello=` or `hello=`."""
    return f"{word}=" if name is None else f"{name}: {word}="


def line(name: str, word: str) -> str:
    """Returns a whole line: `reverse: hello=olleh`."""
    return prompt_text(name, word) + apply(name, word)


def is_held_out(word: str) -> bool:
    """Returns whether a stable hash holds the word out of pretraining (one in ten)."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:8]) % 10 == 0


def words(rng: np.random.Generator, count: int, *, held_out: bool) -> list[str]:
    """Draws random lower-case words, with repetition.

    Lengths are uniform; letters have approximately their English frequencies.

    Args:
      rng: source of the words; the same state gives the same words.
      count: number of words.
      held_out: whether all words are held out of pretraining, or none.
    """
    weights = np.array(list(LETTER_WEIGHTS.values()), float)
    letters = np.array(list(LETTER_WEIGHTS))
    selected: list[str] = []
    while len(selected) < count:
        lengths = rng.integers(SHORTEST_WORD, LONGEST_WORD + 1, size=1024)
        drawn = rng.choice(
            letters, size=(1024, LONGEST_WORD), p=weights / weights.sum()
        )
        candidates = (
            "".join(row[:length]) for row, length in zip(drawn, lengths, strict=True)
        )
        selected += [word for word in candidates if is_held_out(word) == held_out]
    return selected[:count]


@dataclasses.dataclass(frozen=True)
class Splits:
    """Distinct words for tuning, for choosing a step, and for testing.

    Attributes:
      train: words that pretraining may have used (nine tenths of all).
      dev: held-out words that choose the best step.
      test: held-out words that measure the result.
    """

    train: tuple[str, ...]
    dev: tuple[str, ...]
    test: tuple[str, ...]


def splits(seed: int, *, train: int, dev: int, test: int) -> Splits:
    """Draws disjoint words for tuning and measuring.

    Args:
      seed: the same seed and sizes give the same words.
      train: number of words to tune on.
      dev: number of words for choosing the best step.
      test: number of words for testing.
    """
    seen_rng, held_out_rng = (
        np.random.default_rng(child) for child in np.random.SeedSequence(seed).spawn(2)
    )
    unseen = _distinct(held_out_rng, dev + test, held_out=True)
    return Splits(
        train=tuple(_distinct(seen_rng, train, held_out=False)),
        dev=tuple(unseen[:dev]),
        test=tuple(unseen[dev:]),
    )


def _distinct(rng: np.random.Generator, count: int, *, held_out: bool) -> list[str]:
    """Returns the first `count` distinct words that the generator draws."""
    distinct: dict[str, None] = {}
    while len(distinct) < count:
        distinct |= dict.fromkeys(words(rng, count, held_out=held_out))
    return list(distinct)[:count]


def pretraining_pairs(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
    """Draws prompts and completions of trained skills on words that are not held out.

    Every trained skill and composition is equally likely.
    """
    names = rng.choice(np.array(TRAINED), size=count)
    drawn = words(rng, count, held_out=False)
    return [
        (prompt_text(str(name), word), apply(str(name), word))
        for name, word in zip(names, drawn, strict=True)
    ]


def encode(text: str) -> list[int]:
    """Returns one token ID per character.

    Raises:
      KeyError: for a character outside the vocabulary.
    """
    return [_IDS[character] for character in text]


def decode(ids: list[int]) -> str:
    """Returns the text of token IDs, without padding, BOS and EOS."""
    return "".join(VOCABULARY[index] for index in ids if index > BOS_ID)


def build_tokenizer() -> Tokenizer:
    """Builds the character tokenizer for the `tokenizers` library.

    It has no unknown token, so encoding a character outside the vocabulary raises an
    error.
    """
    tokenizer = Tokenizer(models.WordLevel(_IDS))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (PAD, EOS, BOS)]
    )
    return tokenizer


def save_tokenizer(folder: Path, *, add_bos: bool) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json` into a model folder.

    Args:
      folder: existing model folder.
      add_bos: whether rows begin with `<bos>`, as in decoder-only models.
    """
    tokenizer = build_tokenizer()
    # The post-processor alone counts for transformers 5, and for this package.
    single, token = (f"{BOS} $A", BOS) if add_bos else (f"$A {EOS}", EOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(token, tokenizer.token_to_id(token))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": not add_bos,
        "pad_token": PAD,
        "eos_token": EOS,
        "bos_token": BOS,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
