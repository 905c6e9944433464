"""The manager and the keepers of reused jobs, connected by simulated streams with delays and disconnections.

The decision code of both sides is real; the test replaces the manager's engine and the keeper's host.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from attempts import attempt_id
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nni_manager.domain import events as manager
from nni_manager.domain.attempts import AttemptReport
from nni_manager.domain.experiment import ExperimentCore, ExperimentState
from nni_manager.domain.jobs import MAX_PREFETCH, Job, JobState
from nni_manager.domain.objectives import MAXIMIZE
from nni_manager.domain.search_budget import Limits
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.domain.trial_lifecycle import STOPPED_BEFORE_START
from trial_keeper.core import events as keeper
from trial_keeper.core.keeper import Keeper
from trial_keeper.core.link import LinkState
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.messages import (
    Ack,
    AttemptKey,
    AttemptOffsets,
    Idle,
    KeeperMessage,
    ManagerMessage,
    RevokeTrial,
    RunTrial,
    Shutdown,
    StopTrial,
    TrialEnded,
    TrialRevoked,
    TrialStarted,
    Welcome,
)
from trial_keeper.wire.reasons import ExitReason

TASK = "main-0"
ENDLESS_S = 1e9


@dataclass(eq=False)
class Stream:
    """A stream between a keeper and the manager. It exists until both sides have closed it."""

    job_id: str
    to_manager: deque[KeeperMessage] = field(default_factory=deque)
    to_keeper: deque[ManagerMessage] = field(default_factory=deque)


class Container:
    """A keeper with a simulated host. The test decides when the command of a trial ends."""

    def __init__(self, world: "World", job_id: str) -> None:
        self.world = world
        self.job_id = job_id
        settings = KeeperSettings(
            "exp", job_id, "/mnt/exp", "token", idle_timeout_s=ENDLESS_S, linger_s=ENDLESS_S
        )
        self.keeper = Keeper(settings)
        self.now_s = 0.0
        self.stream: Stream | None = None
        self.exit_code: int | None = None

    def handle(self, event: keeper.Event) -> None:
        for effect in self.keeper.handle(event, self.now_s):
            match effect:
                case keeper.PrepareTrial(trial_id=trial_id):
                    self.handle(keeper.TrialAssigned(self.world.claim(trial_id)))
                case keeper.SpawnTrial(key=key):
                    self.world.spawned[key.trial_id] += 1
                    self.handle(keeper.TrialSpawned(key, 10.0))
                case keeper.Send(message=message):
                    if self.stream is not None:
                        self.stream.to_manager.append(message)
                case keeper.RecordExit(ended=ended):
                    self.world.exits[ended.key] = ended
                case keeper.OpenLink():
                    self.stream = self.world.admit(self.job_id, tuple(self.keeper.attempts))
                case keeper.ExitKeeper(code=code):
                    self.exit_code = code
                case _:
                    pass

    def connect(self) -> None:
        if self.keeper.link.state is LinkState.WAITING:
            self.now_s = max(self.now_s, self.keeper.link.retry_at_s or 0.0)
            self.handle(keeper.TimerFired())

    def lose_link(self) -> None:
        self.stream = None
        self.handle(keeper.LinkLost("gone"))

    def end_trial(self, lasted_s: float) -> None:
        attempt = self.keeper.current
        assert attempt is not None
        self.handle(keeper.TrialExited(attempt.key, lasted_s, 0, None, {}, ""))

    def receive(self) -> None:
        assert self.stream is not None
        message = self.stream.to_keeper.popleft()
        self.handle(message)


Outgoing = manager.DispatchTrial | manager.RevokePrefetched


class World:
    """The decision code of a manager with a simulated engine, and the containers of the manager's jobs."""

    def __init__(self, concurrency: int = 3, max_trials: int = 12, max_trials_of_job: int = 0) -> None:
        self.experiment = ExperimentCore(
            "exp", Limits(concurrency, max_trials, None), MAXIMIZE, reuses_jobs=True, may_prefetch=True
        )
        self.experiment.jobs.max_trials = max_trials_of_job
        self.containers: dict[str, Container] = {}
        self.sessions: dict[str, Stream] = {}
        self.streams: list[Stream] = []
        self.outbox: dict[str, deque[Outgoing]] = {}
        self.requests: list[int] = []
        self.undelivered: list[AttemptKey] = []
        self.spawned: Counter[str] = Counter()
        self.exits: dict[AttemptKey, TrialEnded] = {}
        self.events: deque[manager.Event] = deque()
        self.is_handling = False
        self.post(manager.ManagerReady())

    # ---- the engine

    def post(self, event: manager.Event) -> None:
        self.events.append(event)
        if self.is_handling:
            return
        self.is_handling = True
        while self.events:
            for effect in self.experiment.handle(self.events.popleft(), 0.0):
                self.perform(effect)
        self.is_handling = False

    def perform(self, effect: manager.Effect) -> None:
        match effect:
            case manager.AskTuner(sequence_id=number):
                self.requests.append(number)
            case manager.SubmitJob(job=job):
                self.containers[job.job_id] = Container(self, job.job_id)
            case manager.DispatchTrial(job=job) | manager.RevokePrefetched(job=job):
                outbox = self.outbox.setdefault(job.job_id, deque())
                if effect in outbox and isinstance(effect, manager.RevokePrefetched):
                    outbox.remove(effect)
                if effect not in outbox:
                    outbox.append(effect)
            case manager.CancelTrial(trial=trial, reason=reason):
                self.send(trial.job_id, StopTrial(trial.trial_id, reason))
            case manager.CloseAttempt(key=key):
                closed = Ack(AttemptOffsets(key, {}, closed=True))
                self.send(self.experiment.trials[key.trial_id].job_id, closed)
            case manager.DrainJob(job=job):
                is_heard = self.send(job.job_id, Shutdown("no more trials"))
                if not is_heard and job.job_id in self.containers:
                    self.containers[job.job_id].exit_code = 0
            case _:
                pass

    def send(self, job_id: str, message: ManagerMessage) -> bool:
        session = self.sessions.get(job_id)
        if session is not None:
            session.to_keeper.append(message)
        return session is not None

    def send_next(self, job_id: str) -> None:
        """Send the first queued message of a job to the job's keeper."""
        outgoing = self.outbox[job_id].popleft()
        if not self.outbox[job_id]:
            del self.outbox[job_id]
        job, trial = outgoing.job, outgoing.trial
        if isinstance(outgoing, manager.RevokePrefetched):
            if trial.trial_id in job.revoking_ids:
                self.send(job_id, RevokeTrial(trial.trial_id))
        elif trial.trial_id in job.trial_ids and trial.job_id == job_id and not trial.state.is_terminal:
            self.send(job_id, RunTrial(trial.trial_id, attempt_id(0)))
            if trial.stop_reason is not None:
                self.send(job_id, StopTrial(trial.trial_id, trial.stop_reason))

    def admit(self, job_id: str, attempts: Iterable[AttemptKey]) -> Stream:
        stream = Stream(job_id)
        self.streams.append(stream)
        self.sessions[job_id] = stream
        trials = self.experiment.trials
        known = [AttemptOffsets(key, {}, trials[key.trial_id].state.is_terminal) for key in attempts]
        stream.to_keeper.append(Welcome("0.6.0", tuple(known)))
        self.post(manager.KeeperConnected(job_id, supports_revoke=True))
        return stream

    def receive(self, stream: Stream) -> None:
        message, job_id = stream.to_manager.popleft(), stream.job_id
        match message:
            case Idle():
                self.post(manager.KeeperIdle(job_id, TASK))
            case TrialRevoked(trial_id=trial_id):
                if self.sessions.get(job_id) is stream:
                    self.post(manager.TrialReclaimed(job_id, trial_id, 20.0))
            case TrialStarted(key=key):
                assert self.experiment.trials[key.trial_id].job_id == job_id, (
                    "the trial belongs to another job"
                )
                self.post(manager.AttemptStarted(key, 10.0))
            case TrialEnded(key=key):
                assert self.experiment.trials[key.trial_id].job_id == job_id, (
                    "the trial belongs to another job"
                )
                self.post(manager.AttemptEnded(message))
                self.undelivered.append(key)
            case _:
                raise AssertionError(message)

    def close_stream(self, stream: Stream) -> None:
        """The manager detects that a stream has ended."""
        self.streams.remove(stream)
        if self.sessions.get(stream.job_id) is stream:
            del self.sessions[stream.job_id]
            self.post(manager.KeeperDisconnected(stream.job_id))

    def end_job(self, job_id: str, *, is_clean: bool) -> None:
        """The manager observes the end of a job. The workspace shows which trials of the job have started."""
        del self.containers[job_id]
        self.outbox.pop(job_id, None)
        self.post(manager.KeeperDisconnected(job_id))
        job = self.experiment.jobs.live[job_id]
        unstarted = set()
        for trial_id in job.trial_ids:
            key = AttemptKey(trial_id, attempt_id(0), TASK)
            if not self.spawned[trial_id]:
                unstarted.add(trial_id)
            else:
                self.post(manager.AttemptStarted(key, 10.0))
            if key in self.exits:
                self.post(manager.AttemptEnded(self.exits[key]))
                self.post(manager.AttemptDelivered(key))
        for stream in [stream for stream in self.streams if stream.job_id == job_id]:
            self.close_stream(stream)
        reason, message = ExitReason.KEEPER_LOST, "gone"
        self.post(manager.JobTerminated(job_id, reason, message, 30.0, is_clean, frozenset(unstarted)))

    def restart(self) -> None:
        """A new manager resumes the experiment from the stored state."""
        before = self.experiment
        for container in self.containers.values():
            if container.stream is not None:
                container.lose_link()
        self.sessions.clear()
        self.streams.clear()
        self.outbox.clear()
        self.requests.clear()
        self.undelivered.clear()
        after = self.experiment = ExperimentCore(
            "exp", before.budget.limits, MAXIMIZE, reuses_jobs=True, may_prefetch=True, state=before.state
        )
        after.jobs.max_trials = before.jobs.max_trials
        for trial in before.trials.values():
            trial.run.ended = None
            for attempt in trial.attempts.values():
                attempt.apply(AttemptReport.DISCARDED)
            key = AttemptKey(trial.trial_id, attempt_id(0), TASK)
            if trial.state not in (TrialState.WAITING, *final_states()) and self.spawned[trial.trial_id]:
                trial.add_task(key)
                if key in self.exits:
                    trial.ended_in(self.exits[key])
                    trial.attempts[TASK].apply(AttemptReport.DELIVERED)
        after.restore(before.trials.values())
        jobs = [Job(job.job_id, ever_connected=job.ever_connected) for job in before.jobs.live.values()]
        after.scheduler.restore(jobs, [])
        self.post(manager.ManagerReady())

    # ---- the workspace

    def claim(self, trial_id: str) -> AttemptKey:
        assert not self.spawned[trial_id], f"{trial_id} runs twice"
        return AttemptKey(trial_id, attempt_id(0), TASK)

    # ---- the whole exchange

    def answer(self, at: int = 0) -> None:
        number = self.requests.pop(at)
        self.post(manager.ParametersSuggested(f"t{number}", number, {}, {}, 1.0))

    def deliver(self, at: int = 0) -> None:
        key = self.undelivered.pop(at)
        self.post(manager.AttemptDelivered(key))

    def settle(self) -> None:
        """Deliver messages until no message is left."""
        for _ in range(10_000):
            for job_id, container in list(self.containers.items()):
                if container.exit_code is not None:
                    self.end_job(job_id, is_clean=container.exit_code == 0)
                elif container.stream is None:
                    container.connect()
            stale = [each for each in self.streams if self.containers[each.job_id].stream is not each]
            if self.requests:
                self.answer()
            elif self.outbox:
                self.send_next(next(iter(self.outbox)))
            elif stream := next((each for each in self.streams if each.to_manager), None):
                self.receive(stream)
            elif stale:
                self.close_stream(stale[0])
            elif stream := next((each for each in self.streams if each.to_keeper), None):
                self.containers[stream.job_id].receive()
            elif self.undelivered:
                self.deliver()
            elif all(each.exit_code is None for each in self.containers.values()):
                return
        raise AssertionError("the messages never end")

    def running(self) -> list[Container]:
        return [each for each in self.containers.values() if each.keeper.current is not None]

    def idle(self) -> list[str]:
        jobs = self.experiment.jobs.live.values()
        return [job.job_id for job in jobs if job.state is JobState.IDLE]

    def waiting_behind_others(self) -> list[str]:
        """The trials that wait in a container while another trial runs there. The manager may regard some of them as started."""
        return [
            trial_id
            for job in self.experiment.jobs.live.values()
            for trial_id in job.trial_ids
            if not self.spawned[trial_id] and self.containers[job.job_id].keeper.current is not None
        ]


def is_lost_start(trial: Trial, spawned: Counter[str]) -> bool:
    return trial.run.message == STOPPED_BEFORE_START and spawned[trial.trial_id] > 0


def final_states() -> list[TrialState]:
    return [state for state in TrialState if state.is_terminal]


def test_prefetched_trials_behind_a_long_trial_are_moved_to_idle_jobs() -> None:
    world = World(concurrency=4, max_trials=56)
    world.settle()
    for container in world.running():
        container.end_trial(0.01)
        world.settle()
    jobs = world.experiment.jobs.live.values()
    assert [len(job.prefetched_ids) for job in jobs] == [MAX_PREFETCH] * 4
    long, *others = world.running()
    while any(other.keeper.current is not None for other in others):
        # The jobs without the long trial run all queued trials before any message is delivered.
        for other in others:
            while other.keeper.current is not None:
                other.end_trial(0.01)
        world.settle()
        assert len(world.running()) == 4 or not world.waiting_behind_others()
    assert world.running() == [long]
    assert (len(world.spawned), set(world.spawned.values())) == (56, {1})


def test_an_undelivered_trial_is_revoked_and_then_runs_in_an_idle_job() -> None:
    world = World(concurrency=2, max_trials=40)
    world.settle()
    unlucky, other = world.running()
    for container in (unlucky, other):
        container.end_trial(0.5)
        world.settle()
    # The manager sends the next dispatch to `unlucky`, but the link breaks before the delivery.
    unlucky.end_trial(0.5)
    while not world.outbox.get(unlucky.job_id):
        if world.requests:
            world.answer()
        elif unlucky.stream is not None and unlucky.stream.to_manager:
            world.receive(unlucky.stream)
        else:
            world.deliver()
    world.send_next(unlucky.job_id)
    unlucky.lose_link()
    world.settle()
    job = world.experiment.jobs.live[unlucky.job_id]
    current = unlucky.keeper.current
    assert current is not None
    (undelivered_id,) = set(job.trial_ids) - {current.key.trial_id, *unlucky.keeper._queue}
    # The keeper starts the trials queued behind the undelivered trial. The first of them is long.
    while job.trial_id != undelivered_id:
        unlucky.end_trial(0.5)
        world.settle()
    while other.keeper.current is not None:
        other.end_trial(0.5)
        world.settle()
    assert world.spawned[undelivered_id] == 1
    assert (world.running(), world.waiting_behind_others()) == ([unlucky], [])


def test_a_prefetched_trial_is_revoked_after_a_manager_restart_if_the_running_trial_has_a_higher_number() -> (
    None
):
    """The store does not contain the order of dispatch. A reclaimed trial may be dispatched again, after a trial with a higher
    number.
    """
    earlier, later = Trial("t3", 3, {}, {}, 0.0, "env-0"), Trial("t9", 9, {}, {}, 0.0, "env-0")
    later.state, later.run.attempt, later.run.started_at_s = TrialState.RUNNING, 0, 1.0
    limits, state = Limits(2, 10, None), ExperimentState.NO_MORE_TRIAL
    experiment = ExperimentCore("exp", limits, MAXIMIZE, reuses_jobs=True, may_prefetch=True, state=state)
    experiment.restore([earlier, later])
    experiment.scheduler.restore([Job("env-0", ever_connected=True), Job("env-1", ever_connected=True)], [])
    assert experiment.jobs.live["env-0"].trial_ids == ("t9", "t3")
    for event in (
        manager.ManagerReady(),
        manager.KeeperConnected("env-0", supports_revoke=True),
        manager.KeeperConnected("env-1", supports_revoke=True),
    ):
        experiment.handle(event, 0.0)
    asked = experiment.handle(manager.KeeperIdle("env-1", TASK), 0.0)
    assert asked == [manager.RevokePrefetched(experiment.jobs.live["env-0"], earlier)]


class AnyExchange(RuleBasedStateMachine):
    """Under any order of delays and failures, no trial runs twice or is lost, and no trial waits while a job is idle."""

    @initialize(
        max_trials=st.integers(7, 20),
        max_trials_of_job=st.sampled_from([0, 0, 0, 4]),
        lasted_s=st.sampled_from([0.01, 0.5]),
    )
    def begin(self, max_trials: int, max_trials_of_job: int, lasted_s: float) -> None:
        """Let each job run a trial and hold prefetched trials. Then one job runs all of its prefetched trials."""
        self.world = World(max_trials=max_trials, max_trials_of_job=max_trials_of_job)
        self.faults: Counter[str] = Counter()
        self.world.settle()
        quick = self.world.running()[0]
        quick.end_trial(lasted_s)
        self.world.settle()
        while quick.keeper.current is not None:
            quick.end_trial(0.5)
        while quick.stream is not None and quick.stream.to_manager:
            self.world.receive(quick.stream)

    def count_fault(self, what: str) -> None:
        self.faults[what] += 1

    def pick(self, things: Iterable[object], number: int) -> object:
        known = list(things)
        return known[number % len(known)]

    @precondition(lambda self: self.world.requests)
    @rule(number=st.integers(0, 20))
    def the_tuner_suggests(self, number: int) -> None:
        self.world.answer(number % len(self.world.requests))

    @precondition(lambda self: self.world.outbox)
    @rule(number=st.integers(0, 20))
    def a_message_is_sent(self, number: int) -> None:
        self.world.send_next(self.pick(self.world.outbox, number))

    @precondition(lambda self: any(each.to_manager for each in self.world.streams))
    @rule(number=st.integers(0, 20))
    def the_manager_receives(self, number: int) -> None:
        self.world.receive(self.pick((each for each in self.world.streams if each.to_manager), number))

    def receiving(self) -> list[Container]:
        linked = [each for each in self.world.containers.values() if each.stream is not None]
        return [each for each in linked if each.exit_code is None and each.stream.to_keeper]

    @precondition(lambda self: self.receiving())
    @rule(number=st.integers(0, 20))
    def a_keeper_receives(self, number: int) -> None:
        self.pick(self.receiving(), number).receive()

    @precondition(lambda self: self.world.undelivered)
    @rule(number=st.integers(0, 20))
    def bytes_arrive(self, number: int) -> None:
        self.world.deliver(number % len(self.world.undelivered))

    @precondition(lambda self: self.world.running())
    @rule(number=st.integers(0, 20), lasted_s=st.sampled_from([0.01, 0.01, 0.5, 5.0, 90.0]))
    def a_trial_ends(self, number: int, lasted_s: float) -> None:
        self.pick(self.world.running(), number).end_trial(lasted_s)

    def linked(self) -> list[Container]:
        return [each for each in self.world.containers.values() if each.stream is not None]

    @precondition(lambda self: self.linked())
    @rule(number=st.integers(0, 20))
    def a_keeper_loses_its_link(self, number: int) -> None:
        self.pick(self.linked(), number).lose_link()

    @precondition(lambda self: len(self.linked()) < len(self.world.containers))
    @rule(number=st.integers(0, 20))
    def a_keeper_connects(self, number: int) -> None:
        close_stream = [each for each in self.world.containers.values() if each.stream is None]
        self.pick(close_stream, number).connect()

    def stale(self) -> list[Stream]:
        known = self.world.containers
        return [each for each in self.world.streams if known[each.job_id].stream is not each]

    @precondition(lambda self: self.stale())
    @rule(number=st.integers(0, 20))
    def the_manager_detects_a_lost_link(self, number: int) -> None:
        self.world.close_stream(self.pick(self.stale(), number))

    @precondition(lambda self: self.faults["stop"] < 3)
    @rule(number=st.integers(0, 20))
    def a_trial_is_stopped(self, number: int) -> None:
        self.count_fault("stop")
        trial_id = self.pick(self.world.experiment.trials, number)
        self.world.post(manager.TrialStopAsked(trial_id, ExitReason.STOPPED_BY_USER, 20.0))

    @precondition(lambda self: self.world.containers and self.faults["death"] < 2)
    @rule(number=st.integers(0, 20))
    def a_job_dies(self, number: int) -> None:
        self.count_fault("death")
        self.world.end_job(self.pick(self.world.containers, number), is_clean=False)

    @precondition(lambda self: any(each.exit_code is not None for each in self.world.containers.values()))
    @rule()
    def the_end_of_a_job_is_observed(self) -> None:
        gone = next(each for each in self.world.containers.values() if each.exit_code is not None)
        self.world.end_job(gone.job_id, is_clean=gone.exit_code == 0)

    @precondition(lambda self: self.faults["restart"] < 1)
    @rule()
    def another_manager_takes_over(self) -> None:
        self.count_fault("restart")
        self.world.restart()

    @rule()
    def time_passes(self) -> None:
        self.world.post(manager.TimePassed())

    @precondition(lambda self: self.faults["silence"] < 2)
    @rule()
    def all_messages_arrive(self) -> None:
        self.count_fault("silence")
        self.check_that_no_trial_waits_beside_an_idle_job()

    def check_that_no_trial_waits_beside_an_idle_job(self) -> None:
        self.world.settle()
        assert not (self.world.idle() and self.world.waiting_behind_others())

    @invariant()
    def a_trial_is_in_one_place(self) -> None:
        experiment = self.world.experiment
        places = list(experiment.jobs.queue)
        places += [trial_id for job in experiment.jobs.live.values() for trial_id in job.trial_ids]
        trials: Iterable[Trial] = experiment.trials.values()
        assert sorted(places) == sorted(each.trial_id for each in trials if not each.state.is_terminal)

    @invariant()
    def a_trial_that_ended_before_its_start_has_no_attempt(self) -> None:
        spawned = self.world.spawned
        assert not [each for each in self.world.experiment.trials.values() if is_lost_start(each, spawned)]

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for _ in range(100):
            self.check_that_no_trial_waits_beside_an_idle_job()
            for container in self.world.running():
                container.end_trial(5.0)
            if self.world.experiment.state.is_terminal:
                break
        assert self.world.experiment.state is ExperimentState.DONE
        assert all(count <= 1 for count in self.world.spawned.values())


TestAnyExchange = AnyExchange.TestCase
TestAnyExchange.settings = hypothesis_settings(stateful_step_count=60)
