"""A whole engine, and a keeper that sends arbitrary messages. These do not affect the trial of another job."""

import asyncio
import contextlib

from attempts import attempt_id, metrics_of
from deadlines import DEADLINE_S
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from void_service import Void, an_engine, start

from nni_manager.grpc_server.servicer import STATUS_OF
from nni_manager.store.reader import StoreReader
from trial_keeper import __version__
from trial_keeper.wire.convert import keeper_messages_from_bytes, keeper_messages_to_pb
from trial_keeper.wire.messages import (
    LATEST_S,
    MAX_SIZE,
    AttemptKey,
    Chunk,
    GpuUsage,
    Hello,
    Idle,
    KeeperMessage,
    Stream,
    TrialEnded,
    TrialRevoked,
    TrialStarted,
    Usage,
)
from trial_keeper.wire.reasons import ExitReason

TASK, FRAME = (
    "main-0",
    b'ME000089{"parameter_id": 0, "trial_job_id": "x", "type": "FINAL", "sequence": 0, "value": "1.5"}\n',
)
TIMES = st.sampled_from([0.0, 1.5, LATEST_S])
SIZES = st.sampled_from([0, 1, len(FRAME), 10_000, MAX_SIZE])
DATA = st.sampled_from([b"", b"\n", b"x" * 5000, FRAME, FRAME * 3, FRAME[:40], b"\xff\0\n", b"ME999999{"])
STREAMS = st.sampled_from(Stream)
OFFSETS = st.dictionaries(STREAMS, SIZES)


class Counting(Void):
    """A training service that counts its jobs."""

    jobs = 0

    async def submit(self, settings):
        await super().submit(settings)
        self.jobs += 1


def messages(own, other):
    """Any message of a keeper: about its own trial, a trial of another job, or a trial that does not exist."""
    keys = st.builds(
        AttemptKey,
        st.sampled_from([own, own, own, other, "nobody"]),
        st.sampled_from([0, 0, 1, 2, 10**26 - 1]).map(attempt_id),
        st.sampled_from([TASK, TASK, TASK, "main-1"]),
    )
    strategies = {
        Hello: st.builds(
            Hello, st.just(__version__), st.just("TESTEXPT"), st.sampled_from([own, other]), st.just(TASK)
        ),
        Chunk: st.builds(Chunk, keys, STREAMS, SIZES, DATA),
        TrialStarted: st.builds(TrialStarted, keys, TIMES),
        TrialEnded: st.builds(
            TrialEnded,
            keys,
            st.sampled_from(ExitReason),
            st.integers(-1, 300),
            TIMES,
            TIMES,
            OFFSETS,
            st.text(max_size=5),
        ),
        Usage: st.builds(
            Usage,
            keys,
            st.sampled_from([0.0, -1.0, 1e308]),
            SIZES,
            SIZES,
            st.just((GpuUsage(7, 1e308, MAX_SIZE),)),
        ),
        Idle: st.just(Idle()),
        TrialRevoked: st.builds(TrialRevoked, st.sampled_from([own, other, "nobody"])),
    }
    assert strategies.keys() == set(KeeperMessage.__args__), "add a strategy for the new message"
    return st.one_of(*strategies.values())


@settings(suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_arbitrary_messages_of_a_keeper_do_not_affect_the_engine_or_other_trials(a_real_experiment, data):
    experiment = a_real_experiment("pass\n", trialConcurrency=2, maxTrialNum=2)

    async def scenario():
        engine, service = an_engine(experiment, kind=Counting)
        await start(engine)
        while service.jobs < 2:
            await asyncio.sleep(0.005)
        own, other = engine.experiment.trials
        other_key = AttemptKey(other, attempt_id(0), TASK)

        def admitted(job_id):
            hello = Hello(__version__, "TESTEXPT", job_id, TASK, (AttemptKey(job_id, attempt_id(0), TASK),))
            return engine.admission.admit(hello, job_id, engine.admission.token(job_id))

        honest = admitted(other)
        honest.receive(TrialStarted(other_key, 1.0))
        honest.receive(Chunk(other_key, Stream.METRICS, 0, FRAME))
        hostile = admitted(own)
        for said in data.draw(st.lists(st.lists(messages(own, other), min_size=1, max_size=4), max_size=12)):
            try:
                # The hostile session receives the messages as the manager decodes them from the network.
                for message in keeper_messages_from_bytes(keeper_messages_to_pb(said).SerializeToString()):
                    hostile.receive(message)
            except tuple(STATUS_OF):
                hostile.closed()
                hostile = admitted(own)
            if data.draw(st.booleans()):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(asyncio.shield(engine.commits.add([])), DEADLINE_S)
            assert not engine.runtime.failed.is_set()
        honest.receive(Chunk(other_key, Stream.METRICS, len(FRAME), FRAME))
        await asyncio.wait_for(asyncio.shield(engine.commits.add([])), DEADLINE_S)
        assert not engine.runtime.failed.is_set()
        trial = engine.experiment.trials[other]
        assert not trial.run.message
        assert (trial.state.value, trial.run.attempt, trial.run.final) == ("RUNNING", 0, "1.5")
        await engine.close()
        with StoreReader(experiment.folder.database) as reader:
            assert [row.record_offset for row in metrics_of(reader, other)] == [0, len(FRAME)]

    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
