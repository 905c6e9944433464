"""Run experiments under fault plans, in a short form. `make faults` runs longer plans."""

import contextlib
import dataclasses
import json
import os
import shutil

import pytest
from amounts import amount
from apart import PLANTED
from attempts import RegisteringStore, attempt_id
from deadlines import DEADLINE_S
from fault_checker import RUN_STRIDE, TASK, Harm, Ledger, checked, ledger_path, state_that_is_false
from fault_checkpoints import Continuation, Loaded
from fault_files import FORGED_VALUE, forge_attempts, remove_attempt, state_files, tear
from fault_plan import Fault, Kind, Need, kinds_named, plan_of
from fault_run import _table, run_plan
from fault_site import clean_up, missing_here, mounts_of, networks_of, processes_of
from strangers import NOBODY

from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.ingest import StreamWrite
from nni_manager.domain.trial import Trial, TrialState
from nni_manager.engine.tokens import token_of
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.rows import experiment_row, trial_row
from nni_sdk.records import decode, encode
from trial_keeper.wire.checkpoints import Manifest, checkpoints_to_bytes
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import AttemptFolder, Workspace

# A test takes a minute on an idle machine. The timeout is much longer, because other tests may keep the machine busy.
pytestmark = pytest.mark.timeout(900)

# Together these seeds cover every kind of fault.
SEEDS = (1515, 5407, 15467, 7174, 116)


@pytest.mark.parametrize("seed", amount([pytest.param(SEEDS[0], marks=pytest.mark.smoke), SEEDS[1]], SEEDS))
def test_an_experiment_under_a_fault_plan_stores_every_report_once_with_correct_trial_states(seed):
    outcome = run_plan(plan_of(seed, is_short=True, missing=missing_here()))
    print(outcome.report())
    assert outcome.verdict.is_good, outcome.report()


# These faults reset the link. After a reset, the keeper sends bytes again that the manager has received but not committed.
RESETS = tuple(Fault(at_s, Kind.LINK_RESET, 0.0, 0.0) for at_s in (0.3, 0.8, 1.3, 1.8))
KILLS = tuple(Fault(at_s, Kind.MANAGER_KILLED, 0.1, 0.0) for at_s in (0.5, 1.5))
UNSIGNED = (Fault(0.5, Kind.KEEPER_KILLED_BEFORE_SIGNATURE, 0.0, 0.0),)
UNNAMED = (
    Fault(0.5, Kind.KEEPER_KILLED_AFTER_SIGNATURE, 0.0, 0.0),
    Fault(1.0, Kind.KEEPER_KILLED_BEFORE_MANIFEST, 0.0, 0.0),
)


@pytest.mark.parametrize(
    ("planted", "faults", "seen"),
    [
        ("commits slowly", RESETS, ""),
        ("counts again", RESETS, "doubled"),
        ("leaves out", (), "lost"),
        ("acknowledges early", KILLS, "lost"),
        ("accepts unsigned", UNSIGNED, "wrong"),
        ("accepts early marks", UNNAMED, "doubled"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_the_checker_detects_a_defect_that_the_test_adds_to_the_manager(
    tmp_path, monkeypatch, planted, faults, seen
):
    if planted == "accepts early marks":
        ((module, name, fault),) = PLANTED[planted]
        # The planted defect replaces this function in the manager process. The checker calls the function in the test process, so
        # the test replaces it here too.
        monkeypatch.setattr(module, name, fault)
    # In the long form of the plan, the trials run long enough to report after the faults have started.
    plan = dataclasses.replace(plan_of(2, is_short=False), faults=faults, left_out=())
    verdict = run_plan(plan, tmp_path, planted=planted, trials=4).verdict
    assert verdict.is_good == (not seen), verdict.lines()
    assert not seen or getattr(verdict, seen), verdict.lines()


@pytest.mark.any_machine
def test_a_fault_scheduled_after_the_end_of_the_experiment_is_reported_as_missed(tmp_path):
    late = Fault(6.0, Kind.MANAGER_KILLED, 0.1, 0.0)
    plan = dataclasses.replace(plan_of(2, is_short=True), faults=(late,), left_out=())
    outcome = run_plan(plan, tmp_path, trials=1)
    assert outcome.verdict.is_good, outcome.report()
    assert (outcome.hit, outcome.missed) == ([], ["manager killed: the experiment was over"])
    assert "0 of 1 faults hit something\n  hit nothing: manager killed" in outcome.report()
    *_, kinds, missed = _table([outcome])
    assert kinds.startswith(f"0 of {len(Kind)} kinds of faults hit something; not: manager killed")
    assert missed == "seed 2 hit nothing with manager killed: the experiment was over"


@pytest.mark.smoke
def test_the_seeds_of_this_file_and_the_seeds_1_to_20_cover_every_kind_of_fault():
    plans = [plan_of(seed, is_short=True) for seed in SEEDS]
    assert {kind for plan in plans for kind in plan.kinds} == set(Kind)
    plans = [plan_of(seed, is_short=False) for seed in range(1, 21)]
    assert {kind for plan in plans for kind in plan.kinds} == set(Kind)
    assert {plan.reuses_jobs for plan in plans} == {True, False}
    assert all(3 <= len(plan.faults) <= 8 for plan in plans)


def test_the_same_seed_gives_the_same_plan():
    assert plan_of(17, is_short=False) == plan_of(17, is_short=False)
    assert plan_of(17, is_short=False) != plan_of(18, is_short=False)


def test_a_fault_plan_omits_and_lists_the_fault_kinds_that_are_unavailable_here():
    whole, reduced = (
        plan_of(2, is_short=True, missing=missing) for missing in (frozenset(), frozenset({Need.FUSE}))
    )
    assert set(reduced.faults) < set(whole.faults)
    assert "left out, needs FUSE, libfuse and mfusepy: storage slow" in reduced.lines()


def test_a_plan_draws_only_from_the_given_fault_kinds():
    frozen = (Kind.STOP_WITH_FROZEN_KEEPER, Kind.STOP_WITH_FROZEN_GUARD)
    assert kinds_named("frozen") == frozen
    assert kinds_named("torn, forged") == (Kind.ATTEMPT_FORGED, Kind.STATE_TORN)
    plan = plan_of(17, is_short=True, kinds=frozen)
    assert plan.kinds == {*frozen}
    assert len(plan.faults) >= 3
    assert plan.among == frozen


def test_an_unknown_fault_kind_is_refused_with_a_list_of_the_known_kinds():
    with pytest.raises(ValueError, match=r"cannot find 'torn,froze n' among .*manager killed, "):
        kinds_named("torn,froze n")


# ---- faults that change files


@pytest.fixture
def a_trial_folder(tmp_path):
    folder = ExperimentFolder(tmp_path / "FAULTS")
    folder.make()
    attempt = folder.workspace.attempt(AttemptKey("trial1", attempt_id(0), TASK))
    attempt.stream(Stream.METRICS).parent.mkdir(parents=True)
    attempt.stream(Stream.METRICS).write_bytes(b"one")
    return folder, attempt


def test_the_fault_named_remove_attempt_succeeds_while_a_process_writes_to_the_attempt_folder(
    a_trial_folder, tmp_path
):
    folder, attempt = a_trial_folder
    with attempt.stream(Stream.METRICS).open("ab") as writing:
        assert remove_attempt(folder.workspace, "trial1", attempt.path.parent.name, tmp_path / "aside")
        writing.write(b"two")
    assert list(folder.workspace.trial("trial1").attempts.iterdir()) == []
    assert not (tmp_path / "aside").exists()
    assert not remove_attempt(folder.workspace, "trial1", attempt.path.parent.name, tmp_path / "aside")


def test_the_attempts_that_the_fault_named_forge_attempts_creates_have_a_final_result(a_trial_folder):
    folder, attempt = a_trial_folder
    assert forge_attempts(folder.workspace, "trial1") == ""
    forged = [path for path in attempt.path.parent.parent.iterdir() if path != attempt.path.parent]
    assert len(forged) == 2
    for path in forged:
        made = AttemptFolder(path / TASK)
        assert path.stat().st_uid == (os.geteuid() or NOBODY)
        (record,) = decode(made.stream(Stream.METRICS).read_bytes(), 0).records
        assert (record.value, record.type) == (str(FORGED_VALUE), "FINAL")
        assert json.loads(made.exit_json.read_bytes())["reason"] == ExitReason.SUCCEEDED.value


@pytest.mark.parametrize(
    ("pick", "left", "done"),
    [(0.0, b"", "emptied"), (0.26, b'{"pi', "cut in half"), (0.99, b'{"addr', "cut in half")],
)
def test_the_fault_for_torn_files_empties_or_halves_exactly_one_state_file(a_trial_folder, pick, left, done):
    folder, _ = a_trial_folder
    (folder.jobs / "job1.json").write_bytes(b'{"pid":1}')
    folder.workspace.manager_json.write_bytes(b'{"addresses"}')
    files = state_files(folder, folder.workspace)
    assert [path.name for path in files] == ["job1.json", "manager.json"]
    said = tear(files, pick)
    torn = files[pick > 0.5]
    assert torn.read_bytes() == left
    assert said == f"{torn.parent.name}/{torn.name} was {done}"


# ---- the checker


def a_ledger(tmp_path, *lines):
    path = tmp_path / "ledger"
    path.write_text("".join(f"{line}\n" for line in lines))
    return Ledger.read(path)


@pytest.mark.parametrize(
    ("stored", "lost", "doubled", "is_in_order"),
    [
        (["0", "1"], 0, 0, True),
        # The ledger ends while the trial reports 3, because the trial was killed. So 3 may be stored or missing.
        (["0", "1", "3"], 0, 0, True),
        (["0"], 1, 0, True),
        (["0", "0", "1"], 0, 1, True),
        (["0", "1", "3", "3"], 0, 1, True),
        # The call that reported 2 raised an exception, so 2 must not be stored. The ledger counts the row as doubled.
        (["0", "1", "2"], 0, 1, True),
        (["1", "0"], 0, 0, False),
        (["3", "0", "1"], 0, 0, False),
    ],
)
def test_the_ledger_counts_lost_doubled_and_misordered_rows(tmp_path, stored, lost, doubled, is_in_order):
    ledger = a_ledger(tmp_path, "? 0", "+ 0", "? 1", "+ 1", "? 2", "- 2", "? 3")
    found = ledger.differences(stored)
    assert (found.lost, found.doubled, found.is_in_order) == (lost, doubled, is_in_order)


def a_trial(state, reason, exit_code):
    trial = Trial("trial1", 0, {}, {}, 0.0, "job1")
    trial.state, trial.run.reason, trial.run.exit_code = state, reason, exit_code
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
        (
            TrialState.FAILED,
            ExitReason.KEEPER_LOST,
            None,
            [],
            Harm(keepers_killed={"job1"}, max_retries=3),
            False,
        ),
        (
            TrialState.FAILED,
            ExitReason.PREEMPTED,
            None,
            [],
            Harm(preempted={"trial1": 1}, max_retries=3),
            False,
        ),
        (TrialState.FAILED, ExitReason.NONZERO_EXIT, 1, ["gave up"], Harm(storage_failed=True), True),
        (TrialState.FAILED, ExitReason.MOUNT, 112, [], Harm(storage_failed=True), True),
        (TrialState.FAILED, ExitReason.MOUNT, 112, [], Harm(), False),
        (TrialState.USER_CANCELED, ExitReason.STOPPED_BY_USER, 143, [], Harm(), False),
        (TrialState.USER_CANCELED, ExitReason.STOPPED_BY_USER, 143, [], Harm(stopped={"trial1"}), True),
        (TrialState.FAILED, ExitReason.JOB_LOST, None, [], Harm(stopped={"trial1"}), True),
        (TrialState.FAILED, ExitReason.NONZERO_EXIT, 1, [], Harm(stopped={"trial1"}), False),
        (TrialState.FAILED, ExitReason.JOB_LOST, None, [], Harm(stopped={"trial2"}), False),
        (TrialState.FAILED, ExitReason.NONZERO_EXIT, 1, [], Harm(attempts_removed={"trial1"}), True),
        (TrialState.SUCCEEDED, ExitReason.SUCCEEDED, 0, [], Harm(attempts_removed={"trial1"}), False),
        (
            TrialState.USER_CANCELED,
            ExitReason.STOPPED_BY_USER,
            1,
            [],
            Harm(attempts_removed={"trial1"}),
            False,
        ),
    ],
)
def test_the_checker_accepts_an_unexpected_trial_state_only_if_injected_faults_explain_it(
    tmp_path, state, reason, exit_code, ledger, harm, is_true
):
    wrong = state_that_is_false(a_trial(state, reason, exit_code), a_ledger(tmp_path, *ledger), harm)
    assert (not wrong) == is_true


KILLED = Harm(trials_killed={"trial1"}, keepers_killed={"job1"}, max_retries=3)
KEEPER_KILLED = dataclasses.replace(KILLED, trials_killed=())
UNWRITABLE = "cannot write to the workspace: No space left on device"
AWAY = Harm(storage_failed=True, manager_was_away=True)
# Each entry describes a trial state that the faults explain, and a list of changes. After each change, the faults no longer
# explain the state, and the checker must report an error.
EXCEPTIONS = {
    "a signal to a trial whose keeper was killed too has any exit code": (
        {"reason": ExitReason.SIGNAL, "exit_code": 143, "harm": KILLED},
        [{"harm": KEEPER_KILLED}, {"harm": Harm(trials_killed={"trial1"})}],
    ),
    "a trial that was killed with its keeper is not retried": (
        {"reason": ExitReason.KEEPER_LOST, "harm": KILLED},
        [{"harm": KEEPER_KILLED}, {"harm": Harm(trials_killed={"trial1"})}],
    ),
    "a trial that had ended before its keeper was killed is not retried": (
        {"reason": ExitReason.JOB_LOST, "ledger": ["end"], "harm": KEEPER_KILLED},
        [{"ledger": []}, {"harm": Harm()}],
    ),
    "a trial that had given up before its keeper was killed is not retried": (
        {"reason": ExitReason.KEEPER_LOST, "ledger": ["gave up"], "harm": KEEPER_KILLED},
        [{"ledger": []}, {"harm": Harm()}],
    ),
    "a trial whose retries are used up ends with its keeper": (
        {"reason": ExitReason.KEEPER_LOST, "retries": 3, "harm": KEEPER_KILLED},
        [{"retries": 2}, {"harm": Harm(max_retries=3)}],
    ),
    "a keeper without a manager and a storage says what failed": (
        {"reason": ExitReason.KEEPER_LOST, "message": UNWRITABLE, "harm": AWAY},
        [
            {"message": "its keeper ended with exit code 113"},
            {"ledger": ["end"]},
            {"harm": Harm(storage_failed=True)},
            {"harm": Harm(manager_was_away=True)},
        ],
    ),
    "a trial gives up with an exit code": (
        {"reason": ExitReason.NONZERO_EXIT, "exit_code": 1, "ledger": ["gave up"], "harm": Harm()},
        [{"ledger": []}, {"reason": ExitReason.SIGNAL}],
    ),
    "a trial does not start on a failed storage": (
        {"reason": ExitReason.COULD_NOT_START, "harm": Harm(storage_failed=True)},
        [{"ledger": ["end"]}, {"harm": Harm()}, {"reason": ExitReason.KEEPER_LOST}],
    ),
    "a stop of the experiment may look like an early end": (
        {
            "state": TrialState.EARLY_STOPPED,
            "reason": ExitReason.EARLY_STOPPED,
            "harm": Harm(stopped={"trial1"}),
        },
        [{"harm": Harm()}, {"state": TrialState.SYS_CANCELED}],
    ),
    "a keeper is lost during a stop": (
        {"reason": ExitReason.KEEPER_LOST, "harm": Harm(stopped={"trial1"})},
        [{"harm": Harm(stopped={"trial2"})}, {"reason": ExitReason.MOUNT}],
    ),
}


@pytest.mark.parametrize(("allowed", "refused"), EXCEPTIONS.values(), ids=EXCEPTIONS)
def test_the_checker_accepts_each_exceptional_trial_state_only_under_the_conditions_that_explain_it(
    tmp_path, allowed, refused
):
    def errors(state=TrialState.FAILED, exit_code=None, ledger=(), message="", retries=0, *, reason, harm):
        trial = a_trial(state, reason, exit_code)
        trial.run.message, trial.retries = message, retries
        return state_that_is_false(trial, a_ledger(tmp_path, *ledger), harm)

    assert errors(**allowed) == []
    for changes in refused:
        assert errors(**allowed | changes) != [], changes


NO_HARM, REMOVED = Harm(), Harm(attempts_removed={"trial1"})


@pytest.fixture
def a_run(tmp_path):
    """Return a function that applies `changes` to a correct run, checks the run, and returns the errors of the checker. The run
    has one trial, which reported 0, 1 and finally 2, and printed one line.
    """

    def wrong_in(
        final_at=2,
        log=b"a line\n",
        reported=(0, 1, 2),
        runs=(0,),
        harm=NO_HARM,
        failed_saves=0,
        torn=b"",
        unstored=0,
        has_ended=True,
        **changes,
    ):
        folder, ledgers = ExperimentFolder(tmp_path / "FAULTS"), tmp_path / "ledgers"
        folder.make()
        ledgers.mkdir()
        trial = a_trial(TrialState.SUCCEEDED, ExitReason.SUCCEEDED, 0)
        trial.run.attempt, trial.run.reporter, trial.run.final, trial.run.value = 0, TASK, "2", 2.0
        for name, value in changes.items():
            setattr(trial if hasattr(trial, name) else trial.run, name, value)
        key = AttemptKey(trial.trial_id, attempt_id(0), TASK)
        for run in runs:
            values = (run * RUN_STRIDE + value for value in range(3))
            lines = "".join(f"? {value}\n+ {value}\n" for value in values)
            ledger_path(ledgers, trial.trial_id, attempt_id(0), run).write_text(
                lines + "not saved\n" * failed_saves + "end\n" * has_ended
            )
        metrics = b"".join(
            encode(0, trial.trial_id, "FINAL" if value == final_at else "PERIODICAL", value, value)
            for value in reported
        )
        # `unstored`: the number of complete records at the end of the file that the manager has not stored.
        more = encode(0, trial.trial_id, "PERIODICAL", 3, 3) * unstored
        written = {Stream.METRICS: metrics + more + torn, Stream.STDOUT: b"a line\n"}
        for stream, content in written.items():
            file = folder.workspace.attempt(key).stream(stream)
            file.parent.mkdir(parents=True)
            file.write_bytes(content)
        store = RegisteringStore.create(folder.database, folder.collected_logs, "FAULTS", "{}", b"", 0.0)
        with contextlib.closing(store):
            rows = tuple(decode(metrics, 0).records)
            writes = [
                trial_row(trial),
                StreamWrite(key, Stream.METRICS, 0, len(metrics), records=rows),
                StreamWrite(key, Stream.STDOUT, 0, len(log), data=log),
                experiment_row(ExperimentState.DONE, "", 1.0, 2.0, any_compatible_keeper=True),
            ]
            store.commit(writes, 1.0)
        return checked(folder, folder.workspace, ledgers, harm, 1, 2.0).wrong

    return wrong_in


def test_the_checker_reports_no_error_for_a_correct_run(a_run):
    assert a_run() == []


@pytest.mark.parametrize(
    ("stored", "wrong"),
    [
        ({"log": b"a Line\n"}, "its stdout is not what it wrote, from byte 2 of 7 on"),
        ({"final": "1", "value": 1.0}, "its result is '1', in numbers 1.0, and it reported 2"),
        ({"value": 1.0}, "its result is '2', in numbers 1.0"),
        ({"final": None, "value": None}, "its result is None"),
        ({"final_at": 1}, "not the last of its reports alone"),
        ({"final_at": 3}, "2 intermediate reports, and 3 are counted"),
        (
            {
                "state": TrialState.USER_CANCELED,
                "final": None,
                "value": None,
                "harm": Harm(stopped={"trial1"}),
            },
            "its result is None",
        ),
        ({"preemptions": 1, "harm": Harm(max_retries=3)}, "preempted 0 times, and 1 are counted"),
        ({"retries": 1, "harm": Harm(max_retries=3)}, "retried 1 times, and no keeper was killed"),
    ],
    ids=str,
)
def test_the_checker_reports_stored_data_that_differs_from_the_files_of_the_trial(a_run, stored, wrong):
    assert wrong in " ".join(a_run(**stored))


@pytest.mark.parametrize(
    ("stored", "excused"),
    [
        ({"preemptions": 1}, Harm(max_retries=3, preempted={"trial1": 1})),
        ({"retries": 1}, Harm(max_retries=3, keepers_killed={"job2"})),
        ({"retries": 1}, Harm(max_retries=3, manager_was_away=True)),
        ({"failed_saves": 1}, Harm(max_retries=3, storage_failed=True)),
        ({"failed_saves": 1}, Harm(max_retries=3, storage_is_late=True)),
        # If the last record is incomplete, the manager waits for the rest of it. So the checker must accept that the record is
        # not stored.
        ({"torn": b"ME000"}, NO_HARM),
    ],
    ids=str,
)
def test_the_checker_accepts_deviations_that_are_consistent_with_the_injected_faults(a_run, stored, excused):
    assert a_run(**stored, harm=excused) == []


@pytest.mark.parametrize(
    ("stored", "wrong"),
    [
        (
            {"preemptions": 2, "harm": Harm(max_retries=3, preempted={"trial1": 1})},
            "1 times, and 2 are counted",
        ),
        ({"failed_saves": 1, "harm": Harm(max_retries=3)}, "it could not save 1 checkpoints"),
        ({"unstored": 1}, "bytes of its metrics are durable, and the file has"),
        # A trial whose command did not finish may be canceled. It must never be SUCCEEDED.
        ({"state": TrialState.SUCCEEDED, "has_ended": False}, "its command never came to its end"),
    ],
    ids=str,
)
def test_the_checker_reports_deviations_that_no_injected_fault_explains(a_run, stored, wrong):
    assert wrong in " ".join(a_run(**stored))


def test_the_checker_reports_an_attempt_that_contains_rows_of_two_runs(a_run):
    second = 3 * RUN_STRIDE
    wrong = " ".join(a_run(reported=(0, 1, second, second + 1), runs=(0, 3), harm=REMOVED))
    assert "its rows are those of 2 runs" in wrong
    assert "its attempt 0 ran 2 times" in wrong
    assert "1 reports lost, 2 doubled" in wrong


def test_the_checker_counts_reports_as_lost_if_their_trial_has_no_attempt(a_run):
    assert "3 reports lost" in " ".join(a_run(reported=(), attempt=None, state=TrialState.FAILED))


def test_the_checker_reports_forged_rows_of_a_removed_attempt(a_run):
    assert "2 doubled" in " ".join(a_run(reported=(FORGED_VALUE, FORGED_VALUE), harm=REMOVED))


def test_the_checker_accepts_the_loss_of_the_last_reports_of_a_removed_attempt(a_run):
    assert a_run(reported=(0,), harm=REMOVED) == []


@pytest.mark.parametrize("reported", [(1, 2), (0, 2), (0, 0), (1, 0)])
def test_the_checker_reports_rows_of_a_removed_attempt_that_are_no_prefix_of_its_reports(a_run, reported):
    assert a_run(reported=reported, harm=REMOVED) != []


# ---- checkpoints


@pytest.fixture
def a_continuation(tmp_path):
    """Return a function that checks the checkpoint which a third attempt loads, and returns the errors of the checker. The first
    attempt reported 1, 2, 3, and its keeper signed checkpoint 1 after two values. The second attempt reported 1, 2, 3, 4, and
    its keeper signed checkpoint 2 after three values.
    """
    storage, secret = Workspace(tmp_path / "FAULTS"), b"secret"
    first, second = (AttemptKey("trial1", attempt_id(number), TASK) for number in (0, 1))
    for key, name, reports in ((first, "000001", 2), (second, "000002", 3)):
        storage.attempt(key).path.mkdir(parents=True)
        content = checkpoints_to_bytes(
            "FAULTS", "job1", key, [Manifest(name, "", "00", reports)], token_of(secret, "job1")
        )
        storage.attempt(key).checkpoints_json.write_bytes(content)
    made = {first.attempt_id: ["1", "2", "3"], second.attempt_id: ["1", "2", "3", "4"]}

    def errors(loaded, is_newest_required=True):
        start = (
            None if loaded is None else Loaded.read(loaded.format(first=attempt_id(0), second=attempt_id(1)))
        )
        continuation = Continuation(storage, secret, start, (first, second), lambda attempt: [made[attempt]])
        return " ".join(continuation.errors(is_newest_required=is_newest_required))

    return errors


def test_the_checker_accepts_an_attempt_that_continues_from_the_newest_signed_checkpoint(a_continuation):
    assert a_continuation("{second} 000002 1 2 3") == ""


@pytest.mark.parametrize(
    ("loaded", "wrong"),
    [
        (None, "started at its first step, and checkpoint 000002 of"),
        ("{first} 000001 1 2", "and 000002 of"),
        ("{second} 000003 1 2 3", "which no keeper has signed"),
        ("{second} 000002 1 2", "with 2 values, and 3 are signed"),
        ("{second} 000002 1 2 4", "has not reported its 3 values"),
    ],
)
def test_the_checker_reports_an_attempt_that_does_not_continue_from_the_newest_signed_checkpoint(
    a_continuation, loaded, wrong
):
    assert wrong in a_continuation(loaded)


def test_the_checker_accepts_an_older_checkpoint_but_no_unsigned_checkpoint_if_storage_is_slow(
    a_continuation,
):
    assert a_continuation(None, is_newest_required=False) == ""
    assert a_continuation("{first} 000001 1 2", is_newest_required=False) == ""
    assert "no keeper has signed" in a_continuation("{second} 000003 1 2 3", is_newest_required=False)


def test_the_ledger_of_a_continued_trial_contains_the_values_of_the_checkpoint_and_the_new_reports(tmp_path):
    ledger = a_ledger(tmp_path, f"< {attempt_id(0)} 000001 10 11", "? 32", "+ 32", "not saved", "? 33")
    assert (ledger.made, ledger.own, ledger.failed_saves) == (["10", "11", "32"], 1, 1)
    assert ledger.differences(["10", "11", "32"]).is_in_order
    assert ledger.differences(["10", "11", "12", "32"]).doubled == 1
    assert ledger.differences(["32"]).lost == 2


# ---- the site


@pytest.mark.any_machine
def test_no_process_or_mount_or_network_remains_after_a_run_of_a_fault_plan_is_killed(tmp_path):
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
    wait_until(
        lambda: not (processes_of(name) or mounts_of(folder) or networks_of(name)),
        "everything is removed",
        DEADLINE_S,
    )
    # The janitor has removed everything, so this call must find nothing and raise nothing.
    clean_up(name, folder)
    shutil.rmtree(folder)
