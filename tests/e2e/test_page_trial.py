"""The page of one trial in a real Chromium: its code and environment, its pending reason, and a retry from its checkpoint."""

import platform
import re
import socket
import subprocess
import time
from importlib.metadata import version

import pytest
from browser import chromium, expect, needs_chromium, visit
from free_ports import free_port_pair
from made_experiment import Played, made_experiment, served_view

from nni_manager.domain.events import ParametersSuggested
from nni_manager.training_services.base import ManagedGpu

pytestmark = [pytest.mark.any_machine, needs_chromium]
TRAIN = """\
import nni_sdk as nni

epochs = nni.get_next_parameter()["epochs"]
path = nni.load_checkpoint()
done = 0 if path is None else int(open(path + "/epoch").read())
for epoch in range(done, epochs):
    nni.report_intermediate_result(epoch)
    if epoch == 1:
        def save(folder):
            with open(folder + "/epoch", "w") as file:
                file.write("2")
        nni.save_checkpoint(save)
        raise SystemExit("out of memory")
nni.report_final_result(epochs)
"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def trial_with(experiment, epochs):
    return next(each for each in experiment.get("/trials") if each["parameters"]["epochs"] == epochs)


def test_a_trial_page_shows_code_and_environment_and_can_retry_a_trial_from_its_checkpoint(
    browser, a_real_experiment
):
    experiment = a_real_experiment(
        TRAIN,
        space={"epochs": {"_type": "choice", "_value": [1, 4]}},
        tuner={"builtinTunerName": "GridSearch"},
        trialConcurrency=1,
        maxTrialNum=2,
    )
    git = ["git", "-C", str(experiment.code), "-c", "user.name=tests", "-c", "user.email=tests@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "the code of the trials"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    port = free_port_pair()
    experiment.start(port)
    experiment.wait_for_status("DONE")
    failed, succeeded = trial_with(experiment, 4), trial_with(experiment, 1)
    assert (failed["state"], succeeded["state"]) == ("FAILED", "SUCCEEDED")

    link = f"http://127.0.0.1:{port}/enter#{experiment.ask('POST', '/entrance').json()['code']}"
    with visit(browser, link) as person:
        person.see("nav-trials").click()
        person.see(f"expand-{succeeded['id']}").click()
        detail = person.see(f"detail-{succeeded['id']}")
        code = detail.locator("[data-test=code-version]")
        expect(code).to_have_text(re.compile(rf"commit {commit[:11]}.*, content [0-9a-f]+"))
        expect(code.get_by_title(commit)).to_be_visible()
        expect(detail).to_contain_text(socket.gethostname())
        packages = detail.get_by_text(f"{platform.python_version()}, packages")
        packages.click()
        expect(detail.locator("[data-test=packages]")).to_contain_text(f"pytest=={version('pytest')}")
        expect(detail.locator("[data-test=retry]")).to_be_hidden()
        expect(detail.locator("[data-test=retry-from-checkpoint]")).to_be_hidden()
        person.see(f"expand-{succeeded['id']}").click()

        person.see(f"expand-{failed['id']}").click()
        detail = person.see(f"detail-{failed['id']}")
        expect(detail.locator("[data-test=retry]")).to_be_visible()
        person.screenshot("trial-with-a-checkpoint")
        detail.locator("[data-test=retry-from-checkpoint]").click()
        expect(person.see("toast")).to_contain_text("Trial 2 (")
        person.see(f"expand-{failed['id']}").click()

        (new,) = (each for each in experiment.get("/trials") if each["sequenceId"] == 2)
        expect(person.see(f"row-{new['id']}")).to_contain_text("Succeeded")
        person.see(f"expand-{new['id']}").click()
        expect(person.see(f"detail-{new['id']}")).to_contain_text(
            f"trial {failed['id']}, from its checkpoint"
        )
    reported = experiment.get(f"/metric-data/{new['id']}?type=PERIODICAL")
    assert [each["data"] for each in reported] == ['"2"', '"3"'], "the first two epochs are in the checkpoint"


def test_the_page_offers_no_retry_from_a_checkpoint_if_a_failed_trial_has_no_checkpoint(
    browser, a_real_experiment
):
    experiment = a_real_experiment("raise SystemExit('no')\n", trialConcurrency=1, maxTrialNum=1)
    port = free_port_pair()
    experiment.start(port)
    experiment.wait_for_status("DONE")
    (failed,) = experiment.get("/trials")
    assert experiment.get(f"/trials/{failed['id']}")["hasCheckpoint"] is False
    link = f"http://127.0.0.1:{port}/enter#{experiment.ask('POST', '/entrance').json()['code']}"
    with visit(browser, link) as person:
        person.see("nav-trials").click()
        person.see(f"expand-{failed['id']}").click()
        expect(person.see("retry")).to_be_visible()
        expect(person.see("reason")).to_be_visible()
        expect(person.see("retry-from-checkpoint")).to_be_hidden()
        refused = experiment.ask("POST", f"/trials/{failed['id']}/retry?from=checkpoint")
    assert refused.status_code == 409
    assert (
        "it has no signed checkpoint; let the training code call nni_sdk.save_checkpoint()"
        in refused.json()["error"]
    )


@pytest.mark.smoke
def test_the_table_of_trials_shows_the_pending_reason_of_a_waiting_trial(browser, tmp_path):
    played = Played(made_experiment(tmp_path, 0).folder)
    played.apply(ParametersSuggested("t1", 1, {"x": 1}, {}, time.time()))
    with served_view(played.folder, played) as view, visit(browser, view.link()) as person:

        def pend(**reasons):
            view.loop.call_soon_threadsafe(setattr, played, "pending_reasons", reasons)

        person.see("nav-trials").click()
        row = person.see("row-t1")
        expect(row).to_contain_text("Waiting")
        pend(t1="ImagePullBackOff: not found\nsecond line")
        expect(row).to_contain_text("not started yet: ImagePullBackOff: not found")
        expect(row).not_to_contain_text("second line")
        pend()
        expect(row).not_to_contain_text("not started yet")


def test_the_page_of_jobs_shows_each_gpu_with_its_trial(browser, tmp_path):
    played = Played(made_experiment(tmp_path, 0).folder)
    played.apply(ParametersSuggested("t1", 1, {"x": 1}, {}, time.time()))
    played.gpus = [ManagedGpu(0, ("t1",), None), ManagedGpu(1, (), True), ManagedGpu(2, (), False)]
    with served_view(played.folder, played) as view, visit(browser, view.link()) as person:
        person.see("nav-jobs").click()
        rows = person.see("gpus").locator("tbody tr")
        expect(rows).to_have_count(3)
        expect(rows.nth(0)).to_contain_text("t1")
        expect(rows.nth(1)).to_contain_text("other programs")
        expect(rows.nth(2)).to_contain_text("free")
        assert person.faults_for_assistive_technology() == []
        played.gpus = []
        expect(person.see("gpus")).to_be_hidden()
