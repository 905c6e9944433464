"""What a tuner hears of the trials of those before it."""

from dataclasses import replace

import pytest
from real_experiment import RealExperiment

from nni_manager.config.prior_results import PriorResult
from nni_manager.tuner.base import BaseTuner, Later, Observation, PastTrial, Suggestion
from nni_manager.tuner.tuner_session import TunerSession

UNBEARABLE = 666.0


class Listener(BaseTuner):
    """Proposes its own number, and remembers what it hears."""

    def __init__(self, config):
        self.revision = config.search_space_revision
        self.told, self.known, self.restored = [], [], []
        self.is_closed = False
        self.answers = []

    def ask(self, trial_key):
        return self.answers.pop() if self.answers else Suggestion({"x": trial_key}, {"own": self.revision})

    def tell(self, trial_key, value):
        self.told.append((trial_key, value))

    def import_results(self, results):
        if any(result.value == UNBEARABLE for result in results):
            raise ValueError("cannot learn from that")
        self.known += [(result.parameters["x"], result.value, result.metric) for result in results]
        return len(results)

    def restore(self, trials):
        self.restored = list(trials)

    def close(self):
        self.is_closed = True


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return RealExperiment(tmp_path_factory.mktemp("proposer"), "pass\n").config


@pytest.fixture
def tuners(config):
    """A proposer, and the tuners it has made so far."""
    made = []

    def make(config):
        made.append(Listener(config))
        return made[-1]

    return TunerSession(config, make), made


def result(value):
    return Observation(
        "aB3dE", value, None if value is None else f'{{"default": {value}}}', value is not None
    )


def test_without_a_change_the_tuner_hears_all_and_its_memos_are_its_own(tuners):
    proposer, (tuner,) = tuners
    assert proposer.ask(0) == Suggestion({"x": 0}, {"own": 0})
    proposer.tell_result(0, result(0.5))
    assert (tuner.told, tuner.known) == ([(0, 0.5)], [])


@pytest.mark.parametrize("answer", [None, Later.LATER])
def test_an_answer_without_parameters_is_passed_on(tuners, answer):
    proposer, (tuner,) = tuners
    tuner.answers = [answer]
    assert proposer.ask(0) is answer


def test_after_a_change_the_next_tuner_learns_of_each_trial_once_whenever_it_ends(tuners, config):
    proposer, made = tuners
    for key in range(4):
        proposer.ask(key)
    proposer.tell_result(0, result(0.0))
    # Trials 0 and 1 are over; of 1 it has still to hear.
    known = [PriorResult({"x": 0}, 0.0, "0.0"), PriorResult({"x": 1}, 0.1, "0.1")]
    proposer.change_space(replace(config, search_space_revision=1), known, over={0, 1})
    first, second = made
    assert first.is_closed
    for key in (1, 2):
        proposer.tell_result(key, result(key / 10))
    proposer.tell_result(3, result(None))
    assert second.known == [(0, 0.0, "0.0"), (1, 0.1, "0.1"), (2, 0.2, '{"default": 0.2}')]
    assert second.told == []
    assert proposer.ask(4).metadata == {"own": 1, "search space revision": 1}
    proposer.tell_result(4, result(0.4))
    assert second.told == [(4, 0.4)]
    proposer.close()
    assert second.is_closed


def test_the_next_managers_tuner_gets_its_own_trials_back_and_the_rest_as_known(config):
    now = replace(config, search_space_revision=1)
    proposer = TunerSession(now, Listener)
    of_before = PastTrial(0, {"x": 0}, {"own": 0}, 0.5, ended=True)
    failed = PastTrial(1, {"x": 1}, {"own": 0}, None, ended=True)
    running = PastTrial(2, {"x": 2}, {"own": 0}, None, ended=False)
    own = PastTrial(3, {"x": 3}, {"own": 1, "search space revision": 1}, 0.3, ended=True)
    proposer.restore([of_before, failed, running, own], [PriorResult({"x": 9}, 0.9, "0.9")])
    tuner = proposer._tuner
    assert tuner.restored == [replace(own, metadata={"own": 1})]
    assert tuner.known == [(0, 0.5, "0.5"), (9, 0.9, "0.9")]
    proposer.tell_result(2, result(0.2))
    assert tuner.known[2:] == [(2, 0.2, '{"default": 0.2}')]


def test_a_next_tuner_that_fails_over_what_is_known_is_closed_and_the_one_of_now_stays(tuners, config):
    proposer, made = tuners
    with pytest.raises(ValueError, match="cannot learn"):
        proposer.change_space(
            replace(config, search_space_revision=1), [PriorResult({"x": 1}, UNBEARABLE, "666")], ()
        )
    assert [tuner.is_closed for tuner in made] == [False, True]
    assert proposer.ask(7).metadata == {"own": 0}
