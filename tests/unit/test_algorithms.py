"""How the engine speaks with the tuner and the assessor."""

import asyncio
import threading

from real_experiment import RealExperiment

from nni_manager.domain.events import AskAssessor, TellAssessor, TrialRefused
from nni_manager.engine.algorithms import Algorithms
from nni_manager.tuner.assessment import MOST_STEPS, Assessment, Assessor
from nni_manager.tuner.registry import make_tuner


class Slow(Assessor):
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
        algorithms = Algorithms("exp", config, make_tuner, Assessment(slow), posted.append, lambda: "aB3dE")
        words = [algorithms.assess(AskAssessor("t0", 0, (float(number),))) for number in range(8)]
        words.append(algorithms.assess(AskAssessor("t1", 0, (1.0,))))
        words += [algorithms.assess(AskAssessor("t0", 1, (0.0,) * 600)) for _ in range(2 * MOST_STEPS // 600)]
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
    assert anew == [0.0] * MOST_STEPS
    assert [(event.trial_id, event.attempt) for event in posted if isinstance(event, TrialRefused)] == [
        ("t0", 0)
    ]
