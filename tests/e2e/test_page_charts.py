"""The charts of the page in a real Chromium: a search with nested choices, filters, downloads, and links from charts to
trials.
"""

import csv
import io
import itertools
import json
import math
import random

import pytest
from attempts import attempt_id
from browser import chromium, expect, needs_chromium, visit
from deadlines import DEADLINE_S
from made_experiment import made_experiment, made_trial, served_view, write

from nni_manager.domain.usage import PeakUsage
from nni_manager.store.rows import UsageRow, attempt_row, trial_row
from trial_keeper import __version__
from trial_keeper.wire.messages import AttemptKey, GpuUsage, Usage

pytestmark = [pytest.mark.any_machine, needs_chromium]
SPACE = {
    "lr": {"_type": "loguniform", "_value": [0.01, 0.5]},
    "width": {"_type": "uniform", "_value": [1, 10_000]},
    "batch": {"_type": "choice", "_value": [16, 128, 64]},
    "optimizer": {
        "_type": "choice",
        "_value": [
            {"_name": "sgd", "momentum": {"_type": "uniform", "_value": [0, 1]}},
            {"_name": "adam"},
        ],
    },
}
NARROW = {"width": 390, "height": 800}
TRIALS = 60
NOTE = "No trial matches. Remove a filter to see more."


def a_trial(number, now_s):
    chosen = random.Random(number)
    trial = made_trial(number, now_s - 1000 + number)
    optimizer = {"_name": "sgd", "momentum": chosen.random()} if number % 2 else {"_name": "adam"}
    trial.parameters = {
        "lr": 0.01 * 50 ** chosen.random(),
        "width": chosen.uniform(1, 10_000),
        "batch": chosen.choice([16, 64, 128]),
        "optimizer": optimizer,
    }
    trial.run.value = chosen.random()
    trial.run.final = str(trial.run.value)
    return trial


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    experiment = made_experiment(tmp_path_factory.mktemp("charts"), TRIALS, a_trial, space=SPACE)
    with served_view(experiment.folder) as view:
        yield view


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture
def person(browser, stored):
    with visit(browser, stored.link()) as made:
        made.said = []
        made.page.on("console", lambda message: made.said.append(message.text))
        made.go(f"{stored.origin}/detail")
        yield made
        assert made.errors == []
        # The console must be empty, because the browser writes violations of the content security policy to it. Its messages
        # about missing files (404) are ignored.
        assert [text for text in made.said if "404" not in text] == []


def texts(person, selector):
    return person.page.locator(f"figure >> visible=true >> css={selector}").all_text_contents()


def test_cpu_and_memory_and_gpus_of_each_task_are_drawn_over_the_life_of_a_trial(browser, tmp_path):
    experiment = made_experiment(tmp_path, 1)
    rows = []
    for task in ("main-0", "worker-1"):
        key = AttemptKey("00000", attempt_id(0), task)
        gpus = [(GpuUsage(0, 10.0 * n, n * 2**30),) if task == "main-0" else () for n in range(20)]
        rows.append(attempt_row(key, 0))
        rows += [UsageRow(Usage(key, 5.0 * n, n * 2**28, 0, gpus[n]), 1000.0 + 5 * n) for n in range(20)]
    peak = PeakUsage(95.0, 19 * 2**28, 0, (GpuUsage(0, 190.0, 19 * 2**30),))
    trial = made_trial(0, 1000.0)
    trial.run.peak_usage = peak
    write(experiment.folder, trial_row(trial), *rows)
    with (
        served_view(experiment.folder) as view,
        visit(browser, view.link()) as person,
    ):
        person.go(f"{view.origin}/detail#trial=00000")
        for chart, lines in {
            "usage-chart": ["CPU of main-0", "CPU of worker-1", "GPU 0 of main-0"],
            "memory-chart": ["memory of main-0", "memory of worker-1", "GPU 0 memory of main-0"],
        }.items():
            expect(person.see(chart).locator(".legendtext")).to_have_text(lines)
            expect(person.see(chart).locator(".scatterlayer .js-line")).to_have_count(3)
            expect(person.see(chart)).to_contain_text("40 samples of 2 tasks over 1 min 35 s.")
        person.screenshot("usage")
        person.page.set_viewport_size(NARROW)
        assert person.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.smoke
def test_parallel_coordinates_show_missing_nested_parameters_as_not_chosen(person):
    person.see("tab-parallel").click()
    expect(person.page.get_by_text("not chosen")).to_be_visible()
    labels = texts(person, ".annotation-text")
    for expected in (
        "lr",
        "width",
        "batch",
        "optimizer",
        "optimizer/momentum",
        "not chosen",
        "16",
        "64",
        "128",
        "adam",
        "sgd",
    ):
        assert expected in labels, labels
    person.screenshot("parallel-nested-wide")
    person.page.set_viewport_size(NARROW)
    person.go(person.page.url)
    person.see("tab-parallel").click()
    expect(person.page.get_by_text("not chosen")).to_be_visible()
    person.screenshot("parallel-nested-narrow")
    # The page has no horizontal scroll bar, because the chart has its own. Below, the labels of neighbouring axes must not
    # overlap.
    assert person.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    names = [
        each
        for each in person.page.locator(".annotation-text").all()
        if each.text_content() in (*SPACE, "default metric")
    ]
    boxes = sorted((each.bounding_box() for each in names), key=lambda box: box["x"])
    assert len(boxes) == 5
    for left, right in itertools.pairwise(boxes):
        assert left["x"] + left["width"] <= right["x"]


def all_parameters():
    return {number: a_trial(number, 0).parameters for number in range(TRIALS)}


def point_on(person, axis, height):
    """The pixel coordinates of a height on an axis. The height is a number from 0 (bottom) to 1 (top)."""
    box = person.see(f"strip-{axis}").bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + 5 + (1 - height) * (box["height"] - 10)


def drag(person, begin, end):
    person.page.mouse.move(*begin)
    person.page.mouse.down()
    person.page.mouse.move(*end, steps=3)
    person.page.mouse.up()


def axes(person):
    return person.page.get_by_role("group", name="Axes").get_by_role("button")


@pytest.fixture
def parallel(person):
    """The parallel coordinates."""
    person.see("tab-parallel").click()
    expect(axes(person)).to_have_count(6)
    return person


def test_brushes_on_several_axes_filter_the_table_together(parallel):
    drag(parallel, point_on(parallel, "lr", 0.4), point_on(parallel, "lr", 1))
    chip = parallel.page.get_by_role("button", name="Clear the mark lr")
    low, high = (float(part) for part in chip.text_content().removesuffix(" ×")[3:].split(" to "))
    marked = {number for number, each in all_parameters().items() if low <= each["lr"] <= high + 1e-6}
    assert 10 < len(marked) < 50
    count = parallel.see("marked-count")
    expect(count).to_have_text(f"{len(marked)} of {TRIALS} trials are in the marked parts")
    # The arrow key resizes the brush on this axis: its lower end moves from adam up to sgd.
    parallel.see("axis-optimizer").press("ArrowUp")
    both = {number for number in marked if number % 2}
    expect(count).to_have_text(f"{len(both)} of {TRIALS} trials are in the marked parts")
    expect(parallel.see("axis-optimizer")).to_have_accessible_name("optimizer, axis 4 of 6, marked sgd")
    parallel.see("show-marked").click()
    expect(parallel.see("table-count")).to_have_text(f"{len(both)} of {TRIALS} trials")
    expect(parallel.page.get_by_role("button", name="Remove the filter")).to_have_count(3)
    expect(count).to_have_text("")
    expect(parallel.page.locator("figcaption", has_text=f"{len(both)} trials of")).to_be_visible()


def test_a_brush_can_be_resized_and_cleared(parallel):
    count = parallel.see("marked-count")
    chip = parallel.page.get_by_role("button", name="Clear the mark width")

    def mark():
        drag(parallel, point_on(parallel, "width", 0.3), point_on(parallel, "width", 0.6))
        expect(chip).to_be_visible()

    mark()
    before = chip.text_content()
    drag(parallel, point_on(parallel, "width", 0.6), point_on(parallel, "width", 0.9))
    expect(chip).not_to_have_text(before)
    assert chip.text_content().split(" to ")[0] == before.split(" to ")[0], "the other end stays"
    chip.click()
    expect(count).to_have_text("")
    mark()
    parallel.see("clear-marks").click()
    expect(count).to_have_text("")
    mark()
    parallel.see("axis-width").press("Delete")
    expect(count).to_have_text("")
    mark()
    parallel.page.mouse.click(*point_on(parallel, "width", 0.45))
    expect(count).to_have_text("")
    expect(parallel.see("table").locator("[data-test^=detail-]")).to_have_count(0)


def test_a_brush_can_select_trials_that_lack_the_parameter(parallel):
    drag(
        parallel, point_on(parallel, "optimizer/momentum", 0.05), point_on(parallel, "optimizer/momentum", 0)
    )
    expect(parallel.see("marked-count")).to_have_text(
        f"{TRIALS // 2} of {TRIALS} trials are in the marked parts"
    )
    expect(
        parallel.page.get_by_role("button", name="Clear the mark optimizer/momentum not chosen")
    ).to_be_visible()


def test_axes_reordered_with_the_mouse_or_the_keyboard_stay_in_the_new_order(parallel):
    def order():
        return [
            name.partition(",")[0]
            for name in parallel.evaluate(
                "JSON.stringify([...document.querySelectorAll('.axes .title')].map((each) => each.ariaLabel))"
            )[2:-2].split('","')
        ]

    assert order() == ["lr", "width", "batch", "optimizer", "optimizer/momentum", "default metric"]
    title = parallel.see("axis-lr").bounding_box()
    aim = parallel.see("axis-batch").bounding_box()
    drag(
        parallel,
        (title["x"] + 44, title["y"] + 13),
        (aim["x"] + 44, aim["y"] + 13),
    )
    expect(parallel.see("axis-lr")).to_have_accessible_name("lr, axis 3 of 6")
    assert order() == ["width", "batch", "lr", "optimizer", "optimizer/momentum", "default metric"]
    parallel.see("axis-lr").press("ArrowRight")
    expect(parallel.see("axis-lr")).to_have_accessible_name("lr, axis 4 of 6")
    expect(parallel.see("axis-lr")).to_be_focused()
    assert order() == ["width", "batch", "optimizer", "lr", "optimizer/momentum", "default metric"]
    boxes = [each.bounding_box()["x"] for each in axes(parallel).all()]
    assert boxes == sorted(boxes)
    parallel.see("tab-metric").click()
    parallel.see("tab-parallel").click()
    expect(parallel.see("axis-lr")).to_have_accessible_name("lr, axis 4 of 6")


def test_a_line_under_the_pointer_names_its_trial_and_a_click_opens_the_trial(parallel):
    found = all_parameters()
    rates, widths = ([each[name] for each in found.values()] for name in ("lr", "width"))
    heights = {
        number: (
            math.log(each["lr"] / min(rates)) / math.log(max(rates) / min(rates)),
            (each["width"] - min(widths)) / (max(widths) - min(widths)),
        )
        for number, each in found.items()
    }
    middles = {number: sum(pair) / 2 for number, pair in heights.items()}
    # The mouse points at a line halfway between two axes. The test selects the line that is farthest from all other lines at that
    # height.
    alone = max(
        middles, key=lambda one: min(abs(middles[one] - middles[other]) for other in middles if other != one)
    )
    (left, from_y), (right, to_y) = (
        point_on(parallel, axis, height) for axis, height in zip(("lr", "width"), heights[alone], strict=True)
    )
    parallel.page.mouse.move((left + right) / 2, (from_y + to_y) / 2)
    tip = parallel.see("line-tip")
    expect(tip).to_contain_text(f"trial {alone} · {alone:05d}")
    expect(tip).to_contain_text(f"batch: {found[alone]['batch']}")
    expect(tip).to_contain_text("default metric 0.")
    parallel.screenshot("parallel-hover")
    parallel.page.mouse.click((left + right) / 2, (from_y + to_y) / 2)
    expect(parallel.see(f"detail-{alone:05d}")).to_be_visible()
    parallel.page.mouse.move(5, 5)
    expect(tip).to_be_hidden()


@pytest.mark.parametrize(("name", "scale"), [("lr", "log"), ("width", "linear"), ("batch", "category")])
def test_the_scale_of_a_slice_chart_follows_the_type_of_the_parameter_in_the_search_space(
    person, name, scale
):
    person.see("tab-importance").click()
    person.see("slice-parameter").select_option(name)
    slice_chart = person.page.get_by_label("Result against one parameter")
    expect(slice_chart.locator(".main-svg").first).to_be_visible()
    plot = "document.querySelector('[aria-label=\"Result against one parameter\"] .plot')"
    expect(slice_chart.get_by_text(name, exact=True).first).to_be_visible()
    assert person.evaluate(f"{plot}.layout.xaxis.type") == scale
    # One call reads the boxes of all labels, because the page may redraw the chart between two calls.
    boxes = person.evaluate(
        f"[...{plot}.querySelectorAll('.xtick')].map((tick) => tick.getBoundingClientRect().toJSON())"
    )
    assert boxes
    for left, right in itertools.pairwise(sorted(boxes, key=lambda box: box["x"])):
        assert left["x"] + left["width"] <= right["x"], "labels must not overlap"
    if scale == "linear":
        assert "2,000" in slice_chart.locator(".xtick").all_text_contents()


CONTOUR = "document.querySelector('[data-test=contour-chart] .plot')"


def test_a_contour_shows_two_parameters_on_the_scales_of_the_search_space(person):
    person.see("tab-contour").click()
    caption = person.see("contour-chart").locator("figcaption")
    expect(person.page.locator(".contourlayer .contourfill").first).to_be_attached()
    chosen = [person.see(f"contour-{axis}").input_value() for axis in "xy"]
    assert len(set(chosen)) == 2
    # The page has selected the two most important parameters. If a user selects the parameter of x for y too, the page swaps the
    # axes.
    person.see("contour-y").select_option(chosen[0])
    assert person.see("contour-x").input_value() == chosen[1]
    person.see("contour-x").select_option("lr")
    person.see("contour-y").select_option("width")
    expect(caption).to_contain_text(f"{TRIALS} results over lr and width")
    expect(person.page.locator(".ytitle")).to_have_text("width")
    assert (
        person.evaluate(f"[{CONTOUR}.layout.xaxis.type, {CONTOUR}.layout.yaxis.type].join()") == "log,linear"
    )
    point = person.see("contour-chart").locator(".scatterlayer .point").nth(9).bounding_box()
    middle = point["x"] + point["width"] / 2, point["y"] + point["height"] / 2
    person.page.mouse.move(*middle)
    expect(person.see("contour-chart").locator(".hoverlayer")).to_contain_text("trial 9 ·")
    person.page.mouse.click(*middle)
    expect(person.see("detail-00009")).to_be_visible()


def test_a_contour_is_drawn_while_the_importance_is_pending(person):
    # The request for the importance stays without a response.
    person.page.route("**/importance*", lambda _: None)
    person.see("tab-contour").click()
    caption = person.see("contour-chart").locator("figcaption")
    expect(caption).to_contain_text(f"{TRIALS} results over lr and width")


def test_a_contour_ignores_trials_that_lack_a_parameter(person):
    person.see("tab-contour").click()
    person.see("contour-x").select_option("lr")
    person.see("contour-y").select_option("optimizer/momentum")
    caption = person.see("contour-chart").locator("figcaption")
    expect(caption).to_contain_text(f"{TRIALS // 2} results over lr and optimizer/momentum")
    expect(caption).to_contain_text(f"{TRIALS // 2} results without one of these parameters are left out")
    person.see("contour-y").select_option("batch")
    expect(person.page.locator(".heatmaplayer image")).to_be_attached()
    assert person.evaluate(f"{CONTOUR}.layout.yaxis.type") == "category"
    person.see("contour-y").select_option("optimizer/momentum")
    person.see("search").fill("adam")
    expect(person.see("table-count")).to_contain_text(f"{TRIALS // 2} of {TRIALS}")
    expect(caption).to_contain_text("needs at least 10 trials with a result, lr and optimizer/momentum")
    expect(caption).to_contain_text("there are 0")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_controls_of_the_charts_pass_the_accessibility_rules(person, theme):
    person.page.emulate_media(color_scheme=theme)
    for size in ({"width": 1440, "height": 900}, NARROW):
        person.page.set_viewport_size(size)
        person.go(person.page.url)
        person.see("tab-parallel").click()
        expect(axes(person)).to_have_count(6)
        person.see("axis-lr").press("ArrowUp")
        expect(person.see("clear-marks")).to_be_visible()
        expect(person.page.locator(".annotation-text", has_text="batch")).to_be_visible()
        person.screenshot(f"parallel-marked-{theme}-{size['width']}")
        assert person.faults_for_assistive_technology() == []
        person.see("tab-contour").click()
        expect(person.page.locator(".contourlayer .contourfill").first).to_be_attached()
        person.screenshot(f"contour-{theme}-{size['width']}")
        assert person.faults_for_assistive_technology() == []
        assert person.evaluate("document.documentElement.scrollWidth") <= size["width"]


def test_chart_labels_distinguish_parameters_and_categories_with_a_long_common_prefix(browser, tmp_path):
    names = ["encoder/attention/heads/dropout/rate", "encoder/attention/heads/dropout/kind"]
    folder = "/data/models/pretrained/checkpoints"
    models = [f"{folder}/bert.pt", f"{folder}/roberta.pt"]

    def a_long_named_trial(number, now_s):
        trial = made_trial(number, now_s - 1000 + number)
        trial.parameters = {names[0]: random.Random(number).random(), names[1]: models[number % 2]}
        return trial

    space = {
        names[0]: {"_type": "uniform", "_value": [0, 1]},
        names[1]: {"_type": "choice", "_value": models},
    }
    experiment = made_experiment(tmp_path, 20, a_long_named_trial, space=space)
    with served_view(experiment.folder) as view, visit(browser, view.link()) as person:
        person.go(f"{view.origin}/detail")
        person.see("tab-importance").click()
        expect(person.see("importance-chart").locator(".bars .point")).to_have_count(2)
        labels = person.see("importance-chart").locator(".ytick").all_text_contents()
        assert sorted(label[-4:] for label in labels) == ["kind", "rate"]
        person.see("slice-parameter").select_option(names[1])
        slice_chart = person.page.get_by_label("Result against one parameter")
        expect(slice_chart.get_by_text("/bert.pt")).to_be_visible()
        expect(slice_chart.get_by_text("/roberta.pt")).to_be_visible()
        person.see("tab-parallel").click()
        lines = person.page.get_by_label("Parameters and result of each trial")
        for end in ("pout/rate", "pout/kind", "oberta.pt", "/bert.pt"):
            expect(lines.locator(".annotation-text", has_text=end)).to_be_visible()


def test_the_importance_chart_first_shows_its_progress_and_then_its_method(person):
    held = []
    person.page.route("**/importance*", lambda route: held.append(route))  # noqa: PLW0108 - Playwright refuses a builtin
    with person.page.expect_request("**/importance*"):
        person.see("tab-importance").click()
    caption = person.see("importance-chart").locator("figcaption")
    expect(caption).to_have_text("Computing…")
    held[0].continue_()
    expect(caption).to_contain_text(
        f"computed from {TRIALS} trials. It measures how far the best tenth of them differs"
    )


def test_the_page_requests_the_importance_again_after_an_invalid_response(person):
    person.page.route("**/importance*", lambda route: route.fulfill(body="<html>"))
    person.see("tab-importance").click()
    caption = person.see("importance-chart").locator("figcaption")
    expect(caption).to_have_text("The server at this address is not the manager.")
    person.page.unroute("**/importance*")
    expect(caption).to_contain_text(f"computed from {TRIALS} trials", timeout=DEADLINE_S * 1000)


def test_every_chart_shows_a_note_if_no_trial_matches_the_filter(person):
    person.see("search").fill("nothing like this")
    expect(person.see("table-count")).to_contain_text(f"0 of {TRIALS}")
    for tab in ("metric", "parallel", "duration", "importance", "contour"):
        person.see(f"tab-{tab}").click()
        expect(person.page.locator("figcaption", has_text=NOTE).first).to_be_visible()
    person.screenshot("no-match")


@pytest.mark.smoke
def test_a_click_on_a_chart_point_opens_the_trial(person):
    chart = person.page.get_by_label("Default metric of each trial")
    point = chart.locator(".scatterlayer .point").nth(7)
    point.scroll_into_view_if_needed()
    box = point.bounding_box()
    person.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    person.page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    expect(person.see("detail-00007")).to_be_visible()


def test_the_csv_download_contains_the_filtered_trials(person):
    person.see("search").fill("sgd")
    expect(person.see("table-count")).to_contain_text(f"{TRIALS // 2} of {TRIALS}")
    with person.page.expect_download() as download:
        person.see("download-csv").click()
    rows = list(csv.DictReader(io.StringIO(download.value.path().read_text())))
    assert download.value.suggested_filename == "trials.csv"
    assert {row["optimizer"] for row in rows} == {"sgd"}
    assert {row["number"] for row in rows} == {str(number) for number in range(TRIALS) if number % 2}
    assert all(0 <= float(row["optimizer/momentum"]) <= 1 for row in rows)


def with_long_values(number, now_s):
    trial = a_trial(number, now_s)
    trial.parameters = trial.parameters | {"prompt": "word " * 1000}
    trial.run.final = json.dumps({"default": 0.5} | {f"m{each}": each for each in range(60)})
    return trial


def test_downloads_contain_long_parameter_values_and_all_numbers_of_a_result(browser, tmp_path):
    experiment = made_experiment(tmp_path / "made", 2, with_long_values, space=SPACE)
    with served_view(experiment.folder) as view, visit(browser, view.link()) as person:
        person.go(f"{view.origin}/detail")
        with person.page.expect_download() as download:
            person.see("download-csv").click()
        rows = list(csv.DictReader(io.StringIO(download.value.path().read_text())))
        assert [row["number"] for row in rows] == ["1", "0"]
        for row in rows:
            assert row["prompt"] == "word " * 1000
            assert [row[f"value/m{each}"] for each in range(60)] == [str(each) for each in range(60)]
        for number in ("0", "1"):
            person.page.get_by_label(f"Select trial {number} to compare").check()
        person.see("compare").click()
        expect(person.see("comparison").locator("th[scope=row]", has_text="m59")).to_be_visible()
        person.go(f"{view.origin}/oview")
        with person.page.expect_download() as download:
            person.see("download").click()
        found = json.loads(download.value.path().read_text())
        assert [len(row["metrics"]) for row in found["trials"]] == [60, 60]


def test_the_trial_table_on_a_narrow_screen_shows_the_result_before_the_trial_number(person):
    person.page.set_viewport_size(NARROW)
    person.go(person.page.url)
    heads = person.see("table").locator("thead th").all_text_contents()
    assert [head.strip(" ▲▼") for head in heads[1:3]] == ["Default metric", "No."]
    assert person.see("sort-value").bounding_box()["x"] < NARROW["width"] / 2
    person.screenshot("trials-narrow-first-column")


def test_an_unknown_url_shows_a_not_found_page(person, stored):
    answer = person.page.goto(f"{stored.origin}/no/such/page")
    assert answer is not None
    assert answer.status == 404
    expect(person.see("missing")).to_contain_text("There is no such page")
    person.see("missing").get_by_role("link").click()
    expect(person.page).to_have_url(f"{stored.origin}/oview")
    assert stored.ask("GET", "/nothing").json()["error"].startswith("cannot ")


def test_the_parallel_chart_of_a_single_result_explains_why_all_values_are_equal(browser, tmp_path):
    experiment = made_experiment(tmp_path, 1, a_trial, space=SPACE)
    with served_view(experiment.folder) as view, visit(browser, view.link()) as person:
        person.see("nav-trials").click()
        person.see("tab-parallel").click()
        expect(
            person.page.locator("figcaption", has_text="1 result: all parameters and results are the same")
        ).to_be_visible()
        # The table has a single row, so its region must not be high.
        assert person.page.get_by_role("region", name="Trials", exact=True).bounding_box()["height"] < 150
        person.see("nav-experiments").click()
        expect(person.see("experiments")).to_contain_text("Best")
        assert person.errors == []


def with_loss(number, now_s):
    trial = a_trial(number, now_s)
    if number != 3:
        trial.run.final = json.dumps({"default": trial.run.value, "loss": 1 / (number + 1)})
    return trial


def test_every_result_metric_is_available_as_table_column_and_filter_and_chart_axis(browser, tmp_path):
    experiment = made_experiment(tmp_path, 20, with_loss, space=SPACE)
    with served_view(experiment.folder) as view, visit(browser, view.link()) as person:
        expect(person.page.get_by_text("trial-keeper", exact=True)).to_be_visible()
        expect(person.page.get_by_text(__version__, exact=True)).to_be_visible()
        person.see("nav-trials").click()
        person.see("sort-m:loss").click()
        expect(person.page.locator('[data-test^="row-"]').first).to_have_attribute("data-test", "row-00019")
        person.see("param-filter-name").select_option("value/loss")
        person.see("param-filter-op").select_option(">")
        person.see("param-filter-value").fill("0.19")
        person.see("param-filter-add").click()
        # The losses above 0.19 are 1, 1/2, 1/3 and 1/5. The loss 1/4 would be that of trial 3, which has none.
        expect(person.see("table-count")).to_contain_text("4 of 20")
        person.see("chart-metric").select_option("loss")
        chart = person.page.get_by_label("Default metric of each trial")
        expect(chart.locator(".ytitle")).to_have_text("loss")
        expect(chart.locator("figcaption")).to_contain_text("4 results")
        person.see("tab-parallel").click()
        expect(person.page.locator(".annotation-text", has_text="loss")).to_be_visible()
        # The test hides the column "loss". A reload of the page must not show the column again.
        person.see("columns").locator("summary").click()
        person.see("columns").get_by_label("loss", exact=True).uncheck()
        expect(person.see("sort-m:loss")).to_have_count(0)
        person.go(f"{view.origin}/detail")
        expect(person.see("sort-value")).to_be_visible()
        expect(person.see("sort-m:loss")).to_have_count(0)
        assert person.errors == []
