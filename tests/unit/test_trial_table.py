"""The table of trials: selection, order, columns and format."""

import json
import sys

import pytest

from nni_manager.cli import trial_table
from nni_manager.client import output
from nni_manager.domain.objectives import MAXIMIZE, MINIMIZE, Objective, Objectives
from nni_manager.errors import UserError


def a_trial(number, state="SUCCEEDED", value=None, took_s=1.0, **parameters):
    return {
        "sequenceId": number,
        "id": f"t{number}",
        "state": state,
        "value": value,
        "startTime": 1000.0 * number,
        "endTime": None if took_s is None else 1000.0 * (number + took_s),
        "parameters": parameters,
        "reason": None,
        "exitCode": None,
        "message": "",
        "warning": "",
    }


TRIALS = [
    a_trial(0, value=0.5, took_s=3, lr=0.1),
    a_trial(1, "FAILED", value=0.9, took_s=2, lr="auto"),
    a_trial(2, "RUNNING", took_s=None, lr=10),
    a_trial(3, value=0.7, took_s=1, lr=None),
    a_trial(4, "EARLY_STOPPED", value=0.5, took_s=11),
]


def numbers(trials):
    return [each["sequenceId"] for each in trials]


def test_states_are_selected_in_any_letter_case_and_an_unknown_state_is_refused():
    assert numbers(trial_table.in_states(TRIALS, ["failed", "Running"])) == [1, 2]
    assert numbers(trial_table.in_states(TRIALS, [])) == [0, 1, 2, 3, 4]
    with pytest.raises(UserError, match=r"cannot use --state lost: .*; write one of WAITING, .*FAILED"):
        trial_table.in_states(TRIALS, ["failed", "lost"])


@pytest.mark.parametrize(("maximize", "expected"), [(True, [3, 0, 4]), (False, [0, 4, 3])])
def test_the_best_trials_come_first_and_failed_trials_are_omitted(maximize, expected):
    objectives = MAXIMIZE if maximize else MINIMIZE
    finals = [(TRIALS[number]["id"], str(TRIALS[number]["value"])) for number in (0, 3, 4)]
    assert numbers(trial_table.best(TRIALS, finals, 9, objectives)) == expected
    assert numbers(trial_table.best(TRIALS, finals, 1, objectives)) == expected[:1]
    assert numbers(trial_table.best(TRIALS[:3], finals, 1, objectives)) == [0], "of the filtered ones"


def test_the_best_trials_for_several_objectives_are_the_pareto_front(capsys):
    two = Objectives((Objective("acc", "maximize"), Objective("ms", "minimize")))
    points = {0: (0.9, 20), 3: (0.8, 10), 4: (0.8, 11)}
    finals = [(f"t{number}", json.dumps({"acc": acc, "ms": ms})) for number, (acc, ms) in points.items()]
    shown = trial_table.best(TRIALS, finals, 9, two)
    assert numbers(shown) == [0, 3]
    assert numbers(trial_table.best(TRIALS[1:], finals, 9, two)) == [3], "a hidden trial still dominates"
    trials = trial_table.with_metrics(shown, finals)
    trial_table.show(trials, trial_table.columns_of(None, trials, ("acc", "ms")))
    printed = [line.split("\t")[:6] for line in capsys.readouterr().out.splitlines()]
    assert printed == [
        ["no.", "trial", "state", "acc", "ms", "time"],
        ["0", "t0", "SUCCEEDED", "0.9", "20", "3.0 s"],
        ["3", "t3", "SUCCEEDED", "0.8", "10", "1.0 s"],
    ]


def test_a_metric_gets_a_column_even_if_a_parameter_has_the_same_name(capsys):
    results = [("t0", '{"lr": 7, "state": "good", "loss": 2}'), ("t3", '{"loss": 1}'), ("t4", "0.5")]
    trials = trial_table.with_metrics(TRIALS, results)
    assert numbers(trial_table.sorted_by(trials, "loss", is_descending=False))[:2] == [3, 0]
    assert numbers(trial_table.sorted_by(trials, "value/lr", is_descending=False))[:1] == [0]
    trial_table.show(trials[:1], trial_table.columns_of("lr,value/lr,loss,value/loss,state", trials))
    assert capsys.readouterr().out.splitlines()[1].split("\t") == ["0.1", "7", "2", "2", "SUCCEEDED"]
    assert trial_table.columns_of(None, trials, ("lr", "loss"))[3:5] == ("value/lr", "loss")
    with pytest.raises(UserError, match=r"write one of no\., .*, lr, value/lr, value/state, loss$"):
        trial_table.columns_of("units", trials)


@pytest.mark.parametrize(
    ("column", "ascending", "descending"),
    [
        ("no.", [0, 1, 2, 3, 4], [4, 3, 2, 1, 0]),
        ("value", [0, 4, 3, 1, 2], [1, 3, 0, 4, 2]),
        ("time", [3, 1, 0, 4, 2], [4, 0, 1, 3, 2]),
        ("state", [4, 1, 2, 0, 3], [0, 3, 2, 1, 4]),
        # In ascending order, numbers precede text. In both orders, trials without the parameter come last.
        ("lr", [0, 2, 1, 3, 4], [1, 2, 0, 3, 4]),
    ],
)
def test_trials_without_a_value_in_the_sort_column_come_last(column, ascending, descending):
    assert numbers(trial_table.sorted_by(TRIALS, column, is_descending=False)) == ascending
    assert numbers(trial_table.sorted_by(TRIALS, column, is_descending=True)) == descending


def test_each_built_in_column_has_a_cell():
    assert trial_table._KEYS.keys() <= trial_table._cells(TRIALS[0]).keys()


def test_the_error_for_an_unknown_column_lists_the_known_columns():
    known = ", ".join((*trial_table._KEYS, "lr"))
    with pytest.raises(UserError, match=f"cannot use --columns 'units': .*; write one of {known}$"):
        trial_table.columns_of("no.,units", TRIALS)
    with pytest.raises(UserError, match=f"cannot use --sort 'units': .*; write one of {known}$"):
        trial_table.sorted_by(TRIALS, "units", is_descending=False)


def test_output_to_a_pipe_is_tab_separated_without_line_wraps(capsys, monkeypatch):
    # Some shells export the width of the terminal. Output to a pipe must not be wrapped at this width.
    monkeypatch.setenv("COLUMNS", "72")
    trials = [
        a_trial(7, value=1 / 3, net={"_name": "conv", "size": 1 / 3}, text="a\tb\nc" * 100),
        a_trial(8, "WAITING", took_s=None, net={"_name": "none"}),
    ]
    trial_table.show(trials, trial_table.columns_of("no., value ,net,size,text", trials))
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "no.\tvalue\tnet\tsize\ttext",
        "\t".join(("7", "0.333333", "conv", "0.333333", "a b c" * 100)),
        "8\t\tnone\t\t",
    ]


def test_a_stopping_trial_is_shown_with_the_time_of_the_stop_request(capsys):
    at_ms = 1_700_000_000_000.0
    trial_table.show([a_trial(2, "STOPPING", took_s=None) | {"stoppingSince": at_ms}], ["state"])
    assert f"STOPPING since {output.moment(at_ms)}" in capsys.readouterr().out


def test_a_number_is_never_split_between_lines_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "72")
    values = {f"parameter_{number}": 0.123456 for number in range(6)}
    trial_table.show([a_trial(0, **values)], trial_table.DEFAULT_COLUMNS)
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 72
    assert [piece for line in printed[1:] for piece in line.split() if "=" in piece] == [
        f"{name}=0.123456" for name in values
    ]


def test_nested_parameters_of_the_same_name_have_columns_of_their_own(capsys):
    # In the first trial, `size` alone would mean net/layer/size, and in the second out/size. So the columns must have full names.
    trials = [
        a_trial(
            0,
            lr=1,
            net={"_name": "a", "lr": 9, "layer": {"_name": "b", "size": 3}},
            out={"_name": "c", "size": 7},
        ),
        a_trial(
            1, lr=2, net={"_name": "a", "lr": 8, "layer": {"_name": "none"}}, out={"_name": "c", "size": 6}
        ),
    ]
    trial_table.show(trials, trial_table.columns_of("lr,net/lr,layer,net/layer/size,out/size", trials))
    assert [each.split("\t") for each in capsys.readouterr().out.splitlines()[1:]] == [
        ["1", "9", "b", "3", "7"],
        ["2", "8", "none", "", "6"],
    ]
    assert numbers(trial_table.sorted_by(trials, "lr", is_descending=False)) == [0, 1]
    assert numbers(trial_table.sorted_by(trials, "net/lr", is_descending=False)) == [1, 0]
    with pytest.raises(UserError, match=r"'size': several parameters .* one of net/layer/size, out/size$"):
        trial_table.columns_of("no.,size", trials)
    with pytest.raises(
        UserError, match=r"note, parameters, lr, net, net/lr, net/layer, net/layer/size, out, out/size$"
    ):
        trial_table.columns_of("units", trials)


def test_the_column_of_a_parameter_has_a_prefix_if_a_built_in_column_has_the_same_name(capsys):
    trials = [
        a_trial(0, value=0.5, time=9, lr=1),
        a_trial(1, value=0.7, time=3, lr={"_name": "a", "value": 4}),
    ]
    trial_table.show(
        trials, trial_table.columns_of("time,parameter/time,parameter/lr,parameter/value", trials)
    )
    printed = [line.split("\t") for line in capsys.readouterr().out.splitlines()[1:]]
    assert printed == [["1.0 s", "9", "1", ""], ["1.0 s", "3", "a", "4"]]
    assert numbers(trial_table.sorted_by(trials, "parameter/time", is_descending=False)) == [1, 0]
    with pytest.raises(UserError, match=r"'parameter/loss': .* parameters, parameter/time, lr, lr/value"):
        trial_table.columns_of("parameter/loss", trials)


def test_parameters_of_a_nested_choice_follow_the_name_of_the_choice():
    assert (
        output.parameters(
            {
                "optimizer": {"_name": "adam", "beta_1": 0.98304971, "more": {"_name": "x", "deep": 1 / 3}},
                "layers": [64, 0.1234567],
                "names": {"a": 1 / 3},
            }
        )
        == 'optimizer=adam beta_1=0.98305 more=x deep=0.333333 layers=[64, 0.123457] names={"a": 0.333333}'
    )


def test_nan_is_sorted_last_and_a_huge_whole_number_is_sorted_by_its_value():
    losses = [0.3, float("nan"), 10**400, -(10**400), float("nan"), 0.2]
    trials = [a_trial(number, loss=loss) for number, loss in enumerate(losses)]
    assert numbers(trial_table.sorted_by(trials, "loss", is_descending=False)) == [3, 5, 0, 2, 1, 4]
    assert numbers(trial_table.sorted_by(trials, "loss", is_descending=True)) == [2, 0, 5, 3, 1, 4]


def test_printed_json_has_null_in_place_of_nan_and_infinities(capsys):
    document = {"a": [float("nan"), 1], "b": float("-inf"), "c": 0.5}
    output.print_json(document)
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "a": [None, 1],
        "b": None,
        "c": 0.5,
    }
    output.print_json_lines([document, {}])
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)[0]["a"] == [None, 1]
