"""Many simulated keepers in one process, for measurements of the manager: 1,000 real keepers need too large a machine.

A simulated keeper (double) sends the messages of a real keeper on its own connection. It runs no trial and writes no files, which
leaves the processor to the manager. The process runs this module as its script. The script reads a command, which is a line of
JSON, from stdin. It writes `ready` to stdout when all doubles are connected. Then it reads a line `go`, runs the command, and
writes the duration in seconds.
"""

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import grpc.aio

from nni_sdk.records import encode
from trial_keeper import __version__
from trial_keeper.core.replication import METRICS_CHUNK_BYTES, METRICS_WINDOW_BYTES
from trial_keeper.host.link import CHANNEL_OPTIONS
from trial_keeper.host.usage import INTERVAL_S
from trial_keeper.wire.attempt_ids import new_attempt_id
from trial_keeper.wire.convert import keeper_messages_to_pb, manager_messages_from_pb
from trial_keeper.wire.messages import (
    Ack,
    AttemptKey,
    Chunk,
    Hello,
    Idle,
    KeeperMessage,
    ManagerMessage,
    RunTrial,
    Shutdown,
    Stream,
    TrialEnded,
    TrialStarted,
    Usage,
    Welcome,
)
from trial_keeper.wire.metadata import JOB_KEY, TOKEN_KEY
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.v1 import keeper_pb2 as pb
from trial_keeper.wire.v1.keeper_pb2_grpc import KeeperServiceStub

TASK = "main-0"
RECORDS_OF_A_TRIAL = 3


def metrics(records: int) -> bytes:
    """A metrics file with this number of intermediate results, as written by the SDK."""
    return b"".join(encode(3, "aBcDe", "PERIODICAL", i, i * 0.123456789) for i in range(records))


class Job(NamedTuple):
    """A job with a simulated keeper. `trial_id` is empty in a reused job."""

    job_id: str
    token: str
    trial_id: str


class KeeperDouble:
    """One simulated keeper's stream."""

    def __init__(self, address: str, experiment_id: str, job: Job) -> None:
        self.key = AttemptKey(job.trial_id, new_attempt_id(time.time()), TASK)
        self._hello = Hello(__version__, experiment_id, job.job_id, TASK, (self.key,) if job.trial_id else ())
        # These options give each channel a connection of its own. Otherwise, gRPC shares connections between channels.
        self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        self._call = KeeperServiceStub(self._channel).Connect(
            metadata=((JOB_KEY, job.job_id), (TOKEN_KEY, job.token))
        )

    async def connect(self) -> None:
        """Send Hello, and receive Welcome."""
        await self.say(self._hello)
        async for message in self.heard():
            if isinstance(message, Welcome):
                break

    async def close(self) -> None:
        """Close the connection."""
        self._call.cancel()
        await self._channel.close()

    async def say(self, *messages: KeeperMessage) -> None:
        """Send the messages in one batch."""
        await self._call.write(keeper_messages_to_pb(messages))

    async def heard(self) -> AsyncIterator[ManagerMessage]:
        """The manager's messages, until it ends the stream."""
        while isinstance(response := await self._call.read(), pb.ConnectResponse):
            for message in manager_messages_from_pb(response):
                yield message

    async def listen(self) -> None:
        """Receive messages and send none, as a keeper without a trial does."""
        async for _ in self.heard():
            pass

    async def rest(self) -> None:
        """Simulate a running trial without output. The double reports the trial's usage as often as a real keeper."""
        await self.say(TrialStarted(self.key, time.time()))
        listening = asyncio.ensure_future(self.listen())
        await asyncio.sleep(random.uniform(0, INTERVAL_S))
        while not listening.done():
            # Each report has the same usage, so the trial's peak usage does not change after the first report.
            await self.say(Usage(self.key, 50.0, 100_000_000, 1_000_000))
            await asyncio.sleep(INTERVAL_S)

    async def deliver(self, content: bytes) -> None:
        """Send a metrics file as fast as the manager acknowledges it. The chunk size and the number of unacknowledged bytes have
        the limits of a real keeper.
        """
        sent = durable = 0
        heard = self.heard()
        while durable < len(content):
            while sent < (limit := min(len(content), durable + METRICS_WINDOW_BYTES)):
                chunk = content[sent : min(limit, sent + METRICS_CHUNK_BYTES)]
                await self.say(Chunk(self.key, Stream.METRICS, sent, chunk))
                sent += len(chunk)
            message = await anext(heard)
            if isinstance(message, Ack):
                durable = message.attempt.offsets.get(Stream.METRICS, durable)

    async def run_trials(self) -> None:
        """Run each received trial: report a few results, and end."""
        content = metrics(RECORDS_OF_A_TRIAL - 1) + encode(3, "aBcDe", "FINAL", RECORDS_OF_A_TRIAL - 1, 0.5)
        await self.say(Idle())
        async for message in self.heard():
            if isinstance(message, RunTrial):
                key = AttemptKey(message.trial_id, new_attempt_id(time.time()), TASK)
                await self.say(TrialStarted(key, time.time()))
                await self.say(Chunk(key, Stream.METRICS, 0, content))
                sizes = {Stream.METRICS: len(content)}
                await self.say(
                    TrialEnded(key, ExitReason.SUCCEEDED, 0, time.time(), time.time(), sizes), Idle()
                )
            elif isinstance(message, Shutdown):
                return


async def _play(role: str, address: str, experiment_id: str, jobs: Iterable[Job], records: int) -> None:
    doubles = [KeeperDouble(address, experiment_id, job) for job in jobs]
    for double in doubles:
        await double.connect()
    content = metrics(records)
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    began_s = time.monotonic()
    match role:
        case "deliver":
            await asyncio.gather(*(double.deliver(content) for double in doubles))
        case "run trials":
            await asyncio.gather(*(double.run_trials() for double in doubles))
        case "rest":
            await asyncio.gather(*(double.rest() for double in doubles))
        case "idle":
            await asyncio.gather(*(double.listen() for double in doubles))
    print(time.monotonic() - began_s, flush=True)
    await asyncio.gather(*(double.close() for double in doubles))


class Doubles:
    """Simulated keepers of these jobs in one process. They are connected when the `with` block starts; `begin` starts their
    work.
    """

    def __init__(
        self, role: str, address: str, experiment_id: str, jobs: list[Job], records: int = 0
    ) -> None:
        self._order = json.dumps([role, address, experiment_id, jobs, records])
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Doubles":
        self._process = subprocess.Popen(
            [sys.executable, Path(__file__).resolve()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.tell(self._order)
        if self.answer() != "ready":
            raise AssertionError("the doubles were not let in")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.communicate()

    def begin(self) -> None:
        """Start the doubles' role."""
        self.tell("go")

    def tell(self, line: str) -> None:
        """Send a line to the stdin of the process."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> str:
        """Read the next line of the process's stdout; empty after the process has exited."""
        assert self._process is not None
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


if __name__ == "__main__":
    role, address, experiment_id, jobs, records = json.loads(sys.stdin.readline())
    asyncio.run(_play(role, address, experiment_id, [Job(*job) for job in jobs], records))
