"""A manager that serves HTTPS with a certificate from files, on loopback and beyond loopback."""

import dataclasses
import os
import shutil
import socket
import ssl
import subprocess

import pytest
import requests
from another_user import AS_NOBODY
from deadlines import DEADLINE_S
from real_experiment import RealExperiment, wait_until
from tls_files import LOCAL, issue

from nni_manager.client.experiments import known_experiment
from nni_manager.client.manager_client import ManagerClient, ManagerUnresponsive, api_url, session_with
from nni_manager.client.watch import follow
from nni_manager.support.web_server_options import WebServerOptions

ENDLESS = "import signal; signal.pause()\n"


def started(folder, files, *options):
    experiment = RealExperiment(folder, ENDLESS, maxTrialNum=1)
    experiment.create()
    web = WebServerOptions(tls=files)
    experiment.start(options=[*web.arguments()[2:], *options])
    return experiment


@pytest.fixture
def files(tmp_path):
    return issue(tmp_path / "tls", (*LOCAL, "lab.example"))


@pytest.fixture
def running(tmp_path, files):
    experiment = started(tmp_path / "made", files)
    yield experiment
    experiment.close()


def presented(port):
    """The certificate that the server presents to a new connection."""
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=DEADLINE_S)


def test_a_manager_on_loopback_serves_https_with_the_certificate_from_the_files(running, files):
    assert running.folder.process().base_url == f"https://127.0.0.1:{running.port}"
    assert running.summary()["id"] == "TESTEXPT"
    url = f"https://localhost:{running.port}/livez"
    assert requests.get(url, verify=files.certificate, timeout=DEADLINE_S).text == "ok\n"
    with pytest.raises(requests.exceptions.SSLError):
        requests.get(url, timeout=DEADLINE_S)
    with socket.create_connection(("127.0.0.1", running.port), timeout=DEADLINE_S) as plain:
        plain.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"ok" not in plain.recv(1000)
    # Certificate files do not change how keepers on this machine connect, so the trial must run.
    wait_until(lambda: running.summary()["counts"]["RUNNING"] == 1, "the trial runs")


def test_nnictl_does_not_connect_to_a_server_with_another_certificate(running, tmp_path, files):
    process = running.folder.process()
    other = issue(tmp_path / "other").read()
    wrong = dataclasses.replace(process, certificate_sha256=other.sha256)
    with pytest.raises(ManagerUnresponsive, match="the server there has another certificate"):
        ManagerClient("TESTEXPT", wrong).summary()


def test_curl_run_by_the_same_user_needs_the_certificate_but_no_token(running, files):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["curl", "--silent", "--show-error", "--cacert", files.certificate]
    done = subprocess.run(
        [*command, f"https://127.0.0.1:{running.port}/api/v1/nni/check-status"],
        capture_output=True,
        check=True,
    )
    assert b'"status"' in done.stdout


def test_another_user_of_the_machine_needs_the_token_over_tls(running):
    if shutil.which("curl") is None or os.geteuid() != 0:
        pytest.skip("needs curl, and root to run it as another user")
    statuses = []
    for path in ("livez", "api/v1/nni/check-status"):
        # The user nobody cannot read the certificate file, so curl runs without a check of the certificate.
        asked = ["curl", "--silent", "--insecure", "--output", "/dev/null", "--write-out", "%{http_code}"]
        url = f"https://127.0.0.1:{running.port}/{path}"
        done = subprocess.run([*AS_NOBODY, *asked, url], capture_output=True, text=True, check=True)
        statuses.append(done.stdout)
    assert statuses == ["200", "401"]


def test_requests_are_accepted_only_for_host_names_of_the_certificate(running, files):
    for host, status in (("lab.example", 200), ("LAB.example:8443", 200), ("evil.example", 400)):
        answer = requests.get(
            f"https://localhost:{running.port}/livez",
            headers={"Host": host},
            verify=files.certificate,
            timeout=DEADLINE_S,
        )
        assert answer.status_code == status, host


def test_a_renewed_certificate_is_used_without_a_restart(running, files):
    before = running.folder.process()
    with session_with(before) as session:
        assert session.get(f"{api_url(before)}/check-status", timeout=DEADLINE_S).status_code == 200
        issue(files.certificate.parent)
        renewed = files.read().sha256
        wait_until(
            lambda: running.folder.process().certificate_sha256 == renewed,
            "the record has the new fingerprint",
        )
        wait_until(
            lambda: presented(running.port) == files.certificate.read_text(),
            "new connections get the certificate",
        )
        # This session was opened before the renewal, which must not close its connection.
        assert session.get(f"{api_url(before)}/check-status", timeout=DEADLINE_S).status_code == 200
    assert running.summary()["id"] == "TESTEXPT"
    assert running.folder.held_process(running.manager.pid) == running.folder.process()
    assert (
        f"the certificate was renewed, its fingerprint is {renewed}" in running.folder.manager_log.read_text()
    )


def test_the_previous_certificate_is_used_until_both_certificate_and_key_file_are_renewed(
    running, files, tmp_path
):
    before = files.certificate.read_text()
    later = issue(tmp_path / "later")
    shutil.copy(later.certificate, files.certificate)
    wait_until(
        lambda: (
            "the former certificate is still used: cannot use --tls-key"
            in running.folder.manager_log.read_text()
        ),
        "the manager has noticed the change",
    )
    assert presented(running.port) == before
    assert running.summary()["id"] == "TESTEXPT"
    later.key.replace(files.key)
    wait_until(
        lambda: presented(running.port) == later.certificate.read_text(),
        "new connections get the certificate",
    )
    assert running.summary()["id"] == "TESTEXPT"


def test_a_manager_beyond_loopback_publishes_the_host_name_from_its_certificate_file(tmp_path, files):
    experiment = RealExperiment(tmp_path / "made", ENDLESS, maxTrialNum=1)
    experiment.create()
    experiment.start(host="0.0.0.0", options=WebServerOptions(tls=files).arguments()[2:])
    try:
        process = experiment.folder.process()
        assert process.certificate_host == "localhost"
        assert process.certificate_sha256 == files.read().sha256
        assert presented(experiment.port) == files.certificate.read_text()
        assert not (experiment.folder.path / "tls.pem").exists()
    finally:
        experiment.close()


def test_a_manager_does_not_start_with_a_key_file_that_other_users_can_read(tmp_path, files):
    files.key.chmod(0o644)
    with pytest.raises(AssertionError, match=r"cannot use --tls-key .* lets other users read"):
        started(tmp_path / "made", files)


def test_a_client_with_the_previous_certificate_can_follow_the_experiment_after_a_renewal(tmp_path, files):
    experiment = RealExperiment(tmp_path / "made", "pass\n", maxTrialNum=1)
    experiment.create()
    experiment.start(options=WebServerOptions(tls=files).arguments()[2:])
    try:
        known = known_experiment(experiment.folder)
        experiment.wait_for_status("DONE")
        renewed = issue(files.certificate.parent).read().sha256
        wait_until(
            lambda: experiment.folder.process().certificate_sha256 == renewed, "the certificate is renewed"
        )
        assert known.manager.certificate_sha256 != renewed
        assert follow(known, show=lambda _: None)["status"] == "DONE"
    finally:
        experiment.close()
