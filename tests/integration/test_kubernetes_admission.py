"""Jobs on Kubernetes that an admission webhook of the cluster changes at their creation."""

import pytest
from deadlines import DEADLINE_S
from kube_controllers import FRAMEWORKS
from kube_site import a_site
from kube_store import SECRETS
from real_experiment import until

pytest.importorskip("kubernetes")

from nni_manager.training_services.frameworkcontroller.operator import FrameworkController
from nni_manager.training_services.kubernetes.errors import RequestInvalid


@pytest.fixture
def site(tmp_path, monkeypatch):
    with a_site(tmp_path, monkeypatch) as site:
        yield site


def change_labels(site, change):
    """Let a webhook of the cluster change the labels of new Frameworks."""

    def webhook(kind, document):
        if kind == FRAMEWORKS:
            change(document["metadata"]["labels"])

    site.store.webhooks.append(webhook)


@pytest.mark.parametrize(
    ("label", "value", "change"),
    [
        ("app", "nni-kubernetes-trial", lambda labels: labels.update(app="research")),
        ("expId", "EXPT", lambda labels: labels.pop("expId")),
        ("trialId", "trial1", lambda labels: labels.pop("trialId")),
    ],
)
async def test_a_job_is_refused_and_deleted_if_the_cluster_changes_its_labels(site, label, value, change):
    change_labels(site, change)
    site.cluster.api.misbehave(503, 3, at=("delete", "frameworks"))
    async with site.manager() as service:
        with pytest.raises(RequestInvalid, match=f"its label {label} must be '{value}'.* exempt the label"):
            await service.submit(site.settings())
        assert not await service.stop("trial1"), "the job is not registered any more"
        await until(site.is_clean, "nothing is left", DEADLINE_S)
    assert not site.ends


@pytest.mark.parametrize("label", ["app", "trialId"])
async def test_a_job_with_changed_labels_is_refused_even_if_the_first_response_was_lost(site, label):
    change_labels(site, lambda labels: labels.update({label: "research"}))
    async with site.manager() as service:
        operator = FrameworkController(site.config)
        site.store.create(FRAMEWORKS, "default", operator.render("default", site.settings()))
        with pytest.raises(RequestInvalid, match="has changed it to 'research'"):
            await service.submit(site.settings())
        await until(site.is_clean, "nothing is left", DEADLINE_S)


async def test_a_running_job_counts_as_ended_and_is_deleted_if_another_client_removes_its_labels(site):
    async with site.manager() as service:
        await service.submit(site.settings())
        await site.is_running()
        (found,) = site.store.list(FRAMEWORKS)
        del found["metadata"]["labels"]["expId"]
        site.store.replace(FRAMEWORKS, "default", found["metadata"]["name"], found)
        await until(lambda: site.ends, "the job has ended", DEADLINE_S)
        await until(site.is_clean, "nothing is left", DEADLINE_S)
    assert "was deleted, but not by this manager" in site.ends[0].message


async def test_a_job_runs_normally_if_the_cluster_adds_labels(site):
    change_labels(site, lambda labels: labels.update(team="a"))
    async with site.manager() as service:
        await service.submit(site.settings())
        await site.is_running()
        assert site.store.list(SECRETS)
