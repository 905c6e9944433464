"""The units of deploy/systemd on a real systemd, installed with the commands of docs/deployment.md."""

import json
import re

import pytest
from real_experiment import wait_until
from systemd_here import REPOSITORY, a_systemd

pytestmark = pytest.mark.any_machine

# The trial waits until the file `go` exists.
TRAIN = """
import os, time
import nni_sdk
while not os.path.exists("/var/lib/trial-keeper/go"):
    time.sleep(0.02)
nni_sdk.report_final_result(nni_sdk.get_next_parameter()["x"])
"""
CONFIG = {
    "searchSpace": {"x": {"_type": "uniform", "_value": [0, 1]}},
    "trialCommand": "/opt/trial-keeper/bin/python train.py",
    "trialConcurrency": 1,
    "maxTrialNumber": 2,
    "tuner": {"name": "Random"},
    "trainingService": {"platform": "local"},
}
NNICTL = "/opt/trial-keeper/bin/nnictl"


def documented():
    """The commands of docs/deployment.md, without `sudo` and without the installation of the package, which the systemd machine
    already has.
    """
    page = (REPOSITORY / "docs/deployment.md").read_text()
    (block,) = [each for each in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "useradd" in each]
    _install, _link, *lines, last = block.splitlines()
    return "\n".join(lines).replace("deploy/", f"{REPOSITORY}/deploy/"), last


@pytest.fixture
def machine(tmp_path):
    with a_systemd(tmp_path) as made:
        install, _ = documented()
        made.run(install)
        made.run(f"cat > /var/lib/trial-keeper/train.py <<'end'\n{TRAIN}\nend")
        made.run(f"echo '{json.dumps(CONFIG)}' > /var/lib/trial-keeper/config.yml")
        yield made


def as_user(machine, command):
    return machine.run(f"runuser -l trial-keeper -c '{command}'")


def main_pid(machine, unit):
    return int(machine.run(f"systemctl show --property=MainPID --value {unit}"))


def experiments(machine):
    return json.loads(as_user(machine, f"{NNICTL} experiment list --all --json"))


def test_the_web_page_runs_as_a_service_whose_restart_or_crash_does_not_end_experiments(machine):
    def is_ready():
        return machine.ask("curl --silent --fail http://127.0.0.1:8070/lab/readyz").stdout == "ok\n"

    wait_until(is_ready, "the page is served")
    _, link = documented()
    assert link == f"sudo -iu trial-keeper {NNICTL} web"
    assert re.search(r"http://127\.0\.0\.1:8070/lab\S+", as_user(machine, f"{NNICTL} web"))

    state = "/var/lib/trial-keeper/.local/state/trial-keeper/web/view-process.json"
    token = json.loads(machine.run(f"cat {state}"))["token"]
    machine.run(
        f"curl --silent --fail-with-body --header 'Authorization: Bearer {token}' --data"
        """ '{"config": "/var/lib/trial-keeper/config.yml"}' http://127.0.0.1:8070/lab/api/v1/nni/all"""
    )
    (before,) = experiments(machine)
    page = main_pid(machine, "trial-keeper-web")
    machine.run("systemctl restart trial-keeper-web")
    wait_until(is_ready, "the page is served again")
    assert main_pid(machine, "trial-keeper-web") != page

    page = main_pid(machine, "trial-keeper-web")
    machine.run(f"kill -KILL {page}")
    wait_until(lambda: main_pid(machine, "trial-keeper-web") not in (0, page), "systemd has started it again")
    wait_until(is_ready, "the page is served after the crash")
    (after,) = experiments(machine)
    assert after["pid"] == before["pid"]
    machine.run("touch /var/lib/trial-keeper/go")
    wait_until(lambda: experiments(machine)[0]["status"] == "DONE", "the experiment is done")
    machine.run("systemctl stop trial-keeper-web")
    assert machine.run("systemctl show --property=Result --value trial-keeper-web") == "success\n"


def test_an_experiment_runs_as_a_service_and_its_trial_survives_a_crash_of_the_manager(machine):
    head = (REPOSITORY / "deploy/systemd/trial-keeper-experiment@.service").read_text()
    assert "systemctl daemon-reload && systemctl enable --now trial-keeper-experiment@" in head
    printed = as_user(machine, f"cd /var/lib/trial-keeper && {NNICTL} create config.yml --port auto")
    (experiment_id,) = re.findall(r"The experiment id is (\w+)", printed)
    as_user(machine, f"{NNICTL} stop {experiment_id}")
    unit = f"trial-keeper-experiment@{experiment_id}"
    source = REPOSITORY / "deploy/systemd/trial-keeper-experiment@.service"
    machine.run(
        f"cp '{source}' /etc/systemd/system/ && systemctl daemon-reload && systemctl enable --now {unit}"
    )

    def running():
        return [each for each in experiments(machine) if each.get("pid") is not None]

    def keepers():
        return machine.ask("pgrep -u trial-keeper -f train.py").stdout.split()

    wait_until(running, "the manager runs")
    wait_until(keepers, "the trial runs")
    trial = keepers()
    machine.run(f"kill -KILL {running()[0]['pid']}")
    wait_until(
        lambda: machine.ask(f"systemctl is-active {unit}").stdout != "active\n", "systemd sees the crash"
    )
    wait_until(
        lambda: machine.ask(f"systemctl is-active {unit}").stdout == "active\n", "systemd starts it again"
    )
    wait_until(running, "the next manager runs")
    assert keepers() == trial
    machine.run("touch /var/lib/trial-keeper/go")
    wait_until(lambda: machine.ask(f"systemctl is-active {unit}").stdout == "inactive\n", "the service ends")
    assert machine.run(f"systemctl show --property=Result --value {unit}") == "success\n"
    assert [each["status"] for each in experiments(machine)] == ["DONE"]
