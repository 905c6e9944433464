"""A manager is suspended for longer than its lease while writes are queued. Another manager replaces it, and none of the
queued writes is stored.
"""

import contextlib
import os
import signal
import sqlite3
import time

import psutil
import pytest
from deadlines import DEADLINE_S
from real_experiment import assert_rows_are_what_was_written, wait_until

from nni_manager.store.lease import LEASE_TTL_S, read_record
from nni_manager.store.reader import StoreReader

pytestmark = pytest.mark.timeout(240)

TRIALS = 3
TRAIN = """
import os, time
import nni_sdk as nni
nni.get_next_parameter()
for i in range(10**6):
    nni.report_intermediate_result(i)
    if os.path.exists("gate"):
        break
    time.sleep(0.1)
nni.report_final_result(i)
"""


# This sitecustomize module stops the renewal of the lease in the manager process, so the heartbeat cannot detect the lost lease.
NO_HEARTBEAT = """
import sys
if "-m" in sys.orig_argv and "nni_manager" in sys.orig_argv:
    from nni_manager.store.lease import Lease
    Lease._renew = lambda self: None
"""


@contextlib.contextmanager
def the_database_is_locked(experiment):
    """Hold a write transaction in another process, so that the manager's writes wait in its queue."""
    with contextlib.closing(sqlite3.connect(experiment.folder.database, isolation_level=None)) as writer:
        writer.execute("PRAGMA busy_timeout = 60000")
        writer.execute("BEGIN IMMEDIATE")
        yield writer


def stopped(process):
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


def processes_of(experiment):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = [*process.cmdline(), *process.environ().values()]
            if process.pid != os.getpid() and any(str(experiment.folder.path) in word for word in words):
                found.append(process)
    return found


@pytest.mark.parametrize("wakes_first", ["its heartbeat", "its queue"])
def test_a_suspended_manager_stores_none_of_its_queued_writes_after_it_was_replaced(
    a_real_experiment, tmp_path, wakes_first
):
    experiment = a_real_experiment(TRAIN, trialConcurrency=2, maxTrialNum=TRIALS)
    # The manager must be a child of this test, and must have its usual command line. A forked manager has neither property.
    experiment.is_forked = False
    lock = experiment.folder.path / "owner.lock"
    path = experiment.environ.get("PYTHONPATH", "")
    if wakes_first == "its queue":
        (tmp_path / "sitecustomize.py").write_text(NO_HEARTBEAT)
        experiment.environ["PYTHONPATH"] = f"{tmp_path}:{path}"
    experiment.start()
    experiment.environ["PYTHONPATH"] = path
    frozen = experiment.manager
    try:
        wait_until(lambda: experiment.row_count() > 10, "both trials report")
        with the_database_is_locked(experiment) as writer:
            wait_until(lambda: "is locked" in experiment.summary()["problem"], "reports wait in the queue")
            stopped(frozen)
            (stored,) = writer.execute("SELECT count(*) FROM metric").fetchone()
        renewed_s = read_record(lock).renewed_s
        wait_until(lambda: time.monotonic() - renewed_s > LEASE_TTL_S, "its lease has expired")

        experiment.start()
        wait_until(lambda: experiment.row_count() > stored + 20, "the other manager stores what they report")
        # While the test holds the lock of the database, the second manager is in no transaction, so the test can suspend it.
        # After that, only the first manager could write.
        with the_database_is_locked(experiment):
            stopped(experiment.manager)
        with StoreReader(experiment.folder.database) as reader:
            version = reader.data_version()
            frozen.send_signal(signal.SIGCONT)
            assert frozen.wait(DEADLINE_S) == 1
            assert reader.data_version() == version
        experiment.manager.send_signal(signal.SIGCONT)
        (last,) = [
            line for line in experiment.folder.manager_stderr.read_text().splitlines() if "lease" in line
        ]
        holder = read_record(lock).holder
        assert holder.pid == experiment.manager.pid
        assert last.startswith(f"cannot write {experiment.folder.path}")
        assert ("experiment.sqlite" in last) or wakes_first == "its heartbeat"
        assert f"{holder} holds it now; this manager ends without storing more" in last
        assert "Traceback" not in experiment.folder.manager_stderr.read_text()

        (experiment.code / "gate").touch()
        experiment.wait_for_status("DONE")
        trials = experiment.get("/trials")
        assert [(trial["status"], trial["attempt"]) for trial in trials] == [("SUCCEEDED", 0)] * TRIALS
        for trial in trials:
            assert_rows_are_what_was_written(experiment, trial["id"])
        experiment.close()
        wait_until(lambda: not processes_of(experiment), "no process is left")
    finally:
        frozen.kill()
        frozen.wait()
