"""The web page in a real Chromium."""

import json
import re
import time

import pytest
from amounts import amount
from attempts import attempt_id, sign_attempt
from browser import Visit, chromium, expect, needs_chromium, visit
from deadlines import scaled_s
from free_ports import free_port_pair
from made_experiment import Played, made_experiment, made_trial, served_view, write

from nni_manager.domain.events import AttemptStarted, MetricsStored, ParametersSuggested, TaskReported
from nni_manager.domain.trial import TrialState
from nni_manager.store.rows import trial_row
from nni_manager.web import change_feed
from trial_keeper.wire.messages import AttemptKey, Stream
from trial_keeper.wire.reasons import ExitReason

pytestmark = [pytest.mark.any_machine, needs_chromium]
# A real experiment sends an update every half second. So the test simulates 75 s, or ten minutes in its thorough form.
UPDATES = amount(150, 1200)
TRIALS = amount(1000, 10_000)
CHART = ".main-svg"
THEMES = ("light", "dark")
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 800}
GATED = """
import os, time
import nni_sdk as nni
x = nni.get_next_parameter()["x"]
print("the first line of", nni.get_trial_id())
nni.report_intermediate_result(x / 2)
while not os.path.exists("gate"):
    time.sleep(0.05)
nni.report_final_result(x)
"""


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


# ---- stored experiments for most tests


HOSTILE = "<script>window.hacked=1</script><img src=x onerror=window.hacked=2>\x1b[31m\u202e' onmouseover='window.hacked=3"


def some_trial(number, now_s):
    """A trial. Together, the trials have every state, results with several names, and texts that would be run as code if the page
    did not escape them.
    """
    trial = made_trial(number, now_s - 1000 + number)
    trial.parameters = {
        "lr": 10 ** -(number % 5),
        "layers": number % 7,
        "name": HOSTILE if number % 3 else "plain",
    }
    match number % 5:
        case 0:
            trial.state, trial.run.reason, trial.run.exit_code = TrialState.FAILED, ExitReason.NONZERO_EXIT, 1
            trial.run.final = trial.run.value = None
            trial.run.message = (
                f'Traceback (most recent call last):\n  File "train.py"\nValueError: {HOSTILE}'
            )
        case 1:
            trial.state, trial.run.reason = TrialState.EARLY_STOPPED, ExitReason.EARLY_STOPPED
        case 2:
            trial.run.final = json.dumps(
                {"default": trial.run.value, "loss": 1 / (number + 1), HOSTILE: number}
            )
    return trial


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A view of forty trials. The first trial has two logs: a long one, and one with hostile texts."""
    experiment = made_experiment(
        tmp_path_factory.mktemp("stored"), 40, some_trial, experimentName=f"digits {HOSTILE}"
    )
    key = AttemptKey("00000", attempt_id(0), "main-0")
    sign_attempt(experiment.folder, key)
    attempt = experiment.folder.workspace.attempt(key)
    attempt.output.mkdir(parents=True)
    with attempt.stream(Stream.STDOUT).open("wb") as file:
        line = b"epoch 1: loss 0.25 \xe2\x82\xac\n"
        file.write(line * (100 * 2**20 // len(line)))
        file.write(b"the last line\n")
    attempt.stream(Stream.STDERR).write_text(
        f"{HOSTILE}\n\x1b[31mred\x1b[0m\n" + "x" * 2**20 + "\nafter a long line\n"
    )
    with served_view(experiment.folder) as view:
        yield view


@pytest.fixture(scope="module")
def signed_in(browser, stored):
    with visit(browser, stored.link()) as person:
        yield person


@pytest.fixture
def person(signed_in):
    """A visit to the stored experiment. Several tests share it, so they must not change the settings of the page."""
    signed_in.page.set_viewport_size(WIDE)
    signed_in.page.emulate_media(color_scheme="light")
    yield signed_in
    signed_in.page.goto("about:blank")
    assert signed_in.errors == []


def each_page(person):
    """Visit each page, and yield its name when the page is complete. The page "trial" shows the details of one trial."""
    for name in ("overview", "trials", "trial", "experiments", "jobs"):
        if name == "trial":
            # The new address differs from the current one only in the fragment, so the browser does not load the page again.
            person.go(person.page.url + "#trial=00000")
            expect(person.see("log")).to_contain_text("the last line")
        else:
            person.see(f"nav-{name}").click()
        match name:
            case "overview" | "trials" | "trial":
                expect(person.page.locator(CHART).first).to_be_visible()
            case "experiments":
                expect(person.see("experiments")).to_contain_text("TESTEXPT")
            case "jobs":
                expect(person.see("jobs")).to_be_visible()
        yield name


# ---- sign-in and sign-out


@pytest.mark.smoke
def test_a_login_link_works_once_and_signs_in_all_tabs_of_a_browser_until_a_sign_out(browser, stored):
    link = stored.link()
    with visit(browser, link) as person:
        expect(person.page).to_have_url(f"{stored.origin}/oview")
        code = link.partition("#")[2]
        assert not any(code in url for url in person.asked)
        person.page.go_back()
        assert code not in person.page.url
        # The login is kept: a new page load in this browser needs no link.
        person.go(f"{stored.origin}/detail")
        expect(person.see("table")).to_be_visible()
    second_browser = Visit(browser)
    second_browser.page.goto(link)
    expect(second_browser.see("enter-message")).to_contain_text("nnictl webui url")
    second_browser.page.goto(f"{stored.origin}/oview")
    expect(second_browser.see("locked")).to_contain_text("nnictl webui url")
    # A login in a new tab of the second browser also unlocks the first tab.
    tab = second_browser.context.new_page()
    tab.goto(stored.link())
    expect(tab).to_have_url(f"{stored.origin}/oview")
    expect(second_browser.see("state")).to_be_visible()
    # After a sign-out, the first tab is locked again, and the page has deleted its key from localStorage.
    tab.close()
    second_browser.see("sign-out").click()
    expect(second_browser.see("locked")).to_contain_text("nnictl webui url")
    expect(second_browser.see("sign-out")).to_be_hidden()
    assert second_browser.evaluate("localStorage.getItem('trial-keeper-key')") is None
    second_browser.page.goto(f"{stored.origin}/detail")
    expect(second_browser.see("locked")).to_be_visible()
    assert second_browser.errors == []
    second_browser.context.close()


# ---- a running experiment


@pytest.mark.smoke
def test_the_page_shows_and_changes_an_experiment_until_its_end_despite_a_manager_restart(
    browser, a_real_experiment
):
    experiment = a_real_experiment(GATED, trialConcurrency=1, maxTrialNum=3)
    port = free_port_pair()
    experiment.start(port)
    code = experiment.ask("POST", "/entrance").json()["code"]
    with visit(browser, f"http://127.0.0.1:{port}/enter#{code}") as person:
        expect(person.see("count-RUNNING")).to_contain_text("1")
        edit = person.see("edit-concurrency")
        edit.get_by_role("button").first.click()
        edit.get_by_role("textbox").or_(edit.get_by_role("spinbutton")).fill("2")
        person.page.keyboard.press("Enter")
        expect(edit).to_contain_text("2")
        assert experiment.summary()["trialConcurrency"] == 2
        expect(person.see("count-RUNNING")).to_contain_text("2")
        person.see("nav-trials").click()
        followed, stopped = (trial["id"] for trial in experiment.get("/trials"))
        person.see(f"expand-{followed}").click()
        expect(person.see("log")).to_contain_text(f"the first line of {followed}")
        experiment.kill_manager()
        expect(person.see("banner-connection")).to_be_visible()
        experiment.start(port)
        expect(person.see("banner-connection")).to_be_hidden()
        # This second click on the row closes its details.
        person.see(f"expand-{followed}").click()
        person.see(f"expand-{stopped}").click()
        person.see("kill").click()
        person.see("confirm-yes").click()
        expect(person.see(f"row-{stopped}")).to_contain_text(re.compile("CANCEL|stopped", re.IGNORECASE))
        assert experiment.get(f"/trials/{stopped}")["reason"] == "stopped by user"
        (experiment.code / "gate").touch()
        expect(person.see(f"row-{followed}")).to_contain_text("Succeeded")
        person.see("nav-overview").click()
        expect(person.see("state")).to_contain_text("Done")
        expect(person.see("count-SUCCEEDED")).to_contain_text("2")
        best = experiment.summary()["best"]["value"]
        expect(person.see("best-value")).to_contain_text(f"{best:.3f}"[:4])


def test_the_badge_of_a_done_experiment_without_a_succeeded_trial_looks_like_a_failure(browser, tmp_path):
    def failed(number, now_s):
        trial = made_trial(number, now_s)
        trial.state, trial.run.final, trial.run.value = TrialState.FAILED, None, None
        return trial

    with (
        served_view(made_experiment(tmp_path, 3, failed).folder) as view,
        visit(browser, view.link()) as person,
    ):
        badge = person.page.locator(".badge", has_text="Done, 0 of 3 succeeded")
        # The bar at the top has one badge, and the overview has the other.
        expect(badge).to_have_count(2)
        for number in range(2):
            expect(badge.nth(number)).to_have_attribute("data-look", "bad")


def test_the_overview_has_a_link_to_the_failures_that_it_does_not_list(browser, tmp_path):
    def failed(number, now_s):
        trial = made_trial(number, now_s)
        if number > 0:
            trial.state, trial.run.final, trial.run.value = TrialState.FAILED, None, None
        return trial

    with (
        served_view(made_experiment(tmp_path, 6, failed).folder) as view,
        visit(browser, view.link()) as person,
    ):
        failures = person.page.get_by_role("region", name="Latest failures")
        expect(failures.get_by_role("listitem")).to_have_count(4)
        expect(failures).to_contain_text("2 more failed trials")
        person.see("more-failures").click()
        expect(person.see("table-count")).to_have_text("5 of 6 trials")


def test_the_page_of_an_ended_experiment_states_that_no_trial_has_reported_a_final_result(browser, tmp_path):
    def stopped(number, now_s):
        trial = without_number(number, now_s)
        trial.state, trial.run.reason = TrialState.USER_CANCELED, ExitReason.STOPPED_BY_USER
        return trial

    said = "No trial has reported a final result."
    with (
        served_view(made_experiment(tmp_path, 2, stopped).folder) as view,
        visit(browser, view.link()) as person,
    ):
        for title in ("Best result", "Best result over time", "Top trials"):
            expect(person.page.get_by_role("region", name=title, exact=True)).to_contain_text(said)
        person.see("nav-trials").click()
        expect(person.page.get_by_label("Default metric of each trial")).to_contain_text(said)


def test_the_chart_of_best_results_over_time_omits_a_running_trial_with_a_final_result(browser, tmp_path):
    def last_runs(number, now_s):
        trial = made_trial(number, now_s - 100 + number)
        if number == 10:
            trial.state = TrialState.RUNNING
            trial.run.ended_at_s = trial.run.reason = trial.run.exit_code = None
        return trial

    with (
        served_view(made_experiment(tmp_path, 11, last_runs).folder) as view,
        visit(browser, view.link()) as person,
    ):
        caption = person.see("best-chart").locator("figcaption")
        expect(caption).to_have_text("Best: 1.28571, trial 9; 10 improvements in 10 results.")


def test_the_overview_shows_a_trial_limit_that_is_lower_than_the_number_of_ended_trials(browser, tmp_path):
    experiment = made_experiment(tmp_path, 2)
    now_s = time.time()
    write(experiment.folder, *(trial_row(made_trial(number, now_s)) for number in range(2, 7)))
    with served_view(experiment.folder) as view, visit(browser, view.link()) as person:
        expect(person.page.get_by_text("7 trials ended (limit 2)", exact=True)).to_be_visible()


def without_number(number, now_s):
    trial = made_trial(number, now_s)
    trial.run.final = trial.run.value = None
    return trial


def test_the_badge_of_a_finished_experiment_without_a_result_says_that_no_result_counts(browser, tmp_path):
    with (
        served_view(made_experiment(tmp_path, 3, without_number).folder) as view,
        visit(browser, view.link()) as person,
    ):
        badge = person.page.locator(".badge", has_text="Done")
        # The bar at the top has one badge, and the overview has the other.
        expect(badge).to_have_text(["Done, no result counts"] * 2)
        person.see("nav-experiments").click()
        listed = person.see("experiments").locator("tr.chosen .badge")
        expect(listed).to_have_text("Done, no result counts")
        for each in (badge.first, listed):
            expect(each).to_have_attribute("data-look", "waiting")


def test_the_page_reloads_when_another_experiment_uses_the_same_port(browser, tmp_path):
    played = Played(made_experiment(tmp_path, 0).folder)
    with served_view(played.folder, played) as view, visit(browser, view.link()) as person:
        expect(person.see("state")).to_contain_text("Running")
        with person.page.expect_event("load"):
            view.loop.call_soon_threadsafe(setattr, played.experiment, "experiment_id", "OTHEREXP")
        person.is_ready()
        expect(person.page.locator('[title="experiment OTHEREXP"]')).to_be_visible()


# ---- output of trials


@pytest.mark.smoke
def test_hostile_texts_are_shown_as_text(person, stored):
    person.go(f"{stored.origin}/experiment")
    for name in each_page(person):
        assert person.page.locator("script:not([src])").count() == 0
        if name == "trial":
            expect(person.see("reason")).to_be_visible()
            expect(person.see("detail-00000")).to_contain_text("<script>window.hacked=1</script>")
            person.see("log-stderr").click()
            expect(person.see("log")).to_contain_text("after a long line")
            expect(person.see("log")).not_to_contain_text("\x1b")
            person.page.mouse.move(600, 500)
        assert person.evaluate("window.hacked") is None, name
        assert person.page.locator("img[src=x]").count() == 0


def test_the_end_of_a_100_megabyte_log_is_shown_quickly(person, stored):
    person.go(f"{stored.origin}/detail#trial=00000")
    began_s = time.monotonic()
    expect(person.see("log")).to_contain_text("the last line")
    # The limit is high for busy machines. An idle machine needs only a small part of it.
    assert time.monotonic() - began_s < scaled_s(20)
    assert person.heap_bytes() < 40 * 2**20


# ---- many trials, many updates


def test_thousands_of_trials_can_be_sorted_searched_and_scrolled(browser, tmp_path):
    experiment = made_experiment(tmp_path, TRIALS)
    with served_view(experiment.folder) as view, visit(browser, view.link()) as person:
        person.see("nav-trials").click()
        expect(person.see("table-count")).to_contain_text(f"{TRIALS:,} of {TRIALS:,}")
        assert person.page.locator('[data-test^="row-"]').count() < 200
        person.see("sort-value").click()
        person.see("sort-value").click()
        assert person.page.locator('[data-test^="row-"]').count() > 5
        one = f"{TRIALS * 7 // 9:05d}"
        person.see("search").fill(one)
        expect(person.see("table-count")).to_contain_text(f"1 of {TRIALS:,}")
        expect(person.see(f"row-{one}")).to_be_visible()
        person.see("search").fill("")
        expect(person.see("table-count")).to_contain_text(f"{TRIALS:,} of {TRIALS:,}")
        assert person.elements() < 5000


def test_the_memory_use_of_the_page_does_not_grow_with_updates(browser, tmp_path, monkeypatch):
    """The test sends as many updates as a manager sends in ten minutes, without pauses."""
    monkeypatch.setattr(change_feed, "INTERVAL_S", 0.01)
    played = Played(made_experiment(tmp_path, 0).folder)
    keys = [AttemptKey(f"t{number}", attempt_id(0), "main-0") for number in range(20)]
    for number, key in enumerate(keys):
        played.apply(ParametersSuggested(key.trial_id, number, {"x": number}, {}, time.time()))
        played.apply(AttemptStarted(key, time.time()), TaskReported(key))
    with served_view(played.folder, played) as view, visit(browser, view.link()) as person:
        person.see("nav-trials").click()
        shown = person.see("row-t0")

        def update(number):
            for key in keys[:3]:
                event = MetricsStored(key, ((False, f"{number}.5"),))
                view.loop.call_soon_threadsafe(played.apply, event)
            if number % 10 == 0:
                expect(shown).to_contain_text(f"{number}.5")

        for number in range(1, UPDATES // 3):
            update(number)
        expect(shown).to_be_visible()
        before, elements = person.heap_bytes(), person.elements()
        for number in range(UPDATES // 3, UPDATES + 1):
            update(number)
        update(10 * UPDATES)
        grown = person.heap_bytes() - before
        assert grown < 2 * 2**20, f"{grown / 2**20:.1f} MB more"
        assert person.elements() < elements + 50


@pytest.mark.smoke
def test_every_chart_is_drawn(person, stored):
    person.go(f"{stored.origin}/detail")
    for tab in ("metric", "parallel", "duration", "importance"):
        person.see(f"tab-{tab}").click()
        expect(person.page.locator(f"{CHART} >> visible=true").first).to_be_visible()
    person.screenshot("importance-light")
    # Plotly can show buttons that upload a chart to its own servers. The page must not show them.
    buttons = person.page.locator(".modebar-btn")
    titles = [button.get_attribute("data-title") for button in buttons.all()]
    assert "Zoom" in titles
    assert not [title for title in titles if re.search("share|cloud|edit", title or "", re.IGNORECASE)]


# ---- themes, narrow screens and the keyboard


def test_every_page_passes_the_accessibility_rules_in_both_themes(person, stored):
    person.go(f"{stored.origin}/oview")
    faults = []
    for theme in THEMES:
        person.page.emulate_media(color_scheme=theme)
        # The themes differ only in their colours, so only the contrast is checked in the dark theme.
        rules = ("color-contrast",) if theme == "dark" else ()
        for name in each_page(person):
            person.screenshot(f"{name}-{theme}")
            found = person.faults_for_assistive_technology(rules)
            faults += [f"{name}, {theme}: {fault}" for fault in found]
    assert faults == []


def test_a_narrow_screen_needs_no_horizontal_scrolling(person, stored):
    person.page.set_viewport_size(NARROW)
    for name, path in [("overview", "/oview"), ("trials", "/detail"), ("jobs", "/jobs")]:
        person.go(stored.origin + path)
        person.screenshot(f"{name}-narrow")
        width = person.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, name


@pytest.mark.parametrize("path", ["/oview", "/detail"])
def test_a_chart_fits_into_its_card_when_only_the_card_becomes_narrower(person, stored, path):
    person.page.set_viewport_size({"width": 500, "height": 800})
    person.go(stored.origin + path)
    chart = person.page.locator("figure.chart >> visible=true").first
    chart.scroll_into_view_if_needed()
    drawing = chart.locator(CHART).first
    expect(drawing).to_have_attribute("width", f"{chart.bounding_box()['width']:g}")
    # When a scroll bar appears, the body becomes narrower, and the window keeps its width. The test sets the width of the body to
    # the same effect.
    person.evaluate("document.body.style.width = '390px'")
    assert chart.bounding_box()["width"] < 350
    expect(drawing).to_have_attribute("width", f"{chart.bounding_box()['width']:g}")


def test_the_page_can_be_used_with_the_keyboard_only(person, stored):
    person.go(f"{stored.origin}/oview")
    seen = []
    for _ in range(30):
        person.page.keyboard.press("Tab")
        seen.append(person.evaluate("document.activeElement.getAttribute('data-test')"))
        if seen[-1] == "nav-trials":
            break
    assert "nav-trials" in seen
    person.page.keyboard.press("Enter")
    expect(person.see("table")).to_be_visible()
