"""A state machine, used by several tests, that transfers the bytes of an attempt from its files to the store.

Replication and ingest are the real code. Files, link, store and all failures are models in this file.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from attempts import attempt_id
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import trial_keeper.core.replication as replication_module
from nni_manager.domain.ingest import AttemptIngest, StreamWrite
from nni_sdk import records
from trial_keeper.core.replication import Replication
from trial_keeper.wire.limits import QUOTA_BYTES, collected
from trial_keeper.wire.messages import AttemptKey, Stream

KEY = AttemptKey("trial", attempt_id(0), "main")
STREAMS = (Stream.METRICS, Stream.STDOUT, Stream.STDERR)
LOGS = st.sampled_from([Stream.STDOUT, Stream.STDERR])
NAMES = st.text("é", max_size=2).map(lambda tail: "t" + tail)
# Most steps succeed, because a failure can lose data only if earlier steps have transferred some.
MOSTLY = st.sampled_from([True, True, True, False])
COUNTS = st.integers(1, 8)
SHARES = st.one_of(st.just(1.0), st.floats(0, 1))
# Fragments of a metrics file that resemble the headers of records, with or without a newline. A writer that is killed leaves such
# fragments.
LITTER = st.text("ME01{\n", min_size=1, max_size=120).map(str.encode)
# The final drain needs a few round trips per window, far fewer than this limit.
ENOUGH_STEPS = 500


class Files:
    """The folder of the attempt, and its content according to the model."""

    def __init__(self) -> None:
        self.content = {stream: bytearray() for stream in STREAMS}
        self.records: list[tuple[int, str, int]] = []
        """The offset, value and sequence number of each complete record, in the order written."""
        self.ends: list[int] = []
        """The end offset of each record in `records`."""
        self.rest_of_torn = b""
        self.final_sizes: dict[Stream, int] | None = None

    @property
    def sizes(self) -> dict[Stream, int]:
        return {stream: len(content) for stream, content in self.content.items()}

    def counted(self, stream: Stream) -> bytes:
        """The bytes of a stream that must arrive in the store."""
        size = len(self.content[stream]) if self.final_sizes is None else self.final_sizes[stream]
        return bytes(self.content[stream][: collected(stream, size)])

    @property
    def counted_records(self) -> list[tuple[int, str, int]]:
        end = len(self.counted(Stream.METRICS))
        return [
            record for record, record_end in zip(self.records, self.ends, strict=True) if record_end <= end
        ]


class Store:
    """The data that survives a restart of the manager.

    The store accepts all commits: only the parts under test prevent duplicates.
    """

    def __init__(self) -> None:
        self.offsets: dict[Stream, int] = {}
        self.rows: list[tuple[int, str, int]] = []
        self.logs = {stream: bytearray() for stream in STREAMS}
        self.record_bytes = 0
        self.corrupt_bytes = 0

    def commit(self, batch: list[StreamWrite]) -> None:
        for commit in batch:
            self.rows += [(record.offset, record.value, record.sequence) for record in commit.records]
            self.record_bytes += sum(record.size for record in commit.records)
            self.corrupt_bytes += sum(span.length for span in commit.garbage)
            self.logs[commit.stream] += commit.data
            self.offsets[commit.stream] = commit.new_offset

    def has_all(self, files: Files) -> bool:
        return (
            files.final_sizes is not None
            and self.rows == files.counted_records
            and all(self.logs[log] == files.counted(log) for log in STREAMS[1:])
            and all(self.offsets.get(stream, 0) >= len(files.counted(stream)) for stream in STREAMS)
        )


class ExactlyOnce(RuleBasedStateMachine):
    """Files → Replication → link → AttemptIngest → store, with failures at any point."""

    replication_type: type[Replication] = Replication
    receiver_type: type[AttemptIngest] = AttemptIngest

    def __init__(self) -> None:
        super().__init__()
        self.files = Files()
        self.store = Store()
        self.waiting_commits: list[StreamWrite] = []
        self.receiver = self.receiver_type(KEY)
        self.replication = self.replication_type(STREAMS)
        self.to_manager: deque[tuple[Any, ...]] = deque()
        self.to_keeper: deque[tuple[Any, ...]] = deque()
        self.is_connected = False
        self.is_greeted = False
        """True after the manager has received Hello."""
        self.is_welcome = False
        """True after the keeper has received Welcome."""
        self.told_durable = dict.fromkeys(STREAMS, 0)
        """The last durable offsets that the keeper has received."""
        self.is_closed = False

    # ---- the trial writes

    @precondition(lambda self: self.files.final_sizes is None and not self.files.rest_of_torn)
    @rule(
        name=NAMES,
        value=st.one_of(st.floats(), st.integers(-9, 9), st.just({"default": 1})),
        share=SHARES,
        is_seen=MOSTLY,
    )
    def report_metric(self, name: str, value: object, share: float, is_seen: bool) -> None:
        """Write a complete record, or with share < 1 only its start; a later step writes the rest."""
        sequence = len(self.files.records)
        frame = records.encode(sequence, name, "PERIODICAL", sequence, value)
        metrics = self.files.content[Stream.METRICS]
        written = max(1, int(len(frame) * share))
        self.files.rest_of_torn = frame[written:]
        self._torn_record = (len(metrics), records.decode(frame, 0).records[0].value, sequence)
        self._torn_end = len(metrics) + len(frame)
        metrics += frame[:written]
        if not self.files.rest_of_torn:
            self._add_record()
        self._look(is_seen)

    def _add_record(self) -> None:
        self.files.records.append(self._torn_record)
        self.files.ends.append(self._torn_end)

    @precondition(lambda self: self.files.final_sizes is None and self.files.rest_of_torn)
    @rule(share=SHARES, is_seen=MOSTLY)
    def go_on_with_torn_metric(self, share: float, is_seen: bool) -> None:
        rest = self.files.rest_of_torn
        written = max(1, int(len(rest) * share))
        self.files.content[Stream.METRICS] += rest[:written]
        self.files.rest_of_torn = rest[written:]
        if not self.files.rest_of_torn:
            self._add_record()
        self._look(is_seen)

    @precondition(lambda self: self.files.final_sizes is None)
    @rule(litter=LITTER, is_seen=MOSTLY)
    def litter_metrics(self, litter: bytes, is_seen: bool) -> None:
        """Write bytes that are not a record, such as those of a writer that is killed while it writes a record."""
        if self.files.rest_of_torn and litter.startswith(self.files.rest_of_torn):
            # The test has left a record without its last bytes in the file. If the litter starts with these bytes, it completes
            # the record.
            self._add_record()
        self.files.rest_of_torn = b""
        self.files.content[Stream.METRICS] += litter
        self._look(is_seen)

    @precondition(lambda self: self.files.final_sizes is None)
    @rule(stream=LOGS, data=st.binary(min_size=1, max_size=100), is_seen=MOSTLY)
    def print_log(self, stream: Stream, data: bytes, is_seen: bool) -> None:
        self.files.content[stream] += data
        self._look(is_seen)

    @precondition(lambda self: self.files.final_sizes is None)
    @rule()
    def end_attempt(self) -> None:
        self.files.final_sizes = self.files.sizes
        self.replication.ended(self.files.final_sizes)
        if self.is_welcome:
            self.to_manager.append(("ended", self.files.final_sizes))
        self._send_chunks()

    @precondition(lambda self: self.files.final_sizes is not None)
    @rule(stream=st.sampled_from(STREAMS), data=st.binary(min_size=1, max_size=20))
    def stray_process_writes(self, stream: Stream, data: bytes) -> None:
        self.files.content[stream] += data

    # ---- the keeper

    def _look(self, is_seen: bool) -> None:
        """If `is_seen`, the keeper polls the files."""
        if is_seen:
            self.replication.grew(self.files.sizes)
            self._send_chunks()

    @precondition(lambda self: not self.is_connected and not self.is_closed)
    @rule(is_answered=MOSTLY)
    def connect(self, is_answered: bool) -> None:
        self.is_connected = True
        self.to_manager.append(("hello",))
        if is_answered:
            self.manager_hears(count=1)
            self.keeper_hears(count=1)

    def keeper_restarts(self) -> None:
        self.drop_link()
        self.replication = self.replication_type(STREAMS)
        if self.files.final_sizes is not None:
            self.replication.ended(self.files.final_sizes)

    @precondition(lambda self: self.to_keeper)
    @rule(count=COUNTS)
    def keeper_hears(self, count: int) -> None:
        for _ in range(min(count, len(self.to_keeper))):
            match self.to_keeper.popleft():
                case ("welcome", durable):
                    self.is_welcome = True
                    self.told_durable |= dict.fromkeys(STREAMS, 0) | durable
                    self.replication.link_came_up(durable)
                    if self.files.final_sizes is not None:
                        self.to_manager.append(("ended", self.files.final_sizes))
                case ("durable", durable, is_closed):
                    self.told_durable |= durable
                    self.replication.confirmed(durable)
                    self.is_closed |= is_closed
            self._send_chunks()

    def _send_chunks(self) -> None:
        for chunk in self.replication.next_chunks(KEY):
            urgent = chunk.stream is Stream.METRICS
            largest = replication_module.METRICS_CHUNK_BYTES if urgent else replication_module.LOG_CHUNK_BYTES
            window = (
                replication_module.METRICS_WINDOW_BYTES if urgent else replication_module.LOG_WINDOW_BYTES
            )
            end = chunk.offset + chunk.size_bytes
            assert self.is_welcome, "a chunk without a link"
            assert 1 <= chunk.size_bytes <= largest
            assert end <= len(self.files.counted(chunk.stream)), "bytes that do not count"
            assert end - self.told_durable[chunk.stream] <= window, "more in flight than the window allows"
            data = bytes(self.files.content[chunk.stream][chunk.offset : end])
            self.to_manager.append(("chunk", chunk.stream, chunk.offset, data))

    # ---- the link

    @precondition(lambda self: self.is_connected or self.store.offsets)
    @rule(who=st.sampled_from(["link", "link", "keeper", "manager"]), is_soon_back=MOSTLY)
    def dies(self, who: str, is_soon_back: bool) -> None:
        match who:
            case "link":
                self.drop_link()
            case "keeper":
                self.keeper_restarts()
            case "manager":
                self.manager_restarts()
        if is_soon_back and not self.is_closed:
            self.connect(is_answered=True)

    def drop_link(self) -> None:
        """Drop the link. Messages in flight are lost; the delivered messages are a prefix of the sent messages."""
        self.to_manager.clear()
        self.to_keeper.clear()
        if self.is_connected:
            self.replication.link_went_down()
        self.is_connected = self.is_greeted = self.is_welcome = False

    # ---- the manager

    @precondition(lambda self: self.to_manager)
    @rule(count=COUNTS)
    def manager_hears(self, count: int) -> None:
        for _ in range(min(count, len(self.to_manager))):
            match self.to_manager.popleft():
                case ("hello",):
                    self.is_greeted = True
                    self.to_keeper.append(("welcome", dict(self.receiver.durable)))
                case ("chunk", stream, offset, data):
                    self.waiting_commits += self.receiver.take(stream, offset, data)
                case ("ended", final_sizes):
                    self.waiting_commits += self.receiver.end(final_sizes)
                    self._acknowledge()

    @precondition(lambda self: self.waiting_commits)
    @rule(count=COUNTS, survives=MOSTLY)
    def commit(self, count: int, survives: bool) -> None:
        batch, self.waiting_commits = self.waiting_commits[:count], self.waiting_commits[count:]
        self.store.commit(batch)
        if not survives:
            self.manager_restarts()
            return
        for commit in batch:
            self.receiver.committed(commit)
        self._acknowledge()

    def manager_restarts(self) -> None:
        self.drop_link()
        self.waiting_commits = []
        self.receiver = self.receiver_type.restored(KEY, dict(self.store.offsets))

    def _acknowledge(self) -> None:
        if self.is_greeted:
            self.to_keeper.append(("durable", dict(self.receiver.durable), self.receiver.is_complete))

    # ---- invariants

    @invariant()
    def nothing_is_doubled_or_out_of_order(self) -> None:
        assert self.store.rows == self.files.counted_records[: len(self.store.rows)]
        for log in STREAMS[1:]:
            assert self.files.counted(log).startswith(self.store.logs[log])

    @invariant()
    def durable_means_committed(self) -> None:
        for told in (self.receiver.durable, *(message[1] for message in self.to_keeper)):
            for stream, offset in told.items():
                assert offset <= self.store.offsets.get(stream, 0), f"{stream} is not durable up to {offset}"

    @invariant()
    def over_means_the_store_has_all(self) -> None:
        if self.receiver.is_complete or self.is_closed:
            assert self.store.has_all(self.files)

    @invariant()
    def every_byte_of_metrics_is_a_record_or_counted_as_garbage(self) -> None:
        durable = self.store.offsets.get(Stream.METRICS, 0)
        assert self.store.record_bytes + self.store.corrupt_bytes == durable

    def check(self) -> None:
        """Check all invariants; `teardown` calls this between its steps."""
        self.nothing_is_doubled_or_out_of_order()
        self.durable_means_committed()
        self.over_means_the_store_has_all()
        self.every_byte_of_metrics_is_a_record_or_counted_as_garbage()

    # ---- the end

    def _all_is_heard_by_manager(self) -> None:
        self.manager_hears(count=len(self.to_manager))

    def _all_is_committed(self) -> None:
        self.commit(count=len(self.waiting_commits), survives=True)

    def _all_is_heard_by_keeper(self) -> None:
        self.keeper_hears(count=len(self.to_keeper))

    def teardown(self) -> None:
        """End the attempt. From now on no failures occur, so all bytes within the quota must arrive in the store."""
        if self.files.final_sizes is None:
            self.end_attempt()
        for _ in range(ENOUGH_STEPS):
            if self.is_closed:
                break
            if not self.is_connected:
                self.connect(is_answered=True)
            for step in (self._all_is_heard_by_manager, self._all_is_committed, self._all_is_heard_by_keeper):
                step()
                self.check()
        assert self.is_closed, "the attempt was never closed"
        assert self.store.has_all(self.files)


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small limits, so that a few records fill a window and a short test reaches every limit."""
    for name, size_bytes in {
        "METRICS_CHUNK_BYTES": 48,
        "METRICS_WINDOW_BYTES": 256,
        "LOG_CHUNK_BYTES": 16,
        "LOG_WINDOW_BYTES": 40,
    }.items():
        monkeypatch.setattr(replication_module, name, size_bytes)
    # The quotas are low, so that the trial exceeds them in some runs. In most runs, it writes fewer bytes.
    for stream, size_bytes in ((Stream.METRICS, 900), (Stream.STDOUT, 150), (Stream.STDERR, 150)):
        monkeypatch.setitem(QUOTA_BYTES, stream, size_bytes)
    # The longest record is as long as the small metrics window. A longer record could never be sent.
    monkeypatch.setattr(records, "MAX_FRAME_BYTES", 256)


@pytest.fixture
def play(small_windows: None) -> Callable[..., None]:
    """Run the machine with the given parts. Raises the errors of its checks.

    `more_rules`: classes with additional rules. `more_settings`: Hypothesis settings.
    """

    def play_with(
        replication_type: type[Replication] = Replication,
        receiver_type: type[AttemptIngest] = AttemptIngest,
        more_rules: tuple[type, ...] = (),
        **more_settings: Any,
    ) -> None:
        parts = {"replication_type": replication_type, "receiver_type": receiver_type}
        machine = type("ExactlyOnceWithTheseParts", (*more_rules, ExactlyOnce), parts)
        in_any_case = {
            "stateful_step_count": 40,
            "database": None,
            "deadline": None,
            "report_multiple_bugs": False,
            "suppress_health_check": list(HealthCheck),
        }
        run_state_machine_as_test(machine, settings=settings(**in_any_case, **more_settings))

    return play_with
