"""The metrics file as records: the half of the record format that runs in the manager.

Bytes come in pieces and from anybody: a writer may have been killed inside a record, the storage may have filled up, a user's
program may have written to the file. So the reader works line by line. A frame's JSON holds no newline (`nni_sdk.frame`), hence
a whole frame always ends a line, and its declared length reaches exactly to that line's newline. From this follows the promise:

- every whole frame is found once, whatever bytes stand before or after it, and however the bytes were cut into pieces. Only one
  that stands behind garbage, and whose own text holds 16 headers that fit, is passed over; that happens on purpose alone;
- what is no frame is passed over and reported as garbage; no bytes whatever make the reader raise.

Source: NNI v3.0 SDK; its json_tricks output and its older REQUEST_PARAMETER frames are read as well.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Final, NamedTuple

from nni_sdk.frame import MAX_PAYLOAD_BYTES, encode

__all__ = ["MAX_FRAME_BYTES", "MAX_PAYLOAD_BYTES", "Decoded", "Garbage", "Record", "decode", "encode"]

HEADER_BYTES: Final = 8
MAX_FRAME_BYTES: Final = HEADER_BYTES + MAX_PAYLOAD_BYTES

_INT64: Final = 2**63
# By chance hardly ever two headers of a line declare just the length that is left of it. Each that does may cost as much as the
# whole line takes to parse; on purpose there can be one every nine bytes, and a megabyte of them took 40 s.
_MOST_CANDIDATES: Final = 16
# A line with a frame as every SDK writes it, of a number or of text without escapes. What this finds is what the JSON says, in
# two thirds of the time for one line, and in a third for many at once.
_PLAIN = re.compile(
    r'^ME([0-9]{6})\{"parameter_id": (0|[1-9][0-9]{0,17}), "trial_job_id": "([ !#-\[\]-~]*)", "type": "(PERIODICAL|FINAL)", '
    r'"sequence": (0|[1-9][0-9]{0,17}), "value": "([ !#-\[\]-~]*)"\}$',
    re.MULTILINE,
)
_match_plain = _PLAIN.fullmatch
_HEADER = re.compile(r"ME([0-9]{6})\{")
_parse = (
    json.JSONDecoder().raw_decode
)  # json.loads less what it does around it, which takes longer than the parsing


class Record(NamedTuple):
    """One metric a trial reported. A tuple, because a frozen dataclass takes longer to make than its JSON to parse.

    `offset` is where its frame begins in the file, and the only thing that tells two records apart: `sequence` counts per
    process. `size` is the whole frame's, so the next byte is at `offset + size`. `type` is PERIODICAL or FINAL. `value` is
    the JSON text as written, unparsed; it may say NaN or Infinity. All text can be encoded as UTF-8, all ints fit 64 bits.
    """

    offset: int
    parameter_id: int | str
    trial_job_id: str
    type: str
    sequence: int
    value: str
    size: int


# Record's own, without Python's bytecode around it: half the time.
_new_record: Callable[[Iterable[object]], Record] = partial(tuple.__new__, Record)


class Garbage(NamedTuple):
    """A span of the file that holds no record, and why."""

    offset: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decoded:
    """What `decode` found. `consumed` counts bytes from the beginning of the piece; the rest belongs to the next piece."""

    records: list[Record]
    consumed: int
    garbage: list[Garbage]


class _NoRecord(Exception):
    """These bytes are no record; the message is the reason."""


def decode(data: bytes, offset: int) -> Decoded:
    """The records in one piece of a metrics file; `offset` is the piece's place in the file.

    A last line without its newline is left unconsumed: pass it again, with what follows it. Only once it is longer than any
    frame, its beginning is garbage, so the caller never holds more than `MAX_FRAME_BYTES`. Garbage spans that touch and have
    one reason are one span. Never raises.
    """
    garbage: list[Garbage] = []
    # Latin-1 gives each byte one character, so positions in the text are positions in the file.
    text = data.decode("latin-1")
    lines = text.split("\n")
    unfinished = lines.pop()
    consumed = len(data) - len(unfinished)
    records = _plain_records(text[:consumed], lines, offset)
    if records is None:
        records = _any_records(lines, offset, garbage)
    # The newline is missing, so one byte less than a whole frame may yet become one.
    hopeless = len(unfinished) - (MAX_FRAME_BYTES - 1)
    if hopeless > 0:
        _skip(garbage, offset + consumed, hopeless, "no frame is as long as this line")
        consumed += hopeless
    return Decoded(records, consumed, garbage)


def _plain_records(text: str, lines: list[str], offset: int) -> list[Record] | None:
    """What all these lines say, where they are plain frames without exception, as nearly always; else None.

    `text` holds the same lines, each with its newline. Nothing is done here for each record, only for all at once.
    """
    if not lines or "\\" in text:
        return None
    matches = _PLAIN.findall(text)
    if len(matches) != len(lines):
        return None
    declared, parameter_ids, trial_job_ids, types, sequences, values = zip(*matches, strict=True)
    sizes = [len(line) + 1 for line in lines]
    # Few differ.
    if any(int(length) + HEADER_BYTES != size for length, size in set(zip(declared, sizes, strict=True))):
        return None
    columns = (
        accumulate(sizes, initial=offset),  # one more than there are records: where the next one begins
        map(int, parameter_ids),
        trial_job_ids,
        types,
        map(int, sequences),
        values,
        sizes,
    )
    return list(map(_new_record, zip(*columns, strict=False)))


def _any_records(lines: list[str], offset: int, garbage: list[Garbage]) -> list[Record]:
    """What these lines say, one after another; what is no record goes to `garbage`."""
    records: list[Record] = []
    for line in lines:
        size = len(line) + 1
        plain = _match_plain(line)
        if plain is not None and int(plain[1]) == size - HEADER_BYTES:
            _, parameter_id, trial_job_id, type_, sequence, value = plain.groups()
            records.append(Record(offset, int(parameter_id), trial_job_id, type_, int(sequence), value, size))
        elif line.startswith(f"ME{size - HEADER_BYTES:06d}{{"):
            try:
                record = _record(line, 0, offset)
            except _NoRecord:
                _salvage(line, offset, records, garbage)
            else:
                if record is not None:
                    records.append(record)
        else:
            _salvage(line, offset, records, garbage)
        offset += size
    return records


def _salvage(line: str, offset: int, records: list[Record], garbage: list[Garbage]) -> None:
    """Find the frame at the end of a line that is not simply a frame, or say why there is none."""
    reason = "no frame ends here"
    for start in _candidates(line):
        try:
            record = _record(line, start, offset)
        except _NoRecord as error:
            reason = str(error)
            continue
        if start:
            _skip(garbage, offset, start, "a torn frame, or no frame at all, before a whole one")
        if record is not None:
            records.append(record)
        return
    _skip(garbage, offset, len(line) + 1, reason)


def _candidates(line: str) -> Iterable[int]:
    """Where a header stands that declares just the length that is left: the last few, so that none can hide a frame behind it."""
    payload_end = len(line) + 1 - HEADER_BYTES
    fitting = (
        header.start() for header in _HEADER.finditer(line) if int(header[1]) == payload_end - header.start()
    )
    return deque(fitting, _MOST_CANDIDATES)


def _skip(garbage: list[Garbage], offset: int, length: int, reason: str) -> None:
    if garbage and garbage[-1].reason == reason and garbage[-1].offset + garbage[-1].length == offset:
        offset, length = garbage[-1].offset, garbage.pop().length + length
    garbage.append(Garbage(offset, length, reason))


def _record(line: str, start: int, line_offset: int) -> Record | None:
    """The record in the frame from `start` to the end of the line; None for a frame that is no metric.

    Raises:
        _NoRecord: the JSON is none, or not a metric's.
    """
    text, begin = line, start + HEADER_BYTES
    if not line.isascii():
        try:
            text, begin = line[begin:].encode("latin-1").decode(), 0
        except UnicodeDecodeError:
            raise _NoRecord("a frame that is not UTF-8") from None
    try:
        content, end = _parse(text, begin)
    except (ValueError, RecursionError):
        raise _NoRecord("a frame whose JSON is broken") from None
    if end != len(text) and text[end:].strip(" \t\r"):
        raise _NoRecord("a frame with more than one JSON value")
    try:
        type_ = content["type"]
        if type_ == "REQUEST_PARAMETER":  # NNI's multi-phase trials asked for parameters through this file
            return None
        parameter_id = content["parameter_id"]
        trial_job_id = content["trial_job_id"]
        sequence = content["sequence"]
        value = content["value"]
    except (KeyError, TypeError):
        raise _NoRecord("a frame whose JSON is no object with all keys of a metric") from None
    if type_ not in ("PERIODICAL", "FINAL"):
        raise _NoRecord("a frame of unknown type")
    # Written out: as functions, these checks take as long as the parsing.
    if type(sequence) is not int or not -_INT64 <= sequence < _INT64:
        raise _NoRecord("a frame whose sequence is no 64-bit integer")
    if type(trial_job_id) is not str or not (trial_job_id.isascii() or _is_utf8(trial_job_id)):
        raise _NoRecord("a frame whose trial_job_id is no text")
    if type(value) is not str or not (value.isascii() or _is_utf8(value)):
        raise _NoRecord("a frame whose value is no text")
    if type(parameter_id) is int:
        if not -_INT64 <= parameter_id < _INT64:
            raise _NoRecord("a frame whose parameter_id is no 64-bit integer")
    elif type(parameter_id) is not str or not _is_utf8(parameter_id):
        raise _NoRecord("a frame whose parameter_id is neither integer nor text")
    return Record(
        line_offset + start, parameter_id, trial_job_id, type_, sequence, value, len(line) + 1 - start
    )


def _is_utf8(text: str) -> bool:
    """Whether the rest of the world can hold it: JSON may spell half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
