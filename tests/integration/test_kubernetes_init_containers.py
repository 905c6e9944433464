"""Init containers that fail before a keeper starts, of Jobs and of Frameworks."""

import json

import pytest
from deadlines import DEADLINE_S
from kube_controllers import FRAMEWORKS
from kube_site import NAME, a_site
from real_experiment import until

pytest.importorskip("kubernetes")

from nni_manager.config.document import Document
from nni_manager.training_services.base import JobPresence
from nni_manager.training_services.frameworkcontroller.framework_template import read_template
from nni_manager.training_services.kubernetes.section import KubernetesConfig, NfsStorage, RoleConfig
from trial_keeper.wire.reasons import ExitReason

TRIAL = {"name": "trial", "image": "me/train:1", "command": ["true"]}


@pytest.fixture
def site(tmp_path, monkeypatch):
    with a_site(tmp_path, monkeypatch) as site:
        yield site


def fetch(exit_code):
    """The spec of a pod whose init container fails."""
    command = ["sh", "-c", f"echo no such data; exit {exit_code}"]
    container = {"name": "fetch", "image": "fetch:1", "command": command}
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"
    return {"initContainers": [container], "containers": [TRIAL]}


def a_job(exit_code):
    role = RoleConfig("worker", 1, "true", "me/train:1", 0, 1, 100)
    template = json.dumps({"spec": fetch(exit_code)})
    return KubernetesConfig("job", NfsStorage("nas", "/nni"), (role,), "v1", template_text=template)


def a_framework(exit_code):
    role = {"name": "worker", "taskNumber": 1, "task": {"pod": {"spec": fetch(exit_code)}}}
    document = {"apiVersion": "frameworkcontroller.microsoft.com/v1", "kind": "Framework"}
    template = read_template(Document("f.yml", document | {"spec": {"taskRoles": [role]}}, None), None)
    return KubernetesConfig(
        "frameworkcontroller", NfsStorage("nas", "/nni"), template.roles, template_text=template.text
    )


# A keeper can also exit with 101. The exit code of an init container must not be mistaken for that of a keeper.
@pytest.mark.parametrize("config", [a_job(101), a_framework(101)], ids=["job", "framework"])
async def test_the_failed_init_container_is_reported_as_the_cause_if_a_job_could_not_start(site, config):
    site.config = config
    async with site.manager() as service:
        await service.submit(site.settings())
        end = await site.has_ended()
    assert (end.exit_code, end.reason, end.is_explained) == (None, ExitReason.COULD_NOT_START, True)
    first, *_, last = end.message.split("\n")
    assert first.startswith("pod nni")
    assert first.endswith(" failed: init container fetch failed: exit code 101, Error")
    assert last == "no such data"


async def test_the_next_manager_reports_a_failed_init_container_as_the_cause_after_its_pod_is_gone(site):
    site.config = a_framework(1)
    site.cluster.node.missing_images.add("fetch:1")
    async with site.manager() as first:
        await first.submit(site.settings())
    site.cluster.node.missing_images.clear()
    site.cluster.node.look_again()
    await until(lambda: site.state() == "Completed", "the job ends", DEADLINE_S)
    async with site.manager() as second:
        assert await second.adopt("trial1") is JobPresence.ENDED
        second.report_end("trial1", stop_was_asked=False)
        (end,) = site.ends
        assert (end.exit_code, end.reason) == (None, ExitReason.COULD_NOT_START)
        assert end.message.startswith(
            f"pod {NAME}-worker-0 failed: init container fetch failed: exit code 1, Error\n"
        )
        await until(lambda: not site.store.list(FRAMEWORKS), "nothing is left", DEADLINE_S)


async def test_a_transient_failure_of_the_barrier_may_be_retried(site):
    site.config = a_framework(201)
    async with site.manager() as service:
        await service.submit(site.settings())
        end = await site.has_ended()
    assert (end.exit_code, end.reason) == (None, ExitReason.KEEPER_LOST)
    assert "init container fetch failed: exit code 201" in end.message
