"""One experiment on a site, with restarts of its manager and with faults.

The file is long because all faults act on this one running experiment.
"""

import contextlib
import json
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from apart import Apart
from deadlines import scaled_s
from fault_checker import RUN_STRIDE, TASK, Harm
from fault_checkpoints import Holds, is_newest_signed
from fault_files import (
    append_to_metrics,
    forge_attempts,
    put_special_files,
    remove_attempt,
    state_files,
    tear,
)
from fault_plan import IN_CHECKPOINTS, STOPS, Fault, Kind, Plan
from fault_processes import running_guards, running_keepers, running_trials
from fault_site import Site, wait_until
from fault_train import TRAIN

from nni_manager.config.reader import read_experiment_file
from nni_manager.domain.experiment import ExperimentState
from nni_manager.domain.trial import Trial
from nni_manager.errors import NniManagerError
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader
from nni_manager.store.writer import Store
from trial_keeper.wire.messages import AttemptKey
from trial_keeper.wire.workspace import Workspace

REPORTS, SHORT_REPORTS = 1000, 400
# Checkpoints are rare, because each takes 30 system calls and a slow storage delays each call.
_SAVES_EVERY = 40
# A fault that hits a trial inside save_checkpoint tries this many running trials in turn, because a trial may end without a
# further checkpoint.
_TRIALS_TO_CATCH = 5
# This exceeds the number of faults of one trial in any plan, so no trial fails because its retries are used up.
_MAX_RETRIES = 20
_FAKES = Path(__file__).parent.parent / "fakes"
_READY_TIMEOUT_S = scaled_s(60.0)
# A keeper that failed to connect for a long time retries within a minute. The rest of the timeout is for a busy machine.
DONE_TIMEOUT_S = scaled_s(240.0)
END_TIMEOUT_S = scaled_s(90.0)
# This is the time limit for the exit of a manager. The exit does not wait for running trials.
_LEAVES_TIMEOUT_S = scaled_s(30.0)
# Stopping an experiment never takes this long: each step has a deadline, and nnictl gives up after the last step.
_STOPPED_TIMEOUT_S = scaled_s(150.0)
_RUNS_TIMEOUT_S = 5.0
_STORAGE_KINDS = frozenset({Kind.WORKSPACE_FULL, Kind.WORKSPACE_READ_ONLY})
_KEEPS_MANAGERS_OUT = _STORAGE_KINDS | {Kind.MANAGER_DISK_FULL}
_LATE_KINDS = _STORAGE_KINDS | {Kind.STORAGE_SLOW, Kind.STORAGE_STALE}
_MANAGER_LEAVES_KINDS = STOPS | {
    Kind.MANAGER_KILLED,
    Kind.MANAGER_MOVED,
    Kind.MANAGER_ENDED,
    Kind.STATE_TORN,
    Kind.MANAGER_KILLED_AT_NOTICE,
}
# These functions attack the attempts of a trial as another user.
_PUT = {Kind.ATTEMPT_FORGED: forge_attempts, Kind.SPECIAL_FILES: put_special_files}
# This script makes the same call as `nnictl stop`. It prints an error and does not fail, because a fault may prevent the stop
# from recording all states.
_STOP = """
import sys
from pathlib import Path
from nni_manager.client.experiments import known_experiment
from nni_manager.client.manager_stop import stop_experiment
from nni_manager.errors import NniManagerError
from nni_manager.store.folders import ExperimentFolder

try:
    stop_experiment(known_experiment(ExperimentFolder(Path(sys.argv[1]))))
except NniManagerError as error:
    print(error)
"""
# This script makes the same call as `nnictl trial kill`. The call fails if the manager is unreachable.
_CANCEL = """
import sys
from pathlib import Path
from nni_manager.client.manager_client import ManagerClient
from nni_manager.errors import NniManagerError
from nni_manager.store.folders import ExperimentFolder

folder = ExperimentFolder(Path(sys.argv[1]))
try:
    ManagerClient(folder.experiment_id, folder.process()).delete("/trial-jobs", sys.argv[2])
except NniManagerError as error:
    print(error)
"""
_BUG = re.compile(r"\bbug\b", re.IGNORECASE)


@dataclass(slots=True)
class Experiment:
    """One experiment on a site; its manager can be killed and restarted."""

    plan: Plan
    site: Site
    planted: str
    trials: int
    happened: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    hit: list[Fault] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    trials_killed: set[str] = field(default_factory=set)
    keepers_killed: set[str] = field(default_factory=set)
    attempts_removed: set[str] = field(default_factory=set)
    stopped: set[str] = field(default_factory=set)
    preempted: Counter[str] = field(default_factory=Counter)
    manager: subprocess.Popen[bytes] | None = None
    has_moved: bool = False
    began_s: float = field(default_factory=time.monotonic)
    _frozen: dict[Fault, list[psutil.Process]] = field(default_factory=dict)
    _healed: set[Fault] = field(default_factory=set)
    _over_before: dict[Fault, set[str]] = field(default_factory=dict)
    """For each fault that ends with a stop: the trials that had ended before the fault."""

    @property
    def folder(self) -> ExperimentFolder:
        return ExperimentFolder(self.site.manager_disk.path / "FAULTS")

    @property
    def storage(self) -> Workspace:
        return Workspace(self.site.storage.path / "FAULTS")

    @property
    def holds(self) -> Holds:
        return Holds(self.site.folder / "holds")

    @property
    def _preempted_jobs(self) -> Path:
        return self.site.folder / "preempted"

    def note(self, text: str) -> None:
        self.happened.append(f"{time.monotonic() - self.began_s:6.1f} s  {text}")

    # ---- the experiment

    def create(self) -> None:
        code = self.site.folder / "code"
        code.mkdir()
        reports, rest_s = (SHORT_REPORTS, 0.04) if self.plan.is_short else (REPORTS, 0.1)
        (code / "train.py").write_text(
            TRAIN.format(
                ledgers=str(self.site.ledgers),
                reports=reports,
                rest_s=rest_s,
                stride=RUN_STRIDE,
                saves_every=_SAVES_EVERY if self.plan.saves_checkpoints else 0,
                holds=str(self.holds.folder),
            )
        )
        self.holds.folder.mkdir()
        self._preempted_jobs.mkdir()
        (code / "search_space.json").write_text(json.dumps({"x": {"_type": "uniform", "_value": [0, 1]}}))
        document = {
            "authorName": "tests",
            "experimentName": "faults",
            "trialConcurrency": 5,
            "maxTrialNum": self.trials,
            "maxTrialRetry": self._max_retries,
            # This limit must not end the experiment even if a fault changes the clock by hours.
            "maxExecDuration": "1h",
            "trainingServicePlatform": "local",
            "searchSpacePath": "search_space.json",
            "logDir": str(self.site.manager_disk.path),
            "logCollection": "http",
            "tuner": {"builtinTunerName": "Random", "classArgs": {"seed": self.plan.seed}},
            "trial": {"command": f"{sys.executable} train.py", "codeDir": "."},
            "localConfig": {"reuse": self.plan.reuses_jobs},
        }
        file = code / "config.yml"
        file.write_text(json.dumps(document))
        config = read_experiment_file(file)
        folder = self.folder
        folder.make(self.site.seen_by_manager)
        Store.create(
            folder.database,
            folder.collected_logs,
            folder.experiment_id,
            config.to_json(),
            secrets.token_bytes(32),
            time.time(),
        ).close()

    @property
    def _max_retries(self) -> int:
        return _MAX_RETRIES if self.plan.saves_checkpoints else 0

    def start_manager(self) -> bool:
        """Start a manager; return whether it became ready."""
        site, port = self.site, self.site.next_port()
        announced, listens_at = site.open_road(port, self.has_moved)
        apart = Apart(
            workspace=str(site.seen_by_jobs / "FAULTS"),
            announced=announced,
            listens_at=listens_at,
            prefix=site.jobs_prefix,
            environ=() if site.jobs_clock is None else tuple(site.jobs_clock.environ.items()),
            planted=self.planted,
            preempted=str(self._preempted_jobs) if self.plan.saves_checkpoints else "",
        )
        clock = {} if site.manager_clock is None else site.manager_clock.environ
        with (site.folder / "manager.log").open("ab") as log:
            self.manager = subprocess.Popen(
                [
                    *site.manager_prefix,
                    *(sys.executable, _FAKES / "apart.py"),
                    # The folder is a separate argument, because nnictl finds a manager's process by this argument.
                    *("--folder", self.folder.path, f"--port={port}"),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=site.environ | clock | apart.to_environ(),
                start_new_session=True,
                # The jobs inherit umask 0. The mode with which each file is created is then the only protection against writes by
                # other users.
                umask=0 if Kind.METRICS_APPENDED in self.plan.kinds else -1,
            )
        manager = self.manager
        with contextlib.suppress(TimeoutError):
            wait_until(
                lambda: manager.poll() is not None or self._is_ready(manager.pid), "ready", _READY_TIMEOUT_S
            )
        if manager.poll() is None and self._is_ready(manager.pid):
            self.note(f"a manager is ready at {announced}, port {port}")
            return True
        self.note(f"a manager did not become ready, exit code {manager.poll()}: {self._last_words()}")
        manager.kill()
        manager.wait()
        return False

    def _is_ready(self, pid: int) -> bool:
        process = self.folder.process()
        return process is not None and process.pid == pid

    def _last_words(self) -> str:
        lines = (self.site.folder / "manager.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def check_manager(self) -> None:
        """Record an error if the manager has ended although it was not killed."""
        if self.manager is not None and self.manager.poll() is not None:
            self.wrong.append(
                f"the manager ended by itself, exit code {self.manager.returncode}: {self._last_words()}"
            )
            self.note("the manager has ended by itself")
            self.manager = None

    def kill_manager(self) -> None:
        if self.manager is not None:
            self.manager.kill()
            self.manager.wait()
            self.manager = None

    def resume(self) -> bool:
        """Start a manager if none runs; a full disk may prevent it."""
        if self.manager is not None and self.manager.poll() is None:
            return True
        if self.start_manager():
            return True
        self.manager = None
        return False

    def row_count(self) -> int:
        with contextlib.suppress(NniManagerError), StoreReader(self.folder.database) as reader:
            return len(reader.metrics())
        return 0

    def is_done(self) -> bool:
        self.check_manager()
        if self.manager is None and not self.resume():
            return False
        return self._is_over()

    def _is_over(self) -> bool:
        with contextlib.suppress(NniManagerError), StoreReader(self.folder.database) as reader:
            return reader.experiment().state.is_terminal
        return False

    def end(self) -> None:
        """End the manager with SIGTERM, like a user."""
        self._terminate(END_TIMEOUT_S)

    def _terminate(self, within_s: float) -> None:
        assert self.manager is not None
        told_s = time.monotonic()
        self.manager.terminate()
        try:
            code = self.manager.wait(within_s)
        except subprocess.TimeoutExpired:
            self.wrong.append(f"the manager did not end within {within_s:g} s of SIGTERM")
            self.kill_manager()
            return
        self.note(f"the manager ended {time.monotonic() - told_s:.1f} s after it was told to")
        if code != 0:
            self.wrong.append(f"the manager ended with exit code {code}: {self._last_words()}")
        self.manager = None

    def bugs(self) -> list[str]:
        """The log lines in which a manager reports a bug. An exit by a signal is no bug."""
        logs = [path for path in (self.folder.manager_log, self.site.folder / "manager.log") if path.exists()]
        lines = [line for path in logs for line in path.read_text(errors="replace").splitlines()]
        return [f"a manager said: {line}" for line in lines if _BUG.search(line)]

    # ---- faults

    def begin(self, fault: Fault) -> None:
        """Start a fault, and record whether it affected anything."""
        self.check_manager()
        missed = "the experiment was over" if self._is_over() else self._do(fault)
        if missed:
            self.missed.append(f"{fault.kind.value}: {missed}")
            self.note(self.missed[-1])
        else:
            self.hit.append(fault)

    def _do(self, fault: Fault) -> str:
        """Start a fault; return the reason if it affected nothing, or else an empty text."""
        if fault.kind in STOPS:
            if not self.resume():
                return "none ran"
            self._over_before[fault] = {trial.trial_id for trial in self._trials() if trial.state.is_terminal}
        match fault.kind:
            case (
                Kind.MANAGER_KILLED
                | Kind.MANAGER_MOVED
                | Kind.MANAGER_STOPPED
                | Kind.MANAGER_ENDED
                | Kind.STATE_TORN
            ):
                return self._hit_manager(fault)
            case Kind.ATTEMPT_FORGED | Kind.SPECIAL_FILES | Kind.METRICS_APPENDED | Kind.ATTEMPT_REMOVED:
                return self._hit_attempts(fault)
            case Kind.KEEPER_KILLED_AT_NOTICE | Kind.MANAGER_KILLED_AT_NOTICE:
                return self._hit_at_notice(fault)
            case _ if fault.kind in IN_CHECKPOINTS:
                return self._hit_in_checkpoint(fault)
            case Kind.JOB_PREEMPTED:
                return self._preempt(fault)
            case _ if fault.kind in _PROCESSES:
                return self._hit_process(fault)
            case _:
                # For a short time between two trials, no keeper may be connected, so the start of the fault is retried.
                try:
                    wait_until(lambda: self.site.begin(fault), "the fault affects something", _RUNS_TIMEOUT_S)
                except TimeoutError:
                    return "nobody was connected"
                self.note(str(fault).split("s  ", 1)[1])
                return ""

    def _hit_manager(self, fault: Fault) -> str:
        # After an earlier fault, a full disk may have prevented the restart of the manager. So a start is tried first.
        if not self.resume():
            return "none ran"
        assert self.manager is not None
        kind = fault.kind
        self.has_moved ^= kind is Kind.MANAGER_MOVED
        self.note(kind.value)
        match kind:
            case Kind.MANAGER_STOPPED:
                self.manager.send_signal(signal.SIGSTOP)
            case Kind.MANAGER_ENDED:
                self._terminate(_LEAVES_TIMEOUT_S)
            case _:
                self.kill_manager()
        if kind is Kind.STATE_TORN:
            self.note(tear(state_files(self.folder, self.storage), fault.pick))
        return ""

    def _hit_attempts(self, fault: Fault) -> str:
        running = self._wait_for(running_trials)
        if not running:
            return "none ran"
        if fault.kind in _PUT:
            for trial_id in sorted({trial_id for trial_id, _ in running}):
                refused = _PUT[fault.kind](self.storage, trial_id)
                self.note(f"{fault.kind.value}: {trial_id}{refused and f', refused: {refused}'}")
            if self.site.has_networks:
                self.site.begin(fault)
            return ""
        trial_id, process = running[int(fault.pick * len(running))]
        try:
            attempt = _attempt_of(process)
        except psutil.NoSuchProcess:
            return f"{trial_id}, process {process.pid}, had just ended"
        if fault.kind is Kind.METRICS_APPENDED:
            refused = append_to_metrics(self.storage, trial_id, attempt)
            self.note(
                f"{fault.kind.value}: {trial_id}, {f'refused: {refused}' if refused else 'not refused'}"
            )
            return ""
        aside = self.site.storage.path / f"removed-{secrets.token_hex(4)}"
        if not remove_attempt(self.storage, trial_id, attempt, aside):
            return f"{trial_id} had no directory"
        self.attempts_removed.add(trial_id)
        self.note(f"{fault.kind.value}: {trial_id}, {attempt}")
        return ""

    def _hit_at_notice(self, fault: Fault) -> str:
        """Cancel a running trial, and kill its keeper or the manager as soon as the trial's stop notice is written."""
        if not self.resume():
            return "no manager ran"
        running = self._wait_for(running_trials)
        if not running:
            return "none ran"
        trial_id, process = running[int(fault.pick * len(running))]
        try:
            attempt = _attempt_of(process)
            # The trial is suspended, because otherwise it could end before the cancel request is sent.
            process.suspend()
        except psutil.NoSuchProcess:
            return f"{trial_id}, process {process.pid}, had just ended"
        try:
            # Find the keepers before the cancel: a cancelled job may end within half a second.
            keepers = self._keepers_of(trial_id)
            missed = self._cancel(trial_id) or self._kill_at_notice(fault, trial_id, attempt, keepers)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        if not missed:
            self.note(f"{fault.kind.value}: {trial_id}")
        return missed

    def _kill_at_notice(
        self, fault: Fault, trial_id: str, attempt: str, keepers: list[tuple[str, psutil.Process]]
    ) -> str:
        self.stopped.add(trial_id)
        notice = self.storage.attempt(AttemptKey(trial_id, attempt, TASK)).stop_notice_json
        try:
            wait_until(notice.exists, "a stop notice", _RUNS_TIMEOUT_S)
        except TimeoutError:
            return f"{trial_id} had no stop notice"
        if fault.kind is Kind.MANAGER_KILLED_AT_NOTICE:
            self.kill_manager()
            return ""
        return self._kill_keeper(trial_id, keepers)

    def _hit_in_checkpoint(self, fault: Fault) -> str:
        """Kill the keeper of a trial that waits inside `save_checkpoint`."""
        missed = ""
        for _ in range(_TRIALS_TO_CATCH):
            running = self._wait_for(running_trials)
            if not running:
                return "none ran"
            missed = self._kill_in_checkpoint(fault, *running[int(fault.pick * len(running))])
            if not missed:
                break
        return missed

    def _kill_in_checkpoint(self, fault: Fault, trial_id: str, process: psutil.Process) -> str:
        place, frozen = IN_CHECKPOINTS[fault.kind], list[psutil.Process]()
        try:
            attempt = self.storage.attempt(AttemptKey(trial_id, _attempt_of(process), TASK))
            keepers = self._keepers_of(trial_id)
            if fault.kind is Kind.KEEPER_KILLED_BEFORE_SIGNATURE:
                self._wait_at("manifest", trial_id, process)
                for _, keeper in keepers:
                    keeper.suspend()
                    frozen.append(keeper)
            self._wait_at(place, trial_id, process)
            if fault.kind is Kind.KEEPER_KILLED_AFTER_SIGNATURE:
                wait_until(lambda: is_newest_signed(attempt), "its checkpoint is signed", _RUNS_TIMEOUT_S)
            missed = self._kill_keeper(trial_id, keepers)
            # Wait until the guard has killed the trial's process, because `release` would let the process continue.
            wait_until(lambda: not _runs(process), "its process has ended", _LEAVES_TIMEOUT_S)
        except (TimeoutError, psutil.NoSuchProcess) as error:
            return f"{trial_id}: {error}"
        finally:
            self.holds.release(trial_id)
            for keeper in frozen:
                with contextlib.suppress(psutil.NoSuchProcess):
                    keeper.resume()
        if not missed:
            self.note(f"{fault.kind.value}: {trial_id}")
        return missed

    def _wait_at(self, place: str, trial_id: str, process: psutil.Process) -> None:
        self.holds.hold(trial_id, place)
        wait_until(
            lambda: self.holds.has_arrived(trial_id, place) or not _runs(process),
            f"a checkpoint's {place}",
            _RUNS_TIMEOUT_S,
        )
        if not _runs(process):
            raise psutil.NoSuchProcess(process.pid)

    def _preempt(self, fault: Fault) -> str:
        """Preempt a job, like a cluster that needs room for a job of higher priority. The keeper receives SIGTERM, and the end of
        the job has a reason.
        """
        running = self._wait_for(running_trials)
        if not running:
            return "none ran"
        trial_id, process = running[int(fault.pick * len(running))]
        with contextlib.suppress(psutil.NoSuchProcess):
            # A suspended trial cannot end. So a reused job cannot start its next trial, and the preemption affects this trial.
            process.suspend()
            try:
                keepers = self._keepers_of(trial_id) if _runs(process) else []
                for job_id, keeper in keepers:
                    (self._preempted_jobs / job_id).touch()
                    self.preempted[trial_id] += 1
                    keeper.terminate()
                    self.note(f"{fault.kind.value}: {trial_id}, job {job_id}")
                    return ""
            finally:
                process.resume()
        return f"{trial_id} or its keeper had just ended"

    def _keepers_of(self, trial_id: str) -> list[tuple[str, psutil.Process]]:
        jobs = {trial.job_id for trial in self._trials() if trial.trial_id == trial_id}
        return [each for each in running_keepers(self.site.name) if each[0] in jobs]

    def _kill_keeper(self, trial_id: str, keepers: list[tuple[str, psutil.Process]]) -> str:
        for job_id, keeper in keepers:
            with contextlib.suppress(psutil.NoSuchProcess):
                keeper.kill()
                self.keepers_killed.add(job_id)
                return ""
        return f"the keeper of {trial_id} had just ended"

    def _cancel(self, trial_id: str) -> str:
        """Request the stop of a trial from the manager. Return the reason if the request failed, or else an empty text."""
        done = subprocess.run(
            [*self.site.manager_prefix, sys.executable, "-c", _CANCEL, self.folder.path, trial_id],
            check=True,
            capture_output=True,
            text=True,
            timeout=_STOPPED_TIMEOUT_S,
            env=self.site.suite_environ,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout.strip()

    # ---- stops

    def _trials(self) -> list[Trial]:
        with contextlib.suppress(NniManagerError), StoreReader(self.folder.database) as reader:
            return reader.trials()
        return []  # a full disk may prevent the read

    def _stop(self, fault: Fault) -> None:
        """Stop the experiment during the fault, and check that no process remains.

        Then end the fault and resume the experiment.
        """
        is_under_way = not self._is_over() and self.resume()
        if is_under_way:
            self._stop_and_check()
        else:
            self.hit.remove(fault)
            self.missed.append(f"{fault.kind.value}: the experiment was over before it could be stopped")
            self.note(self.missed[-1])
        if fault.kind is Kind.STOP_ON_FULL_DISK:
            self.site.heal(fault)
        for process in self._frozen.pop(fault, []):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        if is_under_way:
            # Some disk faults prevent the start of a manager, and the plan ends them only after the resume. So this loop ends
            # them before the resume.
            for fault_of_disk in [each for each in self.hit if each.kind in _KEEPS_MANAGERS_OUT]:
                self._heal_site(fault_of_disk)
            wait_until(self.resume, "a manager runs after the stop", DONE_TIMEOUT_S)
            wait_until(self._continues, "the experiment continues after the stop", _READY_TIMEOUT_S)
            self.stopped |= {trial.trial_id for trial in self._trials()} - self._over_before[fault]

    def _stop_and_check(self) -> None:
        assert self.manager is not None
        began_s = time.monotonic()
        done = subprocess.run(
            [*self.site.manager_prefix, sys.executable, "-c", _STOP, self.folder.path],
            check=True,
            capture_output=True,
            text=True,
            timeout=_STOPPED_TIMEOUT_S,
            env=self.site.suite_environ,
            stdin=subprocess.DEVNULL,
        )
        said = " / ".join(done.stdout.splitlines())
        self.note(f"a stop took {time.monotonic() - began_s:.1f} s{said and f': {said}'}")
        try:
            self.manager.wait(_LEAVES_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.wrong.append("the manager did not end after the stop")
            self.kill_manager()
        self.manager = None
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not self.site.leftovers(), "no process is left", _RUNS_TIMEOUT_S)
        self.wrong += [f"runs after a stop: {left}" for left in self.site.leftovers()]

    def _continues(self) -> bool:
        with contextlib.suppress(NniManagerError), StoreReader(self.folder.database) as reader:
            return reader.experiment().state is not ExperimentState.STOPPED
        return False

    def heal(self, fault: Fault) -> None:
        """End a fault that affected something."""
        match fault.kind:
            case (
                Kind.MANAGER_KILLED
                | Kind.MANAGER_MOVED
                | Kind.MANAGER_ENDED
                | Kind.STATE_TORN
                | Kind.MANAGER_KILLED_AT_NOTICE
            ):
                self.resume()
            case _ if fault.kind in STOPS:
                self._stop(fault)
            case Kind.MANAGER_STOPPED:
                if self.manager is not None:
                    self.manager.send_signal(signal.SIGCONT)
                self.note("the manager goes on")
            case Kind.KEEPER_STOPPED | Kind.GUARD_STOPPED | Kind.TRIAL_STOPPED:
                for process in self._frozen.pop(fault, []):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        process.resume()
                self.note(f"over: {fault.kind.value}")
            case _:
                self._heal_site(fault)
                self.note(f"over: {fault.kind.value}")

    def _heal_site(self, fault: Fault) -> None:
        if fault not in self._healed:
            self._healed.add(fault)
            self.site.heal(fault)

    def _hit_process(self, fault: Fault) -> str:
        running = self._wait_for(_PROCESSES[fault.kind])
        if not running:
            return "none ran"
        name, process = running[int(fault.pick * len(running))]
        try:
            if fault.lasts_s:
                process.suspend()
                self._frozen[fault] = [process]
            else:
                process.kill()
            match fault.kind:
                # A frozen keeper counts as killed, because `nnictl stop` kills a keeper that does not respond.
                case Kind.KEEPER_KILLED | Kind.STOP_WITH_FROZEN_KEEPER:
                    self.keepers_killed.add(name)
                case Kind.TRIAL_KILLED:
                    self.trials_killed.add(name)
        except psutil.NoSuchProcess:
            return f"{name}, process {process.pid}, had just ended"
        self.note(f"{fault.kind.value}: {name}, process {process.pid}")
        return ""

    def _wait_for(
        self, find: Callable[[str], list[tuple[str, psutil.Process]]]
    ) -> list[tuple[str, psutil.Process]]:
        with contextlib.suppress(TimeoutError):
            # Between two trials, there may be no matching process for a short time, so wait for one.
            wait_until(lambda: find(self.site.name), "a process runs", _RUNS_TIMEOUT_S)
        return find(self.site.name)

    @property
    def harm(self) -> Harm:
        kinds = {fault.kind for fault in self.hit}
        return Harm(
            self.trials_killed,
            self.keepers_killed,
            bool(kinds & _STORAGE_KINDS),
            self.attempts_removed,
            self.stopped,
            bool(kinds & _MANAGER_LEAVES_KINDS),
            self._max_retries,
            self.preempted,
            bool(kinds & _LATE_KINDS),
        )


def _attempt_of(trial: psutil.Process) -> str:
    """The id of the attempt that a process of training code belongs to."""
    return Path(trial.environ()["NNI_SYS_DIR"]).parent.name


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


_PROCESSES: dict[Kind, Callable[[str], list[tuple[str, psutil.Process]]]] = {
    Kind.KEEPER_KILLED: running_keepers,
    Kind.KEEPER_STOPPED: running_keepers,
    Kind.STOP_WITH_FROZEN_KEEPER: running_keepers,
    Kind.GUARD_STOPPED: running_guards,
    Kind.STOP_WITH_FROZEN_GUARD: running_guards,
    Kind.TRIAL_KILLED: running_trials,
    Kind.TRIAL_STOPPED: running_trials,
}
"""For each kind of fault, the processes that it may affect."""
