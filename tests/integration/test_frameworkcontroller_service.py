"""Jobs of one experiment on a Kubernetes cluster of our own: what is made, what is told of their ends, and what is left."""

import asyncio
import contextlib
import shlex
import threading
from dataclasses import replace

import pytest
from kube_controllers import FRAMEWORKS
from kube_events import tell
from kube_site import NAME, QUICK, TIMEOUT_S, a_site, run
from kube_store import NAMESPACES, PODS, QUOTAS, SECRETS
from real_experiment import a_manager_here, until

pytest.importorskip("kubernetes")

from nni_manager.client.watch import trial_cells
from nni_manager.config.document import Document
from nni_manager.config.framework_template import read_template
from nni_manager.config.model import KubernetesConfig, NfsStorage
from nni_manager.engine.serializers import trial_view
from nni_manager.errors import RetryableError, UserError
from nni_manager.training_services.base import JobPresence
from nni_manager.training_services.errors import ClusterUnavailable, QuotaExceeded, Unauthenticated
from nni_manager.training_services.frameworkcontroller.operator import FrameworkController
from nni_manager.training_services.kubernetes import resource_calls
from nni_manager.training_services.kubernetes.api import Kubernetes
from nni_manager.training_services.kubernetes.backend import KubernetesService
from nni_manager.training_services.kubernetes.errors import (
    AlreadyExists,
    Conflict,
)
from nni_manager.training_services.kubernetes.preflight import check
from nni_manager.training_services.kubernetes.render import SecretContent
from nni_manager.training_services.kubernetes.watch import Deleted, Synced, Upserted
from trial_keeper.wire.reasons import ExitReason


@pytest.fixture
def site(tmp_path, monkeypatch):
    with a_site(tmp_path, monkeypatch) as site:
        yield site


def test_a_job_runs_with_its_token_and_command_and_leaves_nothing_when_it_has_ended(site):
    expected = "c0ffee true /tmp/mount"
    site.runs(
        f'test "$TRIAL_KEEPER_TOKEN $TRIAL_KEEPER_COMMAND {shlex.quote("/tmp/mount")}" = {shlex.quote(expected)} &&'
        ' [ -d "$TRIAL_KEEPER_MOUNT" ]'
    )

    async def work():
        async with site.manager() as service:
            await service.submit(site.settings())
            end = await site.has_ended()
            assert (end.job_id, end.exit_code, end.message) == ("trial1", 0, "")
            await until(site.is_clean, "nothing is left", TIMEOUT_S)
            assert len(site.ends) == 1

    run(work())


def test_a_job_that_fails_brings_its_exit_code_and_its_last_words(site):
    site.runs("echo trial-keeper: cannot find the mount >&2; exit 105")
    site.cluster.api.misbehave(503, 1, at=("watch", "pods"))  # they are told of later than Frameworks

    async def work():
        async with site.manager() as service:
            await service.submit(site.settings())
            end = await site.has_ended()
            assert (end.exit_code, end.reason) == (105, ExitReason.KEEPER_LOST)
            assert end.message == (
                f"FrameworkController reports {NAME}: ContainerUnrecognizedFailed, code 105; FailedTaskCount 1 has reached "
                "MinFailedTaskCount 1 in the TaskRole\ntrial-keeper: cannot find the mount"
            )
            await until(site.is_clean, "nothing is left", TIMEOUT_S)

    run(work())


@pytest.mark.parametrize(
    ("how", "reason", "told"),
    [
        (
            lambda node: node.kill("default", f"{NAME}-worker-0", "OOMKilled"),
            ExitReason.OUT_OF_MEMORY,
            "code 137",
        ),
        (
            lambda node: node.evict("default", f"{NAME}-worker-0"),
            ExitReason.KEEPER_LOST,
            "Evicted: The node was low on resource: memory.",
        ),
    ],
)
def test_a_container_that_the_node_ends_is_told_with_the_nodes_reason(site, how, reason, told):
    async def work():
        async with site.manager() as service:
            await service.submit(site.settings())
            await site.is_running()
            how(site.cluster.node)
            end = await site.has_ended()
            assert end.reason is reason
            assert told in end.message

    run(work())


def test_a_stopped_job_is_asked_to_end_and_told_when_it_is_gone(site):
    site.runs("trap 'sleep 0.5; exit 9' TERM; sleep 100 & wait")

    async def work():
        async with site.manager() as service:
            assert not await service.stop("trial1")
            await service.submit(site.settings())
            await site.is_running()
            (process,) = site.cluster.node.processes("default", f"{NAME}-worker-0")
            assert await service.stop("trial1")
            end = await site.has_ended()
            assert process.poll() == 9, "it had its time, and was waited for"
            assert (end.exit_code, end.reason) == (None, ExitReason.JOB_LOST)
            assert end.message == f"Framework {NAME} in namespace default was deleted on request"
            await until(site.is_clean, "nothing is left", TIMEOUT_S)

    run(work())


def test_a_job_that_somebody_deleted_ends_with_that_reason(site):
    async def work():
        async with site.manager() as service:
            await service.submit(site.settings())
            await site.is_running()
            site.store.delete(FRAMEWORKS, "default", NAME)
            end = await site.has_ended()
            assert end.message.endswith("was deleted, but not by this manager")
            assert end.reason is ExitReason.JOB_LOST

    run(work())


def test_a_job_deleted_while_the_server_forgets_is_missed_in_the_new_list(site):
    async def work():
        async with site.manager() as service:
            await service.submit(site.settings())
            await site.is_running()
            with site.store.changed:
                site.store.delete(FRAMEWORKS, "default", NAME)
                site.cluster.api.forget_history()
            end = await site.has_ended()
            assert "was deleted, but not by this manager" in end.message

    run(work())


def test_a_namespace_that_is_deleted_ends_all_jobs_in_it(site):
    site.store.create(NAMESPACES, "", {"metadata": {"name": "team"}})
    site.config = KubernetesConfig(
        "frameworkcontroller", site.config.storage, site.config.roles, namespace="team"
    )

    async def work():
        async with site.manager() as service:
            await service.submit(site.settings("trial1"))
            await service.submit(site.settings("trial2"))
            site.store.delete(NAMESPACES, "", "team")
            await site.has_ended(2)
            assert {end.reason for end in site.ends} == {ExitReason.JOB_LOST}
            await until(lambda: not site.store.find(NAMESPACES, "", "team"), "it is gone", TIMEOUT_S)
            with pytest.raises(RetryableError, match='namespaces "team" not found'):
                await service.submit(site.settings("trial3"))

    run(work())


def test_a_server_that_is_away_is_a_problem_and_no_end(site):
    async def work():
        async with site.manager() as service:
            await service.submit(site.settings())
            await site.is_running()
            site.cluster.api.stop()
            await until(lambda: service.problem, "the problem is told", TIMEOUT_S)
            with pytest.raises(RetryableError, match="does not answer"):
                await service.submit(site.settings("trial2"))
            assert await service.stop("trial1")
            site.cluster.api.start()
            end = await site.has_ended()
            assert "was deleted on request" in end.message
            await service.submit(site.settings("trial2"))
            await until(lambda: not service.problem, "it is over", TIMEOUT_S)

    run(work())


def test_conflicts_and_a_server_that_is_overloaded_cost_no_job(site):
    site.runs("true")
    for verb in ("create", "delete"):
        for how in ("conflict", 429, 503):
            site.cluster.api.misbehave(how, 1, at=(verb, ""), retry_after=0)

    async def work():
        async with site.manager() as service:
            for number in range(6):
                for _ in range(5):  # the engine does so, with pauses
                    with contextlib.suppress(RetryableError):
                        await service.submit(site.settings(f"trial{number}"))
                        break
            await site.has_ended(6)
            assert {end.exit_code for end in site.ends} == {0}
            await until(site.is_clean, "nothing is left", TIMEOUT_S)

    run(work())


CREATE = ("create", "frameworks")
LIMIT = "frameworks is forbidden: maximum cpu usage per Container is 2, but limit is 99"
QUOTA = "frameworks is forbidden: exceeded quota: team, requested: count/frameworks=1, used: 2, limited: 2"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((403, "Forbidden", LIMIT), "maximum cpu usage per Container is 2"),
        ((403, "Forbidden", "failed quota: team: must specify cpu"), "must specify cpu"),
        (
            (422, "Invalid", "spec.taskRoles: Invalid value"),
            "spec.taskRoles: Invalid value; fix the fields that the answer names",
        ),
        ((400, "BadRequest", "admission webhook says no"), "admission webhook says no"),
    ],
)
@pytest.mark.parametrize("plural", ["frameworks", "secrets"])
def test_what_kubernetes_refuses_for_good_is_said_once_and_leaves_nothing(site, answer, says, plural):
    async def work():
        async with site.manager() as service:
            site.cluster.api.misbehave(answer, 1, at=("create", plural))
            with pytest.raises(UserError, match=says):
                await service.submit(site.settings())
            assert site.cluster.api.counted()["create", plural] == 1
            assert not await service.stop("trial1"), "there is no such job"
            await until(site.is_clean, "nothing is left", TIMEOUT_S)
        assert not site.ends

    run(work())


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((403, "Forbidden", QUOTA), QuotaExceeded),
        ((401, "Unauthorized", "Unauthorized"), Unauthenticated),
        (408, ClusterUnavailable),
        (429, ClusterUnavailable),
        (500, ClusterUnavailable),
        (520, ClusterUnavailable),
        ("conflict", Conflict),
        ("drop", ClusterUnavailable),
    ],
)
def test_what_may_pass_is_tried_again(site, answer, kind):
    async def work():
        async with site.manager() as service:
            site.cluster.api.misbehave(answer, QUICK.tries, at=CREATE)
            with pytest.raises(RetryableError) as raised:
                await service.submit(site.settings())
            assert isinstance(raised.value, kind)
            site.cluster.api.stop_misbehaving(CREATE)
            await service.submit(site.settings())
            await site.is_running()

    run(work())


def test_calls_that_hang_delay_the_end_of_no_job(site):
    site.runs("true")
    site.cluster.api.misbehave("hang", 100, at=("delete", "frameworks"))

    async def work():
        async with site.manager() as service:
            for number in range(6):  # more than there are callers
                await service.submit(site.settings(f"trial{number}"))
            await site.has_ended(6)
            assert len(site.store.list(FRAMEWORKS)) == 6, "the deletes hang"
            site.cluster.api.stop_misbehaving(("delete", "frameworks"))
            site.cluster.api.is_hung.set()
            await until(site.is_clean, "nothing is left", TIMEOUT_S)

    run(work())


def test_a_submission_that_was_lost_on_its_way_back_is_taken_up(site):
    async def work():
        async with site.manager() as service:
            site.cluster.api.misbehave(503, 2, at=("create", "secrets"))
            with pytest.raises(RetryableError):
                await service.submit(site.settings())
            assert not site.store.list(SECRETS)
            await service.submit(site.settings())
            await service.submit(site.settings())
            assert len(site.store.list(FRAMEWORKS)) == len(site.store.list(SECRETS)) == 1
            await site.is_running()

    run(work())


class ShareWithKey:
    """One that has a key of its own."""

    def secrets(self):
        return (SecretContent("-key", "Opaque", {"key": "c0a1"}),)

    def close(self):
        pass


def test_the_key_of_a_storage_belongs_to_the_job_and_the_token_is_made_when_all_else_is(site):
    site.share = ShareWithKey()

    async def work():
        async with site.manager() as service:
            await service.submit(site.settings())
            (framework,) = site.store.list(FRAMEWORKS)
            secrets = site.store.list(SECRETS)
            secrets.sort(key=lambda each: int(each["metadata"]["resourceVersion"]))
            assert [each["metadata"]["name"] for each in secrets] == [f"{NAME}-key", NAME]
            (owner,) = secrets[0]["metadata"]["ownerReferences"]
            assert owner["uid"] == framework["metadata"]["uid"]

    run(work())


def test_a_job_of_a_users_own_framework_runs_its_commands_with_the_users_volumes(site, tmp_path):
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

    async def work():
        async with site.manager() as service:
            await service.submit(site.settings())
            ended = await site.has_ended()
            assert ended.exit_code == 3
            await until(site.is_clean, "nothing is left", TIMEOUT_S)

    run(work())
    assert (tmp_path / "EXPT" / "said").read_text() == "mine 127.0.0.1\n"


def test_two_jobs_whose_frameworks_would_have_one_name_do_not_mix(site):
    async def work():
        async with site.manager() as service:
            await service.submit(site.settings("trial1"))
            with pytest.raises(
                RetryableError, match=f"cannot create Framework {NAME} yet: job trial1 has the same name"
            ):
                await service.submit(site.settings("tRiAl1"))
            assert await service.stop("trial1")
            await site.has_ended()
            await service.submit(site.settings("tRiAl1"))

    run(work())


def test_why_a_pod_does_not_start_is_what_people_are_told(site):
    async def work():
        async with site.manager() as service:
            site.cluster.node.missing_images.add("me/train:1")
            await service.submit(site.settings())
            why = 'ImagePullBackOff: Back-off pulling image "me/train:1": not found'
            # Events and pods have a watch each: an event of the same failure, with less to say, may arrive first.
            await until(
                lambda: service.pending_reason("trial1") == why, "the pod's own reason is shown", TIMEOUT_S
            )
            assert service.problem == f"Kubernetes has not started 1 of 1 jobs; {NAME} is pending: {why}"
            site.cluster.node.missing_images.clear()
            site.cluster.node.look_again()
            await site.is_running()
            await until(lambda: not service.problem, "it is over", TIMEOUT_S)
            assert service.pending_reason("trial1") == ""
            site.cluster.node.is_full = True
            await service.submit(site.settings("trial2"))
            await until(
                lambda: "Unschedulable: 0/1 nodes are available" in service.problem, "told", TIMEOUT_S
            )

    run(work())


def test_why_a_trial_does_not_start_is_its_message_and_the_experiments_problem(site, a_real_experiment):
    site.cluster.node.missing_images.add("me/train:1")
    experiment = a_real_experiment("pass", trialConcurrency=1)
    why = 'ImagePullBackOff: Back-off pulling image "me/train:1": not found'

    def service_of(on_job_ended):
        kubernetes, operator = Kubernetes(site.folder / "kubeconfig", QUICK), FrameworkController(site.config)
        return KubernetesService(kubernetes, operator, experiment.folder.workspace, on_job_ended)

    async def work():
        async with a_manager_here(experiment, service_of) as engine:
            await until(lambda: why in engine.snapshot().problem, "the problem is told", TIMEOUT_S)
            (trial,) = engine.experiment.trials.values()
            shown = trial_view(engine.snapshot(), trial)
            assert (shown["state"], shown["message"]) == ("WAITING", f"not started yet: {why}")
            assert f"(not started yet: {why})" in trial_cells(shown)[2]

    run(work())


def test_a_manager_that_goes_on_deletes_what_the_one_before_could_not(site, a_real_experiment):
    experiment = a_real_experiment("pass", trialConcurrency=1, maxTrialNum=1)

    def service_of(on_job_ended):
        kubernetes, operator = Kubernetes(site.folder / "kubeconfig", QUICK), FrameworkController(site.config)
        return KubernetesService(kubernetes, operator, experiment.folder.workspace, on_job_ended)

    async def work():
        site.cluster.api.denied.add(("delete", "frameworks"))
        async with a_manager_here(experiment, service_of) as engine:  # whose only trial finds no run.sh
            await until(lambda: engine.experiment.state.is_over, "it is over", TIMEOUT_S)
        assert site.store.list(SECRETS)
        site.cluster.api.denied.clear()
        async with a_manager_here(experiment, service_of):
            await until(site.is_clean, "nothing is left", TIMEOUT_S)

    run(work())


def test_what_is_in_no_status_is_told_from_events(site):
    site.config = replace(site.config, storage=NfsStorage("nas", "/none"))

    async def work():
        async with site.manager() as service:
            await service.submit(site.settings())
            await until(lambda: service.pending_reason("trial1"), "it is told", TIMEOUT_S)
            assert service.pending_reason("trial1").startswith(
                'FailedMount: MountVolume.SetUp failed for volume "nni-vol" : '
            )
            # Of other experiments and of before: they are no matter of this one.
            pod = site.store.get(PODS, "default", f"{NAME}-worker-0")
            other = pod | {"metadata": pod["metadata"] | {"name": "other-0", "uid": "u"}}
            tell(site.store, other, "Failed", "of another")
            tell(site.store, pod, "FailedScheduling", "0/1 nodes", "default-scheduler")
            await until(lambda: service.pending_reason("trial1") == "", "it has a node", TIMEOUT_S)
            tell(site.store, pod, "FailedMount", "again,\n as it goes")
            await until(
                lambda: service.pending_reason("trial1") == "FailedMount: again, as it goes",
                "told",
                TIMEOUT_S,
            )
            assert await service.stop("trial1")
            assert (await site.has_ended()).message.endswith(
                "was deleted on request; the job had not started: FailedMount: again, as it goes"
            )
            assert service._observed.warnings._newest == {}, "nothing is kept of it"

    run(work())


def test_a_login_that_may_not_see_events_does_without_and_says_so_once(site, caplog):
    site.cluster.api.denied.add(("list", "events"))
    site.config = replace(site.config, storage=NfsStorage("nas", "/none"))

    async def work():
        async with site.manager() as service:
            await service.submit(site.settings("trial1"))
            site.cluster.node.missing_images.add("me/train:1")
            await service.submit(site.settings("trial2"))
            assert (await service.stop("trial1"), await service.stop("trial2")) == (True, True)
            await site.has_ended(2)
            assert service.problem == ""
            assert site.cluster.api.counted()["list", "events"] == 1

    run(work())
    (said,) = [record.message for record in caplog.records if "events" in record.message]
    assert "cannot list events in namespace default" in said
    assert said.endswith("without this right, the reasons of some pending pods are not shown")


def test_of_tasks_that_wait_for_each_other_the_one_that_cannot_start_is_told(site):
    both = [replace(site.config.roles[0], name=name, image=f"me/{name}:1") for name in ("ps", "worker")]
    site.config = replace(site.config, roles=tuple(both))

    site.cluster.node.missing_images.add("me/worker:1")

    async def work():
        async with site.manager() as service:
            await service.submit(site.settings())
            await until(
                lambda: service.pending_reason("trial1"), "ps waits at the barrier, and why", TIMEOUT_S
            )
            await until(lambda: "ImagePullBackOff" in service.pending_reason("trial1"), "why", TIMEOUT_S)
            pods = {each["metadata"]["name"]: each["status"] for each in site.store.list(PODS)}
            (barrier,) = pods[f"{NAME}-ps-0"]["initContainerStatuses"]
            assert "running" in barrier["state"]
            site.cluster.node.missing_images.clear()
            site.cluster.node.look_again()
            await site.is_running()

    run(work())


def test_pods_that_an_operator_cannot_make_are_missed(site, monkeypatch):
    monkeypatch.setattr("nni_manager.training_services.kubernetes.observed._PODS_TIMEOUT_S", 0.2)
    site.store.create(QUOTAS, "default", {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}}})

    async def work():
        async with site.manager() as service:
            await service.submit(site.settings())
            await until(lambda: service.pending_reason("trial1"), "it is missed", TIMEOUT_S)
            assert service.pending_reason("trial1") == (
                "FrameworkController has created no pod of this job yet; check the namespace's quota with `kubectl "
                "describe quota -n default`, and check that FrameworkController runs"
            )
            site.store.delete(QUOTAS, "default", "q")
            await site.is_running()
            assert service.problem == ""

    run(work())


def test_a_later_manager_finds_the_jobs_of_an_earlier_one(site):
    site.runs("case $TRIAL_KEEPER_JOB_ID in trial2) echo no memory; exit 1;; esac; exec sleep 100")

    async def work():
        async with site.manager() as first:
            await first.submit(site.settings("trial1"))
            await site.is_running()
            first.on_job_ended = lambda ended: None
            # As a manager that dies: what has completed is not cleared away.
            site.cluster.api.denied.add(("delete", "frameworks"))
            await first.submit(site.settings("trial2"))
            await until(
                lambda: site.state("nniexpexpttrialtrial2") == "Completed", "one has ended", TIMEOUT_S
            )
        site.cluster.api.denied.clear()
        async with site.manager() as second:
            assert [await second.adopt(f"trial{number}") for number in (1, 2, 3)] == [
                JobPresence.RUNNING,
                JobPresence.ENDED,
                JobPresence.UNKNOWN,
            ]
            assert "code 1" in second.termination_message("trial2")
            await until(lambda: site.state("nniexpexpttrialtrial2") is None, "it is cleared away", TIMEOUT_S)
            assert await second.stop("trial1")
            end = await site.has_ended()
            assert end.job_id == "trial1"

    run(work())


def test_a_job_that_an_earlier_manager_made_by_half_is_made_anew(site):
    async def work():
        async with site.manager() as first:
            site.cluster.api.misbehave(503, 2, at=("create", "secrets"))
            with pytest.raises(RetryableError):
                await first.submit(site.settings())
        async with site.manager() as second:
            assert await second.adopt("trial1") is JobPresence.UNKNOWN
            await until(lambda: not site.store.list(FRAMEWORKS), "the half is gone", TIMEOUT_S)
            await second.submit(site.settings())
            await site.is_running()

    run(work())


def test_a_half_that_cannot_be_deleted_yet_is_not_taken_for_the_new_job(site):
    async def work():
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
            await until(lambda: not site.store.list(FRAMEWORKS), "the half is gone", TIMEOUT_S)
            await second.submit(site.settings())
            await site.is_running()
            assert site.store.list(FRAMEWORKS)[0]["metadata"]["uid"] != half
            assert not site.ends

    run(work())


def test_what_an_earlier_manager_left_of_ended_jobs_is_deleted_and_nothing_else(site):
    site.runs("case $TRIAL_KEEPER_JOB_ID in trial1) exit 0;; esac; exec sleep 100")

    async def work():
        async with site.manager() as first:
            # It tells the end, and dies before it has deleted what has ended.
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
            await until(lambda: len(site.store.list(SECRETS)) == 1, "one is cleared away", TIMEOUT_S)
            assert site.state("nniexpexpttrialtrial2") == "AttemptRunning"
            assert len(site.ends) == 1

    run(work())


def test_what_is_cleared_away_is_asked_for_until_the_cluster_answers(site, caplog, monkeypatch):
    monkeypatch.setattr(resource_calls, "_LAST_DELETES_S", 0.1)
    site.runs("exit 0")

    async def work():
        async with site.manager() as first:
            site.cluster.api.misbehave(503, 2000, at=("delete", "frameworks"))
            await first.submit(site.settings())
            await site.has_ended()
        assert f"cannot delete Framework {NAME} in namespace default in time" in caplog.text
        site.cluster.api.stop()
        async with site.manager() as second:
            second.garbage_collect()
            site.cluster.api._faults.clear()
            site.cluster.api.start()
            await until(site.is_clean, "nothing is left", TIMEOUT_S)

    run(work())


@pytest.mark.parametrize("is_watched_first", [True, False])
def test_a_job_that_somebody_deletes_while_it_is_being_made_is_lost(site, monkeypatch, is_watched_first):
    # Where it is listed only afterwards, no watch ever shows it.
    is_deleted, is_told = threading.Event(), threading.Event()
    make, lists, take = Kubernetes.create, Kubernetes.objects, KubernetesService._on_resource

    def create(cluster, resource, namespace, document):
        if resource.plural == "secrets":  # the answer takes its time
            site.store.delete(FRAMEWORKS, "default", NAME)
            is_deleted.set()
            assert is_told.wait(TIMEOUT_S)
        return make(cluster, resource, namespace, document)

    def objects(cluster, resource, *arguments):
        if resource.plural == "frameworks" and not is_watched_first:
            assert is_deleted.wait(TIMEOUT_S)
        return lists(cluster, resource, *arguments)

    def take_resource(service, change):
        take(service, change)
        if isinstance(change, Deleted if is_watched_first else Synced):
            is_told.set()

    monkeypatch.setattr(Kubernetes, "create", create)
    monkeypatch.setattr(Kubernetes, "objects", objects)
    monkeypatch.setattr(KubernetesService, "_on_resource", take_resource)

    async def work():
        async with site.manager() as service:
            if is_watched_first:
                assert await service.adopt("another") is JobPresence.UNKNOWN  # waits for the list
            await service.submit(site.settings())
            end = await site.has_ended()
            assert "was deleted, but not by this manager" in end.message

    run(work())


def test_a_watch_that_lags_behind_the_replacement_of_a_resource_ends_no_job(site, monkeypatch):
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
            await until(lambda: first in shown, "the watch has shown the first resource", TIMEOUT_S)
            held = []
            site.store.delete(FRAMEWORKS, "default", NAME)
            await until(lambda: not site.store.list(FRAMEWORKS), "the first resource is gone", TIMEOUT_S)
            await service.submit(site.settings())
            await until(
                lambda: any(isinstance(change, Deleted) for change in held),
                "the watch has caught up",
                TIMEOUT_S,
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


def test_a_stop_deletes_nothing_of_others(site):
    theirs = {
        "metadata": {"name": NAME, "labels": {"app": "theirs"}},
        "spec": {"taskRoles": [], "executionType": "Create"},
    }

    async def work():
        site.store.create(FRAMEWORKS, "default", theirs)
        async with site.manager() as service:
            with pytest.raises(AlreadyExists, match="already exists; delete the object with kubectl"):
                await service.submit(site.settings())
            assert not await service.stop("trial1"), "there is no such job"
        assert site.store.find(FRAMEWORKS, "default", NAME) is not None
        assert not site.ends

    run(work())


def test_a_job_that_no_list_showed_is_asked_for_until_the_cluster_answers(site):
    async def work():
        site.cluster.api.stop()
        async with site.manager() as service:
            assert await service.adopt("trial1") is JobPresence.RUNNING
            site.cluster.api.misbehave(503, 3, at=("get", "frameworks"))
            site.cluster.api.start()
            assert (await site.has_ended()).reason is ExitReason.JOB_LOST
            assert service.problem == ""

    run(work())


def test_while_the_server_is_away_jobs_of_before_pass_for_running_and_are_looked_at_later(site):
    async def work():
        async with site.manager() as first:
            await first.submit(site.settings())
            await site.is_running()
        site.cluster.api.stop()
        async with site.manager() as second:
            assert await second.adopt("trial1") is JobPresence.RUNNING
            assert await second.adopt("trial2") is JobPresence.RUNNING
            site.cluster.api.start()
            end = await site.has_ended()
            assert (end.job_id, end.reason) == ("trial2", ExitReason.JOB_LOST)
            assert await second.stop("trial1")
            await site.has_ended(2)

    run(work())


def test_calls_do_not_grow_with_the_jobs_that_run(site):
    site.cluster.node.is_full = True  # they wait, and nobody asks

    async def work():
        async with site.manager() as service:
            await asyncio.gather(*(service.submit(site.settings(f"env-{number}")) for number in range(30)))
            await until(lambda: len(site.store.list(PODS)) == 30, "all are there", TIMEOUT_S)
            counted = site.cluster.api.counted()
            assert counted["create", "frameworks"] == counted["create", "secrets"] == 30
            del counted["create", "frameworks"], counted["create", "secrets"]
            assert dict(counted) == dict.fromkeys(
                ((verb, plural) for verb in ("list", "watch") for plural in ("frameworks", "pods", "events")),
                1,
            )

    run(work())


def test_what_the_cluster_lacks_is_told_before_anything_is_made(site):
    kubernetes = Kubernetes(site.folder / "kubeconfig", QUICK)
    operator = FrameworkController(site.config)
    check(kubernetes, operator, "default")
    site.cluster.api.denied |= {("create", "secrets"), ("watch", "pods")}
    with pytest.raises(UserError, match=r"may not watch pods(.|\n)*may not create secrets"):
        check(kubernetes, operator, "default")
    kubernetes.close()
