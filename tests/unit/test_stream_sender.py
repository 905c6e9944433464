"""The bytes that a keeper sends if one of its attempts' files cannot be read."""

import asyncio
import types

import pytest
from attempts import attempt_id
from deadlines import DEADLINE_S

from trial_keeper.core.events import LinkLost
from trial_keeper.core.replication import SendChunk
from trial_keeper.host import link as link_module
from trial_keeper.host.link import ManagerLink
from trial_keeper.host.stream_sender import StreamSender
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.messages import AttemptKey, Hello, Stream
from trial_keeper.wire.workspace import Workspace

KEY = AttemptKey("t0", attempt_id(0), "main-0")


class Files:
    """The files of an attempt, whose storage cannot read those in `broken`."""

    def __init__(self):
        self.broken, self.reads, self.changes = {Stream.STDOUT}, [], {}

    def read(self, stream, offset, size_bytes):
        self.reads.append(stream)
        return b"" if stream in self.broken else b"x" * size_bytes

    def truncated_size(self, stream, promised):
        return None

    def close(self):
        pass


@pytest.fixture
def sender(tmp_path):
    link = types.SimpleNamespace(sent=[], dropped=[], streams=1)
    link.send, link.drop_later = link.sent.append, link.dropped.append
    settings = KeeperSettings("EXPT", "job", str(tmp_path), "f00d")
    core = types.SimpleNamespace(is_due=lambda chunk: True)
    context = types.SimpleNamespace(link=link, settings=settings, core=core)
    sender = StreamSender(context)
    sender.tails[KEY], sender.link = Files(), link
    return sender


def streams_sent(sender):
    return [chunk.stream for chunk in sender.link.sent]


def test_an_unreadable_log_blocks_no_other_stream_and_is_read_again_after_a_reconnection(sender):
    files = sender.tails[KEY]
    sender.send(SendChunk(KEY, Stream.METRICS, 0, 10))
    sender.send(SendChunk(KEY, Stream.STDOUT, 0, 10))
    sender.send(SendChunk(KEY, Stream.STDOUT, 10, 10))
    sender.send(SendChunk(KEY, Stream.METRICS, 10, 10))
    assert streams_sent(sender) == [Stream.METRICS, Stream.METRICS]
    assert files.reads.count(Stream.STDOUT) == 1, "a later chunk would leave a gap"
    (cause,) = sender.link.dropped
    assert cause.startswith("cannot read 10 bytes of stdout at 0: the shared storage failed")
    sender.link.streams += 1
    files.broken.clear()
    sender.send(SendChunk(KEY, Stream.STDOUT, 0, 10))
    assert streams_sent(sender)[-1] is Stream.STDOUT


@pytest.mark.parametrize("meanwhile", ["nothing", "another stream", "its end"])
def test_a_stream_is_dropped_after_a_delay_unless_it_has_ended_or_was_replaced(
    tmp_path, monkeypatch, meanwhile
):
    monkeypatch.setattr(link_module, "DROP_DELAY_S", 0.0 if meanwhile == "nothing" else DEADLINE_S)
    posted = []

    async def scenario():
        settings = KeeperSettings("EXPT", "job", str(tmp_path), "f00d")
        link = ManagerLink(Workspace(tmp_path), settings, posted.append)
        ends = asyncio.Event()

        async def outcome(*_):
            await ends.wait()
            return LinkLost("it has ended")

        link._outcome = outcome
        link.open(lambda: Hello("1", "EXPT", "job", "main-0", ()))
        dropped = link._outgoing
        link.drop_later("cannot read")
        if meanwhile == "another stream":
            link.open(lambda: Hello("1", "EXPT", "job", "main-0", ()))
        elif meanwhile == "its end":
            ends.set()
        while not posted and meanwhile != "another stream":
            await asyncio.sleep(0)
        link._drop(dropped, "cannot read")  # simulates the call at the end of DROP_DELAY_S
        await link.close()

    asyncio.run(scenario())
    causes = {"nothing": ["cannot read"], "another stream": [], "its end": ["it has ended"]}
    assert posted == [LinkLost(cause) for cause in causes[meanwhile]]
