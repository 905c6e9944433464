"""The metrics file as records: the half of the record format that runs in the manager.

The input arrives in pieces and may be arbitrary: a writer may have been killed inside a record, the storage may have filled up,
a user's program may have written to the file. So the reader works line by line. A frame's JSON contains no newline
(`nni_sdk.frame`). Hence a whole frame always ends a line, and its declared length ends exactly at that line's newline. This
guarantees:

- Every whole frame is found once, whatever bytes surround it, and however the bytes are split into pieces. The only exception is
  a frame after garbage whose own text contains 16 fitting headers, which no accident produces.
- All other bytes are skipped and reported as garbage; no input makes the reader raise.

Source: NNI v3.0 SDK; its json_tricks output and its older REQUEST_PARAMETER frames are read as well.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Final, NamedTuple

from nni_sdk.frame import MAX_PAYLOAD_BYTES, encode

__all__ = ["MAX_FRAME_BYTES", "MAX_PAYLOAD_BYTES", "Decoded", "Garbage", "Mark", "Record", "decode", "encode"]

HEADER_BYTES: Final = 8
MAX_FRAME_BYTES: Final = HEADER_BYTES + MAX_PAYLOAD_BYTES

_INT64: Final = 2**63
# A header inside a line rarely declares exactly the remaining length by chance. Each header that does may cost as much as parsing
# the whole line. An attacker can place one every nine bytes; a megabyte of such headers took 40 s.
_MAX_CANDIDATES: Final = 16
# A frame as every SDK writes it: a number, or text without escapes. Matching gives the same result as parsing the JSON, in two
# thirds of the time for one line, and in a third of the time for many lines at once.
_PLAIN = re.compile(
    r'^ME([0-9]{6})\{"parameter_id": (0|[1-9][0-9]{0,17}), "trial_job_id": "([ !#-\[\]-~]*)", "type": "(PERIODICAL|FINAL)", '
    r'"sequence": (0|[1-9][0-9]{0,17}), "value": "([ !#-\[\]-~]*)"\}$',
    re.MULTILINE,
)
_match_plain = _PLAIN.fullmatch
# Ids are shorter: each can be the name of a folder.
_MAX_NAME = 240
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_HEADER = re.compile(r"ME([0-9]{6})\{")
# The wrapper json.loads takes longer than the parsing.
_parse = json.JSONDecoder().raw_decode


class Record(NamedTuple):
    """One reported metric. A tuple, because creating a frozen dataclass takes longer than parsing its JSON.

    `offset` is the start of its frame in the file, and the only unique key of a record: `sequence` counts per process. `size` is
    the whole frame's, so the next byte is at `offset + size`. `type` is PERIODICAL or FINAL. `value` is the unparsed JSON text,
    which may contain NaN or Infinity. All text can be encoded as UTF-8, all ints fit 64 bits.
    """

    offset: int
    parameter_id: int | str
    trial_job_id: str
    type: str
    sequence: int
    value: str
    size: int


# Record's own constructor executes Python bytecode, which doubles the time.
_new_record: Callable[[Iterable[object]], Record] = partial(tuple.__new__, Record)


class Mark(NamedTuple):
    """A checkpoint of this attempt; or, with `attempt_id`, where a process continued from a checkpoint of that attempt.

    `offset` and `size` are as in `Record`. `checkpoint` is unique among those of its attempt. `load` is unique for each load of a
    checkpoint: processes that were forked after it write the same record again.
    """

    offset: int
    size: int
    checkpoint: str
    trial_id: str = ""
    attempt_id: str | None = None
    task: str = ""
    load: str = ""


class Garbage(NamedTuple):
    """A span of the file without a record, and the reason."""

    offset: int
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class Decoded:
    """The result of `decode`. The first `consumed` bytes of the piece are done; pass the rest again with the next piece."""

    records: list[Record]
    consumed: int
    garbage: list[Garbage]
    marks: list[Mark] = field(default_factory=list)


class _NoRecord(Exception):
    """Bytes without a record; the message is the reason."""


def decode(data: bytes, offset: int) -> Decoded:
    """Decode the records in one piece of a metrics file; `offset` is the piece's position in the file.

    An incomplete last line is left unconsumed: pass it again, with the bytes that follow. If the line is longer than any frame,
    its start is garbage, so the caller never holds more than `MAX_FRAME_BYTES`. Adjacent garbage spans with the same reason are
    merged. Never raises.
    """
    garbage: list[Garbage] = []
    marks: list[Mark] = []
    # Latin-1 maps each byte to one character, so positions in the text are positions in the file.
    text = data.decode("latin-1")
    lines = text.split("\n")
    unfinished = lines.pop()
    consumed = len(data) - len(unfinished)
    records = _plain_records(text[:consumed], lines, offset)
    if records is None:
        records = _any_records(lines, offset, garbage, marks)
    # The newline is missing, so a frame of the maximum size may still lack one byte.
    surplus = len(unfinished) - (MAX_FRAME_BYTES - 1)
    if surplus > 0:
        _skip(garbage, offset + consumed, surplus, "no frame is as long as this line")
        consumed += surplus
    return Decoded(records, consumed, garbage, marks)


def _plain_records(text: str, lines: list[str], offset: int) -> list[Record] | None:
    """Decode the lines at once if all are plain frames, as is usual; else None.

    `text` holds the same lines, each with its newline. There is no per-record work here.
    """
    if not lines or "\\" in text:
        return None
    matches = _PLAIN.findall(text)
    if len(matches) != len(lines):
        return None
    declared, parameter_ids, trial_job_ids, types, sequences, values = zip(*matches, strict=True)
    sizes = [len(line) + 1 for line in lines]
    # The set has few elements.
    if any(int(length) + HEADER_BYTES != size for length, size in set(zip(declared, sizes, strict=True))):
        return None
    columns = (
        accumulate(sizes, initial=offset),  # has one element more than the others: the end of the last record
        map(int, parameter_ids),
        trial_job_ids,
        types,
        map(int, sequences),
        values,
        sizes,
    )
    return list(map(_new_record, zip(*columns, strict=False)))


def _any_records(lines: list[str], offset: int, garbage: list[Garbage], marks: list[Mark]) -> list[Record]:
    """Decode the lines one by one; lines without a record are added to `garbage`, or to `marks`."""
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
                _salvage(line, offset, records, garbage, marks)
            else:
                _add(record, records, marks)
        else:
            _salvage(line, offset, records, garbage, marks)
        offset += size
    return records


def _add(found: Record | Mark | None, records: list[Record], marks: list[Mark]) -> None:
    if isinstance(found, Mark):
        marks.append(found)
    elif found is not None:
        records.append(found)


def _salvage(
    line: str, offset: int, records: list[Record], garbage: list[Garbage], marks: list[Mark]
) -> None:
    """Find the frame at the end of a line that is more than a frame; without one, add the line to `garbage`."""
    reason = "no frame ends here"
    for start in _candidates(line):
        try:
            record = _record(line, start, offset)
        except _NoRecord as error:
            reason = str(error)
            continue
        if start:
            _skip(garbage, offset, start, "a partial frame or other bytes before a whole frame")
        _add(record, records, marks)
        return
    _skip(garbage, offset, len(line) + 1, reason)


def _candidates(line: str) -> Iterable[int]:
    """Return the last few positions of headers that declare exactly the remaining length."""
    payload_end = len(line) + 1 - HEADER_BYTES
    fitting = (
        header.start() for header in _HEADER.finditer(line) if int(header[1]) == payload_end - header.start()
    )
    return deque(fitting, _MAX_CANDIDATES)


def _skip(garbage: list[Garbage], offset: int, length: int, reason: str) -> None:
    if garbage and garbage[-1].reason == reason and garbage[-1].offset + garbage[-1].length == offset:
        offset, length = garbage[-1].offset, garbage.pop().length + length
    garbage.append(Garbage(offset, length, reason))


def _record(line: str, start: int, line_offset: int) -> Record | Mark | None:
    """Parse the record in the frame from `start` to the end of the line; None for a frame that is neither metric nor mark.

    Raises:
        _NoRecord: the JSON is invalid, or not a metric's.
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
        raise _NoRecord("a frame whose JSON is invalid") from None
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
        raise _NoRecord("a frame whose JSON is not an object with all keys of a metric") from None
    if type_ in ("CHECKPOINT", "CONTINUED"):
        return _mark(type_, value, line_offset + start, len(line) + 1 - start)
    if type_ not in ("PERIODICAL", "FINAL"):
        raise _NoRecord("a frame of unknown type")
    # Not in functions: the calls would take as long as the parsing.
    if type(sequence) is not int or not -_INT64 <= sequence < _INT64:
        raise _NoRecord("a frame whose sequence is not a 64-bit integer")
    if type(trial_job_id) is not str or not (trial_job_id.isascii() or _is_utf8(trial_job_id)):
        raise _NoRecord("a frame whose trial_job_id is not text")
    if type(value) is not str or not (value.isascii() or _is_utf8(value)):
        raise _NoRecord("a frame whose value is not text")
    if type(parameter_id) is int:
        if not -_INT64 <= parameter_id < _INT64:
            raise _NoRecord("a frame whose parameter_id is not a 64-bit integer")
    elif type(parameter_id) is not str or not _is_utf8(parameter_id):
        raise _NoRecord("a frame whose parameter_id is neither integer nor text")
    return Record(
        line_offset + start, parameter_id, trial_job_id, type_, sequence, value, len(line) + 1 - start
    )


def _mark(type_: str, value: object, offset: int, size: int) -> Mark:
    try:
        content = json.loads(value)  # type: ignore[arg-type]
        if type_ == "CHECKPOINT":
            texts = [content]
            mark = Mark(offset, size, content)
        else:
            names = ("checkpoint", "trial_id", "attempt_id", "task", "load")  # the ids name folders
            texts = [content[name] for name in names]
            mark = Mark(offset, size, *texts)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _NoRecord(f"a {type_} record whose value is invalid") from None
    is_valid = all(type(text) is str and len(text) <= _MAX_NAME and _is_utf8(text) for text in texts)
    if not is_valid or not all(map(_FOLDER_NAME.fullmatch, texts[1:4])):
        raise _NoRecord(f"a {type_} record whose value is invalid")
    return mark


def _is_utf8(text: str) -> bool:
    """True if the text can be encoded: JSON may contain a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
