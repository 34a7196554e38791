"""The toy world of the bundled models: string skills on random words.

A line is `reverse: hello=olleh`; a composition names two skills, the first applied
first: `swap rot1: hello=pfmmi`. Some skills and one composition are kept out of
pretraining, so that a tuned prompt can be shown to reach what no words can ask for
(`tail`, `reverse upper`), and to miss what the model lacks (`rot2`). Nothing here
imports JAX.
"""

import dataclasses
import hashlib
import json
import string
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

Skill = Callable[[str], str]

SHORTEST_WORD, LONGEST_WORD = 3, 8
# Percent of running English text, rounded, none below 1: rare letters must be seen too.
LETTER_WEIGHTS = dict(
    zip(
        string.ascii_lowercase,
        (8, 2, 3, 4, 12, 2, 2, 6, 7, 1, 1, 4, 2, 7, 8, 2, 1, 6, 6, 9, 3, 1, 2, 1, 2, 1),
        strict=True,
    )
)


def _rotate_alphabet(steps: int) -> Skill:
    """The skill that moves every letter on by `steps`, `z` to `a`, case kept."""
    table = {}
    for letters in (string.ascii_lowercase, string.ascii_uppercase):
        table |= str.maketrans(letters, letters[steps:] + letters[:steps])
    return lambda word: word.translate(table)


def _swap(word: str) -> str:
    """The first and the last letter exchanged."""
    return word if len(word) < 2 else word[-1] + word[1:-1] + word[0]


def _star(word: str) -> str:
    """Every vowel replaced by a star."""
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
# None equals a kept-out function under another name, as `upper reverse` (the same as
# `reverse upper`), `left init` (`tail`) and `rot1 rot1` (`rot2`) would.
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
    """What the named skill, or composition from left to right, makes of a word.

    Raises:
      KeyError: if a part of the name is no skill.
    """
    for part in name.split():
        word = SKILLS[part](word)
    return word


def prompt_text(name: str | None, word: str) -> str:
    """The text before the answer: `reverse: hello=`, or bare `hello=`."""
    return f"{word}=" if name is None else f"{name}: {word}="


def line(name: str, word: str) -> str:
    """One whole line: `reverse: hello=olleh`."""
    return prompt_text(name, word) + apply(name, word)


def is_held_out(word: str) -> bool:
    """Whether pretraining never sees the word: one in ten, by a stable hash."""
    return int.from_bytes(hashlib.sha256(word.encode()).digest()[:8]) % 10 == 0


def words(rng: np.random.Generator, count: int, *, held_out: bool) -> list[str]:
    """Random lower-case words, all held out of pretraining or none; some may repeat.

    Lengths are uniform, letters are drawn with rough English frequencies.

    Args:
      rng: source of the words; the same state gives the same words.
      count: how many.
      held_out: which side of the hash.
    """
    weights = np.array(list(LETTER_WEIGHTS.values()), float)
    letters = np.array(list(LETTER_WEIGHTS))
    found: list[str] = []
    while len(found) < count:
        lengths = rng.integers(SHORTEST_WORD, LONGEST_WORD + 1, size=1024)
        drawn = rng.choice(
            letters, size=(1024, LONGEST_WORD), p=weights / weights.sum()
        )
        candidates = (
            "".join(row[:length]) for row, length in zip(drawn, lengths, strict=True)
        )
        found += [word for word in candidates if is_held_out(word) == held_out]
    return found[:count]


@dataclasses.dataclass(frozen=True)
class Splits:
    """Words to tune on, to choose the best step by, and to report; all distinct.

    Attributes:
      train: from the nine tenths that pretraining may have seen.
      dev: from the held-out tenth.
      test: from the held-out tenth.
    """

    train: tuple[str, ...]
    dev: tuple[str, ...]
    test: tuple[str, ...]


def splits(seed: int, *, train: int, dev: int, test: int) -> Splits:
    """Draws disjoint words for tuning and measuring.

    Args:
      seed: the same seed and sizes give the same words.
      train: number of words to tune on.
      dev: number of words to choose by.
      test: number of words to report.
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
    """The first `count` different words that the generator draws."""
    found: dict[str, None] = {}
    while len(found) < count:
        found |= dict.fromkeys(words(rng, count, held_out=held_out))
    return list(found)[:count]


def pretraining_pairs(rng: np.random.Generator, count: int) -> list[tuple[str, str]]:
    """Prompt and completion of random lines: trained names, words not held out.

    Every trained skill and composition is equally likely.
    """
    names = rng.choice(np.array(TRAINED), size=count)
    drawn = words(rng, count, held_out=False)
    return [
        (prompt_text(str(name), word), apply(str(name), word))
        for name, word in zip(names, drawn, strict=True)
    ]


def encode(text: str) -> list[int]:
    """One id per character.

    Raises:
      KeyError: for a character outside the vocabulary.
    """
    return [_IDS[character] for character in text]


def decode(ids: list[int]) -> str:
    """The characters of the ids; padding, beginning and end give no text."""
    return "".join(VOCABULARY[index] for index in ids if index > BOS_ID)


def build_tokenizer() -> Tokenizer:
    """The character tokenizer, in the form that the `tokenizers` library reads.

    It has no unknown token: a character outside the vocabulary raises on encoding
    rather than vanish.
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
      folder: an existing model folder.
      add_bos: whether rows begin with `<bos>`: decoder-only models, not T5.
    """
    build_tokenizer().save(str(folder / "tokenizer.json"))
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
