"""The REST client against a server that does what OpenPAI does, and what networks and overloaded servers do."""

import logging
import threading

import pytest
from fake_pai import PASSWORD, STORAGE, USER, FakeJob, FakePai
from openpai_jobs import a_job, text_of
from starlette.responses import JSONResponse
from strangers import give_away

from nni_manager.errors import UserError
from nni_manager.training_services.errors import ClusterUnavailable, QuotaExceeded, Unauthenticated
from nni_manager.training_services.openpai import rest
from nni_manager.training_services.openpai.connection import (
    JobAlreadyExists,
    JobNotOnCluster,
    JobRefused,
    RequestRejected,
    address_of,
)
from nni_manager.training_services.openpai.rest import LIVE, NodeResources, OpenPai, PaiJobState
from nni_manager.training_services.retry_policy import ClientRetryPolicy

TOKEN = "token-of-the-profile-page"
QUICK = ClientRetryPolicy(tries=3, first_s=0.001, longest_s=0.01, connect_within_s=2.0, answer_within_s=5.0)


@pytest.fixture
def server():
    server = FakePai()
    server.start()
    yield server
    server.close()


@pytest.fixture
def cluster(server):
    return OpenPai(server.host, USER, token=TOKEN, retry_policy=QUICK)


def job_text(name="job", **top):
    return text_of(a_job(name=name, **top))


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.1.1.1", "http://10.1.1.1"),
        ("10.1.1.1:9186", "http://10.1.1.1:9186"),
        ("HTTPS://pai.example.com/", "https://pai.example.com"),
        ("http://pai.example.com/submit.html?op=new", "http://pai.example.com"),
        (" pai.example.com ", "http://pai.example.com"),
        ("[::1]:80", "http://[::1]:80"),
    ],
)
def test_a_host_is_taken_with_and_without_a_scheme_and_as_a_page(host, address):
    assert address_of(host) == address


@pytest.mark.parametrize("host", ["", "ftp://a", "http://", "a:port", "https://user:word@a"])
def test_what_is_no_host_is_refused_with_a_way_out(host):
    with pytest.raises(UserError, match=r"cannot use .* as the host of OpenPAI: .*; write e\.g\."):
        address_of(host)


def test_a_job_is_handed_in_and_seen_and_stopped(server, cluster):
    cluster.submit(job_text())
    assert server.jobs[f"{USER}~job"].text == job_text()
    (row,) = cluster.jobs()
    assert (row.name, row.user, row.state) == ("job", USER, PaiJobState.WAITING)
    assert cluster.job("job").state is PaiJobState.WAITING
    assert cluster.job(f"{USER}~job").document["taskRoles"] == {}
    cluster.stop("job")
    assert cluster.job("job").state is PaiJobState.STOPPED
    assert cluster.jobs(states=LIVE) == []


def test_the_exit_code_is_the_commands_own_where_the_runtime_tells(server, cluster):
    cluster.submit(job_text())
    server.wait_for_job().end("FAILED", 115)
    detail = cluster.job("job")
    assert (detail.exit_code, detail.trigger) == (115, ("worker", 0))
    assert detail.reason == (
        "PAIRuntimeUnknownFailed, code 255, FailedTaskCount 1 has reached MinFailedTaskCount 1 in the TaskRole"
    )


def test_a_word_for_a_state_that_nobody_knows_is_no_end():
    assert PaiJobState.of("PAUSED") is PaiJobState.UNKNOWN
    assert PaiJobState.of(None) is PaiJobState.UNKNOWN


def test_pages_are_read_to_the_last(server, cluster, monkeypatch):
    monkeypatch.setattr(rest, "PAGE_ROWS", 3)
    for number in range(7):
        job = FakeJob(job_text(f"nni_exp_A_trial_{number}"))
        server.jobs[f"{USER}~{job.name}"] = job
    cluster.submit(job_text("another"))
    names = [row.name for row in cluster.jobs(keyword="nni_exp_A_")]
    assert names == [f"nni_exp_A_trial_{number}" for number in reversed(range(7))]
    assert server.counted()["GET", "/jobs"] == 3


# ---- what can be helped by trying again


@pytest.mark.parametrize("how", [429, 500, 502, 503, "drop"])
def test_a_call_is_made_again_while_that_may_help(server, cluster, how):
    server.misbehave(how, 2)
    assert cluster.jobs() == []
    assert server.counted()["GET", "/jobs"] == 3


def test_a_job_whose_answer_was_lost_is_there_once_and_that_is_no_mistake(server, cluster):
    cluster.submit(job_text("first"))
    server.jobs[f"{USER}~second"] = FakeJob(job_text("second"))  # the try whose answer was lost
    server.misbehave("drop", at=("POST", "/jobs"))
    cluster.submit(job_text("second"))
    with pytest.raises(JobAlreadyExists, match="already exists; choose another name"):
        cluster.submit(job_text("first"))


def test_a_cluster_that_stays_away_is_said_to_be_away(server, cluster):
    server.misbehave(429, 3)
    with pytest.raises(
        ClusterUnavailable,
        match=r"answers 429: Too many requests , please try again later; check that it runs",
    ):
        cluster.jobs()
    server.stop()
    with pytest.raises(ClusterUnavailable, match="the connection was refused or lost"):
        cluster.jobs()


def test_the_token_of_our_own_cluster_goes_to_nobody_else_who_has_its_port(server):
    cluster = OpenPai(server.host, USER, token=TOKEN, retry_policy=QUICK, is_own=True)
    assert cluster.jobs() == []
    cluster = OpenPai(server.host, USER, token=TOKEN, retry_policy=QUICK, is_own=True)
    asked = server.counted()
    give_away(int(server.host.rpartition(":")[2]))
    with pytest.raises(
        ClusterUnavailable, match=r"unreachable: another user of this machine .* not trusted; check"
    ):
        cluster.jobs()
    assert server.counted() == asked


def test_a_server_that_hangs_is_not_waited_for(server):
    server.misbehave("hang", 2)
    retry_policy = ClientRetryPolicy(tries=2, first_s=0.001, longest_s=0.01, answer_within_s=0.2)
    with pytest.raises(ClusterUnavailable, match="the answer timed out"):
        OpenPai(server.host, USER, token=TOKEN, retry_policy=retry_policy).jobs()


def test_closing_ends_the_waiting_of_calls(server):
    cluster = OpenPai(
        server.host, USER, token=TOKEN, retry_policy=ClientRetryPolicy(tries=5, first_s=60, longest_s=60)
    )
    server.misbehave(503, 5)
    told = []

    def ask():
        try:
            cluster.jobs()
        except ClusterUnavailable as error:
            told.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    cluster.close()
    asking.join(10)
    assert len(told) == 1


# ---- logging in


def test_a_password_gets_a_token_and_a_new_one_when_that_has_expired(server):
    cluster = OpenPai(server.host, USER, password=PASSWORD, retry_policy=QUICK)
    assert cluster.jobs() == cluster.jobs() == []
    assert server.logins == 1
    server.tokens.clear()
    assert cluster.jobs() == []
    assert server.logins == 2


def test_a_token_that_has_expired_is_replaced_by_one_that_somebody_has_written_down(server):
    written = ["expired"]
    cluster = OpenPai(server.host, USER, token="expired", newer_token=lambda: written[-1], retry_policy=QUICK)
    with pytest.raises(Unauthenticated):
        cluster.jobs()
    written.append(TOKEN)
    assert cluster.jobs() == []
    assert server.counted()["GET", "/jobs"] == 3


def test_several_threads_log_in_once(server):
    cluster = OpenPai(server.host, USER, password=PASSWORD, retry_policy=QUICK)
    threads = [threading.Thread(target=cluster.jobs) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert server.logins == 1


def test_a_token_that_has_expired_is_told_apart_from_what_is_forbidden(server, cluster):
    cluster.submit(job_text())
    server.wait_for_job().user = "somebody else"
    with pytest.raises(JobRefused, match=r"not allowed to do this operation; ask an administrator"):
        cluster.stop("job")
    server.tokens.clear()
    with pytest.raises(
        Unauthenticated, match=r"Your token is invalid; create a new token on OpenPAI's profile page"
    ):
        cluster.stop("job")


@pytest.mark.parametrize(("user", "password"), [(USER, "wrong"), ("nobody", PASSWORD)])
def test_a_wrong_login_says_what_to_correct(server, user, password):
    with pytest.raises(Unauthenticated, match=r"(is incorrect|is not found); correct userName and passWord"):
        OpenPai(server.host, user, password=password, retry_policy=QUICK).jobs()


def test_no_secret_is_in_a_message_a_log_or_a_repr(server, caplog):
    caplog.set_level(logging.DEBUG)
    clusters = [
        OpenPai(server.host, USER, token="s3cret-token", retry_policy=QUICK),
        OpenPai(server.host, USER, password=f"{PASSWORD}-wrong", retry_policy=QUICK),
    ]
    server.misbehave(500, at=("GET", "/jobs"))
    told = []
    for cluster in clusters:
        with pytest.raises(Unauthenticated) as caught:
            cluster.jobs()
        told += [str(caught.value), repr(cluster), repr(vars(cluster)["address"])]
    everything = "\n".join([*told, caplog.text])
    assert "s3cret" not in everything


@pytest.mark.parametrize("token", ["a b", "tökén", "a\nb"])
def test_what_cannot_be_a_token_is_not_sent(token):
    with pytest.raises(Unauthenticated, match="cannot use this token: it contains blanks") as caught:
        OpenPai("127.0.0.1", USER, token=token)
    assert token not in str(caught.value)


# ---- what cannot be helped


def test_a_job_that_is_wrong_is_refused_in_words_for_people(server, cluster):
    with pytest.raises(
        JobRefused,
        match=r"OpenPAI answers: \.jobRetryCount line 43, column 3: cannot use .*; fix the fields that the answer names",
    ):
        cluster.submit(job_text(jobRetryCount=-2))
    with pytest.raises(JobRefused, match=r"Virtual cluster none is not found; correct virtualCluster"):
        cluster.submit(job_text(defaults={"virtualCluster": "none"}))
    assert server.counted()["POST", "/jobs"] == 2


def test_a_job_nobody_knows_is_not_taken_for_a_server_that_is_not_openpai(server, cluster):
    with pytest.raises(
        JobNotOnCluster, match=r"Job ada~none is not found; list the jobs with `nnictl openpai jobs`"
    ):
        cluster.job("none")
    server.misbehave(404)
    with pytest.raises(RequestRejected):
        cluster.job("none")


def test_the_servers_own_description_of_a_job_is_yaml_without_secrets(server, cluster):
    cluster.submit(job_text(secrets={"word": "s3cret"}))
    text = cluster.config("job")
    assert '"secrets": "******"' in text
    assert "s3cret" not in text


def test_a_log_is_read_from_where_one_stopped(server, cluster):
    cluster.submit(job_text())
    with pytest.raises(JobNotOnCluster):
        cluster.log_locations("job", 0, "worker", 0, 0)
    job = server.wait_for_job()
    job.state, job.logs["stdout"] = "RUNNING", b"one\n"
    locations = cluster.log_locations("job", 0, "worker", 0, 0)
    assert set(locations) == {"stdout", "stderr", "all"}
    assert cluster.log(locations["stdout"]) == b"one\n"
    assert cluster.log(locations["stdout"], 4) == b""
    job.logs["stdout"] += b"two\n"
    assert cluster.log(locations["stdout"], 4) == b"two\n"


def test_what_the_cluster_has_is_listed(cluster):
    assert (cluster.storages(), cluster.virtual_clusters()) == ([STORAGE], ["default", "other"])


def test_a_users_own_virtual_clusters_are_listed_where_openpai_tells(server, cluster):
    assert cluster.virtual_clusters_of_user() == ["default"]
    server.usable.clear()
    assert cluster.virtual_clusters_of_user() == []
    server.shows_rights = False
    assert cluster.virtual_clusters_of_user() is None
    for answer in ((403, "ForbiddenUserError", "not for you"), (400, "NoUserError", "who is that")):
        server.misbehave(answer)
        assert cluster.virtual_clusters_of_user() is None


def test_what_each_node_has_is_read_as_far_as_it_is_told(server, cluster):
    assert cluster.nodes() == []
    server.nodes = {
        "of OpenPAI": {"gpuTotal": 4, "gpuUsed": 1, "gpuAvailable": 3},
        "of this machine": {"total": {"cpu": 8, "memory": 1024, "gpu": 0}, "available": {}},
        "not understood": {"gpuTotal": None},
        "no node": 7,
    }
    assert cluster.nodes() == [
        NodeResources(4, None, None),
        NodeResources(0, 8, 1024),
        NodeResources(None, None, None),
    ]
    server.misbehave(404)
    assert cluster.nodes() == []


def test_an_exceeded_quota_is_told_apart_from_a_missing_right(server, cluster):
    server.misbehave((403, "ForbiddenUserError", "user ada exceeds the GPU quota of default"))
    with pytest.raises(QuotaExceeded, match="exceeds the GPU quota of default; the call is retried until"):
        cluster.submit(job_text())
    server.misbehave((403, "ForbiddenUserError", "user ada may not use default"))
    with pytest.raises(JobRefused, match="may not use default; ask an administrator"):
        cluster.submit(job_text())


def test_a_token_says_whose_it_is_where_openpai_tells(server, cluster):
    assert cluster.user_of_token() == USER
    server.misbehave(404)
    assert cluster.user_of_token() is None


@pytest.mark.parametrize("answer", [{"user": USER}, {"user": USER, "token": None}, {"token": 7}, ["token"]])
def test_a_login_whose_answer_has_no_token_is_refused_with_the_remedy(answer):
    class WithoutTokens(FakePai):
        async def _log_in(self, request):
            return JSONResponse(answer)

    server = WithoutTokens()
    server.start()
    cluster = OpenPai(server.host, USER, password=PASSWORD, retry_policy=QUICK)
    with pytest.raises(Unauthenticated, match=f"cannot log in as {USER}: .* has no token; use a token"):
        cluster.jobs()
    server.close()
