"""The disk of a manager is blocked, and its keepers continue to send."""

import contextlib
import sqlite3
import subprocess
import sys
import threading

import grpc
import psutil
import pytest
import void_manager
from attempts import attempt_id
from free_ports import free_port_pair
from real_experiment import wait_until

from nni_manager.engine.commits import MAX_BYTES
from nni_manager.engine.tokens import token_of
from nni_manager.store.reader import StoreReader
from nni_sdk.records import encode
from trial_keeper import __version__
from trial_keeper.wire.convert import keeper_messages_to_pb
from trial_keeper.wire.messages import AttemptKey, Chunk, Hello, Stream, TrialStarted
from trial_keeper.wire.metadata import JOB_KEY, TOKEN_KEY
from trial_keeper.wire.v1.keeper_pb2_grpc import KeeperServiceStub

KEEPERS = 16
CHUNK_BYTES = 256 * 1024
MAX_CHUNKS = 200
# The memory that each stream may use: one message in the servicer, and the bytes that gRPC has read in advance.
MAX_OF_A_STREAM_BYTES = 1 << 20
# Python's allocator does not return all freed memory, so the test tolerates this growth.
SLACK_BYTES = 16 << 20
STANDS_STILL_LOOKS = 20


class Flood:
    """A keeper without flow control, which sends as fast as the stream accepts."""

    def __init__(self, port, secret, job_id, stream):
        self.key = AttemptKey(job_id, attempt_id(0), "main-0")
        self.sent_chunks = 0
        self.may_send = threading.Event()
        self.is_terminal = threading.Event()
        frame = encode(0, job_id, "PERIODICAL", 7, 0.123456789)
        self._data = frame * (CHUNK_BYTES // len(frame))
        self._stream = stream
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        metadata = ((JOB_KEY, job_id), (TOKEN_KEY, token_of(secret, job_id)))
        self._call = KeeperServiceStub(self._channel).Connect(self._requests(), metadata=metadata)
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _requests(self):
        yield keeper_messages_to_pb([Hello(__version__, "TESTEXPT", self.key.trial_id, "main-0")])
        yield keeper_messages_to_pb([TrialStarted(self.key, 1.0)])
        self.may_send.wait()
        while self.sent_chunks < MAX_CHUNKS and not self.is_terminal.is_set():
            offset = self.sent_chunks * len(self._data)
            yield keeper_messages_to_pb([Chunk(self.key, self._stream, offset, self._data)])
            self.sent_chunks += 1
        self.is_terminal.wait()

    def _listen(self):
        with contextlib.suppress(grpc.RpcError):
            for _ in self._call:
                pass

    def close(self):
        self.may_send.set()
        self.is_terminal.set()
        self._call.cancel()
        self._thread.join()
        self._channel.close()


@pytest.fixture
def manager(a_real_experiment):
    """An experiment, the process of its manager, and the manager's port for keepers."""
    experiment = a_real_experiment(
        "pass\n", trialConcurrency=KEEPERS, maxTrialNum=KEEPERS, logCollection="http"
    )
    port = free_port_pair()
    process = subprocess.Popen(
        [sys.executable, void_manager.__file__, experiment.folder.path, str(port)],
        stdout=subprocess.PIPE,
        env=experiment.environ,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield experiment, psutil.Process(process.pid), port
    process.kill()
    process.communicate()


def test_a_manager_with_a_blocked_disk_uses_bounded_memory_and_keeps_all_connections(manager):
    experiment, process, port = manager
    with StoreReader(experiment.folder.database) as reader:
        secret = reader.experiment().secret
        jobs = wait_until(lambda: len(found := reader.jobs()[0]) == KEEPERS and found, "all jobs are stored")
    streams = [Stream.METRICS, Stream.STDOUT] * (KEEPERS // 2)
    floods = [Flood(port, secret, job.job_id, stream) for job, stream in zip(jobs, streams, strict=True)]
    try:
        wait_until(lambda: experiment_trials(experiment) == {"RUNNING"}, "all trials run")
        before_bytes = process.memory_info().rss
        blocker = hold_the_database(experiment.folder.database)
        try:
            for flood in floods:
                flood.may_send.set()
            wait_until_stalled(floods)
            sent_bytes = sum(flood.sent_chunks for flood in floods) * CHUNK_BYTES
            grown_bytes = process.memory_info().rss - before_bytes
        finally:
            blocker.close()
        assert sent_bytes < KEEPERS * MAX_CHUNKS * CHUNK_BYTES / 2
        assert grown_bytes < MAX_BYTES + KEEPERS * MAX_OF_A_STREAM_BYTES + SLACK_BYTES
        # The disk accepts writes from here on, so all keepers must continue to send.
        held = [flood.sent_chunks for flood in floods]
        wait_until(
            lambda: all(flood.sent_chunks > chunks for flood, chunks in zip(floods, held, strict=True)),
            "all keepers continue",
        )
    finally:
        for flood in floods:
            flood.close()


def experiment_trials(experiment):
    with StoreReader(experiment.folder.database) as reader:
        return {trial.state.value for trial in reader.trials()}


def hold_the_database(database):
    blocker = sqlite3.connect(database, isolation_level=None, timeout=30)
    blocker.execute("BEGIN IMMEDIATE")
    return blocker


def wait_until_stalled(floods):
    """Wait until the manager has accepted no chunk during the last STANDS_STILL_LOOKS polls."""
    seen = []

    def nothing_moves():
        seen.append([flood.sent_chunks for flood in floods])
        return len(seen) > STANDS_STILL_LOOKS and all(each == seen[-1] for each in seen[-STANDS_STILL_LOOKS:])

    wait_until(nothing_moves, "no more chunks are accepted")
