"""The real nnictl as a process, on experiments of a few tiny trials."""

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import requests
from deadlines import DEADLINE_S
from free_ports import free_port_pair
from real_experiment import wait_until
from tls_files import issue
from user_home import BIN, environ_of, left_in, processes_of

from nni_manager.domain.stop_escalation import MAX_STOP_S
from nni_manager.store.folders import ExperimentFolder
from nni_manager.support.http_server import MAX_CONNECTIONS
from trial_keeper import __version__
from trial_keeper.processes import ProcessIdentity

CONFIG = """\
authorName: ada
experimentName: tiny
trialConcurrency: 2
maxTrialNum: 3
trainingServicePlatform: local
searchSpacePath: search_space.json
logDir: ../experiments
useAnnotation: false
tuner: {builtinTunerName: Random, classArgs: {optimize_mode: maximize}}
trial: {command: python3 train.py, codeDir: .}
"""
SPACE = '{"lr": {"_type": "uniform", "_value": [0, 1]}}'
GOOD = """\
import nni_sdk
lr = nni_sdk.get_next_parameter()["lr"]
print("lr is", lr)
nni_sdk.report_intermediate_result(lr / 2)
nni_sdk.report_final_result(lr)
"""
# Unlike GOOD, this code does not end by itself: it reports one result and then waits for a signal.
ENDLESS = GOOD.replace("nni_sdk.report_final", "import signal; signal.pause(); nni_sdk.report_final")


@pytest.fixture
def place(tmp_path):
    """A user's home with one valid experiment. Processes that a test starts there are killed after the
    test.
    """
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "config.yml").write_text(CONFIG)
    (folder / "search_space.json").write_text(SPACE)
    (folder / "train.py").write_text(GOOD)
    yield folder
    for process in processes_of(folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def is_training(place):
    for process in processes_of(place):
        with contextlib.suppress(psutil.Error):
            if "train.py" in process.cmdline():
                return True
    return False


@pytest.fixture
def nnictl(place):
    """Runs nnictl and waits for its end."""

    def run(*arguments):
        return subprocess.run(
            [BIN / "nnictl", *arguments],
            cwd=place,
            env=environ_of(place),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S + MAX_STOP_S,  # `nnictl stop` may wait for the grace periods of trials
        )

    return run


@pytest.fixture
def started(place):
    """Starts nnictl and returns the process; its stdout is a pipe of lines."""
    processes = []

    def start(*arguments):
        process = subprocess.Popen(
            [BIN / "nnictl", *arguments],
            cwd=place,
            env=environ_of(place),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def created(place, nnictl, script=ENDLESS, *options):
    (place / "train.py").write_text(script)
    done = nnictl("create", "--config", "config.yml", "--port", "auto", *options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split("The experiment id is ")[1].split()[0]


def read_until(process, text):
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return "".join(seen)
    pytest.fail(f"{text!r} was not printed: {''.join(seen)}{process.stderr.read()}")


def registered(place):
    return sorted(path.stem for path in (place.parent / "state").rglob("*.json"))


@pytest.mark.smoke
def test_an_experiment_in_the_background_can_be_listed_and_followed_and_stopped(place, nnictl, started):
    name = created(place, nnictl)
    (listed,) = json.loads(nnictl("experiment", "list", "--json").stdout)
    assert (listed["id"], listed["experimentName"], listed["managerIsRunning"]) == (name, "tiny", True)
    assert name in nnictl("experiment", "list").stdout
    assert json.loads(nnictl("experiment", "status").stdout) == {
        "status": "RUNNING",
        "errors": [],
        "managerIsRunning": True,
        "leftovers": [],
    }
    assert json.loads(nnictl("experiment", "show", name[:4]).stdout)["params"]["maxTrialNum"] == 3
    refused = nnictl("create", "--config", "config.yml", "--port", str(listed["port"]))
    assert refused.returncode == 1
    assert f"experiment {name} runs there; stop it with `nnictl stop {name}`" in refused.stderr
    assert registered(place) == [name]

    top = started("top", "--time", "0.1")
    read_until(top, "0/3 ended, 2 running")
    top.send_signal(signal.SIGINT)
    assert top.wait(DEADLINE_S) == 130

    trials = json.loads(nnictl("trial", "ls", "--json").stdout)
    assert [trial["state"] for trial in trials] == ["RUNNING", "RUNNING"]
    assert "RUNNING" in nnictl("trial", "ls", "--head", "1").stdout
    log = nnictl("log", "trial", "--trial-id", trials[0]["id"])
    assert log.stdout.startswith("lr is 0.")
    unknown = nnictl("log", "trial", "--trial-id", "no/such")
    assert unknown.stderr == (
        f"ERROR: cannot find trial 'no/such' in experiment {name}; `nnictl trial ls {name}` lists them\n"
    )
    killed = nnictl("trial", "kill", "--trial-id", trials[0]["id"])
    assert killed.returncode == 0
    assert nnictl("resume", name).stderr.startswith(
        f"ERROR: cannot resume experiment {name}: it runs on port "
    )

    stopped = nnictl("stop")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert stopped.stdout.splitlines()[0] == f"INFO: Stopping experiment {name}"
    assert stopped.stdout.splitlines()[-1] == "INFO: Stop experiment success."
    assert left_in(place) == []
    assert json.loads(nnictl("experiment", "list", "--json").stdout) == []
    assert "STOPPED" in nnictl("experiment", "list", "--all").stdout
    states = {trial["state"] for trial in json.loads(nnictl("trial", "ls", name, "--json").stdout)}
    assert states == {"USER_CANCELED"}
    assert nnictl("stop", name).stderr.startswith(
        f"ERROR: cannot stop experiment {name}: it is STOPPED already; "
    )


def test_a_json_log_of_a_manager_has_one_object_per_line(place, nnictl):
    name = created(place, nnictl, ENDLESS, "--log-format", "json")
    (listed,) = json.loads(nnictl("experiment", "list", "--json").stdout)
    assert nnictl("stop").returncode == 0
    lines = (Path(listed["logDir"]) / "log" / "nnimanager.log").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert all({"timestamp", "level", "logger", "message"} <= each.keys() for each in found)
    assert f"experiment {name}: the manager exits" in [each["message"] for each in found]


@pytest.mark.smoke
def test_python_dash_m_nni_manager_cli_runs_nnictl():
    asked = [sys.executable, "-m", "nni_manager.cli", "--version"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"nnictl {__version__}\n", "")


def test_nnictl_stop_works_while_unauthenticated_clients_use_all_connections(place, nnictl):
    created(place, nnictl)
    (listed,) = json.loads(nnictl("experiment", "list", "--json").stdout)
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS + 20):
            address = ("127.0.0.1", listed["port"])
            stack.enter_context(socket.create_connection(address, timeout=DEADLINE_S)).sendall(
                b"GET / HTTP/1.1\r\n"
            )
        stopped = nnictl("stop", "--all")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert left_in(place) == []


def test_nnictl_stop_names_a_running_tensorboard_and_nnictl_top_prints_the_error_of_the_experiment(
    place, nnictl
):
    (place / "mine.py").write_text(
        "class Mine:\n    def __init__(self, **kwargs): raise ValueError('my mistake')\n"
    )
    own = "tuner: {codeDir: ., classFileName: mine.py, className: Mine}"
    (place / "config.yml").write_text(re.sub("tuner: .*", own, CONFIG))
    created = nnictl("create", "-c", "config.yml", "-p", "auto")
    name = created.stdout.split("The experiment id is ")[1].split()[0]
    watched = nnictl("top", name, "--time", "0.1")
    assert watched.returncode == 0
    assert re.search(rf"WARNING: cannot finish experiment {name}: the tuner .*my mistake", watched.stderr)
    (listed,) = json.loads(nnictl("experiment", "list", "--json").stdout)
    board = {"process": ProcessIdentity.of(os.getpid())._asdict(), "port": 6017}
    (Path(listed["logDir"]) / "tensorboard-1.json").write_text(json.dumps(board))
    stopped = nnictl("stop", name)
    assert stopped.stdout.splitlines()[-1] == (
        f"INFO: Its TensorBoard on port 6017 still runs; `nnictl tensorboard stop {name}` ends it"
    )


def test_nnictl_shows_the_same_trials_with_and_without_a_manager(place, nnictl, started):
    (place / "train.py").write_text(GOOD)
    process = started("create", "-c", "config.yml", "-p", "auto")
    out, _ = process.communicate(timeout=DEADLINE_S)
    name = out.split("The experiment id is ")[1].split()[0]
    assert started("top", name, "--time", "0.1").wait(DEADLINE_S) == 0
    questions = [
        ("trial", "ls", name, "--json"),
        ("experiment", "show", name),
        ("experiment", "status", name),
    ]
    live = [json.loads(nnictl(*question).stdout) for question in questions]
    (live_line,) = json.loads(nnictl("experiment", "list", "--json").stdout)
    assert nnictl("stop", name).returncode == 0
    stored = [json.loads(nnictl(*question).stdout) for question in questions]
    (stored_line,) = json.loads(nnictl("experiment", "list", "--all", "--json").stdout)
    assert [each[2].pop("managerIsRunning") for each in (live, stored)] == [True, False]
    assert stored == live
    running = {"port", "pid", "managerIsRunning", "webuiUrl"}
    assert {k: v for k, v in stored_line.items() if k not in running} == {
        k: v for k, v in live_line.items() if k not in running
    }
    assert (live[0][0]["intermediateCount"], live[0][0]["state"]) == (1, "SUCCEEDED")

    view = started("view", name, "--foreground", "--port", "auto")
    read_until(view, "is served read-only at")
    view.send_signal(signal.SIGINT)
    out, err = view.communicate(timeout=DEADLINE_S)
    assert (view.returncode, out, err) == (130, "", "")
    again = [json.loads(nnictl(*question).stdout) for question in questions]
    assert again[2].pop("managerIsRunning") is False
    assert again == stored
    assert left_in(place) == []


LOCK = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1])
connection.execute("PRAGMA locking_mode=EXCLUSIVE")
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
time.sleep(600)
"""


def a_manager_of(folder):
    """The manager's process, and the folder of its experiment."""
    for process in processes_of(folder):
        with contextlib.suppress(psutil.Error):  # a listed process, such as nnictl itself, may have exited
            words = process.cmdline()
            if "nni_manager" in words:
                return process, Path(words[words.index("--folder") + 1])
    raise AssertionError("no manager runs")


def test_nnictl_stop_ends_the_trials_of_a_dead_manager_even_if_the_database_is_corrupt(place, nnictl):
    experiment_id = created(place, nnictl)
    manager, folder = a_manager_of(place)
    # The manager is killed only after a trial has started, because the fork server that starts keepers exits with the manager.
    wait_until(lambda: is_training(place), "a trial runs")
    manager.kill()
    manager.wait(DEADLINE_S)
    for path in (folder / "db").iterdir():
        path.write_bytes(b"")
    assert processes_of(place), "keepers and trials must still run"
    done = nnictl("experiment", "delete", experiment_id)
    assert done.returncode == 1
    assert "of its trials run, its files are unreadable" in done.stderr
    assert f"`nnictl stop {experiment_id}` first" in done.stderr
    done = nnictl("stop", experiment_id)
    assert done.returncode == 1
    assert f"cannot record that experiment {experiment_id} was stopped" in done.stderr
    assert "; killed " in done.stderr
    assert not left_in(place)
    done = nnictl("stop", experiment_id)
    assert "none of its trials runs on this machine" in done.stderr
    assert nnictl("experiment", "delete", experiment_id, "--force", "--yes").returncode == 0


def test_nnictl_stop_ends_the_trials_of_a_suspended_manager(place, nnictl):
    experiment_id = created(place, nnictl)
    manager, _ = a_manager_of(place)
    manager.suspend()
    done = nnictl("stop", experiment_id)
    assert (done.returncode, done.stderr) == (0, "")
    assert not left_in(place)


@pytest.mark.smoke
def test_an_experiment_in_the_foreground_runs_to_the_end_and_leaves_no_process(place, nnictl):
    done = nnictl("create", "--config", "config.yml", "--foreground", "--port", "auto")
    assert (done.returncode, done.stderr) == (0, "")
    assert "DONE 3/3 ended, 0 running, best 0." in done.stdout
    name = done.stdout.split("The experiment id is ")[1].split()[0]
    assert f"nnictl trial ls {name}" in done.stdout
    assert left_in(place) == []
    best = next(line.split() for line in done.stdout.splitlines() if line.startswith("1  "))
    log = nnictl("log", "trial", name, "--trial-id", best[1])
    assert log.stdout.startswith("lr is 0.")
    path = nnictl("log", "trial", name, "--trial-id", best[1], "--stream", "stderr", "--path").stdout.strip()
    assert Path(path).read_text() == ""


@pytest.mark.smoke
def test_nnictl_create_prints_the_error_of_the_script_if_no_trial_succeeds(place, nnictl):
    (place / "train.py").write_text("import no_such_module_here\n")
    done = nnictl("create", "--config", "config.yml", "--foreground", "--port", "auto")
    assert done.returncode == 3
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ERROR: cannot finish experiment ")
    assert "none of 3 trials succeeded; the last one (" in last
    assert (
        "exit code 1: ModuleNotFoundError: No module named 'no_such_module_here'; `nnictl log trial" in last
    )
    assert "Traceback" not in done.stderr
    assert left_in(place) == []


def test_nnictl_create_prints_a_remedy_if_no_trial_reports_a_final_result(place, nnictl):
    (place / "train.py").write_text("print('trained')\n")
    done = nnictl("create", "--config", "config.yml", "--foreground", "--port", "auto")
    assert done.returncode == 3
    warning, error = done.stderr.splitlines()
    assert warning.startswith("WARNING: trial ")
    assert error.startswith("ERROR: cannot find a best trial of experiment ")
    assert "none of 3 trials has a value; the last one that succeeded (" in error
    assert error.endswith(
        "no final result was reported; call nni_sdk.report_final_result() with a number in the training code"
    )
    name = done.stdout.split("The experiment id is ")[1].split()[0]
    assert " ".join(nnictl("trial", "ls", name).stdout.split()).count("(no final result was reported; ") == 3
    assert left_in(place) == []


INVALID_INPUTS = {
    "an unknown key": ({"config.yml": CONFIG + "maxTrials: 3\n"}, "maxTrialNum"),
    "a wrong type": ({"config.yml": CONFIG.replace("Num: 3", "Num: many")}, "cannot use maxTrialNum: "),
    "no search space": ({"search_space.json": None}, "cannot use searchSpacePath: there is no "),
    "a search space that is no JSON": ({"search_space.json": "{lr: 1}"}, "search_space.json:1: cannot "),
    "a range upside down": ({"search_space.json": SPACE.replace("[0, 1]", "[1, 0]")}, "lr: "),
    "a command that does not exist": (
        {"config.yml": CONFIG.replace("python3", "pyhton3")}, "cannot find the command 'pyhton3' of trial.command in config.yml: "
    ),
    "a folder that cannot be made": ({"config.yml": CONFIG.replace("../experiments", "train.py/x")}, "train.py"),
}  # fmt: skip


@pytest.mark.parametrize("invalid_input", INVALID_INPUTS)
@pytest.mark.smoke
def test_nnictl_prints_a_one_line_error_and_creates_no_files_if_its_input_is_invalid(
    place, nnictl, invalid_input
):
    files, says = INVALID_INPUTS[invalid_input]
    for file, text in files.items():
        (place / file).unlink() if text is None else (place / file).write_text(text)
    done = nnictl("create", "--config", "config.yml", "--port", "auto")
    (line,) = done.stderr.splitlines()
    assert line.startswith("ERROR: ")
    assert says in line
    assert (done.returncode, registered(place), left_in(place)) == (1, [], [])
    assert not (place.parent / "experiments").exists()


def test_nnictl_prints_a_one_line_error_and_creates_no_files_if_the_port_is_in_use(place, nnictl):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = nnictl("create", "--config", "config.yml", "--port", str(port))
    assert done.stderr == (
        f"ERROR: cannot use port {port}: another program uses it; choose another with --port N or --port auto\n"
    )
    assert (done.returncode, registered(place), left_in(place)) == (1, [], [])
    assert not (place.parent / "experiments").exists()


def test_nnictl_uses_https_for_a_host_other_than_loopback(place, nnictl):
    (place / "train.py").write_text(ENDLESS)
    done = nnictl("create", "--config", "config.yml", "--port", "auto", "--host", "0.0.0.0")
    assert (done.returncode, done.stderr) == (0, "")
    assert "The API url is: https://127.0.0.1:" in done.stdout
    links = done.stdout.split("The Web UI urls are:\n")[1].partition("\nEach logs in")[0].split()
    assert any(re.fullmatch(r"https://127\.0\.0\.1:[0-9]+/enter#[\w-]{43}", link) for link in links)
    assert len({link.partition("#")[2] for link in links}) == 1
    assert done.stdout.split("Its certificate is: ")[1].split()[0].count(":") == 31
    (line,) = json.loads(nnictl("experiment", "list", "--json").stdout)
    assert line["status"] == "RUNNING"

    # Delete the experiment's folder, which also contains the manager's certificate. nnictl must list and stop the experiment
    # without it.
    shutil.rmtree(line["logDir"])
    listed = nnictl("experiment", "list")
    assert (listed.returncode, line["id"] in listed.stdout) == (0, True)
    assert (
        f"WARNING: experiment {line['id']}: cannot store anything: {line['logDir']} was deleted; "
        in listed.stderr
    )
    refused = nnictl("create", "--config", "config.yml", "--port", str(line["port"]))
    assert f"experiment {line['id']} runs there; stop it with `nnictl stop {line['id']}`" in refused.stderr
    stopped = nnictl("stop", "--port", str(line["port"]))
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert (left_in(place), registered(place)) == ([], [])
    assert json.loads(nnictl("experiment", "list", "--all", "--json").stdout) == []


def test_nnictl_prints_an_error_and_creates_no_experiment_if_the_host_is_another_machine(place, nnictl):
    done = nnictl("create", "--config", "config.yml", "--port", "auto", "--host", "192.0.2.1")
    assert done.returncode == 1
    assert "cannot use --host 192.0.2.1: " in done.stderr
    assert registered(place) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_of_nnictl_create_in_the_foreground_stops_the_experiment(place, nnictl, started, number):
    (place / "train.py").write_text(ENDLESS)
    process = started("create", "--config", "config.yml", "--foreground", "--port", "auto")
    said = read_until(process, "2 running")
    process.send_signal(number)
    out, err = process.communicate(timeout=DEADLINE_S)
    name = said.split("The experiment id is ")[1].split()[0]
    assert (process.returncode, err) == (130, "")
    assert f"INFO: Stopping experiment {name}" in out
    assert f"INFO: Stop experiment success. `nnictl resume {name}` resumes it." in out
    assert left_in(place) == []


def test_an_interrupt_before_the_manager_is_ready_leaves_no_process_and_no_files(place, started):
    (place / "train.py").write_text(ENDLESS)
    process = started("create", "--config", "config.yml", "--port", "auto")
    read_until(process, "Starting restful server")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err.strip()) == (130, "")
    assert (registered(place), left_in(place)) == ([], [])
    assert not (place.parent / "experiments").exists()


def test_a_second_interrupt_ends_nnictl_immediately_with_a_warning_about_running_trials(
    place, nnictl, started
):
    # The trials ignore SIGTERM, so that the stop after the first interrupt takes a long time.
    (place / "train.py").write_text(
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ENDLESS
    )
    process = started("create", "--config", "config.yml", "--foreground", "--port", "auto")
    name = read_until(process, "2 running").split("The experiment id is ")[1].split()[0]
    process.send_signal(signal.SIGINT)
    read_until(process, "Stopping experiment")
    assert any('"STOPPING"' in nnictl("experiment", "status").stdout for _ in range(20))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert err.startswith(
        f"WARNING: experiment {name} ends without its manager: every trial was asked to stop, "
        "and is killed if it still runs after its grace period; "
    )
    assert len(processes_of(place)) > 0
    assert json.loads(nnictl("experiment", "list", "--json").stdout) == []
    listed = nnictl("experiment", "list", "--all")
    assert "NOT RUNNING (was STOPPING)" in listed.stdout
    assert listed.stderr == (
        f"WARNING: the manager of experiment {name} exited while its trials were ending; "
        f"`nnictl resume {name}` resumes it\n"
    )


def test_nnictl_stop_fails_while_the_database_of_a_killed_manager_is_locked(place, nnictl, started):
    (place / "train.py").write_text(ENDLESS)
    process = started("create", "--config", "config.yml", "--foreground", "--port", "auto")
    name = read_until(process, "2 running").split("The experiment id is ")[1].split()[0]
    (line,) = json.loads(nnictl("experiment", "list", "--json").stdout)
    os.kill(line["pid"], signal.SIGKILL)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert err.startswith(
        f"ERROR: cannot follow experiment {name}: its manager (process {line['pid']}) died; "
    )
    assert "NOT RUNNING (was RUNNING)" in nnictl("experiment", "list", "--all").stdout

    before = processes_of(place)
    # The process that holds the lock is killed at the end, because a normal exit would merge the write-ahead log into the
    # database.
    database = ExperimentFolder(Path(line["logDir"])).database
    with subprocess.Popen([sys.executable, "-c", LOCK, database], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        stopped = nnictl("stop", name)
        other.kill()
    assert stopped.returncode == 1
    assert "database is locked" in stopped.stderr
    assert processes_of(place) == before

    resumed = nnictl("resume", name, "--port", "auto")
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert [trial["state"] for trial in json.loads(nnictl("trial", "ls", "--json").stdout)] == ["RUNNING"] * 2
    manager, _ = a_manager_of(place)
    manager.kill()
    manager.wait(DEADLINE_S)
    stopped = nnictl("stop", name)
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert re.search(r"INFO: Ended 2 jobs \(\w+, \w+\) without a manager; `nnictl resume", stopped.stdout)
    assert left_in(place) == []
    assert "INFO: Nothing of it runs; `nnictl resume" in nnictl("stop", name).stdout


@pytest.mark.smoke
def test_an_experiment_without_a_manager_can_be_viewed_and_nnictl_resume_replaces_the_view(place, nnictl):
    name = created(place, nnictl)
    (line,) = json.loads(nnictl("experiment", "list", "--json").stdout)
    served = nnictl("view", name).stdout
    origin = f"http://127.0.0.1:{line['port']}"
    assert served.startswith(
        f"INFO: Experiment {name} runs already: it is served at {origin}/api/v1/nni\nThe Web UI urls are:\n  {origin}/enter#"
    )
    manager = psutil.Process(line["pid"])
    manager.kill()
    manager.wait(DEADLINE_S)

    # No other process takes the ports of free_port_pair(): the search of nnictl for a free port starts at 8080 and does not reach
    # them.
    viewed = nnictl("view", name[:4], "--port", str(free_port_pair()))
    assert (viewed.returncode, viewed.stderr) == (0, "")
    (line,) = json.loads(nnictl("experiment", "list", "--json").stdout)
    assert (line["managerIsRunning"], line["port"], line["status"]) == (False, None, "RUNNING")
    port = line["viewPort"]
    address = f"http://127.0.0.1:{port}/api/v1/nni"
    assert f"INFO: Experiment {name} is served read-only at {address}" in viewed.stdout
    assert "VIEWED (was RUNNING)" in nnictl("experiment", "list").stdout
    assert f"The Web UI urls are:\n  http://127.0.0.1:{port}/enter#" in viewed.stdout
    assert (
        nnictl("view", name)
        .stdout.splitlines()[0]
        .endswith(f"Experiment {name} is viewed already: it is served at {address}")
    )
    taken = nnictl("create", "--config", "config.yml", "--port", str(port))
    assert (
        f"a view of experiment {name} is served there; end it with `nnictl stop --port {port}`"
        in taken.stderr
    )

    resumed = nnictl("resume", name, "--port", str(port))
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert resumed.stdout.splitlines()[0] == f"INFO: Ended the view of experiment {name} on port {port}"
    (line,) = json.loads(nnictl("experiment", "list", "--json").stdout)
    assert (line["managerIsRunning"], line["port"], line["viewPort"]) == (True, port, None)
    assert nnictl("stop", name).returncode == 0

    assert nnictl("view", name, "--port", "auto").returncode == 0
    assert "VIEWED (STOPPED)" in nnictl("experiment", "list").stdout
    stopped = nnictl("stop")
    assert (stopped.returncode, stopped.stderr) == (0, "")
    assert stopped.stdout.startswith(f"INFO: Ended the view of experiment {name} on port ")
    assert json.loads(nnictl("experiment", "list", "--json").stdout) == []
    assert left_in(place) == []


def test_a_manager_that_cannot_start_leaves_no_process_and_no_files(place, nnictl):
    # The manager cannot start, because the first folder of its module search path contains a broken uvicorn.
    broken = place.parent / "broken"
    broken.mkdir()
    (broken / "uvicorn.py").write_text("raise RuntimeError('no web today')\n")
    done = subprocess.run(
        [BIN / "nnictl", "create", "--config", "config.yml", "--port", "auto"],
        cwd=place,
        env=environ_of(place) | {"PYTHONPATH": str(broken)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.stderr.startswith(
        "ERROR: cannot start the manager: it ended with exit code 1: RuntimeError: no web today; "
    )
    assert (done.returncode, registered(place), left_in(place)) == (1, [], [])
    assert not (place.parent / "experiments").exists()


def test_a_saved_experiment_is_resumed_on_another_machine(place, started, nnictl):
    waits = "if nni_sdk.get_sequence_id() == 1:\n    import signal\n    signal.pause()\n"
    (place / "train.py").write_text(GOOD.replace("nni_sdk.report_final", f"{waits}nni_sdk.report_final"))
    (place / "config.yml").write_text(CONFIG.replace("trialConcurrency: 2", "trialConcurrency: 1"))
    process = started("create", "--config", "config.yml", "--foreground", "--port", "auto")
    experiment = read_until(process, "1/3 ended, 1 running").split("The experiment id is ")[1].split()[0]
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 130
    exported = nnictl("experiment", "export", experiment).stdout
    saved = nnictl("experiment", "save", experiment, "--path", "../x.tar.gz", "--saveCodeDir")
    assert (saved.returncode, saved.stderr) == (0, "")

    there = place.parent / "there/work"
    there.mkdir(parents=True)
    shutil.move(place.parent / "x.tar.gz", there)
    shutil.rmtree(place)
    shutil.rmtree(place.parent / "experiments")

    def nnictl_there(*arguments):
        return subprocess.run(
            [BIN / "nnictl", *arguments], cwd=there, env=environ_of(there), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=DEADLINE_S,
        )  # fmt: skip

    loaded = nnictl_there("experiment", "load", "--path", "x.tar.gz")
    assert (loaded.returncode, loaded.stderr) == (0, "")
    assert nnictl_there("experiment", "export", experiment).stdout == exported
    resumed = nnictl_there("resume", experiment, "--foreground", "--port", "auto")
    assert (resumed.returncode, "3/3 ended" in resumed.stdout) == (0, True), resumed.stderr
    states = [
        trial["state"] for trial in json.loads(nnictl_there("trial", "ls", experiment, "--json").stdout)
    ]
    assert states == ["SUCCEEDED", "USER_CANCELED", "SUCCEEDED"]
    assert left_in(there) == []


@pytest.mark.smoke
def test_nnictl_create_in_a_terminal_shows_the_progress_of_the_experiment(place):
    main, side = pty.openpty()
    with subprocess.Popen(
        [BIN / "nnictl", "create", "--config", "config.yml", "--foreground", "--port", "auto"],
        cwd=place,
        env=environ_of(place) | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"},
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
    ) as process:
        os.close(side)
        seen = b""
        # After the last writer has closed the terminal, the next read fails with OSError, which ends the loop.
        with contextlib.suppress(OSError):
            while piece := os.read(main, 65536):
                seen += piece
        os.close(main)
    text = seen.decode()
    assert process.returncode == 0
    assert "\x1b[1A" in text  # this sequence moves the cursor up, so that the display is redrawn in place
    assert "━" in text
    assert "3/3" in text
    assert "DONE" in text
    assert "\x1b[?25h" in text  # this sequence shows the cursor that the display had hidden
    assert left_in(place) == []


def test_a_url_prefix_is_part_of_all_addresses_and_is_preserved_by_resume_and_view(place, nnictl):
    refused = nnictl("create", "--config", "config.yml", "--url-prefix", "lab/../x")
    assert (refused.returncode, "cannot use --url-prefix lab/../x: write letters" in refused.stderr) == (
        1,
        True,
    )
    (place / "train.py").write_text(ENDLESS)
    done = nnictl("create", "--config", "config.yml", "--port", "auto", "-u", "lab/digits/")
    assert done.returncode == 0, done.stderr
    assert re.search(r"The API url is: http://127\.0\.0\.1:\d+/lab/digits/api/v1/nni\n", done.stdout)
    assert re.search(r"http://127\.0\.0\.1:\d+/lab/digits/enter#", done.stdout)
    assert "RUNNING" in nnictl("experiment", "list").stdout
    (line,) = json.loads(nnictl("experiment", "list", "--json").stdout)
    assert line["prefixUrl"] == "/lab/digits"
    assert nnictl("stop").returncode == 0

    resumed = nnictl("resume", line["id"], "--port", "auto")
    assert "/lab/digits/enter#" in resumed.stdout
    assert nnictl("stop").returncode == 0
    viewed = nnictl("view", line["id"], "--port", "auto", "--url_prefix", "/")
    assert re.search(r"http://127\.0\.0\.1:\d+/enter#", viewed.stdout)
    assert nnictl("stop").returncode == 0


def test_all_servers_use_the_configured_certificate_files_and_nnictl_connects_to_these_servers(place, nnictl):
    files = issue(place / "tls")
    options = ("--tls-certificate", "tls/certificate.pem", "--tls-key", "tls/key.pem")
    alone = nnictl("create", "--config", "config.yml", *options[:2])
    assert (alone.returncode, alone.stderr) == (
        1,
        "ERROR: cannot use --tls-certificate without --tls-key; name both files\n",
    )
    (place / "train.py").write_text(ENDLESS)
    done = nnictl("create", "--config", "config.yml", "--port", "auto", *options)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"The API url is: https://127\.0\.0\.1:\d+/api/v1/nni\n", done.stdout)
    assert re.search(r"  https://127\.0\.0\.1:\d+/enter#", done.stdout)
    assert f"Its certificate is: {files.read().sha256}\n" in done.stdout
    (line,) = json.loads(nnictl("experiment", "list", "--json").stdout)
    assert (line["status"], line["webuiUrl"]) == ("RUNNING", [f"https://127.0.0.1:{line['port']}"])

    # The hub (`nnictl web`) reads the manager's data over HTTPS, and passes it on.
    served = nnictl("web", "--json", *options)
    assert (served.returncode, served.stderr) == (0, "")
    (url,) = json.loads(served.stdout)["urls"]
    token = json.loads((place.parent / "state/trial-keeper/web/view-process.json").read_text())["token"]
    answer = requests.get(
        f"{url}/experiments/{line['id']}/api/v1/nni/summary",
        headers={"Authorization": f"Bearer {token}"},
        verify=files.certificate,
        timeout=DEADLINE_S,
    )
    assert answer.json()["status"] == "RUNNING"
    assert nnictl("web", "--stop").returncode == 0
    assert nnictl("stop").returncode == 0

    issue(place / "tls", start_days=-60)
    for command in ("resume", "view"):
        expired = nnictl(command, line["id"], "--port", "auto", *options)
        assert (expired.returncode, expired.stderr.count("\n")) == (0, 1), expired.stderr
        assert re.match(
            r"WARNING: the certificate .* expired on \d{4}-\d\d-\d\d, and browsers", expired.stderr
        )
        assert "  https://127.0.0.1:" in expired.stdout
        assert nnictl("stop").returncode == 0
    assert left_in(place) == []
