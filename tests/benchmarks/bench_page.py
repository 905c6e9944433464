"""The cost of the web page in Chromium, with 100 to 100,000 trials: the time until it is usable, the transferred bytes, and the
time of a scroll step.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median

# Benchmarks import helpers of the tests from tests/fakes, so this folder is added to the module search path.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from browser import CHROMIUM, chromium, visit
from made_experiment import ServedView, made_experiment, made_trial, served_view
from page_measures import (
    MAX_OVERVIEW_MS,
    MAX_SCROLL_MS,
    MAX_TRANSFERRED_BYTES,
    chart_is_drawn,
    opened,
    scroll_steps_ms,
    some_trial,
    transferred_bytes,
)
from playwright.sync_api import Browser
from table import Row, render

SIZES = (100, 1_000, 10_000, 100_000)
ROUNDS = 5
USABLE_MS = 300.0
"""The goal up to `MANY` trials; beyond, it is `MAX_OVERVIEW_MS`."""
MANY = 10_000
SCROLL_STEPS = 60
FLOOR_TRIALS = 1_000
"""The page has all of so many trials: its scroll steps need no request."""


def page(sizes: tuple[int, ...] = SIZES, rounds: int = ROUNDS) -> list[Row]:
    """Median time from a page load until the page is usable, with cached files; and the bytes transferred without a cache."""
    if CHROMIUM is None:
        print("chromium is not installed: the web page is not measured", file=sys.stderr)
        return []
    rows = []
    floor_ms: list[float] = []
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        for trials in sizes:
            is_large = trials > MANY
            # A large experiment gets random results and parameters. They are the hardest to compress, so the page receives the
            # largest possible responses.
            make = some_trial if is_large else made_trial
            experiment = made_experiment(Path(folder) / str(trials), trials, make)
            with served_view(experiment.folder) as view:
                for path in ("/oview", "/detail") if trials >= MANY else ("/oview",):
                    rows += _usable(browser, view, path, trials, rounds)
                if is_large:
                    rows += _large(browser, view, trials, floor_ms)
                elif trials == FLOOR_TRIALS:
                    floor_ms = _scroll_steps_ms(browser, view)
    return rows


def _usable(browser: Browser, view: ServedView, path: str, trials: int, rounds: int) -> list[Row]:
    first_bytes, measured, again_bytes = 0, [], []
    for _ in range(rounds):
        with visit(browser, view.link()) as person:
            person.page.goto("about:blank")
            person.go(view.origin + path)
            measured.append(opened(person))
            again_bytes.append(transferred_bytes(person))
        with visit(browser, view.link()) as person:
            first_bytes = transferred_bytes(person)
    usable_ms, load_ms = (
        median(each.usable_ms for each in measured),
        median(each.load_ms for each in measured),
    )
    after_ms = median(each.after_load_ms for each in measured)
    goal_ms = MAX_OVERVIEW_MS if trials > MANY else USABLE_MS
    return [
        Row(
            f"page {path}, {trials:,} trials: usable after its load",
            f"{after_ms:.0f} ms ({usable_ms:.0f} ms after the click)",
            f"load {load_ms:.0f} ms",
            f"{median(again_bytes) / 1e3:.0f} KB, first {first_bytes / 1e3:.0f} KB",
            f"<= {goal_ms:.0f} ms",
            after_ms <= goal_ms,
        )
    ]


def _scroll_steps_ms(browser: Browser, view: ServedView) -> list[float]:
    with visit(browser, view.link()) as person:
        person.go(f"{view.origin}/detail")
        chart_is_drawn(person)
        return scroll_steps_ms(person, SCROLL_STEPS)


def _large(browser: Browser, view: ServedView, trials: int, floor_ms: list[float]) -> list[Row]:
    """For a large experiment: the bytes transferred until the first chart is drawn, and the duration of a scroll step."""
    received = {}
    for path in ("/oview", "/detail"):
        with visit(browser, view.link()) as person:
            person.page.goto("about:blank")
            person.go(view.origin + path)
            chart_is_drawn(person)
            received[path] = transferred_bytes(person)
    steps_ms, most_bytes = _scroll_steps_ms(browser, view), max(received.values())
    return [
        Row(
            f"page, {trials:,} trials: received with its first chart",
            ", ".join(f"{path} {size / 1e3:.0f} KB" for path, size in received.items()),
            "–",
            "–",
            f"<= {MAX_TRANSFERRED_BYTES / 1e3:.0f} KB",
            most_bytes <= MAX_TRANSFERRED_BYTES,
        ),
        Row(
            f"page /detail, {trials:,} trials: a scroll step to painted rows",
            f"{median(steps_ms):.0f} ms (most {max(steps_ms):.0f} ms)",
            f"{FLOOR_TRIALS:,} trials {median(floor_ms):.0f} ms" if floor_ms else "–",
            f"{median(steps_ms) / median(floor_ms):.1f} x" if floor_ms else "–",
            f"<= {MAX_SCROLL_MS:.0f} ms",
            median(steps_ms) <= MAX_SCROLL_MS,
        ),
    ]


if __name__ == "__main__":
    print(render(page()))
