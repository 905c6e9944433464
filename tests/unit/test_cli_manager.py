"""nnictl with a manager that is slow, absent, or owned by another user."""

import contextlib
import gc
import json
import socket
import struct
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pytest
from deadlines import DEADLINE_S
from stored_experiments import CONFIG
from strangers import give_away

from nni_manager.client import manager_process, manager_stop, output
from nni_manager.client.experiments import resolve
from nni_manager.client.manager_client import ConnectionClosed, ManagerClient, ManagerUnresponsive
from nni_manager.config.reader import read_experiment_file
from nni_manager.errors import NniManagerError, RetryableError
from nni_manager.store.folders import ManagerProcess
from trial_keeper import __version__

pytestmark = pytest.mark.slow

pytestmark = pytest.mark.usefixtures("state_home")


@pytest.mark.parametrize("is_running", [True, False])
@pytest.mark.parametrize(
    "trial_id", ["../experiment", "..", ".", "", "x?y", "x#y", "x/y", "a b", "%2e%2e", "-"]
)
@pytest.mark.parametrize("command", ["trial kill", "log trial", "trial codegen"])
def test_nnictl_sends_no_request_for_an_invalid_trial_id(
    nnictl, an_experiment, command, trial_id, is_running
):
    asked = []
    with an_http_manager(dict, asked) as port:
        folder = an_experiment("abc11111", port=port if is_running else None)
        folder.annotated_code.mkdir()
        code, out, err = nnictl(*command.split(), "abc11111", "-T", trial_id)
    assert (code, out, asked) == (1, "", [])
    assert err == (
        f"ERROR: cannot find trial {trial_id!r} in experiment abc11111; `nnictl trial ls abc11111` lists them\n"
    )


@pytest.mark.parametrize(
    ("name", "path"), [("x?y", "x%3Fy"), ("../experiment", "..%2Fexperiment"), ("x#é/", "x%23%C3%A9%2F")]
)
def test_special_characters_in_a_name_are_escaped_in_request_paths(name, path):
    asked = []
    with an_http_manager(dict, asked) as port:
        client = ManagerClient("abc11111", ManagerProcess(1, "127.0.0.1", port, __version__))
        client.delete("/trial-jobs", name)
        client.get("/trials", name)
    assert asked == [f"DELETE /api/v1/nni/trial-jobs/{path}", f"GET /api/v1/nni/trials/{path}"]


def test_nnictl_stop_prints_its_reason_for_waiting_only_when_the_reason_changes(an_experiment, monkeypatch):
    summaries = [
        ("", 1),
        ("", 1),
        ("cannot write db: disk full\nmore", 1),
        ("cannot write db: disk full", 1),
        ("", 2),
    ]
    last = {"id": "abc11111", "problem": "", "counts": {"RUNNING": 1, "WAITING": 0}}
    answers = iter([last, *({**last, "problem": problem, "counts": {"RUNNING": running, "WAITING": 0}}
                            for problem, running in summaries)])  # fmt: skip
    lines = []
    with an_http_manager(lambda: next(answers, last)) as port, contextlib.ExitStack() as owner:
        folder = an_experiment("abc11111")
        owner.enter_context(folder.owned())
        with subprocess.Popen(["true"]) as over:
            pass
        folder.write_process(ManagerProcess(over.pid, "127.0.0.1", port, __version__))

        def report(line):
            lines.append(line)
            if len(lines) == 3:
                # This simulates the exit of the manager, which owns the folder.
                owner.close()

        monkeypatch.setattr(manager_stop, "_REPORT_INTERVAL_S", 0.0)
        monkeypatch.setattr(output, "info", report)
        manager_stop.stop_experiment(resolve("abc11111"))
    assert lines == ["1 trial has not ended yet", "cannot write db: disk full", "2 trials have not ended yet"]


@pytest.mark.parametrize("looks_like", ["another program", "a view of it"])
def test_a_process_that_reuses_the_managers_pid_is_neither_signalled_nor_named_in_the_error(
    an_experiment, monkeypatch, looks_like
):
    monkeypatch.setattr(manager_stop, "_LEFT_TIMEOUT_S", 0.2)
    folder = an_experiment("abc11111")
    arguments = ["600"] if looks_like == "another program" else ["600", str(folder.path), "--view"]
    sleep = "import sys, time; time.sleep(int(sys.argv[1]))"
    with (
        folder.owned() as lease,
        subprocess.Popen([sys.executable, "-c", sleep, *arguments]) as bystander,
    ):
        try:
            folder.write_process(ManagerProcess(bystander.pid, "127.0.0.1", 9000, __version__))
            with pytest.raises(RetryableError) as caught:
                manager_stop.leave(resolve("abc11111"))
            assert str(lease.holder) in str(caught.value)
            assert "kill" not in str(caught.value)
            assert str(bystander.pid) not in str(caught.value)
            assert bystander.poll() is None
        finally:
            bystander.kill()


def test_the_error_contains_the_pid_of_a_manager_that_ignores_sigterm(an_experiment, monkeypatch):
    monkeypatch.setattr(manager_stop, "_LEFT_TIMEOUT_S", 0.2)
    folder = an_experiment("abc11111")
    ignores_sigterm = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    )
    with (
        folder.owned(),
        subprocess.Popen(
            [sys.executable, "-c", ignores_sigterm, str(folder.path)], stdout=subprocess.PIPE
        ) as manager,
    ):
        try:
            manager.stdout.readline()
            folder.write_process(ManagerProcess(manager.pid, "127.0.0.1", 9000, __version__))
            with pytest.raises(RetryableError, match=f"`kill -9 {manager.pid}`"):
                manager_stop.leave(resolve("abc11111"))
        finally:
            manager.kill()


def test_a_listener_of_another_user_at_the_managers_port_never_gets_the_token():
    asked = []
    with an_http_manager(lambda: asked.append(1) or {"id": "abc11111"}) as port:
        client = ManagerClient("abc11111", ManagerProcess(1, "127.0.0.1", port, __version__, "secret"))
        assert client.summary() == {"id": "abc11111"}
        give_away(port)
        client = ManagerClient("abc11111", ManagerProcess(1, "127.0.0.1", port, __version__, "secret"))
        with pytest.raises(
            ManagerUnresponsive, match=r"another user of this machine .* listens at .*; wait and"
        ):
            client.summary()
    assert asked == [1]


def test_nnictl_stop_retries_a_dropped_request_instead_of_sending_a_signal(an_experiment, monkeypatch):
    answers, asked = iter([None, None, {"id": "abc11111"}]), []

    def no_signal(_):
        raise AssertionError("it was ended by a signal")

    monkeypatch.setattr(manager_stop, "leave", no_signal)
    with an_http_manager(lambda: next(answers), asked) as port, contextlib.ExitStack() as owner:
        folder = an_experiment("abc11111")
        owner.enter_context(folder.owned())
        with subprocess.Popen(["true"]) as over:
            pass
        folder.write_process(ManagerProcess(over.pid, "127.0.0.1", port, __version__))
        monkeypatch.setattr(manager_stop, "_wait_until_gone", lambda *_: True)
        manager_stop.stop_experiment(resolve("abc11111"))
    get, delete = "GET /api/v1/nni/summary", "DELETE /api/v1/nni/experiment"
    assert asked == [get, get, get, delete]


def test_a_closed_connection_and_a_missing_listener_have_different_errors(an_experiment, unused_port):
    def error_on(port):
        client = ManagerClient("abc11111", ManagerProcess(1, "127.0.0.1", port, __version__))
        with pytest.raises(ManagerUnresponsive) as caught:
            client.summary()
        return caught.value

    with an_http_manager(lambda: None) as port:
        closed = error_on(port)
    assert isinstance(closed, ConnectionClosed)
    assert ": the connection was closed before the answer; wait and try again" in str(closed)
    refused = error_on(unused_port)
    assert not isinstance(refused, ConnectionClosed)
    assert ": no program listens there; " in str(refused)


# If a TLS handshake fails, urllib3 leaves the open socket to the garbage collector, so Python warns about it.
@pytest.mark.filterwarnings("ignore:unclosed <ssl.SSLSocket:ResourceWarning")
@pytest.mark.parametrize("certificate_sha256", [None, "a" * 64])
@pytest.mark.parametrize("is_reset", [True, False])
def test_a_connection_that_the_server_closes_immediately_is_reported_as_closed_with_and_without_tls(
    certificate_sha256, is_reset
):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def close():
            accepted, _ = listener.accept()
            if is_reset:
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.close()

        closing = threading.Thread(target=close)
        closing.start()
        process = ManagerProcess(1, "127.0.0.1", port, __version__, "token", certificate_sha256)
        with pytest.raises(ConnectionClosed, match="the connection was closed before the answer"):
            ManagerClient("abc11111", process).summary()
        closing.join(DEADLINE_S)
    gc.collect()


# This fake manager reports that it is ready, and then rejects every request.
REFUSING = """\
#!{python}
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from nni_manager.store.folders import ExperimentFolder, ManagerProcess
folder = ExperimentFolder(Path(sys.argv[sys.argv.index("--folder") + 1]))
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'{{"error": "cannot do this %s"}}' % self.command.encode()
        self.send_response(503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_DELETE = do_GET
with HTTPServer(("127.0.0.1", 0), Handler) as server, folder.owned():
    folder.write_process(ManagerProcess(os.getpid(), "127.0.0.1", server.server_address[1], "0"))
    server.serve_forever()
"""


def test_nnictl_create_ends_a_manager_that_rejects_every_request(tmp_path, monkeypatch):
    (tmp_path / "search_space.json").write_text('{"lr": {"_type": "uniform", "_value": [0, 1]}}')
    (tmp_path / "config.yml").write_text(CONFIG)
    config = read_experiment_file(tmp_path / "config.yml")
    python = tmp_path / "python"
    python.write_text(REFUSING.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(NniManagerError, match="cannot do this GET"):
        manager_process.create_experiment(config, [9], debug=False)
    left = [each for each in psutil.process_iter() if is_of(each, str(python))]
    for each in left:
        each.kill()
    assert left == []
    assert list(config.log_dir.parent.rglob("manager-process.json")) == []


def is_of(process, word):
    with contextlib.suppress(psutil.Error):
        return word in process.cmdline()
    return False


@contextlib.contextmanager
def an_http_manager(answer, asked=None):
    """A server on this machine that answers GET with `answer()`, and DELETE with an empty object; yields its port.

    If `answer()` is None, the connection is closed without an answer. `asked` collects the verb and path of every request.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(answer())

        def do_DELETE(self):
            self.reply({})

        def reply(self, document):
            if asked is not None:
                asked.append(f"{self.command} {self.path}")
            if document is None:
                self.close_connection = True
                return
            body = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            serving.join(DEADLINE_S)


def test_nnictl_web_fails_if_its_state_folder_cannot_be_created(nnictl, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/absent")
    code, out, err = nnictl("web")
    assert (code, out) == (1, "")
    assert err.startswith(
        "ERROR: cannot create /proc/absent/trial-keeper/web: No such file or directory; give this user write"
    )
