"""One whole experiment per operator with the real nnictl and real keepers, on the fake cluster or any
other.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from deadlines import DEADLINE_S
from kube_operators import LOCAL_QUEUES, PYTORCH_JOBS, QUEUE
from kube_place import Place, output_of, surroundings, trials_of
from real_experiment import wait_until

pytest.importorskip("kubernetes")

from nni_manager.training_services.kubeflow.operators import OPERATORS
from nni_manager.training_services.kubernetes.resources import Resource

TRAIN = """\
import os, sys
import nni_sdk
print(sys.argv[1], os.environ["NNI_TRIAL_JOB_ID"], *map(os.environ.get, sys.argv[2:]))
x = nni_sdk.get_next_parameter()["x"]
if os.environ.get("JOB_COMPLETION_INDEX", "0") == "0":
    nni_sdk.report_intermediate_result(x / 2)
    nni_sdk.report_final_result(x)
"""
KILLED_ONCE = """\
import os, pathlib, time
import nni_sdk
ready = pathlib.Path({ready!r})
signed = pathlib.Path(os.environ["NNI_SYS_DIR"], "checkpoints.json")
nni_sdk.get_next_parameter()
if ready.exists():
    assert nni_sdk.load_checkpoint()
    nni_sdk.report_intermediate_result(2)
    nni_sdk.report_final_result(2)
else:
    nni_sdk.report_intermediate_result(1)
    nni_sdk.save_checkpoint(lambda folder: None)
    nni_sdk.report_intermediate_result(1.5)
    while not signed.exists():
        time.sleep(0.02)
    ready.touch()
    time.sleep(100)
"""
# This is the command of the parameter server. It runs until SIGTERM.
SERVE = """trap 'exit 0' TERM; echo "$TF_CONFIG"; while :; do sleep 0.1; done"""


@pytest.fixture
def place(tmp_path):
    with surroundings(tmp_path) as around:
        place = Place(tmp_path, around, TRAIN)
        place.config |= {"trainingServicePlatform": "kubeflow", "maxTrialNum": 2}
        yield place


class Runs:
    """An experiment with one operator: its configuration, its run, and its trials. `resource` is the kind of its jobs."""

    def __init__(self, place, operator, section=(), **roles):
        made = OPERATORS[operator]
        of_role = {"replicas": 1, "gpuNum": 0, "cpuNum": 1, "memoryMB": 256, "image": place.around.image}
        for name, role in roles.items():
            place.config["trial"][name] = of_role | role
        place.config["kubeflowConfig"] = place.around.storage | {
            "namespace": place.around.namespace,
            "operator": operator,
            **dict(section),
        }
        self.place, self.made = place, made

    def run(self, resource):
        self.place.uses(resource)
        done = self.place.create("--foreground")
        assert done.returncode == 0, done.stderr
        assert f"run jobs on {self.made.title} at https://" in done.stdout
        self.workspace = self.place.workspace(done)
        self.trials = trials_of(self.workspace)
        assert len(self.trials) == 2
        wait_until(lambda: not self.place.left(self.workspace, resource), "nothing is left", DEADLINE_S)
        results = re.findall(r"^ *\d+ +(\w+) +[\d.e-]+ ", done.stdout, re.MULTILINE)
        assert sorted(results) == self.trials, "each trial must have a result"
        return self

    def output(self, trial, task):
        return output_of(self.workspace, trial, task)

    def has_made(self, resource, count):
        """True if `count` jobs were created. Always true on a real cluster, because only the fake cluster counts calls."""
        double = self.place.around.double
        return double is None or double.api.counted()["create", resource.plural] == count


@pytest.mark.any_cluster
def test_a_tfjob_ends_when_its_workers_end_although_the_parameter_server_still_runs(place):
    tf_jobs = Resource("kubeflow.org", "v1", "tfjobs", "TFJob")
    worker = {"command": "python3 train.py worker POD_NAME"}
    done = Runs(place, "tf-operator", {"apiVersion": "v1"}.items(), worker=worker, ps={"command": SERVE}).run(
        tf_jobs
    )
    for trial in done.trials:
        name = f"nni-exp-{done.workspace.root.name}-trial-{trial}".lower()
        assert done.output(trial, "worker-0") == f"worker {trial} {name}-worker-0\n"
        assert json.loads(done.output(trial, "ps-0"))["task"] == {"type": "ps", "index": 0}
    assert done.has_made(tf_jobs, 2)


@pytest.mark.any_cluster
@pytest.mark.smoke
def test_a_reused_pytorchjob_runs_the_command_of_each_role_for_every_trial(place):
    pytorch_jobs = Resource("kubeflow.org", "v1", "pytorchjobs", "PyTorchJob")
    place.config["trialConcurrency"] = 1
    done = Runs(
        *(place, "pytorch-operator", {"reuse": True}.items()),
        master={"command": "python3 train.py master RANK"},
        worker={"command": "echo worker $NNI_TRIAL_JOB_ID $RANK"},
    ).run(pytorch_jobs)
    for trial in done.trials:
        assert done.output(trial, "master-0") == f"master {trial} 0\n"
        assert done.output(trial, "worker-0") == f"worker {trial} 1\n"
    assert done.has_made(pytorch_jobs, 1)


@pytest.mark.any_cluster
@pytest.mark.smoke
def test_a_trainjob_runs_a_keeper_in_each_node_of_the_training_runtime(place):
    train_jobs = Resource("trainer.kubeflow.org", "v1alpha1", "trainjobs", "TrainJob")
    worker = {"command": "python3 train.py node PET_NNODES"}
    done = Runs(place, "trainjob", worker=worker).run(train_jobs)
    assert [done.output(trial, "worker-0") for trial in done.trials] == [
        f"node {trial} 1\n" for trial in done.trials
    ]
    assert done.has_made(train_jobs, 2)


@pytest.mark.any_cluster
def test_each_task_of_a_kubernetes_batch_job_has_its_own_index(place):
    jobs, section = Resource("batch", "v1", "jobs", "Job"), {}
    if place.around.double is not None:
        place.cluster.store.create(LOCAL_QUEUES, "default", {"metadata": {"name": "team"}, "spec": {}})
        section = {"queueName": "team"}
    worker = {"replicas": 2, "command": "python3 train.py task JOB_COMPLETION_INDEX"}
    done = Runs(place, "job", section.items(), worker=worker).run(jobs)
    for trial in done.trials:
        assert [done.output(trial, f"worker-{index}") for index in (0, 1)] == [
            f"task {trial} {index}\n" for index in (0, 1)
        ]
    assert done.has_made(jobs, 2)
    if place.around.double is not None:
        made = [entry.after for entry in place.cluster.store.history if entry.kind.plural == "jobs"]
        assert {each["metadata"]["labels"][QUEUE] for each in made} == {"team"}


def test_a_restarted_replica_starts_a_new_attempt_that_continues_from_the_checkpoint(place):
    """trial-keeper never requests the restart of a replica, but the restart policy of a cluster may cause one."""
    store, ready = place.cluster.store, place.folder / "ready"
    (place.work / "train.py").write_text(KILLED_ONCE.format(ready=str(ready)))
    place.config |= {"maxTrialNum": 1, "trialConcurrency": 1}
    Runs(place, "pytorch-operator", master={"command": "python3 train.py"})
    with ThreadPoolExecutor(1) as elsewhere:
        ends = elsewhere.submit(place.create, "--foreground")
        wait_until(lambda: ready.exists() or ends.done(), "the first attempt runs", DEADLINE_S)
        (job,) = store.list(PYTORCH_JOBS)
        name = job["metadata"]["name"]
        store.change(
            *(PYTORCH_JOBS, "default", name),
            lambda it: it["spec"]["pytorchReplicaSpecs"]["Master"].update(restartPolicy="ExitCode"),
        )
        place.cluster.node.kill("default", f"{name}-master-0")
        done = ends.result()
    assert done.returncode == 0, done.stderr
    workspace = place.workspace(done)
    (trial,) = trials_of(workspace)
    attempts = workspace.trials / trial / "attempts"
    assert len(list(attempts.iterdir())) == 2
    assert re.search(rf"{trial} +2 ", done.stdout), "the result must come from the second attempt"
    exported = place.nnictl("experiment", "export", "--type", "json", "--intermediate")
    assert json.loads(exported.stdout)[0]["intermediate"] == [1, 2]
