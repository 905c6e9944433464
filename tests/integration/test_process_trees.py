"""Real keepers run trials with process trees of every shape.

When all processes of a trial have ended, the keeper reports the trial's end with code and reason. The tests find leftover
processes without the keeper's code: the test process adopts the orphans of keeper and trial.
"""

import contextlib
import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from amounts import amount
from attempts import attempt_id
from deadlines import DEADLINE_S
from fake_manager import KEY, TRIAL, Site
from real_experiment import wait_until

from trial_keeper.exit_codes import KeeperExit
from trial_keeper.wire.messages import (
    AttemptKey,
    Idle,
    RunTrial,
    Shutdown,
    StopTrial,
    Stream,
    TrialEnded,
    TrialStarted,
)
from trial_keeper.wire.reasons import ExitReason

TERM, INT, HUP, KILL = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL
NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
NOBODY = 65534
PYTHON = f"{shlex.quote(sys.executable)} -S -E"
# This grace period is longer than any test. So if a trial ends within a test, the end of the grace period is not the cause.
LONG_GRACE_S = 1000.0
SHORT_GRACE_S = 0.2
V2_MOUNTS = [
    path
    for path in (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
    if (path / "cgroup.procs").is_file()
]

PROGRAMS = {
    # The program ignores SIGTERM, and then reports that it is ready.
    "deaf.py": """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("ready", "w").close()
while True:
    signal.pause()
""",
    # The program starts a classic daemon. No parent, session, environment or open file links the daemon to the trial.
    "daemon.py": """
import os, signal
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.chdir("/")
        os.umask(0)
        os.closerange(0, 256)
        os.execve("/bin/sleep", ["sleep", "1000"], {})
    os._exit(0)
os.wait()
""",
    # The program never reaps its children.
    "careless.py": """
import os, signal
for _ in range(20):
    if os.fork() == 0:
        os._exit(0)
open("ready", "w").close()
while True:
    signal.pause()
""",
    # The program forks further processes while it is killed, 400 in total. Half of them have their own session.
    "fork_bomb.py": """
import os, sys, time
tokens, give = os.pipe()
os.write(give, b"x" * 400)
os.set_blocking(tokens, False)
def grow():
    while True:
        try:
            left = os.read(tokens, 1)
        except BlockingIOError:
            time.sleep(1000)
        if os.fork() == 0 and os.getpid() % 2:
            os.setsid()
        time.sleep(0.002)
if os.fork() == 0:
    grow()
time.sleep(0.02)
os._exit(4)
""",
    "handler.py": """
import os, signal, sys
code = int(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
open("ready", "w").close()
while True:
    signal.pause()
""",
    # At SIGTERM, the program saves its work: it starts ten processes one after the other. This needs a part of the grace period.
    "saving.py": """
import os, signal, subprocess, sys
def save(*_):
    for i in range(10):
        subprocess.run(["bash", "-c", f"echo {i} >> saved"])
    sys.exit(6)
signal.signal(signal.SIGTERM, save)
open("ready", "w").close()
while True:
    signal.pause()
""",
    "greedy.py": """
hoard = []
while True:
    hoard.append(b"x" * 1_000_000)
""",
}


@pytest.fixture(scope="module", autouse=True)
def _adopts_orphans():
    prctl = ctypes.CDLL(None).prctl
    # PR_SET_CHILD_SUBREAPER: orphans become children of this process, so that the tests can find and reap them.
    prctl(36, 1, 0, 0, 0)
    yield
    prctl(36, 0, 0, 0, 0)


@pytest.fixture(autouse=True)
def _nothing_is_left():
    """Kill all processes that a test has left. Such a process fails the test."""
    before = {child.pid for child in psutil.Process().children()}
    yield
    left = [child for child in stragglers() if child.pid not in before]
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    assert not left


@pytest.fixture
def silent_site(silent_site):
    """Keepers are children of this process, which adopts what they leave."""
    silent_site.forks_keepers = False
    return silent_site


@pytest.fixture
def programs(site):
    """The site, with the programs in its code folder, and with a FIFO through which a trial reports that it is ready."""
    equip(site)
    return site


def equip(site):
    for name, program in PROGRAMS.items():
        (site.code / name).write_text(program)
    os.mkfifo(site.code / "ready")
    (site.code / "not-a-program").write_text("just words")


def wait_until_ready(site):
    (site.code / "ready").read_bytes()


def processes_of(keeper, *, in_namespace=False):
    """The running descendants of the keeper, or of the first process of its namespace."""
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(keeper.pid)
        if in_namespace:
            (first,) = first.children()
        return [child for child in first.children(recursive=True) if not is_dead(child)]
    return []


def stragglers():
    """The processes that this process has adopted from ended keepers, without guards. The function reaps zombies."""
    found = []
    for child in psutil.Process().children(recursive=True):
        if is_dead(child):
            with contextlib.suppress(ChildProcessError):
                os.waitpid(child.pid, os.WNOHANG)
        elif not is_keepers(child):
            found.append(child)
    return found


def is_dead(process):
    try:
        # While a process exits, it already has no command line, although it is not a zombie yet. It counts as dead.
        return process.status() == psutil.STATUS_ZOMBIE or not process.cmdline()
    except psutil.ZombieProcess:
        return True
    except psutil.NoSuchProcess:
        return True


def is_keepers(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return "trial_keeper" in process.cmdline()
    return False


def finish(site, keeper, *, in_namespace=False):
    """Wait until the trial and the keeper have ended; return the exit code and the reason.

    No process may be left when the keeper reports the trial's end, or later.
    """
    ended = site.manager.wait_for_message(TrialEnded)
    assert processes_of(keeper, in_namespace=in_namespace) == []
    sizes = {stream: len(site.file(stream)) for stream in (Stream.STDOUT, Stream.STDERR)}
    assert {stream: ended.final_sizes[stream] for stream in sizes} == sizes
    site.manager.closes = True
    site.manager.commit_again()
    code = keeper.wait()
    assert stragglers() == []
    assert site.manager.all_of(TrialEnded) == [ended]
    assert site.exit() == ended
    assert ended.exit_code == code
    return code, ended.reason


def start(site, command, *, in_namespace=False, prefix=(), arguments=(), **settings):
    site.manager.closes = False
    site.add_trial(command)
    prefix = (*prefix, *(NAMESPACE if in_namespace else ()))
    return site.start_keeper(
        collect_logs=True, options={"prefix": prefix, "arguments": arguments}, **settings
    )


def can_make_namespaces():
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0


needs_namespaces = pytest.mark.skipif(
    not can_make_namespaces(), reason="tests cannot create a PID namespace here"
)


def places(cases, *, again_in_namespace):
    """Return all cases, and some of them a second time with the keeper as PID 1 of a namespace."""
    again = [case for case in cases if case[0] in again_in_namespace]
    return [
        *(pytest.param(*case, False, id=case[0]) for case in cases),
        *(pytest.param(*case, True, id=f"{case[0]}, as process 1", marks=needs_namespaces) for case in again),
    ]


# ---- trials that end by themselves

OWN_CODES = [(f"code {code}", f"exit {code}", code) for code in (0, 77, 255)]
SHELL_CODES = [
    ("a command that may not be run", "./not-a-program", 126),
    ("a command that is not there", "no-such-command-here", 127),
    ("a pipe with a failing head", "(exit 3) | cat; echo no", 3),
    ("an error in the middle", "true; (exit 5); echo no; exit 0", 5),
    ("a child killed by a signal", "bash -c 'kill -SEGV $$'; echo no", 128 + signal.SIGSEGV),
    ("another shell in its place", "exec bash -c 'sleep 1000 & exit 4'", 4),
    ("another program in its place", f"exec {PYTHON} -c 'raise SystemExit(9)'", 9),
]
LEFT_BEHIND = [
    ("a background job", "sleep 1000 & exit 4", 4),
    ("a background job of a command that succeeds", "sleep 1000 &", 0),
    ("nohup", "nohup sleep 1000 & exit 4", 4),
    ("disown", "sleep 1000 & disown; exit 4", 4),
    ("a double fork", "(sleep 1000 &); exit 4", 4),
    ("a group of its own", "set -m; sleep 1000 & exit 4", 4),
    ("a session of its own", "setsid sleep 1000 & exit 4", 4),
    ("a session and a double fork", "(setsid bash -c '(sleep 1000 &)'); exit 4", 4),
    ("a daemon with closed files and an empty environment", f"{PYTHON} daemon.py; exit 4", 4),
    ("a job that is stopped", "sleep 1000 & kill -STOP $!; exit 4", 4),
    ("a job that is deaf", "(trap '' TERM HUP INT; setsid sleep 1000) & exit 4", 4),
    ("a chain of shells", "bash -c 'bash -c \"setsid sleep 1000 & sleep 1000\" & sleep 1000' & exit 4", 4),
    ("a job that writes on", "(setsid bash -c 'while :; do echo on and on; done' &); exit 4", 4),
    ("a job that holds stdout", "(sleep 1000 2>&1 &) ; echo out; exit 4", 4),
    ("a coprocess", "coproc cat; exit 4", 4),
    ("children that nobody waits for", f"{PYTHON} careless.py & read _ < ready || exit 4", 4),
    ("processes that fork while they are killed", f"exec {PYTHON} fork_bomb.py", 4),
    ("500 orphans at once", "for i in {1..500}; do (true & true) & done; exit 4", 4),
]


@pytest.mark.parametrize(
    ("_name", "command", "code", "in_namespace"),
    places(
        [*OWN_CODES, *SHELL_CODES, *LEFT_BEHIND],
        again_in_namespace=amount(
            ("a session and a double fork", "500 orphans at once"),
            (
                "code 0",
                "code 255",
                "a double fork",
                "a session and a double fork",
                "a daemon with closed files and an empty environment",
                "a job that writes on",
                "processes that fork while they are killed",
                "500 orphans at once",
            ),
        ),
    ),
)
def test_a_trial_that_exits_by_itself_leaves_no_process_and_reports_its_exit_code(
    programs, _name, command, code, in_namespace
):
    keeper = start(programs, command, in_namespace=in_namespace, grace_s=LONG_GRACE_S)
    reason = ExitReason.NONZERO_EXIT if code else ExitReason.SUCCEEDED
    assert finish(programs, keeper, in_namespace=in_namespace) == (code, reason)


@pytest.mark.parametrize(
    ("_name", "number", "in_namespace"),
    places(
        [(name, getattr(signal, f"SIG{name}")) for name in ("TERM", "KILL", "SEGV", "ABRT", "HUP", "INT")],
        again_in_namespace=amount(("KILL",), ("KILL", "TERM")),
    ),
)
def test_the_exit_code_of_a_trial_killed_by_a_signal_is_128_plus_the_signal_number(
    programs, _name, number, in_namespace
):
    keeper = start(programs, f"setsid sleep 1000 & kill -{number} $$", in_namespace=in_namespace)
    assert finish(programs, keeper, in_namespace=in_namespace) == (128 + number, ExitReason.SIGNAL)


def test_orphans_are_reaped_while_the_trial_runs(programs):
    programs.gate("gate")
    keeper = start(
        programs, "for i in {1..500}; do (true & true) & done; wait; echo > ready; read _ < gate || exit 4"
    )
    wait_until_ready(programs)

    def is_alone():
        children = psutil.Process(keeper.pid).children(recursive=True)
        with contextlib.suppress(psutil.NoSuchProcess):
            return [child.name() for child in children] == ["bash"]
        return False

    wait_until(is_alone, "only the command is left, without zombies", timeout_s=DEADLINE_S)
    programs.open_gate("gate")
    assert finish(programs, keeper) == (4, ExitReason.NONZERO_EXIT)


# ---- trials that are stopped

IGNORES_SIGTERM = f"{PYTHON} deaf.py"
# Each command creates the file `ready`, and then waits. At SIGTERM, the trial ends as soon as no process that handles SIGTERM is
# left. The last field is the expected exit code.
ENDING_AT_SIGTERM = [
    ("one process", "echo > ready; exec sleep 1000", 128 + TERM),
    ("a shell and its child", "echo > ready; sleep 1000; true", 128 + TERM),
    ("a stopped child", "sleep 1000 & kill -STOP $!; echo > ready; wait", 128 + TERM),
    ("a trial that stopped itself", "trap 'exit 3' TERM; echo > ready; kill -STOP $$; exit 9", 3),
    ("exit 0 in its handler", f"exec {PYTHON} handler.py 0", 0),
    ("exit 3 in its handler", f"exec {PYTHON} handler.py 3", 3),
    ("work saved within the grace", f"exec {PYTHON} saving.py", 6),
    ("work saved after the shell has gone", f"{PYTHON} saving.py; true", 128 + TERM),
    (
        "work saved by the shell itself",
        "trap 'echo 9 >> saved; exit 7' TERM; echo > ready; sleep 1000 & wait",
        7,
    ),
    ("a deaf process in a session of its own", f"setsid {IGNORES_SIGTERM} & sleep 1000; true", 128 + TERM),
    ("a daemon", f"{PYTHON} daemon.py; echo > ready; exec sleep 1000", 128 + TERM),
    ("children that nobody waits for", f"exec {PYTHON} careless.py", 128 + TERM),
]
# These trials do not end at SIGTERM, so the keeper kills them after the grace period. The last field is the expected exit code.
IGNORING_SIGTERM = [
    ("a deaf process", f"exec {IGNORES_SIGTERM}", 128 + KILL),
    ("a deaf shell", "trap '' TERM; echo > ready; while :; do sleep 1000; done", 128 + KILL),
    ("a deaf child", f"{IGNORES_SIGTERM} & wait", 128 + TERM),
    ("a deaf grandchild", f"bash -c '{IGNORES_SIGTERM}; true'; true", 128 + TERM),
    ("a deaf process and one in another session", f"setsid sleep 1000 & exec {IGNORES_SIGTERM}", 128 + KILL),
]


@pytest.mark.parametrize(
    ("_name", "command", "code", "in_namespace"),
    places(
        ENDING_AT_SIGTERM,
        again_in_namespace=amount(
            ("exit 3 in its handler",),
            ("a shell and its child", "a stopped child", "exit 3 in its handler", "a daemon"),
        ),
    ),
)
def test_a_trial_that_handles_sigterm_has_its_whole_grace_period(
    programs, _name, command, code, in_namespace
):
    keeper = start(programs, command, in_namespace=in_namespace, grace_s=LONG_GRACE_S)
    wait_until_ready(programs)
    if in_namespace:
        psutil.Process(keeper.pid).children()[0].send_signal(TERM)
    else:
        keeper.signal(TERM)
    assert finish(programs, keeper, in_namespace=in_namespace) == (code, ExitReason.JOB_LOST)
    if "saved" in _name:
        assert (programs.code / "saved").read_text().splitlines()[-1] == "9"


@pytest.mark.parametrize(
    ("_name", "command", "code", "in_namespace"),
    places(IGNORING_SIGTERM, again_in_namespace=amount(("a deaf child",), ("a deaf shell", "a deaf child"))),
)
def test_a_trial_that_ignores_sigterm_is_killed_after_the_grace_period(
    programs, _name, command, code, in_namespace
):
    keeper = start(programs, command, in_namespace=in_namespace, grace_s=SHORT_GRACE_S)
    wait_until_ready(programs)
    if in_namespace:
        psutil.Process(keeper.pid).children()[0].send_signal(TERM)
    else:
        keeper.signal(TERM)
    assert finish(programs, keeper, in_namespace=in_namespace) == (code, ExitReason.JOB_LOST)
    assert b"killing it" in programs.file(Stream.KEEPER)


@pytest.mark.parametrize("number", [TERM, INT, HUP], ids=lambda number: number.name)
def test_a_trial_receives_sigterm_after_any_termination_signal_to_its_keeper(programs, number):
    keeper = start(programs, f"exec {PYTHON} handler.py 3", grace_s=LONG_GRACE_S)
    wait_until_ready(programs)
    keeper.signal(number)
    assert finish(programs, keeper) == (3, ExitReason.JOB_LOST)


@pytest.mark.parametrize(
    "pair",
    [(TERM, TERM), (TERM, INT), (INT, TERM), (HUP, HUP)],
    ids=lambda pair: "+".join(n.name for n in pair),
)
def test_a_second_signal_ends_the_grace_period(programs, pair):
    keeper = start(programs, f"setsid sleep 1000 & exec {IGNORES_SIGTERM}", grace_s=LONG_GRACE_S)
    wait_until_ready(programs)
    keeper.signal(pair[0])
    wait_until(lambda: b"stopping" in programs.file(Stream.KEEPER), "the first signal is logged")
    keeper.signal(pair[1])
    assert finish(programs, keeper) == (128 + KILL, ExitReason.JOB_LOST)
    assert b"received a second signal" in programs.file(Stream.KEEPER)


def test_the_grace_period_on_the_command_line_overrides_the_one_in_the_settings(programs):
    keeper = start(
        programs, f"exec {IGNORES_SIGTERM}", arguments=("--grace-s", str(SHORT_GRACE_S)), grace_s=LONG_GRACE_S
    )
    wait_until_ready(programs)
    keeper.signal(TERM)
    assert finish(programs, keeper) == (128 + KILL, ExitReason.JOB_LOST)


@pytest.mark.parametrize("grace", ["soon", "-1", "inf"])
def test_an_invalid_grace_period_is_refused(programs, grace):
    keeper = start(programs, "true", arguments=("--grace-s", grace))
    assert keeper.wait() == 100
    assert f"GRACE_S is '{grace}'" in keeper.stderr


@pytest.mark.parametrize("_again", range(5))
def test_the_end_of_a_trial_is_reported_exactly_once_if_the_trial_exits_while_the_keeper_stops_it(
    programs, _again
):
    keeper = start(programs, "setsid sleep 1000 & echo > ready; exit 5", grace_s=LONG_GRACE_S)
    wait_until_ready(programs)
    keeper.signal(TERM)
    code, reason = finish(programs, keeper)
    assert code in (5, 128 + TERM)
    assert reason in ((ExitReason.JOB_LOST, ExitReason.NONZERO_EXIT) if code == 5 else (ExitReason.JOB_LOST,))


def test_a_stop_command_of_the_manager_also_ends_processes_in_other_sessions(programs):
    keeper = start(
        programs, f"{PYTHON} daemon.py; setsid {IGNORES_SIGTERM} & sleep 1000; true", grace_s=LONG_GRACE_S
    )
    wait_until_ready(programs)
    programs.manager.wait_for_message(TrialStarted)
    programs.manager.send(StopTrial(TRIAL, ExitReason.STOPPED_BY_USER))
    assert finish(programs, keeper) == (128 + TERM, ExitReason.STOPPED_BY_USER)


# ---- the kernel's OOM killer


def test_trial_processes_have_a_higher_oom_score_than_the_keeper(programs):
    keeper = start(
        programs,
        "(setsid cat /proc/self/oom_score_adj &) ; cat /proc/$$/oom_score_adj; echo > ready; exec sleep 1000",
    )
    wait_until_ready(programs)
    scores = [int(score) for score in programs.file(Stream.STDOUT).split()]
    own = Path(f"/proc/{keeper.pid}/oom_score_adj")
    assert scores
    # The keeper resets its own score after it has started the trial, possibly only after the output of the trial. So the test
    # waits.
    wait_until(
        lambda: all(score == min(int(own.read_text()) + 500, 1000) for score in scores),
        "the trial's score is higher than the keeper's",
    )
    keeper.signal(TERM)
    finish(programs, keeper)


@pytest.fixture
def memory_limit():
    """Create a control group with a memory limit; yield the command prefix that enters this group."""
    mounts = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((line.split(":", 2)[2] for line in mounts if ":memory:" in line), None)
    folder = Path(f"/sys/fs/cgroup/memory{own}") / f"trial-keeper-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("a control group with a memory limit cannot be created here")
    (folder / "memory.limit_in_bytes").write_text(str(200 << 20))
    # The kernel has this file only with swap accounting.
    with contextlib.suppress(OSError):
        (folder / "memory.memsw.limit_in_bytes").write_text(str(200 << 20))
    yield entering(folder)
    wait_until(lambda: not (folder / "cgroup.procs").read_text(), "no process is in the group")
    folder.rmdir()


def entering(group):
    return ("sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh")


@pytest.mark.parametrize(
    "command", [f"exec {PYTHON} greedy.py", f"{PYTHON} greedy.py; true", f"{PYTHON} greedy.py || exit 3"]
)
def test_the_message_of_an_oom_killed_trial_contains_the_memory_limit_and_the_remedy(
    programs, memory_limit, command
):
    keeper = start(programs, f"echo before >&2; {command}", prefix=memory_limit)
    code, reason = finish(programs, keeper)
    assert (code, reason) == (3 if "exit 3" in command else 128 + KILL, ExitReason.OUT_OF_MEMORY)
    (ended,) = programs.manager.all_of(TrialEnded)
    first, *rest = ended.message.splitlines()
    assert first == (
        "the container's memory limit of 200 MiB was reached, and the kernel killed a process of the trial; "
        "request more memory in the experiment file or use a smaller batch"
    )
    assert rest[0] == "before"


def test_a_trial_succeeds_if_it_handles_the_oom_kill_of_a_child(programs, memory_limit):
    keeper = start(programs, f"{PYTHON} greedy.py || true", prefix=memory_limit)
    assert finish(programs, keeper) == (0, ExitReason.SUCCEEDED)


def test_a_trial_has_the_reason_out_of_memory_only_if_its_process_was_oom_killed(programs, memory_limit):
    manager = programs.manager
    commands = {"first": "exit 3", "second": f"{PYTHON} greedy.py || exit 3", "third": "exit 3"}
    for trial_id, command in commands.items():
        programs.add_trial(command, trial_id=trial_id)
    keeper = programs.start_keeper(trial_id=None, job_id="env-0", options={"prefix": memory_limit})
    manager.wait_for(lambda: manager.all_of(Idle), "the keeper is idle")
    # The manager sends all trials at once, so the second and the third arrive while the first runs.
    for trial_id in commands:
        manager.send(RunTrial(trial_id, attempt_id(0)))
    manager.wait_for(lambda: len(manager.all_of(TrialEnded)) == len(commands), "all have ended")
    assert [(ended.key.trial_id, ended.exit_code, ended.reason) for ended in manager.all_of(TrialEnded)] == [
        ("first", 3, ExitReason.NONZERO_EXIT),
        ("second", 3, ExitReason.OUT_OF_MEMORY),
        ("third", 3, ExitReason.NONZERO_EXIT),
    ]
    manager.send(Shutdown("the test is over"))
    assert keeper.wait() == 0


def test_an_oom_kill_of_another_process_does_not_change_the_reason_of_a_failed_trial(programs, memory_limit):
    programs.gate("gate")
    other_process = subprocess.Popen([*memory_limit, "sleep", "1000"])
    keeper = start(programs, "echo > ready; read -r < gate || true; exit 3", prefix=memory_limit)
    wait_until_ready(programs)
    killed = subprocess.run([*memory_limit, sys.executable, programs.code / "greedy.py"], check=False)
    other_process.kill()
    other_process.wait()
    assert killed.returncode == -KILL
    programs.open_gate("gate")
    assert finish(programs, keeper) == (3, ExitReason.NONZERO_EXIT)


# ---- processes of another user


@pytest.fixture
def open_site(as_nobody):
    """A site that any user may enter, with a setuid program that becomes root; and a command prefix that runs a command as
    nobody.
    """
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    site = Site(folder)
    equip(site)
    site.manager.start()
    become_root = site.code / "become-root"
    shutil.copy(str(shutil.which("setpriv")), become_root)
    for path in folder.rglob("*"):
        os.chown(path, NOBODY, NOBODY)
    os.chown(become_root, 0, 0)
    become_root.chmod(stat.S_ISUID | 0o755)
    site.become_root = "./become-root --reuid=0 --regid=0 --clear-groups"
    yield site, as_nobody
    site.close()
    shutil.rmtree(folder)


# The trial starts a process that executes a setuid program, after which only root can signal it. The trial waits until its
# command line is `sleep`, because the kernel shows the new name of a process earlier.
BECOMES_ROOT = (
    "setsid {site.become_root} sleep 1000 & "
    'until read -r -d "" name < /proc/$!/cmdline; [ "$name" = sleep ]; do :; done; exit 4'
)


def add_trial_of_nobody(site, command):
    site.add_trial(command.format(site=site))
    for path in (site.workspace.manager_json, *site.workspace.trials.rglob("*")):
        os.chown(path, NOBODY, NOBODY)


@pytest.mark.any_machine
def test_a_reused_job_exits_if_it_cannot_kill_a_process_of_a_trial(open_site):
    site, as_nobody = open_site
    add_trial_of_nobody(site, BECOMES_ROOT)
    keeper = site.start_keeper(trial_id=None, job_id="env-0", options={"prefix": as_nobody})
    site.manager.wait_for_message(Idle)
    site.manager.send(RunTrial(TRIAL, attempt_id(0)))
    assert keeper.wait() == KeeperExit.TAINTED
    (left,) = stragglers()
    left.kill()
    left.wait()
    assert f"cannot kill process {left.pid} (sleep 1000)" in keeper.stderr
    assert len(site.manager.all_of(Idle)) == 1
    assert [ended.exit_code for ended in site.manager.all_of(TrialEnded)] == [4]


@pytest.mark.any_machine
def test_a_trial_ends_although_the_keeper_cannot_kill_one_of_its_processes_and_the_process_is_reported(
    open_site,
):
    site, as_nobody = open_site
    add_trial_of_nobody(site, f"sleep 1000 & {BECOMES_ROOT}")
    keeper = site.start_keeper(options={"prefix": as_nobody})
    assert keeper.wait() == 4
    (left,) = stragglers()
    try:
        assert left.cmdline() == ["sleep", "1000"]
        assert left.uids().real == 0
        assert f"cannot kill process {left.pid} (sleep 1000)" in keeper.stderr
    finally:
        left.kill()
        left.wait()
    (ended,) = site.manager.all_of(TrialEnded)
    assert (ended.exit_code, ended.reason) == (4, ExitReason.NONZERO_EXIT)


@pytest.fixture
def delegated_group():
    """A control group (v2) whose owner is the user `nobody`, like a user's group under systemd."""
    mount = next((path for path in V2_MOUNTS if os.access(path, os.W_OK)), None)
    folder = (mount or Path("/nowhere")) / f"trial-keeper-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("a control group cannot be created here")
    for path in (folder, folder / "cgroup.procs", folder / "cgroup.kill"):
        os.chown(path, NOBODY, NOBODY)
    yield folder
    (folder / "cgroup.kill").write_text("1")
    wait_until(lambda: not (folder / "cgroup.procs").read_text(), "no process is in the group")
    folder.rmdir()


@pytest.mark.any_machine
def test_a_process_of_another_user_is_killed_with_its_control_group(open_site, delegated_group):
    site, as_nobody = open_site
    # The keeper moves the command into a control group soon after its start. The command waits for this, so that its child is in
    # the group too.
    look = "until grep '/trial-[0-9]' /proc/self/cgroup; do :; done"
    add_trial_of_nobody(site, f"{look}; {BECOMES_ROOT}")
    site.manager.closes = False
    keeper = site.start_keeper(
        options={"prefix": (*entering(delegated_group), *as_nobody)}, collect_logs=True
    )
    assert finish(site, keeper) == (4, ExitReason.NONZERO_EXIT)
    assert f"/{delegated_group.name}/trial-" in site.file(Stream.STDOUT).decode()
    assert "cannot end" not in keeper.stderr
    assert [path for path in delegated_group.iterdir() if path.is_dir()] == []


# ---- a keeper that is killed

SPREAD_OUT = f"setsid {IGNORES_SIGTERM} & (sleep 1000 &) ; sleep 1000 | cat"


def wait_until_spread_out(site, keeper):
    """Wait for the shell, the process that ignores SIGTERM, two `sleep` processes, and `cat`."""
    wait_until_ready(site)
    wait_until(lambda: len(processes_of(keeper)) >= 5, "all processes of the trial run")


def guards():
    return [child for child in psutil.Process().children() if is_keepers(child) and not is_dead(child)]


def test_the_guard_ends_the_trial_of_a_killed_keeper(silent_site):
    site = silent_site
    equip(site)
    site.add_trial(SPREAD_OUT)
    keeper = site.start_keeper()
    wait_until_spread_out(site, keeper)
    keeper.signal(KILL)
    assert keeper.wait() == -KILL
    wait_until(
        lambda: not stragglers() and not guards(), "the trial and the guard have ended", timeout_s=DEADLINE_S
    )


def test_a_killed_keeper_with_control_groups_leaves_no_daemon_of_its_trial(silent_site, delegated_group):
    site = silent_site
    equip(site)
    look = "until grep -q '/trial-[0-9]' /proc/self/cgroup; do :; done"
    site.add_trial(f"{look}; {PYTHON} daemon.py; echo > ready; exec sleep 1000")
    keeper = site.start_keeper(options={"prefix": entering(delegated_group)})
    wait_until_ready(site)
    keeper.signal(KILL)
    assert keeper.wait() == -KILL
    wait_until(
        lambda: not stragglers() and not guards(), "the trial and the guard have ended", timeout_s=DEADLINE_S
    )
    assert [path for path in delegated_group.iterdir() if path.is_dir()] == []


def test_the_next_attempt_first_kills_processes_left_by_a_killed_keeper_and_a_killed_guard(
    silent_site, tmp_path
):
    site = silent_site
    equip(site)
    site.add_trial(f"{SPREAD_OUT}; true")
    # This process belongs to another task of the trial, as in another container on the same machine. The next attempt must not
    # kill it.
    other = subprocess.Popen(
        ["sleep", "1000"],
        env=os.environ
        | {"NNI_SYS_DIR": str(site.attempt(AttemptKey(TRIAL, attempt_id(0), f"{KEY.task}1")).path)},
    )
    try:
        keeper = site.start_keeper()
        wait_until_spread_out(site, keeper)
        (guard,) = [child for child in guards() if child.pid != keeper.pid]
        guard.kill()
        keeper.signal(KILL)
        keeper.wait()
        left = [process for process in stragglers() if process.pid != other.pid]
        assert len(left) >= 5
        # The command of the second attempt prints the states of the processes that the first attempt left. None may still run,
        # because it could write into files of the second attempt or use its GPU.
        document = json.loads(site.workspace.trial(TRIAL).trial_json.read_bytes())
        pids = " ".join(str(process.pid) for process in left)
        look = f"for pid in {pids}; do grep State /proc/$pid/status 2>/dev/null || true; done"
        site.workspace.trial(TRIAL).trial_json.write_text(json.dumps(document | {"command": look}))
        second = site.start_keeper(linger_s=0)
        assert second.wait() == 0
        states = site.file(Stream.STDOUT, AttemptKey(TRIAL, attempt_id(1), KEY.task)).decode()
        assert set(states.split("\n")) <= {"", "State:\tZ (zombie)"}
        # Some of these processes may end by themselves. The message counts only those that the second keeper has killed.
        assert re.search(r"killed [1-9] processes that an earlier attempt", second.stderr)
        assert stragglers() == [psutil.Process(other.pid)]
    finally:
        other.kill()
        other.wait()


# ---- exempt processes

EXEMPT = r"""
import json, os, subprocess, sys, time
from pathlib import Path
from trial_keeper.core.warm_command import WarmCommand
from trial_keeper.host.process import TrialProcess
from trial_keeper.processes import adopt_orphans, descendants
from trial_keeper.host.warm import WarmInterpreter, WarmStart

def end_of(trial):
    while (status := trial.poll()) is None:
        time.sleep(0.002)
    return status

def children():
    pids = sorted(map(int, Path("/proc/thread-self/children").read_text().split()))
    # Leave out the process that the warm interpreter has forked in advance for the next trial.
    return [pid for pid in pids if pid == warm.pid or os.getsid(pid) != warm.pid]

adopt_orphans()
folder = Path(sys.argv[1])
out, err = folder / "out", folder / "err"
environ = {**os.environ, "NNI_SYS_DIR": str(folder)}
helper = subprocess.Popen(["bash", "-c", "sleep 1000 & setsid sleep 1000 & wait"], start_new_session=True)
ended = subprocess.Popen(["bash", "-c", "exit 7"], start_new_session=True)
os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # nobody has waited for it
warm = WarmInterpreter(sys.executable, ("random",), os.environ)
assert warm.is_ready(20)
exempt_sessions = (helper.pid, ended.pid, warm.pid)
kept = sorted(exempt_sessions)
said = {}

command = "for i in {1..20}; do (true & true) & done; setsid sleep 1000 & (sleep 1000 &) ; exit 4"
trial = TrialProcess.started(command, str(folder), environ, out, err, exempt_sessions)
said["plain"] = [end_of(trial), trial.leftovers(), children() == kept]

(folder / "train.py").write_text(
    "import subprocess, sys\n"
    "subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
    "subprocess.run(['bash', '-c', 'sleep 1000 &'])\n"
    "sys.exit(int(sys.argv[1]))\n"
)
start = WarmStart(WarmCommand("python", "train.py", ("5",)), str(folder), environ, out, err)
trial = TrialProcess(warm.start(start), exempt_sessions, sys_dir=str(folder))
said["warm"] = [end_of(trial), trial.leftovers(), children() == kept]

(folder / "train.py").write_text("import signal\nprint('ready', flush=True)\nsignal.pause()\n")
trial = TrialProcess(warm.start(start), exempt_sessions, sys_dir=str(folder))
said["of_a_running_one"] = trial.poll()
trial.signal(kill=True)
said["killed"] = [end_of(trial), trial.leftovers(), children() == kept]

ends = set()
for _ in range(20):  # also in its first moment, before it leads a group
    trial = TrialProcess(warm.start(start), exempt_sessions, sys_dir=str(folder))
    trial.signal(kill=False)
    ends.add(end_of(trial))
said["stopped_at_once"] = [*ends, children() == kept]

(folder / "train.py").write_text("import sys\nsys.exit(6)\n")
warm.prepare(start)
trial = TrialProcess.started("exit 4", str(folder), environ, out, err, exempt_sessions)
said["beside_one_that_is_prepared"] = [end_of(trial), trial.leftovers(), children() == kept]
trial = TrialProcess(warm.start(start), exempt_sessions, sys_dir=str(folder))
said["prepared"] = [end_of(trial), trial.leftovers(), children() == kept]

said["ended"] = ended.wait()
said["helper"] = [helper.poll(), len(Path(f"/proc/{helper.pid}/task/{helper.pid}/children").read_text().split())]
for pid in descendants((helper.pid,)):
    os.kill(pid, 9)
os.killpg(helper.pid, 9)
helper.wait()
warm.close()
print(json.dumps(said))
"""


def test_processes_in_exempt_sessions_survive_every_trial_and_keep_their_parent_process(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", EXEMPT, str(tmp_path)], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {
        "plain": [4, [], True],
        "warm": [5, [], True],
        "of_a_running_one": None,
        "killed": [-KILL, [], True],
        "stopped_at_once": [-signal.SIGTERM, True],
        "beside_one_that_is_prepared": [4, [], True],
        "prepared": [6, [], True],
        "ended": 7,
        "helper": [None, 2],
    }
