"""A real manager with hostile peers, while the keepers of real trials are connected."""

import contextlib
import itertools
import os
import re
import socket
import threading

import grpc
import psutil
import pytest
from attempts import attempt_id
from deadlines import DEADLINE_S
from hostile_keeper import (
    CONTINUATION,
    DATA,
    DOCUMENTED,
    END_HEADERS,
    HEADERS,
    OPENING,
    PING,
    PREFACE,
    RST_STREAM,
    SERVICE,
    SETTINGS,
    HostileKeeper,
    call_headers,
    connected,
    frame,
    header,
    words,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real_experiment import RealExperiment, assert_rows_are_what_was_written, wait_until

from nni_manager.grpc_server.servicer import MAX_CONNECTIONS
from trial_keeper.wire.messages import AttemptKey, Chunk, Idle, Stream, TrialEnded, TrialStarted, Usage
from trial_keeper.wire.metadata import JOB_KEY, TOKEN_KEY
from trial_keeper.wire.reasons import ExitReason

# 2000 connections are enough to measure the memory per connection. `make hostile` opens five times as many.
CONNECTIONS = int(os.environ.get("HOSTILE_CONNECTIONS", "2000"))
# This limit is about three times the 22 kB that a measurement showed for an unauthenticated connection.
MAX_BYTES_OF_CONNECTION = 60_000
# The limit includes memory for the experiment's own trials, and memory that the allocator does not return.
MAX_GROWTH_BYTES = 100_000_000
TRAIN = """
import os, pathlib, time
import nni_sdk as nni
nni.get_next_parameter()
end = pathlib.Path("END")
i = 0
while not end.exists():
    nni.report_intermediate_result(i)
    i += 1
    time.sleep(0.02)
nni.report_final_result(i)
"""
CODE = grpc.StatusCode
TOO_LARGE = b"\0" * (2 << 20)
"""The manager accepts messages of up to 1 MiB."""


class Scene:
    """A manager with two regular trials. The hostile keeper has the token of the second trial's job."""

    def __init__(self, experiment):
        self.experiment = experiment
        experiment.start()
        wait_until(lambda: len(experiment.get("/trials")) == 2, "both trials are created")
        self.trials = [trial["id"] for trial in experiment.get("/trials")]
        self.process = psutil.Process(experiment.manager.pid)
        self.hostile = HostileKeeper(experiment, self.trials[1])
        for trial in self.trials:
            wait_until(lambda trial=trial: len(experiment.rows(trial)) > 5, "both trials report")
        self.rss_before = self.rss()

    def rss(self):
        return self.process.memory_info().rss

    def counts(self):
        return [len(self.experiment.rows(trial)) for trial in self.trials]

    def states(self):
        return [(trial["id"], trial["status"]) for trial in self.experiment.get("/trials")]

    def noise(self):
        """The lines in the manager's log that report a bug; there must be none."""
        text = (
            self.experiment.folder.manager_log.read_text() + self.experiment.folder.manager_stderr.read_text()
        )
        return re.findall(r".*(?:Traceback|CRITICAL|never retrieved|destroyed but).*", text)

    def assert_unaffected(self):
        before = self.counts()
        wait_until(
            lambda: all(now > then + 3 for now, then in zip(self.counts(), before, strict=True)),
            "metrics of the honest trials are stored",
        )
        assert self.states() == [(trial, "RUNNING") for trial in self.trials]
        assert self.experiment.get("/check-status") == {"status": "NO_MORE_TRIAL", "errors": []}
        assert self.noise() == []
        assert self.rss() - self.rss_before < MAX_GROWTH_BYTES


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    experiment = RealExperiment(tmp_path_factory.mktemp("hostile"), TRAIN, trialConcurrency=2, maxTrialNum=2)
    experiment.create()
    try:
        yield Scene(experiment)
        (experiment.code / "END").touch()
        experiment.wait_for_status("DONE")
        for trial in experiment.get("/trials"):
            assert trial["status"] == "SUCCEEDED"
            rows = assert_rows_are_what_was_written(experiment, trial["id"])
            assert [int(row.value) for row in rows] == [*range(len(rows) - 1), len(rows) - 1]
    finally:
        experiment.close()


@pytest.fixture
def scene(stage):
    yield stage
    stage.assert_unaffected()


@pytest.fixture
def hostile(scene):
    return scene.hostile


def test_an_invalid_message_is_refused_with_a_documented_status_and_a_short_error(hostile):
    hello, key = words(hostile.hello), hostile.key
    others = AttemptKey("other", attempt_id(0), "hostile-0")
    metrics = Stream.METRICS
    cases = [
        ([b"\xff\xff\xff"], CODE.INVALID_ARGUMENT),
        ([hello, b"\xff\xff\xff"], CODE.INVALID_ARGUMENT),
        ([b"\x0a\x04\x0a\x02\xff\xfe"], CODE.INVALID_ARGUMENT),  # a string that is not valid UTF-8
        ([hello, hello], CODE.INVALID_ARGUMENT),
        ([b""], CODE.INVALID_ARGUMENT),
        ([words(Chunk(key, metrics, 0, b"x"))], CODE.INVALID_ARGUMENT),
        ([words(Idle())], CODE.INVALID_ARGUMENT),
        ([hello, words(Chunk(others, metrics, 0, b"x"))], CODE.INVALID_ARGUMENT),
        ([hello, words(TrialStarted(others, 1.0))], CODE.INVALID_ARGUMENT),
        ([hello, words(TrialEnded(others, ExitReason.SUCCEEDED, 0, 1.0, 2.0))], CODE.INVALID_ARGUMENT),
        ([hello, words(Usage(others, 1.0, 1))], CODE.INVALID_ARGUMENT),
        ([hello, words(Usage(key, float("nan"), 1))], CODE.INVALID_ARGUMENT),
        ([hello, words(Usage(key, 1.0, 2**64 - 1))], CODE.INVALID_ARGUMENT),
        ([hello, words(Chunk(key, metrics, 1, b"x"))], CODE.ABORTED),
        ([hello, words(Chunk(key, metrics, 2**63 - 1, b"x"))], CODE.ABORTED),
        ([hello, words(Chunk(key, metrics, 2**63, b"x"))], CODE.INVALID_ARGUMENT),
        (
            [hello, words(Chunk(AttemptKey(key.trial_id, str(2**32 - 1), key.task), metrics, 0, b"x"))],
            CODE.INVALID_ARGUMENT,
        ),
        ([TOO_LARGE], CODE.RESOURCE_EXHAUSTED),
        ([hello, TOO_LARGE], CODE.RESOURCE_EXHAUSTED),
        ([], CODE.OK),
        ([hello], CODE.OK),
    ]
    for requests, status in cases:
        code, details = hostile.answer(*requests)
        assert code is status, ([each[:60] for each in requests], details)
        assert len(details) < 500
        assert "Unexpected" not in details
        if code is not CODE.RESOURCE_EXHAUSTED:  # gRPC itself chooses the text of this error
            assert not details or details.startswith("cannot")


def test_an_unauthenticated_keeper_is_refused_before_its_messages_are_read(scene, hostile):
    hello = words(hostile.hello)
    first = HostileKeeper(scene.experiment, scene.trials[0])
    for metadata in [
        (),
        ((JOB_KEY, hostile.job_id),),
        ((JOB_KEY, hostile.job_id), (TOKEN_KEY, "")),
        ((JOB_KEY, hostile.job_id), (TOKEN_KEY, hostile.token[:-1])),
        ((JOB_KEY, hostile.job_id), (TOKEN_KEY, first.token)),
        ((JOB_KEY, ""), (TOKEN_KEY, "")),
        ((JOB_KEY, first.job_id), (TOKEN_KEY, hostile.token)),
    ]:
        # The last list has no messages: a peer that sends nothing is refused immediately, too.
        for requests in ([hello], [b"\xff" * 1000], []):
            code, details = hostile.answer(*requests, metadata=metadata)
            assert (code, "token" in details) == (CODE.UNAUTHENTICATED, True), (metadata, details)
    # The token in the metadata is valid only for the job of `hostile`, and the hello message names another job.
    assert hostile.answer(words(first.hello))[0] is CODE.UNAUTHENTICATED


def test_large_metadata_and_unknown_methods_are_refused_by_grpc(hostile):
    hello = words(hostile.hello)
    for size in (9_000, 100_000, 4 << 20):
        code, _ = hostile.answer(hello, metadata=(*hostile.metadata, ("x", "y" * size)))
        assert code is CODE.RESOURCE_EXHAUSTED, size
    many = tuple((f"x{number}", "y" * 50) for number in range(1000))
    assert hostile.answer(hello, metadata=(*hostile.metadata, *many))[0] is CODE.RESOURCE_EXHAUSTED
    for method in (f"/{SERVICE}/Nothing", "/grpc.health.v1.Health/Check", "/"):
        assert hostile.answer(hello, method=method)[0] is CODE.UNIMPLEMENTED


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_corrupted_message_is_refused_with_a_documented_status(hostile, data):
    key = hostile.key
    honest = [
        words(hostile.hello),
        words(TrialStarted(AttemptKey("nobody", attempt_id(0), key.task), 1.0), Idle()),
        words(Chunk(AttemptKey("nobody", attempt_id(0), key.task), Stream.METRICS, 0, b"ME000002{}\n")),
    ]
    content = bytearray(data.draw(st.sampled_from(honest)))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        content[start : start + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
    said = [words(hostile.hello), bytes(content)] if data.draw(st.booleans()) else [bytes(content)]
    code, details = hostile.answer(*said)
    assert code in DOCUMENTED, details


def test_the_number_of_streams_per_job_is_limited(scene, hostile):
    most = 16
    silence = threading.Event()

    def nothing():
        silence.wait(DEADLINE_S)
        yield from ()

    with contextlib.ExitStack() as stack:
        stack.callback(silence.set)
        # The list `calls` holds a reference to each call, because gRPC ends a call without references.
        codes, calls = [], []
        for number in range(most + 4):
            channel = stack.enter_context(hostile.channel())
            task = HostileKeeper(scene.experiment, hostile.job_id, f"task-{number}")
            call = hostile.open(channel, itertools.chain([words(task.hello)], nothing()))
            calls.append(call)
            try:
                next(call)
            except grpc.RpcError as error:
                codes.append(error.code())
            else:
                codes.append(CODE.OK)
        # The regular keeper of the job uses one of the 16 permitted streams, so 15 of the 20 new streams are accepted.
        assert codes.count(CODE.RESOURCE_EXHAUSTED) == 5, codes
        assert codes[0] is CODE.OK
    wait_until(lambda: hostile.answer(words(hostile.hello))[0] is CODE.OK, "a new stream is accepted")


def test_two_keepers_of_one_task_lose_no_metrics(scene):
    twin = HostileKeeper(scene.experiment, scene.trials[1], "main-0")
    key = twin.key
    for _ in range(5):
        twin.answer(words(twin.hello), words(Chunk(key, Stream.METRICS, 0, b"")))


@pytest.mark.parametrize(
    "said",
    [
        b"",
        PREFACE[:7],
        OPENING,
        OPENING + frame(HEADERS, END_HEADERS, 1, call_headers())[:20],
        OPENING + frame(DATA, 0, 1, b"x" * 1000)[:500],
        b"GET / HTTP/1.1\r\nHost: manager\r\n\r\n",
        # This is the start of a TLS handshake.
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 100,
        os.urandom(4096),
    ],
    ids=[
        "nothing",
        "half a preface",
        "a preface",
        "half of headers",
        "half of data",
        "HTTP/1",
        "TLS",
        "noise",
    ],
)
def test_connections_of_other_protocols_do_not_affect_running_trials(scene, said):
    peers = [connected(scene.hostile.address, said) for _ in range(100)]
    scene.assert_unaffected()
    for peer in peers:
        peer.close()


def test_peers_that_send_one_byte_at_a_time_do_not_affect_running_trials(scene):
    said = OPENING + frame(HEADERS, END_HEADERS, 1, call_headers())
    peers = [connected(scene.hostile.address) for _ in range(50)]
    for byte in said:
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.send(bytes([byte]))
    scene.assert_unaffected()
    for peer in peers:
        peer.close()


def _flood(address, opening, pieces, most_bytes=20_000_000):
    """Send the pieces until the peer closes the connection or `most_bytes` are sent."""
    with connected(address, opening) as peer:
        peer.settimeout(5)
        sent = 0
        with contextlib.suppress(OSError):
            for piece in pieces:
                peer.sendall(piece)
                sent += len(piece)
                if sent > most_bytes:
                    break


def test_floods_of_http2_frames_do_not_affect_running_trials(scene):
    address = scene.hostile.address
    endless = itertools.repeat(frame(CONTINUATION, 0, 1, header(b"x", b"y" * 100) * 100))
    _flood(address, OPENING + frame(HEADERS, 0, 1, call_headers()), endless)
    resets = (
        frame(HEADERS, END_HEADERS, number, call_headers()) + frame(RST_STREAM, 0, number, b"\0\0\0\x08")
        for number in range(1, 20_001, 2)
    )
    _flood(address, OPENING, resets)
    _flood(address, OPENING, itertools.repeat(frame(SETTINGS, 0, 0), 20_000))
    _flood(address, OPENING, itertools.repeat(frame(PING, 0, 0, b"\0" * 8), 20_000))
    _flood(
        address,
        OPENING,
        (frame(HEADERS, END_HEADERS, number, call_headers()) for number in range(1, 20_001, 2)),
    )


def test_many_short_connections_leave_no_open_files(scene):
    address = scene.hostile.address
    files_before = scene.process.num_fds()
    for number in range(1000):
        peer = connected(address, OPENING if number % 2 else PREFACE[:5])
        if number % 3 == 0:  # SO_LINGER with a timeout of 0 makes close() reset the connection.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        peer.close()
    for _ in range(50):
        scene.hostile.answer(words(scene.hostile.hello))
    wait_until(lambda: scene.process.num_fds() < files_before + 20, "their connections are closed")


def test_unauthenticated_peers_cannot_fill_the_log(scene):
    log = scene.experiment.folder.manager_log
    before = log.stat().st_size
    with scene.hostile.channel() as channel:
        for _ in range(500):
            with contextlib.suppress(grpc.RpcError):
                next(scene.hostile.open(channel, [], metadata=()))
    assert log.stat().st_size - before < 100 * 300


def test_thousands_of_connections_use_bounded_memory(scene):
    rss_before, files_before = scene.rss(), scene.process.num_fds()
    peers = []
    try:
        for number in range(CONNECTIONS):
            # The manager closes connections above its limit, so it may close this connection during the send.
            with contextlib.suppress(OSError):
                peers.append(connected(scene.hostile.address, OPENING if number % 2 else b""))
        scene.assert_unaffected()
        held = scene.process.num_fds() - files_before
        assert held <= min(CONNECTIONS, MAX_CONNECTIONS) + 20
        assert (
            scene.rss() - rss_before
            < MAX_BYTES_OF_CONNECTION * min(CONNECTIONS, MAX_CONNECTIONS) + 20_000_000
        )
        # A regular keeper can connect despite all these connections.
        assert scene.hostile.answer(words(scene.hostile.hello))[0] is CODE.OK
    finally:
        for peer in peers:
            peer.close()
    wait_until(lambda: scene.process.num_fds() < files_before + 20, "their connections are closed")


def test_forged_messages_about_one_trial_do_not_change_another_trial(a_real_experiment):
    experiment = a_real_experiment(TRAIN, trialConcurrency=2, maxTrialNum=2)
    scene = Scene(experiment)
    forger = HostileKeeper(experiment, scene.trials[1], "main-0")
    key, metrics = forger.key, Stream.METRICS

    def ends(**sizes):
        return TrialEnded(
            key, ExitReason.SUCCEEDED, 0, 1.0, 2.0, {Stream(word): size for word, size in sizes.items()}
        )

    hello = words(forger.hello)
    for said in [
        # The manager has already stored the bytes at these offsets, so it drops the forged bytes.
        [Chunk(key, metrics, 0, b"lies\n" * 1000)],
        [TrialStarted(key, 1.0), TrialStarted(key, 2.0)],
        [Usage(key, 1e300, 2**63 - 1, 2**63 - 1)] * 20,
        [Idle()] * 64,
        [TrialStarted(AttemptKey(key.trial_id, attempt_id(7), key.task), 3.0)],
        [TrialEnded(AttemptKey(key.trial_id, attempt_id(3), key.task), ExitReason.SIGNAL, 1, 1.0, 2.0)],
        [ends(metrics=2**63 - 1)],
        [ends(metrics=0), Chunk(key, metrics, 0, b"behind the end\n")],
        [ends(), ends(), Chunk(key, metrics, 0, b"behind the end\n"), TrialStarted(key, 1.0)],
    ]:
        code, details = forger.answer(hello, words(*said))
        assert code in DOCUMENTED, details
    assert experiment.get(f"/trials/{scene.trials[0]}")["status"] == "RUNNING"
    before = len(experiment.rows(scene.trials[0]))
    wait_until(
        lambda: len(experiment.rows(scene.trials[0])) > before + 3, "metrics of the honest trial are stored"
    )
    assert scene.noise() == []
    (experiment.code / "END").touch()
    experiment.wait_for_status("DONE")
    assert experiment.get(f"/trials/{scene.trials[0]}")["status"] == "SUCCEEDED"
    assert_rows_are_what_was_written(experiment, scene.trials[0])
    assert scene.noise() == []
