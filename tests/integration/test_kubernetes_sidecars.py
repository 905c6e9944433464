"""Jobs whose tasks have ended, while a sidecar of the cluster keeps their pods running."""

import pytest
from deadlines import DEADLINE_S
from kube_store import PODS
from kubeflow_site import CONFIGS, KINDS, a_kubeflow_site
from real_experiment import until

pytest.importorskip("kubernetes")

from nni_manager.training_services.base import JobPresence
from nni_manager.training_services.kubernetes import backend
from trial_keeper.wire.reasons import ExitReason


@pytest.fixture
def site(tmp_path, monkeypatch):
    with a_kubeflow_site(tmp_path, monkeypatch) as site:
        yield site


def add_sidecar(site, command="exec sleep 100"):
    """Add a container to each new pod, as Istio's webhook does."""

    def webhook(kind, document):
        if kind is PODS:
            sidecar = {"name": "istio-proxy", "image": "istio/proxyv2:1", "command": ["sh", "-c", command]}
            document["spec"]["containers"].insert(0, sidecar)

    site.store.webhooks.append(webhook)


def phases(site):
    return [pod["status"]["phase"] for pod in site.store.list(PODS)]


@pytest.mark.parametrize(
    ("script", "exit_code"), [("true", 0), ("exit 31", 31)], ids=["successful", "failed"]
)
@pytest.mark.parametrize("kubernetes", ["tf-operator", "pytorch-operator", "job"])
async def test_the_manager_ends_a_job_if_its_tasks_have_ended_and_only_a_sidecar_keeps_its_pods_running(
    site, monkeypatch, caplog, kubernetes, script, exit_code
):
    monkeypatch.setattr(backend, "_SIDECAR_GRACE_S", 0.1)
    add_sidecar(site)
    site.config = CONFIGS[kubernetes]
    site.runs(script)
    async with site.manager() as service:
        await service.submit(site.settings())
        end = await site.has_ended()
        assert (end.exit_code, end.reason) == (exit_code, ExitReason.KEEPER_LOST)
        assert "the manager ends the job: sidecar istio-proxy still runs" in end.message
        await until(lambda: not site.store.list(PODS), "no pod is left", DEADLINE_S)
        assert not site.store.list(KINDS[kubernetes])
    assert (
        'keep the sidecar out of the pods, e.g. with annotation sidecar.istio.io/inject: "false"'
        in caplog.text
    )


async def test_a_failed_task_ends_its_job_although_a_sidecar_and_other_tasks_still_run(site, monkeypatch):
    monkeypatch.setattr(backend, "_SIDECAR_GRACE_S", 0.1)
    add_sidecar(site)
    site.config = CONFIGS["pytorch-operator"]
    site.runs('[ "$TRIAL_KEEPER_ROLE" = worker ] || exec sleep 100; exit 31')
    async with site.manager() as service:
        await service.submit(site.settings())
        end = await site.has_ended()
        assert (end.exit_code, end.reason) == (31, ExitReason.KEEPER_LOST)


async def test_the_operator_ends_a_job_if_its_sidecar_exits_after_its_task(site, monkeypatch):
    monkeypatch.setattr(backend, "_SIDECAR_GRACE_S", 10 * DEADLINE_S)
    add_sidecar(site, f"while [ ! -e {site.folder}/over ]; do sleep 0.05; done")
    site.runs(f"touch {site.folder}/over; exit 31")
    async with site.manager() as service:
        await service.submit(site.settings())
        end = await site.has_ended()
        assert end.exit_code == 31
        assert end.message.startswith("Kubernetes reports Job ")


async def test_a_job_whose_tasks_ended_while_no_manager_ran_ends_although_a_sidecar_still_runs(
    site, monkeypatch
):
    monkeypatch.setattr(backend, "_SIDECAR_GRACE_S", 0.1)
    add_sidecar(site)
    site.runs(f"while [ ! -e {site.folder}/over ]; do sleep 0.05; done; exit 31")
    async with site.manager() as first:
        await first.submit(site.settings())
        await until(lambda: "Running" in phases(site), "the pod runs", DEADLINE_S)
    (site.folder / "over").touch()

    def keeper_has_ended():
        (pod,) = site.store.list(PODS)
        return any("terminated" in each["state"] for each in pod["status"]["containerStatuses"])

    await until(keeper_has_ended, "the keeper's container has ended", DEADLINE_S)
    async with site.manager() as second:
        assert await second.adopt("trial1") is JobPresence.RUNNING
        end = await site.has_ended()
        assert end.exit_code == 31
