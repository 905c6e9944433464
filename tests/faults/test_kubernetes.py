"""Failures of a Kubernetes cluster with running jobs: the manager reports each failure correctly, and leaves no object on the
cluster.

The real client and service use the fake cluster. The keeper is a script that the test ends.
"""

import asyncio
import contextlib
import itertools
import re
from dataclasses import replace

import kube_definitions as definitions
import pytest
from deadlines import DEADLINE_S
from kube_controllers import FRAMEWORKS
from kube_kubelet import NODE
from kube_operators import RUNTIMES, STEPS
from kube_site import NAME, a_site
from kube_store import CONFIG_MAPS, DEFINITIONS, NAMESPACES, PODS, QUOTAS, SECRETS
from real_experiment import until

pytest.importorskip("kubernetes")

from nni_manager.errors import RetryableError
from nni_manager.training_services.kubernetes import resource_calls
from trial_keeper.wire.reasons import ExitReason

POD = f"{NAME}-worker-0"
# This keeper exits with the code that the test writes to the job's file.
KEEPER = """\
end="$TRIAL_KEEPER_WORKSPACE/$TRIAL_KEEPER_JOB_ID"
while [ ! -s "$end" ]; do sleep 0.05; done
exit "$(cat "$end")"
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    with a_site(tmp_path, monkeypatch) as site:
        site.runs(KEEPER)
        yield site
        # Each test must leave no custom resource, secret, pod or config map in any namespace.
        left = {kind.plural: len(site.store.list(kind)) for kind in (FRAMEWORKS, SECRETS, PODS, CONFIG_MAPS)}
        assert left == dict.fromkeys(left, 0)


def end(site, job_id="trial1", code=0):
    """Make the job's keeper exit with this code."""
    (site.folder / "EXPT" / job_id).write_text(f"{code}\n")


async def gone(site):
    """Wait until all objects are deleted."""
    kinds = (FRAMEWORKS, SECRETS, PODS, CONFIG_MAPS)
    await until(
        lambda: not any(site.store.list(kind) for kind in kinds), "nothing is left on the cluster", DEADLINE_S
    )


async def both_run(site, service):
    for job_id in ("trial1", "trial2"):
        await service.submit(site.settings(job_id))
    await site.is_running()
    await site.is_running("nniexpexpttrialtrial2")


async def test_the_service_lists_the_pods_before_it_creates_the_first_job(site):
    """If a short job ends before the service lists the pods, the message of its pod is missed."""
    api = site.cluster.api
    api.misbehave("hang", 1, at=("list", "pods"))
    async with site.manager() as service:
        submitted = asyncio.create_task(service.submit(site.settings("trial1")))
        others = (("list", "pods"), ("list", FRAMEWORKS.plural), ("list", "events"))
        await until(lambda: set(others) <= set(api.asked), "the lists are requested", DEADLINE_S)
        api.is_hung.set()
        await submitted
        end(site, "trial1")
        await site.has_ended()
        await gone(site)
    created = api.asked.index(("create", FRAMEWORKS.plural))
    assert api.asked[:created].count(("list", "pods")) == 2, "the first was hanging"


async def test_jobs_that_end_during_an_api_server_outage_are_reported_with_their_exit_codes(site):
    async with site.manager() as service:
        await both_run(site, service)
        site.cluster.api.stop()
        # Until the watches detect the outage, the service uses the state that they reported last. So the test waits until they
        # have failed.
        told = ("the connection to ", "does not answer")
        await until(
            lambda: any(part in service.problem for part in told), "the problem is reported", DEADLINE_S
        )
        end(site, "trial1", 7)
        await until(lambda: site.state() == "Completed", "one job has ended", DEADLINE_S)
        assert site.ends == [], "no end can be known yet"
        site.cluster.api.start()
        end(site, "trial2")
        await site.has_ended(2)
        assert {each.job_id: each.exit_code for each in site.ends} == {"trial1": 7, "trial2": 0}
        await until(lambda: not service.problem, "the problem is cleared", DEADLINE_S)
        await gone(site)


async def test_the_end_of_each_job_is_reported_once_even_if_the_api_server_has_dropped_its_history(site):
    async with site.manager() as service:
        await both_run(site, service)
        for _ in range(3):
            site.cluster.api.forget_history()
            site.cluster.api.drop_watches()
        end(site, "trial1", 7)
        site.cluster.api.forget_history()
        end(site, "trial2")
        await site.has_ended(2)
        await gone(site)
    assert sorted((each.job_id, each.exit_code) for each in site.ends) == [("trial1", 7), ("trial2", 0)]


@pytest.mark.parametrize("how", ["conflict", 429, 503])
async def test_no_job_is_lost_or_duplicated_if_api_calls_are_refused(site, how):
    api = site.cluster.api
    for verb in ("create", "delete", "list", "watch"):
        api.misbehave(how, 7, at=(verb, ""), retry_after=0)
    async with site.manager() as service:
        for job_id in ("trial1", "trial2"):
            for _ in range(20):  # the loop retries like the engine, but without pauses
                with contextlib.suppress(RetryableError):
                    await service.submit(site.settings(job_id))
                    break
        await site.is_running()
        end(site, "trial1", 7)
        assert await service.stop("trial2")
        await site.has_ended(2)
        assert {each.job_id: each.exit_code for each in site.ends} == {"trial1": 7, "trial2": None}
        await gone(site)
    assert len(site.ends) == 2
    made = [each for each in site.store.history if each.kind == FRAMEWORKS and each.type == "ADDED"]
    assert len(made) == 2


async def test_an_expired_login_is_reported_and_missed_changes_are_reported_after_its_renewal(site):
    async with site.manager() as service:
        await both_run(site, service)
        site.cluster.api.tokens = {"newer"}
        site.cluster.api.drop_watches()
        await until(
            lambda: "rejects the login; renew the login in your kubeconfig file" in service.problem,
            *("the problem is reported", DEADLINE_S),
        )
        with pytest.raises(RetryableError, match="rejects the login"):
            await service.submit(site.settings("trial3"))
        end(site, "trial1", 7)
        assert await service.stop("trial2")
        await until(lambda: site.state() == "Completed", "one job has ended", DEADLINE_S)
        (site.folder / "kubeconfig").write_text(site.cluster.api.kubeconfig("newer"))
        await site.has_ended(2)
        assert {each.job_id: each.exit_code for each in site.ends} == {"trial1": 7, "trial2": None}
        await until(lambda: not service.problem, "the problem is cleared", DEADLINE_S)
        # stop() returns True for trial3, because its failed submission may have created the job. trial4 was never submitted.
        assert not await service.stop("trial4")
        assert await service.stop("trial3")
        await gone(site)


async def test_the_jobs_of_a_deleted_namespace_are_reported_as_lost(site):
    site.store.create(NAMESPACES, "", {"metadata": {"name": "team"}})
    site.config = replace(site.config, namespace="team")
    async with site.manager() as service:
        for job_id in ("trial1", "trial3"):
            await service.submit(site.settings(job_id))
        await until(lambda: len(site.store.list(PODS)) == 2, "both have a pod", DEADLINE_S)
        site.store.delete(NAMESPACES, "", "team")
        await site.has_ended(2)
        assert {ended.job_id for ended in site.ends} == {"trial1", "trial3"}
        for ended in site.ends:
            assert (ended.exit_code, ended.reason) == (None, ExitReason.JOB_LOST)
            assert "in namespace team was deleted, but not by this manager" in ended.message
            assert ended.message.startswith(f"Framework {NAME.replace('trial1', ended.job_id)} ")
        await until(
            lambda: not site.store.find(NAMESPACES, "", "team"), "the namespace is deleted", DEADLINE_S
        )
        with pytest.raises(RetryableError, match='namespaces "team" not found'):
            await service.submit(site.settings("trial2"))
        assert await service.stop("trial2")
        await gone(site)


async def test_the_end_message_of_a_job_on_a_lost_node_contains_the_warning_of_kubernetes(site):
    changes = []
    async with site.manager() as service:
        service.on_node_changed = lambda *change: changes.append(change)
        await service.submit(site.settings())
        await site.is_running()
        site.cluster.node.lose()
        await until(
            lambda: "deletionTimestamp" in site.store.get(PODS, "default", POD)["metadata"],
            *("the pod is being deleted", DEADLINE_S),
        )
        assert site.ends == [], "the node may come back"
        # The service receives changes of pods and events from its watches, possibly later than the test reads them from the
        # store. So the test waits for the report.
        await until(lambda: changes, "the node is reported", DEADLINE_S)
        warning = rf"node {NODE} has not been ready for \d+ s"
        assert re.fullmatch(warning, service.warning("trial1"))
        assert re.fullmatch(f"{warning}; 1 of 1 jobs run on nodes that are not ready", service.problem)
        assert changes == [("trial1", False)]
        site.cluster.node.bury()
        ended = await site.has_ended()
        assert (ended.exit_code, ended.reason) == (None, ExitReason.JOB_LOST)
        assert "PodExternalDeleted, code -101" in ended.message
        assert ended.message.endswith("\nKubernetes warned: NodeNotReady: Node is not ready")
        await service.submit(site.settings("trial2"))
        await until(lambda: "node.kubernetes.io/unreachable" in service.problem, "no node", DEADLINE_S)
        assert await service.stop("trial2")
        await site.has_ended(2)
        await gone(site)


async def test_the_end_message_of_a_job_contains_the_eviction_message_of_its_pod(site):
    async with site.manager() as service:
        await service.submit(site.settings())
        await site.is_running()
        site.cluster.node.evict("default", POD)
        ended = await site.has_ended()
        assert (ended.exit_code, ended.reason) == (None, ExitReason.KEEPER_LOST)
        assert "Evicted: The node was low on resource: memory." in ended.message
        await gone(site)


async def test_a_job_with_a_missing_image_stays_pending_until_the_image_exists_or_the_job_stops(site):
    site.cluster.node.missing_images.add("me/train:1")
    async with site.manager() as service:
        for job_id in ("trial1", "trial2"):
            await service.submit(site.settings(job_id))
        why = 'ImagePullBackOff: Back-off pulling image "me/train:1": not found'
        await until(
            lambda: [service.pending_reason(job_id) for job_id in ("trial1", "trial2")] == [why, why],
            *("both jobs have the reason", DEADLINE_S),
        )
        assert service.problem.startswith("Kubernetes has not started 2 of 2 jobs; ")
        assert await service.stop("trial2")
        ended = await site.has_ended()
        assert ended.message.endswith(f"was deleted on request; the job had not started: {why}")
        site.cluster.node.missing_images.clear()
        site.cluster.node.look_again()
        await site.is_running()
        await until(
            lambda: (service.problem, service.pending_reason("trial1")) == ("", ""),
            *("the reason is cleared", DEADLINE_S),
        )
        end(site, "trial1")
        assert (await site.has_ended(2)).exit_code == 0
        await gone(site)


@pytest.mark.parametrize(
    ("word", "version", "said"),
    [
        ("job", "v1", "FailedCreate: "),
        ("tf-operator", "v1", "FailedCreatePod: "),
        ("trainjob", "v1alpha1", "FailedCreate: "),
    ],
)
async def test_a_job_without_pods_reports_the_exceeded_quota_as_its_pending_reason(site, word, version, said):
    for each in definitions.OF_KUBEFLOW:
        site.store.create(DEFINITIONS, "", each)
    site.store.create(RUNTIMES, "", definitions.TORCH_DISTRIBUTED)
    site.config = replace(site.config, operator=word, api_version=version, runtime="torch-distributed")
    quota = {"metadata": {"name": "of-the-team"}, "spec": {"hard": {"pods": "1"}}}
    site.store.create(QUOTAS, "default", quota)
    async with site.manager() as service:
        await service.submit(site.settings("trial1"))
        await until(lambda: site.store.count(PODS) == 1, "the first has a pod", DEADLINE_S)
        await service.submit(site.settings("trial2"))
        why = "is forbidden: exceeded quota: of-the-team, requested: pods=1, used: pods=1"
        await until(lambda: why in service.pending_reason("trial2"), "the second waits", DEADLINE_S)
        # The pod's name differs in each retry, so only its prefix is compared.
        told = f'{said}Error creating: pods "nni-exp-expt-trial-trial2-'
        await until(lambda: told in service.problem, "the problem names the quota", DEADLINE_S)
        end(site, "trial1")
        end(site, "trial2", 7)
        await site.has_ended(2)
        assert {each.job_id: each.exit_code for each in site.ends} == {"trial1": 0, "trial2": 7}
        of_jobs = [kind for kind in site.store.kinds.values() if (kind.group, kind.plural) in STEPS]
        kinds = [*of_jobs, SECRETS, PODS]
        await until(lambda: not any(map(site.store.count, kinds)), "nothing is left", DEADLINE_S)


async def test_a_closing_manager_deletes_resources_without_waiting_for_the_next_retry(site, monkeypatch):
    monkeypatch.setattr(resource_calls, "retry_delays_s", lambda: itertools.repeat(1e6))
    async with site.manager() as service:
        await service.submit(site.settings())
        await site.is_running()
        site.cluster.api.misbehave(503, 10, at=("delete", FRAMEWORKS.plural))
        end(site)
        await site.has_ended()
        await until(lambda: "Kubernetes answers 503" in service.problem, "the delete has failed", DEADLINE_S)
        (left,) = service.leftovers().values()
        assert left.startswith(f"cannot delete Framework {NAME} in namespace default: Kubernetes answers 503")
        assert left.endswith(f"; remove it with `{service.removal_command('trial1')}`")
        site.cluster.api.stop_misbehaving(("delete", FRAMEWORKS.plural))
        await service.settle()
        assert service.leftovers() == {}
    await gone(site)


async def test_a_new_manager_adopts_running_and_ended_jobs_of_a_killed_manager(site):
    async with site.manager() as first:
        await both_run(site, first)
        first.on_job_ended = lambda ended: None
    end(site, "trial1", 7)
    await until(lambda: site.state() == "Completed", "one job ends without a manager", DEADLINE_S)
    site.cluster.api.forget_history()
    async with site.manager() as second:
        found = [(await second.adopt(job_id)).value for job_id in ("trial1", "trial2")]
        assert found == ["ended", "running"]
        end(site, "trial2")
        assert (await site.has_ended()).exit_code == 0
        await gone(site)
