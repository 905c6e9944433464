"""The keeper registers each process with the guard before the process executes its program. So no process survives if the keeper
is killed.
"""

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from deadlines import DEADLINE_S
from real_experiment import wait_until

from nni_manager.support.leftovers import reap_orphans
from trial_keeper.wire.workspace import MARKER

IMPORTS = """
import os, signal, sys
from pathlib import Path
from trial_keeper.core.warm_command import WarmCommand
from trial_keeper.host.orphan_reaper import OrphanReaper
from trial_keeper.host.process import TrialProcess
from trial_keeper.processes import adopt_orphans
from trial_keeper.host.warm import WarmInterpreter, WarmStart

folder = Path(sys.argv[1])
environ = {**os.environ, "NNI_SYS_DIR": str(folder)}

def die(pid=0):
    os.kill(os.getpid(), signal.SIGKILL)

def start(command, register):
    return TrialProcess.started(command, str(folder), environ, folder / "out", folder / "err", register=register)

def warm_start():
    return WarmStart(WarmCommand("python", "train.py", ()), str(folder), environ, folder / "out", folder / "err")
"""
# Each program is a keeper that kills itself when it registers a process.
DYING = {
    "a command": "start('touch ran', die)",
    "a command with an empty environment": "start('exec env -i touch ran', die)",
    "the import of a module": "w = WarmInterpreter(sys.executable, ('train',), environ, die); w.is_ready(20)",
    "a fork of an interpreter": """
adopt_orphans()
w = None
w = WarmInterpreter(sys.executable, ('random',), environ, lambda pid: w and die())
assert w.is_ready(20)
w.start(warm_start())
""",
}
# Both `sleep` processes have an empty environment, so only their session links them to the trial.
EMPTIED = "exec env -i bash -c 'sleep 1000 & echo $$ $!; exec sleep 1000'"


@pytest.fixture(autouse=True)
def _adopts_orphans():
    prctl = ctypes.CDLL(None).prctl
    # PR_SET_CHILD_SUBREAPER: orphans become children of this process, so that the tests can find and reap them.
    prctl(36, 1, 0, 0, 0)
    yield
    prctl(36, 0, 0, 0, 0)


def play(tmp_path, program, prologue=IMPORTS):
    """Run a program as a minimal keeper."""
    return subprocess.run(
        [sys.executable, "-c", prologue + program, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def living_children():
    """The running processes that this process has adopted. The function reaps zombies."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child.pid)
                continue
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child.pid, os.WNOHANG)
    return found


@pytest.mark.parametrize("what", DYING)
def test_a_process_never_runs_the_training_code_if_its_keeper_dies_during_the_registration(tmp_path, what):
    (tmp_path / "train.py").write_text("open('" + str(tmp_path / "ran") + "', 'w')\n")
    died = play(tmp_path, DYING[what])
    assert died.returncode == -signal.SIGKILL, died.stderr
    wait_until(lambda: not living_children(), "its processes have ended")
    assert not (tmp_path / "ran").exists()


def test_a_registered_process_runs_its_command(tmp_path):
    program = """
known = []
trial = start("echo $$; cat; echo ${REPLY-nothing} ${TMOUT-nothing}; exit 3", known.append)
os.waitid(os.P_PID, trial.pid, os.WEXITED | os.WNOWAIT)
assert trial.poll() == 3
assert known == [trial.pid]
"""
    played = play(tmp_path, program)
    assert played.returncode == 0, played.stderr
    pid, rest = (tmp_path / "out").read_text().split("\n", 1)
    assert pid.isdecimal()
    assert rest == "nothing nothing\n"
    assert (tmp_path / "err").read_text() == ""


def test_a_guard_ends_the_processes_of_a_trial_even_if_they_have_an_empty_environment(tmp_path):
    program = f"""
guard = OrphanReaper()
guard.watch((str(folder),))
start({EMPTIED!r}, guard.register)
while not (folder / "out").read_text().endswith("\\n"):
    pass
die()
"""
    assert play(tmp_path, program).returncode == -signal.SIGKILL
    pids = [int(pid) for pid in (tmp_path / "out").read_text().split()]
    assert len(pids) == 2
    wait_until(lambda: not living_children(), "the trial and the guard have ended")


def test_a_guard_ends_processes_that_have_left_the_session_of_a_running_trial(tmp_path):
    left = f'{shlex.quote(sys.executable)} -S -c \'import os; os.setsid(); os.execve("/bin/sleep", ["sleep", "1000"], {{}})\''
    program = f"""
guard = OrphanReaper()
guard.watch((str(folder),))
start({f"{left} & until grep -q sleep /proc/$!/comm; do :; done; echo $!; wait"!r}, guard.register)
while not (folder / "out").read_text().endswith("\\n"):
    pass
die()
"""
    assert play(tmp_path, program).returncode == -signal.SIGKILL
    wait_until(lambda: not living_children(), "the trial and the guard have ended")


def test_a_guard_does_not_kill_the_processes_of_an_ended_trial(tmp_path):
    program = """
guard = OrphanReaper()
guard.watch((str(folder),))
start("sleep 1000", guard.register)
guard.watch(())
die()
"""
    assert play(tmp_path, program).returncode == -signal.SIGKILL
    wait_until(lambda: len(living_children()) == 1, "only the trial is left")
    os.kill(living_children()[0], signal.SIGKILL)
    wait_until(lambda: not living_children(), "the trial has ended")


def test_a_keeper_has_no_child_process_after_it_has_detached_its_guard(tmp_path):
    program = """
guard = OrphanReaper()
guard.wait_for_start()
guard.detach()
os.kill(guard.pid, 0)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    sys.exit("no child")
"""
    played = play(tmp_path, program)
    assert played.stderr == "no child\n"
    wait_until(lambda: not living_children(), "the guard has ended")


@pytest.mark.parametrize("processes", [1, 2])
def test_the_error_of_a_keeper_that_cannot_start_its_guard_recommends_higher_limits(tmp_path, processes):
    """The guard is a fork of a fork of the keeper. The limit counts all processes of a user. Here, the user has no other
    processes.
    """
    program = f"""
import resource
from trial_keeper.errors import KeeperRetryableError
if os.getuid() == 0:
    os.setresuid(*[100_000 + os.getpid()] * 3)
resource.setrlimit(resource.RLIMIT_NPROC, ({processes}, {processes}))
try:
    OrphanReaper().wait_for_start()
except KeeperRetryableError as error:
    sys.exit(str(error))
"""
    said = play(tmp_path, program)
    assert said.stderr == (
        "cannot start the process that ends the trial of a killed keeper: Resource temporarily unavailable; "
        "raise the limits on processes, memory and open files here, or run fewer trials at a time\n"
    )


# ---- processes that the manager ends without keeper and guard


def started(command, **environ):
    return subprocess.Popen(
        ["bash", "-c", f"{command}"],
        env=os.environ | environ,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def a_guard():
    """Start a process that looks like a guard, and wait until the kernel shows its environment. While it calls exec, the kernel
    shows an empty environment.
    """
    guard = started("exec sleep 1000", GUARD_OF="this")
    shown = psutil.Process(guard.pid)
    wait_until(lambda: shown.name() == "sleep" and "GUARD_OF" in shown.environ(), "the guard runs")
    return guard


def is_marked(folder):
    return lambda environ: environ.get(MARKER) == str(folder)


def test_reap_orphans_finds_processes_by_environment_or_ancestry_or_session(tmp_path):
    command = "env -i sleep 1000 & env -i setsid sleep 1000 & (env -i sleep 1000 & ) ; setsid sleep 1000 & echo go; wait"
    unrelated = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    trial = started(command, **{MARKER: str(tmp_path)})
    assert trial.stdout.readline() == "go\n"
    wait_until(
        lambda: [psutil.Process(pid).name() for pid in living_children()].count("sleep") == 5,
        "all have started",
    )
    reap_orphans(is_marked(tmp_path))
    assert living_children() == [unrelated.pid]
    unrelated.kill()
    for process in (unrelated, trial):
        process.wait()
    trial.stdout.close()


def test_reap_orphans_kills_a_child_inside_the_trial_but_not_its_parent_outside_the_trial(tmp_path):
    daemon = started(f"{MARKER}={tmp_path} sleep 1000 & echo go; wait; echo still here")
    assert daemon.stdout.readline() == "go\n"
    # The test waits until bash has forked the child and the child has executed sleep. Only then does the environment of the child
    # contain the marker.
    is_ours = is_marked(tmp_path)
    wait_until(
        lambda: any(is_ours(psutil.Process(pid).environ()) for pid in living_children()),
        "the child is marked",
    )
    reap_orphans(is_ours)
    assert daemon.stdout.readline() == "still here\n"
    daemon.wait()
    daemon.stdout.close()


def test_reap_orphans_waits_until_the_guard_has_ended(tmp_path):
    guard = a_guard()
    guard_ends = threading.Timer(0.3, guard.kill)
    guard_ends.start()
    began_s = time.monotonic()
    reap_orphans(is_marked(tmp_path), lambda environ: environ.get("GUARD_OF") == "this")
    assert time.monotonic() - began_s >= 0.3
    guard_ends.join()
    assert guard.wait() == -signal.SIGKILL
    guard.stdout.close()


def test_reap_orphans_kills_a_suspended_guard(tmp_path):
    guard = a_guard()
    guard.send_signal(signal.SIGSTOP)
    reap_orphans(is_marked(tmp_path), lambda environ: environ.get("GUARD_OF") == "this")
    assert guard.wait() == -signal.SIGKILL
    guard.stdout.close()
