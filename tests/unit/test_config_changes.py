"""The pure functions that change a running experiment and read imported results."""

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from real_experiment import RealExperiment

from nni_manager.config.changes import LIMITS, ChangeInvalid, changed
from nni_manager.config.diagnostics import MAX_DIAGNOSTICS, ConfigInvalid
from nni_manager.config.model import ExperimentSpec
from nni_manager.config.prior_results import PriorResult, read_results, results_of
from nni_manager.config.search_space import parse_search_space
from nni_manager.domain.objectives import MAXIMIZE, Objective, Objectives
from nni_manager.domain.provenance import PROVENANCE
from nni_sdk.nesting import MAX_LEVELS

SPACE = parse_search_space(
    {"lr": {"_type": "uniform", "_value": [0, 1]}, "net": {"_type": "choice", "_value": ["a", "b"]}}
)
PARAMETERS = {"lr": 0.5, "net": "a"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ExperimentSpec:
    return RealExperiment(tmp_path_factory.mktemp("changes"), "pass\n").config


@pytest.mark.parametrize(
    ("update_type", "params", "field", "value"),
    [
        ("TRIAL_CONCURRENCY", {"trialConcurrency": 7}, "trial_concurrency", 7),
        ("MAX_TRIAL_NUM", {"maxTrialNum": 12}, "max_trial_number", 12),
        ("MAX_TRIAL_NUM", {"maxTrialNumber": 12}, "max_trial_number", 12),
        ("MAX_TRIAL_NUM", {"maxTrialNum": None}, "max_trial_number", None),
        ("MAX_EXEC_DURATION", {"maxExecDuration": "90m"}, "max_experiment_duration", 5400.0),
        ("MAX_EXEC_DURATION", {"maxExecDuration": 90}, "max_experiment_duration", 90.0),
        ("MAX_EXEC_DURATION", {"maxExecDuration": "90"}, "max_experiment_duration", 90.0),
        ("MAX_EXEC_DURATION", {"maxExperimentDuration": "2h"}, "max_experiment_duration", 7200.0),
        ("MAX_TRIAL_DURATION", {"maxTrialDuration": "30s"}, "max_trial_duration", 30.0),
    ],
)
def test_a_limit_change_leaves_all_other_settings_unchanged(
    config: ExperimentSpec, update_type: str, params: dict[str, Any], field: str, value: Any
) -> None:
    after = changed(config, update_type, {"searchSpace": "ignored", **params})
    assert after == config.replace(**{field: value})
    assert ExperimentSpec.from_json(after.to_json()) == after


DEEP_OPTION: Any = 1
for _ in range(MAX_LEVELS):
    DEEP_OPTION = [DEEP_OPTION]
DEEP_SPACE = {
    "lr": {"_type": "uniform", "_value": [0, 1]},
    "net": {"_type": "choice", "_value": [DEEP_OPTION]},
}


def test_the_error_for_a_search_space_that_is_nested_too_deeply_names_the_parameter(
    config: ExperimentSpec,
) -> None:
    with pytest.raises(ConfigInvalid, match="cannot use net: it is nested more than 100 levels deep"):
        changed(config, "SEARCH_SPACE", {"searchSpace": DEEP_SPACE})
    with pytest.raises(ChangeInvalid, match="is nested more than 100 levels deep; send"):
        changed(config, "SEARCH_SPACE", {"searchSpace": json.dumps(DEEP_SPACE)})


@pytest.mark.parametrize(
    ("entry", "key"),
    [
        ({"parameter": {"lr": DEEP_OPTION, "net": "a"}, "value": 1}, "parameter"),
        ({"parameter": PARAMETERS, "value": {"default": 1, "curve": DEEP_OPTION}}, "value"),
    ],
)
def test_the_error_for_imported_data_that_is_nested_too_deeply_names_the_key(entry: Any, key: str) -> None:
    with pytest.raises(
        ConfigInvalid, match=rf"cannot use \[0\].{key}: it is nested more than 100 levels deep"
    ):
        results_of([entry], SPACE, "Random")


@pytest.mark.parametrize("update_type", sorted(LIMITS))
@given(value=st.one_of(st.text(), st.booleans(), st.integers(), st.floats(), st.lists(st.integers())))
def test_an_invalid_limit_change_is_rejected_and_a_valid_limit_change_can_be_stored(
    config: ExperimentSpec, update_type: str, value: Any
) -> None:
    name = LIMITS[update_type].v1[0][-1]
    with contextlib.suppress(ChangeInvalid):
        after = changed(config, update_type, {name: value})
        assert not isinstance(value, bool | list)
        assert ExperimentSpec.from_json(after.to_json()) == after


@pytest.mark.parametrize(
    ("update_type", "params", "words"),
    [
        ("MAX_TRIALS", {}, "MAX_TRIAL_NUM"),
        ("", {}, "use one of"),
        ("MAX_TRIAL_NUM", {"maxTrialnum": 1}, "params does not have this key"),
        ("TRIAL_CONCURRENCY", {"trialConcurrency": None}, "from 1 to 99999"),
        ("SEARCH_SPACE", {"searchSpace": "{"}, "is not JSON"),
    ],
)
def test_the_error_for_an_unknown_or_invalid_change_suggests_a_remedy(
    config: ExperimentSpec, update_type: str, params: dict[str, Any], words: str
) -> None:
    with pytest.raises(ChangeInvalid, match=words):
        changed(config, update_type, params)


def test_the_revision_is_incremented_by_a_new_search_space_but_not_by_an_equal_search_space(
    config: ExperimentSpec,
) -> None:
    raw = {"y": {"_type": "randint", "_value": [0, 3]}}
    after = changed(config, "SEARCH_SPACE", {"searchSpace": json.dumps(raw)})
    assert (after.search_space_raw, after.search_space_revision) == (raw, 1)
    assert after.search_space == parse_search_space(raw)
    assert changed(after, "SEARCH_SPACE", {"searchSpace": raw}) is after
    assert ExperimentSpec.from_json(after.to_json()) == after


def test_all_search_space_errors_are_reported_including_errors_of_the_tuner(
    config: ExperimentSpec,
) -> None:
    wrong = {"y": {"_type": "unifrm", "_value": [0, 3]}, "z": {"_type": "uniform", "_value": [3, 0]}}
    with pytest.raises(ConfigInvalid) as caught:
        changed(config, "SEARCH_SPACE", {"searchSpace": wrong})
    assert len(caught.value.diagnostics) == 2
    in_batches = config.replace(tuner=replace(config.tuner, name="BatchTuner"))
    with pytest.raises(ConfigInvalid, match="BatchTuner requires one choice"):
        changed(in_batches, "SEARCH_SPACE", {"searchSpace": {"y": {"_type": "uniform", "_value": [0, 3]}}})


# ---- imported results


@pytest.mark.parametrize("value", [0.25, {"default": 0.25, "loss": 3}, "0.25", '{"default": 0.25}'])
def test_an_imported_result_may_be_a_number_or_a_dict_with_a_default_number(value: Any) -> None:
    entry = {"parameter": PARAMETERS, "value": value, "trialJobId": "aB3dE"}
    assert results_of([entry], SPACE, "TPE") == [
        PriorResult(PARAMETERS, 0.25, value if isinstance(value, str) else json.dumps(value))
    ]


def test_an_exported_result_with_all_its_fields_can_be_imported() -> None:
    remarks = {"tags": ["keep"], "note": "late", "onFront": True, "intermediate": [0.1, 0.25]}
    entry = {"parameter": PARAMETERS, "value": 0.25, "trialJobId": "aB3dE"} | remarks
    entry |= dict.fromkeys(PROVENANCE)
    assert results_of([entry], SPACE, "TPE") == [PriorResult(PARAMETERS, 0.25, "0.25")]


def test_each_error_contains_the_position_of_the_invalid_value_in_the_imported_results() -> None:
    raw = [
        {"parameter": PARAMETERS, "value": 1},
        {"parameter": {"lr": 7, "nett": "a"}, "value": "good"},
        {"parameter": [1], "value": None, "parmeter": {}},
        "no result",
        {},
    ]
    results, problems = read_results(raw, SPACE, "TPE")
    assert results == [PriorResult(PARAMETERS, 1.0, "1")]
    places = [place for place, _ in problems]
    assert places == [
        (1, "parameter"), (1, "parameter"), (1, "parameter"), (2, "parmeter"), (2, "parameter"), (3,), (4,), (4,),
    ]  # fmt: skip
    assert all(message.startswith("cannot ") for _, message in problems)
    with pytest.raises(ConfigInvalid) as caught:
        results_of(raw, SPACE, "TPE")
    assert len(caught.value.diagnostics) == len(problems)


TWO_METRICS = Objectives((Objective("default", "maximize"), Objective("loss", "minimize")))


@pytest.mark.parametrize("value", [None, "text", [True], {"loss": 3}, {"default": None}])
def test_an_imported_result_without_a_finite_number_is_skipped(value: Any) -> None:
    entries = [{"parameter": PARAMETERS, "value": each} for each in (value, 0.5)]
    assert read_results(entries, SPACE, "TPE") == ([PriorResult(PARAMETERS, 0.5, "0.5")], [])


def test_an_imported_result_without_a_number_for_each_objective_is_skipped() -> None:
    entries = [{"parameter": PARAMETERS, "value": each} for each in (0.5, {"default": 1, "loss": 2})]
    (result,) = results_of(entries, SPACE, "TPE", TWO_METRICS)
    assert result.value == 1


@pytest.mark.parametrize(
    ("objectives", "why"),
    [
        (
            MAXIMIZE,
            "[0].value is null, nothing (None); write a number or a mapping with a number under default",
        ),
        (
            TWO_METRICS,
            '[0].value is null, not a dict with "default", "loss"; write a mapping with a number under default, loss',
        ),
    ],
)
def test_an_import_in_which_no_result_has_a_finite_number_is_rejected(
    objectives: Objectives, why: str
) -> None:
    entries = [{"parameter": PARAMETERS, "value": each} for each in (None, "?")]
    expected = [((0, "value"), f"cannot import: no result has a finite number, {why}")]
    assert read_results(entries, SPACE, "TPE", objectives) == ([], expected)


@pytest.mark.parametrize(
    ("tuner", "raw", "parameters"),
    [
        ("BatchTuner", {"combine_params": {"_type": "choice", "_value": [{"lr": 1}, {"lr": 2}]}}, {"lr": 2}),
        ("Hyperband", {"lr": {"_type": "choice", "_value": [1, 2]}}, {"lr": 2}),
    ],
)
def test_imported_parameters_are_accepted_only_in_the_form_that_the_tuner_proposes(
    tuner: str, raw: dict[str, Any], parameters: dict[str, Any]
) -> None:
    space = parse_search_space(raw)
    entries = [{"parameter": parameters, "value": 1}, {"parameter": {"lr": 3}, "value": 1}]
    results, problems = read_results(entries, space, tuner)
    assert [result.parameters for result in results] == [parameters]
    assert [place for place, _ in problems] == [(1, "parameter")]


@pytest.mark.parametrize("tuner", ["TPE", "Hyperband", "PBTTuner", "my_tuner.Own"])
def test_parameters_that_an_earlier_tuner_has_added_are_removed_from_imported_results(tuner: str) -> None:
    added = {"TRIAL_BUDGET": 9, "load_checkpoint_dir": "/a", "save_checkpoint_dir": "/b"}
    entry = {"parameter": PARAMETERS | added, "value": 1}
    assert results_of([entry], SPACE, tuner) == [PriorResult(PARAMETERS, 1.0, "1")]
    with_budget = parse_search_space(
        {"lr": {"_type": "uniform", "_value": [0, 1]}, "TRIAL_BUDGET": {"_type": "choice", "_value": [9]}}
    )
    own = {"lr": 0.5, "TRIAL_BUDGET": 9}
    assert results_of([{"parameter": own, "value": 1}], with_budget, "TPE") == [PriorResult(own, 1.0, "1")]


@pytest.mark.parametrize("raw", [None, {}, [], "[]", 3, {"parameter": PARAMETERS, "value": 1}])
def test_an_import_that_is_not_a_list_of_results_is_rejected(raw: Any) -> None:
    assert [place for place, _ in read_results(raw, SPACE, "TPE")[1]] == [()]


def test_the_number_of_reported_import_errors_is_bounded() -> None:
    assert len(read_results([{}] * 10_000, SPACE, "TPE")[1]) == MAX_DIAGNOSTICS


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["parameter", "value", "lr", "net", "default"]), inner)
    ),
    max_leaves=12,
)


@given(raw=json_values)
def test_any_json_import_is_accepted_or_rejected_without_a_crash(raw: Any) -> None:
    results, problems = read_results(raw, SPACE, "TPE")
    assert problems or results
    assert all(0 <= result.parameters["lr"] <= 1 for result in results)
