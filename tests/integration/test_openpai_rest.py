"""The REST client with a fake OpenPAI, network errors and an overloaded server."""

import logging
import threading

import pytest
from azure_here import write_certificate
from deadlines import DEADLINE_S
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
    PaiLogin,
    RequestRejected,
    address_of,
)
from nni_manager.training_services.openpai.rest import LIVE, NodeResources, OpenPai, PaiJobState, TaskStatus
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
def test_a_host_is_accepted_with_or_without_a_scheme_and_a_port_and_a_path(host, address):
    assert address_of(host) == address


@pytest.mark.parametrize("host", ["", "ftp://a", "http://", "a:port", "https://user:word@a"])
def test_an_invalid_host_is_refused_with_a_remedy(host):
    with pytest.raises(UserError, match=r"cannot use .* as the host of OpenPAI: .*; write e\.g\."):
        address_of(host)


def test_a_job_can_be_submitted_and_listed_and_stopped(server, cluster):
    cluster.submit(job_text())
    assert server.jobs[f"{USER}~job"].text == job_text()
    (row,) = cluster.jobs()
    assert (row.name, row.user, row.state) == ("job", USER, PaiJobState.WAITING)
    assert cluster.job("job").state is PaiJobState.WAITING
    assert cluster.job(f"{USER}~job").document["taskRoles"] == {}
    cluster.stop("job")
    assert cluster.job("job").state is PaiJobState.STOPPED
    assert cluster.jobs(states=LIVE) == []


def test_the_exit_code_of_a_job_is_the_exit_code_that_the_runtime_reports(server, cluster):
    cluster.submit(job_text())
    server.wait_for_job().end("FAILED", 115)
    detail = cluster.job("job")
    assert (detail.exit_code, detail.trigger) == (115, ("worker", 0))
    assert detail.reason == (
        "PAIRuntimeUnknownFailed, code 255, FailedTaskCount 1 has reached MinFailedTaskCount 1 in the TaskRole"
    )


def test_a_job_state_that_the_client_does_not_recognise_is_read_as_unknown():
    assert PaiJobState.of("PAUSED") is PaiJobState.UNKNOWN
    assert PaiJobState.of(None) is PaiJobState.UNKNOWN


@pytest.mark.parametrize(
    "status",
    [
        {"state": ["RUNNING"]},
        {"attemptId": "x"},
        {"appExitSpec": ["phrase"], "state": "FAILED"},
        "RUNNING",
        {"attemptId": {"number": 1}},
    ],
)
def test_a_malformed_job_status_is_refused_and_the_next_call_succeeds(server, cluster, status):
    cluster.submit(job_text("job"))
    for call, document in (
        (cluster.jobs, [{"name": "job", "jobStatus": status}]),
        (lambda: cluster.job("job"), {"name": "job", "jobStatus": status}),
    ):
        server.misbehave(document)
        with pytest.raises(RequestRejected, match=r"has .*state of .*; check that OpenPAI runs there"):
            call()
        assert call()


def test_job_lists_are_read_page_by_page(server, cluster, monkeypatch):
    monkeypatch.setattr(rest, "PAGE_ROWS", 3)
    for number in range(7):
        job = FakeJob(job_text(f"nni_exp_A_trial_{number}"))
        server.jobs[f"{USER}~{job.name}"] = job
    cluster.submit(job_text("another"))
    names = [row.name for row in cluster.jobs(keyword="nni_exp_A_")]
    assert names == [f"nni_exp_A_trial_{number}" for number in reversed(range(7))]
    assert server.counted()["GET", "/jobs"] == 3


# ---- retries


@pytest.mark.parametrize("how", [429, 500, 502, 503, "drop"])
def test_a_transient_error_is_retried(server, cluster, how):
    server.misbehave(how, 2)
    assert cluster.jobs() == []
    assert server.counted()["GET", "/jobs"] == 3


def test_a_submission_succeeds_if_it_is_retried_after_a_lost_response(server, cluster):
    cluster.submit(job_text("first"))
    # The server already has this job, as if the call with the lost response had created the job.
    server.jobs[f"{USER}~second"] = FakeJob(job_text("second"))
    server.misbehave("drop", at=("POST", "/jobs"))
    cluster.submit(job_text("second"))
    with pytest.raises(JobAlreadyExists, match="already exists; choose another name"):
        cluster.submit(job_text("first"))


def test_an_unavailable_cluster_is_reported_after_the_retries(server, cluster):
    server.misbehave(503, 3)
    with pytest.raises(
        ClusterUnavailable, match=r"answers 503: somewhere something failed; check that it runs"
    ):
        cluster.jobs()
    server.stop()
    with pytest.raises(ClusterUnavailable, match="the connection was refused or lost"):
        cluster.jobs()


def test_the_token_of_the_local_cluster_is_not_sent_to_a_listener_of_another_user(server):
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


def test_a_call_to_a_hanging_server_times_out(server):
    server.misbehave("hang", 2)
    retry_policy = ClientRetryPolicy(tries=2, first_s=0.001, longest_s=0.01, answer_within_s=0.2)
    with pytest.raises(ClusterUnavailable, match="the answer timed out"):
        OpenPai(server.host, USER, token=TOKEN, retry_policy=retry_policy).jobs()


def test_close_cancels_calls_that_wait_for_a_retry(server):
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
    asking.join(DEADLINE_S)
    assert len(told) == 1


# ---- logging in


def test_the_client_logs_in_again_when_its_token_expires(server):
    cluster = OpenPai(server.host, USER, password=PASSWORD, retry_policy=QUICK)
    assert cluster.jobs() == cluster.jobs() == []
    assert server.logins == 1
    server.tokens.clear()
    assert cluster.jobs() == []
    assert server.logins == 2


def test_the_client_uses_the_new_token_of_the_configuration_after_the_old_token_expired(server):
    written = ["expired"]
    cluster = OpenPai(
        *(server.host, USER),
        token="expired",
        current_login=lambda: PaiLogin(written[-1]),
        retry_policy=QUICK,
    )
    with pytest.raises(Unauthenticated):
        cluster.jobs()
    written.append(TOKEN)
    assert cluster.jobs() == []
    assert server.counted()["GET", "/jobs"] == 3


def test_an_invalid_new_token_in_the_configuration_is_refused_and_a_later_valid_token_is_used(server):
    """A token that was copied from a page with an ellipsis cannot be sent at all."""
    written = [PaiLogin("eyJh\N{HORIZONTAL ELLIPSIS}")]
    cluster = OpenPai(
        server.host, USER, token="expired", current_login=lambda: written[-1], retry_policy=QUICK
    )
    with pytest.raises(Unauthenticated, match="cannot use this token: it contains blanks or other invalid"):
        cluster.jobs()
    written.append(PaiLogin(TOKEN))
    assert cluster.jobs() == []


@pytest.mark.parametrize(
    "written_before",
    [
        PaiLogin(password=PASSWORD, source=" (/ada/config.yml)"),
        PaiLogin("expired", source=" (/ada/config.yml)"),
    ],
)
def test_the_client_uses_the_new_password_of_the_configuration_after_a_refused_login(server, written_before):
    written = [written_before]
    cluster = OpenPai(
        *(server.host, USER),
        token=written_before.token,
        password=written_before.password,
        current_login=lambda: written[-1],
        retry_policy=QUICK,
    )
    if written_before.password:
        assert cluster.jobs() == []
    server.tokens.clear()
    server.password = "another-passw0rd"
    for _ in range(2):
        with pytest.raises(Unauthenticated, match=r"; .* \(/ada/config.yml\)$"):
            cluster.jobs()
    written.append(PaiLogin(password="another-passw0rd"))
    assert cluster.jobs() == []


def test_the_client_uses_a_token_that_replaced_the_password_in_the_configuration(server):
    written = [PaiLogin(password="a-former-passw0rd")]
    cluster = OpenPai(
        *(server.host, USER),
        password="a-former-passw0rd",
        current_login=lambda: written[-1],
        retry_policy=QUICK,
    )
    with pytest.raises(Unauthenticated):
        cluster.jobs()
    written.append(PaiLogin(TOKEN))
    assert cluster.jobs() == []
    assert server.logins == 0


def test_several_threads_share_one_login(server):
    cluster = OpenPai(server.host, USER, password=PASSWORD, retry_policy=QUICK)
    threads = [threading.Thread(target=cluster.jobs) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert server.logins == 1


def test_an_expired_token_and_a_forbidden_call_raise_different_errors(server, cluster):
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
def test_the_error_of_a_failed_login_names_the_keys_to_correct(server, user, password):
    with pytest.raises(Unauthenticated, match=r"(is incorrect|is not found); correct userName and passWord"):
        OpenPai(server.host, user, password=password, retry_policy=QUICK).jobs()


def test_the_error_for_an_exceeded_rate_limit_recommends_how_to_reduce_the_number_of_calls(server, cluster):
    server.misbehave(429, 6)
    with pytest.raises(
        ClusterUnavailable, match=r"accepts only 60 such calls in its period; wait, or set `reuse: true`"
    ):
        cluster.submit(job_text())
    with pytest.raises(ClusterUnavailable, match=r"in its period; wait, or run fewer experiments at a time$"):
        cluster.jobs()


def test_a_cluster_without_passwords_refuses_a_password_and_the_error_recommends_a_token(server):
    server.authn_type = "OIDC"
    with pytest.raises(
        Unauthenticated, match=r"has no passwords \(OpenID Connect\); create an application token"
    ):
        OpenPai(server.host, USER, password=PASSWORD, retry_policy=QUICK).jobs()


def test_a_local_tunnel_with_an_untrusted_certificate_works_after_the_remedy_in_the_error(
    tmp_path, monkeypatch
):
    certificate = tmp_path / "tunnel.pem"
    write_certificate(certificate, ["localhost"])
    server = FakePai(certificate=certificate)
    server.start()
    try:
        host = f"https://localhost:{server.port}"
        with pytest.raises(
            ClusterUnavailable, match=r"name that of its CA in paiConfig\.caFile or REQUESTS_CA_BUNDLE"
        ):
            OpenPai(host, USER, token=TOKEN, retry_policy=QUICK).jobs()
        assert OpenPai(host, USER, token=TOKEN, ca_file=certificate, retry_policy=QUICK).jobs() == []
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        assert OpenPai(host, USER, token=TOKEN, retry_policy=QUICK).jobs() == []
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "gone.pem"))
        assert OpenPai(host, USER, token=TOKEN, ca_file=certificate, retry_policy=QUICK).jobs() == []
        with pytest.raises(
            ClusterUnavailable, match=r"gone\.pem \(correct paiConfig\.caFile or REQUESTS_CA_BUNDLE\)"
        ):
            OpenPai(host, USER, token=TOKEN, retry_policy=QUICK).jobs()
    finally:
        server.close()


def test_secrets_are_absent_from_messages_and_logs_and_reprs(server, caplog):
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
def test_a_malformed_token_is_not_sent(token):
    with pytest.raises(Unauthenticated, match="cannot use this token: it contains blanks") as caught:
        OpenPai("127.0.0.1", USER, token=token)
    assert token not in str(caught.value)


# ---- errors without a retry


def test_an_invalid_job_is_refused_with_a_readable_error(server, cluster):
    with pytest.raises(
        JobRefused,
        match=r"OpenPAI answers: \.jobRetryCount line 43, column 3: cannot use .*; fix the fields that the answer names",
    ):
        cluster.submit(job_text(jobRetryCount=-2))
    with pytest.raises(JobRefused, match=r"Virtual cluster none is not found; correct virtualCluster"):
        cluster.submit(job_text(defaults={"virtualCluster": "none"}))
    assert server.counted()["POST", "/jobs"] == 2


def test_an_unknown_job_and_an_unknown_path_raise_different_errors(server, cluster):
    with pytest.raises(
        JobNotOnCluster, match=r"Job ada~none is not found; list the jobs with `nnictl openpai jobs`"
    ):
        cluster.job("none")
    server.misbehave(404)
    with pytest.raises(RequestRejected):
        cluster.job("none")


def test_the_exported_config_of_a_job_has_no_secrets(server, cluster):
    cluster.submit(job_text(secrets={"word": "s3cret"}))
    text = cluster.config("job")
    assert '"secrets": "******"' in text
    assert "s3cret" not in text


def test_the_bytes_of_a_log_from_an_offset_can_be_read(server, cluster):
    cluster.submit(job_text())
    with pytest.raises(JobNotOnCluster):
        cluster.log_locations(cluster.job("job"), TaskStatus("worker", 0, 0, {}))
    job = server.wait_for_job()
    job.state, job.logs["stdout"] = "RUNNING", b"one\n"
    (task,) = cluster.job("job").tasks
    assert (task.name, task.attempt) == ("worker-0", 0)
    locations = cluster.log_locations(cluster.job("job"), task)
    assert set(locations) == {"stdout", "stderr", "all"}
    assert cluster.log(locations["stdout"]) == b"one\n"
    assert cluster.log(locations["stdout"], 4) == b""
    job.logs["stdout"] += b"two\n"
    assert cluster.log(locations["stdout"], 4) == b"two\n"


def test_storages_and_virtual_clusters_are_listed(cluster):
    assert (cluster.storages(), cluster.virtual_clusters()) == ([STORAGE], ["default", "other"])


def test_the_virtual_clusters_of_a_user_are_listed_if_openpai_returns_them(server, cluster):
    assert cluster.virtual_clusters_of_user() == ["default"]
    server.usable.clear()
    assert cluster.virtual_clusters_of_user() == []
    server.shows_rights = False
    assert cluster.virtual_clusters_of_user() is None
    for answer in ((403, "ForbiddenUserError", "not for you"), (400, "NoUserError", "who is that")):
        server.misbehave(answer)
        assert cluster.virtual_clusters_of_user() is None


def test_the_values_of_node_resources_are_none_if_openpai_does_not_report_them(server, cluster):
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


def test_an_exceeded_quota_and_a_missing_permission_raise_different_errors(server, cluster):
    server.misbehave((403, "ForbiddenUserError", "user ada exceeds the GPU quota of default"))
    with pytest.raises(QuotaExceeded, match="exceeds the GPU quota of default; the call is retried until"):
        cluster.submit(job_text())
    server.misbehave((403, "ForbiddenUserError", "user ada may not use default"))
    with pytest.raises(JobRefused, match="may not use default; ask an administrator"):
        cluster.submit(job_text())


def test_the_user_of_a_token_is_none_if_openpai_does_not_report_the_user(server, cluster):
    assert cluster.user_of_token() == USER
    server.misbehave(404)
    assert cluster.user_of_token() is None


@pytest.mark.parametrize("answer", [{"user": USER}, {"user": USER, "token": None}, {"token": 7}, ["token"]])
def test_a_login_response_without_a_token_is_refused_with_the_remedy(answer):
    class WithoutTokens(FakePai):
        async def _log_in(self, request):
            return JSONResponse(answer)

    server = WithoutTokens()
    server.start()
    cluster = OpenPai(server.host, USER, password=PASSWORD, retry_policy=QUICK)
    with pytest.raises(Unauthenticated, match=f"cannot log in as {USER}: .* has no token; use a token"):
        cluster.jobs()
    server.close()
