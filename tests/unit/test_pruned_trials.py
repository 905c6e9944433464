"""Whether and how early stops of trials reach the tuner, and the text that explains this to users."""

from dataclasses import replace

import pytest
from real_experiment import RealExperiment

from nni_manager.config.algorithms import ASSESSORS
from nni_manager.config.model import AssessorConfig, UserClass
from nni_manager.config.pruned_trials import lesson_of_early_stops, reports_pruned


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return RealExperiment(tmp_path_factory.mktemp("lesson"), "pass\n").config


def with_algorithms(config, tuner, assessor, *, has_intermediates=False):
    return config.replace(
        tuner=replace(config.tuner, name=tuner, include_intermediate_results=has_intermediates),
        assessor=AssessorConfig(assessor, {}),
    )


@pytest.mark.parametrize(
    ("tuner", "assessor", "has_intermediates", "is_reported", "lesson"),
    [
        (
            "TPE",
            "MedianPruner",
            False,
            True,
            "TPE learns from all intermediate results of trials that MedianPruner stops, as in Optuna",
        ),
        (
            "Auto",
            "MedianPruner",
            False,
            True,
            "Auto counts trials that MedianPruner stops as the worst ones",
        ),
        (
            "Anneal",
            "MedianPruner",
            False,
            True,
            "Anneal learns nothing from trials that MedianPruner stops; tuner.includeIntermediateResults changes that",
        ),
        (
            "TPE",
            "Medianstop",
            False,
            False,
            "TPE learns nothing from trials that Medianstop stops; tuner.includeIntermediateResults changes that",
        ),
        (
            "TPE",
            "MedianPruner",
            True,
            False,
            "TPE learns the last intermediate result of trials that MedianPruner stops",
        ),
    ],
)
def test_the_tuner_and_the_assessor_determine_what_the_tuner_receives_about_early_stops(
    config, tuner, assessor, has_intermediates, is_reported, lesson
):
    chosen = with_algorithms(config, tuner, assessor, has_intermediates=has_intermediates)
    assert (reports_pruned(chosen), lesson_of_early_stops(chosen)) == (is_reported, lesson)


def test_the_text_about_early_stops_is_empty_if_an_experiment_has_no_assessor(config):
    assert (reports_pruned(config), lesson_of_early_stops(config)) == (False, "")


def test_a_custom_assessor_with_the_name_of_a_pruner_is_not_treated_as_a_pruner(config):
    own = AssessorConfig("MedianPruner", {}, own=UserClass("mine.MedianPruner"))
    assert not reports_pruned(config.replace(assessor=own))


def test_only_assessors_with_names_ending_in_pruner_come_from_optuna():
    pruners = {name for name, each in ASSESSORS.items() if each.origin == "Optuna"}
    assert {"Medianstop", "Curvefitting"}.isdisjoint(pruners)
    assert all(name.endswith("Pruner") for name in pruners)
