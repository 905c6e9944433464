"""Stopping an experiment ends within a deadline and leaves no process, even if processes are suspended or the disk is full."""

import asyncio
import contextlib
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
from deadlines import DEADLINE_S, scaled_s
from fault_site import Disk
from real_experiment import a_manager_here, assert_rows_are_what_was_written, until, values, wait_until

from nni_manager.client.experiments import KnownExperiment
from nni_manager.client.manager_stop import stop_experiment
from nni_manager.domain.stop_escalation import MAX_STOP_S
from nni_manager.errors import RetryableError
from nni_manager.store.reader import StoreReader
from nni_manager.training_services.local.client import LocalTrainingService
from nni_sdk.records import decode
from trial_keeper.wire.messages import Stream

pytestmark = pytest.mark.timeout(240)

MARK = "STOP_TEST"
# The trial reports endlessly, so that at any time some records are sent but not stored. A full disk does not end the trial.
ENDLESS = """
import itertools, time
import nni_sdk as nni
from nni_sdk.errors import MetricNotWritten
nni.get_next_parameter()
numbers = itertools.count()
i = next(numbers)
while True:
    try:
        nni.report_intermediate_result(i)
        i = next(numbers)
    except MetricNotWritten:
        pass
    time.sleep(0.05)
"""
# The keeper hangs in a call that holds the GIL: it handles no message and no signal, and SIGCONT does not help. Only the first
# keeper that the fork server forks gets the hanging thread. The fork server has no such thread, so it can still fork.
HANGS = """
import os, sys
from trial_keeper.wire.fork_requests import FORK_SERVER
has_hung = False
def hang():
    import ctypes, threading, time
    global has_hung
    if has_hung:
        return
    has_hung = True
    def wait_and_hang():
        while not os.path.exists({file!r}):
            time.sleep(0.05)
        sleep = ctypes.PyDLL(None).sleep
        os.rename({file!r}, {file!r} + "s")
        sleep(600)
    threading.Thread(target=wait_and_hang, daemon=True).start()
if "-m" in sys.orig_argv and "trial_keeper" in sys.orig_argv and sys.orig_argv[-1] == FORK_SERVER:
    os.register_at_fork(after_in_child=hang)
"""
REUSE = {"localConfig": {"reuse": True}}


@pytest.fixture
def disk(tmp_path):
    """A small disk that can be filled."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    try:
        made = Disk(tmp_path / "disk", is_real=True)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no small disk can be mounted here: {error.stderr}")
    yield made
    subprocess.run(["umount", "-l", made.path], check=True)


@pytest.fixture
def an_experiment(a_real_experiment, tmp_path, monkeypatch):
    """Return a function that makes an experiment with running trials. All processes of the experiment have the environment
    variable MARK.
    """
    monkeypatch.setenv(MARK, str(tmp_path))

    def make(train=ENDLESS, trials=2, **options):
        experiment = a_real_experiment(train, trialConcurrency=trials, maxTrialNum=trials, **options)
        experiment.start()
        wait_until(lambda: len(reporting(experiment)) == trials, "all trials report")
        return experiment

    yield make
    for process in processes_of(tmp_path):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def reporting(experiment):
    with StoreReader(experiment.folder.database) as reader:
        return {row.trial_id for row in reader.metrics()}


def processes_of(tmp_path):
    """All running processes that an experiment of this test has started."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            is_own = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if is_own and process.environ().get(MARK) == str(tmp_path):
                found.append(process)
    return found


def assert_nothing_runs(tmp_path):
    # A killed process may need a moment to exit, so wait for it.
    wait_until(lambda: not processes_of(tmp_path), "no process of the experiment runs", scaled_s(5))


def guards_of(tmp_path, experiment):
    keepers = experiment.keeper_pids()
    commands = [(each, each.cmdline()) for each in processes_of(tmp_path)]
    return [each for each, words in commands if "trial_keeper" in words and each.pid not in keepers]


def freeze(processes):
    for process in processes:
        process.suspend()


def keepers_of(experiment):
    return [psutil.Process(pid) for pid in experiment.keeper_pids()]


def stopped_within(experiment):
    """Stop the experiment in the same way as `nnictl stop`; return the duration in seconds."""
    began_s = time.monotonic()
    try:
        stop_experiment(KnownExperiment(experiment.folder, experiment.folder.process()))
    finally:
        took_s = time.monotonic() - began_s
        experiment.manager.wait(DEADLINE_S)
    assert took_s < scaled_s(MAX_STOP_S)
    return took_s


def fill(disk, experiment):
    """Truncate SQLite's log, then fill the disk. A longer log would be reused from its first byte, with room to record a stop."""
    with contextlib.closing(sqlite3.connect(experiment.folder.database)) as connection:
        truncate = partial(connection.execute, "PRAGMA wal_checkpoint(TRUNCATE)")
        wait_until(lambda: truncate().fetchone()[0] == 0, "the log is truncated")
    disk.fill()


def stop_on_full_disk(experiment):
    """Stop the experiment. The stop cannot be recorded, unless the disk became full while a file was written.

    The next attempt to write that file removes the incomplete file, which may free enough space for the record.
    """
    try:
        stopped_within(experiment)
    except RetryableError as error:
        problem = str(error)
        assert re.search(
            "cannot record .* all of its processes have ended.*disk is full.*nnictl resume", problem
        )
    else:
        assert stored_states(experiment)[0] == "STOPPED"


def stored_states(experiment):
    with StoreReader(experiment.folder.database) as reader:
        return reader.experiment().state.value, {trial.state.value for trial in reader.trials()}


def remove_trials(experiment):
    """Remove all folders of trials while the trials write to them."""
    trials = experiment.folder.workspace.trials
    trials.rename(experiment.folder.path / "gone")
    subprocess.run(["rm", "-rf", experiment.folder.path / "gone"], check=True)


@pytest.mark.parametrize("options", [{}, REUSE], ids=["one job each", "reused jobs"])
def test_stopping_an_experiment_ends_suspended_keepers_and_guards(an_experiment, tmp_path, options):
    experiment = an_experiment(**options)
    freeze([*keepers_of(experiment), *guards_of(tmp_path, experiment)])
    assert stopped_within(experiment) < scaled_s(30)
    assert_nothing_runs(tmp_path)
    assert stored_states(experiment) == ("STOPPED", {"USER_CANCELED"})


@pytest.mark.parametrize("options", [{}, REUSE], ids=["one job each", "reused jobs"])
def test_stopping_an_experiment_ends_trials_whose_folders_were_removed(an_experiment, tmp_path, options):
    experiment = an_experiment(**options)
    remove_trials(experiment)
    stopped_within(experiment)
    assert_nothing_runs(tmp_path)
    assert stored_states(experiment) == ("STOPPED", {"USER_CANCELED"})


@pytest.mark.parametrize("options", [{}, REUSE], ids=["one job each", "reused jobs"])
def test_stopping_an_experiment_on_a_full_disk_ends_the_trials_and_loses_no_result(
    disk, an_experiment, tmp_path, options
):
    experiment = an_experiment(logDir=str(disk.path / "experiments"), **options)
    fill(disk, experiment)
    stop_on_full_disk(experiment)
    assert_nothing_runs(tmp_path)
    disk.empty()
    if stored_states(experiment)[0] != "STOPPED":
        experiment.start()
        wait_until(
            lambda: all("endTime" in trial for trial in experiment.get("/trials")), "all trials have ended"
        )
    with StoreReader(experiment.folder.database) as reader:
        trials = [trial.trial_id for trial in reader.trials()]
    assert len(trials) == 2
    for trial_id in trials:
        rows = values(assert_rows_are_what_was_written(experiment, trial_id))
        assert rows == [*range(len(rows))]


@pytest.mark.smoke
def test_stopping_an_experiment_ends_all_processes_despite_full_disk_removed_folders_and_suspended_keepers(
    disk, an_experiment, tmp_path
):
    experiment = an_experiment(logDir=str(disk.path / "experiments"))
    freeze([*keepers_of(experiment), *guards_of(tmp_path, experiment)])
    remove_trials(experiment)
    fill(disk, experiment)
    stop_on_full_disk(experiment)
    assert_nothing_runs(tmp_path)


@pytest.mark.parametrize("options", [{}, REUSE], ids=["one job each", "reused jobs"])
def test_a_trial_whose_keeper_is_suspended_can_be_stopped_without_an_effect_on_other_trials(
    an_experiment, options
):
    experiment = an_experiment(**options)
    freeze(keepers_of(experiment))

    def ends():
        trials = experiment.get("/trials")
        return {
            trial["sequenceId"]: (trial["status"], trial["reason"]) for trial in trials if "endTime" in trial
        }

    (killed,) = (trial["id"] for trial in experiment.get("/trials") if trial["sequenceId"] == 0)
    experiment.delete(f"/trial-jobs/{killed}")
    wait_until(lambda: ends() == {0: ("USER_CANCELED", "stopped by user")}, "only the killed trial has ended")
    change = {"params": {"maxTrialDuration": "1s"}}
    experiment.ask("PUT", "/experiment?update_type=MAX_TRIAL_DURATION", json=change).raise_for_status()
    experiment.wait_for_status("DONE", timeout_s=DEADLINE_S)
    assert ends() == {0: ("USER_CANCELED", "stopped by user"), 1: ("SYS_CANCELED", "time limit")}


def test_stopping_an_experiment_ends_a_suspended_trial_within_the_grace_period(an_experiment, tmp_path):
    experiment = an_experiment()
    freeze([each for keeper in keepers_of(experiment) for each in keeper.children(recursive=True)])
    assert stopped_within(experiment) < scaled_s(20)
    assert_nothing_runs(tmp_path)


def test_a_suspended_guard_ends_after_its_keeper_was_killed(an_experiment, tmp_path):
    experiment = an_experiment()
    freeze(guards_of(tmp_path, experiment))
    os.kill(experiment.keeper_pids()[0], signal.SIGKILL)
    wait_until(
        lambda: sum("endTime" in trial for trial in experiment.get("/trials")) == 1, "its trial has ended"
    )
    stopped_within(experiment)
    assert_nothing_runs(tmp_path)


def test_a_hanging_keeper_and_all_processes_of_its_trial_are_killed(a_real_experiment, tmp_path, monkeypatch):
    """The manager runs in the process of the test, with short deadlines. The trial starts a process that has an empty environment
    and its own session.
    """
    hang, folder = tmp_path / "hang", tmp_path / "python"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HANGS.format(file=str(hang)))
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    pid_file = tmp_path / "pid"
    forgets = f"setsid env -i sleep 600 & echo $! > {pid_file};"
    trial = {"command": f"{forgets} {sys.executable} train.py", "codeDir": "."}
    experiment = a_real_experiment(ENDLESS, trialConcurrency=1, maxTrialNum=1, trial=trial)
    make = partial(
        LocalTrainingService, experiment.config, experiment.folder.workspace, experiment.folder.jobs
    )

    async def play():
        async with a_manager_here(experiment, make) as engine:
            engine.experiment.stops.keeper_grace_s = 1.0
            await until(experiment.row_count, "the trial reports")
            hang.touch()
            await until(lambda: not hang.exists(), "the keeper hangs")
            engine.stop()
            await asyncio.wait_for(engine.until_stopped(), DEADLINE_S)
            assert engine.recovery.leftovers == {}
            (trial,) = engine.experiment.trials.values()
            return trial

    trial = asyncio.run(play())
    assert trial.state.value == "USER_CANCELED"
    assert trial.run.message.startswith("its keeper did not stop the trial in time, so the job was killed")
    assert_nothing_runs(tmp_path)
    forgetful = int(pid_file.read_text())
    assert not psutil.pid_exists(forgetful) or psutil.Process(forgetful).status() == psutil.STATUS_ZOMBIE


def test_the_manager_reports_a_job_that_it_cannot_end_and_a_command_that_removes_the_job(
    a_real_experiment, tmp_path, monkeypatch
):
    """The training service cannot end any job, as if its cluster were unreachable."""
    monkeypatch.setenv(MARK, str(tmp_path))
    experiment = a_real_experiment(ENDLESS, trialConcurrency=1, maxTrialNum=1)

    class OutOfReach(LocalTrainingService):
        async def stop(self, job_id):
            return True

        def wake(self, job_id):
            pass

        async def kill(self, job_id):
            pass

    make = partial(OutOfReach, experiment.config, experiment.folder.workspace, experiment.folder.jobs)

    async def play():
        async with a_manager_here(experiment, make) as engine:
            engine.experiment.stops.keeper_grace_s = 0.5
            await until(experiment.row_count, "the trial reports")
            (pid,) = experiment.keeper_pids()
            os.kill(pid, signal.SIGSTOP)
            (key,) = experiment.folder.workspace.attempts_of(next(iter(engine.experiment.trials)))
            metrics = experiment.folder.workspace.attempt(key).stream(Stream.METRICS)
            engine.stop()
            await asyncio.wait_for(engine.until_stopped(), DEADLINE_S)
            written = len(decode(metrics.read_bytes(), 0).records)
            assert experiment.row_count() > 0.8 * written, "results written meanwhile must be stored"
            (leftover,) = engine.recovery.leftovers.values()
            assert leftover.endswith(f"which may still run; remove it with `kill -9 {pid}`")
            assert engine.snapshot().problem == leftover
            (trial,) = engine.experiment.trials.values()
            assert (trial.state.value, trial.run.message) == ("USER_CANCELED", leftover)
            os.kill(pid, signal.SIGKILL)
            await until(lambda: not engine.recovery.leftovers, "the manager has detected its end")

    asyncio.run(play())
    assert_nothing_runs(tmp_path)
