"""Jobs on FrameworkController and their Kubernetes objects. tests/contract/test_platform_jobs.py tests the behaviour that all
platforms share.
"""

import asyncio
import threading
from dataclasses import replace

import pytest
from deadlines import DEADLINE_S
from kube_controllers import FRAMEWORKS
from kube_events import tell
from kube_site import NAME, QUICK, a_site, run
from kube_store import PODS, QUOTAS, SECRETS
from real_experiment import a_manager_here, until

pytest.importorskip("kubernetes")

from nni_manager.client.watch import trial_cells
from nni_manager.config.document import Document
from nni_manager.engine.serializers import summary_view, trial_view
from nni_manager.errors import RetryableError, UserError
from nni_manager.training_services.base import JobPresence
from nni_manager.training_services.frameworkcontroller.framework_template import read_template
from nni_manager.training_services.frameworkcontroller.operator import FrameworkController
from nni_manager.training_services.kubernetes import missing_pods, resource_calls
from nni_manager.training_services.kubernetes.api import Kubernetes
from nni_manager.training_services.kubernetes.backend import KubernetesService
from nni_manager.training_services.kubernetes.preflight import check
from nni_manager.training_services.kubernetes.render import SecretContent
from nni_manager.training_services.kubernetes.section import NfsStorage
from nni_manager.training_services.kubernetes.watch import Deleted, Synced, Upserted
from trial_keeper.wire.reasons import ExitReason


@pytest.fixture
def site(tmp_path, monkeypatch):
    with a_site(tmp_path, monkeypatch) as site:
        yield site


async def test_a_job_deletion_is_reported_even_if_the_api_server_has_dropped_its_history(site):
    async with site.manager() as service:
        await service.submit(site.settings())
        await site.is_running()
        with site.store.changed:
            site.store.delete(FRAMEWORKS, "default", NAME)
            site.cluster.api.forget_history()
        end = await site.has_ended()
        assert "was deleted, but not by this manager" in end.message


async def test_hanging_delete_calls_do_not_delay_the_end_reports_of_other_jobs(site):
    site.runs("true")
    site.cluster.api.misbehave("hang", 100, at=("delete", "frameworks"))
    async with site.manager() as service:
        # Six jobs are more than the worker threads of the service, so hanging delete calls could block all of the threads.
        for number in range(6):
            await service.submit(site.settings(f"trial{number}"))
        await site.has_ended(6)
        assert len(site.store.list(FRAMEWORKS)) == 6, "the deletes must hang"
        site.cluster.api.stop_misbehaving(("delete", "frameworks"))
        site.cluster.api.is_hung.set()
        await until(site.is_clean, "nothing is left", DEADLINE_S)


async def test_a_repeated_submission_creates_the_secret_that_the_first_submission_could_not_create(site):
    async with site.manager() as service:
        site.cluster.api.misbehave(503, 2, at=("create", "secrets"))
        with pytest.raises(RetryableError):
            await service.submit(site.settings())
        assert not site.store.list(SECRETS)
        await service.submit(site.settings())
        await service.submit(site.settings())
        assert len(site.store.list(FRAMEWORKS)) == len(site.store.list(SECRETS)) == 1
        await site.is_running()


class ShareWithKey:
    """Shared storage that needs an access key."""

    def secrets(self):
        return (SecretContent("-key", "Opaque", {"key": "c0a1"}),)

    def close(self):
        pass


async def test_the_secret_of_the_storage_key_is_owned_by_the_job_and_created_before_the_token_secret(site):
    site.share = ShareWithKey()
    async with site.manager() as service:
        await service.submit(site.settings())
        (framework,) = site.store.list(FRAMEWORKS)
        secrets = site.store.list(SECRETS)
        secrets.sort(key=lambda each: int(each["metadata"]["resourceVersion"]))
        assert [each["metadata"]["name"] for each in secrets] == [f"{NAME}-key", NAME]
        (owner,) = secrets[0]["metadata"]["ownerReferences"]
        assert owner["uid"] == framework["metadata"]["uid"]


async def test_a_user_defined_framework_runs_its_own_commands_with_its_own_volumes(site, tmp_path):
    def role(name, *command):
        container = {
            "name": "mine",
            "image": "me/train:1",
            "command": ["sh", "-c"],
            "args": ["; ".join(command)],
            "env": [{"name": "WORD", "value": "mine"}],
            "volumeMounts": [{"name": "own", "mountPath": "/own"}],
        }
        spec = {"containers": [container], "volumes": [{"name": "own", "emptyDir": {}}]}
        return {"name": name, "taskNumber": 1, "task": {"pod": {"spec": spec}}}

    own = {
        "apiVersion": "frameworkcontroller.microsoft.com/v1",
        "kind": "Framework",
        "spec": {
            "taskRoles": [
                role("ps", "exit 0"),
                role(
                    "worker",
                    'echo "$(WORD) $FB_PS_IPS" > /own/word',
                    "cp /own/word /tmp/mount/EXPT/said",
                    "exit 3",
                ),
            ]
        },
    }
    template = read_template(Document("framework.yml", own, None), None)
    site.config = replace(site.config, roles=template.roles, template_text=template.text)
    site.runs('exec bash -c "$TRIAL_KEEPER_COMMAND"')

    async with site.manager() as service:
        await service.submit(site.settings())
        ended = await site.has_ended()
        assert ended.exit_code == 3
        await until(site.is_clean, "nothing is left", DEADLINE_S)
    assert (tmp_path / "EXPT" / "said").read_text() == "mine 127.0.0.1\n"


async def test_jobs_with_the_same_framework_name_run_one_after_the_other(site):
    async with site.manager() as service:
        await service.submit(site.settings("trial1"))
        with pytest.raises(
            RetryableError, match=f"cannot create Framework {NAME} yet: job trial1 has the same name"
        ):
            await service.submit(site.settings("tRiAl1"))
        assert await service.stop("trial1")
        await site.has_ended()
        await service.submit(site.settings("tRiAl1"))


async def test_the_pending_reason_of_a_job_says_that_no_node_is_available_if_the_cluster_is_full(site):
    async with site.manager() as service:
        site.cluster.node.is_full = True
        await service.submit(site.settings())
        full = "Unschedulable: 0/1 nodes are available"
        await until(lambda: full in service.problem, "the reason is shown", DEADLINE_S)


async def test_the_pending_reason_is_shown_in_the_message_of_a_trial_and_in_the_problem_of_the_experiment(
    site, a_real_experiment
):
    site.cluster.node.missing_images.add("me/train:1")
    experiment = a_real_experiment("pass", trialConcurrency=1)
    why = 'ImagePullBackOff: Back-off pulling image "me/train:1": not found'

    def service_of(on_job_ended):
        kubernetes, operator = Kubernetes(site.folder / "kubeconfig", QUICK), FrameworkController(site.config)
        return KubernetesService(kubernetes, operator, experiment.folder.workspace, on_job_ended)

    async with a_manager_here(experiment, service_of) as engine:
        await until(lambda: why in engine.snapshot().problem, "the problem is shown", DEADLINE_S)
        (trial,) = engine.experiment.trials.values()
        shown = trial_view(engine.snapshot(), trial)
        assert (shown["state"], shown["message"]) == ("WAITING", f"not started yet: {why}")
        assert f"(not started yet: {why})" in trial_cells(shown)[2]
        assert summary_view(engine.snapshot())["clusterMessages"] == {trial.trial_id: shown["message"]}


async def test_a_new_manager_deletes_the_jobs_that_the_previous_manager_failed_to_delete(
    site, a_real_experiment
):
    experiment = a_real_experiment("pass", trialConcurrency=1, maxTrialNum=1)

    def service_of(on_job_ended):
        kubernetes, operator = Kubernetes(site.folder / "kubeconfig", QUICK), FrameworkController(site.config)
        return KubernetesService(kubernetes, operator, experiment.folder.workspace, on_job_ended)

    site.cluster.api.denied.add(("delete", "frameworks"))
    # The only trial fails, because run.sh is missing.
    async with a_manager_here(experiment, service_of) as engine:
        await until(lambda: engine.experiment.state.is_terminal, "the experiment is over", DEADLINE_S)
    assert site.store.list(SECRETS)
    site.cluster.api.denied.clear()
    async with a_manager_here(experiment, service_of):
        await until(site.is_clean, "nothing is left", DEADLINE_S)


async def test_the_pending_reason_is_read_from_events_if_the_pod_status_has_none(site):
    site.config = replace(site.config, storage=NfsStorage("nas", "/none"))
    async with site.manager() as service:
        await service.submit(site.settings())
        why = 'FailedMount: MountVolume.SetUp failed for volume "nni-vol" : '
        await until(
            lambda: service.pending_reason("trial1").startswith(why), "the reason is shown", DEADLINE_S
        )
        # The service ignores events of other experiments, and a FailedScheduling event of a pod that already has a node.
        pod = site.store.get(PODS, "default", f"{NAME}-worker-0")
        other = pod | {"metadata": pod["metadata"] | {"name": "other-0", "uid": "u"}}
        tell(site.store, other, "Failed", "of another")
        tell(site.store, pod, "FailedScheduling", "0/1 nodes", "default-scheduler")
        await until(lambda: service.pending_reason("trial1") == "", "the reason is cleared", DEADLINE_S)
        tell(site.store, pod, "FailedMount", "again,\n as it goes")
        await until(
            lambda: service.pending_reason("trial1") == "FailedMount: again, as it goes",
            "the new reason is shown",
            DEADLINE_S,
        )
        assert await service.stop("trial1")
        assert (await site.has_ended()).message.endswith(
            "was deleted on request; the job had not started: FailedMount: again, as it goes"
        )
        assert service._observed.warnings._newest == {}, "the warnings of an ended job must be deleted"


async def test_a_late_pod_status_removes_the_pending_reason_from_the_message_of_a_stopped_job(
    site, monkeypatch
):
    async with site.manager() as service:
        # The watches are disabled. The test calls the handlers itself, so that the change of the pod arrives last.
        monkeypatch.setattr(service, "_watch", lambda: None)
        service._on_pod(Synced())
        await service.submit(site.settings())
        await site.is_running()
        (pod,) = site.store.list(PODS)
        service._on_resource(Upserted(site.store.get(FRAMEWORKS, "default", NAME) | {"status": {}}))
        service._on_event(Upserted(tell(site.store, pod, "Failed", "no image")))
        assert service.pending_reason("trial1") == "Failed: no image"
        assert await service.stop("trial1")
        await until(lambda: not site.store.list(FRAMEWORKS), "the framework is deleted", DEADLINE_S)
        frameworks = [
            entry.after
            for entry in site.store.history
            if entry.kind == FRAMEWORKS and entry.after is not None
        ]
        service._on_resource(Upserted(frameworks[-1]))
        await asyncio.sleep(0)
        assert site.ends == []
        service._on_pod(Upserted(pod))
        service._on_pod(Deleted(pod))
        end = await site.has_ended()
    assert end.message == f"Framework {NAME} in namespace default was deleted on request"


async def test_one_warning_is_logged_if_the_login_may_not_list_events(site, caplog):
    site.cluster.api.denied.add(("list", "events"))
    site.config = replace(site.config, storage=NfsStorage("nas", "/none"))
    async with site.manager() as service:
        await service.submit(site.settings("trial1"))
        site.cluster.node.missing_images.add("me/train:1")
        await service.submit(site.settings("trial2"))
        assert (await service.stop("trial1"), await service.stop("trial2")) == (True, True)
        await site.has_ended(2)
        assert service.problem == ""
        # The service lists events twice, for warnings and for preemptions. Both calls are refused, but only one warning is
        # logged.
        assert site.cluster.api.counted()["list", "events"] == 2
    (said,) = [record.message for record in caplog.records if "events" in record.message]
    assert "cannot list events in namespace default" in said
    assert said.endswith(
        "without this right, lost nodes may not be detected, and the reasons of some pending pods are not shown"
    )


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_events_are_watched_again_after_a_missing_right_is_granted(site, caplog, monkeypatch, verb):
    monkeypatch.setattr("nni_manager.training_services.kubernetes.watch._DENIED_RETRY_DELAY_S", 0.05)
    site.cluster.api.denied.add((verb, "events"))
    site.config = replace(site.config, storage=NfsStorage("nas", "/none"))
    async with site.manager() as service:
        await service.submit(site.settings())
        denied = (verb, "events")
        await until(lambda: site.cluster.api.counted()[denied] > 4, "the calls are repeated", DEADLINE_S)
        site.cluster.api.denied.clear()
        await until(
            lambda: service.pending_reason("trial1").startswith("FailedMount: "),
            "the reason is shown",
            DEADLINE_S,
        )
    assert len([record for record in caplog.records if f"cannot {verb} events" in record.message]) == 1


async def test_the_pending_reason_of_a_job_names_a_failing_task_instead_of_a_waiting_task(site):
    both = [replace(site.config.roles[0], name=name, image=f"me/{name}:1") for name in ("ps", "worker")]
    site.config = replace(site.config, roles=tuple(both))

    site.cluster.node.missing_images.add("me/worker:1")
    async with site.manager() as service:
        await service.submit(site.settings())
        await until(lambda: service.pending_reason("trial1"), "ps waits at the barrier", DEADLINE_S)
        await until(
            lambda: "ImagePullBackOff" in service.pending_reason("trial1"),
            "the image is the reason",
            DEADLINE_S,
        )
        pods = {each["metadata"]["name"]: each["status"] for each in site.store.list(PODS)}
        (barrier,) = pods[f"{NAME}-ps-0"]["initContainerStatuses"]
        assert "running" in barrier["state"]
        site.cluster.node.missing_images.clear()
        site.cluster.node.look_again()
        await site.is_running()


async def test_the_pending_reason_of_a_job_without_pods_recommends_to_check_the_quota(site, monkeypatch):
    monkeypatch.setattr("nni_manager.training_services.kubernetes.observed._PODS_TIMEOUT_S", 0.2)
    site.store.create(QUOTAS, "default", {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}})
    async with site.manager() as service:
        await service.submit(site.settings())
        why = (
            "FrameworkController has created no pod of this job yet; check the namespace's quota with `kubectl "
            "describe quota -n default`, and check that FrameworkController runs"
        )
        await until(lambda: service.pending_reason("trial1") == why, "the reason is shown", DEADLINE_S)
        site.store.delete(QUOTAS, "default", "q")
        await site.is_running()
        assert service.problem == ""


async def test_a_manager_that_adopts_a_pending_job_reports_why_the_cluster_refuses_the_pod(site, monkeypatch):
    monkeypatch.setattr("nni_manager.training_services.kubernetes.missing_pods._FIRST_CHECK_S", 0.05)
    site.store.create(QUOTAS, "default", {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}})
    async with site.manager() as first:
        await first.submit(site.settings())
    async with site.manager() as second:
        assert await second.adopt("trial1") is JobPresence.RUNNING
        await until(
            lambda: "exceeded quota: q" in second.pending_reason("trial1"), "the quota is named", DEADLINE_S
        )


async def test_a_partially_created_job_of_a_previous_manager_is_deleted_and_created_again(site):
    async with site.manager() as first:
        site.cluster.api.misbehave(503, 2, at=("create", "secrets"))
        with pytest.raises(RetryableError):
            await first.submit(site.settings())
    async with site.manager() as second:
        assert await second.adopt("trial1") is JobPresence.UNKNOWN
        await until(lambda: not site.store.list(FRAMEWORKS), "the incomplete job is deleted", DEADLINE_S)
        await second.submit(site.settings())
        await site.is_running()


async def test_a_job_that_is_deleted_while_the_manager_adopts_it_is_unknown(site, monkeypatch):
    site.store.create(QUOTAS, "default", {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}})
    async with site.manager() as first:
        await first.submit(site.settings())
    async with site.manager() as second:
        has_secret = second._calls.has_secret

        async def delete_then_answer(name):
            found = await has_secret(name)
            site.store.delete(FRAMEWORKS, "default", name)
            await until(lambda: name not in second._observed.resources, "the watch shows it", DEADLINE_S)
            return found

        monkeypatch.setattr(second._calls, "has_secret", delete_then_answer)
        assert await second.adopt("trial1") is JobPresence.UNKNOWN


async def test_a_job_is_not_created_until_the_incomplete_job_of_the_same_name_is_deleted(site):
    async with site.manager() as first:
        site.cluster.api.misbehave(503, 2, at=("create", "secrets"))
        with pytest.raises(RetryableError):
            await first.submit(site.settings())
    half = site.store.list(FRAMEWORKS)[0]["metadata"]["uid"]
    async with site.manager() as second:
        site.cluster.api.misbehave(503, 2, at=("delete", "frameworks"))
        assert await second.adopt("trial1") is JobPresence.UNKNOWN
        with pytest.raises(RetryableError, match="another one of that name"):
            await second.submit(site.settings())
        await until(lambda: not site.store.list(FRAMEWORKS), "the incomplete job is deleted", DEADLINE_S)
        await second.submit(site.settings())
        await site.is_running()
        assert site.store.list(FRAMEWORKS)[0]["metadata"]["uid"] != half
        assert not site.ends


async def test_a_new_manager_deletes_only_ended_jobs_of_the_previous_manager(site):
    site.runs("case $TRIAL_KEEPER_JOB_ID in trial1) exit 0;; esac; exec sleep 100")
    async with site.manager() as first:
        # The cluster denies deletions. So the job of trial1 remains when the first manager exits.
        site.cluster.api.denied.add(("delete", "frameworks"))
        await first.submit(site.settings("trial1"))
        await first.submit(site.settings("trial2"))
        await site.has_ended()
        await site.is_running("nniexpexpttrialtrial2")
    site.cluster.api.denied.clear()
    assert len(site.store.list(FRAMEWORKS)) == len(site.store.list(SECRETS)) == 2
    async with site.manager() as second:
        assert await second.adopt("trial2") is JobPresence.RUNNING
        second.garbage_collect()
        await until(lambda: len(site.store.list(SECRETS)) == 1, "the ended job is deleted", DEADLINE_S)
        assert site.state("nniexpexpttrialtrial2") == "AttemptRunning"
        assert len(site.ends) == 1


async def test_a_delete_request_is_retried_until_the_cluster_answers(site, caplog, monkeypatch):
    monkeypatch.setattr(resource_calls, "_LAST_DELETES_S", 0.1)
    site.runs("exit 0")
    async with site.manager() as first:
        site.cluster.api.misbehave(503, 2000, at=("delete", "frameworks"))
        await first.submit(site.settings())
        await site.has_ended()
    assert f"cannot delete Framework {NAME} in namespace default: " in caplog.text
    assert f"; remove it with `{first.removal_command('trial1')}`" in caplog.text
    site.cluster.api.stop()
    async with site.manager() as second:
        second.garbage_collect()
        site.cluster.api._faults.clear()
        site.cluster.api.start()
        await until(site.is_clean, "nothing is left", DEADLINE_S)


@pytest.mark.parametrize("is_watched_first", [True, False])
async def test_a_job_that_another_client_deletes_during_its_creation_is_reported_as_deleted(
    site, monkeypatch, is_watched_first
):
    # There are two cases, because a watch reports the deletion of a job only if the watch's first list contained the job.
    is_deleted, is_reported = threading.Event(), threading.Event()
    make, lists, take = Kubernetes.create, Kubernetes.objects, KubernetesService._on_resource

    def create(cluster, resource, namespace, document):
        if resource.plural == "secrets":  # The job is deleted while the creation of its Secret is delayed.
            site.store.delete(FRAMEWORKS, "default", NAME)
            is_deleted.set()
            assert is_reported.wait(DEADLINE_S)
        return make(cluster, resource, namespace, document)

    def objects(cluster, resource, *arguments):
        if resource.plural == "frameworks" and not is_watched_first:
            assert is_deleted.wait(DEADLINE_S)
        return lists(cluster, resource, *arguments)

    def take_resource(service, change):
        take(service, change)
        if isinstance(change, Deleted if is_watched_first else Synced):
            is_reported.set()

    monkeypatch.setattr(Kubernetes, "create", create)
    monkeypatch.setattr(Kubernetes, "objects", objects)
    monkeypatch.setattr(KubernetesService, "_on_resource", take_resource)

    async with site.manager() as service:
        if is_watched_first:
            # adopt() returns after the watch has listed the objects, so the watch runs before the job is submitted.
            assert await service.adopt("another") is JobPresence.UNKNOWN
        await service.submit(site.settings())
        end = await site.has_ended()
        assert "was deleted, but not by this manager" in end.message


def test_a_late_watch_event_of_a_replaced_resource_does_not_end_the_new_job(site, monkeypatch):
    take, shown, held = KubernetesService._on_resource, set(), None

    def take_resource(service, change):
        if held is not None:
            held.append(change)
            return
        take(service, change)
        if isinstance(change, Upserted):
            shown.add(change.document["metadata"]["uid"])

    monkeypatch.setattr(KubernetesService, "_on_resource", take_resource)

    async def work():
        nonlocal held
        async with site.manager() as service:
            site.cluster.api.misbehave(503, 2, at=("create", "secrets"))
            with pytest.raises(RetryableError):
                await service.submit(site.settings())
            (first,) = (each["metadata"]["uid"] for each in site.store.list(FRAMEWORKS))
            await until(lambda: first in shown, "the watch has shown the first resource", DEADLINE_S)
            held = []
            site.store.delete(FRAMEWORKS, "default", NAME)
            await until(lambda: not site.store.list(FRAMEWORKS), "the first resource is deleted", DEADLINE_S)
            await service.submit(site.settings())
            await until(
                lambda: any(isinstance(change, Deleted) for change in held),
                "the watch has caught up",
                DEADLINE_S,
            )
            late, held = held, None
            for change in late:
                service._on_resource(change)
            await site.is_running()
            assert not site.ends
            assert await service.stop("trial1")
            end = await site.has_ended()
            assert end.message.endswith("was deleted on request")

    run(work())


async def test_the_service_polls_an_adopted_job_until_the_cluster_answers(site):
    site.cluster.api.stop()
    async with site.manager() as service:
        assert await service.adopt("trial1") is JobPresence.RUNNING
        site.cluster.api.misbehave(503, 3, at=("get", "frameworks"))
        site.cluster.api.start()
        end = await site.has_ended()
        assert (end.reason, end.is_unknown) == (ExitReason.JOB_LOST, True)
        assert service.problem == ""


async def test_the_number_of_list_and_watch_calls_is_independent_of_the_number_of_jobs(site, monkeypatch):
    # On a busy machine, the controller may create the pods so late that the service checks for missing pods. The calls of this
    # check would be counted, so the delay disables the check.
    monkeypatch.setattr(missing_pods, "_FIRST_CHECK_S", 1e6)
    site.cluster.node.is_full = True  # A full node keeps all jobs pending.
    async with site.manager() as service:
        await asyncio.gather(*(service.submit(site.settings(f"env-{number}")) for number in range(30)))
        await until(lambda: len(site.store.list(PODS)) == 30, "all pods exist", DEADLINE_S)
        counted = site.cluster.api.counted()
        assert counted["create", "frameworks"] == counted["create", "secrets"] == 30
        del counted["create", "frameworks"], counted["create", "secrets"]
        # The service watches events twice: once for warnings, and once for preemptions.
        for verb in ("list", "watch"):
            assert counted.pop((verb, "events")) == 2
        assert dict(counted) == dict.fromkeys(
            ((verb, plural) for verb in ("list", "watch") for plural in ("frameworks", "pods")), 1
        )


def test_all_missing_permissions_are_reported_before_any_object_is_created(site):
    kubernetes = Kubernetes(site.folder / "kubeconfig", QUICK)
    operator = FrameworkController(site.config)
    check(kubernetes, operator, "default")
    site.cluster.api.denied |= {("create", "secrets"), ("watch", "pods")}
    with pytest.raises(UserError, match=r"may not watch pods(.|\n)*may not create secrets"):
        check(kubernetes, operator, "default")
    kubernetes.close()
