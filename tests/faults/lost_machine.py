"""An experiment whose machine was lost, as a template to copy, damage and resume. None of its processes is left."""

import contextlib
import dataclasses
import os
import re
import shutil

import psutil
from real_experiment import RealExperiment, wait_until

from nni_manager.store.folders import ExperimentFolder, ManagerProcess
from nni_manager.store.reader import StoreReader
from nni_manager.web.session_auth import SessionAuth
from trial_keeper import __version__

FIRST_OF_RESUME = 4
RECORDS = 82
_TRAIN = """
import time
import nni_sdk as nni
nni.get_next_parameter()
number = nni.get_sequence_id()
for i in range(20):
    nni.report_intermediate_result(i)
while number in (2, 3):
    time.sleep(0.1)
nni.report_final_result(number)
"""
# The tests do not damage these files, such as logs and the output of trials, because a resume does not need them.
_NO_STATE = re.compile(r"^log/|\.log$|/output/|/\.nni/|/__pycache__/|^sdk/nni_sdk/(?!trial\.py)")


def a_lost_experiment(folder):
    """Make an experiment whose machine was lost while two trials ran and after two trials had ended."""
    experiment = RealExperiment(folder, _TRAIN, trialConcurrency=2, maxTrialNum=FIRST_OF_RESUME + 1)
    experiment.create()
    experiment.start(host="0.0.0.0")
    try:
        wait_until(lambda: experiment.row_count() == RECORDS, "two trials have ended and two run")
        wait_until(lambda: experiment.summary()["counts"]["SUCCEEDED"] == 2, "their ends are stored")
        assert experiment.summary()["counts"]["RUNNING"] == 2
    finally:
        experiment.kill_manager()
        for process in processes_in(experiment.folder):
            process.kill()
    wait_until(lambda: not processes_in(experiment.folder), "its processes have ended")
    with StoreReader(experiment.folder.database) as reader:
        session_auth = SessionAuth(
            reader.experiment().secret, experiment.folder.experiment_id, experiment.folder.ended_sessions
        )
    session_auth.end(session_auth.begin(session_auth.new_login_code()).cookie)
    experiment.folder.write_process(ManagerProcess(os.getpid(), "127.0.0.1", 9, __version__), is_view=True)
    return experiment


def processes_in(folder):
    """The processes that use an experiment's folder, without this process."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = [*process.cmdline(), *process.environ().values()]
            if process.pid != os.getpid() and any(str(folder.path) in word for word in words):
                found.append(process)
    return found


def state_files(root):
    """One file of each kind below a folder. Files whose paths differ only in ids have the same kind, because the same code
    reads them.

    The files of an ended attempt and those of a running attempt have different kinds.
    """
    kinds = {}
    for path in sorted(root.rglob("*")):
        name = str(path.relative_to(root))
        if path.is_file() and not path.is_symlink() and path.stat().st_size and not _NO_STATE.search(name):
            attempt = "ended" if (path.parent / "exit.json").exists() else "running"
            kind = re.sub(r"(?<=jobs/|ials/)\w{5}", "*", name)
            kinds.setdefault(re.sub(r"(?<=attempts/)\w+", attempt, kind), name)
    return kinds


def copy_of(whole, folder):
    """A copy of the experiment. SQLite's files are copied directly, since no process has them open."""
    copy = RealExperiment.__new__(RealExperiment)
    copy.__dict__ |= vars(whole) | {
        "folder": ExperimentFolder(folder / whole.folder.path.name),
        "manager": None,
    }
    shutil.copytree(whole.folder.path, copy.folder.path, symlinks=True)
    return copy


def committed(folder):
    """All rows that the damage must not remove: the results of ended trials, and every record."""
    with StoreReader(folder.database) as reader:
        over = {
            trial.trial_id: (trial.run.final, trial.run.value)
            for trial in reader.trials()
            if trial.state.is_terminal
        }
        rows = {dataclasses.astuple(row) for row in reader.metrics()}
    return over, rows


def what_is_lost(folder, before):
    """The rows that a resumed experiment has lost or duplicated since `before`, as text; empty if there are none."""
    over, rows = committed(folder)
    missing = [each for each in before[0].items() if each not in over.items()]
    if missing or not before[1] <= rows:
        return f"lost {missing} and {len(before[1] - rows)} records"
    return "" if len(rows) == len({row[:4] for row in rows}) else "duplicate records"
