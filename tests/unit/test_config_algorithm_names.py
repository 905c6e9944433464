"""Names and arguments of NNI 2.10's algorithms: upper and lower case, NNI's short names, the tuner GP, and the argument
`tpe_args`.
"""

import json

import pytest

from nni_manager.config.algorithm import Need
from nni_manager.config.algorithms import ASSESSORS, TUNERS
from nni_manager.config.changes import changed
from nni_manager.config.diagnostics import ConfigInvalid
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.prior_results import results_of
from nni_manager.config.reader import read_experiment_file
from nni_manager.config.registered_algorithms import RegisteredAlgorithm, register
from nni_manager.tuner.registry import make_tuner
from nni_manager.tuner.samplers import SamplerSeeds

FILE = """\
experimentName: digits
trialConcurrency: 1
searchSpaceFile: space.json
trialCommand: python3 train.py
trialCodeDirectory: .
trainingService: {platform: local}
"""
CHOSEN = "classArgs: {optimize_mode: minimize"
# The short names that NNI accepts, with the names of the tuners. Source: NNI v2.10, builtin_algorithms.yml.
SHORTER = {"Batch": "BatchTuner", "Metis": "MetisTuner", "PBT": "PBTTuner"}


@pytest.fixture
def read(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("NNI_CONFIG_DIR", raising=False)
    (tmp_path / "space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')

    def read_file(*sections, file=FILE):
        path = tmp_path / "config.yml"
        path.write_text(file + "".join(f"{each}\n" for each in sections))
        return read_experiment_file(path)

    return read_file


@pytest.mark.parametrize("name", [name for name in TUNERS if name not in ("BatchTuner", "GridSearch", "GP")])
def test_tuner_names_are_accepted_in_lower_case_and_upper_case(read, monkeypatch, name):
    monkeypatch.setattr(Need, "is_met", True)
    for written in (name, name.lower(), name.upper()):
        config = read(f"tuner: {{name: {written}, {CHOSEN}}}}}")
        assert (config.tuner.name, config.warnings) == (name, ())


@pytest.mark.parametrize(("name", "ours"), SHORTER.items())
def test_the_short_tuner_names_of_nni_2_10_are_accepted(read, tmp_path, name, ours):
    space = '{"combine_params": {"_type": "choice", "_value": [{"x": 1}]}}'
    (tmp_path / "space.json").write_text(
        space if name == "Batch" else '{"x": {"_type": "uniform", "_value": [0, 1]}}'
    )
    for written in (name, name.lower()):
        assert read(f"tuner: {{name: {written}, {CHOSEN}}}}}").tuner.name == ours


def test_advisor_and_assessor_names_are_accepted_in_lower_case_and_upper_case(read):
    for written, name in (("hyperband", "Hyperband"), ("bohb", "BOHB")):
        assert read(f"advisor: {{name: {written}, {CHOSEN}}}}}").tuner.name == name
    for name, declared in ASSESSORS.items():
        needs_arguments = name == "ThresholdPruner" or any(
            each.is_required() for each in declared.args.model_fields.values()
        )
        if not needs_arguments and (declared.need is None or declared.need.is_met):
            tuner = "tuner: {name: Random}"
            assert read(tuner, f"assessor: {{name: {name.lower()}}}").assessor.name == name


def test_the_tuner_name_gp_selects_the_gp_tuner_that_supports_the_given_arguments(read, monkeypatch):
    monkeypatch.setattr(Need, "is_met", True)
    for written in ("GP", "gp"):
        for arguments in (
            "utility: ucb, kappa: 5",
            "nu: 2.5",
            "cold_start_num: 5",
            "selection_num_warm_up: 100",
        ):
            assert read(f"tuner: {{name: {written}, {CHOSEN}, {arguments}}}}}").tuner.name == "GPTuner"
        for arguments in ("n_startup_trials: 5", "deterministic_objective: true", "seed: 1"):
            assert read(f"tuner: {{name: {written}, {CHOSEN}, {arguments}}}}}").tuner.name == "GP"
    assert read("tuner: {name: GP}").tuner.name == "GP"


@pytest.mark.parametrize("name", ["DNGO", "dngotuner", "PPO", "NetworkMorphism", "RegularizedEvolutionTuner"])
def test_the_error_for_an_unsupported_tuner_suggests_a_supported_tuner(read, name):
    with pytest.raises(ConfigInvalid, match=f"{name} is not supported; use Auto or Evolution"):
        read(f"tuner: {{name: {name}}}")


def test_a_registered_algorithm_takes_precedence_over_a_built_in_algorithm_of_the_same_name(read, tmp_path):
    register(RegisteredAlgorithm("tuner", "pbt", "mine.Mine", None, tmp_path), set())
    config = read("tuner: {name: pbt}")
    assert (config.tuner.name, config.tuner.own.class_name) == ("pbt", "mine.Mine")
    assert read(f"tuner: {{name: PBT, {CHOSEN}}}}}").tuner.name == "PBTTuner"


def test_the_argument_tpe_args_sets_the_optuna_sampler_and_causes_a_warning_for_unsupported_keys(read):
    arguments = "n_startup_jobs: 3, n_ei_candidates: 7"
    config = read(f"tuner: {{name: TPE, {CHOSEN}, tpe_args: {{{arguments}}}}}}}")
    assert config.warnings == ()
    assert sampler_of(config) == (3, 7)
    assert sampler_of(read(f"tuner: {{name: TPE, {CHOSEN}}}}}")) == (10, 24)
    others = {"constant_liar_type": "null", "linear_forgetting": 25, "prior_weight": 1.0, "gamma": 0.25}
    arguments = ", ".join(f"{name}: {value}" for name, value in others.items())
    config = read(f"tuner: {{name: TPE, {CHOSEN}, tpe_args: {{{arguments}, n_startup_jobs: 3}}}}}}")
    assert sampler_of(config) == (3, 24)
    assert config.warnings == tuple(
        f"tuner.classArgs.tpe_args.{name} has no effect: the sampler of TPE is Optuna's, which has no such setting; remove it"
        for name in sorted(others)
    )


def sampler_of(config):
    """The number of startup trials and the number of candidates of the TPE sampler."""
    sampler = make_tuner(config)._make_sampler(SamplerSeeds(0, 0))
    return sampler._n_startup_trials, sampler._n_ei_candidates


def test_an_unknown_key_in_tpe_args_is_an_error(read):
    with pytest.raises(ConfigInvalid, match=r"n_startup_job: there is no such key here; .*n_startup_jobs"):
        read(f"tuner: {{name: TPE, {CHOSEN}, tpe_args: {{n_startup_job: 3}}}}}}")


OWN = "tuner: {codeDirectory: ., className: mine.Mine}"
FORMS = {
    "none": None,
    "empty": {},
    "another form": {"lr": [0.1, 1], "layers": {"min": 1, "max": 4}},
    "a type of its own": {
        "net": {"_type": "layers", "_value": [1, 2]},
        "lr": {"_type": "uniform", "_value": [0, 1]},
    },
}


@pytest.mark.parametrize("space", FORMS.values(), ids=FORMS)
def test_a_custom_tuner_needs_no_search_space_and_accepts_a_search_space_in_any_form(read, tmp_path, space):
    (tmp_path / "mine.py").write_text("class Mine: pass\n")
    (tmp_path / "space.json").write_text(json.dumps(space))
    file = FILE if space is not None else FILE.replace("searchSpaceFile: space.json\n", "")
    config = read(OWN, file=file)
    assert (config.search_space_raw, dict(config.search_space.parameters)) == (space or {}, {})
    warning = "the search space has none of the built-in types: it is passed to the tuner's class unchecked"
    assert config.warnings == ((warning,) if space else ())
    assert ExperimentSpec.from_json(config.to_json()) == config
    # With a custom tuner, users may import any parameters and change the search space to any form.
    assert results_of([{"parameter": {"anything": 1}, "value": 2}], config.search_space, config.tuner.name)
    assert changed(config, "SEARCH_SPACE", {"searchSpace": {"other": [1]}}).search_space_raw == {"other": [1]}
    with pytest.raises(ConfigInvalid):
        read("tuner: {name: TPE}", file=file)


def test_a_custom_tuner_rejects_invalid_values_of_built_in_search_space_types(read, tmp_path):
    (tmp_path / "mine.py").write_text("class Mine: pass\n")
    for space in ({"lr": {"_type": "uniform", "_value": [1, 0]}}, [1]):
        (tmp_path / "space.json").write_text(json.dumps(space))
        with pytest.raises(ConfigInvalid):
            read(OWN)
