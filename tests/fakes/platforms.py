"""The kinds of training services with a common interface, for the contract suite that all of them must pass.

The service under test is the real one. Its cluster is this machine, the local OpenPAI, or a fake server. A
job's keeper is the real one, or a script of the test. An operation that a platform does not have skips the
test with the reason.
"""

import contextlib
import getpass
import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from deadlines import DEADLINE_S
from fake_pai import _LIVE, USER, FakePai
from installed_example import installed_example
from jobs_here import JobsHere
from kube_controllers import FRAMEWORKS
from kube_operators import PYTORCH_JOBS, TF_JOBS, TRAIN_JOBS
from kube_place import CLAIM, our_cluster, worker_role
from kube_site import operator_of
from kube_store import CONFIG_MAPS, JOBS, PODS, SECRETS
from openpai_here import JOBS as JOBS_PATH
from openpai_here import an_openpai_here
from openpai_jobs import WORKER, a_job, text_of
from real_experiment import RealExperiment, until, wait_until
from slurm_here import a_slurm_here
from slurm_login_node import a_login_node
from ssh_machines import ssh_machines_here

from nni_manager.engine.shared_files import SharedFiles
from nni_manager.training_services.base import JobPresence
from nni_manager.training_services.kubernetes import render, resource_calls, watch
from nni_manager.training_services.kubernetes.api import Kubernetes
from nni_manager.training_services.kubernetes.backend import KubernetesService
from nni_manager.training_services.kubernetes.operator import Stage
from nni_manager.training_services.kubernetes.section import ClaimStorage, KubernetesConfig, RoleConfig
from nni_manager.training_services.openpai import client
from nni_manager.training_services.openpai.client import OpenPaiService
from nni_manager.training_services.openpai.job import template_of
from nni_manager.training_services.openpai.protocol import parse
from nni_manager.training_services.openpai.rest import OpenPai
from nni_manager.training_services.openpai.section import PaiConfig
from nni_manager.training_services.platform import platform_of
from nni_manager.training_services.remote.render import key_of
from nni_manager.training_services.remote.section import RemoteMachine, RemoteSection
from nni_manager.training_services.retry_policy import ClientRetryPolicy
from nni_manager.training_services.slurm import jobs as slurm_jobs
from nni_manager.training_services.slurm import service as slurm_service
from nni_manager.training_services.slurm.section import SlurmSection
from nni_manager.training_services.slurm.service import SlurmService
from trial_keeper import processes
from trial_keeper.settings import KeeperSettings
from trial_keeper.wire.reasons import ExitReason
from trial_keeper.wire.workspace import Workspace

QUICK = ClientRetryPolicy(tries=2, first_s=0.001, longest_s=0.01, connect_within_s=5.0, answer_within_s=20.0)
POLL_S = 0.05


class Platform:
    """One training service with its cluster. Jobs run the run.sh of experiment EXPT below `storage`. `ends` contains the reported
    job ends.
    """

    settings_arrived = '[ "$TRIAL_KEEPER_TOKEN" = c0ffee ]'
    """A test, in bash, that a job's settings have arrived."""
    failure = ""
    """The start of the cluster's message about a failed job."""
    keeps_last_lines = True
    """False if a cluster does not keep the last lines of a container."""
    stopped = (None, ExitReason.JOB_LOST)
    """The exit code and the reason of a job that was stopped on request, and of one that was removed."""
    removed = (None, ExitReason.JOB_LOST)
    stopped_message = removed_message = created_message = ""
    removal_kills = False
    """True if a removed job is killed at once, so that its keeper cannot report the end."""
    adopted_exit_code = 0
    """The exit code of an adopted job that exits with 0."""
    adopted_failure = ""
    """The message about a job that exited with 1 while no manager was running."""
    missed_exit_code = None
    """The exit code of such a job, where the manager gets it."""
    never_submitted = JobPresence.RUNNING
    """The presence of a job that no manager has submitted, while the server is unreachable."""
    memory_message = ""
    reports_bypass_server = True
    """False if keepers cannot report while the server is stopped."""
    unreachable = "cannot "
    """Words of the error about a server that cannot be reached."""

    def __init__(self, name, folder):
        self.name, self.folder = name, folder
        self.ends = []
        self.storage = folder

    @property
    def workspace(self):
        return Workspace(self.storage / "EXPT")

    def runs(self, script):
        """Let every job run this script instead of a keeper. STARTED in the script stands for a command that creates the file
        `JOB.started`.
        """
        self.workspace.root.mkdir(exist_ok=True)
        started = 'touch "$TRIAL_KEEPER_WORKSPACE/$TRIAL_KEEPER_JOB_ID.started"'
        self.workspace.run_sh.write_text(f"{script}\n".replace("STARTED", started))

    def file(self, name):
        return self.workspace.root / name

    def settings(self, job_id="trial1"):
        return KeeperSettings(
            "EXPT", job_id, str(self.workspace.root), "c0ffee", trial_id=job_id, grace_s=1.0
        )

    @contextlib.asynccontextmanager
    async def manager(self):
        """The training service of a manager. It is closed at the end of the block."""
        service = self.service(self.ends.append)
        try:
            yield service
        finally:
            await service.close()

    def workspace_of(self, experiment):
        """The workspace that keepers of a whole experiment see."""
        return experiment.folder.workspace

    def fetch(self, experiment, trial_id, stream):
        """Copy a stream to this machine, as `nnictl log trial` does."""
        workspace = experiment.folder.workspace
        share = platform_of(experiment.config).share(workspace)
        if share is not None:
            with contextlib.closing(share):
                SharedFiles(workspace, share).fetch(trial_id, stream)

    async def has_ended(self, count=1):
        await until(lambda: len(self.ends) >= count, f"{count} ends were reported", DEADLINE_S)
        return self.ends[-1]

    async def has_started(self, job_id="trial1"):
        await until(self.file(f"{job_id}.started").exists, f"{job_id} has started", DEADLINE_S)

    async def is_clean(self):
        await until(lambda: not self.left(), "nothing is left on the cluster", DEADLINE_S)

    def _lacks(self, what):
        pytest.skip(f"{self.name}: {what}")

    def service(self, on_job_ended):
        """The service of experiment EXPT."""
        raise NotImplementedError

    def left(self):
        """The resources that jobs have left on the cluster although they should have ended."""
        raise NotImplementedError

    def is_terminal(self, job_id):
        """Whether the cluster shows the job as ended, also while no manager runs."""
        raise NotImplementedError

    def remove(self, job_id):
        """Remove the job from the cluster, as another client would."""
        raise NotImplementedError

    def fill_memory(self, job_id):
        """Let the cluster kill the job because the job's memory is full."""
        self._lacks("jobs have no memory limit")

    def preempt(self, job_id):
        """End the job because a job of higher priority needs its resources."""
        self._lacks("preemption")

    def announce_preemption(self, job_id):
        """Report that the job will end because a job of higher priority needs its resources."""
        self._lacks("preemption")

    def needs_a_server_that_stops(self):
        """Skip the test if its platform cannot stop the server. The test calls this before it starts processes, because a later
        skip would leave them running.
        """
        if type(self).stop_server is Platform.stop_server:
            self.stop_server()

    def stop_server(self):
        self._lacks("the server cannot be stopped while jobs run")

    def start_server(self):
        raise NotImplementedError

    def answer_submissions(self, how, times=1, resource=None):
        """Let the server answer the next `times` submissions with `how`. By default, these are submissions of jobs."""
        self._lacks("there is no fake server")

    def answer_submissions_well(self):
        """Accept submissions of jobs again."""

    def submissions(self, resource):
        """The number of submissions that the server has received."""
        raise NotImplementedError

    async def create_job_of_others(self):
        """Create another user's job with the name of the job of trial1.

        Return a function that checks that this job is unchanged.
        """
        self._lacks("only the experiment names its jobs")

    def have_no_room(self, monkeypatch):
        """Make new jobs wait; return a part of the expected pending reason."""
        self._lacks("a job starts when it is submitted")

    def have_room(self):
        raise NotImplementedError

    def delay_details(self):
        """Let the cluster report the details of a failed container only after the end of the job."""

    # ---- whole experiments

    def config(self, reuse=False):
        """The part of an experiment file that selects this platform."""
        raise NotImplementedError

    def factory(self, experiment):
        """Return a function that makes the service of an experiment. The function takes a callback that receives the ends of
        jobs.
        """
        return platform_of(experiment.config).make_service(experiment.folder)

    def close(self):
        """End everything that this platform has started."""


class RunScriptJobsHere(JobsHere):
    # The jobs of these tests are scripts. A forked keeper would not run a script.
    forks_keepers = False


class Local(Platform):
    stopped = (9, ExitReason.KEEPER_LOST)
    removed, removal_kills = (-signal.SIGKILL, ExitReason.KEEPER_LOST), True
    # A manager that adopts a job cannot read its exit code, because the process is no child of this manager.
    adopted_exit_code = None

    def __init__(self, name, folder, monkeypatch):
        super().__init__(name, folder)
        self._jobs = folder / "jobs"
        self._jobs.mkdir()
        self._config = RealExperiment(folder / "any", "", **self.config()).config

    def service(self, on_job_ended):
        return RunScriptJobsHere(self._config, self.workspace, self._jobs, on_job_ended)

    def left(self):
        return [path.stem for path in self._jobs.glob("*.json") if not self.is_terminal(path.stem)]

    def _pid(self, job_id):
        return json.loads((self._jobs / f"{job_id}.json").read_bytes())["pid"]

    def is_terminal(self, job_id):
        return not psutil.pid_exists(self._pid(job_id))

    def remove(self, job_id):
        os.killpg(self._pid(job_id), signal.SIGKILL)

    def config(self, reuse=False):
        return {"localConfig": {"reuse": reuse}}

    def factory(self, experiment):
        self._jobs = experiment.folder.jobs
        return lambda on_job_ended: JobsHere(
            experiment.config, experiment.folder.workspace, self._jobs, on_job_ended
        )

    def close(self):
        JobsHere.end_keepers()


class InstalledPlatform(Local):
    """The platform of an installed package. The package is the example for authors of platforms."""

    def __init__(self, name, folder, monkeypatch):
        monkeypatch.syspath_prepend(installed_example())
        super().__init__(name, folder, monkeypatch)
        self._services = []
        """Kept with their processes, which outlive a manager."""

    def service(self, on_job_ended):
        places = SimpleNamespace(workspace=self.workspace, jobs=self._jobs)
        return self._kept(platform_of(self._config).make_service(places))(on_job_ended)

    def factory(self, experiment):
        return self._kept(super(Local, self).factory(experiment))

    def _kept(self, make):
        def make_and_keep(on_job_ended):
            self._services.append(make(on_job_ended))
            return self._services[-1]

        return make_and_keep

    def _processes(self, **settings):
        """The pids of this experiment's processes whose environment contains these settings of a keeper."""
        variables = {f"TRIAL_KEEPER_{name.upper()}": value for name, value in settings.items()}
        return processes.pids_where(
            lambda environ: (
                variables.items() <= environ.items()
                and environ.get("TRIAL_KEEPER_WORKSPACE", "").startswith(f"{self.folder}/")
            )
        )

    def _keepers(self, **settings):
        return [pid for pid in self._processes(**settings) if processes.session_of(pid) == pid]

    def left(self):
        return self._keepers()

    def is_terminal(self, job_id):
        return not self._keepers(job_id=job_id)

    def remove(self, job_id):
        # Each job has two such processes, because a keeper and its guard each lead a session. The keeper is the older of the two.
        keeper = min(
            self._keepers(job_id=job_id), key=lambda pid: processes.ProcessIdentity.of(pid).start_ticks
        )
        os.killpg(keeper, signal.SIGKILL)

    def config(self, reuse=False):
        return {"trainingServicePlatform": "nice", "niceConfig": {"niceness": 5, "reuse": reuse}}

    def close(self):
        for pid in self._processes():
            processes.kill(pid)
        for service in self._services:
            for child in service.children.values():
                child.wait(DEADLINE_S)


class OpenPaiPlatform(Platform):
    failure = "OpenPAI reports job nni_exp_EXPT_trial_trial1: PAIRuntimeUnknownFailed, code 255"
    stopped_message = "OpenPAI has stopped job nni_exp_EXPT_trial_trial1 on request"
    created_message = "was stopped before it was created"
    missed_exit_code = 1
    user, storage_name = USER, "confignfs-data"

    def __init__(self, name, folder, monkeypatch):
        super().__init__(name, folder)
        monkeypatch.setattr(client, "POLL_S", POLL_S)

    def _pai(self):
        return PaiConfig(
            *(self.host, self.user, self.token, None, self.storage, str(self.storage)),
            *("i", self.storage_name, None, 0, 1, 100),
        )

    def service(self, on_job_ended):
        pai = self._pai()
        cluster = OpenPai(pai.host, pai.user, token=pai.token, retry_policy=QUICK)
        template = template_of(pai)
        return OpenPaiService(cluster, template, pai.mount, self.workspace, on_job_ended, poll_s=POLL_S)

    def config(self, reuse=False):
        shared = {"nniManagerNFSMountPath": str(self.storage), "containerNFSMountPath": str(self.storage)}
        size = {"gpuNum": 0, "cpuNum": 1, "memoryMB": 100}
        names = {"image": "i", "paiStorageConfigName": self.storage_name}
        return {
            "trainingServicePlatform": "pai",
            "trial": {"command": f"{sys.executable} train.py", "codeDir": ".", **size, **names, **shared},
            "paiConfig": {"userName": self.user, "token": self.token, "host": self.host, "reuse": reuse},
        }


class OpenPai18(OpenPaiPlatform):
    """A fake server with the responses of OpenPAI 1.8."""

    removal_kills = True
    removed_message = "job nni_exp_EXPT_trial_trial1 on OpenPAI no longer exists: it was removed there"
    token = "token-of-the-profile-page"

    def __init__(self, name, folder, monkeypatch):
        super().__init__(name, folder, monkeypatch)
        self.server = FakePai(run_jobs=True)
        self.server.start()

    @property
    def host(self):
        return self.server.host

    def job(self, job_id="trial1"):
        return next(job for name, job in self.server.jobs.items() if name.endswith(job_id))

    def left(self):
        return [name for name, job in self.server.jobs.items() if job.state in _LIVE]

    def is_terminal(self, job_id):
        return self.job(job_id).state not in _LIVE

    def remove(self, job_id):
        job = self.job(job_id)
        del self.server.jobs[f"{USER}~{job.name}"]
        self.server._signal(job, signal.SIGKILL)

    def fill_memory(self, job_id):
        self.job(job_id).end("FAILED", -1200)

    def preempt(self, job_id):
        job = self.job(job_id.removeprefix("env-"))
        job.ends_with = -1003
        self.server._signal(job, signal.SIGTERM)

    def stop_server(self):
        self.server.stop()

    def start_server(self):
        self.server.start()

    renewal = "create a new token on OpenPAI's profile page"

    def expire_login(self):
        self.server.tokens = {"a-newer-token"}

    def renew_login(self, experiment):
        text = experiment.config_file.read_text()
        experiment.config_file.write_text(text.replace(self.token, "a-newer-token"))

    def answer_submissions(self, how, times=1, resource=None):
        self.server.misbehave(how, times, at=("POST", "/jobs"))

    def answer_submissions_well(self):
        self.server.stop_misbehaving(("POST", "/jobs"))

    def submissions(self, resource):
        return self.server.counted()["POST", "/jobs"]

    async def create_job_of_others(self):
        self.server.run_jobs = False
        async with self.manager() as first:
            await first.submit(self.settings())
        theirs = self.job()
        theirs.text = theirs.text.replace(str(self.workspace.root), "/another")
        theirs.protocol = parse(theirs.text)
        return lambda: theirs.state == "WAITING"

    def have_no_room(self, monkeypatch):
        monkeypatch.setattr(client, "_MAX_QUEUE_S", 0.0)
        self.server.run_jobs = False
        return "OpenPAI has not started 1 of 1 jobs, nni_exp_EXPT_trial_trial1 the longest"

    def have_room(self):
        self.server.run_jobs = True
        for job in self.server.jobs.values():
            self.server._run(job)

    def close(self):
        self.server.close()


class OpenPaiOfThisMachine(OpenPaiPlatform):
    """The local OpenPAI, whose tasks are processes."""

    removed_message = "job nni_exp_EXPT_trial_trial1 was stopped on OpenPAI, but not by this manager"
    user, storage_name = "ada", "team"

    def __init__(self, name, folder, monkeypatch):
        super().__init__(name, folder, monkeypatch)
        self._open = contextlib.ExitStack()
        self.here = self._open.enter_context(an_openpai_here(folder))
        self.storage = folder / "team"
        self.client = self.here.client()
        self.host, self.token = self.here.url, self.client.token

    def left(self):
        live = {"state": "WAITING,RUNNING,STOPPING"}
        return [job["name"] for job in self.client.get(JOBS_PATH, params=live).json()]

    def is_terminal(self, job_id):
        return not any(name.endswith(job_id) for name in self.left())

    def remove(self, job_id):
        (name,) = (name for name in self.left() if name.endswith(job_id))
        self.client.put(f"{JOBS_PATH}/ada~{name}/executionType", json={"value": "STOP"})

    async def create_job_of_others(self):
        self._submit("nni_exp_EXPT_trial_trial1", cpu=1)
        return self.left

    def have_no_room(self, monkeypatch):
        monkeypatch.setattr(client, "_MAX_QUEUE_S", 0.0)
        self._submit("large", cpu=4)
        return "OpenPAI has not started 1 of 1 jobs, nni_exp_EXPT_trial_trial1 the longest"

    def have_room(self):
        self.remove("large")

    def _submit(self, name, cpu):
        resources = {"cpu": cpu, "memoryMB": 100, "gpu": 0}
        worker = {"commands": ["sleep 100"], "instances": 1, "resourcePerInstance": resources}
        job = a_job(*(((*WORKER, key), value) for key, value in worker.items()), name=name)
        assert self.client.submit(text_of(job)).status_code == 202

    def fill_memory(self, job_id):
        self._lacks("tasks that are processes have no memory limit")

    def close(self):
        self._open.close()


_ROLE = RoleConfig("worker", 1, "true", "me/train:1", 0, 1, 100)
# Each entry contains: the kind of the jobs, its API version, the name of the second task role (if any), and further configuration
# fields.
OPERATORS_OF_KUBEFLOW = {
    "tf-operator": (TF_JOBS, "v1", "ps", {}),
    "pytorch-operator": (PYTORCH_JOBS, "v1", "master", {}),
    "trainjob": (TRAIN_JOBS, "v1alpha1", None, {"runtime": "torch-distributed"}),
    "job": (JOBS, "v1", None, {}),
}
_OPERATORS = {"frameworkcontroller": (FRAMEWORKS, None, None, {}), **OPERATORS_OF_KUBEFLOW}


class OnKubernetes(Platform):
    """An operator on the fake Kubernetes cluster."""

    unreachable = "does not answer"
    missed_exit_code = 1
    settings_arrived = (
        '[ "$TRIAL_KEEPER_TOKEN $TRIAL_KEEPER_COMMAND" = "c0ffee true" ] && [ -d "$TRIAL_KEEPER_MOUNT" ]'
    )

    def __init__(self, name, folder, monkeypatch):
        super().__init__(name, folder)
        monkeypatch.setattr(resource_calls, "_FIRST_RETRY_DELAY_S", POLL_S)
        monkeypatch.setattr(watch, "_FIRST_PAUSE_S", POLL_S)
        self.kind, self.version, other_role, fields = _OPERATORS[name]
        self._open = contextlib.ExitStack()
        self.around = self._open.enter_context(our_cluster(folder))
        monkeypatch.setenv("KUBECONFIG", str(self.around.kubeconfig))
        self.cluster, self.storage = self.around.double, self.around.storage_here
        self.keeps_last_lines = name != "trainjob"
        roles = (_ROLE,) if other_role is None else (_ROLE, replace(_ROLE, name=other_role))
        if name == "frameworkcontroller":
            roles = (replace(_ROLE, min_failed=1, min_succeeded=1),)
        storage = ClaimStorage(self.storage, CLAIM)
        self._config = KubernetesConfig(name, storage, roles, self.version, **fields)
        self._operator = operator_of(self._config)
        self.job_name = self._operator.name_of("EXPT", "trial1")
        self.failure = f" {self.job_name}: "
        if name == "frameworkcontroller":
            self.failure = (
                f"FrameworkController reports {self.job_name}: ContainerUnrecognizedFailed, code 105; FailedTaskCount 1 has "
                "reached MinFailedTaskCount 1 in the TaskRole\n"
            )
            self.adopted_failure, self.memory_message = "code 1", "code 137"
        deleted = f"{self.kind.kind} {self.job_name} in namespace default was deleted"
        self.stopped_message = self.created_message = f"{deleted} on request"
        self.removed_message = f"{deleted}, but not by this manager"

    def service(self, on_job_ended):
        cluster = Kubernetes(self.around.kubeconfig, QUICK)
        return KubernetesService(cluster, self._operator, self.workspace, on_job_ended)

    @property
    def store(self):
        return self.cluster.store

    def left(self):
        kinds = (self.kind, PODS, SECRETS, CONFIG_MAPS)
        return [each["metadata"]["name"] for kind in kinds for each in self.store.list(kind)]

    def _job(self, job_id):
        return self.store.find(self.kind, "default", self._operator.name_of("EXPT", job_id))

    def is_terminal(self, job_id):
        found = self._job(job_id)
        return found is None or self._operator.stage_of(found) is Stage.ENDED

    def remove(self, job_id):
        (found,) = (each for each in self.store.list(self.kind) if job_id.lower() in each["metadata"]["name"])
        self.store.delete(self.kind, "default", found["metadata"]["name"])

    def fill_memory(self, job_id):
        def running():
            return [
                pod["metadata"]["name"]
                for pod in self.store.list(PODS)
                if "-ps-" not in pod["metadata"]["name"] and pod["status"]["phase"] == "Running"
            ]

        # The job may count as started although only a pod of the parameter server runs. So the test waits for the pod of a
        # worker.
        (pod, *_) = wait_until(running, "the pod of a worker runs")
        self.cluster.node.kill("default", pod, "OOMKilled")

    def preempt(self, job_id):
        self.cluster.node.preempt(wait_until(lambda: self._running(job_id), "a pod runs")[0])

    def announce_preemption(self, job_id):
        self.cluster.node.announce_preemption(wait_until(lambda: self._running(job_id), "a pod runs")[0])

    def _running(self, job_id):
        return [
            pod
            for pod in self.store.list(PODS)
            if render.job_of(pod) == job_id and pod["status"]["phase"] == "Running"
        ]

    def stop_server(self):
        self.cluster.api.stop()

    def start_server(self):
        self.cluster.api.start()

    renewal = "renew the login in your kubeconfig file"

    def expire_login(self):
        self.answer_submissions((401, "Unauthorized", "Unauthorized"), 1000)

    def renew_login(self, experiment):
        self.answer_submissions_well()

    def answer_submissions(self, how, times=1, resource=None):
        self.cluster.api.misbehave(how, times, at=("create", resource or self.kind.plural), retry_after=0)

    def answer_submissions_well(self):
        self.cluster.api.stop_misbehaving(("create", self.kind.plural))

    def submissions(self, resource):
        return self.cluster.api.counted()["create", resource]

    async def create_job_of_others(self):
        async with self.manager() as first:
            await first.submit(self.settings())
        self.store.change(
            *(self.kind, "default", self.job_name),
            lambda it: it["metadata"].update(labels={"app": "theirs"}),
        )
        return lambda: self._job("trial1") is not None

    def have_no_room(self, monkeypatch):
        self.cluster.node.missing_images.add("me/train:1")
        why = 'ImagePullBackOff: Back-off pulling image "me/train:1": not found'
        return f"Kubernetes has not started 1 of 1 jobs; {self.job_name} is pending: {why}"

    def have_room(self):
        self.cluster.node.missing_images.clear()
        self.cluster.node.look_again()

    def delay_details(self):
        self.cluster.api.misbehave(503, 1, at=("watch", "pods"))

    def config(self, reuse=False):
        around, command = self.around, f"{sys.executable} train.py"
        section = around.storage | {"namespace": around.namespace, "reuse": reuse}
        if self.name == "frameworkcontroller":
            return {
                "trainingServicePlatform": "frameworkcontroller",
                "trial": {"codeDir": ".", "taskRoles": [worker_role(command, around.image)]},
                "frameworkcontrollerConfig": section,
            }
        role = {"replicas": 1, "gpuNum": 0, "cpuNum": 1, "memoryMB": 256, "image": around.image}
        deciding = "master" if self.name == "pytorch-operator" else "worker"
        return {
            "trainingServicePlatform": "kubeflow",
            "trial": {"codeDir": ".", deciding: role | {"command": command}},
            "kubeflowConfig": section | {"operator": self.name},
        }

    def close(self):
        self._open.close()


# This script replaces sbatch and counts its calls. If the file `refusals` has lines, the call fails with the first line as its
# error. Otherwise, the script runs the real sbatch.
_SBATCH = """\
#!/bin/bash
cd {folder}
exec 9>> calls
flock 9
echo >&9
if [ -s refusals ]; then
  echo "sbatch: error: Batch job submission failed: $(head -n 1 refusals)" >&2
  sed -i 1d refusals
  exit 1
fi
exec 9>&-
exec {sbatch} "$@"
"""


class OnSlurm(Platform):
    """A real Slurm of two nodes on this machine. Its sbatch can refuse jobs with the error messages of a busy or limited
    controller.
    """

    failure = "Slurm reports job 1 (nni-EXPT-trial1): FAILED, exit code 105"
    stopped = (9, ExitReason.KEEPER_LOST)
    stopped_message = "Slurm has ended job 1 (nni-EXPT-trial1) on request"
    removed_message = "Slurm reports job 1 (nni-EXPT-trial1): CANCELLED, but not by this manager"
    adopted_failure = "FAILED, exit code 1"
    missed_exit_code = 1
    unreachable = "cannot reach Slurm"
    login = None

    def __init__(self, name, folder, monkeypatch):
        super().__init__(name, folder)
        self._open = contextlib.ExitStack()
        self.slurm = self._open.enter_context(a_slurm_here())
        for variable, value in self.slurm.variables.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.setattr(slurm_service, "POLL_S", 0.2)
        self._jobs, self._sbatch = folder / "jobs", folder / "sbatch"
        self._jobs.mkdir()
        self._sbatch.mkdir()
        program = self._sbatch / "sbatch"
        program.write_text(_SBATCH.format(folder=self._sbatch, sbatch=shutil.which("sbatch")))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{self._sbatch}:{os.environ['PATH']}")

    def service(self, on_job_ended):
        places = SimpleNamespace(workspace=self.workspace, jobs=self._jobs)
        return SlurmService(SlurmSection(login=self.login), places, on_job_ended)

    def left(self):
        return self.slurm.live()

    def _slurm_id(self, job_id):
        """The id of a job, or of a task of an array: jobs that are submitted at the same time become an array."""
        numbers = {
            f"{path.stem}.{path.read_text().split().index(job_id)}"
            for path in self.folder.rglob("*.tasks")
            if job_id in path.read_text().split()
        }
        (slurm_id,) = (
            each
            for each, name, task in self._jobs_of_slurm("-t", "all")
            if name.endswith(f"-{job_id}") or f"{name}.{task}" in numbers
        )
        return slurm_id

    def _jobs_of_slurm(self, *options):
        lines = self.slurm.run("squeue", "-h", "--array", *options, "-o", "%i %j %K").splitlines()
        return [line.split() for line in lines]

    def is_terminal(self, job_id):
        return self._slurm_id(job_id) not in [each for each, _, _ in self._jobs_of_slurm()]

    def remove(self, job_id):
        self.slurm.run("scancel", self._slurm_id(job_id))

    created_message = "was stopped before it was created"

    def answer_submissions(self, how, times=1, resource=None):
        busy = "Unable to contact slurm controller (connect failure)"
        line = how[2] if isinstance(how, tuple) else busy
        # Slurm's commands retry by themselves, so the manager calls sbatch only once per submission. One refusal thus stands for
        # all tries of a submission.
        count = 1 if times == QUICK.tries else times
        with (self._sbatch / "refusals").open("a") as refusals:
            refusals.write(f"{line}\n" * count)

    def answer_submissions_well(self):
        (self._sbatch / "refusals").write_text("")

    def submissions(self, resource):
        return len((self._sbatch / "calls").read_text().splitlines())

    def preempt(self, job_id):
        self.slurm.submit("true", "--partition=urgent", "--nodes=2", "--exclusive")

    def announce_preemption(self, job_id):
        self.slurm.run("scontrol", "update", "partitionname=main", "gracetime=60")
        self.preempt(job_id)

    def stop_server(self):
        self.slurm.stop_controller()

    def start_server(self):
        self.slurm.start_controller()

    def have_no_room(self, monkeypatch):
        monkeypatch.setattr(slurm_jobs, "_MAX_QUEUE_S", 0.0)
        self._large = self.slurm.submit("sleep 100", "--nodes=2", "--exclusive", "--job-name=large")
        wait_until(lambda: self.slurm.states()["large"] == "RUNNING", "the cluster is full")
        return "Slurm has not started 1 of 1 jobs; nni-EXPT-trial1 is pending: Resources"

    def have_room(self):
        self.slurm.run("scancel", self._large)

    def config(self, reuse=False):
        return self.slurm.experiment_keys(reuse=reuse, **({"login": self.login} if self.login else {}))

    def close(self):
        self._open.close()


class OnSlurmOverSsh(OnSlurm):
    """The Slurm cluster of `OnSlurm`. Slurm's commands are available only on a login node with a real sshd."""

    def __init__(self, name, folder, monkeypatch):
        outside = os.environ["PATH"]
        super().__init__(name, folder, monkeypatch)
        inside = self.slurm.variables | {"PATH": os.environ["PATH"]}
        node = self._open.enter_context(a_login_node(folder / "site", inside))
        self.login = node.address
        # The manager must reach Slurm only over ssh. So its environment has neither Slurm's configuration nor the sbatch of the
        # cluster.
        for variable in self.slurm.variables:
            monkeypatch.delenv(variable)
        for variable, value in (node.variables | {"PATH": outside}).items():
            monkeypatch.setenv(variable, value)


class OnRemote(Platform):
    """A machine with a real sshd on loopback."""

    stopped = (9, ExitReason.KEEPER_LOST)
    removed, removal_kills = (137, ExitReason.KEEPER_LOST), True
    reports_bypass_server = False
    # The manager records each start. So if a job has no record, it is unknown to the machine and was never started.
    never_submitted = JobPresence.UNKNOWN
    missed_exit_code = 1

    def __init__(self, name, folder, monkeypatch):
        super().__init__(name, folder)
        self._open = contextlib.ExitStack()
        self.site = self._open.enter_context(ssh_machines_here(folder / "site", "one"))
        (self.machine,) = self.site.machines.values()
        for variable, value in self.site.variables.items():
            monkeypatch.setenv(variable, value)
        from nni_manager.training_services.remote import client

        monkeypatch.setattr(client, "_FIRST_RETRY_S", POLL_S)
        monkeypatch.setattr(client, "_LONGEST_RETRY_S", POLL_S)
        self._section = RemoteSection((RemoteMachine("127.0.0.1", self.machine.port, getpass.getuser()),))
        self.storage = (
            self.machine.home / ".cache" / "trial-keeper" / key_of(self._section.machines[0])
        ).resolve()
        self.storage.mkdir(parents=True)
        self._jobs = folder / "jobs"
        self._jobs.mkdir()

    def service(self, on_job_ended):
        from nni_manager.training_services.remote.service import RemoteService

        places = SimpleNamespace(workspace=Workspace(self.folder / "here" / "EXPT"), jobs=self._jobs)
        return RemoteService(self._section, places, None, on_job_ended)

    def workspace_of(self, experiment):
        return Workspace(self.storage / experiment.folder.experiment_id)

    def _live(self, role, job_id="*"):
        """The pids of shells or keepers of jobs."""
        files = self.storage.glob(f"*/jobs/{job_id}.json")
        found = [processes.ProcessIdentity.from_json(json.loads(file.read_bytes())[role]) for file in files]
        return [each.pid for each in found if each.is_alive]

    def left(self):
        return self._live("keeper") + self._live("shell")

    def is_terminal(self, job_id):
        return not self._live("shell", job_id)

    def remove(self, job_id):
        (keeper,) = self._live("keeper", job_id)
        os.kill(keeper, signal.SIGKILL)

    def stop_server(self):
        self.machine.stop()

    def start_server(self):
        self.machine.start()

    def config(self, reuse=False):
        return {
            "trainingServicePlatform": "remote",
            "machineList": [{"ip": "127.0.0.1", "port": self.machine.port, "username": getpass.getuser()}],
            "remoteConfig": {"reuse": reuse},
        }

    def close(self):
        self._open.close()


PLATFORMS = {
    "local": Local,
    "installed": InstalledPlatform,
    "openpai": OpenPai18,
    "openpai-of-this-machine": OpenPaiOfThisMachine,
    **dict.fromkeys(_OPERATORS, OnKubernetes),
    "slurm": OnSlurm,
    "slurm-over-ssh": OnSlurmOverSsh,
    "remote": OnRemote,
}

ONE_OF_EACH_KIND = ("local", "openpai", "frameworkcontroller", "slurm", "remote")
"""Platforms that start jobs and share files in different ways. Each other one differs from one of these in how it describes a
job, and in how it reports a job's state.
"""


@contextlib.contextmanager
def a_platform(name, folder, monkeypatch):
    """The platform of this name. Its jobs find the keeper on PATH."""
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    with contextlib.closing(PLATFORMS[name](name, folder, monkeypatch)) as platform:
        yield platform
