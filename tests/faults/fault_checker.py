"""Check a run: compare the trials' own records with the data that the manager stored.

A trial records each report before and after the report's call, in a ledger that no fault affects. If the call returned, the
report must be stored exactly once. If the call raised, the report must not be stored. If the trial was killed during the call,
the report may be stored once. Reports must be stored in the order of the calls.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from attempts import metrics_of
from fault_checkpoints import Continuation, Loaded

from nni_manager.domain.trial import Trial, TrialState
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader
from nni_manager.store.rows import MetricRow
from nni_manager.store.writer import log_path
from nni_sdk.records import decode
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import Workspace

TASK = "main-0"
BEGUN, MADE, REFUSED, ENDED, GAVE_UP = "?", "+", "-", "end", "gave up"
# Each run of a command reports numbers from its own range, so that a row shows which run reported it.
RUN_STRIDE = 10_000
# A trial that cannot start or run because of a storage fault has one of these exit reasons.
_STORAGE_REASONS = (ExitReason.MOUNT, ExitReason.COULD_NOT_START, ExitReason.NONZERO_EXIT)


@dataclass(slots=True)
class Ledger:
    """The ledger of one attempt. `made`: the reports whose call returned. `open`: a report whose call neither returned nor
    raised.
    """

    made: list[str] = field(default_factory=list)
    open: str | None = None
    refused: list[str] = field(default_factory=list)
    has_ended: bool = False
    gave_up: bool = False
    loaded: Loaded | None = None
    """The checkpoint from which the attempt continued. `made` starts with the values of the checkpoint."""
    failed_saves: int = 0

    @property
    def own(self) -> int:
        """The number of reports that this attempt made itself, without those in the checkpoint from which it continued."""
        return len(self.made) - (0 if self.loaded is None else len(self.loaded.values))

    @classmethod
    def read(cls, path: Path) -> "Ledger":
        ledger = cls()
        for line in path.read_text().splitlines():
            mark, _, value = line.partition(" ")
            match mark:
                case "<":
                    ledger.loaded = Loaded.read(value)
                    ledger.made += ledger.loaded.values
                case "not":
                    ledger.failed_saves += 1
                case "?":
                    ledger.open = value
                case "+":
                    ledger.made.append(value)
                    ledger.open = None
                case "-":
                    ledger.refused.append(value)
                    ledger.open = None
                case "end":
                    ledger.has_ended = True
                case "gave":
                    ledger.gave_up = True
        return ledger

    def differences(self, stored: list[str]) -> "Differences":
        """The differences between this ledger and the stored rows of the attempt."""
        expected, found = Counter(self.made), Counter(stored)
        lost = sum((expected - found).values())
        surplus = found - expected
        if self.open is not None and surplus[self.open]:
            surplus[self.open] -= 1
        doubled = sum(surplus.values())
        may_follow = [] if self.open is None else [self.open]
        is_in_order = bool(lost or doubled) or stored in (self.made, [*self.made, *may_follow])
        return Differences(lost, doubled, is_in_order)


@dataclass(frozen=True, slots=True)
class Differences:
    lost: int = 0
    doubled: int = 0
    is_in_order: bool = True


@dataclass(frozen=True, slots=True)
class Harm:
    """The faults that may make a trial fail."""

    trials_killed: Collection[str] = ()
    keepers_killed: Collection[str] = ()
    """The ids of jobs whose keeper was killed."""
    storage_failed: bool = False
    attempts_removed: Collection[str] = ()
    """The ids of trials whose attempt folder was removed."""
    stopped: Collection[str] = ()
    """The ids of trials that a stop of the experiment may have cancelled."""
    manager_was_away: bool = False
    """The manager was stopped for a time. Then a job's exit code is unknown, and the keeper's message about the storage
    counts.
    """
    max_retries: int = 0
    """The maximum number of new attempts of a trial after its keeper was killed."""
    preempted: Mapping[str, int] = field(default_factory=dict)
    """How often the job of each trial was preempted."""
    storage_is_late: bool = False
    """Whether the storage may have hidden new files from readers for a time."""


@dataclass(slots=True)
class Verdict:
    """Whether a run was correct; `wrong` lists all violations."""

    reports: int = 0
    refused: int = 0
    lost: int = 0
    doubled: int = 0
    removed: int = 0
    """The number of reports that were removed with their attempt's folder before the keeper replicated them."""
    states: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.doubled or self.wrong)

    def lines(self) -> list[str]:
        states = ", ".join(f"{count} {state}" for state, count in sorted(self.states.items()))
        removed = [f"{self.removed} reports were removed with their attempt's directory"] * bool(self.removed)
        return [
            f"{self.reports} reports made, {self.lost} lost, {self.doubled} doubled; {self.refused} were refused by the storage",
            *removed,
            f"trials: {states or 'none'}",
            *(f"wrong: {each}" for each in self.wrong),
        ]


def ledger_path(ledgers: Path, trial_id: str, attempt: int | str, run: int) -> Path:
    """The ledger file of one run. Each attempt has exactly one run. `attempt`: the name of the attempt's folder."""
    return ledgers / f"{trial_id}.{attempt}.{run}"


def _ledgers_of(ledgers: Path, trial: Trial, attempt_id: str | None) -> dict[int, Ledger]:
    """The ledgers of the attempt that determines the result, earliest run first. If the trial has no attempt, the ledgers of all
    runs.
    """
    attempt = attempt_id or "*"
    paths = sorted(ledgers.glob(f"{trial.trial_id}.{attempt}.*"), key=lambda path: path.stat().st_mtime_ns)
    return {int(path.suffix[1:]): Ledger.read(path) for path in paths}


def checked(
    folder: ExperimentFolder,
    storage: Workspace,
    ledgers: Path,
    harm: Harm,
    trial_count: int,
    took_s: float,
) -> Verdict:
    """Check all data of an ended experiment.

    `storage`: the workspace under a path without injected faults. `took_s`: the duration of the run, measured by a clock that no
    fault changes.
    """
    verdict = Verdict()
    with StoreReader(folder.database) as reader:
        experiment = reader.experiment()
        if experiment.state.value != "DONE":
            verdict.wrong.append(f"the experiment is {experiment.state.value} {experiment.error}")
        if not 0 < experiment.active_s <= took_s:
            verdict.wrong.append(f"it says that it ran for {experiment.active_s:.1f} s of {took_s:.1f} s")
        trials = reader.trials()
        if len(trials) != trial_count:
            verdict.wrong.append(f"there are {len(trials)} trials, not {trial_count}")
        for trial in trials:
            verdict.states[trial.state.value] += 1
            _check_trial(verdict, reader, folder, storage, ledgers, harm, trial)
    known = {trial.trial_id for trial in trials}
    verdict.wrong += [
        f"{path.name} reported, and no such trial is known"
        for path in ledgers.iterdir()
        if path.name.partition(".")[0] not in known
    ]
    return verdict


def _check_trial(
    verdict: Verdict,
    reader: StoreReader,
    folder: ExperimentFolder,
    storage: Workspace,
    ledgers: Path,
    harm: Harm,
    trial: Trial,
) -> None:
    rows = metrics_of(reader, trial.trial_id)
    registered = reader.attempts(trial.trial_id)
    counts = next(
        (each.key for each in registered if (each.number, each.key.task) == (trial.run.attempt, TASK)), None
    )
    runs = _ledgers_of(ledgers, trial, counts and counts.attempt_id)
    stored_runs = {_run_of(row.value) for row in rows}
    ledger = next((runs[run] for run in (*stored_runs, *reversed(runs)) if run in runs), Ledger())
    stored = [row.value for row in rows]
    differences = ledger.differences(stored)
    allowed_runs = {_run_of(value) for value in (*ledger.made, *filter(None, [ledger.open]))}
    # If an attempt continued from a removed attempt, the record that marks the checkpoint may be lost. Then only the attempt's
    # own reports count.
    own = ledger.made[len(ledger.made) - ledger.own :]
    if trial.trial_id in harm.attempts_removed and stored in (ledger.made[: len(stored)], own):
        verdict.removed += differences.lost
        differences = Differences()
    verdict.reports += ledger.own
    verdict.refused += len(ledger.refused)
    verdict.lost += differences.lost
    verdict.doubled += differences.doubled
    wrong = []
    if len(stored_runs) > 1 and not stored_runs <= allowed_runs:
        wrong.append(f"its rows are those of {len(stored_runs)} runs")
    if trial.run.attempt is not None and len(runs) > 1:
        wrong.append(f"its attempt {trial.run.attempt} ran {len(runs)} times")
    if not differences.is_in_order:
        wrong.append("its rows are not in the order of its reports")
    if differences.lost or differences.doubled:
        wrong.append(f"{differences.lost} reports lost, {differences.doubled} doubled")
    if trial.trial_id not in harm.attempts_removed:
        if counts is not None:
            wrong += offsets_that_differ(storage, counts, reader.offsets(counts))
            wrong += _logs_that_differ(folder, storage, counts)
            # A trial that was stopped before its first report may not have loaded its checkpoint yet.
            if harm.max_retries and (ledger.made or ledger.open):
                earlier = (each.key for each in registered if each.number < (trial.run.attempt or 0))
                wrong += Continuation(
                    storage,
                    reader.experiment().secret,
                    ledger.loaded,
                    tuple(key for key in earlier if key.task == TASK),
                    lambda attempt: (each.made for each in _ledgers_of(ledgers, trial, attempt).values()),
                ).errors(is_newest_required=not harm.storage_is_late)
                wrong += _restarts_that_are_false(trial, ledger, harm)
        wrong += _results_that_differ(trial, ledger, rows)
    wrong += state_that_is_false(trial, ledger, harm)
    verdict.wrong += [f"trial {trial.trial_id} ({trial.sequence_id}): {each}" for each in wrong]


def _run_of(value: str) -> int:
    return int(float(value)) // RUN_STRIDE


def _restarts_that_are_false(trial: Trial, ledger: Ledger, harm: Harm) -> list[str]:
    wrong = []
    preempted = harm.preempted.get(trial.trial_id, 0)
    if trial.preemptions > preempted:
        wrong.append(f"it was preempted {preempted} times, and {trial.preemptions} are counted")
    if trial.retries and not (harm.keepers_killed or harm.manager_was_away):
        wrong.append(f"it was retried {trial.retries} times, and no keeper was killed")
    if ledger.failed_saves and not (harm.storage_failed or harm.storage_is_late):
        wrong.append(f"it could not save {ledger.failed_saves} checkpoints")
    return wrong


def offsets_that_differ(storage: Workspace, key: AttemptKey, durable: Mapping[Stream, int]) -> list[str]:
    wrong = []
    attempt = storage.attempt(key)
    for stream in (Stream.METRICS, Stream.STDOUT, Stream.STDERR):
        file = attempt.stream(stream)
        content = file.read_bytes() if file.exists() else b""
        offset = durable.get(stream, 0)
        # The last record of the metrics may be incomplete. If the attempt's end is unknown, the manager waits for the rest of
        # this record, so the record may be missing from the durable bytes.
        whole = decode(content, 0).consumed if stream is Stream.METRICS else len(content)
        if offset not in (len(content), whole):
            wrong.append(f"{offset} bytes of its {stream.value} are durable, and the file has {len(content)}")
    return wrong


def _logs_that_differ(folder: ExperimentFolder, storage: Workspace, key: AttemptKey) -> list[str]:
    wrong = []
    for stream in (Stream.STDOUT, Stream.STDERR):
        written, collected = storage.attempt(key).stream(stream), log_path(folder.collected_logs, key, stream)
        here, there = (path.read_bytes() if path.exists() else b"" for path in (written, collected))
        if here != there:
            place = next(
                (n for n, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1]), None
            )
            place = min(len(here), len(there)) if place is None else place
            wrong.append(f"its {stream.value} is not what it wrote, from byte {place} of {len(here)} on")
    return wrong


def _results_that_differ(trial: Trial, ledger: Ledger, rows: list[MetricRow]) -> list[str]:
    """Compare the final result. If a trial has succeeded, or if it was cancelled after its command had finished, the final result
    must be its last report.
    """
    is_complete = trial.state is TrialState.SUCCEEDED
    is_complete |= trial.state is TrialState.USER_CANCELED and ledger.has_ended
    if not is_complete or not ledger.made:
        return []
    wrong, final, intermediates = [], ledger.made[-1], len(ledger.made) - 1
    if (trial.run.final, trial.run.value) != (final, float(final)):
        wrong.append(
            f"its result is {trial.run.final!r}, in numbers {trial.run.value}, and it reported {final}"
        )
    if [row.is_final for row in rows] != [False] * intermediates + [True]:
        wrong.append("not the last of its reports alone is stored as the final one")
    if trial.run.intermediate_count != intermediates:
        wrong.append(
            f"it made {intermediates} intermediate reports, and {trial.run.intermediate_count} are counted"
        )
    return wrong


def state_that_is_false(trial: Trial, ledger: Ledger, harm: Harm) -> list[str]:
    """Why the state of a trial is wrong; empty if it is correct."""
    was_killed = trial.trial_id in harm.trials_killed
    keeper_was_killed = trial.job_id in harm.keepers_killed
    reason, exit_code = trial.run.reason and trial.run.reason.value, trial.run.exit_code
    told = f"it is {trial.state.value} ({reason}, exit code {exit_code}: {trial.run.message!r})"
    if trial.state is TrialState.SUCCEEDED:
        return [] if ledger.has_ended else [f"{told}, and its command never came to its end"]
    if trial.trial_id in harm.stopped and trial.state in (TrialState.USER_CANCELED, TrialState.EARLY_STOPPED):
        return []
    if trial.state is not TrialState.FAILED:
        return [f"{told}, and nobody stopped it"]
    if trial.trial_id in harm.attempts_removed:
        return []
    match trial.run.reason:
        # During a stop, a manager may be unable to record that a job is lost, and may find the lost job only after the stop. So
        # such an end is allowed.
        case ExitReason.KEEPER_LOST | ExitReason.JOB_LOST if trial.trial_id in harm.stopped:
            return []
        case ExitReason.SIGNAL if was_killed and not keeper_was_killed:
            return [] if trial.run.exit_code == 137 else [f"{told}, and it was killed by signal 9"]
        case ExitReason.SIGNAL if was_killed:
            return []
        case ExitReason.KEEPER_LOST | ExitReason.JOB_LOST if keeper_was_killed:
            may_fail = trial.retries == harm.max_retries or was_killed or ledger.has_ended or ledger.gave_up
            return [] if may_fail else [f"{told}, and it was not retried"]
        case ExitReason.KEEPER_LOST if harm.storage_failed and harm.manager_was_away and not ledger.has_ended:
            return (
                []
                if "cannot write to the workspace" in trial.run.message
                else [f"{told}, and that is all it says"]
            )
        case ExitReason.NONZERO_EXIT if ledger.gave_up:
            return []
        case reason if reason in _STORAGE_REASONS and harm.storage_failed and not ledger.has_ended:
            return []
    return [f"{told}, and that is not what happened to it: {_told(ledger, was_killed, keeper_was_killed)}"]


def _told(ledger: Ledger, was_killed: bool, keeper_was_killed: bool) -> str:
    facts = {
        "it was killed": was_killed,
        "its keeper was killed": keeper_was_killed,
        "it came to its end": ledger.has_ended,
        "it gave up": ledger.gave_up,
        f"{len(ledger.refused)} of its reports were refused": bool(ledger.refused),
    }
    return ", ".join(fact for fact, is_so in facts.items() if is_so) or "nothing was done to it"
