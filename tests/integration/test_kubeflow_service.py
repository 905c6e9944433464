"""Behaviour that only Kubeflow's operators and plain Kubernetes Jobs have. tests/contract/test_platform_jobs.py tests the
behaviour that all platforms share.
"""

import asyncio
import contextlib
from dataclasses import replace

import kube_definitions as definitions
import pytest
from deadlines import DEADLINE_S
from kube_events import tell
from kube_operators import LOCAL_QUEUES, PYTORCH_JOBS, TF_JOBS
from kube_site import QUICK, operator_of
from kube_store import DEFINITIONS, JOBS, PODS
from kubeflow_site import CONFIGS, KINDS, WORKER, a_kubeflow_site
from real_experiment import until

pytest.importorskip("kubernetes")

from nni_manager.errors import UserError
from nni_manager.training_services.base import JobPresence
from nni_manager.training_services.kubernetes.api import Kubernetes
from nni_manager.training_services.kubernetes.operator import Stage
from nni_manager.training_services.kubernetes.preflight import check
from nni_manager.training_services.kubernetes.watch import Deleted, Synced, Upserted
from trial_keeper.wire.reasons import ExitReason

NAME = "nni-exp-expt-trial-trial1"


@pytest.fixture
def site(tmp_path, monkeypatch):
    with a_kubeflow_site(tmp_path, monkeypatch) as site:
        yield site


async def until_pods_run(site, count=1):
    def running():
        return [pod for pod in site.store.list(PODS) if pod["status"]["phase"] == "Running"]

    await until(lambda: len(running()) == count, "the pods run", DEADLINE_S)
    return [pod["metadata"]["name"] for pod in running()]


async def until_found(site):
    await until(lambda: site.store.list(PODS), "a pod is created", DEADLINE_S)
    return [pod["metadata"]["name"] for pod in site.store.list(PODS)]


async def test_a_job_does_not_end_while_the_cluster_restarts_its_pods(site):
    site.config = CONFIGS["pytorch-operator"]
    async with site.manager() as service:
        await service.submit(site.settings())
        # The test changes the restartPolicy of the submitted job, as an admission policy of a cluster may do.
        site.store.change(
            *(PYTORCH_JOBS, "default", NAME),
            lambda it: it["spec"]["pytorchReplicaSpecs"]["Master"].update(restartPolicy="ExitCode"),
        )
        await until_pods_run(site, 2)
        before = site.store.get(PODS, "default", f"{NAME}-master-0")["metadata"]["uid"]
        site.cluster.node.kill("default", f"{NAME}-master-0")

        def is_another():
            found = site.store.find(PODS, "default", f"{NAME}-master-0")
            return found and found["metadata"]["uid"] != before

        await until(is_another, "the pod is replaced", DEADLINE_S)
        await until_pods_run(site, 2)
        said = [
            each["type"]
            for entry in site.store.history
            if entry.kind == PYTORCH_JOBS
            for each in (entry.after.get("status") or {}).get("conditions", [])
        ]
        assert "Restarting" in said
        assert site.ends == []
        site.cluster.node.kill("default", f"{NAME}-worker-0", "OOMKilled")
        end = await site.has_ended()
        assert (end.exit_code, end.reason) == (137, ExitReason.OUT_OF_MEMORY)


@pytest.mark.parametrize(
    ("ends", "exit_code", "reason"),
    [
        (lambda node, pod: node.preempt(pod), None, ExitReason.PREEMPTED),
        (
            lambda node, pod: node.kill("default", pod["metadata"]["name"], "OOMKilled"),
            137,
            ExitReason.OUT_OF_MEMORY,
        ),
    ],
    ids=["preempted", "out of memory"],
)
async def test_a_job_that_ended_while_no_manager_ran_is_reported_with_its_exit_code_and_reason(
    site, ends, exit_code, reason
):
    async with site.manager() as first:
        await first.submit(site.settings())
        (pod,) = await until_pods_run(site)
    ends(site.cluster.node, site.store.get(PODS, "default", pod))
    operator = operator_of(site.config)
    await until(
        lambda: operator.stage_of(site.store.get(JOBS, "default", NAME)) is Stage.ENDED, "it ends", DEADLINE_S
    )
    site.cluster.api.misbehave("hang", 1, at=("list", "pods"))
    async with site.manager() as second:
        adoption = asyncio.create_task(second.adopt("trial1"))
        await until(lambda: NAME in second._observed.resources, "the jobs are listed", DEADLINE_S)
        site.cluster.api.is_hung.set()
        assert await adoption is JobPresence.ENDED
        second.report_end("trial1", stop_was_asked=False)
        (end,) = site.ends
        assert (end.exit_code, end.reason, end.is_explained) == (exit_code, reason, True)
        assert end.message.startswith(f"pod {pod} ")
        await until(lambda: not site.store.list(JOBS), "the job is deleted", DEADLINE_S)


async def test_the_pending_reason_of_a_job_in_a_held_queue_is_the_missing_admission_by_kueue(site):
    site.config = replace(CONFIGS["job"], queue="team")
    queue = {"metadata": {"name": "team"}, "spec": {"stopPolicy": "Hold"}}
    site.store.create(LOCAL_QUEUES, "default", queue)
    site.runs("true")
    async with site.manager() as service:
        await service.submit(site.settings())
        await until(
            lambda: "Kueue has not admitted the job" in service.problem, "the reason is shown", DEADLINE_S
        )
        assert "kubectl describe localqueue team" in service.pending_reason("trial1")
        site.store.change(LOCAL_QUEUES, "default", "team", lambda it: it["spec"].update(stopPolicy="None"))
        assert (await site.has_ended()).exit_code == 0


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (
            replace(CONFIGS["tf-operator"], api_version="v1beta2"),
            "it does not serve tfjobs of kubeflow.org/v1beta2 (served: v1); write apiVersion: v1, or install Kubeflow's training "
            "operator for v1beta2",
        ),
        (
            replace(CONFIGS["trainjob"], runtime="torch"),
            "ClusterTrainingRuntime torch does not exist; correct the name, or create the object with kubectl",
        ),
        (
            replace(CONFIGS["trainjob"], runtime="TrainingRuntime/torch"),
            "TrainingRuntime torch does not exist in namespace default; correct the name",
        ),
        (replace(CONFIGS["job"], queue="team"), "LocalQueue team does not exist in namespace default"),
    ],
)
def test_missing_objects_and_permissions_are_reported_before_any_object_is_created(site, config, missing):
    kubernetes = Kubernetes(site.folder / "kubeconfig", QUICK)
    for each in CONFIGS.values():
        check(kubernetes, operator_of(each), "default")
    with pytest.raises(UserError) as caught:
        check(kubernetes, operator_of(config), "default")
    assert missing in str(caught.value)
    site.cluster.api.denied.add(("create", KINDS[config.operator].plural))
    with pytest.raises(UserError, match=f"may not create {KINDS[config.operator].plural}"):
        check(kubernetes, operator_of(CONFIGS[config.operator]), "default")
    kubernetes.close()


@pytest.mark.parametrize(
    ("operator", "minor", "is_refused"),
    [("job", "20+", True), ("job", "21", False), ("job", "", False), ("tf-operator", "20", False)],
)
def test_a_server_is_refused_for_plain_kubernetes_jobs_if_it_lacks_indexed_jobs(
    site, operator, minor, is_refused
):
    kubernetes, made = Kubernetes(site.folder / "kubeconfig", QUICK), operator_of(CONFIGS[operator])
    site.cluster.api.minor_version = minor
    refused = pytest.raises(
        UserError, match=r"Kubernetes 1\.20 is too old: jobs of trials need 1\.21; upgrade it, or use another"
    )
    with refused if is_refused else contextlib.nullcontext():
        check(kubernetes, made, "default")
    kubernetes.close()


async def test_a_running_job_that_kueue_suspends_has_a_warning_until_the_job_starts_again(site):
    queue = {"metadata": {"name": "team"}, "spec": {"stopPolicy": "None"}}
    site.store.create(LOCAL_QUEUES, "default", queue)
    site.config = replace(CONFIGS["job"], queue="team")

    def admits(policy):
        site.store.change(LOCAL_QUEUES, "default", "team", lambda it: it["spec"].update(stopPolicy=policy))

    async with site.manager() as service:
        await service.submit(site.settings())
        (first,) = await until_pods_run(site)
        await until(lambda: not service.pending_reason("trial1"), "it runs", DEADLINE_S)
        assert not service.will_restart("trial1")
        admits("Hold")
        await until(lambda: service.will_restart("trial1"), "the suspension is seen", DEADLINE_S)
        assert service.warning("trial1").startswith(
            "Kueue has suspended the job, which starts again when queue team admits it; "
        )
        await until(lambda: not site.store.find(PODS, "default", first), "its pod is gone", DEADLINE_S)
        assert site.ends == []
        admits("None")
        await until(lambda: service.warning("trial1") == "", "it starts again", DEADLINE_S)
        (second,) = await until_pods_run(site)
        assert second != first
        assert await service.stop("trial1")
        assert not service.will_restart("trial1")
        await site.has_ended()


async def test_a_requeued_job_counts_as_restarting_while_its_new_pod_cannot_pull_the_image(site):
    """Kueue may admit the job again before the manager asks whether it starts again."""
    site.store.create(LOCAL_QUEUES, "default", {"metadata": {"name": "team"}, "spec": {"stopPolicy": "None"}})
    site.config = replace(CONFIGS["job"], queue="team")
    async with site.manager() as service:
        await service.submit(site.settings())
        (first,) = await until_pods_run(site)
        site.cluster.node.missing_images.add("me/train:1")
        site.store.change(LOCAL_QUEUES, "default", "team", lambda it: it["spec"].update(stopPolicy="Hold"))
        await until(lambda: not site.store.find(PODS, "default", first), "its pod is gone", DEADLINE_S)
        site.store.change(LOCAL_QUEUES, "default", "team", lambda it: it["spec"].update(stopPolicy="None"))
        (pod,) = await until_found(site)
        await until(
            lambda: service._observed.suspension(NAME) == "" and pod in service._observed._pods["trial1"],
            "it is admitted again",
            DEADLINE_S,
        )
        assert service.will_restart("trial1")
        assert await service.stop("trial1")
        assert not service.will_restart("trial1")
        await site.has_ended()


async def test_a_preemption_of_the_new_pod_of_a_requeued_job_is_reported(site):
    site.store.create(LOCAL_QUEUES, "default", {"metadata": {"name": "team"}, "spec": {"stopPolicy": "None"}})
    site.config = replace(CONFIGS["job"], queue="team")
    preempted = []
    async with site.manager() as service:
        service.on_job_preempted = preempted.append
        await service.submit(site.settings())
        (first,) = await until_pods_run(site)
        site.store.change(LOCAL_QUEUES, "default", "team", lambda it: it["spec"].update(stopPolicy="Hold"))
        await until(lambda: not site.store.find(PODS, "default", first), "its pod is gone", DEADLINE_S)
        site.store.change(LOCAL_QUEUES, "default", "team", lambda it: it["spec"].update(stopPolicy="None"))
        (second,) = await until_pods_run(site)
        site.cluster.node.announce_preemption(site.store.get(PODS, "default", second))
        await until(lambda: preempted == ["trial1"], "the preemption is reported", DEADLINE_S)
        assert await service.stop("trial1")
        await site.has_ended()


def test_a_server_that_does_not_return_its_version_is_accepted(site):
    kubernetes, operator = Kubernetes(site.folder / "kubeconfig", QUICK), operator_of(CONFIGS["job"])
    site.cluster.api.minor_version = "20"
    site.cluster.api.misbehave((403, "Forbidden", "not for you"), 1, at=("get", "/version"))
    check(kubernetes, operator, "default")
    with pytest.raises(UserError, match="is too old"):
        check(kubernetes, operator, "default")
    kubernetes.close()


def test_a_kubeflow_trainer_release_is_refused_if_it_lacks_pod_template_overrides(site):
    kubernetes, operator = Kubernetes(site.folder / "kubeconfig", QUICK), operator_of(CONFIGS["trainjob"])
    site.store.delete(DEFINITIONS, "", "trainjobs.trainer.kubeflow.org")
    site.store.create(DEFINITIONS, "", definitions.train_job("2.1"))
    check(kubernetes, operator, "default")
    site.store.delete(DEFINITIONS, "", "trainjobs.trainer.kubeflow.org")
    site.store.create(DEFINITIONS, "", definitions.train_job("2.0"))
    with pytest.raises(UserError, match="its Kubeflow Trainer is too old: trainjobs have no podTemplateOv"):
        check(kubernetes, operator, "default")
    site.cluster.api.misbehave(404, 1, at=("get", f"/openapi/v3{operator.resource.root}"))
    # A server without this OpenAPI document cannot be checked, so the check accepts the server.
    check(kubernetes, operator, "default")
    kubernetes.close()


async def test_an_older_api_version_is_used_if_the_experiment_file_names_the_version(site):
    site.store.delete(DEFINITIONS, "", "pytorchjobs.kubeflow.org")
    site.store.create(DEFINITIONS, "", definitions.pytorch_job("v1beta2"))
    master = replace(WORKER, name="master")
    site.config = replace(CONFIGS["pytorch-operator"], roles=(master,), api_version="v1beta2")
    site.runs("true")
    kubernetes = Kubernetes(site.folder / "kubeconfig", QUICK)
    check(kubernetes, operator_of(site.config), "default")
    async with site.manager() as service:
        await service.submit(site.settings())
        assert (await site.has_ended()).exit_code == 0
    made = {entry.after["apiVersion"] for entry in site.store.history if entry.kind.plural == "pytorchjobs"}
    assert made == {"kubeflow.org/v1beta2"}

    kubernetes.close()


def test_the_error_for_a_cluster_without_the_kubeflow_operator_and_kueue_names_both(site):
    kubernetes = Kubernetes(site.folder / "kubeconfig", QUICK)
    for kind in (TF_JOBS, LOCAL_QUEUES):
        site.store.delete(DEFINITIONS, "", f"{kind.plural}.{kind.group}")
    with pytest.raises(UserError) as caught:
        check(kubernetes, operator_of(replace(CONFIGS["tf-operator"], queue="team")), "default")
    assert "it does not serve tfjobs.kubeflow.org; install Kubeflow's training operator there" in str(
        caught.value
    )
    assert "it does not serve localqueues.kueue.x-k8s.io; install Kueue there" in str(caught.value)
    kubernetes.close()


@pytest.mark.parametrize(
    ("change", "phase", "reason"),
    [
        (Upserted, "Running", ""),
        (Deleted, "Failed", ""),
        (Deleted, "Pending", "; the job had not started: Failed: no image"),
    ],
)
async def test_the_message_of_a_deleted_job_has_a_pending_reason_only_if_its_pods_never_started(
    site, monkeypatch, change, phase, reason
):
    async with site.manager() as service:
        # The watches are disabled. The test calls the handlers itself, so that the change of the pod arrives last.
        monkeypatch.setattr(service, "_watch", lambda: None)
        service._on_pod(Synced())
        await service.submit(site.settings())
        (name,) = await until_pods_run(site)
        pod, job = site.store.get(PODS, "default", name), site.store.get(JOBS, "default", NAME)
        service._on_resource(Upserted(job | {"status": {}}))
        service._on_event(Upserted(tell(site.store, pod, "Failed", "no image")))
        assert service.pending_reason("trial1") == "Failed: no image"
        service._on_resource(Deleted(job | {"status": {}}))
        assert site.ends == []
        service._on_pod(change(pod | {"status": {"phase": phase}}))
        end = await site.has_ended()
    deleted = f"Job {NAME} in namespace default was deleted, but not by this manager"
    assert (end.reason, end.message) == (ExitReason.JOB_LOST, deleted + reason)


async def test_a_deleted_job_counts_as_started_if_its_last_status_shows_ready_pods(site, monkeypatch):
    async with site.manager() as service:
        monkeypatch.setattr(service, "_watch", lambda: None)
        service._on_pod(Synced())
        await service.submit(site.settings())
        (name,) = await until_pods_run(site)
        pod, job = site.store.get(PODS, "default", name), site.store.get(JOBS, "default", NAME)
        service._on_resource(Upserted(job | {"status": {}}))
        service._on_event(Upserted(tell(site.store, pod, "Failed", "no image")))
        service._on_resource(Deleted(job | {"status": {"ready": 1}}))
        assert [end.message for end in site.ends] == [
            f"Job {NAME} in namespace default was deleted, but not by this manager"
        ]


@pytest.mark.parametrize("is_tainted", [True, False])
async def test_the_loss_of_a_node_is_reported_even_if_no_container_of_the_job_has_started(
    site, monkeypatch, is_tainted
):
    """Kubernetes before 1.26 sets no condition: only the time of the deletion shows that the pod should have ended."""
    monkeypatch.setattr("nni_manager.training_services.kubernetes.backend._DELETION_LAG_S", 0.1)
    site.cluster.node.missing_images.add("me/train:1")
    changes = []
    async with site.manager() as service:
        service.on_node_changed = lambda job_id, is_ready: changes.append((job_id, is_ready))
        await service.submit(site.settings())
        await until(
            lambda: service.pending_reason("trial1").startswith("ImagePullBackOff"), "it waits", DEADLINE_S
        )
        (pod,) = await until_found(site)
        site.cluster.node.lose()
        if is_tainted:
            condition = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
            site.store.change(
                PODS, "default", pod, lambda it: it["status"]["conditions"].append(condition), "status"
            )
        site.store.delete(PODS, "default", pod, {"gracePeriodSeconds": 100 if is_tainted else 1})
        await until(lambda: changes == [("trial1", False)], "the lost node is reported", DEADLINE_S)
        assert "is not ready" in service.warning("trial1")
        site.cluster.node.bury()
