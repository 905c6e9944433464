"""A real keeper runs many trials in sequence, and isolates them from each other."""

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from amounts import amount
from attempts import attempt_id
from deadlines import DEADLINE_S
from fake_manager import Site
from pythons import each_of, python_of
from real_experiment import wait_until

from trial_keeper.exit_codes import KeeperExit
from trial_keeper.wire.messages import (
    AttemptKey,
    Hello,
    Idle,
    RevokeTrial,
    RunTrial,
    Shutdown,
    StopTrial,
    Stream,
    TrialEnded,
    TrialRevoked,
)
from trial_keeper.wire.reasons import ExitReason

TRIALS = amount(50, 200)


def key_of(trial_id: str, attempt: int = 0) -> AttemptKey:
    return AttemptKey(trial_id, attempt_id(attempt), "main-0")


class Job:
    """The keeper of a reused job, and the manager's part of the protocol."""

    def __init__(self, site: Site, **overrides) -> None:
        self.site = site
        self.keeper = site.start_keeper(trial_id=None, job_id="env-0", **overrides)
        self.idles = 0
        self.made = 0
        self.await_idle()

    def await_idle(self) -> None:
        self.idles += 1
        manager = self.site.manager
        manager.wait_for(lambda: len(manager.all_of(Idle)) >= self.idles, f"idle for the {self.idles}. time")

    def give(self, command: str, **fields) -> str:
        trial_id = f"trial{self.made}"
        self.made += 1
        self.site.add_trial(command, trial_id=trial_id, **fields)
        self.site.manager.send(RunTrial(trial_id, attempt_id(0)))
        return trial_id

    def end_of(self, trial_id: str, attempt: int = 0) -> TrialEnded:
        key, manager = key_of(trial_id, attempt), self.site.manager
        return manager.wait_for(lambda: manager.store.ended.get(key), f"the end of {trial_id}")

    def run(self, command: str, **fields) -> bytes:
        """Run a trial; return its stdout when the keeper is idle again."""
        trial_id = self.give(command, **fields)
        ended = self.end_of(trial_id)
        said = self.site.file(Stream.STDOUT, key_of(trial_id))
        assert ended.exit_code == 0, self.site.file(Stream.STDERR, key_of(trial_id)).decode()
        self.await_idle()
        return said

    def leave(self) -> int:
        self.site.manager.send(Shutdown("the test is over"))
        return self.keeper.wait()

    @property
    def log(self) -> str:
        return self.keeper.stderr


@pytest.fixture
def job(site):
    return Job(site)


# ---- trials in sequence


def test_one_keeper_runs_many_trials_in_sequence(site):
    job = Job(site, collect_logs=True)
    for number in range(TRIALS):
        assert job.run(f"echo trial {number}") == f"trial {number}\n".encode()
    assert psutil.Process(job.keeper.pid).children(recursive=True) == []
    # Wait until the manager has received all bytes, because a Shutdown ends a keeper immediately.
    site.manager.wait_for(lambda: len(site.manager.store.closed) == TRIALS, "all trials are delivered")
    assert job.leave() == 0
    for number in range(TRIALS):
        key = key_of(f"trial{number}")
        assert site.manager.stored(Stream.STDOUT, key) == f"trial {number}\n".encode()
        ended = site.exit(key)
        assert ended.reason is ExitReason.SUCCEEDED
        assert ended.started_at_s <= ended.ended_at_s


def test_a_failed_trial_does_not_fail_the_reused_job(job):
    failed = job.give("exit 3")
    assert job.end_of(failed).exit_code == 3
    job.await_idle()
    assert job.run("echo fine") == b"fine\n"
    assert job.leave() == 0


def test_a_reused_job_runs_the_next_trial_after_a_stopped_trial(job):
    stopped = job.give("echo here; sleep 1000")
    wait_for_text(job.site.attempt(key_of(stopped)).stream(Stream.STDOUT), b"here")
    job.site.manager.send(StopTrial(stopped, ExitReason.EARLY_STOPPED))
    assert job.end_of(stopped).reason is ExitReason.EARLY_STOPPED
    job.await_idle()
    assert job.run("echo next") == b"next\n"


def test_a_queued_trial_can_be_revoked_and_a_running_trial_cannot(job):
    manager = job.site.manager
    assert manager.all_of(Hello)[0].supports_revoke
    os.mkfifo(job.site.code / "gate")
    running = job.give("read line < gate")
    next_one, last = job.give("echo next"), job.give("echo last")
    for trial_id in (running, last):
        manager.send(RevokeTrial(trial_id))
    manager.wait_for(lambda: manager.all_of(TrialRevoked), "one of them is revoked")
    (job.site.code / "gate").write_text("go on\n")
    assert job.end_of(next_one).exit_code == 0
    job.await_idle()
    assert manager.all_of(TrialRevoked) == [TrialRevoked(last)]
    assert not job.site.attempt(key_of(last)).path.exists()


def test_all_processes_of_a_trial_have_ended_when_the_keeper_is_idle_again(job):
    job.run("(setsid sleep 1000 & sleep 1000 & nohup sleep 1000 & disown) > nothing 2>&1; echo done")
    assert psutil.Process(job.keeper.pid).children(recursive=True) == []


def test_the_keeper_relays_the_output_of_all_trials_in_order(site):
    job = Job(site, relay_output=True)
    for number in range(5):
        job.run(f"echo out {number}; echo err {number} >&2")
    assert job.leave() == 0
    assert job.keeper.stdout_file.read_text() == "".join(f"out {number}\n" for number in range(5))
    assert [line for line in job.log.splitlines() if line.startswith("err")] == [
        f"err {number}" for number in range(5)
    ]


def test_files_that_a_trial_leaves_in_the_temporary_folder_are_logged_once(site, tmp_path):
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    site.environ["TMPDIR"] = str(tmp)
    job = Job(site)
    job.run('touch "$TMPDIR/cache"; mkdir "$TMPDIR/model"')
    assert (
        "the trial left files in the temporary folder: cache, model"
        in site.file(Stream.KEEPER, key_of("trial0")).decode()
    )
    job.run("true")
    assert "still there" not in site.file(Stream.KEEPER, key_of("trial1")).decode()


def test_a_keeper_without_trials_exits_after_the_idle_timeout(site):
    job = Job(site, idle_timeout_s=3.0)
    assert job.keeper.wait() == 0
    assert "no trial was received for 3 s" in job.log


def test_a_keeper_exits_after_max_trials(site):
    job = Job(site, max_trials=2)
    job.run("true")
    job.end_of(job.give("true"))
    assert job.keeper.wait() == 0


def test_a_trial_fails_and_the_job_exits_if_the_attempts_folder_cannot_be_created(site):
    job = Job(site)
    trial_id = "trial0"
    site.add_trial("true", trial_id=trial_id)
    (site.workspace.trial(trial_id).path / "attempts").write_text("in the way")
    site.manager.send(RunTrial(trial_id, attempt_id(0)))
    assert job.end_of(trial_id).reason is ExitReason.MOUNT
    assert job.keeper.wait() == KeeperExit.TAINTED


def test_a_reused_job_continues_with_a_restarted_manager(job):
    gate = job.site.gate("gate")
    trial_id = job.give(f"cat {gate}; echo done")
    wait_for_text(job.site.attempt(key_of(trial_id)).stream(Stream.KEEPER), b"the command runs")
    job.site.manager.die()
    job.site.open_gate("gate")
    job.site.manager.start()
    assert job.end_of(trial_id).exit_code == 0
    job.await_idle()
    assert job.run("echo next") == b"next\n"


def test_a_keeper_that_receives_sigterm_ends_its_trial_and_exits(job):
    trial_id = job.give("echo here; exec sleep 1000")
    wait_for_text(job.site.attempt(key_of(trial_id)).stream(Stream.STDOUT), b"here")
    job.keeper.signal(signal.SIGTERM)
    assert job.keeper.wait() == 0
    assert job.end_of(trial_id).reason is ExitReason.JOB_LOST


# ---- isolation of trials, in new processes and in forks

WARM = "as a fork of a warm interpreter"
# Each script prints a state and then changes this state. The next trial must print the original state.
LEAKS = {
    "environment": "import os; print(os.environ.get('LEAK')); os.environ['LEAK'] = os.putenv('LEAK', 'x') or 'x'",
    "working folder": "import os; print(os.getcwd()); os.chdir('/')",
    "umask": "import os; print(os.umask(0o077))",
    "signal mask": "import signal; print(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}))",
    "signal handlers": "import signal; print(signal.signal(signal.SIGTERM, signal.SIG_IGN))",
    "descriptors": "import os; print(sorted(os.listdir('/proc/self/fd'))); os.set_inheritable(os.dup2(1, 77), True)",
    "limits": "import resource as r; print(r.getrlimit(r.RLIMIT_NOFILE)); r.setrlimit(r.RLIMIT_NOFILE, (64, 64))",
    "nice level": "import os; print(os.nice(5) - 5)",
    "user modules": "import sys, types; print('mine' in sys.modules); import mine; mine.state = 1",
    "state of library modules": "import json; print(hasattr(json, 'leak')); json.leak = 1",
    "python path": "import sys; print([p for p in sys.path if 'leak' in p]); sys.path.insert(0, '/leak')",
    "arguments": "import sys; print(sys.argv); sys.argv.append('leak')",
    "main module": "print('leak' in globals()); leak = 1",
    "session": "import os; print(os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid())",
    "capability to dump core": "import resource as r; print(r.getrlimit(r.RLIMIT_CORE)); r.setrlimit(r.RLIMIT_CORE, (0, 0))",
    "alarm": "import signal; print(signal.alarm(1000))",
    "random numbers": "import random; print(len({random.random() for _ in range(3)}))",
}


@pytest.fixture(scope="module", params=["plain", "warm"])
def shared_job(request, tmp_path_factory):
    """All cases share one job, so that each trial runs after the changes of all earlier trials."""
    site = Site(tmp_path_factory.mktemp(request.param))
    site.manager.start()
    (site.code / "mine.py").write_text("state = 0\n")
    (site.code / "warming.py").write_text("print('warming')\n")
    job = Job(site, warm_imports=("json",) if request.param == "warm" else ())
    if request.param == "warm":
        until_warm(job)
    yield job, request.param
    code = job.leave()
    site.close()
    assert code == 0


@pytest.mark.parametrize("what", LEAKS)
def test_state_changes_made_by_a_trial_do_not_affect_the_next_trial(shared_job, what):
    job, kind = shared_job
    (job.site.code / "train.py").write_text(LEAKS[what] + "\n")
    keys = [key_of(f"trial{job.made + n}") for n in range(3)]
    said = [job.run(f"{sys.executable} train.py") for _ in keys]
    assert said[0] == said[1] == said[2]
    assert said[0]
    forks = [WARM.encode() in job.site.file(Stream.KEEPER, key) for key in keys]
    assert forks == [kind == "warm"] * 3, job.log


def test_random_numbers_differ_between_forked_trials(site):
    (site.code / "warming.py").write_text("print('warming')\n")
    (site.code / "train.py").write_text("import random; print(random.random())\n")
    job = Job(site, warm_imports=("random",))
    until_warm(job)
    assert len({job.run(f"{sys.executable} train.py") for _ in range(4)}) == 4


# ---- warm starts


def until_warm(job: Job) -> None:
    """Run trials until a trial is a fork. The first trials start cold, because the interpreter still imports modules."""
    for _ in range(100):
        job.run(f"{sys.executable} warming.py")
        if "as a fork of a warm interpreter" in job.log:
            return
    raise AssertionError(job.log)


def test_a_warm_trial_reports_metrics_and_handles_a_stop_request(site):
    (site.code / "warming.py").write_text("print('warming')\n")
    (site.code / "train.py").write_text(
        "import signal, sys\nimport nni_sdk as nni\nnni.get_next_parameter()\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "nni.report_intermediate_result(1)\nprint('here', flush=True)\nsignal.pause()\n"
    )
    job = Job(site, warm_imports=("json",))
    until_warm(job)
    trial_id = job.give(f"{sys.executable} train.py")
    wait_for_text(site.attempt(key_of(trial_id)).stream(Stream.STDOUT), b"here")
    site.manager.send(StopTrial(trial_id, ExitReason.STOPPED_BY_USER))
    ended = job.end_of(trial_id)
    assert (ended.reason, ended.exit_code) == (ExitReason.STOPPED_BY_USER, 7)
    assert b'"value": "1"' in site.manager.stored(Stream.METRICS, key_of(trial_id))
    assert job.leave() == 0


@pytest.mark.parametrize("warm_imports", [(), ("json",)], ids=["reuse", "warm"])
def test_each_trial_of_a_reused_job_has_its_own_stop_notice(site, warm_imports):
    (site.code / "warming.py").write_text("print('warming')\n")
    (site.code / "train.py").write_text(
        "import time\nimport nni_sdk as nni\nnni.get_next_parameter()\nnni.should_stop()\n"
        "print('here', flush=True)\n"
        "while not nni.should_stop():\n    time.sleep(0.01)\nprint(nni.stop_reason(), flush=True)\n"
    )
    job = Job(site, warm_imports=warm_imports)
    if warm_imports:
        until_warm(job)
    for reason in (ExitReason.EARLY_STOPPED, ExitReason.STOPPED_BY_USER):
        trial_id = job.give(f"{sys.executable} train.py")
        wait_for_text(site.attempt(key_of(trial_id)).stream(Stream.STDOUT), b"here")
        site.manager.send(StopTrial(trial_id, reason))
        ended = job.end_of(trial_id)
        assert (ended.reason, ended.exit_code) == (reason, 0)
        assert site.file(Stream.STDOUT, key_of(trial_id)).decode() == f"here\n{reason.value}\n"
    assert job.leave() == 0


def test_prefetched_warm_trials_have_separate_environments_and_never_start_if_they_are_stopped(site):
    (site.code / "warming.py").write_text("print('warming')\n")
    (site.code / "train.py").write_text(
        "import os, sys\n"
        "print(os.environ['NNI_TRIAL_JOB_ID'], os.environ['NNI_SYS_DIR'], os.getsid(0) == os.getpid(), flush=True)\n"
        "open(sys.argv[1]).read()\n"
    )
    gates = [site.gate(f"gate{number}") for number in range(4)]
    job = Job(site, warm_imports=("json",))
    until_warm(job)
    trials = [job.give(f"{sys.executable} train.py {gate}") for gate in gates]
    wait_for_text(site.attempt(key_of(trials[0])).stream(Stream.STDOUT), b"True")
    # The prefetched second trial must be stopped first, because it would start when the first trial ends.
    for number in (1, 0):
        site.manager.send(StopTrial(trials[number], ExitReason.STOPPED_BY_USER))
    for number in (2, 3):
        wait_for_text(site.attempt(key_of(trials[number])).stream(Stream.STDOUT), b"True")
        site.open_gate(f"gate{number}")
    for number, reason in (
        (0, ExitReason.STOPPED_BY_USER),
        (2, ExitReason.SUCCEEDED),
        (3, ExitReason.SUCCEEDED),
    ):
        key = key_of(trials[number])
        assert job.end_of(trials[number]).reason is reason
        assert site.file(Stream.STDOUT, key).decode() == f"{trials[number]} {site.attempt(key).path} True\n"
        assert WARM.encode() in site.file(Stream.KEEPER, key)
    assert site.workspace.attempts_of(trials[1]) == []
    assert job.leave() == 0


def test_trials_start_cold_and_the_reason_is_logged_once_if_their_command_needs_a_shell(site):
    job = Job(site, warm_imports=("json",))
    for _ in range(3):
        assert job.run("echo $((1 + 1))") == b"2\n"
    assert job.log.count("the command is not of the form `python script.py arguments`") == 1


def test_trials_start_cold_after_a_failed_warm_import(site):
    (site.code / "train.py").write_text("print('fine')\n")
    job = Job(site, warm_imports=("no_such_module",))
    for _ in range(20):
        assert job.run(f"{sys.executable} train.py") == b"fine\n"
    assert "no_such_module" in job.log
    assert "as a fork" not in job.log


@pytest.mark.parametrize("python", each_of({"3.7": python_of("3.7")}))
def test_trials_start_cold_and_the_reason_is_logged_once_if_their_python_is_older_than_3_8(site, python):
    (site.code / "train.py").write_text("import sys; print(sys.version_info[:2])\n")
    job = Job(site, warm_imports=("json",))
    for _ in range(100):
        assert job.run(f"{python} train.py") == b"(3, 7)\n"
        if "older than Python 3.8" in job.log:
            break
    assert job.run(f"{python} train.py") == b"(3, 7)\n"
    assert job.log.count("older than Python 3.8") == 1
    assert job.leave() == 0


def test_trials_start_cold_after_the_warm_interpreter_died(site):
    (site.code / "warming.py").write_text("print('warming')\n")
    job = Job(site, warm_imports=("json",))
    until_warm(job)
    # The keeper has two children: the interpreter, which is a session leader, and the standby fork, which is not.
    (interpreter,) = (
        child for child in psutil.Process(job.keeper.pid).children() if os.getsid(child.pid) == child.pid
    )
    interpreter.kill()
    assert job.run(f"{sys.executable} warming.py") == b"warming\n"
    assert job.run(f"{sys.executable} warming.py") == b"warming\n"
    assert job.leave() == 0


# This daemon is hard to find: it is the fork of a fork, has its own session, and has not called exec.
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print("daemon", os.getpid(), flush=True)
        time.sleep(1000)
    os._exit(0)
os.wait()
time.sleep(1000)
"""


def test_a_killed_keeper_leaves_no_process_of_a_warm_trial(site):
    (site.code / "warming.py").write_text("print('warming')\n")
    (site.code / "train.py").write_text(DAEMON)
    job = Job(site, warm_imports=("json",))
    until_warm(job)
    trial_id = job.give(f"{sys.executable} train.py")
    wait_for_text(site.attempt(key_of(trial_id)).stream(Stream.STDOUT), b"daemon")
    below = psutil.Process(job.keeper.pid).children(recursive=True)
    assert len(below) in (3, 4), "two processes of the trial, the interpreter, and possibly the standby fork"
    job.keeper.signal(signal.SIGKILL)
    job.keeper.process.wait(DEADLINE_S)
    _, alive = psutil.wait_procs(below, timeout=DEADLINE_S)
    assert alive == []


def wait_for_text(path: Path, text: bytes) -> None:
    wait_until(lambda: path.exists() and text in path.read_bytes(), f"{text!r} in {path}")


def test_a_trial_keeps_the_exit_record_of_its_first_attempt_if_its_preparation_fails(site):
    job = Job(site)
    trial_id = job.give("true")
    assert job.end_of(trial_id).exit_code == 0
    job.await_idle()
    assert job.leave() == 0
    path = site.attempt(key_of(trial_id)).exit_json
    before = path.read_bytes()
    site.workspace.trial(trial_id).trial_json.write_text("no document")
    idles = len(site.manager.all_of(Idle))
    second = Job(site, linger_s=0.5)
    site.manager.wait_for(lambda: len(site.manager.all_of(Idle)) > idles, "the second keeper is idle")
    site.manager.send(RunTrial(trial_id, attempt_id(0)))
    assert second.keeper.wait() == KeeperExit.TAINTED
    assert "the trial could not be prepared" in second.log
    assert path.read_bytes() == before
