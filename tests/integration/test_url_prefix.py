"""A manager whose addresses have a path prefix, for a proxy that several servers share."""

import re

import pytest
import requests
from deadlines import DEADLINE_S
from made_experiment import made_experiment, served_view

from nni_manager.support.web_server_options import WebServerOptions

PREFIX = "/lab/digits_1"
ROOT = f"{PREFIX}/api/v1/nni"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    experiment = made_experiment(tmp_path_factory.mktemp("prefix"), 3)
    with served_view(experiment.folder, web=WebServerOptions(url_prefix=PREFIX)) as view:
        yield view


def fetch(served, path, **options):
    with requests.Session() as session:
        session.trust_env = False
        url = f"http://127.0.0.1:{served.port}{path}"
        return session.get(url, allow_redirects=False, timeout=DEADLINE_S, **options)


def test_the_api_is_served_only_below_the_prefix(served):
    assert served.get("/check-status")["status"] == "DONE"
    assert served.get("/experiment-metadata")["prefixUrl"] == PREFIX
    assert served.get("/experiment-metadata")["webuiUrl"] == [f"http://127.0.0.1:{served.port}{PREFIX}"]
    paths = served.get("/openapi.json")["paths"]
    assert all(path.startswith(f"{ROOT}/") for path in paths)
    for path in ("/", "/api/v1/nni/check-status", "/oview", f"{PREFIX}x/oview", "/lab", "/lab/"):
        answer = fetch(served, path)
        assert answer.status_code == 404, path
        assert answer.json()["error"].endswith(f"start with {PREFIX}/; add that")


def test_the_error_for_an_unknown_path_names_the_api_description_with_its_prefix(served):
    assert f"; {ROOT}/openapi.json lists the paths" in served.ask("GET", "/absent").json()["error"]


def test_redirects_keep_the_url_prefix(served):
    assert fetch(served, PREFIX).headers["Location"] == f"{PREFIX}/"
    assert fetch(served, f"{PREFIX}/").headers["Location"] == f"{PREFIX}/oview"
    token = {"Authorization": f"Bearer {served.process.token}"}
    assert fetch(served, f"{ROOT}/trials/", headers=token).headers["Location"].endswith(f"{ROOT}/trials")


def test_the_document_of_the_page_refers_to_files_below_the_prefix(served):
    document = fetch(served, f"{PREFIX}/oview").text
    references = re.findall(r'(?:href|src)="([^"]+)"', document)
    assert len(references) > 20
    for path in references:
        assert path.startswith(f"{PREFIX}/page/")
        assert fetch(served, path).status_code == 200, path


def test_a_server_with_a_url_prefix_requires_the_token_even_from_programs_of_the_same_user(served):
    assert fetch(served, f"{ROOT}/trials").status_code == 401


def test_the_session_cookie_is_limited_to_the_url_prefix(served):
    for proto, is_secure in ((None, False), ("https", True)):
        answer = requests.post(
            f"http://127.0.0.1:{served.port}{ROOT}/session",
            json={"code": served.session_auth.new_login_code()},
            headers={} if proto is None else {"X-Forwarded-Proto": proto},
            timeout=DEADLINE_S,
        )
        flags = answer.headers["Set-Cookie"].split("; ")
        assert f"Path={PREFIX}" in flags
        assert ("Secure" in flags) is is_secure
