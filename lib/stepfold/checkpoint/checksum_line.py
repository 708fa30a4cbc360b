"""The line with a checksum that precedes the JSON of manifests and notes; readable without jax."""

import zlib

_START = b"stepfold crc32 "


def add_checksum(text: bytes) -> bytes:
    """Precede a text by a line with its checksum."""
    return _START + f"{zlib.crc32(text):08x}\n".encode() + text


def without_checksum(content: bytes) -> bytes | None:
    """Return the text behind a line with its checksum; None if it was changed."""
    text = content.partition(b"\n")[2]
    return text if content == add_checksum(text) else None
