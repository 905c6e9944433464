"""Experiments on the local OpenPAI: nnictl, the service, tasks and keepers are all real."""

import getpass
import json
import os
import re
import shutil
import sys
from pathlib import Path

import psutil
import pytest
import yaml
from browser import chromium, expect, needs_chromium, visit
from openpai_home import (
    ENDLESS,
    TRAIN,
    attempt_of,
    created,
    job_states,
    jobs,
    processes_of,
    trials,
    trials_here,
)
from openpai_jobs import a_job, text_of
from real_experiment import wait_until

from nni_manager.client.experiments import resolve
from nni_manager.engine.tokens import token_of
from nni_manager.local_openpai import daemon
from nni_manager.local_openpai.container_runtime import mounts_work
from nni_manager.store.folders import ExperimentFolder
from nni_manager.store.reader import StoreReader

ROOT = Path(__file__).parents[2]
MOUNT = "/mnt/confignfs-data"


def test_annotated_code_runs_with_the_configuration_printed_by_nnictl_openpai_status(home, nnictl):
    told = nnictl("openpai", "status").stdout
    snippet = yaml.safe_load(told.split("-" * 84)[1])
    assert snippet["paiConfig"] == {
        "userName": "root" if os.getuid() == 0 else getpass.getuser(),
        "host": "local",
    }
    (home / "work" / "train.py").write_text(
        "import os\n'''@nni.variable(nni.randint(5, 9), name=x)'''\nx = 0\n"
        "print(sorted(os.listdir()))\n'''@nni.report_final_result(x)'''\n"
    )
    (home / "work" / "search_space.json").unlink()
    config = yaml.safe_load((home / "work/config.yml").read_text())
    config |= {"trainingServicePlatform": "pai", "maxTrialNum": 1, "paiConfig": snippet["paiConfig"]}
    config |= {"useAnnotation": True}
    config["trial"] |= snippet["trial"] | {"command": f"{sys.executable} train.py"}
    (home / "work/config.yml").write_text(yaml.safe_dump(config))
    experiment_id = created(nnictl("create", "--config", "config.yml", "--port", "auto", "--foreground"))
    (only,) = trials(nnictl, experiment_id)
    assert only["status"] == "SUCCEEDED"
    assert only["parameters"] == {"train/x/randint": only["value"]}
    assert 5 <= only["value"] < 9
    # The attempt's folder has a copy of the code without the experiment file.
    assert nnictl("log", "trial", experiment_id, "--trial-id", only["id"]).stdout == "['train.py']\n"


@pytest.mark.skipif(
    not mounts_work(), reason="storages cannot be mounted here: neither root nor user namespaces"
)
@pytest.mark.smoke
def test_an_experiment_runs_one_job_per_trial_and_prints_no_token(home, nnictl):
    experiment_id = created(nnictl("create", "--config", "config.yml", "--port", "auto", "--foreground"))
    found = trials(nnictl, experiment_id)
    assert [each["status"] for each in found] == ["SUCCEEDED"] * 3
    names = [f"nni_exp_{experiment_id}_trial_{each['id']}" for each in found]
    assert jobs(nnictl, experiment_id) == dict.fromkeys(names, "SUCCEEDED")
    first, name = found[0]["id"], names[0]
    code = f"{MOUNT}/{experiment_id}/trials/{first}/attempts/{attempt_of(home, experiment_id, first)}/taskrole-0/code"
    assert nnictl("log", "trial", experiment_id, "--trial-id", first).stdout == f"in {code}\n"
    log = nnictl("openpai", "logs", name, "--stream", "stdout").stdout
    assert log == f"in {code}\n"
    shown = [nnictl("openpai", *words, name).stdout for words in (("export",), ("show", "--json"), ("logs",))]
    with StoreReader(ExperimentFolder(home / "experiments" / experiment_id).database) as reader:
        secret = reader.experiment().secret
    token = token_of(secret, name.rpartition("_")[2])
    assert all(shown)
    assert not any(token in text for text in shown)
    assert "******" in shown[0]


def test_nnictl_create_refuses_a_task_larger_than_any_node(home, nnictl):
    created_before = list((home / "experiments").glob("*"))
    done = nnictl("create", "--config", "config.yml", "--port", "auto", replace={"gpuNum: 0": "gpuNum: 99"})
    assert done.returncode == 1
    assert "requires 99 GPUs, 1 CPUs, 256 MB of memory, and no node is that large" in done.stderr
    assert "(maximum of a node: 0 GPUs, 16 CPUs, 100000 MB of memory)" in done.stderr
    assert list((home / "experiments").glob("*")) == created_before


def test_an_experiment_ends_with_the_clusters_message_if_a_job_needs_more_cpus_than_the_cluster_has(
    home, nnictl
):
    (home / "work" / "job.yml").write_text(
        """\
protocolVersion: 2
name: many
type: job
prerequisites: [{type: dockerimage, name: i, uri: anything}]
taskRoles:
  worker:
    instances: 20
    dockerImage: i
    resourcePerInstance: {gpu: 0, cpu: 1, memoryMB: 256}
    commands: [python3 train.py]
"""
    )
    lines = "  command: python3 train.py\n", "  gpuNum: 0\n", "  cpuNum: 1\n", "  memoryMB: 256\n"
    done = nnictl(
        *("create", "--config", "config.yml", "--port", "auto", "--foreground"),
        replace={"  image: anything\n": "  paiConfigPath: job.yml\n", **dict.fromkeys(lines, "")},
    )
    assert done.returncode == 3
    assert "cannot submit jobs: the cluster refused 3 jobs in a row" in done.stderr
    assert (
        "all its tasks together need 20 CPUs, 5120 MB and 0 GPUs, but virtual cluster default has only 16 CPUs"
        in done.stderr
    )
    (experiment_id,) = re.findall(r"The experiment id is (\w+)", done.stdout)
    assert jobs(nnictl, experiment_id) == {}


def test_nnictl_openpai_uses_the_account_given_by_its_options_instead_of_the_local_account(nnictl):
    assert nnictl("openpai", "jobs").returncode == 0
    for named in (("--user", "nobody", "--token", "wrong"), ("--token", "wrong", "--user", "root")):
        done = nnictl("openpai", "jobs", *named)
        assert done.returncode == 1
        assert done.stderr.startswith("ERROR: cannot ")
    assert "give --config" in nnictl("openpai", "jobs", "--user", "nobody").stderr, (
        "the token of user nobody is unknown"
    )


@pytest.mark.containers
@pytest.mark.parametrize("home", ["podman"], indirect=True)
@pytest.mark.parametrize("reuse", [pytest.param("true", marks=pytest.mark.smoke), "false"])
def test_trials_run_in_real_containers_of_the_keepers_image(home, nnictl, podman, reuse):
    done = nnictl(
        *("create", "--config", "config.yml", "--port", "auto", "--foreground"),
        replace={
            "image: anything": f"image: {podman.image('keeper')}",
            "host: local": f"host: local, reuse: {reuse}",
        },
    )
    experiment_id = created(done)
    found = trials(nnictl, experiment_id)
    assert [each["status"] for each in found] == ["SUCCEEDED"] * 3
    said = nnictl("log", "trial", experiment_id, "--trial-id", found[0]["id"]).stdout
    first = found[0]["id"]
    attempt = attempt_of(home, experiment_id, first)
    assert said.startswith(f"in {MOUNT}/{experiment_id}/trials/{first}/attempts/{attempt}/taskrole-0/code\n")
    # With reuse, the manager stops a job that has not started if no trial is left for this job. So a job may also end as STOPPED.
    well = {"SUCCEEDED", "STOPPED"} if reuse == "true" else {"SUCCEEDED"}
    wait_until(
        lambda: "SUCCEEDED" in (ends := set(job_states(experiment_id).values())) and ends <= well,
        "every job has ended",
    )


@pytest.mark.containers
@pytest.mark.parametrize("home", ["podman"], indirect=True)
def test_a_trial_in_an_image_without_a_keeper_fails_and_its_message_has_the_remedy(home, nnictl, podman):
    done = nnictl(
        *("create", "--config", "config.yml", "--port", "auto", "--foreground"),
        replace={"image: anything": f"image: {podman.base()}", "maxTrialNum: 3": "maxTrialNum: 1"},
    )
    assert done.returncode == 3
    experiment_id = re.findall(r"The experiment id is (\w+)", done.stdout)[0]
    (trial,) = trials(nnictl, experiment_id)
    assert (trial["status"], trial["reason"]) == ("FAILED", "could not start")
    assert (
        "its keeper ended with exit code 115: there is no trial-keeper in the container; install trial-keeper-bundle"
        in trial["message"]
    )


@pytest.mark.smoke
def test_the_digits_example_runs_several_trials_per_job(home, nnictl):
    folder = home / "work"
    shutil.copytree(ROOT / "examples" / "digits", folder / "digits")
    text = (folder / "digits" / "config_openpai.yml").read_text()
    shorter = text.replace("maxTrialNum: 20", "maxTrialNum: 3").replace(
        "~/.local/state/trial-keeper/openpai/storage", str(home / "storage")
    )
    assert shorter.count(str(home / "storage")) == 1
    (folder / "digits" / "config_openpai.yml").write_text(shorter)
    done = nnictl("create", "--config", "digits/config_openpai.yml", "--port", "auto", "--foreground")
    experiment_id = created(done)
    found = trials(nnictl, experiment_id)
    assert [each["status"] for each in found] == ["SUCCEEDED"] * 3
    assert all(each["value"] is not None for each in found)
    assert jobs(nnictl, experiment_id) == {
        f"nni_exp_{experiment_id}_env_{number}": "SUCCEEDED" for number in (0, 1)
    }


def test_the_completion_policy_of_a_job_file_ends_the_trial(home, nnictl):
    # The workers wait for the parameter server (ps). Otherwise they could end the trial before the ps has started.
    started = home / "started"
    (home / "work" / "job.yml").write_text(
        f"""\
protocolVersion: 2
name: team
type: job
prerequisites: [{{type: dockerimage, name: i, uri: anything}}]
parameters: {{greeting: "it's me"}}
taskRoles:
  ps:
    dockerImage: i
    resourcePerInstance: {{gpu: 0, cpu: 1, memoryMB: 256}}
    completion: {{minFailedInstances: 1, minSucceededInstances: -1}}
    commands: ['echo "<% $parameters.greeting %> at $PAI_HOST_IP_ps_0"', 'touch {started}', sleep 1000]
  worker:
    instances: 2
    dockerImage: i
    resourcePerInstance: {{gpu: 0, cpu: 1, memoryMB: 256}}
    completion: {{minFailedInstances: 1, minSucceededInstances: 2}}
    commands:
      - 'until [ -e {started} ]; do sleep 0.05; done'
      - 'if [ "$PAI_TASK_INDEX" = 0 ]; then python3 train.py; fi'
"""
    )
    lines = ("command: python3 train.py", "gpuNum: 0", "cpuNum: 1", "memoryMB: 256", "image: anything")
    done = nnictl(
        *("create", "--config", "config.yml", "--port", "auto", "--foreground"),
        replace={
            "maxTrialNum: 3": "maxTrialNum: 1",
            "  codeDir: .\n": "  codeDir: .\n  paiConfigPath: job.yml\n",
            **{f"  {line}\n": "" for line in lines},
        },
    )
    experiment_id = created(done)
    (trial,) = trials(nnictl, experiment_id)
    assert trial["status"] == "SUCCEEDED"
    assert trial["value"] is not None
    # The cluster and the manager both apply the completion policy of the job file. Whichever is first ends the job, so two states
    # are possible.
    ((name, state),) = jobs(nnictl, experiment_id).items()
    assert state in ("SUCCEEDED", "STOPPED"), nnictl("openpai", "show", name).stdout
    attempts = home / "storage" / experiment_id / "trials" / trial["id"] / "attempts"
    tasks = {task.name: task for task in attempts.glob("*/*")}
    assert sorted(tasks) == ["ps-0", "worker-0", "worker-1"]
    assert (tasks["ps-0"] / "output" / "stdout").read_text() == "it's me at 127.0.0.1\n"


def test_trials_outlive_a_killed_manager_and_their_final_status_depends_on_who_stopped_them(home, nnictl):
    (home / "work" / "train.py").write_text(ENDLESS)
    done = nnictl(
        *("create", "--config", "config.yml", "--port", "auto"), replace={"maxTrialNum: 3": "maxTrialNum: 2"}
    )
    experiment_id = created(done)
    folder = ExperimentFolder(home / "experiments" / experiment_id)

    def running():
        return [each for each in trials_here(experiment_id) if each["state"] == "RUNNING"]

    wait_until(lambda: len(running()) == 2, "both trials run")
    stopped, other = (each["id"] for each in running())
    psutil.Process(folder.process().pid).kill()
    wait_until(lambda: folder.running_process() is None, "the manager has ended")
    assert set(job_states(experiment_id).values()) == {"RUNNING"}
    assert nnictl("resume", experiment_id, "--port", "auto").returncode == 0
    assert nnictl("openpai", "stop", f"nni_exp_{experiment_id}_trial_{stopped}").returncode == 0

    def of(trial_id):
        return next(each for each in trials_here(experiment_id) if each["id"] == trial_id)

    wait_until(lambda: of(stopped)["status"] == "FAILED", "the trial of the stopped job has failed")
    assert "was stopped on OpenPAI, but not by this manager" in of(stopped)["message"]
    assert of(other)["state"] == "RUNNING"
    assert nnictl("stop", experiment_id).returncode == 0
    assert {each["id"]: each["status"] for each in trials(nnictl, experiment_id)} == {
        stopped: "FAILED",
        other: "USER_CANCELED",
    }
    wait_until(lambda: "RUNNING" not in job_states(experiment_id).values(), "no job runs")
    trials_left = [each for each in processes_of(home) if "train.py" in " ".join(each.cmdline())]
    assert trials_left == []


@needs_chromium
def test_the_page_of_jobs_shows_the_log_of_each_job(home, nnictl):
    done = nnictl("create", "--config", "config.yml", "--port", "auto")
    experiment_id = created(done)
    wait_until(lambda: len(trials_here(experiment_id)) == 3, "all trials exist")
    wait_until(
        lambda: all(each["status"] == "SUCCEEDED" for each in trials_here(experiment_id)),
        "all trials have ended",
    )
    (link,) = re.findall(r"http://127\.0\.0\.1:\d+/enter#\S+", done.stdout)
    with chromium() as browser, visit(browser, link) as person:
        person.go(link.partition("/enter")[0] + "/jobs")
        for each in trials_here(experiment_id):
            log = person.see(f"job-log-{each['jobId']}")
            log.locator("summary").click()
            expect(log.locator("pre")).to_contain_text(f"/{experiment_id}/trials/{each['id']}/")
        assert person.faults_for_assistive_technology() == []
    assert nnictl("stop", experiment_id).returncode == 0


def test_trials_continue_while_the_local_openpai_service_is_down(home, nnictl):
    (home / "work" / "train.py").write_text(
        TRAIN + "import time\nwhile not os.path.exists('../../../../../../go on'): time.sleep(0.1)\n"
    )
    experiment_id = created(nnictl("create", "--config", "config.yml", "--port", "auto"))

    def shown(key):
        client = resolve(experiment_id).client()
        return client.get("/summary")[key]

    wait_until(lambda: shown("counts")["RUNNING"] == 2, "two trials run")
    here = daemon.running(daemon.StateFolder.of_user())
    psutil.Process(here.process.pid).kill()
    wait_until(lambda: "OpenPAI at" in shown("problem"), "the manager shows the problem")
    assert shown("counts")["RUNNING"] == 2
    (home / "storage" / experiment_id / "go on").touch()
    wait_until(lambda: shown("counts")["SUCCEEDED"] == 2, "both end, without the cluster")
    # The third trial has not failed: it waits until its job can be submitted to a running OpenPAI.
    assert shown("counts")["FAILED"] == 0
    assert nnictl("openpai", "start").returncode == 0
    wait_until(lambda: shown("counts")["SUCCEEDED"] == 3, "the third ran")
    wait_until(lambda: shown("status") == "DONE", "the experiment is done")
    assert set(jobs(nnictl, experiment_id).values()) == {"SUCCEEDED"}
    assert nnictl("stop", experiment_id).returncode == 0


def test_a_key_without_effect_in_a_job_file_causes_a_warning(home, nnictl):
    job = a_job(name="odd", extras={"jobStatusChangeNotification": {"suceeded": True}})
    job["taskRoles"]["worker"] |= {"instances": 1, "commands": ["true"]}
    (home / "work/job.yml").write_text(text_of(job))
    assert nnictl("openpai", "start").returncode == 0
    warning = "extras.jobStatusChangeNotification.suceeded has no effect: there is no such change; did you mean succeeded?"
    for command in ("validate", "job.yml"), ("submit", "job.yml"), ("show", "odd"):
        done = nnictl("openpai", *command)
        assert (done.returncode, warning in done.stderr) == (0, True), done
    events = json.loads(nnictl("openpai", "events", "odd", "--type", "Warning", "--json").stdout)
    assert [warning in each["message"] for each in events] == [True]
    assert warning in nnictl("openpai", "events", "odd").stdout
    absent = nnictl("openpai", "events", "absent")
    assert (absent.returncode, "absent" in absent.stderr) == (1, True)
    assert "Traceback" not in absent.stderr


def test_a_lost_task_is_restarted_and_only_the_results_of_the_second_attempt_count(home, nnictl):
    (home / "work" / "train.py").write_text(
        """\
import os, signal
import nni_sdk
own = os.environ["NNI_SYS_DIR"].split("/")[-2]
attempt = sorted(os.listdir(os.environ["NNI_SYS_DIR"].split(own)[0])).index(own)
nni_sdk.report_intermediate_result(attempt)
if attempt == 0:
    signal.pause()
nni_sdk.report_final_result(attempt)
"""
    )
    experiment_id = created(
        nnictl(
            "create", "--config", "config.yml", "--port", "auto", replace={"maxTrialNum: 3": "maxTrialNum: 1"}
        )
    )

    def trial():
        found = resolve(experiment_id).client().get("/trials")
        return found[0] if found else {"state": "NONE", "intermediateCount": 0}

    wait_until(lambda: trial()["intermediateCount"] == 1, "the first attempt reports")
    (training,) = [each for each in processes_of(home) if each.cmdline()[-1:] == ["train.py"]]
    supervisor = next(each for each in training.parents() if "supervisor.start()" in " ".join(each.cmdline()))
    supervisor.kill()
    wait_until(lambda: trial()["state"] == "SUCCEEDED", "the second attempt succeeds")
    assert (trial()["attempt"], trial()["value"], trial()["intermediateCount"]) == (1, 1.0, 1)
    wait_until(lambda: set(job_states(experiment_id).values()) == {"SUCCEEDED"}, "its job has ended")
    assert nnictl("stop", experiment_id).returncode == 0


def test_a_second_folder_for_an_existing_storage_is_refused_and_the_error_lists_remedies(home, nnictl):
    done = nnictl(
        "create", "--config", "config.yml", "--port", "auto", replace={"../storage": "../elsewhere"}
    )
    assert done.returncode == 1
    assert (
        f"storage confignfs-data of the local OpenPAI is {home}/storage; write that path, or another storage name"
        in done.stderr
    )
    done = nnictl(
        *("create", "--config", "config.yml", "--port", "auto", "--foreground"),
        replace={"confignfs-data": "elsewhere", "maxTrialNum: 3": "maxTrialNum: 1"},
    )
    created(done)
    assert set(daemon.running(daemon.StateFolder.of_user()).process.options.storages) == {
        "confignfs-data",
        "elsewhere",
    }
