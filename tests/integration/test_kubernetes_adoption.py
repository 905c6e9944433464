"""A resumed manager adopts jobs on Kubernetes: after the loss of a node or a pod, and during an outage of the API server."""

import asyncio

import pytest
from deadlines import DEADLINE_S
from kube_controllers import FRAMEWORKS
from kube_site import NAME, QUICK, a_site
from kube_store import EVENTS, PODS
from real_experiment import a_manager_here, until

pytest.importorskip("kubernetes")

from nni_manager.training_services.base import JobPresence
from nni_manager.training_services.frameworkcontroller.operator import FrameworkController
from nni_manager.training_services.kubernetes import backend
from nni_manager.training_services.kubernetes.api import Kubernetes
from nni_manager.training_services.kubernetes.backend import KubernetesService
from trial_keeper.wire.reasons import ExitReason


@pytest.fixture
def site(tmp_path, monkeypatch):
    with a_site(tmp_path, monkeypatch) as site:
        yield site


async def test_a_manager_that_adopts_a_job_reports_that_its_node_was_lost_before_the_adoption(site):
    async with site.manager() as first:
        await first.submit(site.settings())
        await site.is_running()
    site.cluster.node.lose()
    # The API server deletes events after an hour, so the second manager sees only the pod's conditions.
    for event in site.store.list(EVENTS):
        site.store.delete(EVENTS, "default", event["metadata"]["name"])
    tainted = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager"}
    site.store.change(
        *(PODS, "default", f"{NAME}-worker-0"),
        lambda it: it["status"]["conditions"].append(tainted),
        "status",
    )
    changes = []
    async with site.manager() as second:
        second.on_node_changed = lambda job_id, is_ready: changes.append((job_id, is_ready))
        assert await second.adopt("another") is JobPresence.UNKNOWN
        await until(lambda: second._observed.has_pods("trial1"), "the pods are listed", DEADLINE_S)
        assert await second.adopt("trial1") is JobPresence.RUNNING
        assert changes == [("trial1", False)]
        site.cluster.node.bury()


async def a_pod_is_preempted_without_a_manager(site):
    async with site.manager() as first:
        await first.submit(site.settings())
        await site.is_running()
    pod = site.store.get(PODS, "default", f"{NAME}-worker-0")
    site.cluster.node.announce_preemption(pod)
    site.store.delete(PODS, "default", f"{NAME}-worker-0")
    await until(lambda: site.state() == "Completed", "the job ends", DEADLINE_S)
    assert not site.store.list(PODS), "FrameworkController deletes the pods of an ended job"


async def test_only_the_first_adoption_waits_for_the_events_about_preempted_pods(site, monkeypatch):
    await a_pod_is_preempted_without_a_manager(site)
    site.cluster.api.misbehave("hang", 2, at=("list", "events"))
    deletes = ("delete", "frameworks")
    # The deletion fails, so the job still exists at the second adoption.
    site.cluster.api.misbehave(503, 100, at=deletes)
    monkeypatch.setattr(backend, "_POD_LAG_S", 0.1)
    async with site.manager() as second:
        assert await second.adopt("trial1") is JobPresence.ENDED
        monkeypatch.setattr(backend, "_POD_LAG_S", 10 * DEADLINE_S)
        adoption = asyncio.wait_for(second.adopt("trial1"), DEADLINE_S)
        assert await adoption is JobPresence.ENDED
        site.cluster.api.is_hung.set()
        site.cluster.api.stop_misbehaving(deletes)


@pytest.mark.parametrize("event", ["hangs", "is denied", "is there"])
async def test_a_job_whose_pod_was_preempted_while_no_manager_ran_ends_as_preempted_if_events_may_be_listed(
    site, monkeypatch, event
):
    monkeypatch.setattr(backend, "_POD_LAG_S", DEADLINE_S)
    await a_pod_is_preempted_without_a_manager(site)
    if event == "hangs":
        site.cluster.api.misbehave("hang", 2, at=("list", "events"))
    elif event == "is denied":
        site.cluster.api.denied.add(("list", "events"))
    async with site.manager() as second:
        adoption = asyncio.create_task(second.adopt("trial1"))
        if event == "hangs":
            listed = second._observed.resources
            await until(lambda: NAME in listed or adoption.done(), "the jobs are listed", DEADLINE_S)
            site.cluster.api.is_hung.set()
        assert await adoption is JobPresence.ENDED
        second.report_end("trial1", stop_was_asked=False)
    (end,) = site.ends
    if event == "is denied":
        assert end.reason is ExitReason.JOB_LOST
    else:
        assert (end.reason, end.exit_code, end.is_explained) == (ExitReason.PREEMPTED, None, True)
        assert end.message.startswith(f"pod {NAME}-worker-0 was preempted for one of higher priority\n")


async def test_a_job_adopted_during_an_outage_is_reported_as_lost_and_not_as_unknown_if_it_is_deleted_later(
    site,
):
    async with site.manager() as first:
        await first.submit(site.settings())
        await site.is_running()
    site.cluster.api.stop()
    async with site.manager() as second:
        assert await second.adopt("trial1") is JobPresence.RUNNING
        site.cluster.api.start()
        await until(lambda: NAME in second._observed.resources, "the job is shown", DEADLINE_S)
        site.store.delete(FRAMEWORKS, "default", NAME)
        end = await site.has_ended()
        assert (end.reason, end.is_unknown) == (ExitReason.JOB_LOST, False)


async def test_a_foreign_resource_with_the_name_of_a_job_adopted_during_an_outage_is_not_regarded_as_the_job(
    site,
):
    foreign = FrameworkController(site.config).render("default", site.settings())
    foreign["metadata"]["labels"] = {}
    site.store.create(FRAMEWORKS, "default", foreign)
    site.cluster.api.stop()
    async with site.manager() as manager:
        assert await manager.adopt("trial1") is JobPresence.RUNNING
        site.cluster.api.start()
        end = await site.has_ended()
        assert (end.reason, end.is_unknown) == (ExitReason.JOB_LOST, True)
    assert site.store.find(FRAMEWORKS, "default", NAME), "it is not ours to delete"


async def test_a_manager_that_starts_during_an_outage_submits_the_job_that_its_predecessor_could_not_submit(
    site, a_real_experiment
):
    experiment = a_real_experiment("pass", trialConcurrency=1, maxTrialNum=1)

    def service_of(on_job_ended):
        kubernetes, operator = Kubernetes(site.folder / "kubeconfig", QUICK), FrameworkController(site.config)
        return KubernetesService(kubernetes, operator, experiment.folder.workspace, on_job_ended)

    site.cluster.api.stop()
    async with a_manager_here(experiment, service_of) as first:
        await until(lambda: first.submission.problem, "the submission fails", DEADLINE_S)
    site.cluster.node.is_full = True
    async with a_manager_here(experiment, service_of) as second:
        (trial,) = second.experiment.trials.values()
        site.cluster.api.start()
        await until(
            lambda: site.store.list(FRAMEWORKS) or trial.state.is_terminal, "the job is created", DEADLINE_S
        )
        assert trial.state.value == "WAITING"
