"""The keeper as a process: the trial that it starts, its output, and its exit code."""

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from attempts import attempt_id
from deadlines import DEADLINE_S
from fake_manager import EXPERIMENT, KEY, TOKEN, TRIAL
from real_experiment import wait_until

from nni_sdk.records import decode
from trial_keeper import __version__
from trial_keeper.wire.messages import AttemptKey, Hello, StopTrial, Stream, TrialEnded, TrialStarted
from trial_keeper.wire.reasons import ExitReason

GOLDEN = Path(__file__).parents[1] / "golden" / "environments"
REPORTING = """
import sys
import nni_sdk as nni
nni.get_next_parameter()
for i in range(300):
    nni.report_intermediate_result({"default": i, "note": "é" * (i % 7)})
nni.report_final_result(300)
print("to stdout")
print("to stderr", file=sys.stderr)
"""
# The trial reports metrics after it has received SIGTERM.
REPORTS_AFTER_SIGTERM = """
import signal, sys
import nni_sdk as nni
nni.get_next_parameter()
def stop(*_):
    for i in range(1000):
        nni.report_intermediate_result(i)
    nni.report_final_result("last words")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
nni.report_intermediate_result("ready")
while True:
    signal.pause()
"""
# The trial exits by itself when should_stop() is true. If it received SIGTERM, it would print "SIGTERM".
ASKS_FOR_STOP = """
import signal, sys, time
import nni_sdk as nni
nni.get_next_parameter()
signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM", flush=True))
nni.should_stop()
nni.report_intermediate_result("ready")
while not nni.should_stop():
    time.sleep(0.01)
print("stop:", nni.stop_reason(), flush=True)
nni.report_final_result(4)
"""
# The trial calls should_stop() once and ignores the result, so only signals can end it.
ASKS_AND_IGNORES = """
import signal, time
import nni_sdk as nni
nni.get_next_parameter()
signal.signal(signal.SIGTERM, lambda *_: nni.report_intermediate_result("SIGTERM"))
nni.should_stop()
nni.report_intermediate_result("ready")
while True:
    signal.pause()
"""
IGNORES_SIGTERM = """
import signal, subprocess
import nni_sdk as nni
nni.get_next_parameter()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
children = [subprocess.Popen(["sleep", "1000"]), subprocess.Popen(["sleep", "1000"], start_new_session=True)]
nni.report_intermediate_result({"default": 0, "pids": [child.pid for child in children]})
while True:
    signal.pause()
"""


def exit_of(site, key=KEY):
    return site.exit(key)


def run_keeper(*arguments, environ):
    return subprocess.run(
        [sys.executable, "-m", "trial_keeper", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def assert_has_ended(pid):
    """Wait until a process that is not a child of this process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], 10)[0], f"process {pid} still runs"
    finally:
        os.close(descriptor)


# ---- an ordinary trial


def test_the_manager_receives_the_unchanged_metrics_of_a_trial_and_one_report_of_its_end(site):
    site.add_python_trial(REPORTING)
    keeper = site.start_keeper()
    assert keeper.wait() == 0
    written = decode(site.file(), 0)
    assert len(written.records) == 301
    assert site.manager.stored() == site.file()
    assert site.manager.store.records[KEY] == written.records
    (ended,) = site.manager.all_of(TrialEnded)
    assert ended == exit_of(site)
    assert ended.reason is ExitReason.SUCCEEDED
    assert ended.final_sizes == {Stream.METRICS: len(site.file())}
    assert ended.message == ""
    (started,) = site.manager.all_of(TrialStarted)
    assert started.started_at_s == ended.started_at_s <= ended.ended_at_s <= time.time()
    assert site.manager.messages.index(started) < site.manager.messages.index(ended)
    assert site.manager.all_of(Hello) == [Hello(__version__, EXPERIMENT, TRIAL, "main-0", (KEY,))]


def test_the_manager_receives_all_streams_completely_if_log_collection_is_enabled(site):
    site.add_python_trial(REPORTING)
    assert site.start_keeper(collect_logs=True).wait() == 0
    assert site.file(Stream.STDOUT) == b"to stdout\n"
    assert site.file(Stream.STDERR) == b"to stderr\n"
    assert b"the command runs" in site.file(Stream.KEEPER)
    for stream in Stream:
        assert site.manager.stored(stream) == site.file(stream), stream
        assert exit_of(site).final_sizes[stream] == len(site.file(stream))


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [
        ("exit 0", 0, ExitReason.SUCCEEDED),
        ("exit 3", 3, ExitReason.NONZERO_EXIT),
        ("kill -TERM $$", 143, ExitReason.SIGNAL),
    ],
)
def test_the_keeper_exits_with_the_exit_code_of_its_trial(site, command, code, reason):
    # These are three kinds of exits; test_process_trees.py has the others.
    site.add_trial(f"echo why >&2; {command}")
    assert site.start_keeper().wait() == code
    assert (exit_of(site).exit_code, exit_of(site).reason) == (code, reason)
    assert site.manager.all_of(TrialEnded) == [exit_of(site)]
    assert exit_of(site).message.startswith("why") == bool(code)
    assert site.file(Stream.STDOUT) == b""


def test_the_message_of_a_failed_trial_is_the_last_part_of_its_stderr(site):
    site.add_trial("seq 100000 >&2; exit 1")
    assert site.start_keeper().wait() == 1
    lines = exit_of(site).message.splitlines()
    assert lines[-1] == "100000"
    assert len(lines) > 100
    assert lines == [str(number) for number in range(100001 - len(lines), 100001)]


# ---- the environment of a trial


def trial_environ(site):
    dump = (site.attempt().output / "environ").read_text()
    return dict(line.split("=", 1) for line in dump.split("\0") if line)


DUMP = 'env -0 > "$NNI_OUTPUT_DIR/environ"; pwd; cat'


def test_a_trial_inherits_the_container_variables_but_no_variables_of_the_keeper(site):
    site.environ["GREETING"] = "a 'b' \"c\" $HOME\n=é"
    path = [entry for entry in site.environ.get("PYTHONPATH", "").split(":") if entry] + ["/opt/mine", "src"]
    site.environ["PYTHONPATH"] = ":".join(path)
    site.add_trial(DUMP)
    assert site.start_keeper().wait() == 0
    environ = trial_environ(site)
    folder = site.attempt().path
    assert {name: value for name, value in environ.items() if name.startswith("NNI_")} == {
        "NNI_PLATFORM": "local",
        "NNI_EXP_ID": EXPERIMENT,
        "NNI_TRIAL_JOB_ID": TRIAL,
        "NNI_TRIAL_SEQ_ID": "7",
        "NNI_SYS_DIR": str(folder),
        "NNI_OUTPUT_DIR": str(folder / "output"),
        "NNI_CHECKPOINT_DIR": str(folder.parents[2] / "checkpoints"),
        "NNI_CODE_DIR": str(site.code),
    }
    assert environ["PYTHONUNBUFFERED"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in environ
    assert not [name for name in environ if name.startswith("TRIAL_KEEPER_")]
    of_bash = {"PWD", "OLDPWD", "SHLVL", "PS1", "_"}
    own = {
        name: value for name, value in environ.items() if not name.startswith("NNI_") and name not in of_bash
    }
    container = {name: value for name, value in site.environ.items() if name not in of_bash}
    path.append(str(site.workspace.sdk))
    assert own == container | {"PYTHONPATH": ":".join(path), "PYTHONUNBUFFERED": "1"}


def test_a_trial_starts_in_its_code_folder_with_an_empty_stdin(site):
    site.add_trial(DUMP)
    read_end, write_end = os.pipe()
    os.write(write_end, b"for the keeper")
    try:
        assert site.start_keeper(options={"stdin": read_end}).wait() == 0
    finally:
        os.close(read_end)
        os.close(write_end)
    assert site.file(Stream.STDOUT).decode() == f"{site.code}\n"
    parameters = site.workspace.trial(TRIAL).parameter_cfg.read_bytes()
    assert site.attempt().parameter_cfg.read_bytes() == parameters


def test_the_file_named_by_the_variable_bash_env_is_sourced_once_per_trial(site, tmp_path):
    sourced = tmp_path / "sourced.sh"
    sourced.write_text("cat; echo sourced; FOUND=by-the-command\n")
    site.environ["BASH_ENV"] = str(sourced)
    site.add_trial("echo $FOUND\nno-such-command")
    assert site.start_keeper().wait() == 127
    assert site.file(Stream.STDOUT).decode() == "sourced\nby-the-command\n"
    assert "line 2: no-such-command" in site.file(Stream.STDERR).decode()


@pytest.mark.parametrize(
    ("indices", "container", "visible"),
    [((), "0,1,2", "-1"), ((0, 2), None, "0,2"), (None, "1", "1"), (None, None, None)],
)
def test_cuda_visible_devices_lists_the_gpus_assigned_to_the_trial(site, indices, container, visible):
    if container is not None:
        site.environ["CUDA_VISIBLE_DEVICES"] = container
    site.add_trial(DUMP, gpu_indices=indices)
    assert site.start_keeper().wait() == 0
    assert trial_environ(site).get("CUDA_VISIBLE_DEVICES") == visible


def test_the_token_of_the_keeper_is_written_to_no_file(site):
    site.add_trial("env; env >&2; exit 1")
    keeper = site.start_keeper(collect_logs=True, relay_output=True)
    assert keeper.wait() == 1
    files = [path for path in site.code.parent.rglob("*") if path.is_file()]
    assert keeper.stderr_file in files
    assert not [path for path in files if TOKEN.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("recorded", "task"),
    [("openpai-upper-case-role", "Bert_Large-1"), ("frameworkcontroller", None)],
)
def test_the_folder_of_a_task_has_the_task_name_that_the_cluster_sets(site, recorded, task):
    lines = (GOLDEN / f"{recorded}.env").read_text().splitlines()
    cluster = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    task = task or f"{cluster['FC_TASKROLE_NAME']}-{cluster['FC_TASK_INDEX']}"
    site.environ |= cluster
    site.add_trial(DUMP)
    assert site.start_keeper().wait() == 0
    key = AttemptKey(TRIAL, attempt_id(0), task)
    assert exit_of(site, key).reason is ExitReason.SUCCEEDED
    assert site.manager.all_of(TrialEnded)[0].key == key
    assert site.manager.all_of(Hello)[0].task == task


# ---- stopping


def test_the_manager_receives_the_metrics_that_a_trial_reports_after_sigterm(site):
    site.add_python_trial(REPORTS_AFTER_SIGTERM)
    keeper = site.start_keeper()
    site.manager.wait_for_bytes(b"ready")
    keeper.signal(signal.SIGTERM)
    assert keeper.wait() == 0
    assert site.manager.stored() == site.file()
    ready, first_after, *_, last = site.manager.store.records[KEY]
    assert last.value == '"last words"'
    assert exit_of(site).reason is ExitReason.JOB_LOST
    assert exit_of(site).metrics_size_at_stop == ready.offset + ready.size == first_after.offset
    assert site.manager.all_of(TrialEnded)[-1] == exit_of(site)


@pytest.mark.parametrize("command", ["exec sleep 100", "sleep 100; true"])
def test_the_reason_is_job_lost_if_the_keeper_receives_sigterm_just_after_its_trial_does(site, command):
    site.add_trial(f"echo $$ > written; mv written pid; {command}")
    keeper = site.start_keeper()
    wait_until((site.code / "pid").exists, "the trial has written its pid")
    pid = int((site.code / "pid").read_text())
    os.killpg(pid, signal.SIGTERM)
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the keeper has reaped it")
    keeper.signal(signal.SIGTERM)
    assert keeper.wait() == 128 + signal.SIGTERM
    assert exit_of(site).reason is ExitReason.JOB_LOST


def test_the_reason_is_signal_if_only_the_trial_receives_sigterm(site):
    site.add_trial("kill -TERM $$; sleep 100")
    assert site.start_keeper().wait() == 128 + signal.SIGTERM
    assert exit_of(site).reason is ExitReason.SIGNAL


@pytest.mark.parametrize("command", ["true; {} ; true", "{} | cat", "({})& wait"])
def test_training_code_keeps_its_grace_period_if_sigterm_ends_only_the_shell(site, command):
    (site.code / "train.py").write_text(REPORTS_AFTER_SIGTERM)
    site.add_trial(command.format(f"{sys.executable} train.py"))
    keeper = site.start_keeper()
    site.manager.wait_for_bytes(b"ready")
    site.manager.send(StopTrial(TRIAL, ExitReason.EARLY_STOPPED))
    assert keeper.wait() == 128 + signal.SIGTERM
    assert site.manager.store.records[KEY][-1].value == '"last words"'
    assert exit_of(site).reason is ExitReason.EARLY_STOPPED


@pytest.mark.parametrize("reason", [ExitReason.EARLY_STOPPED, ExitReason.STOPPED_BY_USER])
def test_the_exit_record_of_a_stopped_trial_contains_the_reason_why_it_was_stopped(site, reason):
    site.add_python_trial(REPORTS_AFTER_SIGTERM)
    keeper = site.start_keeper()
    site.manager.wait_for_bytes(b"ready")
    site.manager.send(StopTrial(TRIAL, reason))
    assert keeper.wait() == 0
    assert [ended.reason for ended in site.manager.all_of(TrialEnded)] == [reason]
    assert exit_of(site).reason is reason


@pytest.mark.parametrize("reason", [ExitReason.EARLY_STOPPED, ExitReason.TIME_LIMIT])
def test_a_trial_that_calls_should_stop_receives_no_signal_and_exits_by_itself(site, reason):
    site.add_python_trial(ASKS_FOR_STOP)
    keeper = site.start_keeper()
    site.manager.wait_for_bytes(b"ready")
    site.manager.send(StopTrial(TRIAL, reason))
    assert keeper.wait() == 0
    assert site.file(Stream.STDOUT).decode() == f"stop: {reason.value}\n"
    ready, final = site.manager.store.records[KEY]
    assert (exit_of(site).reason, exit_of(site).metrics_size_at_stop) == (reason, ready.offset + ready.size)
    assert (final.value, final.offset) == ("4", ready.offset + ready.size)


def test_a_keeper_writes_the_stop_notice_when_it_receives_sigterm(site):
    site.add_python_trial(ASKS_FOR_STOP)
    keeper = site.start_keeper()
    site.manager.wait_for_bytes(b"ready")
    keeper.signal(signal.SIGTERM)
    assert keeper.wait() == 0
    assert site.file(Stream.STDOUT) == b"stop: job lost\n"


def test_training_code_that_ignores_the_stop_notice_receives_sigterm_and_then_sigkill(
    site,
):
    site.add_python_trial(ASKS_AND_IGNORES)
    keeper = site.start_keeper(grace_s=2.0)
    site.manager.wait_for_bytes(b"ready")
    asked_at_s = time.time()
    site.manager.send(StopTrial(TRIAL, ExitReason.EARLY_STOPPED))
    site.manager.wait_for_bytes(b"SIGTERM")
    assert time.time() - asked_at_s >= 1.0
    assert keeper.wait() == 128 + signal.SIGKILL
    assert exit_of(site).ended_at_s - asked_at_s >= 2.0
    log = site.file(Stream.KEEPER)
    assert b"awaits the stop notice: SIGTERM in 1 s" in log
    assert b"killing it" in log


def test_a_trial_receives_sigterm_immediately_if_the_stop_notice_cannot_be_written(site):
    site.add_python_trial(ASKS_FOR_STOP)
    keeper = site.start_keeper()
    site.manager.wait_for_bytes(b"ready")
    # The keeper first writes the stop notice to this temporary path. A folder at the path makes the write fail, even for root.
    (site.attempt().path / ".stop_notice.json.new" / "full").mkdir(parents=True)
    keeper.signal(signal.SIGTERM)
    wait_until(lambda: b"SIGTERM" in site.file(Stream.STDOUT), "the signal is handled")
    keeper.signal(signal.SIGTERM)
    assert keeper.wait() == 128 + signal.SIGKILL


def test_a_trial_receives_sigterm_although_its_folder_cannot_be_read_any_more(site, open_way, as_nobody):
    site.add_trial("trap 'echo SIGTERM; exit 0' TERM; echo ready; while :; do sleep 0.1; done")
    attempts = site.workspace.trial(TRIAL).attempts
    attempts.mkdir()
    attempts.chmod(0o777)
    keeper = site.start_keeper(options={"prefix": as_nobody})
    site.manager.wait_for(lambda: site.manager.all_of(TrialStarted), "the trial runs")
    wait_until(lambda: site.file(Stream.STDOUT), "the trap is set")
    site.attempt().path.chmod(0)
    keeper.signal(signal.SIGTERM)
    wait_until(lambda: b"SIGTERM" in site.file(Stream.STDOUT), "the signal is handled")
    site.attempt().path.chmod(0o755)
    assert keeper.wait() == 0, keeper.stderr


def test_a_trial_that_ignores_sigterm_is_killed_with_all_its_processes(site):
    site.add_python_trial(IGNORES_SIGTERM)
    keeper = site.start_keeper(grace_s=0.3)
    site.manager.wait_for_bytes(b"pids")
    value = site.manager.store.records[KEY][0].value
    asked_at_s = time.time()
    keeper.signal(signal.SIGTERM)
    assert keeper.wait() == 128 + signal.SIGKILL
    assert exit_of(site).ended_at_s - asked_at_s >= 0.3
    for pid in json.loads(value)["pids"]:
        assert_has_ended(pid)
    assert b"killing it" in site.file(Stream.KEEPER)


def test_a_keeper_with_pid_1_leaves_no_process(site):
    prefix = ("unshare", "--pid", "--fork", "--mount-proc")
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("tests cannot create a PID namespace here")
    site.add_trial("setsid sleep 1000 & (true & true) & echo $PPID; exit 4")
    assert site.start_keeper(collect_logs=True, options={"prefix": prefix}).wait() == 4
    assert site.manager.stored(Stream.STDOUT) == b"1\n"
    assert site.manager.all_of(TrialEnded) == [exit_of(site)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_keeper_handles_a_signal_that_it_receives_before_it_has_imported_grpc(silent_site, number):
    site = silent_site
    site.add_trial('trap "exit 5" TERM; echo > started; sleep 1000 & wait')
    os.mkfifo(site.code / "started")
    keeper = site.start_keeper(linger_s=0, grace_s=20)
    # This read returns when the command of the trial runs. At that time, the keeper has not imported gRPC.
    (site.code / "started").read_bytes()
    keeper.signal(number)
    assert keeper.wait() in (5, 128 + signal.SIGTERM)
    assert exit_of(site).reason is ExitReason.JOB_LOST


# ---- without a manager


def test_a_trial_runs_without_a_manager(silent_site):
    site = silent_site
    site.add_python_trial(REPORTING.replace("print(", "sys.exit(3) if i else print("))
    keeper = site.start_keeper(linger_s=0.5)
    assert keeper.wait() == 3
    assert len(decode(site.file(), 0).records) == 301
    ended = exit_of(site)
    assert (ended.exit_code, ended.final_sizes) == (3, {Stream.METRICS: len(site.file())})
    assert time.time() >= ended.ended_at_s + 0.5
    assert keeper.stderr.count("no program listens at 127.0.0.1:9") == 1


# ---- errors before the start


def test_a_version_mismatch_prevents_the_start_of_the_trial_and_the_error_has_a_remedy(site):
    site.manager.version = "99.1.0"
    site.manager.write_document()
    site.add_trial("touch ran")
    keeper = site.start_keeper()
    assert keeper.wait() == 103
    assert not (site.code / "ran").exists()
    ended = exit_of(site)
    assert (ended.reason, ended.exit_code) == (ExitReason.VERSION, 103)
    for text in (ended.message, keeper.stderr):
        assert "99.1.0" in text
        assert __version__ in text
        assert "pip install" in text
    assert site.manager.messages == []


def test_a_version_mismatch_is_ignored_if_the_version_check_is_disabled(site):
    site.manager.version = "99.1.0"
    site.manager.write_document()
    site.add_trial("touch ran")
    assert site.start_keeper(version_check=False).wait() == 0
    assert (site.code / "ran").exists()


def test_a_keeper_without_a_workspace_exits_with_code_101_and_the_missing_path(site, tmp_path):
    keeper = site.start_keeper(workspace=str(tmp_path / "nowhere"))
    assert keeper.wait() == 101
    assert keeper.stderr.count("\n") == 1
    assert re.match(
        r"trial-keeper: cannot find \S+/nowhere/trials/trial1/trial\.json: .*check the mount", keeper.stderr
    )


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"addresses": []}'])
def test_an_invalid_manager_json_is_an_error_with_a_remedy(site, content):
    site.add_trial("touch ran")
    site.workspace.manager_json.write_bytes(content)
    keeper = site.start_keeper()
    assert keeper.wait() == 101
    assert re.match(r"trial-keeper: cannot read manager\.json: .*nnictl resume.*\n$", keeper.stderr)
    assert not (site.code / "ran").exists()


def test_a_workspace_that_refuses_new_folders_causes_an_error(site):
    site.add_trial("touch ran")
    site.workspace.trial(TRIAL).attempts.write_text("a file")
    keeper = site.start_keeper()
    assert keeper.wait() == 102
    assert re.match(
        r"trial-keeper: cannot write to the workspace \S+: Not a directory; check .*\n$", keeper.stderr
    )
    assert not (site.code / "ran").exists()


@pytest.fixture
def private_mounts():
    """A command prefix that runs a shell script in a new mount namespace. The arguments after the script are passed to the
    script.
    """
    prefix = ("unshare", "--mount", "sh", "-c")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*prefix, "mount -t tmpfs t /mnt"], capture_output=True).returncode
    ):
        pytest.skip("tests cannot mount anything here")
    return prefix


@pytest.mark.parametrize(
    ("mount", "remedy", "code"),
    [
        (
            "mount --bind {0} {0} && mount -o remount,ro,bind {0}",
            "Read-only file system; mount it read-write",
            111,
        ),
        (
            "mkdir {0}-full && mount -t tmpfs -o size=64k full {0}-full && cp -r {0}/. {0}-full && "
            "mount --move {0}-full {0} && {{ cat /dev/zero > {0}/filler || true; }} 2>/dev/null",
            "No space left on device; free some space there",
            112,
        ),
    ],
)
def test_a_read_only_or_full_workspace_is_an_error_with_a_remedy(site, private_mounts, mount, remedy, code):
    site.add_trial("touch ran")
    script = mount.format(site.workspace.root) + ' && exec "$@"'
    keeper = site.start_keeper(options={"prefix": (*private_mounts, script, "sh")})
    assert keeper.wait() == code
    assert keeper.stderr == f"trial-keeper: cannot write to the workspace {site.workspace.root}: {remedy}\n"
    assert not (site.code / "ran").exists()


def test_the_keeper_writes_the_exit_record_as_soon_as_the_workspace_is_writable_again(silent_site):
    site = silent_site
    # The keeper first writes exit.json to this temporary path. A folder at the path makes the write fail, as a full disk would.
    site.add_trial('mkdir "$NNI_SYS_DIR/.exit.json.new"; exit 3')
    keeper = site.start_keeper()
    wait_until(lambda: "the command ended" in keeper.stderr, "the command has ended")
    assert f"cannot write to the workspace {site.workspace.root}" in keeper.stderr
    wait_until(
        lambda: "exit.json could not be written; retrying" in keeper.stderr,
        "the keeper waits for the workspace",
    )
    assert not site.attempt().exit_json.exists()
    (site.attempt().path / ".exit.json.new").rmdir()
    wait_until(site.has_ended, "the end is recorded")
    ended = site.exit()
    assert (ended.reason, ended.exit_code) == (ExitReason.NONZERO_EXIT, 3)


def test_the_trial_fails_but_the_keeper_does_not_if_the_disk_fills_up_during_the_trial(site, private_mounts):
    site.add_trial("cat /dev/zero")
    root = site.workspace.root
    script = (
        f"mkdir {root}-small && mount -t tmpfs -o size=1m small {root}-small && cp -r {root}/. {root}-small && "
        f'mount --move {root}-small {root} && exec "$@"'
    )
    keeper = site.start_keeper(options={"prefix": (*private_mounts, script, "sh")})
    assert keeper.wait() == 1
    (ended,) = site.manager.all_of(TrialEnded)
    assert (ended.reason, ended.exit_code) == (ExitReason.NONZERO_EXIT, 1)
    assert f"cannot write to the workspace {root}: No space left on device; free some space" in keeper.stderr


@pytest.mark.parametrize(("code_dir", "path"), [("{}/nowhere", None), ("{}/file", None), ("{}", "/nowhere")])
def test_a_keeper_whose_command_cannot_start_reports_that_and_exits_with_code_104(site, code_dir, path):
    (site.code / "file").touch()
    if path is not None:
        site.environ["PATH"] = path
    site.add_trial("touch ran", code_dir=code_dir.format(site.code))
    keeper = site.start_keeper(collect_logs=True)
    assert keeper.wait() == 104
    (ended,) = site.manager.all_of(TrialEnded)
    assert ended == exit_of(site)
    assert (ended.reason, ended.exit_code) == (ExitReason.COULD_NOT_START, 104)
    assert re.match(
        r"cannot (enter the code folder|start bash for the command) .*; (check|use) ", ended.message
    )
    assert site.manager.all_of(TrialStarted) == []


@pytest.mark.parametrize("command", [r"echo \u0000", "x" * 200_000])
def test_a_trial_fails_with_a_short_message_if_exec_refuses_its_command(site, command):
    site.add_trial("COMMAND")
    document = site.workspace.trial(TRIAL).trial_json
    document.write_text(document.read_text().replace("COMMAND", command))
    assert site.start_keeper().wait() == 104
    (ended,) = site.manager.all_of(TrialEnded)
    assert re.match(r"cannot start (bash for )?the command '.{,210}'", ended.message)


def test_a_keeper_rejects_trial_json_with_a_lone_surrogate_in_the_command(site):
    site.add_trial("COMMAND")
    document = site.workspace.trial(TRIAL).trial_json
    document.write_text(document.read_text().replace("COMMAND", r"echo \ud800"))
    keeper = site.start_keeper()
    assert keeper.wait() == 101
    assert "cannot read trial.json" in keeper.stderr


def test_the_error_of_a_keeper_without_settings_lists_all_missing_variables(site):
    result = run_keeper(environ=site.environ)
    assert (result.returncode, result.stdout) == (100, "")
    assert result.stderr.startswith("trial-keeper: cannot read the keeper's settings: ")
    for name in ("EXPERIMENT_ID", "JOB_ID", "WORKSPACE", "TOKEN"):
        assert f"TRIAL_KEEPER_{name} is not set" in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_trial_id_with_a_path_outside_the_workspace_is_refused(site):
    keeper = site.start_keeper(trial_id="../../etc")
    assert keeper.wait() == 100
    assert re.match(r"trial-keeper: cannot run trial '\.\./\.\./etc': ", keeper.stderr)


def test_an_internal_error_ends_the_keeper_with_code_110_and_kills_the_trial(site):
    # A manager never sends a second Welcome on an open stream. The test sends one to cause an unexpected error in the keeper.
    from trial_keeper.wire.messages import Welcome

    site.add_trial("echo $$; exec sleep 1000")
    keeper = site.start_keeper()
    site.manager.wait_for(lambda: site.manager.all_of(TrialStarted), "TrialStarted")
    site.manager.send(Welcome(__version__))
    assert keeper.wait() == 110
    assert "Traceback" in keeper.stderr
    assert "trial-keeper: cannot continue: The keeper has a bug." in keeper.stderr
    assert_has_ended(int(site.file(Stream.STDOUT)))


def test_help_and_version_need_no_settings(site):
    help_page = run_keeper("--help", environ=site.environ)
    assert (help_page.returncode, help_page.stderr) == (0, "")
    assert help_page.stdout.startswith("usage: trial-keeper")
    assert run_keeper("--version", environ=site.environ).stdout == f"trial-keeper {__version__}\n"


def test_an_unknown_argument_causes_a_one_line_error(site):
    result = run_keeper("--verbose", "now", environ=site.environ | site.settings().to_environ())
    assert (result.returncode, result.stdout) == (100, "")
    assert (
        result.stderr
        == "cannot use '--verbose now': trial-keeper takes --grace-s N, --help, --version, doctor, doctor --json or "
        "ctl COMMAND only\n"
    )


# ---- attempts


def test_a_restarted_job_starts_a_second_attempt(site):
    site.add_trial('echo "$NNI_SYS_DIR"')
    for _ in range(2):
        assert site.start_keeper(collect_logs=True).wait() == 0
    keys = [AttemptKey(TRIAL, attempt_id(number), "main-0") for number in (0, 1)]
    assert [ended.key for ended in site.manager.all_of(TrialEnded)] == keys
    for key in keys:
        assert site.manager.stored(Stream.STDOUT, key).decode() == f"{site.attempt(key).path}\n"


def test_concurrent_keepers_of_a_trial_start_different_attempts(site):
    site.add_python_trial(REPORTING)
    keepers = [site.start_keeper() for _ in range(3)]
    # The keeper of a newer attempt kills the processes of older attempts. So each attempt either succeeds or is killed with
    # SIGKILL, and its keeper exits with the code of the attempt.
    assert {keeper.wait() for keeper in keepers} <= {0, 128 + signal.SIGKILL}
    keys = [AttemptKey(TRIAL, attempt_id(number), "main-0") for number in range(3)]
    assert site.manager.numbers.keys(TRIAL) == keys
    for key in keys:
        assert site.manager.stored(key=key) == site.file(key=key)
    assert len(site.manager.store.records[keys[-1]]) == 301


# ---- the keeper's own output

OWN_LINE = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d trial-keeper \[[^\n]*\n")
TALKATIVE = """
import sys
for i in range(5 * 1024):
    sys.stdout.write(f"{i:>1023}\\n")
    if i % 8 == 0:
        sys.stderr.write(f"{i:>999}\\n")
"""


def test_a_keeper_relays_the_complete_output_of_its_trial(site):
    site.add_python_trial(TALKATIVE)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    keeper = site.start_keeper(relay_output=True, options=pipes)
    stdout, stderr = keeper.process.communicate(timeout=DEADLINE_S)
    assert keeper.process.returncode == 0
    assert len(stdout) == 5 * 1024 * 1024
    assert stdout == site.file(Stream.STDOUT)
    assert OWN_LINE.search(stderr)
    assert OWN_LINE.sub(b"", stderr) == site.file(Stream.STDERR)


def test_a_keeper_that_does_not_relay_the_trial_output_prints_only_its_own_lines(site):
    site.add_python_trial(TALKATIVE)
    keeper = site.start_keeper()
    assert keeper.wait() == 0
    assert keeper.stdout_file.read_bytes() == b""
    assert OWN_LINE.sub(b"", keeper.stderr_file.read_bytes()) == b""


@pytest.fixture
def unread_pipes():
    """The write ends of two pipes from which nothing is ever read."""
    pipes = [os.pipe(), os.pipe()]
    yield [write_end for _, write_end in pipes]
    for pipe in pipes:
        for end in pipe:
            os.close(end)


@pytest.mark.parametrize("together", [True, False], ids=["one pipe for both", "two pipes"])
def test_the_exit_of_the_keeper_is_not_delayed_if_its_output_pipes_are_full(site, unread_pipes, together):
    site.gate("gate")
    site.add_python_trial(TALKATIVE + "open('gate').read()\n")
    stdout, stderr = unread_pipes[:1] * 2 if together else unread_pipes
    keeper = site.start_keeper(
        relay_output=True, collect_logs=True, options={"stdout": stdout, "stderr": stderr}
    )
    wait_until(
        lambda: not select.select([], [stdout], [], 0)[1] and not select.select([], [stderr], [], 0)[1],
        "the pipes are full",
    )
    site.open_gate("gate")
    assert keeper.wait() == 0
    assert site.manager.stored(Stream.STDOUT) == site.file(Stream.STDOUT)
    assert exit_of(site).reason is ExitReason.SUCCEEDED


@pytest.mark.parametrize("relay_output", [True, False])
def test_the_keeper_succeeds_if_its_output_pipe_has_no_reader(site, relay_output):
    site.add_python_trial(TALKATIVE)
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        keeper = site.start_keeper(
            relay_output=relay_output, options={"stdout": write_end, "stderr": write_end}
        )
    finally:
        os.close(write_end)
    assert keeper.wait() == 0
    assert site.manager.all_of(TrialEnded) == [exit_of(site)]


def test_a_keeper_that_starts_with_closed_stdin_stdout_and_stderr_stores_all_output_of_its_trial(site):
    site.gate("gate")
    site.add_python_trial(TALKATIVE + "open('gate').read()\n")
    prefix = ("bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash")
    keeper = site.start_keeper(relay_output=True, collect_logs=True, options={"prefix": prefix})
    site.manager.wait_for(lambda: site.manager.all_of(TrialStarted), "TrialStarted")
    assert {os.readlink(f"/proc/{keeper.pid}/fd/{number}") for number in range(3)} == {"/dev/null"}
    site.open_gate("gate")
    assert keeper.wait() == 0
    assert len(site.file(Stream.STDOUT)) == 5 * 1024 * 1024
    for stream in Stream:
        assert site.manager.stored(stream) == site.file(stream), stream


def test_a_keeper_sends_the_remaining_log_chunks_after_it_has_reported_the_trial_end(site):
    # The manager commits nothing, so the keeper fills its send windows for logs and must wait with the rest.
    site.manager.commits = False
    site.add_trial("head -c 3000000 /dev/zero; head -c 2000000 /dev/zero >&2; exit 3")
    keeper = site.start_keeper(collect_logs=True)
    ended = site.manager.wait_for_message(TrialEnded)
    assert site.manager.arrived(Stream.STDOUT) < ended.final_sizes[Stream.STDOUT]
    site.manager.commit_again()
    assert keeper.wait() == 3
    for stream in Stream:
        assert site.manager.stored(stream) == site.file(stream), stream


# ---- size


def test_fifty_megabytes_of_metrics_are_delivered_in_bounded_memory(site):
    site.manager.closes = False
    site.add_python_trial(
        "import os\n"
        "from nni_sdk.records import encode\n"
        "frames = b''.join(encode(0, 'trial1', 'PERIODICAL', i, 'x' * 100_000) for i in range(500))\n"
        "metrics = os.open(os.environ['NNI_SYS_DIR'] + '/.nni/metrics', os.O_WRONLY | os.O_APPEND)\n"
        "assert os.write(metrics, frames) == len(frames) > 50_000_000\n"
    )
    keeper = site.start_keeper()

    def size():
        return site.attempt().stream(Stream.METRICS).stat().st_size

    site.manager.wait_for(
        lambda: site.manager.store.ended and site.manager.arrived() == size() > 50_000_000,
        "all metrics have arrived",
    )
    status = Path(f"/proc/{keeper.pid}/status").read_text()
    site.manager.closes = True
    site.manager.break_streams()
    assert keeper.wait() == 0
    assert site.manager.stored() == site.file()
    assert len(site.manager.store.records[KEY]) == 500
    peak_kb = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])
    assert peak_kb < 80 * 1024
