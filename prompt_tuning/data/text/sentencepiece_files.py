"""Sentencepiece files, read as models of the library `tokenizers`.

We describe the fields that we read of their messages (sentencepiece_model.proto)
instead of importing them from `sentencepiece`: its generated code needs at least the
version of `protobuf` that generated it.
"""

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompt_tuning.core.errors import InputError
from prompt_tuning.core.typed_json import read_limited
from prompt_tuning.data.text.encoding_limits import MAXIMUM_FILE, reporting_errors

if TYPE_CHECKING:
    import tokenizers

UNIGRAM, BPE = 1, 2
"""Algorithms in `TrainerSpec.model_type` that are read."""
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Types of pieces in `ModelProto.SentencePiece.type`."""
MAXIMUM_SPLITS = 2**28
"""Maximum sum of the squared lengths of all pieces; Gemma's have less than 2^25."""
MARK = "\u2581"
"""Character that stands for a space."""


@dataclasses.dataclass(frozen=True)
class SentencePieceFile:
    """A message `ModelProto` (sentencepiece_model.proto) of the file `source`."""

    proto: Any
    source: str

    @property
    def scores(self) -> list[tuple[str, float]]:
        """The pieces in the order of their ids, with their scores."""
        return [(piece.piece, piece.score) for piece in self.proto.pieces]

    @property
    def charsmap(self) -> bytes:
        """Table of characters to replace; may be empty."""
        return self.proto.normalizer_spec.precompiled_charsmap

    def roles(self) -> dict[str, str]:
        """Returns the texts of BOS, EOS, padding and the unknown token."""
        trainer, size = self.proto.trainer_spec, len(self.proto.pieces)
        ids = {
            "bos_token": trainer.bos_id,
            "eos_token": trainer.eos_id,
            "unk_token": trainer.unk_id,
            "pad_token": trainer.pad_id,
        }
        pieces = self.proto.pieces
        return {role: pieces[i].piece for role, i in ids.items() if 0 <= i < size}

    def check(self) -> None:
        """Refuses a file without pieces, or with very long ones."""
        if not self.proto.pieces:
            raise InputError(
                f"{self.source} is not a sentencepiece model: it has no pieces"
            )
        if sum(len(piece.piece) ** 2 for piece in self.proto.pieces) > MAXIMUM_SPLITS:
            raise InputError(
                f"{self.source} has pieces that are too long to be a vocabulary"
            )

    def added_tokens(self) -> "list[tokenizers.AddedToken]":
        """Returns the pieces that texts contain as a whole, such as control tokens."""
        import tokenizers

        return [
            tokenizers.AddedToken(
                piece.piece, normalized=False, special=piece.type == CONTROL
            )
            for piece in self.proto.pieces
            if piece.type in (CONTROL, USER_DEFINED)
        ]

    def merges_by_id(self) -> list[tuple[str, str]]:
        """Returns the merges that result in each piece, in the order of their ids."""
        pieces = {piece: None for piece, _ in self.scores}
        return [
            pair
            for piece in pieces
            for pair in _splits(piece)
            if all(part in pieces for part in pair)
        ]

    def merges_by_score(self) -> list[tuple[str, str]]:
        """Returns the merges of normal pieces, from the highest score to the lowest."""
        normal = {
            piece.piece: (-piece.score, id)
            for id, piece in enumerate(self.proto.pieces)
            if piece.type == NORMAL
        }
        ranked = [
            (*rank, *pair)
            for piece, rank in normal.items()
            for pair in _splits(piece)
            if all(part in normal for part in pair)
        ]
        return [(left, right) for *_, left, right in sorted(ranked)]

    def standard_tokenizer(self, *, legacy: bool) -> "tokenizers.Tokenizer":
        """Builds a tokenizer that encodes as the sentencepiece library does.

        With `legacy`, a space is put before each text that follows an added token, and
        not only before the first.
        """
        import tokenizers
        from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

        trainer, spec = self.proto.trainer_spec, self.proto.normalizer_spec
        pieces = self.proto.pieces
        defined = [piece.piece for piece in pieces if piece.type == USER_DEFINED]
        fallback = trainer.byte_fallback
        if trainer.model_type == UNIGRAM:
            model = models.Unigram(self.scores, trainer.unk_id, fallback)
        else:
            model = models.BPE(
                vocab={piece: i for i, (piece, _) in enumerate(self.scores)},
                merges=self.merges_by_score(),
                unk_token=trainer.unk_piece,
                fuse_unk=True,
                byte_fallback=fallback,
                ignore_merges=bool(defined),
            )
        tokenizer = tokenizers.Tokenizer(model)
        steps: list[Any] = []
        if self.charsmap:
            steps.append(normalizers.Precompiled(self.charsmap))
        if spec.remove_extra_whitespaces:
            steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
            steps.append(normalizers.Replace(Regex(" {2,}"), " "))
        if spec.escape_whitespaces:
            steps.append(normalizers.Replace(" ", MARK))
        if spec.add_dummy_prefix and legacy:
            # `Metaspace` adds no mark before one, but sentencepiece does.
            steps.append(normalizers.Replace(Regex(rf"\A{MARK}"), MARK * 2))
        tokenizer.normalizer = normalizers.Sequence(steps)
        splits: list[Any] = []
        if spec.add_dummy_prefix:
            scheme = "always" if legacy else "first"
            splits.append(pre_tokenizers.Metaspace(MARK, scheme, split=False))
        if defined:
            longest_first = sorted(defined, key=len, reverse=True)
            pattern = "|".join(map(re.escape, longest_first))
            splits.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
        if splits:
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace(MARK, " "),
                *([decoders.ByteFallback()] if fallback else []),
                decoders.Fuse(),
                *([decoders.Strip(" ", left=1)] if spec.add_dummy_prefix else []),
            ]
        )
        return tokenizer


def read_sentencepiece(file: Path) -> SentencePieceFile:
    """Reads a sentencepiece file of a supported algorithm."""
    content = read_limited(file, MAXIMUM_FILE)
    with reporting_errors(lambda: f"{file} is not a sentencepiece model"):
        proto = parse_model(content)
    pieces = SentencePieceFile(proto, str(file))
    pieces.check()
    if proto.trainer_spec.model_type not in (UNIGRAM, BPE):
        raise InputError(
            f"{file} is a sentencepiece model of type {proto.trainer_spec.model_type}, "
            f"expected {UNIGRAM} (unigram) or {BPE} (byte pair encoding)"
        )
    return pieces


def _splits(piece: str) -> Iterable[tuple[str, str]]:
    return ((piece[:i], piece[i:]) for i in range(1, len(piece)))


PACKAGE = "prompt_tuning.sentencepiece"
OPTIONAL, REPEATED = 1, 3
"""Values of `FieldDescriptorProto.Label`."""
TYPES = {"float": 2, "integer": 5, "flag": 8, "text": 9, "message": 11, "bytes": 12}
"""Values of `FieldDescriptorProto.Type`."""
MESSAGES: dict[str, list[tuple[str, int, str, str]]] = {
    "Piece": [
        ("piece", 1, "text", ""),
        ("score", 2, "float", "0"),
        ("type", 3, "integer", "1"),
    ],
    "TrainerSpec": [
        ("model_type", 3, "integer", "1"),
        ("byte_fallback", 35, "flag", "false"),
        ("unk_id", 40, "integer", "0"),
        ("bos_id", 41, "integer", "1"),
        ("eos_id", 42, "integer", "2"),
        ("pad_id", 43, "integer", "-1"),
        ("unk_piece", 45, "text", "<unk>"),
    ],
    "NormalizerSpec": [
        ("precompiled_charsmap", 2, "bytes", ""),
        ("add_dummy_prefix", 3, "flag", "true"),
        ("remove_extra_whitespaces", 4, "flag", "true"),
        ("escape_whitespaces", 5, "flag", "true"),
    ],
    "ModelProto": [
        ("pieces", 1, "message", "Piece"),
        ("trainer_spec", 2, "message", "TrainerSpec"),
        ("normalizer_spec", 3, "message", "NormalizerSpec"),
    ],
}
"""Name, number, type, and default or message of each field."""


def parse_model(content: bytes) -> Any:
    """Returns the message `ModelProto` of a file; DecodeError if it has none."""
    model = _model_class()()
    model.ParseFromString(content)
    return model


def make_model(
    pieces: Iterable[tuple[str, float, int]],
    trainer: Mapping[str, Any],
    normalizer: Mapping[str, Any],
) -> Any:
    """Returns a message `ModelProto`; pieces are text, score and type."""
    model = _model_class()()
    for text, score, kind in pieces:
        model.pieces.add(piece=text, score=score, type=kind)
    for part, fields in (
        (model.trainer_spec, trainer),
        (model.normalizer_spec, normalizer),
    ):
        for name, value in fields.items():
            setattr(part, name, value)
    return model


@functools.cache
def _model_class() -> type[Any]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(
        name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto2"
    )
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, default in fields:
            added = message.field.add(name=field, number=number)
            added.type = TYPES[kind]  # pyright: ignore
            added.label = REPEATED if field == "pieces" else OPTIONAL  # pyright: ignore
            if kind == "message":
                added.type_name = f".{PACKAGE}.{default}"
            elif default:
                added.default_value = default
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    descriptor = pool.FindMessageTypeByName(f"{PACKAGE}.ModelProto")
    return message_factory.GetMessageClass(descriptor)
