"""Decodes the messages of gRPC requests. An error names the field."""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from kintsugi.core.errors import InvalidField


def parse_message(kind: Any, data: bytes) -> Any:
    """Decode a message of one of our services. Raises `InvalidField`, which names a text that is not UTF-8,
    or `request` if the bytes are not such a message."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        problem = str(error)
    name = kind.DESCRIPTOR.full_name
    try:
        untyped = GetMessageClass(
            _without_texts(kind.DESCRIPTOR.file).FindMessageTypeByName(name)
        ).FromString(data)
    except DecodeError:
        pass
    else:
        _check_texts(untyped, "")
    raise InvalidField("request", f"is not a valid {name} ({problem}); use stubs of this proto")


@cache
def _without_texts(declared: Any) -> DescriptorPool:
    """Return the messages of a proto file with `bytes` fields in place of `string` fields. The wire format is
    the same, but decoding accepts a text that is not UTF-8, so that an error can name its field."""
    pool = DescriptorPool()
    for source in (*declared.dependencies, declared):
        file = FileDescriptorProto()
        source.CopyToProto(file)
        for field in (field for message in file.message_type for field in message.field):
            if field.type == FieldDescriptorProto.TYPE_STRING:
                field.type = FieldDescriptorProto.TYPE_BYTES
        pool.Add(file)
    return pool


def _check_texts(message: Any, where: str) -> None:
    for field, value in message.ListFields():
        for index, one in enumerate(value if field.is_repeated else [value]):
            path = f"{where}{field.name}" + (f"[{index}]" if field.is_repeated else "")
            if isinstance(one, bytes):
                _check_utf8(one, path)
            elif field.message_type is not None:
                _check_texts(one, f"{path}.")


def _check_utf8(data: bytes, where: str) -> None:
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise InvalidField(where, f"is not UTF-8 at byte {error.start}; encode texts as UTF-8") from None
