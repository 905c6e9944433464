"""The format of metric records: encoding, decoding, and recovery from garbage."""

import json
import math
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nni_sdk import records as records_module
from nni_sdk.errors import MetricTooLong
from nni_sdk.records import MAX_FRAME_BYTES, MAX_PAYLOAD_BYTES, Garbage, Record, decode, encode

ids = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
frames = st.builds(
    encode,
    st.integers(-(2**63), 2**63 - 1) | ids,
    ids,
    st.sampled_from(["PERIODICAL", "FINAL"]),
    st.integers(0, 2**63 - 1),
    json_values,
)
# These pieces of garbage resemble frames, so they find more bugs than random bytes do.
nearly = st.sampled_from(
    [
        b"ME",
        b"ME000",
        b"ME000012",
        b"ME000012{",
        b"ME999999{",
        b'ME000012{"value": "',
        b"\n",
        b"{}",
        b'"}\n',
        b"\xff\xfe",
        b"ME000003{}\n",
        b"ME000003[]\n",
        b"NNISDK_MEb'1'",
        b"ME\xd9\xa0\xd9\xa0\xd9\xa0\xd9\xa0\xd9\xa0\xd9\xa0{",
    ]
)
corrupt_bytes = st.lists(nearly | st.binary(max_size=30), max_size=6).map(b"".join)
torn = st.tuples(frames, st.floats(0, 1, exclude_max=True)).map(lambda t: t[0][: int(len(t[0]) * t[1])])


def frame_of(payload: str) -> bytes:
    data = (payload + "\n").encode()
    return b"ME%06d%b" % (len(data), data)


def metric(**changes: object) -> dict[str, object]:
    return {
        "parameter_id": 1,
        "trial_job_id": "aBcDe",
        "type": "PERIODICAL",
        "sequence": 0,
        "value": "0.5",
    } | changes


def spans(data: bytes, garbage: list[Garbage]) -> set[int]:
    return {position for span in garbage for position in range(span.offset, span.offset + span.length)}


def decode_in_pieces(data: bytes, cuts: list[int]) -> tuple[list[Record], int, list[Garbage]]:
    """Decode like the manager: each new chunk starts with the undecoded bytes of the previous chunk."""
    records: list[Record] = []
    garbage: list[Garbage] = []
    consumed = 0
    for end in [*sorted(cuts), len(data)]:
        decoded = decode(data[consumed:end], consumed)
        assert 0 <= decoded.consumed <= end - consumed
        consumed += decoded.consumed
        records += decoded.records
        garbage += decoded.garbage
    return records, consumed, garbage


def test_an_encoded_frame_is_identical_to_a_frame_of_nni():
    assert encode(3, "aBcDe", "PERIODICAL", 7, 0.25) == (
        b'ME000099{"parameter_id": 3, "trial_job_id": "aBcDe", "type": "PERIODICAL", "sequence": 7, "value": "0.25"}\n'
    )


def test_the_declared_length_of_a_frame_includes_the_newline():
    data = encode(0, "t", "FINAL", 0, {"default": 1})
    assert int(data[2:8]) == len(data) - 8
    assert data.endswith(b"}\n")


def test_the_declared_length_of_a_frame_has_six_digits():
    for size in range(1_100):
        data = encode(0, "t", "FINAL", 0, "x" * size)
        assert data[:8] == b"ME%06d" % (len(data) - 8)


@given(st.integers(-(2**63), 2**63 - 1) | ids, ids, st.integers(0, 2**63 - 1), json_values)
def test_an_encoded_record_is_decoded_unchanged(parameter_id, trial_job_id, sequence, value):
    data = encode(parameter_id, trial_job_id, "FINAL", sequence, value)
    decoded = decode(data, 1000)
    assert decoded.records == [
        Record(1000, parameter_id, trial_job_id, "FINAL", sequence, json.dumps(value), len(data))
    ]
    assert (decoded.consumed, decoded.garbage) == (len(data), [])


@given(json_values)
def test_the_payload_of_a_frame_is_standard_json(value):
    expected = json.dumps(metric(value=json.dumps(value)))
    assert encode(1, "aBcDe", "PERIODICAL", 0, value) == frame_of(expected)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 5e-324, 1e300, 0.1, -0.0, 10**30, True])
def test_a_metric_number_has_the_same_encoding_as_in_the_json_module(number):
    [record] = decode(encode(1, "t", "FINAL", 0, number), 0).records
    assert record.value == json.dumps(number)


plain_frames = st.builds(
    encode,
    st.integers(-3, 10**20) | st.just("3"),
    st.text(st.characters(codec="ascii"), max_size=6),
    st.sampled_from(["PERIODICAL", "FINAL"]),
    st.integers(0, 10**20),
    st.integers() | st.floats() | st.text(max_size=5),
)


@given(st.lists(plain_frames | frames | torn | corrupt_bytes).map(b"".join), st.data())
def test_the_fast_path_for_plain_frames_gives_the_same_records_as_the_json_parser(content, data):
    if content:
        # Replace one random byte of the content. The new byte can change a length, a number or a string, so a fast path that
        # checks too little gives other records.
        place = data.draw(st.integers(0, len(content) - 1))
        content = (
            content[:place]
            + data.draw(st.sampled_from([b"0", b"1", b"-", b'"', b"\\", b" "]))
            + content[place + 1 :]
        )
    decoded = decode(content, 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records_module, "_plain_records", lambda *_: None)
        assert decode(content, 1000) == decoded
        patch.setattr(records_module, "_match_plain", lambda line: None)
        assert decode(content, 1000) == decoded


@given(st.lists(plain_frames, min_size=1, max_size=5).map(b"".join), st.data())
def test_decoding_plain_frames_in_bulk_gives_the_same_records_as_decoding_each_frame(content, data):
    """Use typical chunks, in which at most one digit of a length is changed."""
    place = content.index(b"ME", data.draw(st.integers(0, content.rindex(b"ME")))) + data.draw(
        st.integers(2, 7)
    )
    content = (
        content[:place]
        + data.draw(st.sampled_from([content[place : place + 1], b"1"]))
        + content[place + 1 :]
    )
    torn_off = data.draw(st.integers(0, 3))
    content = content[: len(content) - torn_off]
    decoded = decode(content, 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records_module, "_plain_records", lambda *_: None)
        assert decode(content, 1000) == decoded


def test_two_plain_frames_with_swapped_lengths_are_not_records():
    short, long, whole = (encode(3, "aBcDe", "PERIODICAL", 7, value) for value in (0.5, 0.25, 1))
    assert len(short) != len(long)
    exchanged = long[:8] + short[8:] + short[:8] + long[8:]
    decoded = decode(exchanged + whole, 0)
    assert [record.value for record in decoded.records] == ["1"]
    assert decoded.garbage == [Garbage(0, len(exchanged), "no frame ends here")]


@pytest.mark.parametrize("length", [b"000000", b"000098", b"000100", b"999999"])
def test_a_frame_with_a_wrong_length_is_garbage(length):
    frame = encode(3, "aBcDe", "PERIODICAL", 7, 0.25)
    assert frame.startswith(b"ME000099{")
    decoded = decode(b"ME" + length + frame[8:], 0)
    assert decoded.records == []
    assert decoded.garbage == [Garbage(0, len(frame), "no frame ends here")]


def test_the_offset_and_size_of_a_record_locate_its_frame_in_the_file():
    data = b"".join(encode(1, "t", "PERIODICAL", i, 10**i) for i in range(20))
    for record in decode(data, 0).records:
        again = decode(data[record.offset : record.offset + record.size], record.offset)
        assert again.records == [record]


def test_an_incomplete_last_frame_is_decoded_when_its_remainder_arrives():
    first, second = encode(1, "t", "PERIODICAL", 0, 0.5), encode(1, "t", "PERIODICAL", 1, 0.6)
    for cut in range(len(second)):
        decoded = decode(first + second[:cut], 0)
        assert [r.sequence for r in decoded.records] == [0]
        assert (decoded.consumed, decoded.garbage) == (len(first), [])
    assert [r.sequence for r in decode(first + second, 0).records] == [0, 1]


def test_empty_input_has_no_record_and_no_garbage():
    assert decode(b"", 7) == decode(b"ME", 7)
    assert decode(b"", 7).records == []


@given(
    st.lists(frames | corrupt_bytes | torn, max_size=8).map(b"".join),
    st.lists(st.integers(0, 600), max_size=6),
)
def test_the_decoded_records_do_not_depend_on_the_chunk_boundaries(data, cuts):
    whole = decode(data, 0)
    records, consumed, garbage = decode_in_pieces(data, [min(cut, len(data)) for cut in cuts])
    assert records == whole.records
    assert consumed == whole.consumed
    assert spans(data, garbage) == spans(data, whole.garbage)


@given(st.lists(st.tuples(corrupt_bytes | torn, frames), max_size=6), corrupt_bytes)
def test_garbage_and_incomplete_frames_never_hide_a_complete_frame(pairs, last):
    data, expected = b"", []
    for before, good in pairs:
        data += before
        expected.append((len(data), len(good)))
        data += good
    decoded = decode(data + last, 0)
    assert [(r.offset, r.size) for r in decoded.records] == expected


@given(st.lists(frames | corrupt_bytes | torn, max_size=8).map(b"".join), st.integers(0, 10**12))
def test_every_consumed_byte_belongs_to_a_record_or_to_garbage(data, offset):
    decoded = decode(data, offset)
    covered = sorted(
        [(r.offset, r.size) for r in decoded.records] + [(g.offset, g.length) for g in decoded.garbage]
    )
    position = offset
    for start, size in covered:
        assert start == position
        assert size > 0
        position += size
    assert position == offset + decoded.consumed


@given(st.binary(max_size=2000) | st.lists(nearly, max_size=40).map(b"".join))
def test_the_decoder_never_raises_for_any_bytes(data):
    assert 0 <= decode(data, 0).consumed <= len(data)


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ("{not json}", "JSON is invalid"),
        ('{"type": "FINAL"}', "not an object with all keys"),
        (json.dumps(metric(type="METRIC")), "unknown type"),
        (json.dumps(metric(type=["FINAL"])), "unknown type"),
        (json.dumps(metric(value=0.5)), "value is not text"),
        (json.dumps(metric(value="\ud800")), "value is not text"),
        (json.dumps(metric(trial_job_id=None)), "trial_job_id is not text"),
        (json.dumps(metric(sequence="0")), "sequence is not a 64-bit integer"),
        (json.dumps(metric(sequence=True)), "sequence is not a 64-bit integer"),
        (json.dumps(metric(sequence=2**63)), "sequence is not a 64-bit integer"),
        (json.dumps(metric(parameter_id=2**63)), "parameter_id is not a 64-bit integer"),
        (json.dumps(metric(parameter_id=None)), "neither integer nor text"),
        (json.dumps(metric()) + "{}", "more than one JSON value"),
        ('{"a":' * 100_000, "JSON is invalid"),
        ('{"a":' + "9" * 5000 + "}", "JSON is invalid"),
    ],
)
def test_a_frame_that_is_not_a_metric_is_garbage_with_a_reason(payload, reason):
    data, good = frame_of(payload), encode(1, "t", "FINAL", 0, 1)
    decoded = decode(data + good, 50)
    assert [r.offset for r in decoded.records] == [50 + len(data)]
    [span] = decoded.garbage
    assert (span.offset, span.length) == (50, len(data))
    assert reason in span.reason


def test_bytes_that_are_not_utf8_are_garbage():
    data = frame_of(json.dumps(metric(trial_job_id="é"), ensure_ascii=False))
    assert decode(data, 0).records[0].trial_job_id == "é"
    [span] = decode(data.replace("é".encode(), b"\xff\xff"), 0).garbage
    assert "UTF-8" in span.reason


def test_a_frame_without_an_end_does_not_hide_the_next_frame():
    broken = b'ME900000{"parameter_id": 1, "trial'
    good = encode(1, "t", "FINAL", 0, 1)
    decoded = decode(broken + good, 0)
    assert [r.offset for r in decoded.records] == [len(broken)]
    assert [(g.offset, g.length) for g in decoded.garbage] == [(0, len(broken))]


def test_an_incomplete_frame_whose_length_fits_the_line_does_not_hide_the_next_frame():
    good = encode(1, "t", "FINAL", 0, 1)
    # The header declares the remaining length of the line, which is 1 plus the length of the good frame.
    broken = b"ME%06d{" % (1 + len(good))
    decoded = decode(broken + good, 0)
    assert [r.offset for r in decoded.records] == [len(broken)]
    assert [(g.offset, g.length) for g in decoded.garbage] == [(0, len(broken))]


def headers_that_fit(count: int, tail: bytes) -> bytes:
    """Frame headers that each declare exactly the remaining length of the line that ends with `tail`."""
    return b"".join(b"ME%06d{" % (9 * left + 1 + len(tail)) for left in range(count - 1, -1, -1)) + tail


@pytest.mark.slow
@pytest.mark.parametrize("tail", [b"\n", "é\n".encode()], ids=["ascii", "not ascii"])
def test_a_line_of_headers_whose_lengths_fit_the_line_is_decoded_in_linear_time(tail):
    line = headers_that_fit(111_000, tail)
    started_s = time.process_time()
    decoded = decode(line, 0)
    # Decoding takes 0.1 s. A decoder that parses the JSON after each header needs 40 s.
    assert time.process_time() - started_s < 4
    assert (decoded.records, decoded.consumed) == ([], len(line))
    assert spans(line, decoded.garbage) == set(range(len(line)))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 1000])
def test_any_number_of_headers_whose_lengths_fit_the_line_does_not_hide_the_next_frame(count):
    good = encode(1, "t", "FINAL", 0, 1)
    broken = headers_that_fit(count, good)[: -len(good)]
    decoded = decode(broken + good, 0)
    assert [(r.offset, r.size) for r in decoded.records] == [(len(broken), len(good))]
    assert [(g.offset, g.length) for g in decoded.garbage] == [(0, len(broken))]


def test_adjacent_garbage_bytes_with_the_same_reason_form_a_single_span():
    [span] = decode(b"\n" * 10_000, 5).garbage
    assert span[:2] == (5, 10_000)


def test_the_decoder_buffers_less_than_one_frame_of_an_endless_line():
    kept = consumed = 0
    for _ in range(5):
        decoded = decode(b"x" * (kept + 700_000), consumed)
        kept += 700_000 - decoded.consumed
        consumed += decoded.consumed
        assert kept < MAX_FRAME_BYTES


def test_a_frame_of_maximum_length_is_read_when_the_newline_arrives_late():
    overhead = len(encode(1, "t", "FINAL", 0, "")) - 8
    data = encode(1, "t", "FINAL", 0, "x" * (MAX_PAYLOAD_BYTES - overhead))
    assert len(data) == MAX_FRAME_BYTES
    records, _, garbage = decode_in_pieces(b"noise" + data, [len(data) + 4])
    assert [(r.offset, r.size) for r in records] == [(5, MAX_FRAME_BYTES)]
    assert spans(data, garbage) == set(range(5))


def test_the_error_for_a_metric_over_the_size_limit_contains_the_size_of_the_metric():
    with pytest.raises(
        MetricTooLong, match=r"^cannot report a metric of 1,\d+,\d+ bytes.*999,999.*NNI_OUTPUT_DIR"
    ):
        encode(1, "t", "FINAL", 0, "x" * 1_000_000)
    # Each quote is escaped twice, as \\\", so the frame is four times as long as the value, and is still accepted.
    assert len(encode(1, "t", "FINAL", 0, '"' * 200_000)) > 800_000


def test_metric_records_of_the_nni_package_are_decoded():
    # The records of nni 2.x differ in three ways: the ids of custom trials are text, the keys have another order, and json_tricks
    # writes an array as a dict.
    asked = frame_of(
        '{"trial_job_id": "aBcDe", "type": "REQUEST_PARAMETER", "sequence": 0, "parameter_index": 0}'
    )
    array = '{"__ndarray__": [1.0, NaN], "dtype": "float64", "shape": [2]}'
    data = asked + frame_of(json.dumps(metric(parameter_id="0_1", value=array)))
    decoded = decode(data, 0)
    assert [(r.offset, r.parameter_id, r.value) for r in decoded.records] == [(len(asked), "0_1", array)]
    assert (decoded.consumed, decoded.garbage) == (len(data), [])


def test_a_record_is_decoded_unchanged_after_it_was_written_to_a_file(tmp_path):
    path = tmp_path / "metrics"
    path.write_bytes(encode("ä", "t", "FINAL", 0, {"default": 0.5, "note": 'it\'s "ok"\n\\'}))
    [record] = decode(path.read_bytes(), 0).records
    assert json.loads(record.value)["note"] == 'it\'s "ok"\n\\'
    assert record.size == os.path.getsize(path)
