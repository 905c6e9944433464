"""A view of a stored experiment shows all data, changes nothing, and does not block a resume."""

import contextlib
import os
import sqlite3
import subprocess
import sys

import pytest
from deadlines import DEADLINE_S
from free_ports import free_port_pair
from real_experiment import a_started_experiment, wait_until

from nni_manager.client.manager_client import api_url, session_with
from nni_manager.engine.stored_experiment import StoredExperimentReader
from nni_manager.store.reader import StoreReader
from nni_manager.support.web_server_options import WebServerOptions
from nni_manager.web.api import ManagerApi
from nni_manager.web.session_auth import SessionAuth

GATED = """
import os, time
import nni_sdk as nni
nni.get_next_parameter()
nni.report_intermediate_result(nni.get_sequence_id())
while not os.path.exists("gate"):
    time.sleep(0.05)
nni.report_final_result(2)
"""


VIEW = [sys.executable, "-m", "nni_manager", "--view"]


@pytest.fixture(scope="module")
def view_of():
    """Return a function that serves a view of an experiment in another process. The function returns the process record of the
    view.
    """
    processes = []

    def serve(experiment):
        port = free_port_pair()
        processes.append(
            subprocess.Popen(
                [*VIEW, "--folder", experiment.folder.path, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
        pid = processes[-1].pid

        def is_ready():
            assert processes[-1].poll() is None, processes[-1].stdout.read().decode()
            view = experiment.folder.running_view()
            return view is not None and view.pid == pid

        wait_until(is_ready, "the view is ready")
        return experiment.folder.running_view()

    yield serve
    for process in processes:
        process.terminate()
        said, _ = process.communicate(timeout=DEADLINE_S)
        assert (process.returncode, said) == (0, b"")


def ask(view, method, path, **options):
    with session_with(view) as session:
        return session.request(method, api_url(view) + path, timeout=DEADLINE_S, **options)


def look(view, path):
    answer = ask(view, "GET", path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def content_of(database):
    with contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as opened:
        return list(opened.iterdump())


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """An experiment with two running trials, whose manager was killed."""
    folder = tmp_path_factory.mktemp("killed")
    with a_started_experiment(folder, GATED, trialConcurrency=2, maxTrialNum=3) as experiment:
        wait_until(lambda: experiment.row_count() == 2, "both trials report")
        experiment.kill_manager()
        yield experiment


@pytest.fixture(scope="module")
def view(killed, view_of):
    """The process record of a view of the experiment `killed`."""
    return view_of(killed)


def changing_routes(app, trial_id):
    mount = app.routes[0]
    for route in mount.routes:
        for method in sorted(route.methods - {"GET", "HEAD"}):
            # The test skips routes that open a session of the page or start TensorBoard, and routes that a manager refuses as
            # well.
            if not route.path.startswith(
                ("/entrance", "/session", "/tensorboard", "/experiment/cluster-metadata")
            ) and ((method, route.path) != ("POST", "/experiment")):
                yield method, route.path.replace("{trial_id}", trial_id)


def test_a_view_refuses_every_request_that_would_change_the_experiment(killed, view):
    before, keepers = content_of(killed.folder.database), killed.keeper_pids()
    trial = look(view, "/trials")[0]["id"]
    session_auth = SessionAuth(b"", "TESTEXPT", killed.folder.ended_sessions)
    with contextlib.closing(StoredExperimentReader(killed.folder)) as stored:
        changing = list(
            changing_routes(
                ManagerApi(stored, WebServerOptions(require_token=True), 1, session_auth, lambda: None).app(),
                trial,
            )
        )
    assert ("DELETE", "/experiment") in changing
    for method, path in changing:
        answer = ask(view, method, path, json={})
        assert answer.status_code == 403, (method, path)
        assert answer.json()["error"].startswith(("cannot stop ", "cannot change "))
        assert answer.json()["error"].endswith(
            ": experiment TESTEXPT is open read-only here; `nnictl resume TESTEXPT` resumes it"
        )
    assert look(view, "/check-status")["status"] == "RUNNING"
    assert content_of(killed.folder.database) == before
    assert killed.keeper_pids() == keepers
    for pid in keepers:
        os.kill(pid, 0)


def test_a_view_shows_the_last_stored_state_of_an_experiment_if_its_manager_was_killed(view):
    summary = look(view, "/summary")
    assert (summary["status"], summary["readOnly"], summary["counts"]["RUNNING"]) == ("RUNNING", True, 2)
    assert summary["problem"] == (
        "the manager of experiment TESTEXPT is not running, this is its last status; `nnictl resume TESTEXPT` resumes it"
    )
    assert sorted(row["data"] for row in look(view, "/metric-data")) == ['"0"', '"1"']
    assert look(view, "/experiment")["id"] == "TESTEXPT"


@pytest.mark.usefixtures("view")
def test_a_second_view_of_an_experiment_is_refused(killed):
    second = subprocess.run(
        [*VIEW, "--folder", killed.folder.path, "--port", "1"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert second.returncode == 1
    assert second.stderr.startswith("cannot view experiment TESTEXPT: another process serves it; ")


@pytest.mark.usefixtures("view")
def test_a_view_does_not_lock_an_experiment_against_a_manager(killed):
    with killed.folder.owned() as held:
        assert held.holder.pid == os.getpid()
    with StoreReader(killed.folder.database) as reader:
        assert reader.experiment().state.value == "RUNNING"


# This test is the last, because it resumes the experiment that all tests of this file share.
def test_a_view_shows_the_progress_of_a_manager_that_resumes_the_experiment(killed, view):
    killed.start()
    assert killed.summary()["readOnly"] is False
    wait_until(lambda: not look(view, "/summary")["problem"], "the view shows that the manager runs again")
    refused = ask(view, "DELETE", "/experiment")
    assert refused.json()["error"].endswith(f"open read-only here; use its manager on port {killed.port}")
    (killed.code / "gate").touch()
    killed.wait_for_status("DONE")
    wait_until(lambda: look(view, "/summary")["status"] == "DONE", "the view shows the end")
    assert look(view, "/trials") == killed.get("/trials")
    assert look(view, "/metric-data") == killed.get("/metric-data")
