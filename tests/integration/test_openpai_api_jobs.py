"""Jobs over the REST API on a real local OpenPAI cluster: submission, logs and refusals."""

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from deadlines import DEADLINE_S
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openpai_here import JOBS, an_openpai_here, refused
from openpai_jobs import ACCEPTED, REJECTED, WORKER, a_job, text_of
from real_experiment import wait_until

from nni_manager.local_openpai.errors import ApiError
from nni_manager.local_openpai.logs import read_log


@pytest.fixture
def here(tmp_path):
    with an_openpai_here(tmp_path) as here:
        yield here


def a_job_of(command, *changes, **top):
    """The text of a job with one small task that runs this command."""
    return text_of(
        a_job(
            ((*WORKER, "instances"), 1),
            ((*WORKER, "resourcePerInstance"), {"cpu": 0, "memoryMB": 1, "gpu": 0}),
            ((*WORKER, "commands"), [command]),
            *changes,
            **top,
        )
    )


def ended(client, name="job"):
    """Wait until a job has ended, and return the job's detail."""

    def look():
        document = client.get(f"{JOBS}/ada~{name}").json()
        return document if document["jobStatus"]["completedTime"] else None

    return wait_until(look, f"{name} has ended")


def path_of_logs(detail):
    (role,) = detail["taskRoles"].values()
    return f"/rest-server{role['taskStatuses'][0]['containerLog']}"


def links(client, detail, query=""):
    """The links to the logs of the job's only task; the keys are the names of the logs."""
    answer = client.get(path_of_logs(detail) + query)
    return {each["name"]: each["uri"] for each in answer.json().get("locations", [])}


# ---- from the submission to the end


def test_a_job_is_visible_in_the_list_the_detail_the_events_and_the_logs_from_submission_to_end(here):
    ada = here.client()
    answer = ada.submit(a_job_of("echo out; echo err >&2; exit 3", secrets={"key": "s3cr3t"}))
    assert (answer.status_code, answer.json()) == (
        202,
        {"status": 202, "message": "Update job job for user ada successfully."},
    )
    assert "ada~job" in refused(ada.submit(a_job_of("true")), 409, "ConflictJobError")
    detail = ended(ada)
    status = detail["jobStatus"]
    assert (status["state"], status["appExitCode"], status["attemptId"]) == ("FAILED", 255, 0)
    assert status["appExitMessages"]["runtime"]["originUserExitCode"] == 3
    assert status["appExitTriggerMessage"].startswith("FailedTaskCount 1 has reached MinFailedTaskCount 1")
    assert detail["taskRoles"]["worker"]["taskStatuses"][0]["containerExitCode"] == 255
    assert ada.get(f"{JOBS}/ada~job/attempts/0").json() == detail
    assert refused(ada.get(f"{JOBS}/ada~job/attempts/1"), 404, "NoJobError")
    (item,) = ada.get(JOBS).json()
    shared = item.keys() & status.keys()
    assert len(shared) >= 12
    assert {key: item[key] for key in shared} == {key: status[key] for key in shared}
    logs = links(ada, detail)
    assert here.client(None).get(logs["stdout"]).text == "out\n"
    assert here.client(None).get(logs["stderr"]).text == "err\n"
    config = ada.get(f"{JOBS}/ada~job/config")
    assert (config.headers["Content-Type"].partition(";")[0], "s3cr3t" in config.text) == ("text/yaml", False)
    events = ada.get(f"{JOBS}/ada~job/events").json()
    assert events["totalCount"] == len(events["data"]) > 0
    warnings = ada.get(f"{JOBS}/ada~job/events?type=Warning").json()["data"]
    assert warnings == [event for event in events["data"] if event["type"] == "Warning"]
    refused(ada.get(f"{JOBS}/ada~job/events?type=Other"), 400, "InvalidParametersError")
    refused(ada.get(f"{JOBS}/ada~job/ssh"), 404, "NoJobSshInfoError")


def test_the_api_paths_of_the_first_openpai_releases_are_served(here):
    ada = here.client()
    ada.submit(a_job_of("sleep 600"))
    old = "/rest-server/api/v1/user/ada/jobs"
    wait_until(lambda: ada.get(f"{old}/job").json()["jobStatus"]["state"] == "RUNNING", "the job runs")
    assert [each["name"] for each in ada.get(old).json()] == ["job"]
    assert ada.get("/rest-server/api/v1/user/bob/jobs").json() == []
    assert ada.get(f"{old}/job/config").text == ada.get(f"{JOBS}/ada~job/config").text
    refused(ada.get(f"{old}/job/ssh"), 404, "NoJobSshInfoError")
    assert ada.put(f"{old}/job/executionType", json={"value": "STOP"}).status_code == 202
    assert ended(ada)["jobStatus"]["state"] == "STOPPED"
    refused(ada.get(f"{old}/nope"), 404, "NoJobError")


def test_an_ended_job_can_be_deleted_and_its_name_can_be_reused(here):
    ada = here.client()
    ada.submit(a_job_of("sleep 600"))
    assert "stop it first" in refused(ada.delete(f"{JOBS}/ada~job"), 409, "ConflictJobError")
    stop = ada.put(f"{JOBS}/ada~job/executionType", json={"value": "STOP"})
    assert (stop.status_code, stop.json()["message"]) == (202, "Execute job ada~job successfully.")
    ended(ada)
    wait_until(lambda: ada.delete(f"{JOBS}/ada~job").status_code == 200, "the job is deleted")
    refused(ada.get(f"{JOBS}/ada~job"), 404, "NoJobError")
    assert ada.get(JOBS).json() == []
    assert ada.submit(a_job_of("true")).status_code == 202


def test_tags_can_be_used_as_a_filter_and_can_be_added_to_and_removed_from_a_job(here):
    ada = here.client()
    for name in ("a", "b"):
        ada.submit(a_job_of("true", name=name))
    answer = ada.put(f"{JOBS}/ada~a/tag", json={"value": "best so far"})
    assert answer.json() == {"status": 200, "message": "Add tag best so far for job ada~a successfully."}
    assert [each["name"] for each in ada.get(JOBS, params={"tagsContain": "best so far,x"}).json()] == ["a"]
    assert [each["name"] for each in ada.get(JOBS, params={"tagsNotContain": "best so far"}).json()] == ["b"]
    assert ada.get(f"{JOBS}/ada~a").json()["tags"] == ["best so far"]
    assert ada.delete(f"{JOBS}/ada~a/tag", json={"value": "best so far"}).status_code == 200
    ada.put(f"{JOBS}/ada~a/tag", json={"value": "other"})
    missing = ada.delete(f"{JOBS}/ada~a/tag", json={"value": "best so far"})
    assert "job ada~a are: other" in refused(missing, 404, "NoTagError")


def test_only_one_of_several_simultaneous_removals_of_a_tag_succeeds(here):
    here.client().submit(a_job_of("true", name="a"))
    here.client().put(f"{JOBS}/ada~a/tag", json={"value": "best"})
    clients = [here.client() for _ in range(8)]
    with ThreadPoolExecutor(len(clients)) as pool:
        answers = list(
            pool.map(lambda each: each.delete(f"{JOBS}/ada~a/tag", json={"value": "best"}), clients)
        )
    assert sorted(each.status_code for each in answers) == [200] + [404] * 7
    (refusal, *_) = (each for each in answers if each.status_code == 404)
    assert refused(refusal, 404, "NoTagError").endswith("the tags of job ada~a are: none")


def test_a_start_request_does_not_restart_a_stopped_job(here):
    ada = here.client()
    ada.submit(a_job_of("sleep 600"))
    for value in ("START", "STOP", "START"):
        assert ada.put(f"{JOBS}/ada~job/executionType", json={"value": value}).status_code == 202
    assert ended(ada)["jobStatus"]["state"] == "STOPPED"


def test_job_lists_are_filtered_ordered_and_paged(here):
    for number in range(5):
        here.client("bob" if number % 2 else "ada").submit(a_job_of("true", name=f"j{number}"))
    client = here.client()
    query = {"username": "ada", "order": "jobName,DESC", "limit": 2, "withTotalCount": "true"}
    document = client.get(JOBS, params=query).json()
    assert (document["totalCount"], [each["name"] for each in document["data"]]) == (3, ["j4", "j2"])
    assert [each["name"] for each in client.get(JOBS).json()] == ["j4", "j3", "j2", "j1", "j0"]
    assert "jobName" in refused(client.get(f"{JOBS}?order=name,ASC"), 400, "InvalidParametersError")


def test_a_hundred_submitted_jobs_are_listed_once_each(here, capsys):
    ada, begun_s = here.client(), time.monotonic()
    for number in range(100):
        job = a_job_of("true", ((*WORKER, "resourcePerInstance", "cpu"), 2), name=f"j{number}")
        assert ada.submit(job).status_code == 202
    submitted_s = time.monotonic() - begun_s
    listed = ada.get(f"{JOBS}?order=submissionTime,ASC").json()
    assert [each["name"] for each in listed] == [f"j{number}" for number in range(100)]
    assert len({each["debugId"] for each in listed}) == 100
    pages = [ada.get(f"{JOBS}?offset={n}&limit=20&order=jobName,ASC").json() for n in range(0, 120, 20)]
    assert sorted(each["name"] for page in pages for each in page) == sorted(f"j{n}" for n in range(100))
    asked_s = time.monotonic()
    ada.get(JOBS)
    with capsys.disabled():
        took_ms = 1000 * (time.monotonic() - asked_s)
        print(f"\n100 submissions in {submitted_s:.1f} s, a list of them in {took_ms:.0f} ms")
    here.stop_all()
    for item in ada.get(JOBS).json()[::5]:
        status = ada.get(f"{JOBS}/ada~{item['name']}").json()["jobStatus"]
        shared = item.keys() & status.keys()
        assert {key: item[key] for key in shared} == {key: status[key] for key in shared}


def test_the_api_lists_all_attempts_of_a_job_and_of_a_task(here):
    ada = here.client()
    ada.submit(a_job_of("echo $FC_FRAMEWORK_ATTEMPT_ID; exit 3", jobRetryCount=1))
    detail = ended(ada)
    status = detail["jobStatus"]
    assert (status["attemptId"], status["retries"], status["retryDetails"]["user"]) == (1, 1, 1)
    first = ada.get(f"{JOBS}/ada~job/attempts/0").json()
    assert (first["jobStatus"]["attemptId"], first["jobStatus"]["retries"]) == (0, 1)
    said = [here.client(None).get(links(ada, each)["stdout"]).text for each in (first, detail)]
    assert said == ["0\n", "1\n"]

    alone = (((*WORKER, "taskRetryCount"), 1),)
    ada.submit(a_job_of("exit 3", *alone, name="tasks", extras={"gangAllocation": False}))
    path = path_of_logs(ended(ada, "tasks"))
    assert "/attempts/0/taskRoles/worker/taskIndex/0/attempts/1/logs" in path
    history = ada.get(path.removesuffix("/1/logs")).json()
    assert [each["attemptId"] for each in history["attempts"]] == [1, 0]
    assert (history["retries"], history["accountableRetries"]) == (1, 1)


# ---- jobs that cannot run

_TEN_ALIASES = [f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 10)}]\n" for n in range(8)]
INVALID_JOBS = {
    **{name: text_of(job) for name, (job, _) in REJECTED.items()},
    "an open tag": text_of(a_job(((*WORKER, "commands"), ["echo <% $parameters.x"]))),
    "a section that does not end": text_of(a_job(((*WORKER, "commands"), ["<% #x %>"]))),
    "a tab before a key": "\tname: job\n",
    "an anchor of itself": "name: &a [*a]",
    "too deep": "extras: " + "[" * 5000,
    "aliases without end": "a: &a [1,2,3,4,5,6,7,8,9,0]\n" + "".join(_TEN_ALIASES),
    "not UTF-8": b"name: \xff\xfe",
    "a character that no text has": "name: a\x00b",
    "half a job": text_of(a_job())[:200],
    "more than the machine has": a_job_of("true", ((*WORKER, "resourcePerInstance", "cpu"), 10_000)),
    "more GPUs than the machine has": a_job_of("true", ((*WORKER, "resourcePerInstance", "gpu"), 1000)),
}
MISSING_REFERENCES = {
    "NoVirtualClusterError": a_job_of("true", defaults={"virtualCluster": "nope"}),
    "NoStorageError": a_job_of("true", extras={"storages": [{"name": "nope"}]}),
}


def test_the_refusal_of_each_invalid_job_contains_the_cause_and_a_remedy(here):
    assert len(INVALID_JOBS) >= 70
    ada = here.client()
    for name, text in INVALID_JOBS.items():
        message = refused(ada.submit(text), 400, "InvalidProtocolError")
        is_list = message.startswith("[{")
        said = [each["message"] for each in json.loads(message)] if is_list else message.splitlines()
        assert said, name
        for sentence in said:
            assert ("cannot " in sentence, "; " in sentence) == (True, True), (name, sentence)
        assert len(message) < 20_000, name
    for code, text in MISSING_REFERENCES.items():
        assert refused(ada.submit(text), 404, code).startswith("cannot find ")
    assert ada.get(f"{JOBS}?withTotalCount=true").json() == {"totalCount": 0, "data": []}
    assert list((here.cluster.settings.state_dir / "containers").iterdir()) == []
    # A refused job does not reserve its name, so new jobs can use these names.
    for name in ("job", "n"):
        assert ada.submit(a_job_of("true", name=name)).status_code == 202


def test_the_local_openpai_accepts_every_job_that_openpai_accepts(here):
    ada = here.client()
    for number, (name, job) in enumerate(ACCEPTED.items()):
        text = text_of(job).replace('"name": "job"', f'"name": "job{number}"')
        assert ada.submit(text).status_code == 202, name
    assert ada.get(f"{JOBS}?withTotalCount=true&limit=0").json()["totalCount"] == len(ACCEPTED)


# ---- logs


def test_the_log_api_returns_the_whole_log_the_tail_or_the_bytes_after_an_offset(here):
    ada, bob, guest = here.client(), here.client("bob"), here.client(None)
    ada.submit(a_job_of("seq 1 200000 | sed s/^/line-/"))
    detail, whole = ended(ada), b"".join(b"line-%d\n" % n for n in range(1, 200_001))
    uris = links(bob, detail)
    assert {"stdout", "stderr", "all"} <= uris.keys()
    answer = guest.get(uris["stdout"])
    assert (answer.status_code, answer.content == whole) == (200, True)
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert guest.get(uris["stderr"]).content == b""
    tails = links(bob, detail, "?tail-mode=true")
    assert "tail-mode=true" in links(bob, detail, "?tailMode=true")["stdout"]
    tail = guest.get(tails["stdout"])
    assert (tail.status_code, tail.content) == (206, whole[-16 * 1024 :])
    assert tail.headers["Content-Range"] == f"bytes {len(whole) - 16384}-{len(whole) - 1}/{len(whole)}"
    nothing = guest.get(tails["stderr"])
    assert (nothing.status_code, nothing.content) == (200, b"")
    part = guest.get(uris["stdout"], headers={"Range": f"bytes={len(whole) - 5}-"})
    assert (part.status_code, part.content) == (206, whole[-5:])
    nothing_new = guest.get(uris["stdout"], headers={"Range": f"bytes={len(whole)}-"})
    assert (nothing_new.status_code, nothing_new.headers["Content-Range"]) == (416, f"bytes */{len(whole)}")
    assert guest.get(uris["stdout"], headers={"Range": "bytes=5-9"}).content == whole


def test_the_log_of_a_running_job_is_followed_with_range_requests(here, tmp_path):
    ada, guest, go_on = here.client(), here.client(None), tmp_path / "go on"
    ada.submit(a_job_of(f"echo first; while ! test -e '{go_on}'; do sleep 0.05; done; echo second"))
    detail = wait_until(
        lambda: (document := ada.get(f"{JOBS}/ada~job").json())["taskRoles"] and document, "the task exists"
    )

    def stdout(since=None):
        uri = links(ada, detail).get("stdout", "/log-manager")
        return guest.get(uri, headers={} if since is None else {"Range": f"bytes={since}-"})

    wait_until(lambda: stdout().text == "first\n", "the first line is written")
    assert stdout(since=6).status_code == 416
    tail = links(ada, detail, "?tail-mode=true")["stdout"]
    assert (guest.get(tail).status_code, guest.get(tail).text) == (206, "first\n")
    assert ada.get(f"{JOBS}/ada~job").json()["jobStatus"]["state"] == "RUNNING"
    go_on.touch()
    wait_until(lambda: stdout(since=6).text == "second\n", "the second line is written")
    assert ended(ada)["jobStatus"]["state"] == "SUCCEEDED"


def test_rotated_parts_of_a_log_are_separate_logs(tmp_path):
    with an_openpai_here(tmp_path, log_file_bytes=1000) as here:
        ada, guest = here.client(), here.client(None)
        ada.submit(a_job_of("for i in $(seq 1000 1999); do echo $i; done"))
        uris = links(ada, ended(ada))
        kept = [guest.get(uris[name]).text for name in ("stdout.2", "stdout.1", "stdout")]
        assert "stdout.3" not in uris
    lines = "".join(kept).splitlines()
    assert lines == [str(number) for number in range(2000 - len(lines), 2000)]
    assert 2000 <= sum(map(len, kept)) <= 3000


def test_a_log_link_opens_only_the_named_log_and_expires_after_two_minutes(here):
    ada, guest = here.client(), here.client(None)
    ada.submit(a_job_of("echo hello"))
    link = links(ada, ended(ada))["stdout"]
    here.now_s += 119
    assert guest.get(link).text == "hello\n"
    for wrong in [
        link.replace("/stdout?", "/stderr?"),
        link.replace("/stdout?", "/..?"),
        link.replace("/stdout?", "/..%5c..%5caccounts.json?"),
        link.replace("username=ada", "username=bob"),
        link.replace("taskindex=0", "taskindex=1"),
        link.replace("taskindex=0", "taskindex=x"),
        link.replace("token=", "token=0"),
        link.replace("token=", "nothing="),
        link.replace("expires=", "expires=9"),
        link.replace("expires=", "expires=x"),
        link.partition("?")[0],
    ]:
        refused(guest.get(wrong), 401, "UnauthorizedUserError")
    for wrong in ["..%2f..%2faccounts.json", "../../accounts.json", "%2fetc%2fpasswd", ""]:
        refused(guest.get(link.replace("/stdout?", f"/{wrong}?")), 404, "NoApiError")
    here.now_s += 1
    refused(guest.get(link), 401, "UnauthorizedUserError")


HOSTILE = [
    "..",
    ".",
    "../stdout",
    "/etc/passwd",
    "user-stdout/current",
    "stdout.99",
    "stdout/../stderr",
    "a\x00b",
    "",
]


def test_an_unknown_log_name_is_refused_even_if_it_would_lead_out_of_the_log_folder(here):
    ada = here.client()
    ada.submit(a_job_of("echo hello"))
    known = links(ada, ended(ada)).keys()

    reading = here.cluster.logs_of("ada", "job", 0, "worker", 0, 0)
    folder = asyncio.run_coroutine_threadsafe(reading, here.loop).result(DEADLINE_S)

    @given(st.sampled_from(HOSTILE) | st.text().filter(lambda name: name not in known))
    @settings(suppress_health_check=list(HealthCheck))
    def is_refused(name):
        with pytest.raises(ApiError, match="cannot find the log"):
            read_log(folder, name)

    is_refused()
    assert read_log(folder, "stdout").data == b"hello\n"


def test_requests_for_unknown_tasks_and_attempts_are_refused_with_the_error_code_nojoberror(here):
    client = here.client()
    client.submit(a_job_of("true"))
    path = path_of_logs(ended(client))
    for wrong in (
        path.replace("/worker/", "/other/"),
        path.replace("taskIndex/0", "taskIndex/9"),
        path.replace("/attempts/0/taskRoles", "/attempts/3/taskRoles"),
        path.replace("/0/logs", "/7/logs"),
        path.replace("taskIndex/0", "taskIndex/9").removesuffix("/0/logs"),
        path.replace("taskIndex/0", f"taskIndex/{2**80}"),
        path.replace("/attempts/0/taskRoles", f"/attempts/{2**80}/taskRoles"),
        f"{JOBS}/ada~job/attempts/{2**80}",
        f"{JOBS}/ada~job/job-attempts/{2**80}",
    ):
        assert refused(client.get(wrong), 404, "NoJobError").startswith("cannot find ")
    history = client.get(path.removesuffix("/0/logs")).json()
    assert [each["attemptId"] for each in history["attempts"]] == [0]
    assert history["taskState"] == "SUCCEEDED"
