"""How the engine speaks with the tuner and the assessor."""

import asyncio
import threading
import time

import pytest
from real_experiment import RealExperiment

from nni_manager.domain.events import (
    AskAssessor,
    EarlyStopRequested,
    ParametersSuggested,
    TellAssessor,
    TunerFailed,
    TunerNotReady,
)
from nni_manager.engine import tuner_executor as algorithms_module
from nni_manager.engine.tuner_executor import TunerExecutor
from nni_manager.tuner.assessment import MAX_STEPS, Assessment, BaseAssessor
from nni_manager.tuner.base import BaseTuner, Later, Observation, Suggestion
from nni_manager.tuner.registry import make_tuner


class Slow(BaseAssessor):
    """Takes its time, and refuses a trial that has reported 5."""

    def __init__(self):
        self.may_answer = threading.Event()
        self.heard = []

    def may_go_on(self, trial_id, course):
        assert self.may_answer.wait(60)
        self.heard.append((trial_id, list(course)))
        return 5.0 not in course

    def end(self, trial_id, course, *, has_succeeded):
        self.heard.append((trial_id, "end"))


def test_what_is_reported_while_the_assessor_is_busy_is_heard_together_before_the_end(tmp_path):
    slow, posted = Slow(), []

    async def scenario():
        config = RealExperiment(tmp_path, "pass\n").config
        algorithms = TunerExecutor(
            "exp", config, make_tuner, Assessment(slow), posted.append, lambda: "aB3dE"
        )
        words = [algorithms.assess(AskAssessor("t0", 0, (float(number),))) for number in range(8)]
        words.append(algorithms.assess(AskAssessor("t1", 0, (1.0,))))
        words += [algorithms.assess(AskAssessor("t0", 1, (0.0,) * 600)) for _ in range(2 * MAX_STEPS // 600)]
        words.append(algorithms.tell_assessor(TellAssessor("t0", True)))
        tasks = [asyncio.ensure_future(word) for word in words]
        await asyncio.sleep(0)
        slow.may_answer.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 60)
        algorithms.close()

    asyncio.run(scenario())
    assert [trial_id for trial_id, _ in slow.heard] == ["t0", "t0", "t1", "t0", "t0", "t0"]
    (_, first), (_, rest), _, ended, (_, anew), last = slow.heard
    assert (first, rest) == ([0.0], [float(number) for number in range(8)])
    assert (ended, last) == (("t0", "end"), ("t0", "end")), "an attempt that failed, and the trial"
    assert anew == [0.0] * MAX_STEPS
    assert [(event.trial_id, event.attempt) for event in posted if isinstance(event, EarlyStopRequested)] == [
        ("t0", 0)
    ]


# Numbers of trials of which the tuner below makes something special.
WAITS, RAISES = 98, 99


class Noting(BaseTuner):
    """Records for each call whether it is on the main thread. Can answer slowly or wait."""

    def __init__(self, learns=False):
        self.learns = learns
        self.asked_in = []
        self.is_slow = False
        self.under_way = threading.Lock()
        self.may_answer = threading.Event()

    def ask(self, trial_key):
        assert self.under_way.acquire(blocking=False), "two at once"
        self.asked_in.append(threading.current_thread() is threading.main_thread())
        if self.is_slow:
            time.sleep(1.5 * algorithms_module._MOMENT_S)
        if trial_key == WAITS:
            assert self.may_answer.wait(60)
        self.under_way.release()
        if trial_key == RAISES:
            raise ValueError("not this one")
        return Suggestion({"x": trial_key}, {})

    def tell(self, trial_key, value):
        self.asked_in.append(threading.current_thread() is threading.main_thread())

    def restore(self, trials):
        pass


def asked(tmp_path, tuner, play):
    """What was posted while `play` used these algorithms."""
    posted = []

    async def scenario():
        config = RealExperiment(tmp_path, "pass\n").config
        algorithms = TunerExecutor("exp", config, lambda _: tuner, None, posted.append, lambda: "aB3dE")
        await play(algorithms)
        algorithms.close()

    asyncio.run(scenario())
    return posted


@pytest.fixture
def patient(monkeypatch):
    """A moment that no machine is too busy for."""
    monkeypatch.setattr(algorithms_module, "_MOMENT_S", 0.2)


def test_a_tuner_that_does_not_learn_and_is_quick_needs_no_thread(tmp_path, patient):
    tuner = Noting()

    async def play(algorithms):
        for number in range(5):
            await algorithms.ask(number)
        await algorithms.tell(0, Observation("aB3dE", 1.0, "1.0", True))
        await algorithms.ask(RAISES)

    *suggested, failed = asked(tmp_path, tuner, play)
    assert tuner.asked_in == [False] * 3 + [True] * 4
    assert [each.parameters for each in suggested] == [{"x": number} for number in range(5)]
    assert all(isinstance(each, ParametersSuggested) for each in suggested)
    assert isinstance(failed, TunerFailed)
    assert "not this one" in failed.message


def test_a_tuner_that_becomes_slow_has_its_thread_again(tmp_path, patient):
    tuner = Noting()

    async def play(algorithms):
        for number in range(10):
            tuner.is_slow = number == 4
            await algorithms.ask(number)

    asked(tmp_path, tuner, play)
    assert tuner.asked_in == [False] * 3 + [True] * 2 + [False] * 3 + [True] * 2


def test_a_tuner_is_never_asked_here_while_its_thread_asks_it(tmp_path, patient):
    tuner = Noting()

    async def play(algorithms):
        asking = [asyncio.ensure_future(algorithms.ask(number)) for number in (0, 1, 2, WAITS)]
        await asyncio.gather(*asking[:3])
        asking.append(asyncio.ensure_future(algorithms.ask(4)))
        await asyncio.sleep(0)
        tuner.may_answer.set()
        await asyncio.gather(*asking)

    posted = asked(tmp_path, tuner, play)
    assert [each.parameters["x"] for each in posted] == [0, 1, 2, WAITS, 4]


def test_a_tuner_that_learns_has_a_thread_however_quick_it_is(tmp_path, patient):
    tuner = Noting(learns=True)

    async def play(algorithms):
        for number in range(8):
            await algorithms.ask(number)

    asked(tmp_path, tuner, play)
    assert tuner.asked_in == [False] * 8


def test_a_tuner_that_only_hears_quickly_keeps_its_thread(tmp_path, patient):
    tuner = Noting()
    tuner.is_slow = True

    async def play(algorithms):
        for number in range(3):
            await algorithms.ask(number)
            for _ in range(4):
                await algorithms.tell(number, Observation("aB3dE", 1.0, "1.0", True))

    asked(tmp_path, tuner, play)
    assert tuner.asked_in == [False] * 15


def test_a_tuner_that_was_taught_has_to_show_anew_that_it_is_quick(tmp_path, patient):
    tuner = Noting()

    async def play(algorithms):
        for number in range(4):
            await algorithms.ask(number)
        await algorithms.teach([])
        for number in range(4, 8):
            await algorithms.ask(number)

    asked(tmp_path, tuner, play)
    assert tuner.asked_in == ([False] * 3 + [True]) * 2


def test_what_a_tuner_was_asked_before_it_was_taught_says_nothing_of_it_after(tmp_path, patient):
    tuner = Noting()

    async def play(algorithms):
        asking = [asyncio.ensure_future(algorithms.ask(number)) for number in range(4)]
        await asyncio.sleep(0)  # all are in the thread
        await algorithms.teach([])
        await asyncio.gather(*asking)
        await algorithms.ask(4)

    asked(tmp_path, tuner, play)
    assert tuner.asked_in == [False] * 5


def test_a_question_that_was_given_up_keeps_the_thread_until_it_is_answered(tmp_path, patient):
    tuner = Noting()

    async def play(algorithms):
        waiting = [asyncio.ensure_future(algorithms.ask(number)) for number in (0, 1, 2, WAITS)]
        await asyncio.gather(*waiting[:3])
        waiting[3].cancel()
        following = asyncio.ensure_future(algorithms.ask(4))
        await asyncio.sleep(0)
        tuner.may_answer.set()
        await following

    posted = asked(tmp_path, tuner, play)
    assert [each.parameters["x"] for each in posted] == [0, 1, 2, 4]


def test_a_turn_of_the_loop_has_its_own_moment(tmp_path, patient):
    tuner = Noting()

    async def play(algorithms):
        for number in range(3):
            await algorithms.ask(number)
        algorithms._took_here_s = 1.0
        await algorithms.ask(3)
        algorithms._begin_turn()
        await algorithms.ask(4)

    asked(tmp_path, tuner, play)
    assert tuner.asked_in == [False] * 4 + [True]


class Pausing(Noting):
    """Has no parameters for now."""

    def ask(self, trial_key):
        return Later.LATER


def test_a_tuner_that_has_no_parameters_for_now_is_not_exhausted(tmp_path):
    async def play(algorithms):
        await algorithms.ask(7)

    assert asked(tmp_path, Pausing(), play) == [TunerNotReady(7)]
