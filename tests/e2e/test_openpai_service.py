"""The local OpenPAI as a background process: start, stop, restart, and its files."""

import concurrent.futures
import contextlib
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import socket
import sqlite3
import stat
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import requests
import yaml
from amounts import amount
from deadlines import DEADLINE_S
from free_ports import free_port_pair
from openpai_here import JOBS, Client, refused
from openpai_jobs import WORKER, a_job, text_of
from real_experiment import wait_until
from strangers import give_away

from nni_manager.local_openpai import daemon
from nni_manager.local_openpai.daemon import FolderUnusable, ServiceFailed, StateFolder
from nni_manager.local_openpai.platform import running_here
from nni_manager.local_openpai.settings import (
    OptionInvalid,
    Options,
    new_storage_of,
    storage_of,
    virtual_cluster_of,
)
from nni_manager.startup import open_files
from nni_manager.training_services.openpai.connection import Unauthenticated

NNICTL = "import sys; from nni_manager.cli.main import main; sys.argv[0] = 'nnictl'; main()"


def at_hand(state):
    return daemon.running(state) or daemon.start(state)


@pytest.fixture
def state(tmp_path):
    """The state folder of a service; the service and its jobs end with the test."""
    state = StateFolder(tmp_path / "state")
    yield state
    if not state.path.exists():
        return
    with contextlib.suppress(ServiceFailed, FolderUnusable):
        there = at_hand(state)
        client = client_of(there)
        for job in client.get(JOBS).json():
            client.put(f"{JOBS}/{job['username']}~{job['name']}/executionType", json={"value": "STOP"})
        going_on = {"state": "WAITING,RUNNING,STOPPING"}
        wait_until(lambda: not client.get(JOBS, params=going_on).json(), "all jobs have ended")
        daemon.stop(state)
        assert not state.is_owned()


@pytest.fixture
def nnictl(tmp_path, state):
    """Runs nnictl in a separate home with this state folder; returns exit code, stdout and stderr."""
    environ = {**os.environ, "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "user state")}

    def run(*arguments, stdin=""):
        done = subprocess.run(
            [sys.executable, "-c", NNICTL, "openpai", *arguments, "--state-dir", str(state.path)],
            env=environ,
            cwd=tmp_path,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        return done.returncode, done.stdout, done.stderr

    return run


def client_of(there):
    return Client(f"http://{there.process.address}", there.credentials.token)


def a_job_of(command, **top):
    changes = (((*WORKER, "instances"), 1), ((*WORKER, "commands"), [command]))
    return text_of(a_job(*changes, **top))


def start(state, **options):
    return daemon.start(state, Options(**{"port": free_port_pair(), **options}))


def test_the_daemon_raises_its_limit_of_open_files_and_jobs_keep_the_original_limit(state, monkeypatch):
    """A manager starts the daemon, with a raised limit of its own."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard <= 1000:
        pytest.skip(f"this user may not have more than {hard} open files")
    monkeypatch.setattr(open_files, "_given", (1000, hard))
    there = start(state)
    assert resource.prlimit(there.process.pid, resource.RLIMIT_NOFILE)[0] == hard
    seen = state.path / "seen"
    assert client_of(there).submit(a_job_of(f"ulimit -n > {seen}")).status_code == 202
    assert wait_until(lambda: seen.exists() and seen.read_text(), "the job has run") == "1000\n"


def test_only_one_experiment_at_a_time_restarts_the_daemon(state):
    with (
        state.restarts_alone(),
        (state.path.parent / "state.restart.lock").open() as lock,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with state.restarts_alone():
        pass


# ---- nnictl


@pytest.mark.smoke
def test_openpai_start_prints_a_configuration_that_stays_valid_after_a_restart(nnictl, state):
    port = free_port_pair()
    code, out, err = nnictl("start", "--port", str(port))
    assert (code, err) == (0, "")
    assert f"host   http://127.0.0.1:{port}\n" in out
    rule = "-" * 84
    snippet = yaml.safe_load(out.split(rule)[1])
    pai, trial = snippet["paiConfig"], snippet["trial"]
    assert (snippet["trainingServicePlatform"], pai["host"]) == ("pai", f"http://127.0.0.1:{port}")
    assert trial["nniManagerNFSMountPath"] == str(state.storage)
    assert trial["containerNFSMountPath"] == f"/mnt/{trial['paiStorageConfigName']}" == "/mnt/confignfs-data"
    client = Client(pai["host"], pai["token"])
    assert client.get("/rest-server/api/v2/tokens/check").json()["username"] == pai["userName"]

    code, again, err = nnictl("start", "--port", "1")
    assert (code, "no effect" in err, again.partition("\n")[2]) == (0, True, out.partition("\n")[2])
    code, out, _ = nnictl("status", "--json")
    shown = json.loads(out)
    assert (code, shown["isRunning"], shown["token"], shown["user"]) == (
        0,
        True,
        pai["token"],
        pai["userName"],
    )
    assert shown["host"] == f"127.0.0.1:{port}"

    assert nnictl("stop-service")[:2] == (
        0,
        "INFO: Stopped OpenPAI on this machine; running tasks continue, and `nnictl openpai start` finds them\n",
    )
    code, out, _ = nnictl("stop-service")
    assert (code, "does not run" in out) == (0, True)
    code, out, _ = nnictl("status")
    assert (code, "`nnictl openpai start` starts it" in out) == (1, True)
    assert json.loads(nnictl("status", "--json")[1])["isRunning"] is False
    # The configuration that was printed before the restart must be valid for the restarted service.
    assert nnictl("start")[0] == 0
    assert client.get(JOBS).status_code == 200


def test_openpai_start_reports_a_port_in_use_and_leaves_no_process(nnictl, state):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = nnictl("start", "--port", str(port))
    assert (code, out) == (1, "")
    assert err == (
        f"ERROR: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "choose another port with `nnictl openpai start --port N`\n"
    )
    assert not state.is_owned()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--storage", "/nope"), "folder /nope does not exist"),
        (("--storage", "a b=/tmp"), "'a b' is not a valid name"),
        (("--virtual-cluster", "default=1"), "use NAME=CPUS,MEMORY_MB,GPUS"),
        (("--port", "0"), "1<=x<=65535"),
    ],
)
def test_openpai_start_refuses_an_invalid_option(nnictl, state, arguments, words):
    code, out, err = nnictl("start", *arguments)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("ERROR: cannot ")
    assert words in err
    assert not state.path.exists()


def test_openpai_start_keeps_the_files_of_an_existing_storage_folder(state):
    state.storage.mkdir(parents=True)
    (state.storage / "data").write_text("mine")
    state.make()
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o700
    assert (state.storage / "data").read_text() == "mine"


def test_openpai_start_refuses_a_state_folder_with_foreign_files(nnictl, state):
    state.path.mkdir(mode=0o755)
    (state.path / "thesis.tex").touch()
    code, _, err = nnictl("start")
    assert (code, "it contains other files, such as thesis.tex; choose a new" in err) == (1, True)
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o755
    assert [entry.name for entry in state.path.iterdir()] == ["thesis.tex"]
    (state.path / "thesis.tex").unlink()
    state.path.rmdir()


def test_the_options_of_an_openpai_start_apply_to_the_next_start_without_options(nnictl, state, tmp_path):
    (tmp_path / "data").mkdir()
    told = tmp_path / "told"
    options = ("--port", str(free_port_pair()), "--storage", "data", "--virtual-cluster", "big=8,32768,2")
    options += ("--notification-file", str(told), "--allow-origin", "https://Portal.example.com/")
    assert nnictl("start", *options)[0] == 0
    assert nnictl("stop-service")[0] == 0
    there = at_hand(state)
    assert there.process.options == Options(
        int(options[1]),
        {"confignfs-data": str(tmp_path / "data")},
        {"big": [8, 32768, 2]},
        "process",
        None,
        str(told),
        ["https://portal.example.com"],
    )
    client = client_of(there)
    assert client.get("/api/v2/virtual-clusters").json()["big"]["resourcesTotal"]["gpu"] == 2
    (storage,) = client.get("/api/v2/storages").json()["storages"]
    assert client.get(f"/api/v2/storages/{storage['name']}").json()["data"]["path"] == str(tmp_path / "data")
    preflight = {"Access-Control-Request-Method": "PUT", "Access-Control-Request-Headers": "authorization"}
    for origin, is_allowed in (("https://portal.example.com", True), ("https://other.example.com", False)):
        headers = {"Origin": origin, **preflight}
        asked = client_of(there).request("OPTIONS", f"{JOBS}/ada~job/executionType", headers=headers)
        assert (asked.headers.get("Access-Control-Allow-Origin") == origin, asked.ok) == (
            is_allowed,
            is_allowed,
        )
        answer = client_of(there).get(JOBS, headers={"Origin": origin})
        assert answer.headers.get("Access-Control-Allow-Origin") == (origin if is_allowed else None)
        assert "Access-Control-Allow-Credentials" not in answer.headers


@pytest.mark.parametrize("origin", ["portal.example.com", "ftp://x", "https://x/path", "*", "https://"])
def test_an_invalid_origin_is_refused_and_the_error_contains_a_valid_example(nnictl, origin):
    code, _, err = nnictl("start", "--allow-origin", origin)
    assert (code, err.strip()) == (
        1,
        f"ERROR: cannot use --allow-origin {origin}; use scheme and host, and the port if it is not the scheme's own, e.g. "
        "https://portal.example.com",
    )


def test_the_service_runs_jobs_even_if_a_storage_folder_is_missing(state, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    there = start(state, storages={"gone": str(gone)})
    daemon.stop(state)
    gone.rmdir()
    client = client_of(at_hand(state))
    assert client.submit(a_job_of("true")).status_code == 202
    job = f"{JOBS}/{there.credentials.user}~job"
    wait_until(lambda: client.get(job).json()["jobStatus"]["state"] == "SUCCEEDED", "the job succeeds")
    assert f"cannot find folder {gone} of storage gone" in state.log.read_text()


def test_options_of_openpai_start_are_unchanged_after_a_round_trip_through_a_command_line(tmp_path):
    folder = tmp_path / "with = and , and blank"
    folder.mkdir()
    assert storage_of(f"team={folder}") == ("team", str(folder))
    assert virtual_cluster_of("vc.1=4,1024,0") == ("vc.1", [4, 1024, 0])
    with pytest.raises(OptionInvalid, match="does not exist"):
        new_storage_of(str(tmp_path / "nope"))
    options = Options(
        5, {"team": str(folder)}, {"a": [1, 2, 3]}, "podman", "http://x/?a=b", "/f", ["http://x:1"]
    )
    assert options.to_arguments()[1] == f"--storage=team={folder}"
    assert Options(**json.loads(json.dumps(vars_of(options)))) == options


def vars_of(options):
    return {name: getattr(options, name) for name in Options.__slots__}


# ---- secrets


def test_the_state_folder_is_private_and_contains_only_the_owners_token(state):
    state.path.mkdir(mode=0o755)
    there = start(state)
    assert stat.S_IMODE(state.path.stat().st_mode) == 0o700
    credentials = state.path / "credentials.json"
    for path in (credentials, state.accounts):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    admin = client_of(there)
    assert (
        admin.post("/api/v2/users", json={"username": "bob", "password": "bob's password"}).status_code == 201
    )
    assert admin.submit(a_job_of("true")).status_code == 202
    guest = Client(f"http://{there.process.address}", None)
    login = {"username": "bob", "password": "bob's password"}
    token = guest.post("/rest-server/api/v1/token", json=login).json()["token"]
    bob = Client(guest.root, token)
    assert bob.delete(f"/api/v2/tokens/{token}").status_code == 200
    secrets = (token, token.rpartition(".")[2], there.credentials.token.rpartition(".")[2], "bob's password")
    assert json.loads(credentials.read_text()).keys() == {"user", "token"}
    for path in state.path.rglob("*"):
        if path.is_file() and path != credentials:
            content = path.read_bytes()
            assert not [secret for secret in secrets if secret.encode() in content]


def test_openpai_start_removes_a_password_that_an_earlier_version_stored(state):
    there = start(state)
    daemon.stop(state)
    # Version 0.22 wrote both files in this form.
    credentials, accounts = state.path / "credentials.json", json.loads(state.accounts.read_text())
    earlier = {"user": there.credentials.user, "password": "in plain text", "token": there.credentials.token}
    credentials.write_text(json.dumps(earlier))
    for token in accounts["tokens"]:
        del token["is_owners"]
    state.accounts.write_text(json.dumps(accounts))
    again = at_hand(state)
    assert again.credentials == there.credentials
    assert [
        path for path in state.path.rglob("*") if path.is_file() and b"in plain text" in path.read_bytes()
    ] == []
    assert stat.S_IMODE(credentials.stat().st_mode) == 0o600
    new = {"username": "bob", "password": "bob's password"}
    assert client_of(again).post("/api/v2/users", json=new).status_code == 201


def test_openpai_start_replaces_a_revoked_owner_token(state):
    there = start(state)
    client = client_of(there)
    assert client.delete(f"/api/v2/tokens/{there.credentials.token}").status_code == 200
    refused(client.get(JOBS), 401, "UnauthorizedUserError")
    daemon.stop(state)
    again = at_hand(state)
    assert again.credentials.token != there.credentials.token
    assert again.credentials.user == there.credentials.user
    assert client_of(again).get(JOBS).status_code == 200


def test_openpai_start_creates_a_new_token_after_the_owner_logged_out(nnictl, state, tmp_path):
    there = start(state)
    assert (
        client_of(there).submit(a_job_of(f"until [ -e {tmp_path}/go ]; do sleep 0.05; done")).status_code
        == 202
    )
    assert client_of(there).delete("/api/v2/authn/basic/logout").status_code == 200
    code, out, err = nnictl("status")
    assert (code, "OpenPAI runs on this machine" in out) == (0, True)
    assert f"the token of {there.credentials.user} is not valid: somebody has revoked it" in err
    assert json.loads(nnictl("status", "--json")[1])["tokenIsValid"] is False
    assert nnictl("user")[0] == 1
    code, out, err = nnictl("start")
    assert (code, err) == (0, "")
    assert "Made a new token for OpenPAI on this machine" in out
    again = daemon.running(state)
    assert again.token_is_valid
    assert again.credentials.token != there.credentials.token
    (tmp_path / "go").touch()
    client = client_of(again)
    wait_until(lambda: client.get(JOBS).json()[0]["state"] == "SUCCEEDED", "the job has ended")
    assert client.get(JOBS).json()[0]["retries"] == 0


def test_a_client_on_this_machine_uses_the_token_that_openpai_start_created(state, monkeypatch):
    monkeypatch.setattr(StateFolder, "of_user", lambda: state)
    there = start(state)
    with contextlib.closing(running_here()) as client:
        assert client.jobs() == []
        assert client_of(there).delete("/api/v2/authn/basic/logout").status_code == 200
        with pytest.raises(Unauthenticated, match="run `nnictl openpai start`, which makes a new token"):
            client.jobs()
        daemon.with_valid_token(daemon.running(state))
        assert client.jobs() == []


@pytest.mark.smoke
def test_clients_log_in_with_the_password_that_the_owner_has_set(nnictl, state):
    there = start(state)
    guest, name = Client(f"http://{there.process.address}", None), there.credentials.user

    def log_in(password):
        return guest.post("/api/v2/authn/basic/login", json={"username": name, "password": password})

    message = refused(log_in("a password"), 400, "IncorrectPasswordError")
    assert message.endswith("sets a password with `nnictl openpai user --set-password`.")
    code, out, _ = nnictl("user")
    assert (code, name in out, "`nnictl openpai user --set-password`" in out) == (0, True, True)
    code, _, err = nnictl("user", "--set-password", stdin="short\n")
    assert (code, err) == (
        1,
        f"ERROR: cannot set the password of {name}: cannot use a password of 5 characters; use at least 6\n",
    )
    code, out, err = nnictl("user", "--set-password", stdin="a password\n")
    assert (code, out.startswith(f"INFO: Set the password of {name}"), err) == (0, True, "")
    assert Client(guest.root, log_in("a password").json()["token"]).get(JOBS).status_code == 200
    assert client_of(there).get(JOBS).status_code == 200
    daemon.stop(state)
    assert "a password" not in state.accounts.read_text()
    guest = Client(f"http://{at_hand(state).process.address}", None)
    assert log_in("a password").status_code == 200


# ---- lifecycle


def record_of_ended_service():
    return daemon.ServiceProcess(1, 0, "", "127.0.0.1", "0", Options(port=free_port_pair()))


def test_a_service_is_regarded_as_starting_until_it_replaces_the_previous_process_record(state):
    state.make()
    ended = record_of_ended_service()
    state.write_process(ended)
    service = daemon.start(state)
    state.write_process(ended)
    assert daemon.running(state) is None
    state.write_process(service.process)
    assert daemon.running(state) == service


def test_concurrent_starts_share_one_service(state):
    state.make()
    state.write_process(record_of_ended_service())
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: at_hand(state), range(4)))
    assert len({each.process.pid for each in found}) == 1
    assert daemon.running(state) == found[0]


@pytest.mark.smoke
def test_a_restarted_service_adopts_the_jobs_that_ran_while_no_service_ran(state, tmp_path):
    there = start(state)
    go_on = tmp_path / "go on"
    waits = f"while ! test -e '{go_on}'; do sleep 0.05; done; echo went on"
    client = client_of(there)
    for name in ("ends", "stays"):
        client.submit(a_job_of(waits if name == "ends" else "sleep 600", name=name))
    user = there.credentials.user

    def states():
        return {each["name"]: each["state"] for each in client.get(JOBS).json()}

    wait_until(lambda: set(states().values()) == {"RUNNING"}, "both run")
    daemon.stop(state)
    assert daemon.running(state) is None
    go_on.touch()
    assert at_hand(state).process.pid != there.process.pid
    wait_until(lambda: states() == {"ends": "SUCCEEDED", "stays": "RUNNING"}, "one ended and one runs")
    detail = client.get(f"{JOBS}/{user}~ends").json()
    path = detail["taskRoles"]["worker"]["taskStatuses"][0]["containerLog"]
    uris = {each["name"]: each["uri"] for each in client.get(path).json()["locations"]}
    assert client.get(uris["stdout"]).text == "went on\n"


def test_nnictl_sends_no_token_to_a_listener_of_another_user(state):
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.headers["Authorization"])
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    state.path.mkdir()
    state.write_credentials(daemon.Credentials("ada", "token"))
    with HTTPServer(("127.0.0.1", 0), Handler) as serving:
        state.write_process(daemon.ServiceProcess.here("127.0.0.1", Options(port=serving.server_port)))
        give_away(serving.server_port)
        with state.owned(), concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(serving.handle_request)
            assert daemon.running(state) is None
    assert asked == []
    shutil.rmtree(state.path)  # so that the fixture has nothing to stop


def test_a_killed_service_is_detected_and_can_be_started_again(state):
    there = start(state)
    os.kill(there.process.pid, signal.SIGKILL)
    wait_until(lambda: not state.is_owned(), "the service has ended")
    assert daemon.running(state) is None
    assert daemon.stop(state) is None
    assert at_hand(state).credentials == there.credentials


def test_no_job_is_lost_when_a_state_file_is_truncated(state, tmp_path):
    # The short form of the test empties every second file, and cuts each of the other files in half. The thorough form does both
    # to every file.
    there = start(state)
    client_of(there).submit(a_job_of("true", name="ended"))
    wait_until(lambda: client_of(there).get(JOBS).json()[0]["state"] == "SUCCEEDED", "a job has ended")
    os.kill(there.process.pid, signal.SIGKILL)
    wait_until(lambda: not state.is_owned(), "the service has ended")
    whole = tmp_path / "whole"
    shutil.copytree(state.path, whole)
    names = [
        str(path.relative_to(whole))
        for path in sorted(whole.rglob("*"))
        if path.is_file() and path.stat().st_size and path.suffix != ".log" and "logs" not in path.parts
    ]
    assert {"service.json", "accounts.json", "cluster/cluster.sqlite", "cluster/cluster.sqlite-wal"} <= set(
        names
    )
    for number, name in enumerate(names):
        for part in amount((number % 2 / 2,), (0, 0.5)):
            shutil.rmtree(state.path)
            shutil.copytree(whole, state.path)
            content = (whole / name).read_bytes()
            (state.path / name).write_bytes(content[: int(len(content) * part)])
            told = ""
            try:
                found = daemon.start(state, Options(port=free_port_pair()))
            except (FolderUnusable, ServiceFailed) as refused:
                told = str(refused)
            else:
                assert [job["name"] for job in client_of(found).get(JOBS).json()] == ["ended"], name
                os.kill(found.process.pid, signal.SIGKILL)
            named = rf"cannot .*{re.escape(name.rpartition('/')[2])}.*; .*(remove|restore) "
            assert not told or re.match(named, told), told
            wait_until(lambda: not state.is_owned(), "the service has ended")
    shutil.rmtree(state.path)
    shutil.copytree(whole, state.path)


def test_a_service_exits_when_its_cluster_process_fails(state):
    there = start(state)
    with contextlib.closing(sqlite3.connect(state.cluster / "cluster.sqlite")) as connection, connection:
        connection.execute("CREATE TRIGGER t BEFORE INSERT ON event BEGIN SELECT RAISE(ABORT, 'no'); END")
    with contextlib.suppress(requests.ConnectionError):
        client_of(there).submit(a_job_of("true"))
    wait_until(lambda: not state.is_owned(), "the service has ended")
    assert "bug" in state.stderr.read_text()
    with contextlib.closing(sqlite3.connect(state.cluster / "cluster.sqlite")) as connection, connection:
        connection.execute("DROP TRIGGER t")
    wait_until(
        lambda: client_of(at_hand(state)).get(JOBS).json()[0]["completedTime"],
        "the job ends after a new start",
    )


def test_openpai_stop_sends_no_signal_to_a_reused_pid(state):
    state.make()
    with subprocess.Popen(["sleep", "600"]) as bystander:
        state.write_process(daemon.ServiceProcess(bystander.pid, 0, "", "127.0.0.1", "0", Options()))
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            with state.owned():
                stopping = pool.submit(daemon.stop, state)
                # The state folder has an owner, but the stored process record is not the owner's. So stop() waits for the owner's
                # record.
                assert concurrent.futures.wait([stopping], timeout=0.3).not_done
            assert stopping.result(DEADLINE_S) is None
        assert bystander.poll() is None
        bystander.kill()


def test_a_service_in_the_foreground_can_be_stopped_with_nnictl(nnictl, state):
    arguments = ["--state-dir", state.path.name, "--port", str(free_port_pair())]
    with subprocess.Popen(
        [sys.executable, "-m", "nni_manager.local_openpai", *arguments], cwd=state.path.parent
    ) as server:
        wait_until(lambda: daemon.running(state), "the service responds")
        assert nnictl("stop-service")[0] == 0
        assert server.wait(DEADLINE_S) == 0


def test_a_second_service_on_the_same_folder_is_refused(state):
    start(state)
    second = subprocess.run(
        [
            sys.executable,
            "-m",
            "nni_manager.local_openpai",
            f"--state-dir={state.path}",
            f"--port={free_port_pair()}",
        ],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert second.returncode == 1
    assert second.stderr.startswith("cannot start the local OpenPAI in ")
    assert "see `nnictl openpai status`" in second.stderr


def test_an_unreadable_state_file_is_named_in_the_error(state):
    state.make()
    (state.path / "service.json").write_text("{")
    with pytest.raises(FolderUnusable, match=r"service\.json"):
        daemon.start(state)
    (state.path / "service.json").unlink()
    state.accounts.write_text("[]")
    with pytest.raises(ServiceFailed, match=r"accounts\.json"):
        start(state)
    state.accounts.unlink()
