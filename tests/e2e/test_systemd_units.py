"""The units of deploy/systemd are valid, and their ExecStart commands work, even without systemd."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import requests
from deadlines import DEADLINE_S, scaled_s
from free_ports import free_port_pair
from real_experiment import RealExperiment, wait_until
from user_home import BIN, environ_of, left_in, processes_of

from nni_manager.store.registry import Registry

pytestmark = pytest.mark.any_machine

UNITS = sorted((Path(__file__).parents[2] / "deploy/systemd").glob("*.service"))
WEB, USER_WEB, EXPERIMENT = (
    "trial-keeper-web.service",
    "trial-keeper-web.user.service",
    "trial-keeper-experiment@.service",
)
ENDLESS = "import signal\nsignal.pause()\n"


def settings_of(name):
    """The settings of the section [Service]: a list of values for each key."""
    (unit,) = (each for each in UNITS if each.name == name)
    found = {}
    for line in unit.read_text().partition("[Service]")[2].partition("\n[")[0].splitlines():
        if line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def command_of(name, **specifiers):
    """The ExecStart command of a unit, with the nnictl of this Python and a free port."""
    (line,) = settings_of(name)["ExecStart"]
    for letter, value in specifiers.items():
        line = line.replace(f"%{letter}", str(value))
    program, *arguments = shlex.split(line)
    assert program.endswith("/bin/nnictl")
    return [str(BIN / "nnictl"), *(str(free_port_pair()) if each == "8070" else each for each in arguments)]


def seconds_of(name, key):
    (value,) = settings_of(name)[key]
    return float(value.removesuffix("s"))


@pytest.fixture
def place(tmp_path, monkeypatch):
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield folder
    subprocess.run(
        [BIN / "nnictl", "stop", "--all"], env=environ_of(folder), check=False, timeout=scaled_s(120)
    )
    assert left_in(folder) == []


@pytest.fixture
def service(place):
    """Starts the command of a unit."""
    started = []

    def start(command):
        process = subprocess.Popen(
            command,
            cwd=place,
            env=environ_of(place),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def answers(url):
    try:
        return requests.get(url, timeout=DEADLINE_S).text == "ok\n"
    except requests.ConnectionError:
        return False


def follow(process):
    """Wait until the service of an experiment prints its progress. An earlier signal would only interrupt the start."""
    assert any(line.startswith("[") for line in process.stdout)


def ended(process, within_s):
    """The exit code after SIGTERM, and stderr."""
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=within_s)
    return process.returncode, errors


@pytest.mark.parametrize("unit", UNITS, ids=[unit.name for unit in UNITS])
@pytest.mark.smoke
def test_systemd_accepts_each_unit_without_a_warning(unit, tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (Debian: systemd)")
    copy = tmp_path / unit.name.replace(".user.service", ".service")
    (folder,) = {
        line.partition("=")[2].rpartition("/nnictl")[0]
        for line in unit.read_text().splitlines()
        if "ExecStart=" in line
    }
    copy.write_text(unit.read_text().replace(folder, str(BIN)))
    who = "--user" if ".user." in unit.name else "--system"
    done = subprocess.run(
        ["systemd-analyze", "verify", who, "--man=no", copy],
        env=environ_of(tmp_path) | {"XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    # systemd-analyze also prints warnings about other units of this machine, which the test ignores.
    assert [line for line in done.stderr.splitlines() if "trial-keeper" in line] == []
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "prefix"), [(WEB, "/lab"), (USER_WEB, "")])
def test_the_page_of_all_experiments_runs_as_a_service_until_sigterm(place, service, name, prefix):
    running = RealExperiment(place / "running", ENDLESS, maxTrialNum=1, experiment_id="RUNNING1")
    running.create()
    Registry.of_user().add(running.folder)
    command = command_of(name, h=place)
    process = service(command)
    address = f"http://127.0.0.1:{command[command.index('--port') + 1]}{prefix}"
    wait_until(lambda: answers(f"{address}/readyz"), "the page is served")
    assert answers(f"{address}/livez")

    printed = subprocess.run(
        [BIN / "nnictl", "web", "--json"], env=environ_of(place), capture_output=True, text=True, check=True
    )
    assert json.loads(printed.stdout)["urls"] == [address]
    second = service(command)
    second.wait(DEADLINE_S)
    assert (second.returncode, "run `nnictl web --stop` first" in second.stderr.read()) == (1, True)

    # An experiment that is started on the page outlives the service.
    token = json.loads((place.parent / "state/trial-keeper/web/view-process.json").read_text())["token"]
    answer = requests.post(
        f"{address}/api/v1/nni/all/RUNNING1/resume",
        headers={"Authorization": f"Bearer {token}"},
        timeout=scaled_s(60),
    )
    assert answer.status_code == 200, answer.text
    assert settings_of(name)["KillMode"] == ["process"]
    began_s = time.monotonic()
    assert ended(process, DEADLINE_S) == (0, "")
    assert time.monotonic() - began_s < scaled_s(seconds_of(name, "TimeoutStopSec"))
    assert running.folder.running_process() is not None


def test_an_experiment_runs_as_a_service_and_sigterm_stops_it(place, service):
    experiment = RealExperiment(place / "made", ENDLESS, maxTrialNum=2, experiment_id="SERVICE1")
    experiment.create()
    Registry.of_user().add(experiment.folder)
    process = service(command_of(EXPERIMENT, i="SERVICE1"))
    wait_until(lambda: experiment.folder.running_process() is not None, "the manager runs")
    wait_until(lambda: experiment.summary()["counts"]["RUNNING"] == 2, "the trials run")
    follow(process)
    code, errors = ended(process, scaled_s(seconds_of(EXPERIMENT, "TimeoutStopSec")))
    assert (settings_of(EXPERIMENT)["SuccessExitStatus"], errors) == ([str(code)], "")
    assert experiment.stored_status() == "STOPPED"
    assert processes_of(place) == []


def test_a_restarted_service_adopts_the_trials_after_a_crash_of_its_manager(place, service):
    experiment = RealExperiment(place / "made", ENDLESS, maxTrialNum=1, experiment_id="SERVICE1")
    experiment.create()
    Registry.of_user().add(experiment.folder)
    assert settings_of(EXPERIMENT)["Restart"] == ["on-failure"]
    process = service(command_of(EXPERIMENT, i="SERVICE1"))
    wait_until(lambda: experiment.folder.running_process() is not None, "the manager runs")
    wait_until(lambda: experiment.summary()["counts"]["RUNNING"] == 1, "the trial runs")
    os.kill(experiment.folder.running_process().pid, signal.SIGKILL)
    assert process.wait(scaled_s(60)) == 1
    keepers = experiment.keeper_pids()

    again = service(command_of(EXPERIMENT, i="SERVICE1"))
    wait_until(lambda: experiment.folder.running_process() is not None, "the next manager runs")
    wait_until(lambda: experiment.summary()["counts"]["RUNNING"] == 1, "the trial runs")
    assert experiment.keeper_pids() == keepers
    follow(again)
    assert ended(again, scaled_s(seconds_of(EXPERIMENT, "TimeoutStopSec")))[1] == ""


def test_the_service_of_a_stopped_experiment_exits_with_success(place, service):
    """With another exit code, systemd would resume an experiment that its user has just stopped."""
    experiment = RealExperiment(place / "made", ENDLESS, maxTrialNum=1, experiment_id="SERVICE1")
    experiment.create()
    Registry.of_user().add(experiment.folder)
    process = service(command_of(EXPERIMENT, i="SERVICE1"))
    follow(process)
    subprocess.run(
        [BIN / "nnictl", "stop", "SERVICE1"], env=environ_of(place), check=True, timeout=scaled_s(120)
    )
    assert settings_of(EXPERIMENT)["SuccessExitStatus"] == [str(process.wait(scaled_s(60)))]


def test_the_service_of_a_failed_experiment_exits_with_the_status_that_prevents_a_restart(place, service):
    experiment = RealExperiment(place / "made", "import no_such_module\n", maxTrialNum=1)
    experiment.create()
    Registry.of_user().add(experiment.folder)
    process = service(command_of(EXPERIMENT, i="TESTEXPT"))
    assert settings_of(EXPERIMENT)["RestartPreventExitStatus"] == [str(process.wait(scaled_s(60)))]
    assert "No module named 'no_such_module'" in process.stderr.read()


def test_the_service_of_a_finished_experiment_exits_with_success(place, service):
    train = "import nni_sdk\nnni_sdk.report_final_result(nni_sdk.get_next_parameter()['x'])\n"
    experiment = RealExperiment(place / "made", train, maxTrialNum=1)
    experiment.create()
    Registry.of_user().add(experiment.folder)
    process = service(command_of(EXPERIMENT, i="TESTEXPT"))
    assert (process.wait(scaled_s(60)), process.stderr.read()) == (0, "")
