"""The page of all experiments in a real Chromium, served by the real `nnictl web`."""

import json
import signal
import subprocess

import pytest
from browser import chromium, expect, needs_chromium, visit
from deadlines import scaled_s
from free_ports import free_port_pair
from made_experiment import made_experiment, served_view, write
from real_experiment import wait_until
from user_home import BIN, environ_of, left_in, processes_with

from nni_manager.domain.remarks import Remarks
from nni_manager.store.registry import Registry
from nni_manager.store.rows import remarks_row

pytestmark = [pytest.mark.any_machine, needs_chromium]

CONFIG = """\
experimentName: live search
trialConcurrency: 1
maxTrialNumber: 2
searchSpace: {x: {_type: uniform, _value: [0, 1]}}
trialCommand: python3 train.py
trialCodeDirectory: .
tuner: {name: Random}
trainingService: {platform: local}
"""
# The second trial waits until the file `go` exists.
TRAIN = """
import os, time
import nni_sdk
x = nni_sdk.get_next_parameter()["x"]
while nni_sdk.get_sequence_id() == 1 and not os.path.exists("go"):
    time.sleep(0.05)
nni_sdk.report_final_result(x)
"""
NARROW = {"width": 390, "height": 800}
# This script returns the height of each row of a list of experiments, and the content and the box of each visible cell.
ROWS = """[...document.querySelectorAll('[data-test=experiments] tbody tr')].map((row) => ({
  height: row.getBoundingClientRect().height,
  cells: [...row.cells].map((cell) => ({
    text: cell.textContent, content: cell.textContent || cell.querySelector('input, svg')?.tagName || '',
    ...cell.getBoundingClientRect().toJSON()
  })).filter(({ width }) => width > 0),
}))"""
HOSTILE = "<img src=x onerror=window.hacked=1>"


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A home with two stored experiments, one of them with a tag and a hostile name."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "config.yml").write_text(CONFIG)
    (folder / "train.py").write_text(TRAIN)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name, experiment_id, trials in ((HOSTILE, "HOSTILE1", 30), ("baseline", "BASE0001", 10)):
        made = made_experiment(
            tmp_path / experiment_id, trials, experiment_id=experiment_id, experimentName=name
        )
        Registry.of_user().add(made.folder)
    write(made.folder, remarks_row(None, Remarks(("keep",), "")))
    yield folder
    nnictl(folder, "web", "--stop")
    nnictl(folder, "stop", "--all")
    assert left_in(folder) == []


def nnictl(place, *arguments):
    return subprocess.run(
        [BIN / "nnictl", *arguments],
        cwd=place,
        env=environ_of(place),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=scaled_s(120),
    )


def served(place, *options):
    """Run `nnictl web`, which starts the server if necessary; return its output with a new login link."""
    done = nnictl(place, "web", "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def hub_of(place):
    (process,) = processes_with(place, "nni_manager.hub")
    return process


def test_experiments_can_be_searched_compared_and_opened(browser, place):
    with visit(browser, served(place)["links"][0]) as person:
        expect(person.see("count")).to_have_text("2 of 2 experiments")
        expect(person.see("experiment-HOSTILE1")).to_contain_text(HOSTILE)
        expect(person.see("experiment-BASE0001").locator("svg.sparkline")).to_be_visible()
        person.page.get_by_role("searchbox").fill("tag:keep")
        expect(person.see("count")).to_have_text("1 of 2 experiments")
        person.page.get_by_role("searchbox").fill("")
        for name in (HOSTILE, "baseline"):
            person.page.get_by_role("checkbox", name=f"Compare {name}").check()
        person.see("compare").click()
        expect(person.see("compare-chart").locator("svg").first).to_be_visible()
        expect(person.see("compared")).to_contain_text("30")
        person.page.get_by_label("Over", exact=True).select_option("time")
        expect(person.see("compare-chart")).to_contain_text("seconds since the start")
        person.page.get_by_role("link", name="baseline").click()
        person.is_ready()
        assert person.page.url.endswith("/experiments/BASE0001/oview")
        expect(person.page.locator("header .name")).to_have_text("baseline")
        person.see("nav-trials").click()
        expect(person.see("table-count")).to_have_text("10 of 10 trials")
        person.page.reload()
        person.is_ready()
        expect(person.see("table-count")).to_have_text("10 of 10 trials")
        person.see("nav-all").click()
        expect(person.see("count")).to_have_text("2 of 2 experiments")
        assert person.evaluate("window.hacked") is None
        assert person.faults_for_assistive_technology() == []
        assert person.errors == []
        person.see("sign-out").click()
        expect(person.see("locked")).to_contain_text("nnictl web")


def test_the_experiment_lists_of_the_hub_and_of_a_manager_fit_on_a_narrow_screen(browser, place):
    (folder,) = (each for each in Registry.of_user().all() if each.experiment_id == "BASE0001")
    with served_view(folder) as view:
        for link, path in ((served(place)["links"][0], "all"), (view.link(), "experiment")):
            with visit(browser, link, viewport=NARROW) as person:
                if path == "experiment":
                    person.see("nav-experiments").click()
                expect(person.see("experiments").locator("tbody tr")).to_have_count(2)
                person.screenshot(f"narrow-list-{path}")
                rows = person.evaluate(ROWS)
                assert len(rows) == 2
                for row in rows:
                    assert row["height"] < 200
                    for cell in row["cells"]:
                        assert cell["content"], "an empty cell is hidden"
                        assert cell["left"] >= 0
                        assert cell["right"] <= NARROW["width"], cell["text"]
                (tagged,) = (row for row in rows if any("BASE0001" in cell["text"] for cell in row["cells"]))
                shown = [cell["text"] for cell in tagged["cells"]]
                assert {"keep", "Done", "10"} <= set(shown)
                assert any(text.startswith("1.28") for text in shown), "the best result"
                assert person.page.get_by_text("keep", exact=True).bounding_box()["height"] < 30
                assert person.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
                assert person.faults_for_assistive_technology() == []


@pytest.mark.smoke
def test_an_experiment_is_started_and_stopped_on_the_page_of_all_experiments(browser, place):
    link = served(place)["links"][0]
    with visit(browser, link) as person:
        person.see("start").click()
        person.page.get_by_role("textbox", name="Experiment file").fill("/absent.yml")
        person.page.get_by_role("button", name="Start", exact=True).click()
        # The dialog itself must show the error, because its backdrop covers the rest of the page.
        expect(person.see("dialog").locator(".toast").last).to_contain_text("cannot read /absent.yml")
        person.page.get_by_role("textbox", name="Experiment file").fill(str(place / "config.yml"))
        person.page.get_by_role("button", name="Start", exact=True).click()
        person.page.get_by_role("link", name="live search").click()
        person.is_ready()
        expect(person.see("connection")).to_have_text("Live")
        expect(person.page.get_by_text("1 of 2 trials ended")).to_be_visible()

        # The test kills the server of the page and starts another on the same port. The experiment continues, and the page
        # reconnects.
        process = hub_of(place)
        port = int(link.partition("#")[0].rsplit(":", 1)[1].partition("/")[0])
        process.send_signal(signal.SIGKILL)
        process.wait()
        expect(person.see("connection")).to_have_text("Not connected")
        served(place, "--port", str(port))
        expect(person.see("connection")).to_have_text("Live")

        # After the manager is killed, the page shows the stored data, and offers to resume the experiment.
        (manager,) = processes_with(place, "nni_manager")
        manager.send_signal(signal.SIGKILL)
        manager.wait()
        person.page.reload()
        person.is_ready()
        expect(person.see("error-panel")).to_contain_text("is not running, this is its last status")
        person.see("nav-all").click()
        person.page.get_by_role("button", name="Resume live search").click()
        expect(person.page.get_by_role("button", name="Stop live search")).to_be_visible()
        (place / "go").touch()
        expect(person.page.get_by_role("row", name="live search")).to_contain_text("Done")
        person.page.get_by_role("button", name="Stop live search").click()
        person.see("confirm-yes").click()
        expect(person.page.get_by_role("button", name="Delete live search")).to_be_visible()
        person.page.get_by_role("button", name="Delete live search").click()
        person.see("confirm-yes").click()
        expect(person.see("count")).to_have_text("2 of 2 experiments")
        assert person.errors == []


def test_nnictl_web_starts_one_server_and_nnictl_create_prints_links_to_the_server(browser, place):
    port = free_port_pair()
    assert nnictl(place, "web", "--stop").stdout.startswith("INFO: The page of all experiments is not served")
    first = nnictl(place, "web", "--port", str(port))
    assert f"http://127.0.0.1:{port}/enter#" in first.stdout
    again = served(place)
    assert again["urls"] == [f"http://127.0.0.1:{port}"]
    refused = nnictl(place, "web", "--port", str(port + 1))
    assert refused.returncode == 1
    assert f"it is served on port {port}; run `nnictl web --stop` first" in refused.stderr

    (place / "go").touch()
    created = nnictl(place, "create", "config.yml", "--port", str(free_port_pair()))
    (link,) = (word for word in created.stdout.split() if word.startswith(f"http://127.0.0.1:{port}/"))
    with visit(browser, link) as person:
        expect(person.page.locator("header .name")).to_have_text("live search")
        assert person.page.url.startswith(f"http://127.0.0.1:{port}/experiments/")
        # This page has an open event stream. `nnictl web --stop` ends the server without waiting for the end of the stream.
        expect(person.see("connection")).to_have_text("Live")
        stopped = nnictl(place, "web", "--stop")
        assert stopped.stdout.startswith(f"INFO: Ended the page of all experiments on port {port}"), (
            stopped.stderr
        )
        expect(person.see("connection")).to_have_text("Not connected")
    wait_until(lambda: not processes_with(place, "nni_manager.hub"), "it ends")
