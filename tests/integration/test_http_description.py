"""Generated requests test the HTTP API of a real manager against its OpenAPI description."""

import contextlib
import json
import re
import socket

import pytest
import requests
import schemathesis
from amounts import amount
from deadlines import DEADLINE_S
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from real_experiment import a_started_experiment
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from strangers import session_of_another_user

ROOT = "/api/v1/nni"
TRAIN = """
import nni_sdk as nni
nni.get_next_parameter()
nni.report_intermediate_result(1)
nni.report_final_result(float("nan") if nni.get_sequence_id() else 2)
"""
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# A request that matches no operation may get these statuses. 307 redirects because of a slash, 404 means not found, and 405 means
# a wrong method. The remaining statuses refuse an invalid request.
OF_NO_OPERATION = {307, 400, 401, 404, 405, 411, 413, 431}


class Served:
    """The manager of a finished experiment. The tests send only requests that do not stop the manager."""

    def __init__(self, experiment):
        self.experiment = experiment
        self.session = requests.Session()
        self.session.trust_env = False
        self.session.headers["Authorization"] = f"Bearer {experiment.folder.process().token}"
        self.origin = f"http://127.0.0.1:{experiment.port}"
        self.trial = self.ask(f"{ROOT}/trials").json()[0]["id"]

    def ask(self, path, verb="GET", **options):
        return self.session.request(verb, self.origin + path, timeout=DEADLINE_S, **options)

    def raw(self, content):
        """Send these bytes; return the status of the response, or None if there is no response."""
        head = f"Host: 127.0.0.1\r\nAuthorization: {self.session.headers['Authorization']}\r\nConnection: close\r\n"
        with socket.create_connection(("127.0.0.1", self.experiment.port), timeout=DEADLINE_S) as peer:
            peer.sendall(content.replace(b"HEAD\r\n", head.encode()))
            answer = b""
            with contextlib.suppress(OSError):
                while piece := peer.recv(65536):
                    answer += piece
        match = re.match(rb"HTTP/1\.1 ([0-9]{3}) ", answer)
        return None if match is None else int(match[1])

    def assert_unaffected(self):
        assert self.ask(f"{ROOT}/check-status").json() == {"status": "DONE", "errors": []}
        folder = self.experiment.folder
        text = folder.manager_log.read_text() + folder.manager_stderr.read_text()
        assert "Traceback" not in text


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    with a_started_experiment(folder, TRAIN, trialConcurrency=1, maxTrialNum=2) as experiment:
        experiment.wait_for_status("DONE")
        served = Served(experiment)
        with served.session:
            yield served


@pytest.fixture
def served(stage):
    yield stage
    stage.assert_unaffected()


@pytest.fixture
def description(served):
    return served.ask(f"{ROOT}/openapi.json").json()


def test_the_description_lists_every_operation_with_its_statuses(description):
    found = {(method, path) for path, methods in description["paths"].items() for method in methods}
    assert ("get", f"{ROOT}/trials/{{trial_id}}") in found
    assert ("get", f"{ROOT}/trial-jobs/{{trial_id}}") in found
    assert ("delete", f"{ROOT}/trial-jobs/{{trial_id}}") in found
    assert ("delete", f"{ROOT}/experiment") in found
    for methods in description["paths"].values():
        for operation in methods.values():
            assert operation["summary"].endswith((".", "answers before that is done."))
            assert {"400", "401", "403"} < operation["responses"].keys()
            assert "500" not in operation["responses"]
    # schemathesis raises an error if the description is not valid OpenAPI.
    schemathesis.openapi.from_dict(description)


def test_another_user_without_the_token_cannot_read_the_openapi_description(served):
    with session_of_another_user() as another:
        response = another.get(f"{served.origin}{ROOT}/openapi.json", timeout=DEADLINE_S)
    assert response.status_code == 401
    assert response.json()["error"].startswith("cannot ")


def test_generated_requests_get_responses_that_match_the_description(served, description):
    # These operations end the manager, start trials or change limits. So this test leaves them out, and other tests cover them.
    del description["paths"][f"{ROOT}/experiment"]["delete"]
    del description["paths"][f"{ROOT}/experiment"]["put"]
    del description["paths"][f"{ROOT}/trial-jobs"]["post"]
    del description["paths"][f"{ROOT}/trials/{{trial_id}}/retry"]
    # A request for the event stream would never end. tests/integration/test_change_feed.py covers it.
    del description["paths"][f"{ROOT}/events"]
    schema = schemathesis.openapi.from_dict(description)
    schema.config.update(base_url=served.origin)
    asked = 0
    for found in schema.get_all_operations():
        operation = found.ok()
        strategies = [
            operation.as_strategy(generation_mode=mode)
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
            if mode is schemathesis.GenerationMode.POSITIVE or operation.path_parameters or operation.query
        ]

        @settings(
            max_examples=amount(5, 10),
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=st.one_of(strategies))
        def ask(case):
            nonlocal asked
            asked += 1
            response = case.call(session=served.session, timeout=DEADLINE_S)
            case.validate_response(response, checks=CHECKS)

        ask()
    assert asked > 100


def test_requests_with_existing_or_unknown_ids_get_the_statuses_that_the_description_lists(
    served, description
):
    schema = schemathesis.openapi.from_dict(description)
    for path, status in [
        (f"/trials/{served.trial}", 200),
        (f"/trials/{served.trial}/usage", 200),
        (f"/trials/{served.trial}/attempts", 200),
        (f"/trials/{served.trial}/log/stdout", 200),
        (f"/trials/{served.trial}/log/keeper?from=-100&limit=50&attempt=0&task=main-0", 200),
        (f"/trials/{served.trial}/log/stderr?attempt=0&task=..%2f..", 200),
        (f"/trials/{served.trial}/log/metrics", 404),
        (f"/trials/{served.trial}/log/stdout?limit=3", 400),
        (f"/trials/{served.trial}/log/stdout?limit=262145", 400),
        (f"/trials/{served.trial}/log/stdout?from=x", 400),
        (f"/trials/{served.trial}/log/stdout?from=--1", 400),
        (f"/trials/{served.trial}/log/stdout?from={'9' * 5000}", 400),
        ("/trials/nobody/log/stdout", 404),
        ("/trials/nobody/attempts", 404),
        ("/importance?metric=%00", 200),
        ("/changes?since=x", 200),
        ("/jobs", 200),
        ("/jobs/nope/log", 404),
        ("/experiments", 200),
        ("/configuration", 200),
        (f"/metric-data/{served.trial}?type=FINAL", 200),
        ("/metric-data-range/0/999999999999999999", 200),
        ("/metric-data-range/0/9999999999999999999", 400),
        (f"/metric-data-range/0/{'9' * 5000}", 400),
        ("/metric-data-range/-1/2", 400),
        ("/metric-data-range/٣/4", 400),
        ("/trials/%00", 404),
        ("/trials/%ff%fe", 404),
        ("/trials/..%2f..%2fetc%2fpasswd/usage", 404),
        (f"/trials/{'x' * 10_000}", 404),
        ("/metric-data?type=", 400),
        ("/metric-data?type=%00", 400),
        ("/metric-data?" + "type=FINAL&" * 1000, 200),
    ]:
        response = served.ask(ROOT + path)
        assert response.status_code == status, (path[:60], response.text[:200])
        if status != 200:
            assert response.json()["error"].startswith("cannot ")
            assert len(response.text) < 25_000
    response = served.ask(f"{ROOT}/trial-jobs/{served.trial}", "DELETE")
    assert response.status_code == 409
    assert (
        str(response.status_code)
        in schema.raw_schema["paths"][f"{ROOT}/trial-jobs/{{trial_id}}"]["delete"]["responses"]
    )


@pytest.mark.parametrize("verb", ["POST", "PUT", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "x"])
def test_http_methods_that_the_description_does_not_list_are_refused_with_405(served, description, verb):
    for path, methods in description["paths"].items():
        if verb.lower() in methods:
            continue
        names = {
            "trial_id": served.trial,
            "stream": "stdout",
            "file_name": "stdout",
            "board_id": "1",
            "digest": "0" * 64,
            "job_id": "nope",
        }
        response = served.ask(path.format(first=0, last=1, **names), verb)
        assert response.status_code == 405
        assert response.json()["error"].startswith("cannot ")


@pytest.mark.parametrize(
    "target",
    [
        "/", "//", "/..", "/../../etc/passwd", f"{ROOT}/../../../etc/passwd", f"{ROOT}//trials", f"{ROOT}/trials/",
        f"{ROOT}/trials/%2e%2e/%2e%2e", f"{ROOT}/%00", f"{ROOT}/trials/a%0d%0aX: y", "*", "http://evil.example/", "%",
        f"{ROOT}/trials/%", f"{ROOT}/trials/%zz", f"{ROOT}/openapi.json%00", f"{ROOT}/openapi.json/..", "?", "#",
    ],
)  # fmt: skip
def test_malformed_request_paths_match_no_operation(served, target):
    assert served.raw(f"GET {target} HTTP/1.1\r\nHEAD\r\n\r\n".encode()) in OF_NO_OPERATION


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=200)
    | st.tuples(
        st.sampled_from(["GET", "DELETE", "get", ""]), st.text(max_size=20), st.binary(max_size=60)
    ).map(
        lambda parts: (
            f"{parts[0]} {ROOT}/{parts[1]} HTTP/1.1\r\nHEAD\r\n".encode("utf-8", "replace")
            + parts[2]
            + b"\r\n\r\n"
        )
    )
)
def test_random_bytes_are_refused_or_receive_no_response(stage, content):
    with contextlib.suppress(TimeoutError):
        assert stage.raw(content + b"\r\n\r\n") in {*OF_NO_OPERATION, 200, None}


@pytest.mark.parametrize(
    "body",
    [
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n-1\r\nx\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"Content-Length: -1\r\n\r\n",
        b"Content-Length: 99999999999999999999\r\n\r\n",
        b"Content-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
        b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n",
    ],
)
def test_malformed_request_bodies_are_refused(served, body):
    status = served.raw(
        b"DELETE " + f"{ROOT}/trial-jobs/{served.trial}".encode() + b" HTTP/1.1\r\nHEAD\r\n" + body
    )
    assert status in {None, 400, 409, 411, 413, 501}


def test_the_api_returns_the_attempts_and_logs_of_a_trial(served):
    (attempt,) = served.ask(f"{ROOT}/trials/{served.trial}/attempts").json()
    (task,) = attempt["tasks"]
    assert (attempt["attempt"], task["task"]) == (0, "main-0")
    log = served.ask(f"{ROOT}/trials/{served.trial}/log/keeper").json()
    assert log["size"] == log["next"] == task["streams"]["keeper"] == len(log["text"].encode())
    assert served.trial in log["text"]
    tail = served.ask(f"{ROOT}/trials/{served.trial}/log/keeper?from=-20").json()
    assert (tail["text"], tail["from"]) == (log["text"][-20:], log["size"] - 20)


def test_the_api_lists_the_trials_of_each_job_and_the_url_of_each_experiment(served):
    jobs = served.ask(f"{ROOT}/jobs").json()
    assert [job["state"] for job in jobs] == ["ended", "ended"]
    assert sorted(trial for job in jobs for trial in job["trialIds"]) == sorted(
        trial["id"] for trial in served.ask(f"{ROOT}/trials").json()
    )
    (own,) = [each for each in served.ask(f"{ROOT}/experiments").json() if each["here"]]
    assert (own["id"], own["status"], own["url"]) == ("TESTEXPT", "DONE", served.origin)


def test_responses_are_strict_json_without_nan(served):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    for path in ("/trials", "/summary", "/experiment", "/metric-data", "/export-data", "/changes"):
        json.loads(served.ask(ROOT + path).text, parse_constant=refuse)
