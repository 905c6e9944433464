"""Tags and notes of a running experiment. They survive a killed manager and concurrent changes, and `nnictl view` shows each
change.
"""

import json
import threading

import pytest
from made_experiment import made_experiment, served_view
from real_experiment import wait_until

from nni_manager.cli import main
from nni_manager.domain.remarks import Remarks
from nni_manager.experiment.queries import StartedExperiment
from nni_manager.store.reader import StoreReader
from nni_manager.store.registry import Registry

GATED = """
import os, time
import nni_sdk as nni
nni.get_next_parameter()
while not os.path.exists("gate"):
    time.sleep(0.05)
nni.report_final_result(1)
"""


@pytest.fixture(autouse=True)
def state_home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def nnictl(capsys):
    def run(*arguments):
        capsys.readouterr()
        code = main.run(arguments)
        return code, *capsys.readouterr()

    return run


def stored(folder, trial_id=None):
    with StoreReader(folder.database) as reader:
        return reader.remarks(trial_id)


def test_remarks_are_durable_after_the_response_and_are_restored_by_the_next_manager(
    a_real_experiment, nnictl
):
    experiment = a_real_experiment(GATED, trialConcurrency=1, maxTrialNum=1)
    folder = experiment.folder
    Registry.of_user().add(folder)
    experiment.start()
    (trial,) = wait_until(lambda: experiment.get("/trials"), "the trial is stored")
    path = f"/trials/{trial['id']}/remarks"
    emoji = "\U0001f600" * 10_000

    def change(document, path=path):
        answer = experiment.ask("PATCH", path, data=json.dumps(document, ensure_ascii=False).encode())
        return answer.status_code, answer.json()

    # A client may repeat its request. Then the second response equals the first response.
    for _ in range(2):
        assert change({"addTags": ["keep", "bad"], "note": "one\ntwo"}) == (
            200,
            {"tags": ["bad", "keep"], "note": "one\ntwo"},
        )
        assert stored(folder, trial["id"]) == Remarks(("bad", "keep"), "one\ntwo")
    seen = experiment.get("/changes")
    assert seen["trials"][0]["tags"] == ["bad", "keep"]
    assert seen["trials"][0]["note"] == "one"
    assert change({"removeTags": ["bad"]})[1]["tags"] == ["keep"]
    (row,) = experiment.get(f"/changes?since={seen['version']}")["trials"]
    assert row["tags"] == ["keep"]
    # A refused request changes neither tags nor notes.
    for document in ({"addTags": ["a b"]}, {"tags": []}, [], {"note": 5}, {"note": "x" * 10_001}):
        status, answer = change(document)
        assert (status, answer["error"][:7]) == (400, "cannot "), document
    assert change({"addTags": ["x"]}, "/trials/nope/remarks")[0] == 404
    assert stored(folder, trial["id"]) == Remarks(("keep",), "one\ntwo")
    # The paths of NNI's API return only fields of NNI, so they return neither tags nor notes.
    assert not {"tags", "note"} & experiment.get("/trial-jobs")[0].keys()
    assert not {"tags", "note"} & experiment.get("/experiment").keys()
    # While the manager runs, nnictl and the Python API send their requests to it.
    assert nnictl("trial", "note", "TEST", "-T", trial["id"], "--text", emoji)[0] == 0
    assert experiment.get(f"/trials/{trial['id']}")["note"] == emoji
    assert nnictl("trial", "tag", "TEST", "-T", trial["id"], "--add", "a b")[0] == 1
    assert StartedExperiment("TESTEXPT").tag("baseline") == ["baseline"]
    assert experiment.summary()["tags"] == experiment.get("/experiment-metadata")["tag"] == ["baseline"]
    code, _, err = nnictl("experiment", "tag", "TEST", *(f"--add=t{n}" for n in range(20)))
    assert (code, "there would be 21 tags, and the limit is 20" in err) == (1, True)
    # Without a manager, nnictl writes remarks to the store, and the next manager reads them.
    experiment.kill_manager()
    assert nnictl("trial", "tag", "TEST", "-T", trial["id"], "--add", "without-manager")[0] == 0
    experiment.start()
    assert experiment.get(f"/trials/{trial['id']}")["tags"] == ["keep", "without-manager"]
    assert experiment.get(f"/trials/{trial['id']}")["note"] == emoji
    assert experiment.summary()["tags"] == ["baseline"]
    (experiment.code / "gate").touch()
    experiment.wait_for_status("DONE")
    # Remarks can be changed after the experiment has ended, because its manager still runs.
    assert change({"note": ""}) == (200, {"tags": ["keep", "without-manager"], "note": ""})
    assert stored(folder, trial["id"]) == Remarks(("keep", "without-manager"), "")


def test_concurrent_remark_changes_of_many_clients_are_all_applied(a_real_experiment):
    experiment = a_real_experiment(GATED, trialConcurrency=1, maxTrialNum=1)
    experiment.start()
    (trial,) = wait_until(lambda: experiment.get("/trials"), "the trial is stored")
    answers = []

    def tag(number):
        body = {"addTags": [f"t{number:02d}"]}
        answers.append(experiment.ask("PATCH", f"/trials/{trial['id']}/remarks", json=body).status_code)

    threads = [threading.Thread(target=tag, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 20
    assert stored(experiment.folder, trial["id"]).tags == tuple(f"t{number:02d}" for number in range(20))


def test_a_view_shows_remarks_changed_by_nnictl_and_refuses_changes_on_the_page(tmp_path, nnictl):
    folder = made_experiment(tmp_path, 2).folder
    Registry.of_user().add(folder)
    with served_view(folder) as view:
        refused = view.ask("PATCH", "/trials/00000/remarks", json={"addTags": ["keep"]})
        assert (refused.status_code, "open read-only here" in refused.json()["error"]) == (403, True)
        seen = view.get("/changes")["version"]
        assert nnictl("trial", "tag", "TEST", "-T", "00000", "--add", "keep")[0] == 0
        assert nnictl("experiment", "note", "TEST", "--text", "ours")[0] == 0

        def changed():
            news = view.get(f"/changes?since={seen}")
            return news if news["trials"] and news["summary"]["note"] else None

        news = wait_until(changed, "the view shows the change")
        assert [(row["id"], row["tags"]) for row in news["trials"]] == [("00000", ["keep"])]
        assert news["summary"]["note"] == "ours"
        (line,) = view.get("/experiments")
        assert (line["note"], line["tags"]) == ("ours", [])
