"""The messages between the manager and the program that it runs on a machine: a JSON object and bytes, each with its length."""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO, NamedTuple

START = b"\ntrial-keeper serve-machine\n"
"""The first output of the program. What a login shell has printed before is skipped."""
LENGTHS = struct.Struct("!II")
MAX_BODY_BYTES = 1 << 20
"""The largest piece of a file in one message."""
_MAX_HEADER_BYTES = 8 << 20


class Frame(NamedTuple):
    """One message."""

    header: dict[str, Any]
    body: bytes = b""


class FrameInvalid(ValueError):
    """cannot read a message of the other side; install the same version of trial-keeper on both machines"""


def encode(header: dict[str, Any], body: bytes = b"") -> bytes:
    """The bytes of one message."""
    text = json.dumps(header).encode()
    return LENGTHS.pack(len(text), len(body)) + text + body


def lengths_of(prefix: bytes) -> tuple[int, int]:
    """The lengths of header and body.

    Raises:
        FrameInvalid: they exceed every message.
    """
    header_bytes, body_bytes = LENGTHS.unpack(prefix)
    if header_bytes > _MAX_HEADER_BYTES or body_bytes > MAX_BODY_BYTES:
        raise FrameInvalid(
            f"cannot read a message of {header_bytes} + {body_bytes} bytes; is something else printed there?"
        )
    return header_bytes, body_bytes


def header_of(text: bytes) -> dict[str, Any]:
    """The header.

    Raises:
        FrameInvalid: it is no JSON object.
    """
    try:
        header = json.loads(text)
    except ValueError as error:
        raise FrameInvalid(f"cannot read a message: {error}") from error
    if not isinstance(header, dict):
        raise FrameInvalid(f"cannot read a message: {text[:100]!r} is no object")
    return header


def read_frame(source: BinaryIO) -> Frame | None:
    """The next message; None at the end of the input, also in the middle of a message.

    Raises:
        FrameInvalid: it is no message.
    """
    prefix = source.read(LENGTHS.size)
    if len(prefix) < LENGTHS.size:
        return None
    header_bytes, body_bytes = lengths_of(prefix)
    text, body = source.read(header_bytes), source.read(body_bytes)
    return None if len(text) < header_bytes or len(body) < body_bytes else Frame(header_of(text), body)
