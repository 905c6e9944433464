"""The contract of all assessors, and the specific behaviour of each."""

import math

import optuna
import pytest
import yaml
from built_in import names_in

from nni_manager.config.algorithms import ASSESSORS
from nni_manager.config.schema import example_of
from nni_manager.tuner.assessment import MAX_STEPS, Assessment, BaseAssessor, PastLearningCurve
from nni_manager.tuner.assessors.curvefitting import forecast

# These arguments are for learning curves of twenty steps. For required arguments that are not in this dict, the tests use the
# documented example values.
GIVEN = {
    "PercentilePruner": {"percentile": 50},
    "ThresholdPruner": {"lower": -0.75, "upper": 1.5},
}
GOOD = [0.8 + 0.005 * number for number in range(20)]
LEARN_FROM_SUCCESS = ("Medianstop", "Curvefitting", "MedianPruner", "PercentilePruner")


def make_of(name, optimize_mode="maximize", **class_args):
    schema = ASSESSORS[name].args
    required = {key: each for key, each in schema.model_fields.items() if each.is_required()}
    examples = {key: yaml.safe_load(example_of(each)) for key, each in required.items()}
    args = schema.model_validate({**examples, **GIVEN.get(name, {}), **class_args})
    return Assessment(ASSESSORS[name].make(optimize_mode, args))


def learning_curve(end):
    """Twenty steps of a curve that ends near `end`."""
    return [end * (1 - math.exp(-step / 4)) for step in range(1, 21)]


def refused_at(assessment, key, values, attempt=0):
    """The first step at which the assessor stops the trial; None if it never does. The assessor receives all steps."""
    answers = [assessment.report(key, attempt, (value,)) for value in values]
    return answers.index(False) + 1 if False in answers else None


def after_good_ones(assessment, sign=1, has_succeeded=True):
    """Report twenty trials. Returns their learning curves in the form that the store returns."""
    for key, end in enumerate(GOOD):
        refused_at(assessment, key, learning_curve(sign * end))
        assessment.end(key, has_succeeded=has_succeeded)
    return [
        PastLearningCurve(key, 0, learning_curve(sign * end), has_succeeded) for key, end in enumerate(GOOD)
    ]


@pytest.fixture(params=names_in(ASSESSORS))
def an_assessment(request):
    """A factory of assessments, for each assessor."""
    return lambda optimize_mode="maximize": make_of(request.param, optimize_mode)


# These pruners do not compare a trial with other trials. So the tests in which other trials are better leave them out.
LOOK_ELSEWHERE = ("NopPruner", "PatientPruner", "ThresholdPruner")


@pytest.mark.parametrize("name", names_in(ASSESSORS, lambda each: each.name not in LOOK_ELSEWHERE))
@pytest.mark.parametrize(("optimize_mode", "sign"), [("maximize", 1), ("minimize", -1)])
def test_a_bad_trial_is_stopped_early_and_the_best_trial_is_never_stopped(name, optimize_mode, sign):
    assessment = make_of(name, optimize_mode)
    after_good_ones(assessment, sign)
    assert refused_at(assessment, 20, learning_curve(sign * 0.1)) is not None
    assert refused_at(assessment, 21, learning_curve(sign * 1.0)) is None


def test_the_first_trial_is_never_stopped(an_assessment):
    assert refused_at(an_assessment(), 0, learning_curve(0.1)) is None


def test_a_restored_assessor_stops_a_trial_at_the_same_step_as_before(an_assessment):
    unbroken, rebuilt = an_assessment(), an_assessment()
    past = after_good_ones(unbroken)
    bad = learning_curve(0.1)
    unbroken.report(20, 0, bad[:1])
    rebuilt.restore([*past, PastLearningCurve(20, 0, bad[:1], None)])
    assert refused_at(rebuilt, 20, bad[1:]) == refused_at(unbroken, 20, bad[1:])


@pytest.mark.parametrize("name", names_in(ASSESSORS, lambda each: each.name not in LOOK_ELSEWHERE))
def test_a_new_attempt_of_a_trial_starts_a_new_learning_curve(name):
    assessment = make_of(name)
    after_good_ones(assessment)
    assert refused_at(assessment, 20, learning_curve(1.0)) is None
    assert refused_at(assessment, 20, learning_curve(0.1), attempt=1) is not None
    assert refused_at(assessment, 20, learning_curve(1.1), attempt=2) is None
    assessment.end(20, has_succeeded=True)


def test_assessors_accept_trials_without_results_and_with_extreme_results(an_assessment):
    assessment = an_assessment()
    for key, has_succeeded in enumerate((True, False)):
        assessment.end(key, has_succeeded=has_succeeded)
    for key in range(2, 9):
        assert refused_at(assessment, key, [1e300, -1e300] * 5) in (None, *range(1, 11))
        assessment.end(key, has_succeeded=True)


@pytest.mark.parametrize("name", LEARN_FROM_SUCCESS)
def test_assessors_do_not_compare_a_trial_with_failed_trials(name):
    assessment = make_of(name)
    after_good_ones(assessment, has_succeeded=False)
    assert refused_at(assessment, 20, learning_curve(0.1)) is None


def test_medianstop_uses_the_worse_of_two_middle_results_if_the_number_of_other_trials_is_even():
    for optimize_mode, passes, fails in (("maximize", 1.0, 0.9), ("minimize", 2.0, 2.1)):
        assessment = make_of("Medianstop", optimize_mode)
        for key, value in enumerate((1.0, 2.0)):
            assessment.report(key, 0, (value,))
            assessment.end(key, has_succeeded=True)
        assert assessment.report(2, 0, (passes,))
        assert not assessment.report(3, 0, (fails,))


def test_medianstop_compares_the_best_result_with_running_averages_of_other_trials():
    assessment = make_of("Medianstop")
    # The running averages of trial 0 after its two steps are 1 and 2.
    assessment.report(0, 0, (1.0, 3.0))
    assessment.end(0, has_succeeded=True)
    assert refused_at(assessment, 1, [2.0, 0.0, 0.0]) is None, "no other trial has reached the third step"
    assert refused_at(assessment, 2, [1.5, 1.9]) == 2


def test_no_assessor_stops_a_trial_before_the_configured_start_step():
    for name, first in (("Medianstop", 8), ("Curvefitting", 8)):
        assessment = make_of(name, start_step=8)
        after_good_ones(assessment)
        assert refused_at(assessment, 20, learning_curve(0.1)) == first


def test_curvefitting_with_gap_5_assesses_a_trial_only_after_every_fifth_step():
    assessment = make_of("Curvefitting", gap=5)
    after_good_ones(assessment)
    answers = [assessment.report(20, 0, (value,)) for value in learning_curve(0.1)]
    assert [step for step, answer in enumerate(answers, 1) if not answer] == [6, 11, 16]


@pytest.mark.parametrize("end", [0.9, -40.0, 1e300])
def test_curvefitting_forecasts_the_last_value_of_a_curve(end):
    assert forecast(learning_curve(end)[:10], 20) == pytest.approx(learning_curve(end)[-1], rel=0.1)
    assert forecast([end] * 5, 20) == pytest.approx(end)


def test_an_assessor_makes_one_decision_for_results_that_are_reported_together():
    assessment = make_of("Medianstop")
    after_good_ones(assessment)
    assert assessment.report(20, 0, (0.0, 0.0, 1.0))


class RecordingAssessor(BaseAssessor):
    """Stops every trial, and records the lengths of the learning curves."""

    def __init__(self):
        self.lengths = []

    def may_go_on(self, trial_key, learning_curve):
        self.lengths.append(len(learning_curve))
        return False

    def end(self, trial_key, learning_curve, *, has_succeeded):
        self.lengths.append(len(learning_curve))


def test_results_beyond_max_steps_are_not_assessed():
    assessor = RecordingAssessor()
    assessment = Assessment(assessor)
    assert not assessment.report(0, 0, [1.0] * (MAX_STEPS + 5))
    assert assessment.report(0, 0, [1.0])
    assessment.end(0, has_succeeded=True)
    assert assessor.lengths == [MAX_STEPS, MAX_STEPS]


def test_patient_pruner_stops_a_trial_without_improvement_if_the_wrapped_pruner_agrees():
    flat = [0.1, 0.2, 0.3, *[0.2] * 10]
    assert refused_at(make_of("PatientPruner"), 0, flat) == 7
    assert refused_at(make_of("PatientPruner", patience=5), 0, flat) == 9
    assert refused_at(make_of("PatientPruner", wrapped_pruner="MedianPruner"), 0, flat) is None
    assessment = make_of("PatientPruner", wrapped_pruner="MedianPruner")
    after_good_ones(assessment)
    assert refused_at(assessment, 20, flat) == 7


@pytest.mark.parametrize("name", ["MedianPruner", "PercentilePruner", "ThresholdPruner", "WilcoxonPruner"])
def test_a_pruner_without_rungs_is_called_only_for_the_newest_result_of_a_running_trial(name, monkeypatch):
    pruner, steps = getattr(optuna.pruners, name), []
    monkeypatch.setattr(pruner, "prune", lambda self, study, trial: steps.append(trial.last_step) or False)
    assessment = make_of(name)
    assessment.restore([PastLearningCurve("past", 0, [0.5, 0.75, 0.5], has_succeeded=True)])
    assessment.report("running", 0, [0.5, 0.75])
    assessment.end("running", has_succeeded=True)
    assert steps == [2]


def test_threshold_pruner_stops_a_trial_that_reports_a_value_outside_the_bounds():
    for values, step in (([0.0, 1.4, 1.6], 3), ([0.0, -0.8], 2), ([0.0, 1.0], None)):
        assert refused_at(make_of("ThresholdPruner"), 0, values) == step


@pytest.mark.parametrize("class_args", [{}, {"lower": 2.0, "upper": 1.0}])
def test_threshold_pruner_refuses_missing_or_reversed_bounds(class_args):
    with pytest.raises(ValueError, match="lower"):
        ASSESSORS["ThresholdPruner"].args.model_validate(class_args)


def test_nop_pruner_never_stops_a_trial():
    assessment = make_of("NopPruner")
    after_good_ones(assessment)
    assert refused_at(assessment, 20, learning_curve(-5.0)) is None
