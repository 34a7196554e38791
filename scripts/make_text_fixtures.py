"""Makes tokenizers and prepared data files of small invented texts, for the tests.

    python -m scripts.make_text_fixtures

It writes `tests/fixtures/tokenizers` with three kinds of tokenizer that the libraries
`sentencepiece` and `tokenizers` train,

    bpe/           tokenizer.model, tokenizer_config.json: byte fallback and BOS (Llama)
    unigram/       spiece.model: padding 0, EOS 1, no BOS (T5)
    byte_level/    vocab.json, merges.txt: `<|endoftext|>` alone (GPT-2)

and `tests/fixtures/data_prep` with lines of prompts and completions, and the rows of
generative_data_prep (github.com/sambanova/generative_data_prep) for them, with the
byte-level tokenizer: `tuning` has one example in each row (`single::drop`),
`pretraining` texts without a prompt that are cut anywhere (`full`). The rules are
written here again, and need nothing of this package.
"""

import io
import json
import random
import shutil
from pathlib import Path

import h5py
import numpy as np
import sentencepiece
import tokenizers

FOLDER = Path(__file__).parents[1] / "tests/fixtures"
LENGTH = 128
LINES = 100
BPE_PIECES, UNIGRAM_PIECES = 400, 300
END = "<|endoftext|>"
PROMPT, COMPLETION, PADDING, SEPARATOR = range(4)

NAMES = ("Lily", "Tom", "Ben", "Mia", "Sue", "Max", "Anna", "Tim")
ANIMALS = ("cat", "dog", "bird", "frog", "duck", "mouse", "horse", "fox")
PLACES = ("park", "café", "house", "garden", "river", "forest", "old mill", "beach")
ADJECTIVES = ("little", "happy", "good", "big", "red", "kind", "brave", "sad")
VERBS = ("saw", "found", "loved", "fed", "followed", "painted", "lost", "helped")
SENTENCES = (
    "Once upon a time, there was a {adjective} girl named {name}.",
    "Once upon a time, {name} and {other} went to the {place}.",
    "One day, {name} {verb} a {adjective} {animal} in the {place}.",
    'The {animal} said, "I am not {adjective}!"',
    "Unfortunately, they did not {see} the {animal} at {number} o'clock.",
    "Why? Because the {adjective} {animal} {verb} {name}.",
    "Question: where is the {animal}? Answer: yes, in the {place}.",
    "It was a {adjective} movie. Sentiment: positive",
    "It was not a {adjective} movie. Sentiment: negative",
    "\u201cDo you {see} it?\u201d {name} asked; they said: \u201cThe end.\u201d",
    "hello={name}; the {number}rd {place} \u2013 {number}%, and more\u2026",
)


def sentence(draw: random.Random) -> str:
    """Returns a random sentence."""
    return draw.choice(SENTENCES).format(
        name=draw.choice(NAMES),
        other=draw.choice(NAMES),
        animal=draw.choice(ANIMALS),
        place=draw.choice(PLACES),
        adjective=draw.choice(ADJECTIVES),
        verb=draw.choice(VERBS),
        see=draw.choice(("see", "hear", "believe")),
        number=draw.randint(0, 99),
    )


def text(draw: random.Random, sentences: int) -> str:
    """Returns a text of random sentences."""
    return " ".join(sentence(draw) for _ in range(sentences))


def corpus() -> list[str]:
    """Returns the lines from which tokenizers learn; every ASCII character occurs."""
    draw = random.Random(0)
    printable = " ".join(map(chr, range(33, 127)))
    return [printable, *(text(draw, 5) for _ in range(2000))]


def main() -> None:
    """Makes all files."""
    for name in ("tokenizers", "data_prep"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    lines = corpus()
    bpe = {"model_type": "bpe", "byte_fallback": True, "vocab_size": BPE_PIECES}
    train_pieces(FOLDER / "tokenizers/bpe/tokenizer.model", lines, **bpe)
    settings = {"add_bos_token": True, "bos_token": "<s>", "eos_token": "</s>"}
    settings |= {"add_eos_token": False, "unk_token": "<unk>", "pad_token": None}
    config = FOLDER / "tokenizers/bpe/tokenizer_config.json"
    config.write_text(json.dumps(settings, indent=1) + "\n")
    ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    unigram = {"model_type": "unigram", "vocab_size": UNIGRAM_PIECES, **ids}
    train_pieces(FOLDER / "tokenizers/unigram/spiece.model", lines, **unigram)
    tokenizer = train_byte_level(FOLDER / "tokenizers/byte_level", lines)
    make_rows(FOLDER / "data_prep", tokenizer)


def train_pieces(file: Path, lines: list[str], **settings) -> None:
    """Trains a SentencePiece model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=model,
        character_coverage=1.0,
        normalization_rule_name="identity",  # the default has a table of 240 kB
        num_threads=1,
        minloglevel=2,
        **settings,
    )
    file.parent.mkdir(parents=True)
    file.write_bytes(model.getvalue())


def train_byte_level(folder: Path, lines: list[str]) -> tokenizers.Tokenizer:
    """Trains a tokenizer as GPT-2's, whose last token ends a text."""
    folder.mkdir(parents=True)
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(lines, vocab_size=511, show_progress=False)
    tokenizer.add_special_tokens([END])
    tokenizer.save_model(str(folder))
    # The library saves the tokens of the model alone.
    file = folder / "vocab.json"
    vocabulary = json.loads(file.read_text("utf-8")) | {END: tokenizer.token_to_id(END)}
    file.write_text(json.dumps(vocabulary, ensure_ascii=False) + "\n", "utf-8")
    return tokenizer._tokenizer


def make_rows(folder: Path, tokenizer: tokenizers.Tokenizer) -> None:
    """Writes lines and their rows."""
    folder.mkdir()
    draw = random.Random(1)
    tuning = [question(draw, number) for number in range(LINES)]
    texts = [("", text(draw, draw.randint(1, 6))) for _ in range(LINES)]
    for name, pairs in {"tuning": tuning, "pretraining": texts}.items():
        lines = [json.dumps({"prompt": p, "completion": c}) for p, c in pairs]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (end,) = tokenizer.encode(END).ids
    single = [row for row in typed(tokenizer, tuning) if len(row) <= LENGTH]
    whole = [token for row in typed(tokenizer, texts) for token in row]
    full = [whole[start : start + LENGTH] for start in range(0, len(whole), LENGTH)]
    for name, rows in {"tuning": single, "pretraining": full}.items():
        write_rows(folder / f"{name}.hdf5", rows, end)


def question(draw: random.Random, number: int) -> tuple[str, str]:
    """Returns a prompt and a completion; one of them is too long for a row."""
    given = text(draw, 40 if number == 17 else draw.randint(1, 4))
    answer = sentence(draw)
    if number % 3 == 0:
        return f"\n{given}\n", f"\n{answer}\n"
    return f"Title of: {given} \n\nTitle: ", f" {answer}"


def typed(
    tokenizer: tokenizers.Tokenizer, pairs: list[tuple[str, str]]
) -> list[list[tuple[int, int]]]:
    """Returns the tokens of each pair with their types.

    The texts are joined by one space, and encoded each alone; the token that ends them
    separates attention.
    """
    rows = []
    for prompt, completion in pairs:
        given = tokenizer.encode(prompt.rstrip(" ")).ids
        rest = completion.lstrip(" ")
        learned = tokenizer.encode(f" {rest}").ids
        row = [(token, PROMPT) for token in given]
        row += [(token, COMPLETION) for token in learned]
        rows.append([*row, (tokenizer.token_to_id(END), SEPARATOR)])
    return rows


def write_rows(file: Path, rows: list[list[tuple[int, int]]], end: int) -> None:
    """Writes rows, padded with the token that ends a text."""
    arrays = np.full((2, len(rows), LENGTH), end, np.int32)
    arrays[1] = PADDING
    for index, row in enumerate(rows):
        arrays[:, index, : len(row)] = np.array(row).T
    with h5py.File(file, "w") as output:
        for name, array in zip(("input_ids", "token_type_ids"), arrays, strict=True):
            output.create_dataset(
                name, data=array, compression="gzip", maxshape=(None, LENGTH)
            )
    counts = np.bincount(arrays[1].ravel(), minlength=4)
    print(f"{file}: {len(rows)} rows, tokens of each type {counts.tolist()}")


if __name__ == "__main__":
    main()
