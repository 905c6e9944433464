"""The page of an experiment with several objectives in a real Chromium: the Pareto front on the overview."""

import json
import random

import pytest
from browser import chromium, expect, needs_chromium, visit
from deadlines import DEADLINE_S
from made_experiment import made_experiment, made_trial, made_trial_of_two_objectives, served_view

from nni_manager.web import change_feed

pytestmark = [pytest.mark.any_machine, needs_chromium]
SPACE = {"depth": {"_type": "randint", "_value": [1, 50]}}
OBJECTIVES = [
    {"metric": "accuracy", "mode": "maximize"},
    {"metric": "latency_ms", "mode": "minimize"},
    {"metric": "memory_mb", "mode": "minimize"},
]
TRIALS = 300


def a_trial(number, now_s):
    chosen = random.Random(number)
    trial = made_trial(number, now_s)
    depth = chosen.randint(1, 49)
    trial.parameters = {"depth": depth}
    trial.run.value = depth / (depth + 5) - chosen.random() / 4
    latency = 4 + depth + chosen.random() * 30
    numbers = {
        "accuracy": trial.run.value,
        "latency_ms": latency,
        "memory_mb": 10.0 + number % 5,
        "size_mb": 2.0 * depth,
    }
    trial.run.final = json.dumps(numbers)
    return trial


def experiment_with(folder, objectives):
    return made_experiment(
        folder,
        TRIALS,
        a_trial,
        space=SPACE,
        tuner={"builtinTunerName": "NSGAII", "classArgs": {"seed": 1}},
        objectives=objectives,
        constraints=[{"metric": "size_mb", "at_most": 80}],
    )


def front_of(experiment):
    """The trials on the Pareto front, as computed by the manager's code, in the order of the first objective."""
    trials = [a_trial(number, 0.0) for number in range(TRIALS)]
    return experiment.config.all_objectives.ranked((trial, trial.run.final) for trial in trials)


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return experiment_with(tmp_path_factory.mktemp("two"), OBJECTIVES[:2])


def marks(person, name):
    """The number of marks of a series of the chart."""
    return person.page.evaluate(
        """name => {
          const plot = document.querySelector('[data-test="front-chart"] .plot');
          return plot.data.find((trace) => trace.name === name)?.x.length ?? 0;
        }""",
        name,
    )


@pytest.mark.parametrize("is_windowed", [False, True], ids=["all rows", "windowed"])
def test_the_overview_shows_the_pareto_front_if_there_are_several_objectives(
    browser, stored, is_windowed, monkeypatch
):
    if is_windowed:
        monkeypatch.setattr(change_feed, "MAX_ROWS", TRIALS // 2)
    front = front_of(stored)
    with served_view(stored.folder) as view, visit(browser, view.link()) as person:
        person.go(f"{view.origin}/oview")
        expect(person.see("best-value")).to_have_text(f"{len(front)} trials")
        chart = person.see("front-chart")
        expect(chart).to_contain_text(f"{len(front)} trials on the Pareto front; {TRIALS} results")
        expect(chart).to_contain_text("Constraints: size_mb ≤ 80.")
        expect(chart.locator(".legendtext")).to_have_text(
            ["other trials", "violate a constraint", "Pareto front"]
        )
        assert marks(person, "Pareto front") == len(front)
        expect(person.page.get_by_test_id("best-chart")).to_be_hidden()
        table = person.see("top-trials")
        expect(table.locator("th[scope=col]")).to_have_text(["Trial", "accuracy", "latency_ms", "Parameters"])
        first = table.locator("tbody tr").first
        expect(first.locator("td").first).to_contain_text(front[0].trial_id)
        for theme in ("light", "dark"):
            person.page.emulate_media(color_scheme=theme)
            for width in (1440, 390):
                person.page.set_viewport_size({"width": width, "height": 900})
                person.go(person.page.url)
                expect(chart.locator(".scatterlayer .js-line")).to_have_count(1)
                if not is_windowed:
                    person.screenshot(f"front-{theme}-{width}")
                assert person.evaluate("document.documentElement.scrollWidth") <= width
        assert person.faults_for_assistive_technology() == []
        assert person.errors == []


def test_the_pareto_front_chart_shows_any_two_of_three_objectives(browser, tmp_path):
    experiment = experiment_with(tmp_path, OBJECTIVES)
    front = front_of(experiment)
    with served_view(experiment.folder) as view, visit(browser, view.link()) as person:
        person.go(f"{view.origin}/oview")
        chart = person.see("front-chart")
        expect(chart).to_contain_text(f"{len(front)} trials on the Pareto front")
        expect(chart).to_contain_text("accuracy (higher is better)")
        person.see("front-x").select_option("memory_mb")
        expect(chart).to_contain_text("memory_mb (lower is better)")
        assert marks(person, "Pareto front") == len(front)
        assert person.faults_for_assistive_technology() == []


def test_a_trial_page_names_the_violated_constraint(browser, stored):
    large = next(each for each in (a_trial(n, 0.0) for n in range(TRIALS)) if each.parameters["depth"] > 40)
    with served_view(stored.folder) as view, visit(browser, view.link()) as person:
        person.go(f"{view.origin}/detail#trial={large.trial_id}")
        expect(person.page.get_by_text("size_mb ≤ 80")).to_be_visible()
        expect(person.page.get_by_role("columnheader", name="accuracy")).to_have_count(1)


def test_every_result_on_the_page_is_labelled_with_the_name_of_the_first_objective(browser, stored):
    with served_view(stored.folder) as view, visit(browser, view.link()) as person:
        person.go(f"{view.origin}/detail")
        expect(person.see("tab-metric")).to_have_text("accuracy")
        # No result has a metric named default, so the page shows the importance for the first objective.
        person.see("tab-importance").click()
        caption = person.see("importance-chart").locator("figcaption")
        expect(caption).to_contain_text(f"computed from {TRIALS} trials", timeout=DEADLINE_S * 1000)
        person.see("tab-parallel").click()
        axis = person.see("axis-accuracy")
        expect(axis).to_have_accessible_name("accuracy, axis 2 of 2")
        axis.press("ArrowUp")
        expect(person.page.get_by_role("button", name="Clear the mark accuracy")).to_have_count(1)
        person.see("show-marked").click()
        expect(person.page.get_by_role("button", name="Remove the filter accuracy")).to_have_count(1)
        for box in person.page.get_by_role("checkbox", name="to compare").all()[:2]:
            box.check()
        person.see("compare").click()
        names = person.see("comparison").locator("th[scope=row]")
        expect(names.nth(1)).to_have_text("accuracy")
        expect(names.nth(2)).to_have_text("latency_ms")
        assert "default metric" not in person.page.locator("body").inner_text().lower()


def test_the_page_explains_results_that_lack_the_objective_metric(browser, tmp_path):
    def without_default(number, now_s):
        trial = made_trial(number, now_s)
        trial.run.final, trial.run.value, trial.run.message = '{"loss": 1}', None, "no number"
        return trial

    experiment = made_experiment(tmp_path, 3, without_default)
    with served_view(experiment.folder) as view, visit(browser, view.link()) as person:
        person.go(f"{view.origin}/oview")
        said = "No final result has a number for the default metric."
        # The page shows this text three times: instead of the best result, of the chart of best results over time, and of the top
        # trials.
        expect(person.page.get_by_text(said)).to_have_count(3)
        person.go(f"{view.origin}/detail")
        expect(person.page.get_by_text(f"{said} Choose another metric above.")).to_be_visible()


def test_the_pareto_front_chart_can_show_a_second_objective_named_default(browser, tmp_path):
    def two_numbers(number, now_s):
        trial = made_trial(number, now_s)
        trial.run.final, trial.run.value = (
            json.dumps({"accuracy": number, "default": 10 * number}),
            float(number),
        )
        return trial

    objectives = [OBJECTIVES[0], {"metric": "default", "mode": "minimize"}]
    experiment = made_experiment(
        tmp_path, 3, two_numbers, tuner={"builtinTunerName": "TPE"}, objectives=objectives
    )
    with served_view(experiment.folder) as view, visit(browser, view.link()) as person:
        person.go(f"{view.origin}/oview")
        expect(person.see("front-chart")).to_contain_text("3 trials on the Pareto front; 3 results")
        expect(person.see("front-chart").locator(".scatterlayer .js-line")).to_have_count(1)
        assert (
            person.page.evaluate(
                """() => document.querySelector('[data-test="front-chart"] .plot').data.flatMap((trace) => trace.y).join()"""
            )
            == "0,10,20"
        )
        person.go(f"{view.origin}/detail")
        expect(person.page.get_by_role("columnheader", name="default")).to_have_count(1)


def test_the_page_explains_results_that_violate_a_constraint(browser, tmp_path):
    limits = [{"metric": "size_mb", "at_most": 0}]
    experiment = made_experiment(
        tmp_path, 3, a_trial, tuner={"builtinTunerName": "TPE"}, objectives=OBJECTIVES[:1], constraints=limits
    )
    with served_view(experiment.folder) as view, visit(browser, view.link()) as person:
        person.go(f"{view.origin}/oview")
        expect(person.page.get_by_text("Every result violates a constraint.")).to_have_count(2)


def test_the_importance_chart_refers_to_the_metric_that_the_user_selects(browser, tmp_path):
    experiment = made_experiment(tmp_path, 60, made_trial_of_two_objectives, objectives=OBJECTIVES[:2])
    with served_view(experiment.folder) as view, visit(browser, view.link()) as person:
        person.go(f"{view.origin}/detail")
        person.see("tab-importance").click()
        caption = person.see("importance-chart").locator("figcaption")
        expect(caption).to_contain_text("The most important parameter for the accuracy is width")
        person.see("chart-metric").select_option("latency_ms")
        expect(caption).to_contain_text("The most important parameter for the latency_ms is depth")
        expect(caption).to_contain_text("the best tenth of them")
        person.see("chart-metric").select_option("speed")
        expect(caption).to_contain_text("The most important parameter for the speed is depth")
        expect(caption).to_contain_text("the highest tenth of them")
