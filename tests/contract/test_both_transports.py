"""gRPC and shared storage deliver the same bytes concurrently.

The store must contain each byte once and in order. These tests add a second transport to the state machine of conftest.py. The
result of a poll may show an earlier state of the files, and may arrive after any other event.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from nni_manager.domain.ingest import AttemptIngest, OffsetGap, StreamWrite
from nni_manager.domain.transports import POLL_INTERVAL_S, RECONNECT_GRACE_S, Transport, TransportTracker
from trial_keeper.core.replication import Replication
from trial_keeper.wire.messages import Stream

# Shrinking a failing example takes minutes, so it is off. The printed seed reproduces the failure without shrinking.
NO_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
JOB, TASK = "job", "main-0"
PIECE_BYTES = 64
LAGS = st.lists(st.integers(0, 100), min_size=3, max_size=3)


class MountRules:
    """The manager's polls of the storage while no keeper is connected.

    Each poll makes the same calls in the same order as the thread of `SharedStoragePoller`. Attributes that are used but not
    defined here belong to `ExactlyOnce`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.transports = TransportTracker()
        self.transports.track(JOB, 0.0)
        self.looks: deque[tuple[list[tuple[Stream, int, bytes]], dict[Stream, int] | None]] = deque()
        self.brought = 0

    def _track_stream(self: Any) -> None:
        """Update the tracker: a stream is connected from its Hello until its connection breaks."""
        is_stream = self.transports.last_seen(JOB).transport is Transport.GRPC
        if self.is_greeted and not is_stream:
            self.transports.connected(JOB, TASK, self.now_s)
        elif not self.is_greeted and is_stream:
            self.transports.lost(JOB, TASK, self.now_s)

    @precondition(lambda self: not self.is_closed)
    @rule(
        passed_s=st.sampled_from([0.1, POLL_INTERVAL_S, RECONNECT_GRACE_S]),
        lags=LAGS,
        shows_end=st.booleans(),
    )
    def look_at_files(self: Any, passed_s: float, lags: list[int], shows_end: bool) -> None:
        """Start a poll. In its result, up to `lag` bytes may be missing at the end of each file. The end of the attempt may be
        missing too.
        """
        self.now_s += passed_s
        self._track_stream()
        if not self.transports.polls_storage(JOB, TASK, self.now_s) or self.looks:
            return
        assert self.transports.next_poll(self.now_s + POLL_INTERVAL_S) in (JOB, None)
        # Only a process that could not be killed changes a file after the end of its attempt. By then, the end of the attempt is
        # visible on the storage, so a poll that sees the change also sees the end.
        is_old = self.files.final_sizes is not None and self.files.sizes != self.files.final_sizes
        sizes = self.files.final_sizes if shows_end or is_old else None
        pieces = []
        for (stream, content), lag in zip(self.files.content.items(), lags, strict=True):
            offset = self.receiver.received(stream)
            shown = max(len(content) - lag, 0)
            end = shown if sizes is None else min(shown, sizes[stream])
            pieces.append((stream, offset, bytes(content[offset : min(end, offset + PIECE_BYTES)])))
        self.looks.append((pieces, sizes))

    @precondition(lambda self: self.looks)
    @rule()
    def look_comes_back(self: Any) -> None:
        pieces, sizes = self.looks.popleft()
        self._track_stream()
        self.transports.polled(JOB, self.now_s)
        if self.is_closed:
            return
        # The result of this poll is used even if the keeper has connected to the manager since the poll started.
        self.transports.found(JOB, TASK, self.now_s, has_new_data=any(data for _, _, data in pieces))
        try:
            for stream, offset, data in pieces:
                commits: list[StreamWrite] = self.receiver.take(stream, offset, data)
                self.waiting_commits += commits
                self.brought += len(data)
        except OffsetGap:
            # The manager restarted after the start of this poll, and lost its uncommitted bytes. So the poll's offset is higher
            # than the offset that the manager expects.
            return
        if sizes is not None:
            self.waiting_commits += self.receiver.end(sizes)
            self._acknowledge()

    @invariant()
    def the_transport_is_tracked(self: Any) -> None:
        self._track_stream()
        assert (self.transports.last_seen(JOB).transport is Transport.GRPC) == self.is_greeted


class NoStream:
    """A firewall between keeper and manager: no keeper ever connects."""

    def connect(self, is_answered: bool) -> None:
        """Do nothing: the firewall drops the connection."""

    def teardown(self: Any) -> None:
        """The attempt ends. Polls alone must deliver all bytes."""
        if self.files.final_sizes is None:
            self.end_attempt()
        for _ in range(2_000):
            if self.receiver.is_complete:
                break
            self._whole_poll()
        assert self.receiver.is_complete
        assert self.store.has_all(self.files)

    def _whole_poll(self: Any) -> None:
        self.now_s += RECONNECT_GRACE_S
        assert self.transports.polls_storage(JOB, TASK, self.now_s)
        for stream in self.files.content:
            offset = self.receiver.received(stream)
            data = bytes(self.files.counted(stream)[offset : offset + PIECE_BYTES])
            self.waiting_commits += self.receiver.take(stream, offset, data)
        self.waiting_commits += self.receiver.end(self.files.final_sizes)
        batch, self.waiting_commits = self.waiting_commits, []
        self.store.commit(batch)
        for commit in batch:
            self.receiver.committed(commit)


class StoresResentBytesAgain(AttemptIngest):
    """Stores resent bytes as if they were new bytes."""

    def take(self, stream: Stream, offset: int, data: bytes) -> list[StreamWrite]:
        return super().take(stream, min(self.received(stream), offset + len(data)), data)


def test_grpc_and_shared_storage_together_store_each_byte_once_and_in_order(
    play: Callable[..., None],
) -> None:
    play(more_rules=(MountRules,), phases=NO_SHRINKING)


def test_the_shared_storage_transport_stores_each_byte_once_and_in_order(play: Callable[..., None]) -> None:
    play(more_rules=(NoStream, MountRules), phases=NO_SHRINKING)


def test_the_state_machine_test_detects_a_receiver_that_stores_repeated_bytes_twice(
    play: Callable[..., None],
) -> None:
    with pytest.raises((AssertionError, OffsetGap)):
        play(
            Replication,
            StoresResentBytesAgain,
            more_rules=(MountRules,),
            max_examples=300,
            derandomize=True,
            phases=NO_SHRINKING,
        )
