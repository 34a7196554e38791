"""The fields that we read of a sentencepiece file (sentencepiece_model.proto).

We describe the messages here instead of importing them from `sentencepiece`: its
generated code needs at least the version of `protobuf` that generated it.
"""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

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
