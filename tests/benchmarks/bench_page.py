"""The cost of the web page: time until it is usable, and bytes, in Chromium, at 100, 1,000 and 10,000
trials.
"""

import json
import sys
import tempfile
from pathlib import Path
from statistics import median

# The shared helpers are in tests/fakes.
sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from browser import CHROMIUM, chromium, visit
from made_experiment import made_experiment, served_view
from table import Row, render

SIZES = (100, 1_000, 10_000)
ROUNDS = 5
USABLE_MS = 300.0
# From the click: the time until the page is usable, the load time, and the bytes received by then. Charts
# come later.
_MEASURED = """JSON.stringify([
  performance.getEntriesByName('usable')[0].startTime,
  performance.getEntriesByType('navigation')[0].loadEventEnd,
  [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]
    .filter((each) => !each.name.includes('plotly')).reduce((sum, each) => sum + each.transferSize, 0),
])"""


def page(sizes: tuple[int, ...] = SIZES, rounds: int = ROUNDS) -> list[Row]:
    """Median time from a page load until it is usable with cached files, and bytes without a cache."""
    if CHROMIUM is None:
        print("chromium is not installed: the web page is not measured", file=sys.stderr)
        return []
    rows = []
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        for trials in sizes:
            experiment = made_experiment(Path(folder) / str(trials), trials)
            with served_view(experiment.folder) as view:
                for path in ("/oview", "/detail") if trials == sizes[-1] else ("/oview",):
                    first_bytes, measured = 0, []
                    for _ in range(rounds):
                        with visit(browser, view.link()) as person:
                            person.page.goto("about:blank")
                            person.go(view.origin + path)
                            measured.append(json.loads(person.evaluate(_MEASURED)))
                        with visit(browser, view.link()) as person:
                            first_bytes = json.loads(person.evaluate(_MEASURED))[2]
                    usable_ms, load_ms = (median(each[number] for each in measured) for number in (0, 1))
                    after_ms = median(max(each[0] - each[1], 0.0) for each in measured)
                    again_bytes = median(each[2] for each in measured)
                    rows.append(
                        Row(
                            f"page {path}, {trials:,} trials: usable after its load",
                            f"{after_ms:.0f} ms ({usable_ms:.0f} ms after the click)",
                            f"load {load_ms:.0f} ms",
                            f"{again_bytes / 1e3:.0f} KB, first {first_bytes / 1e3:.0f} KB",
                            f"<= {USABLE_MS:.0f} ms",
                            after_ms <= USABLE_MS,
                        )
                    )
    return rows


if __name__ == "__main__":
    print(render(page()))
