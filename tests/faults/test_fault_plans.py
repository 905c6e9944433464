"""Experiments under fault plans, in a short form: `make faults` runs longer ones."""

import dataclasses
import shutil

import pytest
from fault_judge import Harm, Ledger, state_that_is_false
from fault_plan import Fault, Kind, Need, plan_of
from fault_run import run_plan
from fault_site import clean_up, missing_here, mounts_of, networks_of, processes_of

from nni_manager.domain.trial import Trial, TrialState
from trial_keeper.wire.reasons import ExitReason

# A minute on an idle machine; other tests may be running.
pytestmark = pytest.mark.timeout(900)

# Together these meet every kind of fault.
SEEDS = (6, 10, 11, 13, 17)


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_or_doubled_and_every_state_is_true_under_the_plan_of(seed):
    outcome = run_plan(plan_of(seed, is_short=True, missing=missing_here()))
    print(outcome.report())
    assert outcome.verdict.is_good, outcome.report()


# What is received and not committed comes again when the link is lost and the manager is not.
RESETS = tuple(Fault(at_s, Kind.LINK_RESET, 0.0, 0.0) for at_s in (0.3, 0.8, 1.3, 1.8))
KILLS = tuple(Fault(at_s, Kind.MANAGER_KILLED, 0.1, 0.0) for at_s in (0.5, 1.5))


@pytest.mark.parametrize(
    ("planted", "faults", "seen"),
    [
        ("commits slowly", RESETS, ""),
        ("counts again", RESETS, "doubled"),
        ("leaves out", (), "lost"),
        ("acknowledges early", KILLS, "lost"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_the_suite_sees_what_a_manager_does_that(tmp_path, planted, faults, seen):
    plan = dataclasses.replace(plan_of(2, is_short=True), faults=faults, left_out=())
    verdict = run_plan(plan, tmp_path, planted=planted, trials=4).verdict
    assert verdict.is_good == (not seen), verdict.lines()
    assert not seen or getattr(verdict, seen) > 0, verdict.lines()


def test_every_kind_of_fault_is_in_the_plans_of_this_file_and_in_the_first_twenty():
    plans = [plan_of(seed, is_short=True) for seed in SEEDS]
    assert {kind for plan in plans for kind in plan.kinds} == set(Kind)
    plans = [plan_of(seed, is_short=False) for seed in range(1, 21)]
    assert {kind for plan in plans for kind in plan.kinds} == set(Kind)
    assert {plan.reuses_jobs for plan in plans} == {True, False}
    assert all(3 <= len(plan.faults) <= 8 for plan in plans)


def test_a_seed_has_one_plan():
    assert plan_of(17, is_short=False) == plan_of(17, is_short=False)
    assert plan_of(17, is_short=False) != plan_of(18, is_short=False)


def test_a_plan_says_what_it_leaves_out_and_keeps_the_rest():
    whole, reduced = (
        plan_of(2, is_short=True, missing=missing) for missing in (frozenset(), frozenset({Need.FUSE}))
    )
    assert set(reduced.faults) < set(whole.faults)
    assert "left out, needs FUSE and mfusepy: storage slow" in reduced.lines()


# ---- the judge


def a_ledger(tmp_path, *lines):
    path = tmp_path / "ledger"
    path.write_text("".join(f"{line}\n" for line in lines))
    return Ledger.read(path)


@pytest.mark.parametrize(
    ("stored", "lost", "doubled", "is_in_order"),
    [
        (["0", "1"], 0, 0, True),
        (["0", "1", "3"], 0, 0, True),  # killed in the middle of it
        (["0"], 1, 0, True),
        (["0", "0", "1"], 0, 1, True),
        (["0", "1", "3", "3"], 0, 1, True),
        (["0", "1", "2"], 0, 1, True),  # its call raised
        (["1", "0"], 0, 0, False),
        (["3", "0", "1"], 0, 0, False),
    ],
)
def test_rows_are_held_against_the_ledger(tmp_path, stored, lost, doubled, is_in_order):
    ledger = a_ledger(tmp_path, "? 0", "+ 0", "? 1", "+ 1", "? 2", "- 2", "? 3")
    found = ledger.differences(stored)
    assert (found.lost, found.doubled, found.is_in_order) == (lost, doubled, is_in_order)


def a_trial(state, reason, exit_code):
    trial = Trial("trial1", 0, {}, {}, 0.0, "job1")
    trial.state, trial.reason, trial.exit_code = state, reason, exit_code
    return trial


@pytest.mark.parametrize(
    ("state", "reason", "exit_code", "ledger", "harm", "is_true"),
    [
        (TrialState.SUCCEEDED, ExitReason.SUCCEEDED, 0, ["end"], Harm(), True),
        (TrialState.SUCCEEDED, ExitReason.SUCCEEDED, 0, [], Harm(), False),
        (TrialState.FAILED, ExitReason.SIGNAL, 137, [], Harm(trials_killed={"trial1"}), True),
        (TrialState.FAILED, ExitReason.SIGNAL, 143, [], Harm(trials_killed={"trial1"}), False),
        (TrialState.FAILED, ExitReason.SIGNAL, 137, [], Harm(), False),
        (TrialState.FAILED, ExitReason.KEEPER_LOST, None, [], Harm(keepers_killed={"job1"}), True),
        (TrialState.FAILED, ExitReason.KEEPER_LOST, None, ["end"], Harm(), False),
        (TrialState.FAILED, ExitReason.NONZERO_EXIT, 1, ["gave up"], Harm(storage_failed=True), True),
        (TrialState.FAILED, ExitReason.MOUNT, 112, [], Harm(storage_failed=True), True),
        (TrialState.FAILED, ExitReason.MOUNT, 112, [], Harm(), False),
        (TrialState.USER_CANCELED, ExitReason.STOPPED_BY_USER, 143, [], Harm(), False),
    ],
)
def test_a_state_is_held_against_what_was_done(tmp_path, state, reason, exit_code, ledger, harm, is_true):
    wrong = state_that_is_false(a_trial(state, reason, exit_code), a_ledger(tmp_path, *ledger), harm)
    assert (not wrong) == is_true


# ---- the site


def test_a_suite_that_is_killed_leaves_nothing(tmp_path):
    import os
    import signal
    import subprocess
    import sys
    from pathlib import Path

    from fault_site import wait_until

    here = Path(__file__).parent
    script = (
        "import sys; from pathlib import Path; from fault_plan import plan_of; from fault_site import Site, missing_here\n"
        "site = Site(plan_of(2, is_short=True, missing=missing_here()), Path(sys.argv[1]))\n"
        "print(site.name, flush=True); sys.stdin.read()"
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(here), str(here.parent / "fakes")])}
    folder = tmp_path / "site"
    folder.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", script, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
        text=True,
    ) as suite:
        name = suite.stdout.readline().strip()
        assert name
        try:
            if not missing_here():
                assert processes_of(name)
                assert len(mounts_of(folder)) == 4
                assert len(networks_of(name)) == 2
        finally:
            suite.send_signal(signal.SIGKILL)
    wait_until(lambda: not (processes_of(name) or mounts_of(folder) or networks_of(name)), "all is gone", 60)
    clean_up(name, folder)  # finds nothing
    shutil.rmtree(folder)
