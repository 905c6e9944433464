"""Sends the streams of attempts: follows their files, and reads the chunks that the core decides to send."""

from trial_keeper.core import events
from trial_keeper.core.replication import SendChunk
from trial_keeper.host.attempt_files import Tail
from trial_keeper.host.file_watcher import FileWatcher
from trial_keeper.host.keeper_context import KeeperContext
from trial_keeper.host.output_forwarder import OutputForwarder, finish
from trial_keeper.wire.messages import AttemptKey, Chunk, Offsets, Stream
from trial_keeper.wire.workspace import AttemptFolder

# These limit the polls of a file that grows fast; a person who follows a log does not notice the delay.
_COOLDOWN_S = {Stream.METRICS: 0.01}
_LOGS_COOLDOWN_S = 0.1


class StreamSender:
    """The open files of attempts, and the watches of the files of the trial that runs."""

    def __init__(self, context: KeeperContext) -> None:
        self._context = context
        self.watcher = FileWatcher()
        self.tails: dict[AttemptKey, Tail] = {}
        """By attempt, until it is closed."""
        self._sizes: Offsets = {}
        """The sizes at the last poll, of the trial that runs."""
        self._unreadable: dict[tuple[AttemptKey, Stream], int] = {}
        """The number of the link's stream in which a chunk could not be read, by the chunk's file."""
        self._forwarders: dict[Stream, OutputForwarder] = {}
        """The forwarders of the trial's output, if the keeper copies that output to its own."""
        if context.settings.relay_output:
            self._forwarders = {Stream.STDOUT: OutputForwarder(1), Stream.STDERR: context.log.stderr}

    def follow(self, folder: AttemptFolder) -> None:
        """Watch the files of a trial that has started."""
        self._sizes = {}
        for stream, forwarder in self._forwarders.items():
            forwarder.follow(folder.stream(stream))
        for stream in self._watched:
            self.watcher.add(folder.stream(stream), cooldown_s=_COOLDOWN_S.get(stream, _LOGS_COOLDOWN_S))
        self.watcher.poll_now()
        if self._context.is_in_loop:
            self._context.link.limit_log_rate(are_paced=True)

    def unfollow(self, folder: AttemptFolder) -> None:
        """Stop watching the files of a trial that has ended. Their rest is sent."""
        for stream in self._watched:
            self.watcher.remove(folder.stream(stream))
        self.watcher.poll_now()

    @property
    def _watched(self) -> set[Stream]:
        return {*self._context.settings.streams, *self._forwarders}

    def poll(self, key: AttemptKey) -> bool:
        """Report the growth of the running trial's files. True if there is any."""
        sizes = self.tails[key].sizes(self._context.settings.streams)
        grew = sizes != self._sizes
        if grew:
            self._sizes = sizes
            self._context.handle(events.StreamsGrew(key, sizes))
        return grew

    async def wait(self, *, grew: bool, longest_s: float) -> None:
        """Wait until the files are to be polled again. The keeper's own output gets what the trial has written, if wanted."""
        for forwarder in self._forwarders.values():
            forwarder.poll()
        await self.watcher.wait(grew=grew, longest_s=longest_s)

    def measure(self, effect: events.MeasureMetrics) -> None:
        """Report the size of the attempt's metrics."""
        size = self.tails[effect.key].sizes((Stream.METRICS,))[Stream.METRICS]
        self._context.handle(events.MetricsMeasured(effect.key, size))

    def send(self, chunk: SendChunk) -> None:
        """Read and send a chunk, unless an earlier one could not be read: later chunks would leave a gap."""
        tail, link = self.tails.get(chunk.key), self._context.link
        is_unreadable = self._unreadable.get((chunk.key, chunk.stream)) == link.streams
        if tail is None or is_unreadable or not self._context.core.is_due(chunk):
            return
        data = tail.read(chunk.stream, chunk.offset, chunk.size_bytes)
        if len(data) == chunk.size_bytes:
            self._context.link.send(Chunk(chunk.key, chunk.stream, chunk.offset, data))
        elif (size := tail.truncated_size(chunk.stream, chunk.offset + chunk.size_bytes)) is not None:
            self._report_changes(chunk.key, tail)  # a removal is a more exact warning than a truncation
            self._context.handle(events.StreamTruncated(chunk.key, chunk.stream, chunk.offset, size))
        else:
            # Reconnect, and restart from the manager's offset. The other streams are sent meanwhile.
            self._unreadable[chunk.key, chunk.stream] = link.streams
            link.drop_later(
                f"cannot read {chunk.size_bytes} bytes of {chunk.stream.value} at {chunk.offset}: "
                "the shared storage failed; check its server and the network to it"
            )
        self._report_changes(chunk.key, tail)

    def check(self, key: AttemptKey) -> Tail:
        """Report the files of an ended trial that were replaced or rewritten. Returns the attempt's files."""
        tail = self.tails[key]
        tail.check(self._context.settings.streams)
        self._report_changes(key, tail)
        return tail

    def _report_changes(self, key: AttemptKey, tail: Tail) -> None:
        while tail.changes:
            self._context.handle(events.StreamChanged(key, *tail.changes.popitem()))

    def release(self, key: AttemptKey) -> None:
        """Close the attempt's files: the manager has all of them."""
        if (tail := self.tails.pop(key, None)) is not None:
            tail.close()
        for stream in Stream:
            self._unreadable.pop((key, stream), None)

    def close(self) -> None:
        """Write what is left of the keeper's output, and close all files. Blocks, at most a few seconds."""
        # An executor would start a thread for each.
        finish({self._context.log.stderr, *self._forwarders.values()})
        for key in list(self.tails):
            self.release(key)
        self.watcher.close()
