"""Changes of an experiment, for clients that poll and for clients that follow the event stream."""

import asyncio
import contextlib
import gzip
import json
import socket
import threading
import time
from dataclasses import replace

import pytest
import requests
from attempts import attempt_id
from deadlines import DEADLINE_S
from made_experiment import events_of, made_experiment, made_trial, served_view, write

from nni_manager.domain.events import (
    AttemptStarted,
    ManagerReady,
    MetricsStored,
    ParametersSuggested,
    TaskReported,
)
from nni_manager.domain.experiment import ExperimentCore
from nni_manager.domain.objectives import MAXIMIZE
from nni_manager.domain.search_budget import Limits
from nni_manager.engine import stored_experiment
from nni_manager.engine.snapshot import ExperimentSnapshot
from nni_manager.engine.stored_experiment import StoredExperimentReader
from nni_manager.store.rows import trial_row
from nni_manager.web import change_feed
from nni_manager.web.change_feed import ChangeFeed, Cursor
from trial_keeper.wire.messages import AttemptKey


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    experiment = made_experiment(tmp_path_factory.mktemp("live"), 300)
    with served_view(experiment.folder) as view:
        yield view


@pytest.fixture
def a_snapshot(tmp_path):
    """A snapshot of a running experiment."""
    stored = ExperimentSnapshot.stored(made_experiment(tmp_path, 0).folder)
    experiment = ExperimentCore("TESTEXPT", Limits(100, None, 200, None, 0), MAXIMIZE)
    experiment.handle(ManagerReady(), 0.0)
    return replace(stored, experiment=experiment)


def begin(experiment, number):
    experiment.handle(ParametersSuggested(f"t{number}", number, {"x": number}, {}, 1.0), 1.0)


def document_of(live, since=None, **options):
    async def ask():
        return b"".join([piece async for piece in live.delta(since, **options)])

    return json.loads(asyncio.run(ask()))


def test_the_first_poll_returns_all_trials_and_later_polls_return_only_changes(a_snapshot):
    experiment = a_snapshot.experiment
    for number in range(5):
        begin(experiment, number)
    feed = ChangeFeed(lambda: a_snapshot)
    first = document_of(feed)
    assert first["reset"] is True
    assert sorted(row["seq"] for row in first["trials"]) == [0, 1, 2, 3, 4]
    assert first["summary"]["id"] == "TESTEXPT"
    assert document_of(feed, Cursor.read(first["version"]))["trials"] == []
    key = AttemptKey("t3", attempt_id(0), "main-0")
    experiment.handle(AttemptStarted(key, 2.0), 2.0)
    experiment.handle(TaskReported(key), 2.0)
    started = document_of(feed, Cursor.read(first["version"]))
    assert [row["state"] for row in started["trials"]] == ["RUNNING"]
    experiment.handle(MetricsStored(key, ((False, '{"default": 0.5, "loss": 1}'),)), 3.0)
    second = document_of(feed, Cursor.read(started["version"]))
    assert second["reset"] is False
    (row,) = second["trials"]
    assert (row["id"], row["state"], row["latest"], row["count"]) == ("t3", "RUNNING", 0.5, 1)
    assert document_of(feed, Cursor.read(second["version"]))["trials"] == []


def test_a_client_that_loads_windows_receives_no_rows_if_more_than_max_rows_have_changed(
    a_snapshot, monkeypatch
):
    monkeypatch.setattr(change_feed, "MAX_ROWS", 5)
    monkeypatch.setattr(change_feed, "INTERVAL_S", 0.0)
    for number in range(5):
        begin(a_snapshot.experiment, number)
    feed = ChangeFeed(lambda: a_snapshot)
    few = document_of(feed, may_window=True)
    assert (len(few["trials"]), "windowed" in few) == (5, False)
    begin(a_snapshot.experiment, 5)
    # The cursor in this request shows that the client already has trials 0 to 4.
    assert [
        row["id"] for row in document_of(feed, Cursor.read(few["version"]), may_window=True)["trials"]
    ] == ["t5"]
    many = document_of(feed, may_window=True)
    assert (many["reset"], many["windowed"], many["trials"]) == (True, True, [])
    assert many["summary"]["trialCount"] == 6
    begin(a_snapshot.experiment, 6)
    changes = document_of(feed, Cursor.read(many["version"]), may_window=True)
    assert (changes["reset"], [row["id"] for row in changes["trials"]]) == (False, ["t6"])
    # The client has not polled for a long time, and more trials have changed than one response may contain.
    for number in range(7, 13):
        begin(a_snapshot.experiment, number)
    late = document_of(feed, Cursor.read(many["version"]), may_window=True)
    assert (late["reset"], late["windowed"], late["trials"]) == (True, True, [])
    assert len(document_of(feed)["trials"]) == 13, "another client gets all"


def test_a_row_is_serialised_once_per_change_of_its_trial(a_snapshot, monkeypatch):
    written = []
    row_view = change_feed.row_view
    monkeypatch.setattr(
        change_feed, "row_view", lambda trial: written.append(trial.trial_id) or row_view(trial)
    )
    for number in range(50):
        begin(a_snapshot.experiment, number)
    feed = ChangeFeed(lambda: a_snapshot)
    first = document_of(feed)
    assert len(document_of(feed)["trials"]) == 50
    a_snapshot.experiment.handle(AttemptStarted(AttemptKey("t7", attempt_id(0), "main-0"), 2.0), 2.0)
    document_of(feed, Cursor.read(first["version"]))
    assert len(document_of(feed)["trials"]) == 50
    assert sorted(written) == sorted([*(f"t{number}" for number in range(50)), "t7"])


def test_the_next_response_has_the_new_state_of_a_trial_that_changes_during_a_slow_response(
    tmp_path, monkeypatch
):
    """`nnictl view` replaces its trials at each poll of the store, so a slow response may contain outdated trials."""
    monkeypatch.setattr(stored_experiment, "_POLL_INTERVAL_S", 0.0)
    stored = made_experiment(tmp_path, 1000).folder
    with contextlib.closing(StoredExperimentReader(stored)) as looked:
        feed = ChangeFeed(looked.snapshot)

        async def ask_slowly():
            pieces = feed.delta(None)
            slow = [await anext(pieces), await anext(pieces)]
            write(stored, trial_row(made_trial(999, time.time(), -1.0)))
            # Simulate a request of another client, which polls the store.
            looked.snapshot()
            return [*slow, *[piece async for piece in pieces]]

        asyncio.run(ask_slowly())
        rows = {row["id"]: row for row in document_of(feed)["trials"]}
    assert rows["00999"]["value"] == -1.0


@pytest.mark.parametrize(
    "text", ["", "x", "1.2", "a.1.2.3", "a.-1.0", f"a.{'9' * 400}.0", "a.٣.0", "other.1.1"]
)
def test_a_poll_returns_all_trials_if_its_version_is_invalid_or_belongs_to_another_process(a_snapshot, text):
    begin(a_snapshot.experiment, 0)
    document = document_of(ChangeFeed(lambda: a_snapshot), Cursor.read(text))
    assert (document["reset"], len(document["trials"])) == (True, 1)


def test_a_poll_returns_all_trials_if_its_version_is_newer_than_the_current_version(a_snapshot):
    begin(a_snapshot.experiment, 0)
    feed = ChangeFeed(lambda: a_snapshot)
    version = Cursor.read(document_of(feed)["version"])
    assert document_of(feed, replace(version, revision=version.revision + 1))["reset"] is True


def test_a_long_value_is_truncated_in_its_row_and_the_row_has_a_cut_flag(a_snapshot):
    long, short = "x" * 5000, "y" * 256
    values = {"a": long, "b": [long], "c": short, "d": 1.5, "e": None, "f": {"g": 1}}
    a_snapshot.experiment.handle(ParametersSuggested("t0", 0, values, {}, 1.0), 1.0)
    (row,) = document_of(ChangeFeed(lambda: a_snapshot))["trials"]
    assert row["cut"] is True
    assert len(json.dumps(row)) < 2000
    assert row["parameters"] | {"a": 0, "b": 0} == values | {"a": 0, "b": 0}
    assert row["parameters"]["a"] == "x" * 256 + "…"


def test_a_nan_metric_is_null_in_its_row(a_snapshot):
    begin(a_snapshot.experiment, 0)
    a_snapshot.experiment.trials["t0"].run.value = float("nan")
    (row,) = document_of(ChangeFeed(lambda: a_snapshot))["trials"]
    assert row["value"] is None


# ---- over HTTP


def test_changes_are_compressed_if_the_client_accepts_gzip(served):
    plain = served.ask("GET", "/changes", headers={"Accept-Encoding": "identity"})
    packed = served.ask("GET", "/changes", headers={"Accept-Encoding": "gzip"}, stream=True)
    raw = packed.raw.read(decode_content=False)
    assert "Content-Encoding" not in plain.headers
    assert packed.headers["Content-Encoding"] == "gzip"
    assert len(raw) * 5 < len(plain.content)
    assert len(json.loads(gzip.decompress(raw))["trials"]) == len(plain.json()["trials"]) == 300
    refused = served.ask("GET", "/changes", headers={"Accept-Encoding": "gzip;q=0"})
    assert "Content-Encoding" not in refused.headers


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_the_event_stream_sends_changes_and_keepalives(served, monkeypatch, encoding):
    monkeypatch.setattr(change_feed, "INTERVAL_S", 0.05)
    monkeypatch.setattr(change_feed, "KEEPALIVE_INTERVAL_S", 0.2)
    with contextlib.closing(
        served.ask("GET", "/events", headers={"Accept-Encoding": encoding}, stream=True)
    ) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        events = events_of(response)
        first = next(events)
        assert (first["reset"], len(first["trials"])) == (True, 300)
        write(served.folder, trial_row(made_trial(7, time.time(), 0.5)))
        second = next(events)
        assert (second["reset"], [row["id"] for row in second["trials"]]) == (False, ["00007"])
        version = second["version"]
        line = next(line for line in response.iter_lines() if line.startswith(b":"))
        assert line == b": nothing new"
    assert served.get(f"/changes?since={version}")["trials"] == []


def test_a_reconnected_follower_receives_only_changes_since_the_version_that_it_names(served, monkeypatch):
    monkeypatch.setattr(change_feed, "INTERVAL_S", 0.05)
    version = served.get("/changes")["version"]
    write(served.folder, trial_row(made_trial(8, time.time(), 0.25)))
    with contextlib.closing(served.ask("GET", f"/events?since={version}", stream=True)) as response:
        first = next(events_of(response))
        assert (first["reset"], [row["id"] for row in first["trials"]]) == (False, ["00008"])


def test_the_number_of_followers_is_limited_and_another_follower_is_admitted_after_a_disconnect(
    served, monkeypatch
):
    monkeypatch.setattr("nni_manager.web.api.MAX_FOLLOWERS", 3)
    with contextlib.ExitStack() as stack:
        following = []
        for _ in range(3):
            response = stack.enter_context(contextlib.closing(served.ask("GET", "/events", stream=True)))
            following.append(events_of(response))
            next(following[-1])
        refused = served.ask("GET", "/events")
        assert refused.status_code == 503
        assert refused.json()["error"].endswith("; poll /changes")
        assert served.get("/changes")["summary"]["id"] == "TESTEXPT"
    deadline_s = time.monotonic() + DEADLINE_S
    while True:  # retry until the server has detected that the followers have disconnected
        with contextlib.closing(served.ask("GET", "/events", stream=True)) as response:
            if response.status_code == 200:
                break
        assert time.monotonic() < deadline_s, "the places of disconnected followers are not free"


def test_the_limit_of_followers_also_holds_if_many_clients_connect_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setattr("nni_manager.web.api.MAX_FOLLOWERS", 5)
    experiment = made_experiment(tmp_path, 300)
    with served_view(experiment.folder) as view, contextlib.ExitStack() as stack:
        request = (
            b"GET /api/v1/nni/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
            + view.session_auth.token.encode()
            + b"\r\n\r\n"
        )
        # In the second round, the server accepts five clients only if it has removed the followers of the first round.
        for _ in range(2):
            peers = [
                stack.enter_context(socket.create_connection(("127.0.0.1", view.port), timeout=DEADLINE_S))
                for _ in range(30)
            ]
            for peer in peers:
                peer.sendall(request)
            statuses = [peer.recv(12).split()[1] for peer in peers]
            assert (statuses.count(b"200"), statuses.count(b"503")) == (5, 25)
            for peer in peers:
                peer.close()
            deadline_s = time.monotonic() + DEADLINE_S
            while view.server.server_state.connections:
                assert time.monotonic() < deadline_s, "their connections are not closed"
                threading.Event().wait(0.05)


def test_a_follower_that_does_not_read_is_disconnected_and_delays_no_other_client(tmp_path, monkeypatch):
    monkeypatch.setattr("nni_manager.support.http_server.READ_TIMEOUT_S", 1.0)
    monkeypatch.setattr(change_feed, "INTERVAL_S", 0.01)
    experiment = made_experiment(tmp_path, 5000)
    with served_view(experiment.folder) as view, socket.create_connection(("127.0.0.1", view.port)) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.sendall(
            b"GET /api/v1/nni/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
            + view.session_auth.token.encode()
            + b"\r\n\r\n"
        )
        assert peer.recv(1) == b"H"
        assert len(view.get("/changes")["trials"]) == 5000
        deadline_s = time.monotonic() + DEADLINE_S
        while view.server.server_state.connections:
            assert time.monotonic() < deadline_s, "the server still has the connection"
            threading.Event().wait(0.05)


def test_the_shutdown_of_the_server_does_not_wait_for_followers(tmp_path):
    experiment = made_experiment(tmp_path, 1)
    with served_view(experiment.folder) as view:
        response = view.ask("GET", "/events", stream=True)
        events = events_of(response)
        next(events)
        began_s = time.monotonic()
        view.server.config.timeout_graceful_shutdown = 1000
        view.server.end()
        with contextlib.suppress(requests.RequestException):
            for _ in events:
                pass
        response.close()
    assert time.monotonic() - began_s < DEADLINE_S / 2, "the shutdown waited for an endless response"
