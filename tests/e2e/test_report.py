"""A report in a real Chromium: one file that shows an experiment without a manager, and makes no network requests."""

import csv
import io
import json

import pytest
from attempts import attempt_id
from browser import Visit, chromium, expect, needs_chromium
from made_experiment import made_experiment, made_trial, made_trial_of_two_objectives, write

from nni_manager.cli import main
from nni_manager.domain.ingest import StreamWrite
from nni_manager.store.reader import StoreReader
from nni_manager.store.registry import Registry
from nni_manager.store.rows import attempt_row, trial_row
from nni_manager.web import report
from nni_sdk.records import decode, encode
from trial_keeper.wire.messages import AttemptKey, Stream

pytestmark = [pytest.mark.any_machine, needs_chromium]

TRAIN = """
import nni_sdk
x = nni_sdk.get_next_parameter()["x"]
for step in range(5):
    nni_sdk.report_intermediate_result(x * step)
nni_sdk.report_final_result({"default": x, "loss": 1 - x})
"""
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2>"
TOKEN = "s3cret-t0ken"


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a report in a browser without a network. The report may request only its own file and parts of that file."""
    visits = []

    def open_report(content):
        path = tmp_path / "report.html"
        path.write_bytes(content)
        visits.append(person := Visit(browser, offline=True))
        person.go(path.as_uri())
        return person

    yield open_report
    for person in visits:
        assert person.errors == []
        assert all(url.startswith(("file:", "blob:", "data:")) for url in person.asked), person.asked
        person.context.close()


@pytest.mark.smoke
def test_an_html_report_has_results_charts_trials_and_configuration(
    a_real_experiment, opened, tmp_path, monkeypatch
):
    experiment = a_real_experiment(TRAIN, maxTrialNum=4, experimentName="digits")
    experiment.start()
    experiment.wait_for_status("DONE", is_stored=True)
    with StoreReader(experiment.folder.database) as reader:
        trial = max(reader.trials(), key=lambda trial: trial.run.value)

    target = tmp_path / "exported.html"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    Registry.of_user().add(experiment.folder)
    assert main.run(["experiment", "export", "TESTEXPT", "-t", "html", "-f", str(target)]) == 0
    person = opened(target.read_bytes())

    assert person.page.title() == "Overview · digits"
    expect(person.see("connection")).to_contain_text("Report of")
    expect(person.page.get_by_label("Best result over time").locator("svg").first).to_be_visible()
    assert person.see("nav-experiments").count() == person.see("nav-jobs").count() == 0
    for action in ("Change", "Stop the experiment", "Sign out", "Add tag"):
        assert person.page.get_by_role("button", name=action).count() == 0, action
    expect(person.see("search-space")).to_contain_text("uniform")
    person.page.get_by_role("link", name=f"{trial.sequence_id} · {trial.trial_id}").first.click()
    detail = person.see(f"detail-{trial.trial_id}")
    expect(detail).to_contain_text("loss")
    expect(detail.get_by_label("Intermediate results").locator("svg").first).to_be_visible()
    expect(detail).not_to_contain_text("Logs")
    detail.get_by_text("packages").click()
    expect(person.see("packages")).to_contain_text("grpcio==")
    person.page.go_back()
    expect(person.see("config-text")).to_be_attached()
    # A reload of the report's page of trials must show the page of trials again.
    person.see("nav-trials").click()
    person.page.reload()
    expect(person.see("table-count")).to_have_text("4 of 4 trials")
    with person.page.expect_download() as download:
        person.page.get_by_role("button", name="Download CSV").click()
    assert trial.trial_id in download.value.path().read_text()


def test_an_html_report_contains_no_secret_and_escapes_markup_in_texts(opened, tmp_path):
    trial = {"command": "true", "codeDir": ".", "gpuNum": 0, "cpuNum": 1, "memoryMB": 100, "image": "i",
             "paiStorageConfigName": "team", "nniManagerNFSMountPath": str(tmp_path),
             "containerNFSMountPath": "/mnt"}  # fmt: skip
    experiment = made_experiment(
        tmp_path / "made",
        3,
        experimentName=HOSTILE,
        trainingServicePlatform="pai",
        trial=trial,
        paiConfig={"userName": "ada", "token": TOKEN, "host": "pai.example"},
    )
    hostile = made_trial(1, 1000.0)
    hostile.parameters = {HOSTILE: HOSTILE}
    write(experiment.folder, trial_row(hostile))
    content = report.report_of(experiment.folder)
    documents = json.dumps(report._documents(experiment.folder), default=str)
    assert TOKEN in experiment.config.to_json()
    assert TOKEN not in documents
    assert TOKEN not in content.decode()

    person = opened(content)
    for page in ("nav-overview", "nav-trials"):
        person.see(page).click()
        expect(person.page.locator("svg").first).to_be_visible()
        assert person.evaluate("window.hacked") is None
        assert person.page.locator("img[src=x]").count() == 0
    expect(person.page.locator("header .name")).to_have_text(HOSTILE)


def test_a_notice_in_the_report_of_a_large_experiment_gives_the_number_of_sampled_trials(
    opened, tmp_path, monkeypatch
):
    monkeypatch.setattr(report, "MAX_TRIALS", 200)
    experiment = made_experiment(tmp_path / "made", 1000)
    person = opened(report.report_of(experiment.folder))
    notice = person.see("error-panel")
    expect(notice).to_contain_text("This report has 280 of 1,000 trials, evenly chosen, with the best")
    person.see("nav-trials").click()
    expect(person.see("table-count")).to_have_text("280 of 280 trials")
    expect(person.page.get_by_text("00999")).to_be_visible()  # the sample contains the best trial


def test_the_csv_download_of_a_report_contains_long_parameters_and_every_metric_of_a_result(opened, tmp_path):
    def with_long_values(number, now_s):
        trial = made_trial(number, now_s)
        trial.parameters = {"prompt": "word " * (1000 if number else 1)}
        trial.run.final = json.dumps({f"m{each}": each for each in range(60 if number else 2)})
        return trial

    person = opened(report.report_of(made_experiment(tmp_path / "made", 2, with_long_values).folder))
    person.see("nav-trials").click()
    with person.page.expect_download() as download:
        person.see("download-csv").click()
    long, short = csv.DictReader(io.StringIO(download.value.path().read_text()))
    assert (long["prompt"], long["value/m59"]) == ("word " * 1000, "59")
    assert (short["prompt"], short["value/m1"], short["value/m59"]) == ("word ", "1", "")


def test_a_report_shows_the_most_important_parameter_for_each_objective(opened, tmp_path):
    objectives = [
        {"metric": "accuracy", "mode": "maximize"},
        {"metric": "latency_ms", "mode": "minimize"},
    ]
    experiment = made_experiment(tmp_path / "made", 60, made_trial_of_two_objectives, objectives=objectives)
    person = opened(report.report_of(experiment.folder))
    person.see("nav-trials").click()
    person.see("tab-importance").click()
    caption = person.see("importance-chart").locator("figcaption")
    expect(caption).to_contain_text("The most important parameter for the accuracy is width")
    person.see("chart-metric").select_option("latency_ms")
    expect(caption).to_contain_text("The most important parameter for the latency_ms is depth")
    person.see("chart-metric").select_option("speed")
    expect(caption).to_have_text(
        "The report has the importance only for accuracy, latency_ms; `nnictl view` shows others."
    )


def test_a_report_shows_the_step_numbers_and_the_count_of_all_intermediate_results(opened, tmp_path):
    reported = 2500
    experiment = made_experiment(tmp_path / "made", 1)
    key = AttemptKey("00000", attempt_id(0), "main-0")
    data = b"".join(encode(0, key.trial_id, "PERIODICAL", step, step) for step in range(reported))
    trial = made_trial(0, 1000.0)
    trial.run.intermediate_count = reported
    records = StreamWrite(key, Stream.METRICS, 0, len(data), records=tuple(decode(data, 0).records))
    write(experiment.folder, trial_row(trial), attempt_row(key, 0), records)
    documents = report._documents(experiment.folder)
    places = [each["place"] for each in documents["intermediates"]["00000"]]
    assert (len(places), places[0], places[-1]) == (report.MAX_INTERMEDIATES, 0, reported - 1)

    person = opened(report.report_of(experiment.folder))
    person.page.get_by_role("link", name="0 · 00000").first.click()
    expect(person.see("intermediate-chart")).to_contain_text("2,500 reports, the newest 2,499")
    ends = (
        "((x) => [x[0], x.at(-1)])(document.querySelector('[data-test=intermediate-chart] .plot').data[0].x)"
    )
    expect(person.see("intermediate-chart").locator(".main-svg").first).to_be_visible()
    assert person.evaluate(ends) == [1, reported]
    person.see("tab-intermediate").click()
    curves = person.page.get_by_label("Intermediate results").locator(".plot")
    expect(person.page.locator("figcaption", has_text="1 curve")).to_be_visible()
    expect(curves.locator(".main-svg").first).to_be_visible()
    found = person.evaluate(
        "[...document.querySelectorAll('.charts .plot')].map(({ data }) => data[0].x.at(-1))"
    )
    assert found == [reported]
