"""`trial-keeper serve-machine`, which runs on a remote machine. It receives requests of the manager on stdin and sends responses
on stdout.
"""

import errno
import hashlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue

import pytest
from deadlines import DEADLINE_S
from real_experiment import wait_until

from nni_manager.training_services.remote import frames, machine_jobs
from nni_manager.training_services.remote.machine_jobs import MachineJobs
from nni_manager.training_services.remote.machine_server import MachineServer
from trial_keeper import __version__, processes

WAITS = 'touch "$TRIAL_KEEPER_JOB_ID.started"; read -r line < gate; exit "$line"'


class Server:
    """A running `serve-machine` process. Its responses may arrive in any order."""

    def __init__(self, home, experiment_id="EXPT", is_manager=True):
        command = [sys.executable, "-m", "trial_keeper", "serve-machine"]
        environ = os.environ | {"HOME": str(home)}
        self.process = subprocess.Popen(
            command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self.process.stdout.read(len(frames.START)) == frames.START
        self.hello = frames.read_frame(self.process.stdout).header
        self._answers = {}
        self.ends = Queue()
        self._count = 0
        threading.Thread(target=self._read, daemon=True).start()
        if experiment_id:
            whose = {"key": "k", "experiment_id": experiment_id, "is_manager": is_manager}
            self.root = self.ask("open", **whose).header["root"]

    def _read(self):
        while (frame := frames.read_frame(self.process.stdout)) is not None:
            number = frame.header.pop("number", None)
            (self.ends if number is None else self._answers[number]).put(frame)

    def ask(self, request, body=b"", **arguments):
        self._count += 1
        number = self._count
        # Create the queue before the request is sent. Otherwise the reading thread could receive the answer while no queue exists
        # for it.
        answer = self._answers[number] = Queue()
        self.process.stdin.write(frames.encode({"number": number, "request": request, **arguments}, body))
        self.process.stdin.flush()
        return answer.get(timeout=DEADLINE_S)

    def put(self, path, content, digest="", part="new-0"):
        where = {"path": path, "offset": 0, "part": part, "is_last": True, "digest": digest}
        return self.ask("put", content, **where).header

    def start(self, job_id="job"):
        settings = {"TRIAL_KEEPER_JOB_ID": job_id}
        return self.ask("start", job_id=job_id, settings=settings).header["jobs"][job_id]

    def state(self, job_id="job"):
        return self.ask("watch", job_ids=[job_id]).header["jobs"][job_id]

    def next_end(self):
        return self.ends.get(timeout=DEADLINE_S).header

    def close(self):
        self.process.stdin.close()
        self.process.wait(DEADLINE_S)
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture
def serve(tmp_path):
    made = []

    def make(*arguments):
        made.append(Server(tmp_path, *arguments))
        return made[-1]

    yield make
    for each in made:
        each.close()
    processes.end_all(
        lambda: [
            pid
            for pid in processes.pids_where(lambda environ: environ.get("HOME") == str(tmp_path))
            if pid != os.getpid()
        ]
    )


@pytest.fixture
def server(serve, tmp_path):
    server = serve()
    server.put("run.sh", WAITS.encode())
    os.mkfifo(f"{server.root}/jobs/gate")
    return server


def release(server, code):
    with open(f"{server.root}/jobs/gate", "w") as gate:
        gate.write(f"{code}\n")


def test_the_server_reports_its_version_and_creates_private_folders(serve, tmp_path):
    server = serve()
    assert server.hello["version"] == __version__
    assert server.root == str(tmp_path / ".cache/trial-keeper/k/EXPT")
    assert os.stat(server.root).st_mode & 0o777 == 0o700


def test_a_job_is_started_once_and_its_end_is_reported_with_its_exit_code(server):
    first = server.start()
    assert first["is_known"]
    assert server.start()["pid"] == first["pid"]
    assert server.state("another") == dict.fromkeys(first, None) | {
        "is_known": False,
        "has_ended": False,
        "message": "",
        "has_rebooted": False,
    }
    release(server, 7)
    end = server.next_end()
    assert (end["ended"], end["job"]["exit_code"]) == ("job", 7)
    assert server.start()["has_ended"], "an ended job does not run again"


def test_the_shell_of_a_job_does_not_read_the_start_up_file_for_ssh_sessions(serve, tmp_path, monkeypatch):
    (tmp_path / ".bashrc").write_text("echo Welcome!\n")
    monkeypatch.setenv("SSH_CLIENT", "192.0.2.1 1 22")
    monkeypatch.setenv("SHLVL", "0")
    server = serve()
    # The job waits at the gate until the server has responded. If it ended before, the response would report its end, and
    # next_end() would find nothing.
    server.put("run.sh", b"read -r line < gate; bash -c 'echo done'")
    os.mkfifo(f"{server.root}/jobs/gate")
    assert server.start()["is_known"]
    release(server, 0)
    assert server.next_end()["job"]["message"] == "done"


def test_a_job_continues_after_its_server_has_ended_and_a_later_server_reports_its_exit_code(server, serve):
    pid = server.start()["pid"]
    server.close()
    assert processes.state_of(pid) == "S"
    later = serve()
    assert later.state()["pid"] == pid
    release(later, 3)
    assert later.next_end()["job"]["exit_code"] == 3
    last = serve()
    assert last.state()["exit_code"] == 3


def test_a_job_whose_file_a_power_loss_has_torn_counts_as_ended_and_other_jobs_are_reported(server):
    running = server.start("other")
    Path(server.root, "jobs/job.json").write_bytes(b"")
    states = server.ask("watch", job_ids=["job", "other"]).header["jobs"]
    assert states["other"] == running
    job = states["job"]
    assert (job["has_ended"], job["exit_code"], job["has_rebooted"]) == (True, None, True)
    assert server.ask("signal", job_id="job", signal_number=int(signal.SIGTERM)).header == {"is_sent": False}
    assert server.start() == job, "it is not started again"
    release(server, 0)
    assert server.next_end()["ended"] == "other"


def test_a_failed_start_of_a_job_leaves_no_exit_code_for_its_next_start(tmp_path, monkeypatch):
    jobs, script = MachineJobs(tmp_path), tmp_path / "run.sh"
    script.write_text("exit 5")

    def fail(*arguments, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    shells = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **more: shells.append(popen(*args, **more)) or shells[-1]
    )
    with monkeypatch.context() as full:
        full.setattr(machine_jobs, "replace_file", fail)
        with pytest.raises(OSError, match="No space left"):
            jobs.start("job", script, {})
    assert shells[0].wait(DEADLINE_S) == -signal.SIGKILL
    assert not (tmp_path / "job.exit").exists()
    # The shell of an earlier version may have left this file.
    (tmp_path / "job.exit").write_text("1\n")
    shell = jobs.start("job", script, {})
    assert shell.wait(DEADLINE_S) == 0
    assert jobs.state("job").exit_code == 5


def test_a_job_whose_shell_was_killed_ends_with_its_keeper_and_has_no_exit_code(server):
    pid = server.start()["pid"]
    processes.kill(processes.ProcessStat.of(pid).parent)
    release(server, 3)
    end = server.next_end()["job"]
    assert (end["has_ended"], end["exit_code"]) == (True, None)


def test_the_end_of_a_keeper_is_reported_if_it_ends_while_the_server_handles_the_death_of_its_shell(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    reads, writes = os.pipe()
    with open(writes, "wb") as output, open(reads, "rb") as reported:
        machine = MachineServer(output)
        root = Path(machine.do_open("k", "EXPT", is_manager=False)["root"])
        machine.do_put(WAITS.encode(), "run.sh", 0, "new-0", is_last=True)
        os.mkfifo(root / "jobs/gate")
        state = machine.do_start("job", {"TRIAL_KEEPER_JOB_ID": "job"})["jobs"]["job"]
        open_pidfd = MachineJobs.open_pidfd

        def open_after_its_end(jobs, job_id):
            monkeypatch.setattr(MachineJobs, "open_pidfd", open_pidfd)
            (root / "jobs/gate").write_text("3\n")
            wait_until(lambda: processes.is_dead(state["pid"]), "the keeper has ended")
            return open_pidfd(jobs, job_id)

        monkeypatch.setattr(MachineJobs, "open_pidfd", open_after_its_end)
        threading.Thread(target=machine._report_ends, daemon=True).start()
        processes.kill(processes.ProcessStat.of(state["pid"]).parent)
        answer = frames.read_frame(reported).header
        assert (answer["ended"], answer["job"]["has_ended"], answer["job"]["exit_code"]) == (
            "job",
            True,
            None,
        )


def test_a_job_whose_files_were_removed_is_unknown_and_the_server_continues_with_other_jobs(server):
    pid = server.start()["pid"]
    Path(server.root, "jobs/job.json").unlink()
    processes.kill(processes.ProcessStat.of(pid).parent)
    release(server, 3)
    assert server.state("job")["is_known"] is False
    assert server.start("other")["pid"]
    release(server, 4)
    assert server.next_end()["ended"] == "other"


def test_the_keeper_receives_a_signal_and_a_kill_ends_all_processes_of_the_job(server):
    server.put("run.sh", b"trap '' TERM; sleep 1000 & echo ready; wait; wait")
    pid = server.start()["pid"]
    log = Path(server.root, "jobs/job.log")
    wait_until(lambda: log.exists() and log.read_text() == "ready\n", "it runs")
    children = processes.descendants([pid])
    assert server.ask("signal", job_id="job", signal_number=int(signal.SIGTERM)).header == {"is_sent": True}
    assert not processes.is_dead(pid)
    assert server.ask("kill", job_id="job").header == {}
    assert server.next_end()["job"]["has_ended"]
    assert all(map(processes.is_dead, [pid, *children]))
    assert server.ask("signal", job_id="job", signal_number=int(signal.SIGTERM)).header == {"is_sent": False}


def test_a_new_server_kills_the_earlier_server_of_the_same_experiment(serve):
    earlier = serve()
    serve()
    assert earlier.process.wait(DEADLINE_S) == -signal.SIGKILL


def test_a_new_server_of_another_experiment_and_a_new_file_reader_kill_no_server(serve):
    other = serve("OTHER")
    serve()
    serve("OTHER", False)
    assert other.ask("folders", path="trials").header == {"names": []}


def test_code_is_stored_under_its_digest_until_no_experiment_uses_it(serve):
    content = b"the code"
    digest = hashlib.sha256(content).hexdigest()
    first = serve()
    assert first.ask("has_code", path="code.tar.gz", digest=digest).header == {"has": False}
    assert first.put("code.tar.gz", content, digest) == {}
    second = serve("OTHER")
    assert second.ask("has_code", path="code.tar.gz", digest=digest).header == {"has": True}
    assert second.ask("read", path="code.tar.gz", offset=4, longest=100).body == b"code"
    for experiment_id in ("EXPT", "OTHER"):
        kept = os.listdir(f"{second.root}/../code")
        assert kept == [digest]
        assert second.ask("remove", key="k", experiment_id=experiment_id).header == {}
    assert os.listdir(os.path.dirname(first.root)) == ["code"]
    assert os.listdir(f"{os.path.dirname(first.root)}/code") == []


def test_received_code_with_a_wrong_digest_is_refused(serve):
    server = serve()
    said = server.put("code.tar.gz", b"the cofe", hashlib.sha256(b"the code").hexdigest())
    assert said == {"error": "what has arrived of code.tar.gz has another digest"}
    assert not os.path.exists(f"{server.root}/code.tar.gz")


def test_links_and_pipes_are_not_read_and_paths_outside_the_experiment_are_refused(serve, tmp_path):
    server = serve()
    (tmp_path / "secret").write_text("secret")
    os.symlink(tmp_path / "secret", f"{server.root}/trials/link")
    os.symlink(tmp_path, f"{server.root}/trials/folder")
    os.mkfifo(f"{server.root}/trials/pipe")
    for name in ("link", "folder/secret", "pipe", "absent"):
        assert server.ask("read", path=f"trials/{name}", offset=0, longest=100).body == b""
    for path in ("../../secret", str(tmp_path / "secret")):
        for request in ("read", "put", "folders"):
            arguments = {
                "read": {"offset": 0, "longest": 9},
                "put": {"offset": 0, "part": "p", "is_last": True},
            }
            answer = server.ask(request, path=path, **arguments.get(request, {}))
            assert "it is outside the experiment's folder" in answer.header["error"]
    assert server.ask("folders", path="trials/absent").header == {"names": []}


def test_the_socket_path_is_short_and_every_server_of_an_experiment_returns_the_same_path(serve, tmp_path):
    server = serve()
    path = server.ask("free_socket").header["path"]
    assert len(path) < 108
    assert serve().ask("free_socket").header["path"] == path
    if len(f"{server.root}/manager.sock") < 108:
        assert path == f"{server.root}/manager.sock"


def test_the_server_returns_the_gpus_or_the_error_that_nvidia_smi_reports(tmp_path, monkeypatch, serve):
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/bash\ncase "$*" in *query-gpu*) echo "0, GPU-a"; echo "1, GPU-b";; *) echo GPU-b;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    assert serve().ask("gpus").header == {"present": [0, 1], "in_use": [1]}
    program.write_text("#!/bin/bash\necho 'Driver/library version mismatch' >&2; exit 18\n")
    assert serve().ask("gpus").header == {"error": "nvidia-smi fails: Driver/library version mismatch"}
