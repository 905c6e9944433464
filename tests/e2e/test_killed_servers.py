"""The hub or a manager is killed at a random moment of an action.

The pages must report the lost connection, and no result may be lost. Another value of `KILL_SEED` selects other moments.
"""

import json
import os
import random
import signal
import time
from contextlib import ExitStack, suppress

import psutil
import pytest
from amounts import amount
from browser import chromium, expect, needs_chromium, visit
from deadlines import DEADLINE_S
from free_ports import free_port_pair
from playwright.sync_api import TimeoutError
from real_experiment import wait_until
from user_home import left_in, processes_with, run_nnictl

from nni_manager.store.reader import StoreReader
from nni_manager.store.registry import Registry

pytestmark = [needs_chromium, pytest.mark.timeout(400)]

CONFIG = """\
experimentName: {name}
trialConcurrency: 2
maxTrialNumber: {trials}
searchSpace: {{x: {{_type: uniform, _value: [0, 1]}}}}
trialCommand: python3 train.py {name}
trialCodeDirectory: .
tuner: {{name: Random}}
trainingService: {{platform: local}}
"""
# Each reported value is unique. A trial appends a value to its file only after the SDK call that reports the value has returned.
# Then it sleeps for 0.1 s.
TRAIN = """
import os, sys, time
import nni_sdk
nni_sdk.get_next_parameter()
values = [int.from_bytes(os.urandom(6), "big") for _ in range(3)]
file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for value in values:
    (nni_sdk.report_final_result if value is values[-1] else nni_sdk.report_intermediate_result)(value)
    os.write(file, b"%d\\n" % value)
    time.sleep(0.1)
"""
WITHIN_S = {"nothing": 1.0, "stop": 3.0, "resume": 2.0, "start": 2.0, "delete": 1.0}
"""A server is killed at a random moment within this time after the action."""
KILLS = amount(
    [("nothing", "manager"), ("stop", "hub"), ("start", "manager")],
    [(action, victim) for action in WITHIN_S for victim in ("hub", "manager")] * 15,
)


class Site:
    """A home with a running experiment and the hub, and two pages in a browser: the list and the experiment."""

    def __init__(self, browser, folder, stack):
        self.folder, self.port = folder, free_port_pair()
        self.nnictl("create", "--config", "main.yml")
        (main,) = Registry.of_user().all()
        self.experiment_id = main.experiment_id
        self.list = stack.enter_context(visit(browser, self.serve("--port", str(self.port))))
        self.page = stack.enter_context(visit(browser, self.serve()))
        self.page.go(f"http://127.0.0.1:{self.port}/experiments/{self.experiment_id}/oview")

    def nnictl(self, *arguments):
        done = run_nnictl(self.folder, {}, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def serve(self, *options):
        """Start the hub if it does not run; return a new login link."""
        return json.loads(self.nnictl("web", "--json", *options))["links"][0]

    def button(self, action, name="main"):
        """A button in an experiment's row of the list."""
        return self.list.page.get_by_role("button", name=f"{action} {name}", exact=True)

    def has(self, name):
        """True if the list has this experiment."""
        return self.list.page.get_by_role("link", name=name, exact=True).count() > 0

    def stored(self):
        """All values in the store of the main experiment, also those of attempts that were lost."""
        (folder,) = (each for each in Registry.of_user().all() if each.experiment_id == self.experiment_id)
        with StoreReader(folder.database) as reader:
            return [json.loads(value) for (value,) in reader.rows_of("metric", ["value"])]

    def returned(self):
        """The values of the main experiment whose report call has returned to the training code."""
        return {int(line) for line in (self.folder / "main").read_text().split()}

    def act(self, action):
        """Perform an action in the list, as a user does; return without waiting for the server."""
        match action:
            case "stop":
                self.button("Stop").click()
                self.list.see("confirm-yes").click()
            case "resume":
                self.button("Resume").click()
            case "delete":
                self.button("Delete", "other").click()
                self.list.see("confirm-yes").click()
            case "start":
                self.list.see("start").click()
                self.list.page.get_by_role("textbox", name="Experiment file").fill(
                    str(self.folder / "other.yml")
                )
                self.list.page.get_by_role("button", name="Start", exact=True).click()

    def kill(self, victim):
        """Kill the hub, or the manager that started last; return False if there is none."""
        found = processes_with(self.folder, {"hub": "nni_manager.hub", "manager": "nni_manager"}[victim])
        for process in found[-1:]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
                process.wait()
        return bool(found)

    def settle(self):
        """Wait until no action is in progress in the page, and until the commands that the killed hub had started have exited."""
        expect(self.list.page.get_by_text("Working…")).to_have_count(0, timeout=DEADLINE_S * 1000)
        wait_until(lambda: not processes_with(self.folder, "nni_manager.cli"), "no command runs")
        self.list.page.reload()
        self.list.is_ready()

    def press(self, action, name, until):
        """Press a button until the list shows that the action has succeeded. The press is repeated, because a refused action
        shows a message that asks the user to repeat it.
        """
        deadline_s = time.monotonic() + DEADLINE_S
        while not until():
            assert time.monotonic() < deadline_s, (action, self.list.see("toast").all_inner_texts())
            if self.button(action, name).count():
                # The page may have removed the button since `count()` was called, and then the click times out.
                with suppress(TimeoutError):
                    self.button(action, name).click(timeout=3000)
                if self.list.see("confirm-yes").count():
                    self.list.see("confirm-yes").click()
                expect(self.list.page.get_by_text("Working…")).to_have_count(0, timeout=DEADLINE_S * 1000)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed") / "work"
    folder.mkdir()
    for name, trials in (("main", 99_999), ("other", 1)):
        (folder / f"{name}.yml").write_text(CONFIG.format(name=name, trials=trials))
    (folder / "train.py").write_text(TRAIN)
    with pytest.MonkeyPatch.context() as patch, chromium() as browser, ExitStack() as stack:
        patch.setenv("XDG_STATE_HOME", str(folder.parent / "state"))
        for arguments in (("stop", "--all"), ("web", "--stop")):
            stack.callback(run_nnictl, folder, {}, *arguments)
        yield Site(browser, folder, stack)
    assert left_in(folder) == []


@pytest.mark.parametrize("number", range(len(KILLS)))
def test_a_server_killed_during_an_action_is_reported_on_the_pages_and_no_result_is_lost(site, number):
    action, victim = KILLS[number]
    draw = random.Random(f"{os.environ.get('KILL_SEED', '1')} {number}")
    after_s = draw.uniform(0, WITHIN_S[action])
    print(f"{victim} killed {after_s:.3f} s after {action}")
    if action == "resume":
        site.press("Stop", "main", until=site.button("Resume").count)
    if action == "delete":
        site.nnictl("create", "--config", "other.yml")
        expect(site.button("Stop", "other")).to_be_visible()
        site.press("Stop", "other", until=site.button("Delete", "other").count)

    site.act(action)
    site.list.page.wait_for_timeout(after_s * 1000)
    had_victim = site.kill(victim)
    if victim == "hub":
        expect(site.list.see("trouble")).to_contain_text("does not answer")
        expect(site.page.see("connection")).to_have_text("Not connected")
        site.serve("--port", str(site.port))
        expect(site.list.see("trouble")).to_be_empty()
    elif had_victim and action == "nothing":
        expect(site.button("Resume")).to_be_visible()
        expect(site.page.see("error-panel")).to_contain_text("is not running, this is its last status")
    site.settle()

    # An action that the kill interrupted either is complete or has had no effect. So the experiment `other` may exist, and then
    # the test stops and deletes it.
    if action in ("start", "delete") and site.has("other"):
        site.press("Stop", "other", until=site.button("Delete", "other").count)
        site.press("Delete", "other", until=lambda: not site.has("other"))
    site.press("Resume", "main", until=site.button("Stop").count)
    expect(site.page.see("error-panel")).not_to_contain_text("is not running")
    returned = site.returned()
    wait_until(lambda: returned <= set(site.stored()), "each value that was reported is stored")
    wait_until(lambda: site.returned() - returned, "trials continue")
    stored = site.stored()
    assert len(stored) == len(set(stored))
