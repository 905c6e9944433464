"""Requests for windows and samples of trials over the HTTP API."""

import gzip
import json
import random

import pytest
from made_experiment import made_experiment, made_trial, served_view

TRIALS = 300


def some_trial(number, now_s):
    trial = made_trial(number, now_s)
    trial.run.value = random.Random(number).random()
    trial.run.final = str(trial.run.value)
    trial.parameters = {"lr": 10.0 ** -(number % 5), "name": f"n{number % 3}"}
    return trial


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    experiment = made_experiment(tmp_path_factory.mktemp("windows"), TRIALS, some_trial)
    with served_view(experiment.folder) as served:
        yield served


def window(view, **query):
    response = view.ask("GET", "/trial-window", params=query)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_window_contains_a_range_of_the_filtered_and_sorted_trials(view):
    conditions = json.dumps([{"name": "lr", "operator": "≤", "value": "0.01"}])
    found = window(
        view,
        states="SUCCEEDED,FAILED",
        text="N1",
        conditions=conditions,
        sort="value",
        descending="true",
        offset=5,
        limit=7,
    )
    rows = {row["id"]: row for row in view.get("/changes")["trials"]}
    wanted = sorted(
        (
            row
            for row in rows.values()
            if row["parameters"]["lr"] <= 0.01 and row["parameters"]["name"] == "n1"
        ),
        key=lambda row: -row["value"],
    )
    assert found["total"] == TRIALS
    assert found["matching"] == len(wanted)
    assert found["trials"] == wanted[5:12]
    around = window(view, around=wanted[3]["id"], limit=1)
    assert around["trials"] == [wanted[3]]
    assert around["place"] == around["offset"] == wanted[3]["seq"]
    assert window(view, offset=10**9)["trials"] == []


def test_a_window_with_the_option_whole_contains_uncut_values_and_all_metrics(tmp_path):
    def a_long_trial(number, now_s):
        trial = made_trial(number, now_s)
        trial.run.final = json.dumps({f"m{each}": each for each in range(40)})
        trial.parameters = {"prompt": "word " * 1000}
        return trial

    count = 45
    with served_view(made_experiment(tmp_path, count, a_long_trial).folder) as view:
        for row in window(view, limit=2)["trials"]:
            assert (row["cut"], len(row["metrics"]), len(row["parameters"]["prompt"])) == (True, 20, 257)
        rows = window(view, whole="true")["trials"]
        assert [row["seq"] for row in rows] == [*range(count)]
        for row in rows:
            assert (row.get("cut"), len(row["metrics"]), len(row["parameters"]["prompt"])) == (None, 40, 5000)


def test_the_response_for_a_trial_sample_is_compressed_and_contains_the_best_trial(view):
    with view.ask("GET", "/trial-sample", params={"limit": 10}, stream=True) as response:
        assert response.headers["Content-Encoding"] == "gzip"
        document = json.loads(gzip.decompress(response.raw.read(decode_content=False)))
    assert (document["total"], document["matching"], document["results"]) == (TRIALS, TRIALS, TRIALS)
    assert document["parameters"] == ["lr", "name"]
    best = max(row["value"] for row in view.get("/changes")["trials"])
    assert best in [row["value"] for row in document["trials"]]


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ({"states": "RUNING"}, "cannot use states=RUNING: write some of EARLY_STOPPED, FAILED"),
        ({"sort": "lr"}, "cannot sort by lr: name a column, or a parameter as p:NAME"),
        ({"whole": "1"}, "cannot use whole=1: write true or false"),
        ({"descending": "yes"}, "cannot use descending=yes: write true or false"),
        ({"limit": "0"}, "cannot use limit=0: write a number from 1 to 5000"),
        ({"limit": "5001"}, "cannot use limit=5001"),
        ({"offset": "-1"}, "cannot use offset=-1"),
        ({"text": "x" * 1001}, "cannot search for a text of 1001 characters: write at most 1000"),
        ({"conditions": "["}, "cannot read conditions: they are not a JSON array of at most 50"),
        ({"conditions": "[" * 2000}, "cannot read conditions"),
        ({"conditions": "{}"}, "cannot read conditions"),
        (
            {"conditions": json.dumps([{"name": "x", "operator": "<", "value": "1"}] * 51)},
            "cannot read conditions",
        ),
        ({"conditions": '[{"name": "lr"}]'}, 'cannot read a condition: write {"name": "lr"'),
        ({"conditions": '["lr"]'}, "cannot read a condition"),
        (
            {"conditions": '[{"name": "x", "low": 0, "words": [], "notChosen": false}]'},
            "cannot read a condition",
        ),
        (
            {"conditions": '[{"name": "x", "low": true, "high": 1, "words": [], "notChosen": false}]'},
            "cannot read a condition",
        ),
        (
            {"conditions": '[{"name": "x", "low": 0, "high": 1, "words": [2], "notChosen": false}]'},
            "cannot read a condition",
        ),
        (
            {"conditions": '[{"name": "x", "low": 0, "high": 1, "words": [], "notChosen": null}]'},
            "cannot read a condition",
        ),
        ({"conditions": '[{"name": 1, "operator": "<", "value": "1"}]'}, "cannot read a condition"),
        (
            {"conditions": '[{"name": "x", "operator": "~", "value": "1"}]'},
            "cannot use operator ~: write one of = ≠",
        ),
    ],
)
def test_invalid_queries_are_refused_with_the_remedy(view, query, told):
    response = view.ask("GET", "/trial-window", params=query)
    assert response.status_code == 400
    assert response.json()["error"].startswith(told)
