"""Whole experiments with the real nnictl on a fake OpenPAI that runs jobs, each task with a real keeper."""

import os
import re
import shutil
import socket
import stat
from functools import partial

import pytest
from attempts import AttemptNumbers, attempt_id
from deadlines import DEADLINE_S
from fake_pai import USER, FakePai
from openpai_place import make_place, run_nnictl, workspace_of
from real_experiment import wait_until
from user_home import environ_of

from nni_manager.experiment import Experiment, ExperimentConfig
from trial_keeper.wire.documents import ManagerDocument
from trial_keeper.wire.messages import AttemptKey, Stream

TRAIN = """\
import os
import helper
import nni_sdk
print("in", os.getcwd(), "of process", os.environ["PAI_JOB_NAME"])
x = nni_sdk.get_next_parameter()["x"]
nni_sdk.report_intermediate_result(x / 2)
nni_sdk.report_final_result(x)
"""


# This trial also connects to its manager without TLS. The manager must close this connection.
TLS_FREE_CLIENT = """
import glob, json, socket
[document] = glob.glob("{storage}/*/manager.json")
host, _, port = json.load(open(document))["addresses"][0].rpartition(":")
with socket.create_connection((host, int(port))) as stranger:
    stranger.sendall(b"GET / HTTP/1.1\\r\\n\\r\\n")
    while stranger.recv(100):
        pass
"""

# The task runs as a user without a passwd entry, who may read all files of the image and write none.
UNKNOWN_USER = (
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    *("--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"),
)


@pytest.fixture
def server(request):
    server = FakePai(run_jobs=True, tasks_begin_with=getattr(request, "param", ()))
    server.start()
    yield server
    server.close()


@pytest.fixture
def place(tmp_path, server):
    """A home with an experiment for the server; the storage is a folder with the same path in jobs."""
    return make_place(tmp_path, server, TRAIN)


@pytest.fixture
def nnictl(place):
    """Runs nnictl and waits until it exits. The umask of nnictl denies access for other users."""
    return partial(run_nnictl, place)


def trials_of(workspace):
    return sorted(path.name for path in workspace.trials.iterdir())


def output_of(workspace, trial_id, task="taskrole-0"):
    folder = AttemptNumbers(workspace).folder(AttemptKey(trial_id, attempt_id(0), task))
    return folder.stream(Stream.STDOUT).read_text()


@pytest.mark.smoke
def test_an_openpai_experiment_runs_one_job_per_trial_and_stores_no_secret_in_its_workspace(
    nnictl, place, server
):
    done = nnictl("create", "--config", "config.yml", "--port", "auto", "--foreground")
    assert done.returncode == 0, done.stderr
    assert re.search(r"pack codeDir \S+ for the containers: 4 files, 0\.0 MiB", done.stdout)
    workspace = workspace_of(place, done)
    experiment_id = workspace.root.name
    trials = trials_of(workspace)
    assert sorted(server.jobs) == sorted(f"{USER}~nni_exp_{experiment_id}_trial_{trial}" for trial in trials)
    assert len(trials) == 3
    assert {job.state for job in server.jobs.values()} == {"SUCCEEDED"}
    for trial in trials:
        code = AttemptNumbers(workspace).folder(AttemptKey(trial, attempt_id(0), "taskrole-0")).code
        assert f"in {code} of process {USER}~nni_exp_{experiment_id}_trial_{trial}" in output_of(
            workspace, trial
        )
        assert not (code / "big.bin").exists()
        assert not (code / "config.yml").exists(), "it contains the login"
        # The keeper prints the trial's output on its own stdout, so OpenPAI's portal shows the output.
        job = server.jobs[f"{USER}~nni_exp_{experiment_id}_trial_{trial}"]
        assert f"in {code} of process".encode() in server._written(job, "stdout")
    modes = {
        path: stat.S_IMODE(path.stat().st_mode)
        for path in (workspace.trials, workspace.trial(trials[0]).attempts)
    }
    assert list(modes.values()) == [0o755, 0o1777], "trials 0755, attempts 01777"
    for path in (
        workspace.run_sh,
        workspace.manager_json,
        workspace.trial(trials[0]).trial_json,
        *workspace.sdk.rglob("*.py"),
    ):
        assert stat.S_IMODE(path.stat().st_mode) & 0o444 == 0o444, path
    private = place.parent / "experiments" / experiment_id
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    assert (private / "workspace").readlink() == workspace.root
    everything = b"".join(path.read_bytes() for path in workspace.root.rglob("*") if path.is_file())
    for job in server.jobs.values():
        assert job.protocol.secrets["trial_keeper_token"].encode() not in everything
    assert b"token-of-the-profile-page" not in everything
    log = (private / "log" / "nnimanager.log").read_text()
    assert "token-of-the-profile-page" not in log
    assert nnictl("log", "trial", experiment_id, "--trial-id", trials[0]).stdout == output_of(
        workspace, trials[0]
    )


def own_address():
    """An address of this machine that is not loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # For a UDP socket, connect() sends nothing. It only selects the own address.
            probe.connect(("192.0.2.254", 9))
        except OSError:
            pytest.skip("this machine has no network")
        return probe.getsockname()[0]


@pytest.mark.smoke
def test_keepers_on_other_machines_connect_over_tls_and_verify_the_certificate(nnictl, place, server):
    address = own_address()
    (place / "train.py").write_text(TRAIN + TLS_FREE_CLIENT.format(storage=place.parent / "storage"))
    done = nnictl(
        *("create", "--config", "config.yml", "--port", "auto", "--foreground"),
        replace={
            "useAnnotation: false": f"useAnnotation: false\nnniManagerIp: {address}\nlogCollection: http"
        },
    )
    assert done.returncode == 0, done.stderr
    workspace = workspace_of(place, done)
    document = ManagerDocument.from_bytes(workspace.manager_json.read_bytes())
    assert document.certificate is not None
    assert document.addresses[0].startswith(f"{address}:")
    folder = place.parent / "experiments" / workspace.root.name
    key = (folder / "tls.pem").read_text().partition("-----BEGIN CERTIFICATE-----")[0].strip()
    everything = [path.read_text(errors="replace") for path in workspace.root.rglob("*") if path.is_file()]
    assert not any(key in text for text in everything)
    assert stat.S_IMODE((folder / "tls.pem").stat().st_mode) == 0o600
    # The log must have lines for connected keepers. Otherwise the manager could have read all results from files on the storage.
    assert (folder / "log" / "nnimanager.log").read_text().count(" connected") >= 3
    # The trial has connected without TLS. The manager must print nothing about this connection.
    assert (folder / "log" / "nnictl_stderr.log").read_text() == ""


def test_temporary_submit_errors_are_printed_but_no_trial_fails(nnictl, place, server):
    quota = (403, "ForbiddenUserError", "the quota of ada in default is used up")
    for how in (quota, 408, 429, 500, "drop", quota):
        server.misbehave(how, 1, at=("POST", "/jobs"))
    for at in (("GET", "/jobs"), ("GET", "/jobs/{name}")):
        for how in (429, "drop", 500):
            server.misbehave(how, 2, at=at)
    done = nnictl("create", "--config", "config.yml", "--port", "auto", "--foreground")
    assert done.returncode == 0, done.stderr
    assert (
        "cannot submit the job: OpenPAI answers: the quota of ada in default is used up; the call is"
        in done.stderr
    )
    assert {job.state for job in server.jobs.values()} == {"SUCCEEDED"}
    assert len(trials_of(workspace_of(place, done))) == len(server.jobs) == 3


@pytest.mark.any_machine
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="only root can start processes of another user",
)
@pytest.mark.parametrize("server", [UNKNOWN_USER], indirect=True)
@pytest.mark.parametrize("reuse", ["true", "false"])
def test_containers_of_another_user_can_write_to_the_workspace(nnictl, place, server, reuse):
    done = nnictl(
        *("create", "--config", "config.yml", "--port", "auto", "--foreground"),
        replace={"paiConfig:": f"paiConfig:\n  reuse: {reuse}"},
    )
    assert done.returncode == 0, done.stderr
    workspace = workspace_of(place, done)
    for trial in trials_of(workspace):
        (attempt,) = workspace.trial(trial).attempts.iterdir()
        assert attempt.stat().st_uid == 65534


def test_each_task_role_of_a_job_file_runs_its_own_command(nnictl, place, server):
    storage = place.parent / "storage"
    (place / "job.yml").write_text(
        f"""\
protocolVersion: 2
name: team
type: job
prerequisites: [{{type: dockerimage, name: i, uri: anything}}]
parameters: {{greeting: "it's fine"}}
secrets: {{word: s3cret}}
taskRoles:
  ps:
    dockerImage: i
    resourcePerInstance: {{gpu: 0, cpu: 1, memoryMB: 512}}
    completion: {{minFailedInstances: 1, minSucceededInstances: -1}}
    commands:
      - echo "<% $parameters.greeting %>, <% $secrets.word %>"
      - cat helper.py
  worker:
    dockerImage: i
    resourcePerInstance: {{gpu: 0, cpu: 1, memoryMB: 512}}
    completion: {{minFailedInstances: 1, minSucceededInstances: -1}}
    commands: [python3 train.py]
extras:
  storages: [{{name: confignfs-data, mountPath: {storage}}}]
"""
    )
    lines = "  command: python3 train.py\n", "  gpuNum: 0\n", "  cpuNum: 1\n", "  memoryMB: 512\n"
    done = nnictl(
        *("create", "--config", "config.yml", "--port", "auto", "--foreground"),
        replace={
            "maxTrialNum: 3": "maxTrialNum: 1",
            "  image: anything\n": "  paiConfigPath: job.yml\n",
            **dict.fromkeys(lines, ""),
        },
    )
    assert done.returncode == 0, done.stderr
    workspace = workspace_of(place, done)
    (trial,) = trials_of(workspace)
    assert output_of(workspace, trial, "ps-0") == "it's fine, s3cret\n"
    assert output_of(workspace, trial, "worker-0").startswith("in ")
    (job,) = server.jobs.values()
    assert job.protocol.extras["storages"] == [{"name": "confignfs-data", "mountPath": str(storage)}]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "confignfs-data\n",
            "none\n",
            "there is no storage 'none' that ada may use; correct the name in config.yml (known: conf",
        ),
        (
            "  image: a",
            "  virtualCluster: none\n  image: a",
            "there is no virtual cluster 'none' that ada may use; correct",
        ),
        (
            "  image: a",
            "  virtualCluster: other\n  image: a",
            "there is no virtual cluster 'other' that ada may use; correct the name in config.yml (known: default)",
        ),
        (
            "gpuNum: 0",
            "gpuNum: 99",
            "a task of role taskrole requires 99 GPUs, 1 CPUs, 512 MB of memory, and no node is that large (maximum "
            "of a node: 4 GPUs); require less in config.yml",
        ),
        (
            "userName: ada",
            "userName: Ada",
            "cannot use paiConfig.userName Ada of config.yml: the token is ada's; write userName: ada",
        ),
        (
            "token: token-",
            "token: no-token-",
            "Your token is invalid; create a new token on OpenPAI's profile page",
        ),
        (
            "host: 127.0.0.1",
            "host: http://",
            "is not the host of OpenPAI, or local for the built-in cluster on this machine; write e.g. host: https://openpai",
        ),
    ],
)
def test_nnictl_create_refuses_resources_that_the_cluster_lacks(nnictl, place, server, old, new, message):
    server.nodes = {name: {"gpuTotal": gpus, "gpuUsed": gpus} for name, gpus in (("a", 1), ("b", 4))}
    done = nnictl("create", "--config", "config.yml", "--port", "auto", replace={old: new})
    assert done.returncode == 1
    assert message in done.stderr
    assert not (place.parent / "experiments").exists()
    assert list((place.parent / "storage").iterdir()) == []
    assert not server.jobs


def test_a_resume_from_python_uses_the_new_login_of_the_configuration(place, server, monkeypatch):
    monkeypatch.chdir(place)
    for name, value in environ_of(place).items():
        monkeypatch.setenv(name, value)
    config = ExperimentConfig.load("config.yml")
    config.max_trial_number = 1
    with Experiment(config, id="digits") as experiment:
        assert experiment.run() is True
    server.tokens = {"a-newer-token"}
    config.training_service.token = "a-newer-token"
    # A resume reads only the login from this configuration, so the missing search space file has no effect.
    config.search_space_file = "gone.json"
    with Experiment(config, id="digits") as experiment:
        experiment.resume(wait_completion=False)
        experiment.update_max_trial_number(2)
        wait_until(lambda: experiment.get_status() == "DONE", "the second trial has ended", DEADLINE_S)
        assert [trial.status for trial in experiment.list_trial_jobs()] == ["SUCCEEDED"] * 2
