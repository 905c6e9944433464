"""The output of nnictl while an experiment runs, and when it ends."""

import io

import pytest
from rich.console import Console

from nni_manager.client import output, watch
from nni_manager.domain.trial_run import NO_FINAL_RESULT


def a_trial(trial_id="aB3dE", **changed):
    return {
        "id": trial_id,
        "state": "FAILED",
        "value": None,
        "reason": "non-zero exit",
        "exitCode": 1,
        "message": "Traceback\n  File x\nModuleNotFoundError: No module named 'torch'\n",
        "warning": "",
        "parameters": {"lr": 0.01, "net": {"_name": "a[b]"}},
    } | changed


SILENT = a_trial("s1Ent", state="SUCCEEDED", reason="succeeded", exitCode=0, message=NO_FINAL_RESULT)
BEST = a_trial("bEsT1", state="SUCCEEDED", value=0.97111111, message="", startTime=0, endTime=75_000)


def a_summary(status="RUNNING", **changed):
    counts = dict.fromkeys(["WAITING", "RUNNING", *watch._ENDED], 0) | changed.pop("counts", {})
    return {
        "id": "GvTf2bVe",
        "name": "digits [1]",
        "status": status,
        "errors": [],
        "problem": "",
        "counts": counts,
        "maxTrialNum": 20,
        "elapsedS": 12.4,
        "maxExecDurationS": 3600.0,
        "best": None,
        "top": [],
        "latestFailures": [],
        "latestWithoutResult": None,
    } | changed


def drawn(summary):
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture:
        console.print(watch.draw(summary))
    return capture.get()


def test_the_live_view_shows_the_progress_the_time_the_best_trial_and_the_last_failure():
    text = drawn(
        a_summary(counts={"RUNNING": 2, "SUCCEEDED": 3, "FAILED": 1}, best=BEST, latestFailures=[a_trial()])
    )
    for part in (
        "GvTf2bVe digits [1]  RUNNING", "4/20", "2 running", "3 succeeded", "1 failed", "0:12, about 0:49 left",
        "0.971111  trial bEsT1",
        'lr=0.01 net=a[b]', "trial aB3dE: exit code 1: ModuleNotFoundError: No module named 'torch'",
    ):  # fmt: skip
        assert part in text


def test_the_live_view_of_an_experiment_without_limits_shows_no_remaining_time():
    text = drawn(a_summary(maxTrialNum=None, maxExecDurationS=None, problem="cannot write: disk full"))
    assert "none yet" in text
    assert "left" not in text
    assert "cannot write: disk full" in text


def test_the_watch_log_gets_one_line_per_change_and_no_line_for_elapsed_time(capsys):
    lines = watch._Lines()
    running = a_summary(counts={"RUNNING": 2})
    for summary in (
        running,
        running | {"elapsedS": 13.0},
        a_summary(counts={"RUNNING": 1, "SUCCEEDED": 1}, best=BEST),
        a_summary(counts={"RUNNING": 1, "SUCCEEDED": 1, "FAILED": 1}, best=BEST, latestFailures=[a_trial()]),
        a_summary("DONE", counts={"SUCCEEDED": 2, "FAILED": 1}, best=BEST, latestFailures=[a_trial()]),
    ):
        lines.show(summary)
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "[0:12] 0/20 ended, 2 running, 59:47 left",
        "[0:12] 1/20 ended, 1 running, best 0.971111 (trial bEsT1), about 3:55 left",
        "[0:12] 2/20 ended, 1 running, best 0.971111 (trial bEsT1), about 1:51 left",
        "[0:12] DONE 3/20 ended, 0 running, best 0.971111 (trial bEsT1)",
    ]
    assert err == "WARNING: trial aB3dE failed: exit code 1: ModuleNotFoundError: No module named 'torch'\n"


@pytest.mark.parametrize(
    ("status", "errors"), [("ERROR", ["one"]), ("ERROR", ["one", "two", "three"]), ("STOPPED", ["one"])]
)
def test_each_error_of_an_experiment_is_printed_either_in_the_log_or_in_the_final_message(
    capsys, status, errors
):
    ended = a_summary(status, errors=errors, counts={"FAILED": 1})
    watch._Lines().show(ended)
    said = capsys.readouterr().err.splitlines()
    assert said == ([f"WARNING: {each}" for each in errors] if errors != ["one"] or status != "ERROR" else [])
    assert ("one" in str(watch.verdict(ended))) == (status == "ERROR")


def test_the_error_of_an_experiment_is_printed_immediately_if_its_trials_still_run(capsys):
    watch._Lines().show(a_summary("ERROR", errors=["the tuner failed"], counts={"RUNNING": 1}))
    assert capsys.readouterr().err == "WARNING: the tuner failed\n"


def logged(capsys, *counts):
    """The fields for ended and for running trials in each line of the watch log, after the given trial counts by state."""
    lines = watch._Lines()
    for each in counts:
        lines.show(a_summary(counts=each))
    return [line.split("] ")[1].split(", ")[:2] for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("within_s", "between"),
    [(60.0, []), (0.0, [["1/20 ended", "0 running"]])],
    ids=["it begins in a moment", "it waits for long"],
)
def test_the_watch_log_shows_a_trial_end_and_the_next_trial_start_in_one_line_if_the_start_follows_soon(
    capsys, monkeypatch, within_s, between
):
    monkeypatch.setattr(watch, "_NEXT_START_TIMEOUT_S", within_s)
    waits = {"WAITING": 1, "SUCCEEDED": 1}
    assert logged(capsys, {"RUNNING": 1}, waits, waits, {"RUNNING": 1, "SUCCEEDED": 1}) == [
        ["0/20 ended", "1 running"],
        *between,
        ["1/20 ended", "1 running"],
    ]


@pytest.mark.parametrize(
    ("elapsed_s", "ended", "pause_s"),
    [
        (2.0, 0, 0.25),
        (0.0, 0, 0.02),
        (0.4, 0, 0.1),
        (2.0, 10, 0.25),
        (1.8, 18, 0.1),
        (0.2, 19, 0.02),
        (600.0, 19, 0.25),
    ],
)
def test_the_watcher_polls_more_often_if_trials_are_short(elapsed_s, ended, pause_s):
    summary = a_summary(elapsedS=elapsed_s, counts={"SUCCEEDED": ended})
    assert watch._pause_s(summary, 0.25) == pytest.approx(pause_s)


def test_the_live_view_shows_a_warning_in_the_line_of_its_trial():
    cells = watch.trial_cells(a_trial(state="SUCCEEDED", value=1.0, warning="task worker-1 reports as well"))
    assert cells[-1].endswith("(task worker-1 reports as well)")


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"reason": "signal", "exitCode": 137, "message": ""}, "signal 9 (SIGKILL)"),
        ({"reason": "signal", "exitCode": 139, "message": "gone\n"}, "signal 11 (SIGSEGV): gone"),
        ({"reason": "signal", "exitCode": 128 + 40, "message": ""}, "signal 40"),
        ({"reason": "non-zero exit", "exitCode": 139, "message": ""}, "exit code 139 (128 + SIGSEGV)"),
        ({"reason": "non-zero exit", "exitCode": 255, "message": ""}, "exit code 255"),
        ({"reason": "non-zero exit", "exitCode": 1,
          "message": 'Traceback (most recent call last):\n  File "x.py", line 1, in f\nValueError: nan\n<https://a.b>\n'},
         "exit code 1: ValueError: nan"),
        ({"reason": "out of memory", "exitCode": 137, "message": "Killed\n"}, "out of memory: Killed"),
        ({"reason": "non-zero exit", "exitCode": 3, "message": ""}, "exit code 3"),
        ({"reason": "could not start", "exitCode": None, "message": "cannot start"}, "could not start: cannot start"),
        ({"reason": None, "message": None}, "FAILED"),
        *(({"reason": reason, "exitCode": None, "message": "its keeper ended with exit code -9\n07:31 the command runs\n"},
           f"{reason}: its keeper ended with exit code -9")
          for reason in ("keeper lost", "job lost", "could not start", "mount", "version")),
    ],
)  # fmt: skip
def test_the_live_view_describes_a_failed_trial_in_one_line(changed, expected):
    assert watch.why(a_trial(**changed)) == expected


@pytest.mark.parametrize(
    ("summary", "expected"),
    [
        (a_summary("DONE", counts={"SUCCEEDED": 1, "FAILED": 19}, best=BEST), None),
        (a_summary("DONE", counts={"SUCCEEDED": 20}, best=BEST, latestWithoutResult=SILENT), None),
        (a_summary("DONE", counts={"SUCCEEDED": 19, "FAILED": 1}, latestFailures=[a_trial()], latestWithoutResult=SILENT),
         "cannot find a best trial of experiment GvTf2bVe: none of 20 trials has a value; the last one that succeeded (s1Ent): "
         "no final result was reported; call nni_sdk.report_final_result()"),
        (a_summary("DONE", counts={"FAILED": 3}, latestFailures=[a_trial()]),
         "cannot finish experiment GvTf2bVe: none of 3 trials succeeded; the last one (aB3dE): exit code 1: ModuleNotFoundError"),
        (a_summary("DONE", counts={}),
         "cannot finish experiment GvTf2bVe: it has no trials, because its tuner proposed none; check the tuner and its"),
        (a_summary("DONE", counts={"USER_CANCELED": 3}),
         "cannot finish experiment GvTf2bVe: none of 3 trials succeeded: 3 stopped by user; `nnictl trial ls GvTf2bVe` shows"),
        (a_summary("DONE", counts={"SYS_CANCELED": 2, "EARLY_STOPPED": 1}),
         "cannot finish experiment GvTf2bVe: none of 3 trials succeeded: 2 stopped at the time limit, 1 early stopped; raise "
         "maxTrialDuration; "),
        (a_summary("DONE", counts={"SUCCEEDED": 3, "FAILED": 1}, latestFailures=[a_trial()], constraints=["size_mb ≤ 80"]),
         "cannot find a best trial of experiment GvTf2bVe: each of 3 results violates a constraint (size_mb ≤ 80); loosen it"),
        (a_summary("STOPPED", counts={"SUCCEEDED": 3}), "cannot finish experiment GvTf2bVe: it was stopped after 3/20 trials; "),
        (a_summary("ERROR", counts={"SUCCEEDED": 3}, errors=["the tuner failed.\nTraceback\nKeyError: 1\n"]),
         "cannot finish experiment GvTf2bVe: the tuner failed. (KeyError: 1)"),
    ],
)  # fmt: skip
def test_nnictl_fails_after_watching_an_experiment_that_did_not_finish_or_has_no_best_trial(
    summary, expected
):
    problem = watch.verdict(summary)
    assert problem is None if expected is None else str(problem).startswith(expected)


def test_several_succeeded_trials_without_a_value_cause_a_single_warning(capsys):
    lines = watch._Lines()
    for trial in (SILENT, SILENT | {"id": "other"}):
        summary = a_summary(counts={"SUCCEEDED": 1}, latestWithoutResult=trial)
        lines.show(summary)
    assert capsys.readouterr().err == f"WARNING: trial s1Ent succeeded without a value: {NO_FINAL_RESULT}\n"
    assert "no value trial other: no final result was reported; " in " ".join(drawn(summary).split())
    assert watch.trial_cells(SILENT)[2].endswith(f"  ({NO_FINAL_RESULT})")
    assert watch.trial_cells(BEST)[2].endswith(" net=a[b]")


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, "0:00"), (59.9, "0:59"), (754, "12:34"), (3723, "1:02:03"), (-1, "0:00")]
)
def test_elapsed_times_are_formatted_like_a_clock(seconds, expected):
    assert output.clock(seconds) == expected


def test_trial_durations_are_shown_with_tenths_of_a_second_only_below_one_minute():
    assert [output.duration(s) for s in (0.64, 41, 754)] == ["0.6 s", "41.0 s", "12:34"]
    assert watch.trial_cells(BEST)[:2] == ["0.971111", "1:15"]


def test_a_result_of_minus_zero_is_shown_as_zero():
    assert [output.number(value) for value in (-0.0, -0.5, None)] == ["0", "-0.5", ""]
    assert output.parameters({"lr": -0.0}) == "lr=0"


def test_tables_are_aligned_and_the_last_column_wraps(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    rows = [["1", "é中", "0.5", "a [b] c " * 5], ["12", "x", "", ""]]
    output.print_table(["no.", "name", "value", "why"], rows, right=("no.", "value"))
    assert capsys.readouterr().out.splitlines() == [
        "no.  name  value  why",
        "  1  é中     0.5  a [b] c a [b] c a [b]",
        "                  c a [b] c a [b] c",
        " 12  x",
    ]


def test_control_characters_in_output_of_a_trial_are_escaped(capsys):
    output.print_table(["why"], [["red \x1b[31m\x07 and\ttwo\nlines"]])
    assert capsys.readouterr().out == "why\nred \\x1b[31m\\x07 and two lines\n"


def test_the_live_view_of_several_objectives_shows_the_pareto_front():
    on_front = BEST | {"values": [0.9, 12.0]}
    objectives = [{"metric": "acc", "mode": "maximize"}, {"metric": "ms", "mode": "minimize"}]
    summary = a_summary(
        "DONE", counts={"SUCCEEDED": 3}, objectives=objectives, front={"count": 2, "ids": []}, top=[on_front]
    )
    assert watch.verdict(summary) is None
    text = drawn(summary)
    assert "2 trials on the Pareto front" in text
    assert "acc=0.9 ms=12" in text
    without = a_summary("DONE", counts={"SUCCEEDED": 3}, objectives=objectives, front={"count": 0, "ids": []})
    assert watch.verdict(without) is not None


def test_progress_is_a_live_view_if_the_messages_go_to_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with output.messages_on(terminal), watch.display() as show:
        show(a_summary(counts={"RUNNING": 2}))
    assert "2 running" in terminal.getvalue()
    assert "experiment" in terminal.getvalue()


def test_only_warnings_are_printed_if_messages_are_disabled(capsys):
    with output.messages_on(None), watch.display() as show:
        output.info("served")
        show(a_summary(counts={"RUNNING": 2}, latestFailures=[a_trial()]))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("WARNING: trial aB3dE failed")
    assert err.count("\n") == 1
