"""Measurements of the page of a large experiment in a browser, and their goals."""

import json
import random
from dataclasses import dataclass

from browser import Visit, expect
from made_experiment import made_trial

from nni_manager.domain.trial import Trial, TrialState
from trial_keeper.wire.reasons import ExitReason

MAX_OVERVIEW_MS = 500.0
"""From the load event to the overview."""
MAX_SCROLL_MS = 100.0
"""Median time from a scroll step to the painted rows."""
MAX_TRANSFERRED_BYTES = 1_000_000
"""Received by the overview, and by the page of the trials, without the library for charts."""
_SIZES = """JSON.stringify(
  [...performance.getEntriesByType('navigation'), ...performance.getEntriesByType('resource')]
    .filter((each) => !each.name.includes('plotly')).reduce((sum, each) => sum + each.transferSize, 0))"""
_USABLE = """JSON.stringify([
  performance.getEntriesByName('usable')[0].startTime,
  performance.getEntriesByType('navigation')[0].loadEventEnd])"""
# A scroll step ends when the rows at the top, in the middle and at the bottom of the table are painted.
_SCROLL = """(async () => {
  const box = document.querySelector('.scroll');
  const rowHeight = document.querySelector('tr.line').offsetHeight;
  const count = Number(document.querySelector('table.trials').getAttribute('aria-rowcount')) - 1;
  const pageRows = Math.floor((box.clientHeight - document.querySelector('thead').offsetHeight) / rowHeight) - 1;
  const frame = () => new Promise((done) => requestAnimationFrame(done));
  const isPainted = (first) => [0, Math.floor(pageRows / 2), pageRows - 1]
    .every((at) => document.querySelector(`tr.line[aria-rowindex="${Math.min(first + at, count - 1) + 2}"]`) !== null);
  const taken = [];
  for (const share of SHARES) {
    const now = Math.floor(box.scrollTop / rowHeight);
    const first = Math.min(share < 0 ? now + pageRows : Math.floor(share * count), count - pageRows);
    await frame();
    const beganMs = performance.now();
    box.scrollTop = first * rowHeight;
    do await frame(); while (!isPainted(first) && performance.now() - beganMs < 30000);
    await frame();
    taken.push(isPainted(first) ? performance.now() - beganMs : 30000);
  }
  return JSON.stringify(taken);
})()"""


def some_trial(number: int, now_s: float) -> Trial:
    """A trial with a random id, eight random parameters and a random result; every twentieth has failed."""
    rng = random.Random(number)
    value = rng.random()
    trial = made_trial(number, now_s + number, value)
    trial.trial_id = f"{rng.getrandbits(30):x}-{number}"
    trial.parameters = {f"x{place}": rng.random() for place in range(8)}
    trial.run.ended_at_s = now_s + number + 100 * rng.random()
    if number % 20 == 7:
        trial.state, trial.run.reason = TrialState.FAILED, ExitReason.NONZERO_EXIT
        trial.run.exit_code, trial.run.message = 1, "ValueError: loss is nan"
        trial.run.final = trial.run.value = None
    return trial


@dataclass(frozen=True)
class Opened:
    """The times of one page load. `after_load_ms` starts at the load event, the other times start with the navigation."""

    usable_ms: float
    after_load_ms: float
    load_ms: float


def opened(person: Visit) -> Opened:
    """The times of the last page load."""
    usable_ms, load_ms = json.loads(person.evaluate(_USABLE))
    return Opened(usable_ms, max(usable_ms - load_ms, 0.0), load_ms)


def transferred_bytes(person: Visit) -> int:
    """The number of bytes that the page has received since it was loaded, compressed and with headers. The library for charts is
    not counted.
    """
    return int(person.evaluate(_SIZES))


def chart_is_drawn(person: Visit) -> None:
    """Wait until the first chart has points."""
    expect(person.page.locator(".scatterlayer .points path").first).to_be_attached()


def scroll_steps_ms(person: Visit, steps: int) -> list[float]:
    """The times from a scroll step in the table until its rows are painted. The steps go one screen further and to a random
    position in turn.
    """
    rng = random.Random(steps)
    shares = [-1 if number % 2 else rng.random() for number in range(steps)]
    taken: list[float] = json.loads(person.evaluate(_SCROLL.replace("SHARES", json.dumps(shares))))
    return taken
