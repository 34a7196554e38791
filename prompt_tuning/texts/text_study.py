"""Rows about a text, on which a prefix learns to stand for it.

Half of the rows are what the model itself writes behind a chunk of the text; all rows
of a chunk are written together. The others are passages of the text, of which the model
is given the beginning.
"""

import dataclasses
import hashlib
import itertools
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from prompt_tuning.core.atomic_files import replace_file
from prompt_tuning.core.errors import InputError, shown
from prompt_tuning.core.field_checks import check_fields
from prompt_tuning.core.number_ranges import NonnegativeInteger, PositiveInteger
from prompt_tuning.core.parameters import Parameters
from prompt_tuning.core.token_weights import COMPLETION, PADDING, PROMPT
from prompt_tuning.core.typed_json import read_object
from prompt_tuning.data.text.chat_templates import has_chat_template
from prompt_tuning.data.text.tokenizers import Tokenizer
from prompt_tuning.decoding.continue_rows import continue_rows
from prompt_tuning.decoding.sampling_settings import Sampling
from prompt_tuning.pretrained.prompted_model import PromptedModel

GIVEN = 8
"""Maximum number of tokens of a passage that the model is given."""
SHORTEST = 8
"""Minimum number of learned tokens of a row."""
BATCH = 64
UNKNOWN = ("<unk>", "[UNK]")
"""Texts of the token that stands for all characters that a tokenizer does not know."""
STUDY_FILE = "study.json"
"""Says what the rows in its folder were made from."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextStudy:
    """How rows are made from a text.

    Attributes:
      rows: number of rows to learn from.
      held_out: number of further rows to measure on.
      chunk: maximum number of tokens of the text that the model reads before it writes;
        None for the whole text.
      passage: maximum number of learned tokens of a row.
      seed: seed of the passages, and of what the model writes.
    """

    rows: PositiveInteger = 1024
    held_out: PositiveInteger = 128
    chunk: PositiveInteger | None = None
    passage: PositiveInteger = 32
    seed: NonnegativeInteger = 0

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class StudiedText:
    """A text that fits a model, with the lengths of rows about it.

    Attributes:
      ids: tokens of the text.
      begin: tokens that begin each row, such as BOS.
      given: maximum number of tokens of a passage that the model is given.
      learned: maximum number of learned tokens of a row.
    """

    ids: tuple[int, ...]
    begin: tuple[int, ...]
    given: int
    learned: int


def read_text(
    text: str, model: PromptedModel, slots: int, study: TextStudy
) -> StudiedText:
    """Encodes a text, and checks that a model can read it together with a row.

    Args:
      text: the text.
      model: the frozen model.
      slots: number of slots of the prefix that is to stand for the text.
      study: how rows are made.

    Raises:
      InputError: if the text is shorter than the prefix, or too long for the model.
    """
    if model.config.architecture != "decoder_only" or model.config.bidirectional:
        kind = "encoder" if model.config.bidirectional else "encoder-decoder"
        raise InputError(
            "a memory is a key/value prefix of a decoder-only model, and this is an "
            f"{kind}: choose another model"
        )
    tokenizer = model.needed_tokenizer()
    ids, begin = tuple(tokenizer.encode(text)), tuple(model.interface.begin_ids)
    if len(begin) > 1:
        raise InputError(
            f"the tokenizer begins each text with {len(begin)} tokens, which belong "
            "together, and a text is put after one of them: choose another model"
        )
    least = max(slots - len(begin), 2 * SHORTEST)
    if len(ids) < least:
        raise InputError(
            f"the text has {len(ids)} tokens, expected at least {least} for a memory "
            f"of {slots} slots: give a longer text, or no more slots than it has tokens"
        )
    given = min(GIVEN, len(ids) // 2)
    learned = min(study.passage, len(ids) - given)
    limit = model.config.maximum_positions
    if limit is not None:
        room = limit - len(begin) - len(ids) - given
        if room < SHORTEST:
            raise InputError(
                f"the text has {len(ids)} tokens, and the model {limit} positions"
                f"{model.config.positions_note}, which have to hold the text and a row "
                f"about it: give at most {len(ids) + room - SHORTEST} tokens of the "
                "text"
            )
        learned = min(learned, room)
    if study.chunk is not None and study.chunk < SHORTEST:
        raise InputError(
            f"chunks have {study.chunk} tokens, expected at least {SHORTEST}: give "
            "larger chunks, or none to read the whole text"
        )
    _warn_of_text(ids, tokenizer)
    return StudiedText(ids, begin, given, learned)


def _warn_of_text(ids: Sequence[int], tokenizer: Tokenizer) -> None:
    """Warns of what a memory of a text will not be."""
    unknown = sum(tokenizer.token(token) in UNKNOWN for token in ids)
    if unknown:
        warnings.warn(
            f"{unknown} of the {len(ids)} tokens of the text stand for characters that "
            "the tokenizer does not know: the memory cannot tell them apart",
            stacklevel=3,
        )
    if has_chat_template(tokenizer):
        warnings.warn(
            "the model has a chat template, but the rows about the text are plain "
            "text: the memory learns to continue the text, not to answer questions "
            "about it",
            stacklevel=3,
        )


def write_study(
    folder: Path,
    text: StudiedText,
    study: TextStudy,
    model: PromptedModel,
    parameters: Parameters,
) -> tuple[Path, Path]:
    """Writes rows to learn from and rows to measure on, unless the folder has them.

    Args:
      folder: folder of the two HDF5 files.
      text: the text.
      study: how rows are made.
      model: the frozen model.
      parameters: its parameters.

    Raises:
      InputError: if the folder has rows that were made from something else.
    """
    files = folder / "train.hdf5", folder / "held_out.hdf5"
    made_from = _describe(text, study, model)
    if (folder / STUDY_FILE).exists():
        _check_same(folder / STUDY_FILE, made_from)
        return files
    random = np.random.default_rng(study.seed)
    count = study.rows + study.held_out
    # The model may end some of its texts at once, and passages take their place.
    rows = _continuations(text, study, model, parameters, count // 2)
    rows += _passages(text, random, count - len(rows))
    order = random.permutation(len(rows))
    parts = np.split(order, [len(order) - study.held_out])
    folder.mkdir(parents=True, exist_ok=True)
    for file, part in zip(files, parts, strict=True):
        _write_rows(file, [rows[index] for index in part])
    replace_file(folder / STUDY_FILE, json.dumps(made_from, indent=1) + "\n")
    return files


def _describe(
    text: StudiedText, study: TextStudy, model: PromptedModel
) -> dict[str, Any]:
    """Returns what rows are made from."""
    digest = hashlib.sha256(json.dumps(text.ids).encode()).hexdigest()
    settings = dataclasses.asdict(study)
    return {"model": model.interface.origin, "text": digest, **settings}


def _check_same(file: Path, made_from: dict[str, Any]) -> None:
    """Checks that rows were made from the same text, model and settings.

    Raises:
      InputError: with what differs.
    """
    recorded = read_object(file).values
    for name, value in made_from.items():
        if recorded.get(name) != value:
            found = f"is {shown(value)} and was {shown(recorded.get(name))}"
            raise InputError(
                f"{file.parent} has rows about a text, of which {name} {found}: give "
                "another directory (--out), or the same as before"
            )


Row = tuple[list[int], list[int]]
"""Tokens that are given, and tokens that are learned."""


def _passages(text: StudiedText, random: np.random.Generator, count: int) -> list[Row]:
    """Draws passages of the text, which begin at any token."""
    ids, length = list(text.ids), text.given + text.learned
    firsts = random.integers(0, len(ids) - length + 1, count)
    lengths = random.integers(1, text.given + 1, count)
    return [
        (
            [*text.begin, *ids[first : first + given]],
            ids[first + given : first + length],
        )
        for first, given in zip(firsts.tolist(), lengths.tolist(), strict=True)
    ]


def _continuations(
    text: StudiedText,
    study: TextStudy,
    model: PromptedModel,
    parameters: Parameters,
    count: int,
) -> list[Row]:
    """Lets the model write behind chunks of the text."""
    chunks = cut_chunks(text.ids, study.chunk or len(text.ids))
    shares = np.array_split(range(count), len(chunks))
    before = [
        [*text.begin, *chunk]
        for chunk, own in zip(chunks, shares, strict=True)
        for _ in own
    ]
    sampling = Sampling(new_tokens=text.learned, temperature=1.0, seed=study.seed)
    written = continue_rows(model, parameters, before, sampling, batch_size=BATCH)
    # Without BOS nothing before a row predicts its first token, which is given then.
    given = 0 if text.begin else 1
    return [
        ([*text.begin, *row[:given]], row[given:])
        for row in written
        if len(row) > given
    ]


def cut_chunks(ids: Sequence[int], length: int) -> list[Sequence[int]]:
    """Cuts a text into chunks of nearly the same length.

    Args:
      ids: tokens of the text.
      length: maximum number of tokens of a chunk.
    """
    count = -(-len(ids) // length)
    bounds = np.linspace(0, len(ids), count + 1).round().astype(int).tolist()
    return [ids[a:b] for a, b in itertools.pairwise(bounds)]


def _write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Writes an HDF5 file of ids and types, as `prepare` does."""
    width = max(len(given) + len(learned) for given, learned in rows)
    ids = np.zeros((len(rows), width), np.int32)
    types = np.full_like(ids, PADDING)
    for index, (given, learned) in enumerate(rows):
        row = [*given, *learned]
        ids[index, : len(row)] = row
        types[index, : len(given)] = PROMPT
        types[index, len(given) : len(row)] = COMPLETION
    partial = path.with_suffix(".partial")
    with h5py.File(partial, "w") as file:
        file["input_ids"], file["token_type_ids"] = ids, types
    partial.replace(path)
