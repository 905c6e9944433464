"""The observations that a tuner receives after a change of the search space or a manager restart."""

from dataclasses import replace

import pytest
from real_experiment import RealExperiment

from nni_manager.config.prior_results import PriorResult
from nni_manager.tuner.base import BaseTuner, Later, Observation, PastTrial, Suggestion
from nni_manager.tuner.tuner_session import TunerSession

FATAL_VALUE = 666.0


class Recorder(BaseTuner):
    """A tuner that proposes the trial key as x, and records all calls."""

    def __init__(self, config):
        self.revision = config.search_space_revision
        self.results, self.known, self.restored = [], [], []
        self.is_closed = False
        self.answers = []

    def ask(self, trial_key):
        return self.answers.pop() if self.answers else Suggestion({"x": trial_key}, {"own": self.revision})

    def tell(self, trial_key, value):
        self.results.append((trial_key, value))

    def import_results(self, results):
        if any(result.value == FATAL_VALUE for result in results):
            raise ValueError("cannot learn from that")
        self.known += [(result.parameters["x"], result.value, result.metric) for result in results]
        return len(results)

    def restore(self, trials):
        self.restored = list(trials)

    def close(self):
        self.is_closed = True


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return RealExperiment(tmp_path_factory.mktemp("session"), "pass\n").config


@pytest.fixture
def tuners(config):
    """A tuner session, and the list of tuners that the session has created."""
    made = []

    def make(config):
        made.append(Recorder(config))
        return made[-1]

    return TunerSession(config, make), made


def result(value):
    return Observation(
        "aB3dE", value, None if value is None else f'{{"default": {value}}}', value is not None
    )


def test_a_tuner_receives_results_and_gets_its_metadata_back_unchanged(tuners):
    session, (tuner,) = tuners
    assert session.ask(0) == Suggestion({"x": 0}, {"own": 0})
    session.tell_result(0, result(0.5))
    assert (tuner.results, tuner.known) == ([(0, 0.5)], [])


@pytest.mark.parametrize("answer", [None, Later.LATER])
def test_the_tuner_session_forwards_an_answer_that_contains_no_parameters(tuners, answer):
    session, (tuner,) = tuners
    tuner.answers = [answer]
    assert session.ask(0) is answer


def test_a_new_tuner_receives_each_result_once_after_a_search_space_change(tuners, config):
    session, made = tuners
    for key in range(4):
        session.ask(key)
    session.tell_result(0, result(0.0))
    # Trials 0 and 1 have ended, and `known` has the result of trial 1. The loop below reports this result once more, and the new
    # tuner must not receive it twice.
    known = [PriorResult({"x": 0}, 0.0, "0.0"), PriorResult({"x": 1}, 0.1, "0.1")]
    session.change_space(config.replace(search_space_revision=1), known, over={0, 1})
    first, second = made
    assert first.is_closed
    for key in (1, 2):
        session.tell_result(key, result(key / 10))
    session.tell_result(3, result(None))
    assert second.known == [(0, 0.0, "0.0"), (1, 0.1, "0.1"), (2, 0.2, '{"default": 0.2}')]
    assert second.results == []
    assert session.ask(4).metadata == {"own": 1, "search space revision": 1}
    session.tell_result(4, result(0.4))
    assert second.results == [(4, 0.4)]
    session.close()
    assert second.is_closed


def test_a_restarted_tuner_restores_its_trials_and_imports_trials_of_earlier_spaces(config):
    now = config.replace(search_space_revision=1)
    session = TunerSession(now, Recorder)
    earlier = PastTrial(0, {"x": 0}, {"own": 0}, 0.5, ended=True)
    failed = PastTrial(1, {"x": 1}, {"own": 0}, None, ended=True)
    running = PastTrial(2, {"x": 2}, {"own": 0}, None, ended=False)
    own = PastTrial(3, {"x": 3}, {"own": 1, "search space revision": 1}, 0.3, ended=True)
    session.restore([earlier, failed, running, own], [PriorResult({"x": 9}, 0.9, "0.9")])
    tuner = session._tuner
    assert tuner.restored == [replace(own, metadata={"own": 1})]
    assert tuner.known == [(0, 0.5, "0.5"), (9, 0.9, "0.9")]
    session.tell_result(2, result(0.2))
    assert tuner.known[2:] == [(2, 0.2, '{"default": 0.2}')]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_tuner_determines_whether_results_are_imported_before_or_after_trials_are_restored(
    tuners, is_first
):
    session, (tuner, *_) = tuners
    order = []
    tuner.restores_imports_first = is_first
    tuner.import_results = lambda results: order.append("import")
    tuner.restore = lambda trials: order.append("restore")
    session.restore([PastTrial(0, {"x": 1}, {}, 0.5, ended=True)], [PriorResult({"x": 2}, 0.5, "0.5")])
    assert order == (["import", "restore"] if is_first else ["restore", "import"])


def test_a_new_tuner_is_closed_and_not_used_if_it_fails_to_import_results(tuners, config):
    session, made = tuners
    with pytest.raises(ValueError, match="cannot learn"):
        session.change_space(
            config.replace(search_space_revision=1), [PriorResult({"x": 1}, FATAL_VALUE, "666")], ()
        )
    assert [tuner.is_closed for tuner in made] == [False, True]
    assert session.ask(7).metadata == {"own": 0}
