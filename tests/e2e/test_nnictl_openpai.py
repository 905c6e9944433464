"""nnictl openpai against a fake OpenPAI: submit, list, show, follow, stop and export jobs."""

import json
import threading

import pytest
from deadlines import DEADLINE_S
from fake_pai import USER, FakeJob, FakePai
from openpai_jobs import a_job, text_of
from real_experiment import wait_until

from nni_manager.cli import main

pytestmark = pytest.mark.smoke

TOKEN = "token-of-the-profile-page"


@pytest.fixture
def server():
    server = FakePai(run_jobs=True)
    server.start()
    yield server
    server.close()


@pytest.fixture
def nnictl(capsys, monkeypatch, tmp_path, server):
    """Runs a command line with the cluster in the environment; returns exit code, stdout and stderr."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("OPENPAI_HOST", server.host)
    monkeypatch.setenv("OPENPAI_USER", USER)
    monkeypatch.setenv("OPENPAI_TOKEN", TOKEN)

    def run(*arguments):
        code = main.run(["openpai", *map(str, arguments)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def job_file(tmp_path):
    """Writes a job with one task that runs these commands; returns the path."""

    def write(*commands, **top):
        worker = ("taskRoles", "worker")
        job = a_job(((*worker, "instances"), 1), ((*worker, "commands"), list(commands)), **top)
        path = tmp_path / "job.yml"
        path.write_text(text_of(job))
        return path

    return write


def ended(server, name="job"):
    """Wait until the job has ended, and return it."""
    job = server.jobs[f"{USER}~{name}"]
    wait_until(lambda: job.state in ("SUCCEEDED", "FAILED", "STOPPED"), "the job is over", DEADLINE_S)
    return job


def test_a_job_can_be_submitted_listed_shown_and_exported(nnictl, job_file, server):
    path = job_file("echo hello", secrets={"word": "s3cret"})
    code, out, err = nnictl("submit", path)
    assert (code, err) == (0, "")
    assert out == "INFO: OpenPAI has accepted job job; `nnictl openpai show job` shows its state\n"
    ended(server)
    code, out, _ = nnictl("jobs")
    assert code == 0
    assert out.splitlines()[1].split()[:3] == ["job", USER, "SUCCEEDED"]
    code, out, _ = nnictl("show", "job")
    assert code == 0
    assert f"job              {USER}~job\n" in out
    assert "worker-0  SUCCEEDED" in out
    code, out, _ = nnictl("export", "job")
    assert (code, json.loads(out)["secrets"]) == (0, "******")
    assert "s3cret" not in out
    target = path.with_name("exported.yml")
    assert nnictl("export", "job", "--output", target)[0] == 0
    assert nnictl("export", "job", "--output", target)[2].startswith(
        f"ERROR: cannot write {target}: the file exists already"
    )


def test_nnictl_openpai_prints_json_if_the_json_option_is_set(nnictl, job_file, server):
    code, out, _ = nnictl("submit", job_file("true"), "--json")
    assert (code, json.loads(out)) == (0, {"name": "job", "user": USER, "warnings": []})
    ended(server)
    assert json.loads(nnictl("jobs", "--json", "--state", "succeeded")[1])[0]["name"] == "job"
    assert json.loads(nnictl("jobs", "--json", "--state", "waiting,running")[1]) == []
    assert json.loads(nnictl("show", "job", "--json")[1])["jobStatus"]["state"] == "SUCCEEDED"


def test_the_command_nnictl_openpai_list_can_filter_jobs_by_tag(nnictl, job_file, server):
    assert nnictl("submit", job_file("true", name="one"), "--tag", "a", "--tag", "b")[0] == 0
    assert nnictl("submit", job_file("true", name="other"))[0] == 0
    assert [each["name"] for each in json.loads(nnictl("jobs", "--tag", "b", "--json")[1])] == ["one"]
    assert "tags of OpenPAI contain no comma" in nnictl("jobs", "--tag", "a,b")[2]


def test_nnictl_openpai_show_prints_the_cause_of_a_failed_job(nnictl, job_file, server):
    nnictl("submit", job_file("exit 7"))
    ended(server)
    _, out, _ = nnictl("show", "job")
    assert "exit code        7\n" in out
    assert "reason           PAIRuntimeUnknownFailed, code 255, FailedTaskCount 1 has reached" in out
    assert "cause            the command failed, and nothing in its log tells why\n" in out
    assert "remedy           read the logs of the task; correct the command\n" in out


def test_the_command_nnictl_openpai_logs_follows_the_log_until_the_job_ends(
    nnictl, job_file, tmp_path, server, monkeypatch
):
    monkeypatch.setattr("nni_manager.cli.openpai_jobs._FOLLOW_INTERVAL_S", 0.05)
    go_on = tmp_path / "go on"
    nnictl(
        "submit",
        job_file("echo first", f"until [ -e '{go_on}' ]; do sleep 0.05; done", "echo last; echo hum >&2"),
    )
    threading.Timer(0.5, go_on.touch).start()
    code, out, err = nnictl("logs", "job", "--follow", "--stream", "stdout")
    assert (code, out, err) == (0, "first\nlast\n", "")
    assert nnictl("logs", "job", "--task", "worker-0", "--stream", "stderr")[:2] == (0, "hum\n")
    code, _, err = nnictl("logs", "job", "--task", "none-0")
    assert (code, err) == (1, "ERROR: cannot find task 'none-0' of job job; use one of worker-0\n")
    assert "there is no such log; use stdout, stderr, all" in nnictl("logs", "job", "--stream", "none")[2]


def test_nnictl_openpai_stop_refuses_jobs_of_other_users(nnictl, job_file, server):
    nnictl("submit", job_file("sleep 60"))
    other = FakeJob(text_of(a_job(name="other")))
    other.user = "bob"
    server.jobs["bob~other"] = other
    assert nnictl("stop", "job")[0] == 0
    assert ended(server).execution_type == "STOP"
    code, _, err = nnictl("stop", "bob~other")
    assert code == 1
    assert "is not allowed to do this operation; ask an administrator of the cluster" in err


def test_a_job_file_is_validated_without_a_cluster(nnictl, job_file, server):
    good = job_file("true")
    assert nnictl("validate", good)[:2] == (0, f"INFO: {good} can run: job job, worker × 1\n")
    assert json.loads(nnictl("validate", good, "--json")[1]) == []
    bad = job_file("true", jobRetryCount=-2, extras=None)
    code, _, err = nnictl("validate", bad)
    assert code == 1
    assert [line.partition(": ")[2].partition(": ")[2].split(":")[0] for line in err.splitlines()] == [
        "cannot use jobRetryCount",
        "cannot use extras",
    ]
    code, out, _ = nnictl("validate", bad, "--json")
    assert (code, [each["key"] for each in json.loads(out)]) == (1, ["jobRetryCount", "extras"])
    assert nnictl("submit", bad)[0] == 1
    assert server.asked == []


def test_the_openpai_cluster_can_be_specified_by_options_or_by_an_experiment_file(
    nnictl, server, tmp_path, monkeypatch
):
    for name in ("OPENPAI_HOST", "OPENPAI_USER", "OPENPAI_TOKEN"):
        monkeypatch.delenv(name)
    code, _, err = nnictl("jobs")
    assert code == 1
    assert (
        "cannot connect to OpenPAI: host, user or token is missing; give --config with an experiment file"
        in err
    )
    assert nnictl("jobs", "--host", server.host, "--user", USER, "--token", TOKEN)[0] == 0
    (tmp_path / "search_space.json").write_text('{"x": {"_type": "uniform", "_value": [0, 1]}}')
    config = tmp_path / "config.yml"
    config.write_text(
        f"""\
authorName: ada
experimentName: x
trialConcurrency: 1
trainingServicePlatform: pai
searchSpacePath: search_space.json
tuner: {{builtinTunerName: TPE}}
trial: {{command: "true", codeDir: ., gpuNum: 0, cpuNum: 1, memoryMB: 512, image: i, paiStorageConfigName: s,
         nniManagerNFSMountPath: ., containerNFSMountPath: /mnt/s}}
paiConfig: {{userName: {USER}, token: {TOKEN}, host: {server.host}}}
"""
    )
    assert nnictl("jobs", "--config", config)[0] == 0
    assert nnictl("jobs", "--config", config, "--token", "wrong")[0] == 1
    config.write_text(config.read_text().replace(f"token: {TOKEN}", "passWord: s3cret-passw0rd"))
    assert nnictl("jobs", "--config", config)[0] == 0


def test_command_line_errors_are_printed_in_one_line(nnictl, server):
    assert (
        "cannot use --state PAUSED: there is no such state; use WAITING, RUNNING"
        in nnictl("jobs", "--state", "paused")[2]
    )
    assert nnictl("show", "none")[2].startswith(
        "ERROR: cannot find job none: OpenPAI answers: Job ada~none is not found"
    )
    server.stop()
    code, out, err = nnictl("jobs")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert TOKEN not in err
