"""Calls of the tuner and the assessor: threads, order and batches."""

import asyncio
import threading
import time

import pytest
from deadlines import DEADLINE_S
from real_experiment import RealExperiment, wait_until

from nni_manager.domain.events import (
    AskAssessor,
    EarlyStopRequested,
    ParametersSuggested,
    SearchSpaceChanged,
    TellAssessor,
    TunerExhausted,
    TunerFailed,
    TunerNotReady,
)
from nni_manager.engine import tuner_executor as algorithms_module
from nni_manager.engine.tuner_executor import TunerExecutor
from nni_manager.errors import UserError
from nni_manager.tuner.assessment import MAX_STEPS, Assessment, BaseAssessor, PastLearningCurve
from nni_manager.tuner.base import BaseTuner, Later, Observation, Suggestion
from nni_manager.tuner.registry import make_tuner


class Slow(BaseAssessor):
    """An assessor that blocks until `may_answer` is set. It stops a trial that has reported 5."""

    def __init__(self):
        self.may_answer = threading.Event()
        self.received = []

    def may_go_on(self, trial_id, course):
        assert self.may_answer.wait(DEADLINE_S)
        self.received.append((trial_id, list(course)))
        return 5.0 not in course

    def end(self, trial_id, course, *, has_succeeded):
        self.received.append((trial_id, "end"))


def test_results_that_arrive_while_the_assessor_is_busy_are_assessed_in_batches(tmp_path):
    slow, posted = Slow(), []

    async def scenario():
        config = RealExperiment(tmp_path, "pass\n").config
        algorithms = TunerExecutor(
            "exp", config, make_tuner, Assessment(slow), posted.append, lambda: "aB3dE"
        )
        calls = [algorithms.assess(AskAssessor("t0", 0, 0, (float(number),))) for number in range(8)]
        calls.append(algorithms.assess(AskAssessor("t1", 1, 0, (1.0,))))
        calls += [
            algorithms.assess(AskAssessor("t0", 0, 1, (0.0,) * 600)) for _ in range(2 * MAX_STEPS // 600)
        ]
        calls.append(algorithms.tell_assessor(TellAssessor("t0", True)))
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.sleep(0)
        slow.may_answer.set()
        await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)
        algorithms.close()

    asyncio.run(scenario())
    assert [trial_id for trial_id, _ in slow.received] == ["t0", "t0", "t1", "t0", "t0", "t0"]
    (_, first), (_, rest), _, ended, (_, second_attempt), last = slow.received
    assert (first, rest) == ([0.0], [float(number) for number in range(8)])
    assert (ended, last) == (("t0", "end"), ("t0", "end")), "an attempt that failed, and the trial"
    assert second_attempt == [0.0] * MAX_STEPS
    assert [(event.trial_id, event.attempt) for event in posted if isinstance(event, EarlyStopRequested)] == [
        ("t0", 0)
    ]


# The tuner blocks for trial WAITS and raises for trial RAISES.
WAITS, RAISES = 98, 99


class Noting(BaseTuner):
    """A tuner that records for each call whether the call is on the main thread. The tuner can be slow or block."""

    def __init__(self, learns=False):
        self.learns = learns
        self.on_main_thread = []
        self.is_slow = False
        self.in_progress = threading.Lock()
        self.may_answer = threading.Event()

    def ask(self, trial_key):
        assert self.in_progress.acquire(blocking=False), "two calls at once"
        self.on_main_thread.append(threading.current_thread() is threading.main_thread())
        if self.is_slow:
            time.sleep(1.5 * algorithms_module._MOMENT_S)
        if trial_key == WAITS:
            assert self.may_answer.wait(DEADLINE_S)
        self.in_progress.release()
        if trial_key == RAISES:
            raise ValueError("not this one")
        return Suggestion({"x": trial_key}, {})

    def tell(self, trial_key, value):
        self.on_main_thread.append(threading.current_thread() is threading.main_thread())

    def restore(self, trials):
        pass


def posted_events(tmp_path, tuner, scenario):
    """The events that the executor posted during `scenario`."""
    posted = []

    async def run():
        config = RealExperiment(tmp_path, "pass\n").config
        algorithms = TunerExecutor("exp", config, lambda _: tuner, None, posted.append, lambda: "aB3dE")
        await scenario(algorithms)
        algorithms.close()

    asyncio.run(run())
    return posted


@pytest.fixture
def generous_limit(monkeypatch):
    """A time limit for fast calls that is long enough even on a busy machine."""
    monkeypatch.setattr(algorithms_module, "_MOMENT_S", 0.2)


def test_a_tuner_is_called_on_the_main_thread_if_it_is_fast_and_does_not_learn(tmp_path, generous_limit):
    tuner = Noting()

    async def scenario(algorithms):
        for number in range(5):
            await algorithms.ask(number)
        await algorithms.tell(0, Observation("aB3dE", 1.0, "1.0", True))
        await algorithms.ask(RAISES)

    *suggested, failed = posted_events(tmp_path, tuner, scenario)
    assert tuner.on_main_thread == [False] * 3 + [True] * 4
    assert [each.parameters for each in suggested] == [{"x": number} for number in range(5)]
    assert all(isinstance(each, ParametersSuggested) for each in suggested)
    assert isinstance(failed, TunerFailed)
    assert "not this one" in failed.message


@pytest.mark.slow
def test_calls_of_a_tuner_return_to_the_tuner_thread_when_the_tuner_becomes_slow(tmp_path, generous_limit):
    tuner = Noting()

    async def scenario(algorithms):
        for number in range(10):
            tuner.is_slow = number == 4
            await algorithms.ask(number)

    posted_events(tmp_path, tuner, scenario)
    assert tuner.on_main_thread == [False] * 3 + [True] * 2 + [False] * 3 + [True] * 2


def test_a_tuner_is_never_called_on_two_threads_simultaneously(tmp_path, generous_limit):
    tuner = Noting()

    async def scenario(algorithms):
        asking = [asyncio.ensure_future(algorithms.ask(number)) for number in (0, 1, 2, WAITS)]
        await asyncio.gather(*asking[:3])
        asking.append(asyncio.ensure_future(algorithms.ask(4)))
        await asyncio.sleep(0)
        tuner.may_answer.set()
        await asyncio.gather(*asking)

    posted = posted_events(tmp_path, tuner, scenario)
    assert [each.parameters["x"] for each in posted] == [0, 1, 2, WAITS, 4]


def test_a_learning_tuner_is_always_called_on_the_tuner_thread(tmp_path, generous_limit):
    tuner = Noting(learns=True)

    async def scenario(algorithms):
        for number in range(8):
            await algorithms.ask(number)

    posted_events(tmp_path, tuner, scenario)
    assert tuner.on_main_thread == [False] * 8


@pytest.mark.slow
def test_a_tuner_with_slow_requests_is_always_called_on_the_tuner_thread(tmp_path, generous_limit):
    tuner = Noting()
    tuner.is_slow = True

    async def scenario(algorithms):
        for number in range(3):
            await algorithms.ask(number)
            for _ in range(4):
                await algorithms.tell(number, Observation("aB3dE", 1.0, "1.0", True))

    posted_events(tmp_path, tuner, scenario)
    assert tuner.on_main_thread == [False] * 15


def test_the_speed_of_a_tuner_is_measured_again_after_an_import_of_results(tmp_path, generous_limit):
    tuner = Noting()

    async def scenario(algorithms):
        for number in range(4):
            await algorithms.ask(number)
        await algorithms.teach([])
        for number in range(4, 8):
            await algorithms.ask(number)

    posted_events(tmp_path, tuner, scenario)
    assert tuner.on_main_thread == ([False] * 3 + [True]) * 2


def test_requests_that_waited_for_an_import_do_not_count_as_fast_tuner_calls(tmp_path, generous_limit):
    tuner = Noting()

    async def scenario(algorithms):
        asking = [asyncio.ensure_future(algorithms.ask(number)) for number in range(4)]
        await asyncio.sleep(0)  # All requests are now in the queue of the thread.
        await algorithms.teach([])
        await asyncio.gather(*asking)
        await algorithms.ask(4)

    posted_events(tmp_path, tuner, scenario)
    assert tuner.on_main_thread == [False] * 5


def test_a_cancelled_request_delays_the_next_request_until_the_tuner_returns(tmp_path, generous_limit):
    tuner = Noting()

    async def scenario(algorithms):
        waiting = [asyncio.ensure_future(algorithms.ask(number)) for number in (0, 1, 2, WAITS)]
        await asyncio.gather(*waiting[:3])
        waiting[3].cancel()
        following = asyncio.ensure_future(algorithms.ask(4))
        await asyncio.sleep(0)
        tuner.may_answer.set()
        await following

    posted = posted_events(tmp_path, tuner, scenario)
    assert [each.parameters["x"] for each in posted] == [0, 1, 2, 4]


def test_a_cancelled_request_in_the_queue_delays_the_next_request_until_the_tuner_returns(
    tmp_path, generous_limit
):
    tuner = Noting()

    async def scenario(algorithms):
        asking = [asyncio.ensure_future(algorithms.ask(number)) for number in (0, 1, 2, WAITS)]
        await asyncio.gather(*asking[:3])
        cancelled = asyncio.ensure_future(algorithms.ask(4))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        asking.append(asyncio.ensure_future(algorithms.ask(5)))
        await asyncio.sleep(0)
        tuner.may_answer.set()
        await asyncio.gather(*asking)

    posted = posted_events(tmp_path, tuner, scenario)
    assert [each.parameters["x"] for each in posted] == [0, 1, 2, WAITS, 5]


def test_every_event_loop_iteration_has_its_own_time_limit_for_tuner_calls(tmp_path, generous_limit):
    tuner = Noting()

    async def scenario(algorithms):
        for number in range(3):
            await algorithms.ask(number)
        algorithms._took_here_s = 1.0
        await algorithms.ask(3)
        algorithms._begin_turn()
        await algorithms.ask(4)

    posted_events(tmp_path, tuner, scenario)
    assert tuner.on_main_thread == [False] * 4 + [True]


class Unrestorable(Noting):
    """A tuner whose code raises an exception when its state is restored."""

    def restore(self, trials):
        raise UserError("cannot use the state of another version; start a new experiment")


def test_a_failed_restore_of_the_tuner_is_reported_at_the_next_request_to_the_tuner(tmp_path):
    async def play(algorithms):
        await algorithms.restore([], [], list)
        await algorithms.ask(0)

    (failed,) = posted_events(tmp_path, Unrestorable(), play)
    assert isinstance(failed, TunerFailed)
    assert failed.was_asked
    assert "cannot use the state of another version; start a new experiment" in failed.message


def test_a_tuner_that_could_not_be_restored_uses_no_imported_result(tmp_path):
    used = []

    async def play(algorithms):
        await algorithms.restore([], [], list)
        used.append(await algorithms.teach([]))

    assert posted_events(tmp_path, Unrestorable(), play) == []
    assert used == [0]


class Pausing(Noting):
    """A tuner that has no parameters at the moment."""

    def ask(self, trial_key):
        return Later.LATER


def test_a_tuner_that_has_no_parameters_yet_is_reported_as_not_ready(tmp_path):
    async def play(algorithms):
        await algorithms.ask(7)

    assert posted_events(tmp_path, Pausing(), play) == [TunerNotReady(7)]


class Unusable(BaseAssessor):
    """An assessor whose code fails at each call. At first, it cannot restore its state."""

    def __init__(self):
        self.received = []

    def may_go_on(self, trial_id, course):
        self.received.append(trial_id)
        return True

    def end(self, trial_id, course, *, has_succeeded):
        raise UserError("cannot use the learning curve of another version")


def test_a_failed_restore_of_the_assessor_is_reported_at_its_next_call_and_the_assessor_gets_no_result(
    tmp_path,
):
    assessor, posted = Unusable(), []

    async def scenario():
        config = RealExperiment(tmp_path, "pass\n").config
        algorithms = TunerExecutor(
            "exp", config, lambda _: Noting(), Assessment(assessor), posted.append, lambda: "aB3dE"
        )
        await algorithms.restore([], [], lambda: [PastLearningCurve("t0", 0, [1.0], True)])
        assert posted == []
        await algorithms.ask(0)
        await algorithms.assess(AskAssessor("t1", 1, 0, (1.0,)))
        algorithms.close()

    asyncio.run(scenario())
    suggested, failed = posted
    assert isinstance(suggested, ParametersSuggested)
    assert isinstance(failed, TunerFailed)
    assert "the assessor" in failed.message
    assert "cannot use the learning curve of another version" in failed.message
    assert assessor.received == []


class Advising(Noting):
    """An advisor that stops each trial that reports 5."""

    def __init__(self):
        super().__init__()
        self.stops = []

    def report(self, trial_key, trial_id, values):
        self.stops += [trial_id] * (5.0 in values)

    def take_stops(self):
        stops, self.stops = self.stops, []
        return stops


def test_an_advisor_receives_the_results_of_running_trials_and_stops_some_of_them(tmp_path):
    async def play(algorithms):
        await algorithms.ask(0)
        for value in (1.0, 5.0):
            await algorithms.assess(AskAssessor("t0", 0, 0, (value,)))

    _, *stops = posted_events(tmp_path, Advising(), play)
    assert [(event.trial_id, event.attempt) for event in stops] == [("t0", None)]


class NoOtherSpace(Noting):
    """A tuner that cannot use a changed search space."""

    def import_results(self, results):
        raise UserError("cannot use the new search space")


def test_the_failure_of_a_tuner_at_a_search_space_change_is_reported_and_the_change_fails(tmp_path):
    done = []

    async def play(algorithms):
        config = RealExperiment(tmp_path / "changed", "pass\n").config
        done.append(await algorithms.change_space(config, [], []))

    (failed,) = posted_events(tmp_path, NoOtherSpace(), play)
    assert isinstance(failed, TunerFailed)
    assert not failed.was_asked
    assert "cannot use the new search space" in failed.message
    assert done == [False]


class Exhausted(Noting):
    """A tuner without further parameters. It accepts any search space."""

    def ask(self, trial_key):
        return None

    def import_results(self, results):
        return 0


def test_the_tuner_executor_reports_an_exhausted_tuner_and_a_changed_search_space(tmp_path):
    done = []

    async def play(algorithms):
        await algorithms.ask(0)
        config = RealExperiment(tmp_path / "changed", "pass\n").config
        done.append(await algorithms.change_space(config, [], []))

    assert posted_events(tmp_path, Exhausted(), play) == [TunerExhausted(0), SearchSpaceChanged()]
    assert done == [True]


def test_close_ends_the_tuner_and_the_assessor_and_their_threads_without_waiting_for_a_running_call(tmp_path):
    tuner, assessor, closed = Noting(learns=True), Slow(), []
    tuner.close, assessor.close = lambda: closed.append("tuner"), lambda: closed.append("assessor")

    async def scenario():
        config = RealExperiment(tmp_path, "pass\n").config
        algorithms = TunerExecutor(
            "exp", config, lambda _: tuner, Assessment(assessor), lambda event: None, lambda: "aB3dE"
        )
        calls = [algorithms.ask(WAITS), algorithms.ask(0), algorithms.assess(AskAssessor("t0", 0, 0, (1.0,)))]
        tasks = [asyncio.ensure_future(call) for call in calls]
        while not tuner.on_main_thread:
            await asyncio.sleep(0.001)
        algorithms.close()
        assert closed == ["tuner", "assessor"]
        tuner.may_answer.set()
        assessor.may_answer.set()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    before = threading.active_count()
    asyncio.run(asyncio.wait_for(scenario(), DEADLINE_S))
    wait_until(lambda: threading.active_count() <= before, "the threads of both have ended")
    assert len(tuner.on_main_thread) == 1
