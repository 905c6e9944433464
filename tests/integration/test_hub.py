"""The hub serves all experiments of a user and lists them. It serves the API of each experiment from its manager or its store. It
also starts, stops, resumes and deletes experiments.
"""

import contextlib
import shutil
import signal
import socket
import threading

import pytest
import requests
from deadlines import DEADLINE_S
from made_experiment import events_of, made_experiment, write
from real_experiment import RealExperiment, wait_until
from served_hub import served_hub
from strangers import session_of_another_user

from nni_manager.domain.remarks import Remarks
from nni_manager.hub import forward, views
from nni_manager.store.errors import StoreBusy
from nni_manager.store.reader import StoreReader
from nni_manager.store.registry import Registry
from nni_manager.store.rows import remarks_row

ROOT = "/api/v1/nni"
# The trial reports once, and then waits until a signal ends it.
ENDLESS = """
import signal
import nni_sdk
nni_sdk.report_intermediate_result(nni_sdk.get_next_parameter()["x"])
signal.pause()
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with served_hub(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def stored(hub, tmp_path):
    experiment = made_experiment(tmp_path / "made", 3)
    Registry.of_user().add(experiment.folder)
    return experiment


@pytest.fixture
def running(hub, tmp_path):
    """An experiment with a manager and a running trial."""
    experiment = RealExperiment(tmp_path / "running", ENDLESS, maxTrialNum=1, experiment_id="RUNNING1")
    experiment.create()
    Registry.of_user().add(experiment.folder)
    experiment.start()
    wait_until(experiment.row_count, "the trial reports")
    yield experiment
    experiment.close()


def of(experiment, path):
    return f"/experiments/{experiment.folder.experiment_id}{ROOT}{path}"


def test_the_probe_endpoints_of_the_hub_need_no_token_and_return_no_data_of_experiments(hub, stored):
    with session_of_another_user() as another:
        assert another.get(f"{hub.origin}{ROOT}/summary", timeout=DEADLINE_S).status_code == 401
        for path in ("/livez", "/readyz"):
            answer = another.get(hub.origin + path, timeout=DEADLINE_S)
            assert (answer.status_code, answer.text) == (200, "ok\n")
            assert another.post(hub.origin + path, timeout=DEADLINE_S).status_code == 401


def test_the_probes_report_a_hub_without_its_state_folder_as_alive_but_not_ready(hub, tmp_path):
    (tmp_path / "state").rename(tmp_path / "unmounted")
    answer = requests.get(f"{hub.origin}/readyz", timeout=DEADLINE_S)
    assert (answer.status_code, answer.text) == (
        503,
        "cannot write to the state folder; mount its storage\n",
    )
    assert requests.get(f"{hub.origin}/livez", timeout=DEADLINE_S).status_code == 200
    (tmp_path / "unmounted").rename(tmp_path / "state")
    assert requests.get(f"{hub.origin}/readyz", timeout=DEADLINE_S).text == "ok\n"


def test_the_hub_lists_all_experiments_with_their_learning_curves(hub, stored, running):
    lines = {line["id"]: line for line in hub.get("/all")}
    assert lines.keys() == {"TESTEXPT", "RUNNING1"}
    assert lines["TESTEXPT"]["best"][-1][2] == lines["TESTEXPT"]["bestValue"] == 2 / 7
    assert (lines["RUNNING1"]["managerIsRunning"], lines["TESTEXPT"]["managerIsRunning"]) == (True, False)
    (curve,) = hub.get("/curves?ids=TESTEXPT,absent")
    assert (curve["id"], curve["results"]) == ("TESTEXPT", 3)


def test_the_404_response_of_the_hub_names_the_address_of_its_api_description(hub):
    unknown = hub.ask("GET", f"{ROOT}/absent")
    assert unknown.status_code == 404
    assert f"{ROOT}/openapi.json lists the paths" in unknown.json()["error"]
    described = hub.get("/openapi.json")["paths"]
    assert described[f"{ROOT}/all"].keys() == {"get", "post"}
    assert f"{ROOT}/all/{{experiment_id}}/{{action}}" in described


def test_the_hub_serves_a_stored_experiment_read_only(hub, stored):
    summary = hub.ask("GET", of(stored, "/summary")).json()
    assert (summary["id"], summary["readOnly"], summary["trialCount"]) == ("TESTEXPT", True, 3)
    assert len(hub.ask("GET", of(stored, "/changes")).json()["trials"]) == 3
    for verb, path in [("DELETE", "/experiment"), ("DELETE", "/trial-jobs/00000"), ("POST", "/trial-jobs")]:
        refused = hub.ask(verb, of(stored, path), json={} if verb == "POST" else None)
        assert refused.status_code in (403, 409), path
    assert hub.ask("GET", of(stored, "/trials/absent")).status_code == 404
    unknown = hub.ask("GET", of(stored, "/absent"))
    assert f"{of(stored, '/openapi.json')} lists the paths" in unknown.json()["error"]


def test_the_hub_forwards_requests_to_the_manager_of_a_running_experiment(hub, running):
    summary = hub.ask("GET", of(running, "/summary")).json()
    assert (summary["readOnly"], summary["keepers"]) == (False, 1)
    (trial,) = hub.ask("GET", of(running, "/trials")).json()
    remarks = {"addTags": ["gut-ü"]}
    assert hub.ask("PATCH", of(running, f"/trials/{trial['id']}/remarks"), json=remarks).status_code == 200
    with StoreReader(running.folder.database) as reader:
        assert reader.remarks(trial["id"]).tags == ("gut-ü",)
    refused = hub.ask("PUT", of(running, "/experiment?update_type=NOTHING"), json={"params": {}})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("cannot ")
    with hub.ask("GET", of(running, "/events"), stream=True) as response:
        documents = events_of(response)
        assert next(documents)["reset"]
        hub.ask("PATCH", of(running, "/remarks"), json={"note": "seen"})
        while next(documents)["summary"]["note"] != "seen":
            pass


def test_the_hub_limits_the_event_streams_of_all_managers_and_answers_other_requests(
    hub, running, monkeypatch
):
    monkeypatch.setattr(forward, "MAX_FOLLOWERS", 2)
    with contextlib.ExitStack() as stack:
        # The list keeps the iterators alive, because a stream is closed when its iterator is garbage-collected.
        following = []
        for _ in range(2):
            response = stack.enter_context(hub.ask("GET", of(running, "/events"), stream=True))
            following.append(events_of(response))
            assert next(following[-1])["reset"]
        refused = hub.ask("GET", of(running, "/events"))
        assert (refused.status_code, refused.json()["error"].endswith("; poll /changes")) == (503, True)
        assert hub.ask("GET", of(running, "/changes")).status_code == 200

    def is_admitted():
        with hub.ask("GET", of(running, "/events"), stream=True) as response:
            return response.status_code == 200

    wait_until(is_admitted, "the hub has detected that the streams are closed")


def test_the_hub_serves_the_store_of_a_killed_manager_and_forwards_again_after_a_resume(hub, running):
    assert not hub.ask("GET", of(running, "/summary")).json()["readOnly"]
    with hub.ask("GET", of(running, "/events"), stream=True) as response:
        next(events_of(response))
        running.kill_manager()
        with contextlib.suppress(requests.RequestException):
            assert list(events_of(response)) == []
    summary = hub.ask("GET", of(running, "/summary")).json()
    assert summary["readOnly"]
    assert "the manager of experiment RUNNING1 is not running" in summary["problem"]
    running.start()
    assert not hub.ask("GET", of(running, "/summary")).json()["readOnly"]


def test_the_hub_logs_no_traceback_if_an_event_stream_ends_because_its_manager_or_view_ends(
    hub, running, caplog
):
    for end_source in (running.kill_manager, running.start):
        with hub.ask("GET", of(running, "/events"), stream=True) as response:
            documents = events_of(response)
            next(documents)
            end_source()
            hub.ask("GET", of(running, "/summary"))
            with pytest.raises(requests.RequestException):
                list(documents)
    assert "Traceback" not in caplog.text


def test_the_error_of_an_unresponsive_manager_contains_its_address(hub, running, monkeypatch):
    monkeypatch.setattr(forward, "TIMEOUT_S", 0.5)
    running.manager.send_signal(signal.SIGSTOP)
    try:
        refused = hub.ask("GET", of(running, "/summary"))
    finally:
        running.manager.send_signal(signal.SIGCONT)
    assert refused.status_code == 502
    assert refused.json()["error"].startswith(
        f"cannot reach the manager at http://127.0.0.1:{running.port}: "
    )
    assert hub.ask("GET", of(running, "/summary")).status_code == 200


ENTRANCES = ("/entrance", "/./entrance", "/%2e/entrance", "//entrance", "/trials/../entrance", "/trials/%2e%2e/entrance",
             "/x/..%2fentrance")  # fmt: skip


def test_the_hub_refuses_requests_for_a_login_link_in_every_spelling_of_their_path(hub, running):
    for path in ENTRANCES:
        with socket.create_connection(("127.0.0.1", hub.port), timeout=DEADLINE_S) as peer:
            head = f"POST {of(running, path)} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n"
            peer.sendall(f"{head}Authorization: Bearer {hub.session_auth.token}\r\n\r\n".encode())
            answer = b""
            while piece := peer.recv(65536):
                answer += piece
        assert answer.split(b" ")[1] in (b"403", b"404"), (path, answer)
        assert b'"code"' not in answer, path


def test_the_hub_starts_stops_resumes_and_deletes_experiments(hub, tmp_path):
    work = RealExperiment(tmp_path / "work", ENDLESS, maxTrialNum=1)
    started = hub.ask("POST", f"{ROOT}/all", json={"config": str(work.config_file)})
    assert started.status_code == 200, started.text
    (line,) = hub.get("/all")
    assert line["managerIsRunning"]
    name = line["id"]
    for action in ("stop", "resume", "stop"):
        done = hub.ask("POST", f"{ROOT}/all/{name}/{action}")
        assert done.status_code == 200, done.text
        assert hub.get("/all")[0]["managerIsRunning"] is (action == "resume")
        if action == "resume":
            refused = hub.ask("DELETE", f"{ROOT}/all/{name}")
            assert refused.status_code == 409
            assert f"cannot delete experiment {name}: it is running" in refused.json()["error"]
    assert hub.ask("DELETE", f"{ROOT}/all/{name}").status_code == 200
    assert hub.get("/all") == []
    assert work.config_file.exists()


@pytest.mark.parametrize(
    ("verb", "path", "body", "status", "error"),
    [
        ("POST", "/all", {"config": "config.yml"}, 400, "the body names no file"),
        ("POST", "/all", {"config": "/absent/config.yml"}, 409, "cannot read /absent/config.yml"),
        ("POST", "/all", [], 400, "the body names no file"),
        ("POST", "/all", {"config": "/a\0b"}, 400, "the body names no file"),
        ("POST", "/all/absent/stop", None, 404, "cannot find experiment 'absent'"),
        ("POST", "/all/TESTEXPT/stop", None, 409, "cannot stop experiment TESTEXPT"),
        ("POST", "/all/TESTEXPT/publish", None, 404, "cannot do 'publish'"),
        ("DELETE", "/all/--all", None, 404, "cannot find experiment '--all'"),
        ("DELETE", "/all/..", None, 404, ""),
    ],
)
def test_an_invalid_action_is_refused_with_the_reason(hub, stored, verb, path, body, status, error):
    refused = hub.ask(verb, f"{ROOT}{path}", json=body)
    assert refused.status_code == status, refused.text
    assert error in refused.json()["error"]
    assert stored.folder.has_database()


def storage_threads():
    return sum(thread.name.startswith("storage") for thread in threading.enumerate())


def test_views_of_stored_experiments_leave_no_threads(hub, stored, tmp_path):
    for number in range(4):
        # If the database file was replaced, the hub opens a new view of the experiment. A copy of the same content is enough.
        shutil.copy(stored.folder.database, tmp_path / "copy")
        (tmp_path / "copy").replace(stored.folder.database)
        assert hub.ask("GET", of(stored, "/trials/00000/attempts")).status_code == 200
        if number == 0:
            before = storage_threads()
            assert before > 0
    wait_until(lambda: storage_threads() == before, "the threads of earlier views have ended")


def test_a_view_with_an_open_event_stream_stays_open_while_another_experiment_is_viewed(
    hub, stored, tmp_path, monkeypatch
):
    monkeypatch.setattr(views, "MAX_VIEWS", 1)
    another = made_experiment(tmp_path / "another", 1, experiment_id="ANOTHER1")
    Registry.of_user().add(another.folder)
    with hub.ask("GET", of(stored, "/events"), stream=True) as response:
        documents = events_of(response)
        assert next(documents)["reset"]
        for _ in range(2):
            assert hub.ask("GET", of(another, "/summary")).json()["trialCount"] == 1
        write(stored.folder, remarks_row(None, Remarks(note="seen")))
        assert next(documents)["summary"]["note"] == "seen"


def test_the_hub_shows_the_new_data_of_a_stored_experiment_whose_database_was_replaced(hub, stored, tmp_path):
    assert hub.ask("GET", of(stored, "/summary")).json()["trialCount"] == 3
    another = made_experiment(tmp_path / "another", 1)
    another.folder.database.replace(stored.folder.database)
    assert hub.ask("GET", of(stored, "/summary")).json()["trialCount"] == 1


def test_the_list_of_all_experiments_shows_a_problem_for_an_experiment_whose_results_cannot_be_read(
    hub, stored, tmp_path, monkeypatch
):
    Registry.of_user().add(made_experiment(tmp_path / "another", 1, experiment_id="ANOTHER1").folder)
    values_over_time = StoreReader.values_over_time

    def fail_for_one(reader, *arguments):
        if reader.experiment().experiment_id == stored.folder.experiment_id:
            raise StoreBusy("the disk does not answer")
        return values_over_time(reader, *arguments)

    monkeypatch.setattr(StoreReader, "values_over_time", fail_for_one)
    problems = {line["id"]: line.get("problem") for line in hub.get("/all")}
    assert problems == {stored.folder.experiment_id: "the disk does not answer", "ANOTHER1": None}


def test_a_tilde_in_the_path_of_an_experiment_file_stands_for_the_home(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    answer = hub.ask("POST", f"{ROOT}/all", json={"config": "~/absent.yml"})
    assert f"{tmp_path}/absent.yml" in answer.json()["error"]
