"""The default direction of a search. If the experiment file sets no direction, NNI's default applies, with a warning."""

import dataclasses

import pytest

from nni_manager.config.algorithms import ASSESSORS, TUNERS
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.reader import read_experiment_file
from nni_manager.tuner.registry import make_assessment, make_tuner

V1 = """\
authorName: ada
experimentName: digits
trialConcurrency: 1
trainingServicePlatform: local
searchSpacePath: space.json
trial: {command: python3 train.py, codeDir: .}
"""
# These are the default directions of NNI. Source: the constructors of tuners, advisors and assessors in NNI v1.9 and v2.10.
OF_NNI = {
    "TPE": "minimize",
    "Anneal": "minimize",
    "Evolution": "maximize",
    "SMAC": "maximize",
    "GPTuner": "maximize",
    "MetisTuner": "maximize",
    "PBTTuner": "maximize",
    "Hyperband": "maximize",
    "BOHB": "maximize",
}


@pytest.fixture
def read(tmp_path):
    (tmp_path / "space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')

    def read_file(*sections):
        path = tmp_path / "config.yml"
        path.write_text(V1 + "".join(f"{each}\n" for each in sections))
        return read_experiment_file(path)

    return read_file


def stops(config, value):
    """True if the assessor stops a trial that reports this value, after three other trials have ended with 0.5."""
    assessment = make_assessment(config)
    for number in range(3):
        assert assessment.report(f"ended{number}", 0, [0.5])
        assessment.end(f"ended{number}", has_succeeded=True)
    return not assessment.report("new", 0, [value])


@pytest.mark.parametrize(("name", "mode"), OF_NNI.items())
def test_a_tuner_uses_the_default_direction_of_nni_with_a_warning(read, name, mode):
    section = "advisor: {builtinAdvisorName" if name in ("Hyperband", "BOHB") else "tuner: {builtinTunerName"
    config = read(f"{section}: {name}}}")
    assert config.tuner.optimize_mode == mode
    proposer = section.partition(":")[0]
    assert config.warnings == (
        f"{name} will {mode} the results, its default, because {proposer}.classArgs.optimize_mode is not set; "
        "write maximize or minimize there",
    )
    for written in ("maximize", "minimize"):
        config = read(f"{section}: {name}, classArgs: {{optimize_mode: {written}}}}}")
        assert (config.tuner.optimize_mode, config.warnings) == (written, ())


def test_the_table_of_directions_contains_every_nni_tuner_that_learns():
    assert {name for name, each in TUNERS.items() if each.origin == "NNI" and each.learns} == OF_NNI.keys()


def test_a_tuner_without_a_direction_gives_no_warning(read):
    config = read("tuner: {builtinTunerName: Random}")
    assert (config.tuner.optimize_mode, config.warnings) == ("maximize", ())


@pytest.mark.parametrize(
    ("assessor", "mode"),
    [
        ("Medianstop", "maximize"),
        ("Curvefitting, classArgs: {epoch_num: 9}", "maximize"),
        ("MedianPruner", "minimize"),
    ],
)
def test_an_assessor_with_another_direction_than_the_tuner_causes_a_warning(read, assessor, mode):
    tuner = "tuner: {builtinTunerName: TPE, classArgs: {optimize_mode: minimize}}"
    config = read(tuner, f"assessor: {{builtinAssessorName: {assessor}}}")
    name = assessor.partition(",")[0]
    conflict = (
        f"{name} will maximize the results and the tuner will minimize them, so the better trials will be stopped; "
        "write minimize as assessor.classArgs.optimize_mode",
    )
    assert config.assessor.optimize_mode == mode
    assert config.warnings == (() if mode == "minimize" else conflict)
    if name == "Medianstop":
        assert (stops(config, 0.0), stops(config, 1.0)) == (True, False)


def test_a_stored_experiment_keeps_its_optimisation_directions(read):
    """In an experiment of version 0.6, the tuner maximized by default, and the assessor used the direction of the tuner."""
    config = read("tuner: {builtinTunerName: TPE}", "assessor: {builtinAssessorName: Medianstop}")
    tuner = dataclasses.replace(config.tuner, optimize_mode="maximize")
    text = config.replace(tuner=tuner).to_json()
    assert '"optimize_mode": "maximize"}' in text
    text = text.replace(', "optimize_mode": "maximize"}', "}")
    stored = ExperimentSpec.from_json(text)
    assert (stored.tuner.optimize_mode, stored.assessor.optimize_mode) == ("maximize", None)
    assert make_tuner(stored)._sign == -1.0
    assert make_tuner(config)._sign == 1.0
    for mode, stopped in (("maximize", 0.0), ("minimize", 1.0)):
        tuner = dataclasses.replace(stored.tuner, optimize_mode=mode)
        assert stops(stored.replace(tuner=tuner), stopped)
        assert not stops(stored.replace(tuner=tuner), 1.0 - stopped)


def test_medianstop_and_curvefitting_are_the_only_assessors_with_a_default_direction():
    defaults = {name: each.args.model_fields["optimize_mode"].default for name, each in ASSESSORS.items()}
    assert {name for name, mode in defaults.items() if mode is not None} == {"Medianstop", "Curvefitting"}
